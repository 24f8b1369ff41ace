"""Images a second of the 15 corruptions: `python -m benchmarks.corruptions`.

On the CPU beside the package `imagecorruptions-imaug`, same images, taking turns; on a GPU
(`--device cuda`) ours alone. Severity 5, 224 pixels, medians of a few rounds after one to warm up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fata.corruptions import NAMES, corrupt


def seconds(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median time of each, the device's work included; they take turns."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, times in zip(works, taken, strict=True):
            _wait()
            start = time.perf_counter()
            work()
            _wait()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[1:]) for times in taken]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def photographs(n: int) -> torch.Tensor:
    """Smooth coloured pictures with some detail, in whole bytes."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 14, 14, generator=generator)
    fine = torch.rand(n, 3, 224, 224, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, 224, mode="bicubic").clamp(0, 1)
    return ((0.8 * smooth + 0.2 * fine) * 255).round() / 255


def reference(images: np.ndarray, name: str) -> None:
    """The package's, one image after the other."""
    import imagecorruptions

    for image in images:
        imagecorruptions.corrupt(image, 5, name)


def main() -> None:
    """Print one line a corruption and the mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=32, help="in a batch")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    images = photographs(options.images).to(options.device)
    few = (images[:8].permute(0, 2, 3, 1) * 255).round().byte().cpu().numpy()
    print(f"{'images a second':20}{'fata':>10}{'reference':>12}{'ratio':>8}")
    ours, theirs = [], []
    for name in NAMES:
        works: list[Callable[[], object]] = [partial(corrupt, images, name, 5)]
        if options.device == "cpu":
            works.append(partial(reference, few, name))
        took, *beside = seconds(works, options.rounds)
        ours.append(took / len(images))
        line = f"{name:20}{1 / ours[-1]:10.0f}"
        for took in beside:
            theirs.append(took / len(few))
            line += f"{1 / theirs[-1]:12.0f}{theirs[-1] / ours[-1]:8.1f}"
        print(line, flush=True)
    line = f"{'mean over the 15':20}{len(ours) / sum(ours):10.0f}"
    if theirs:
        line += f"{len(theirs) / sum(theirs):12.0f}{sum(theirs) / sum(ours):8.1f}"
    print(line)


if __name__ == "__main__":
    main()
