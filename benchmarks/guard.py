"""Does the guard do no harm? `python -m benchmarks.guard`: streams of all kinds, drawn at random.

    python -m benchmarks.guard --seconds 1200 --file guard.jsonl            # the extra corruptions
    python -m benchmarks.guard --seconds 1200 --file guard.jsonl --judge    # the benchmark's 15
    python -m benchmarks.guard --judge --device cuda --jobs 12 --speed fast --seconds 200 \
        --file guard.jsonl
    python -m benchmarks.guard --assets DIR --models vit_tiny resnet50      # `benchmarks.imagenet`
    python -m benchmarks.guard --streams long                               # 50,000 images each
    python -m benchmarks.guard --methods auto --rates 1                     # as `fata.adapt` comes
    python -m benchmarks.guard --show guard.jsonl

Each line of the file is one stream: the accuracy of `source` and `norm`, of a method with the guard
and without, the guard's events, and the estimates of `adapter.health`. Each of the `--jobs`
processes draws streams of its own. One that fails is reported, and the next one is drawn.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor

import fata
from benchmarks import imagenet
from benchmarks.guard_tables import show
from fata.adapter import BALANCED, Adapter
from fata.bench.cell import Cell
from fata.corruptions import EXTRA, NAMES
from fata.data.dataset import data_name
from fata.guard.events import Health
from fata.network.norms import has_running
from fata.zoo import Loaded, mini

SEVERAL = ("mixed", "continual", "gradual", "recurring")  # domains in one stream
STREAMS: dict[str, dict[str, Any]] = {
    "normal": {},
    "label-shift": {},
    "mixed": {},
    "continual": {},
    "gradual": {},
    "recurring": {"rounds": 2},
    "correlated": {},
    "few-classes, 2": {"classes": 2},
    "few-classes, 3": {"classes": 3},
    "few-classes, 4": {"classes": 4},
    "few-classes, 5": {"classes": 5},
    "few-classes, pairs in turn": {"classes": 2, "every": 320},
    "skewed, 35 %": {"share": 0.35},
    "skewed, 50 %": {"share": 0.5},
    "skewed, 90 %": {"share": 0.9},
    "normal, half noise": {"noise": True},
    "bs1": {"batch_size": 1},
    **{f"normal, batches of {size}": {"batch_size": size} for size in (2, 4, 8, 16, 200)},
    "long": {"length": 50_000},
}
DRAWN = tuple(name for name in STREAMS if name != "long")
METHODS = ("auto", *(h + plus for h in ("tent", "eata", "sar", "deyo") for plus in ("", "+fata")))


@cache
def _loaded(name: str, assets: str) -> Loaded:
    return imagenet.network(name, assets) if assets else fata.zoo.load(name)


@cache
def _opened(data: str, model: str, assets: str) -> fata.data.Dataset:
    return fata.data.open(data, fit=_loaded(model, assets))


@dataclass(frozen=True)
class Case:
    """A method at a multiple of its rate on one stream."""

    streams: ClassVar[Mapping[str, dict[str, Any]]] = STREAMS  # their options, by name

    model: str
    data: str
    stream: str
    domains: tuple[str, ...]
    method: str
    rate: int
    images: int  # of each domain
    device: str = "cpu"
    speed: str = "exact"
    assets: str = ""  # folder with the network

    def load(self) -> Loaded:
        """A copy of the network, on the device."""
        loaded = _loaded(self.model, self.assets)
        return replace(loaded, model=copy.deepcopy(loaded.model).to(self.device))

    @cached_property
    def _images(self) -> tuple[fata.data.Stream, Tensor, Tensor]:
        """The stream, each of its images once, and the number of each row's image."""
        options = {k: v for k, v in self.streams[self.stream].items() if k != "noise"}
        stream = fata.stream(
            _opened(self.data, self.model, self.assets), self.stream.replace(",", "").split()[0],
            domains=list(self.domains), images=self.images, **options,
        )  # fmt: skip
        rows = torch.stack((stream.domain, stream.index), 1)
        once, number = rows.unique(dim=0, return_inverse=True)
        source = replace(
            stream, domain=once[:, 0], index=once[:, 1], starts=(0,), resets=(True,), batch_size=64
        )
        images = torch.cat([batch.images for batch in source.serve(self.device, workers=0)])
        return stream, images, number.to(self.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images as the network takes them, labels, and which of them count."""
        stream, pool, number = self._images
        noise = self.streams[self.stream].get("noise", False)
        use, labels = _loaded(self.model, self.assets).preprocess, stream.labels.to(self.device)
        generator = torch.Generator().manual_seed(0)
        for first, last, _ in stream.spans:
            images = pool[number[first:last]]
            count = torch.ones(len(images), dtype=torch.bool, device=self.device)
            if noise:
                count[::2] = False
                values = torch.rand(images.shape, generator=generator)
                images = torch.where(count[:, None, None, None], images, values.to(images))
            yield use.normalise(images), labels[first:last], count

    def adapter(self, *, guard: bool) -> Adapter:
        """As `fata.adapt` gives it, at the rate of the benchmark."""
        loaded, size = self.load(), self.streams[self.stream].get("batch_size", 64)
        spec, fields = self.method, dict[str, Any]()
        if self.method == "auto":
            blends = has_running(loaded.model)
            spec, fields = "eata+fata", {"blend": True} if blends else {**BALANCED}
        elif not spec.startswith("eata"):
            fields = loaded.settings(spec, size)
        if self.assets:
            fields["lr"] = imagenet.RATES[self.model][0] * min(1, size / 64)
            fields |= {"fisher_alpha": 0} if spec.startswith("eata") else {}
        elif spec.startswith("eata"):
            fields["lr"] = "paper"  # their own rates go with the Fisher penalty
        rates = {"lr": fields["lr"]} if "lr" in fields else {}
        cell = Cell(self.model, self.data, "normal", ("fog",), 5, spec, 0, size, fields=rates)
        fields |= {"lr": self.rate * (cell.rate(loaded).value or 0)}
        return fata.adapt(loaded.model, spec, guard=guard or None, speed=self.speed, **fields)

    def run(self) -> dict[str, Any]:
        """Accuracies in %, the guard's events, and the mean estimates of `health`."""
        guarded, rivals = self.adapter(guard=True), ["source"]
        if has_running(guarded.model):
            rivals.append("norm")
        still = {name: fata.adapt(self.load().model, name, speed=self.speed) for name in rivals}
        ways = {"with": guarded, "without": self.adapter(guard=False), **still}
        accuracy, checks = self._measure(ways)
        assert guarded.guard is not None
        events = [(event.batch, event.action) for event in guarded.guard.events]
        told = {k: v for k, v in asdict(self).items() if k != "assets"}
        return {
            **told, "data": data_name(self.data), **accuracy, "events": events,
            "health_source": 100 * mean(h.source for h in checks) if checks else None,
            "health_adapted": 100 * mean(h.adapted for h in checks) if checks else None,
        }  # fmt: skip

    def _measure(self, adapters: Mapping[str, Adapter]) -> tuple[dict[str, float], list[Health]]:
        """Accuracies, read from the device at the end, and the `health` after each batch."""
        right = torch.zeros(len(adapters), dtype=torch.float64, device=self.device)
        seen, checks = right.new_zeros(()), list[Health]()
        for images, labels, count in self.batches():
            found = [adapted(images).argmax(1) == labels for adapted in adapters.values()]
            right += (torch.stack(found) & count).sum(1)
            seen += count.sum()
            checks += [adapted.health for adapted in adapters.values() if adapted.health]
        return dict(zip(adapters, (100 * right / seen).tolist(), strict=True)), checks


def cases(args: argparse.Namespace, seed: int) -> Iterator[Case]:
    """All of them, in random order."""
    rng, domains = random.Random(seed), list(NAMES) if args.judge else ["clean", *EXTRA]
    while True:
        stream = rng.choice(args.streams)
        several = [rng.choice(domains)]
        if stream in SEVERAL:
            several = rng.sample([name for name in domains if name != "clean"], 4)
        small = STREAMS[stream].get("batch_size", 64) < 4
        few = args.images // {"gradual": 16}.get(stream, 4 if small or len(several) > 1 else 1)
        yield Case(
            rng.choice(args.models), args.data, stream, tuple(several), rng.choice(args.methods),
            rng.choice((1,) if stream == "long" else args.rates), few, args.device, args.speed,
            args.assets,
        )  # fmt: skip


def work(args: argparse.Namespace, number: int) -> None:
    """Run streams until the time is up; each is one line of the file, written at once."""
    warnings.simplefilter("ignore")
    logging.getLogger("fata").setLevel(logging.ERROR)  # the guard's events are in the file
    torch.set_num_threads(1)
    if args.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # as `fata bench` does
    begun = time.monotonic()
    with args.file.open("ab", buffering=0) as file, suppress(KeyboardInterrupt):
        for case in cases(args, args.seed + number):
            if time.monotonic() - begun > args.seconds:
                return
            try:
                file.write(f"{json.dumps(case.run())}\n".encode())
            except Exception as error:
                why = traceback.format_exception_only(error)[-1].strip()
                print(f"{case}: {why}", file=sys.stderr, flush=True)
            gc.collect()  # adapters are in reference cycles, and hold memory of the device


def work_in_processes(args: argparse.Namespace) -> None:
    """`work` in `--jobs` processes; Ctrl-C ends them all."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(args, number)) for number in range(args.jobs)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    for number, worker in enumerate(workers):
        if worker.exitcode:
            print(f"worker {number} ended with {worker.exitcode}", file=sys.stderr)


def main() -> None:
    """Run streams for a while, or show what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--models", nargs="+", default=list(mini.CIFAR10))
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--assets", default="", metavar="DIR", help="of `benchmarks.imagenet`")
    parser.add_argument("--judge", action="store_true", help="the 15 instead of the extra ones")
    parser.add_argument(
        "--streams", nargs="+", default=list(DRAWN), choices=list(STREAMS), metavar="NAME",
        help=f"of {'; '.join(STREAMS)} (default: all but long)".replace("%", "%%"),
    )  # fmt: skip
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="SPEC")
    parser.add_argument("--rates", nargs="+", type=int, default=[1, 10], metavar="TIMES")
    parser.add_argument("--images", type=int, default=2000, help="of a stream")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--speed", default="exact", choices=("exact", "fast"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the draw of the streams")
    parser.add_argument("--file", type=Path, default=Path("guard.jsonl"))
    args = parser.parse_args()
    if args.show:
        lines = [line for path in args.show for line in path.read_text().splitlines()]
        show([json.loads(line) for line in lines], STREAMS)
        return
    if args.assets and set(args.models) - set(imagenet.RATES):
        parser.error(f"--assets has the models {', '.join(imagenet.RATES)}")
    with tempfile.TemporaryDirectory() as folder:
        if args.assets:
            args.data = imagenet.unpack(args.assets, Path(folder))
        if args.jobs == 1:
            work(args, 0)
        else:
            work_in_processes(args)


if __name__ == "__main__":
    main()
