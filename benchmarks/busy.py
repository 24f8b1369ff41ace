"""Whether decoding keeps the device busy: `python -m benchmarks.busy`.

    python -m benchmarks.busy
    python -m benchmarks.busy --data ImageNet-C --workers 8
    python -m benchmarks.busy --device cpu --model resnet_gn --images 2000

JPEG files go through an adapter as `fata bench` sends them. Beside that, in the same run: the
adapter alone, with images that are on the device already, and decoding alone. The device is busy
for the share of the time that the adapter alone would need; copying to it counts as idle, compiling
not at all.

Without `--data` the files are written first, as ImageNet-C's lie. Random weights, a learning rate
near zero and a threshold that a share of the images is below: see `benchmarks/share.py`. No guard.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo

import fata
from benchmarks import share as shares
from benchmarks.race import wait
from benchmarks.share import Share
from benchmarks.speed import SPECS, conditions, markdown
from fata.bench.cost import Macs, passes
from fata.bench.run.image_cache import ImageCache, free_memory
from fata.bench.run.measure import measure
from fata.bench.run.runner import CellRunner
from fata.data import Stream, serve
from fata.zoo import Loaded, Weights, ZooError
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

SIDE, QUALITY = 224, 90
PICTURES = 256  # that differ; the other files are links to these
SHARE = 0.4  # of the rows that a term selects
HELD = 8  # batches that the adapter alone meets; thresholds are set by them
TURNS = 16  # times, on a GPU, after as many as compile what even one of them needs


@dataclass(frozen=True)
class Busy:
    """Images a second, and what follows.

    Args:
        stream: through the adapter, from the files.
        alone: through the adapter, from the device.
        decoding: from the files to the device.
        selected: the share of the stream's rows, by term.
    """

    stream: float
    alone: float
    decoding: float
    selected: dict[str, float]

    @property
    def busy(self) -> float:
        """Of the stream's time that the device is busy."""
        return self.stream / self.alone


def write(folder: Path, images: int) -> None:
    """Files laid out as ImageNet-C's."""
    synsets = ImageNetInfo("imagenet-1k").label_names()
    draws = torch.Generator().manual_seed(0)
    written: list[Path] = []
    for number in range(images):
        home = folder / "brightness" / "5" / synsets[number % len(synsets)]
        home.mkdir(parents=True, exist_ok=True)
        file = home / f"ILSVRC2012_val_{number + 1:08d}.JPEG"
        if number < PICTURES:
            picture(draws).save(file, quality=QUALITY)
            written.append(file)
        else:
            os.link(written[number % PICTURES], file)


def picture(draws: torch.Generator) -> Image.Image:
    """A random field whose amplitudes fall much as those of photographs; channels are alike."""
    down, right = torch.fft.fftfreq(SIDE)[:, None], torch.fft.rfftfreq(SIDE)
    frequency = torch.hypot(down, right).clamp_min(1 / SIDE)
    noise = torch.randn(4, SIDE, SIDE, generator=draws)
    field = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency**1.3, s=(SIDE, SIDE))
    light, *colours = field / field.std((1, 2), keepdim=True)
    pixels = 128 + 50 * (light[..., None] + 0.3 * torch.stack(colours, 2))
    return Image.fromarray(pixels.clamp(0, 255).byte().numpy())


def load(name: str, device: torch.device) -> Loaded:
    """A network of ImageNet's classes, with random weights."""
    model, side = shares.build(name, 1000)
    use = Preprocess(side, side, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    return Loaded(name, model.to(device), use, 1000, Weights.of(model, "random", "here"))


def run(args: argparse.Namespace, folder: Path) -> Busy:
    """The adapter alone, the stream, and decoding alone."""
    torch.manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as `fata bench` does
    loaded = load(args.model, device)
    data = fata.data.open(f"imagenet-c:{folder}", fit=loaded)
    name, severity = data.domains[0]
    stream = fata.stream(data, domains=[name], severity=severity, images=args.images)
    with closing(stream.serve(device, workers=args.workers)) as served:
        held = [loaded.preprocess.normalise(batch.images) for batch in islice(served, HELD)]
    every = torch.cat(held)
    shares.spread(loaded.model, every)
    fields = shares.settings(loaded.model, args.method, every, Share.of_all(SHARE))
    adapter = fata.adapt(loaded.model, args.method, guard=None, speed=args.speed, **fields)

    def seconds(work: Callable[[], Any]) -> float:
        wait(every)
        begun = time.perf_counter()
        work()
        wait(every)
        return time.perf_counter() - begun

    adapter.warm_up(len(held[0]), held[0].shape[1:])
    for images in held:
        adapter(images)
    turns = TURNS * held if every.is_cuda else held
    alone = seconds(lambda: [adapter(images) for images in turns])
    before = adapter.counts["selected"]
    macs = passes(adapter, every[:1])  # `fata bench` counts a model once, not for every cell
    taken = seconds(lambda: bench(adapter, loaded, stream, device, macs, args.workers))
    chosen = {term: count - before[term] for term, count in adapter.counts["selected"].items()}
    decoding = seconds(lambda: [None for _ in stream.serve(device, workers=args.workers)])
    return Busy(
        stream.images / taken,
        sum(map(len, turns)) / alone,
        stream.images / decoding,
        {term: count / stream.images for term, count in chosen.items()},
    )


def bench(
    adapter: fata.Adapter,
    loaded: Loaded,
    stream: Stream,
    device: torch.device,
    macs: tuple[Macs, Macs],
    workers: int | None,
) -> None:
    """What `fata bench` does for one cell, from the files to its result."""
    cache = ImageCache(int(CellRunner.share * free_memory(device)))
    decoded = cache.begin(stream, loaded.preprocess.size, device, workers)()
    batches = serve.batches(stream, decoded, device, skip_damaged=False)
    measure(adapter, loaded, stream, batches, device, macs, lambda *_: None)


def table(args: argparse.Namespace, found: Busy) -> str:
    """Of Markdown."""
    head = ["network", "method", "rows", "alone", "decoding", "stream", "busy"]
    row = [args.model, args.method, ", ".join(f"{part:.0%}" for part in found.selected.values())]
    row += [f"{figure:,.0f}" for figure in (found.alone, found.decoding, found.stream)]
    return markdown(head, [[*row, f"{found.busy:.0%}"]])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--model", default="resnet50_gn")
    parser.add_argument("--method", default="eata+fata", choices=SPECS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, help="of the CPU; torch's own choice, if not given")
    parser.add_argument("--workers", type=int, help="that decode; as many as serving takes itself")
    parser.add_argument("--speed", default="fast", choices=["exact", "fast"])
    parser.add_argument("--data", type=Path, help="a folder of ImageNet-C; its first corruption")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.images < 1:
        parser.error(f"--images {args.images}: give 1 or more.")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here; give --device cpu.")
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        with TemporaryDirectory() as own:
            if args.data is None:
                write(Path(own), args.images)
            found = run(args, args.data or Path(own))
    except (ValueError, ZooError) as error:
        parser.error(str(error))
    print(table(args, found))
    if args.json:
        record = {
            "conditions": {**conditions(args), "cores": os.cpu_count()},
            **asdict(found),
            "busy": found.busy,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
