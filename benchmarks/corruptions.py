"""Images a second of the 15 corruptions: `python -m benchmarks.corruptions`.

On the CPU beside the package `imagecorruptions-imaug`, same images, in one run; on a GPU
(`--device cuda`) ours alone. Severity 5, 224 pixels, medians of a few rounds after one to warm up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fata.corruptions import NAMES, corrupt


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Median time of a few calls, the device's work included."""
    work()
    taken = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def photographs(n: int) -> torch.Tensor:
    """Smooth coloured pictures with some detail, in whole bytes."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 14, 14, generator=generator)
    fine = torch.rand(n, 3, 224, 224, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, 224, mode="bicubic").clamp(0, 1)
    return ((0.8 * smooth + 0.2 * fine) * 255).round() / 255


def main() -> None:
    """Print one line a corruption and the mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=32, help="in a batch")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    images = photographs(options.images).to(options.device)
    reference = None
    if options.device == "cpu":
        import imagecorruptions

        reference = imagecorruptions.corrupt
    few = (images[:4].permute(0, 2, 3, 1) * 255).round().byte().cpu().numpy()
    print(f"{'images a second':20}{'fata':>10}{'reference':>12}{'ratio':>8}")
    ours, theirs = [], []
    for name in NAMES:
        took = seconds(lambda name=name: corrupt(images, name, 5), options.rounds)
        ours.append(took / len(images))
        line = f"{name:20}{1 / ours[-1]:10.0f}"
        if reference is not None:
            took = seconds(lambda name=name: [reference(p, 5, name) for p in few], options.rounds)
            theirs.append(took / len(few))
            line += f"{1 / theirs[-1]:12.0f}{theirs[-1] / ours[-1]:8.1f}"
        print(line, flush=True)
    line = f"{'mean over the 15':20}{len(ours) / sum(ours):10.0f}"
    if theirs:
        line += f"{len(theirs) / sum(theirs):12.0f}{sum(theirs) / sum(ours):8.1f}"
    print(line)


if __name__ == "__main__":
    main()
