"""For those who run it for months: memory over a very long stream.

    python -m benchmarks.endurance --batches 100000

A tiny network meets a few small random images at a time, adapts with the guard, and restarts
where the guard rests, so that there is something to learn to the end. Printed is the memory of the
process (on a GPU, torch's there too) after 1, 10, 50 and 100 % of the batches.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress

import fata
from benchmarks import share
from benchmarks.scaling import resident
from benchmarks.speed import SPECS, markdown

MARKS = (0.01, 0.1, 0.5, 1.0)
METHODS = ("deyo+fata", "sar+fata")


@dataclass(frozen=True)
class Mark:
    """What a stream has come to."""

    batches: int
    process: int  # bytes
    device: int | None  # bytes that torch holds on a GPU
    stepped: int  # batches learned from
    events: int  # of the guard
    resets: int
    seconds: float


def adapter(net: str, spec: str, rows: int, side: int, device: str) -> fata.Adapter:
    """A network whose answers differ, half of them sure, with a guard."""
    torch.manual_seed(0)
    model, _ = share.build(net)
    model = share.spread(model.to(device), torch.rand(64, 3, side, side, device=device))
    return fata.adapt(model, spec, lr=1e-3 * rows / 64)


def endure(adapter: fata.Adapter, batches: int, rows: int, side: int) -> Iterator[Mark]:
    """Let it adapt, and measure at the marks."""
    engine, watch = adapter._engine, adapter.guard
    assert engine is not None
    assert watch is not None
    draw = torch.Generator(engine.device).manual_seed(0)
    marks = {max(1, round(part * batches)) for part in MARKS}
    stepped = events = resets = 0
    start = time.perf_counter()
    for number in range(1, batches + 1):
        adapter(torch.rand(rows, 3, side, side, generator=draw, device=engine.device))
        last = number in marks
        if watch.resting and not last:
            stepped, events = stepped + adapter.counts["stepped"], events + len(watch.events)
            resets += 1
            adapter.reset()
        if last:
            gc.collect()
            yield Mark(
                number,
                resident("VmRSS"),
                torch.cuda.memory_allocated() if engine.device.type == "cuda" else None,
                stepped + adapter.counts["stepped"],
                events + len(watch.events),
                resets,
                time.perf_counter() - start,
            )


def row(spec: str, mark: Mark) -> str:
    """A mark in the table."""
    sizes = [mark.process] if mark.device is None else [mark.process, mark.device]
    cells = [
        spec,
        f"{mark.batches:,}",
        *(f"{size / 2**20:,.1f}" for size in sizes),
        *(f"{number:,}" for number in (mark.stepped, mark.events, mark.resets)),
        f"{mark.seconds:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run one method after another; print a table of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=SPECS)
    parser.add_argument("--net", default="resnet_gn", choices=fata.tiny.NAMES)
    parser.add_argument("--rows", type=int, default=2, help="images a batch")
    parser.add_argument("--side", type=int, default=8, help="of an image, in pixels")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    sizes = ["process, MiB"] + ["GPU, MiB"] * args.device.startswith("cuda")
    done = ["learned from", "guard stepped in", "resets", "seconds"]
    print(markdown(["method", "batches", *sizes, *done], []), flush=True)
    with Progress(console=Console(stderr=True)) as progress:
        for spec in args.methods:
            bar = progress.add_task(spec, total=args.batches)
            one = adapter(args.net, spec, args.rows, args.side, args.device)
            for mark in endure(one, args.batches, args.rows, args.side):
                progress.update(bar, completed=mark.batches)
                print(row(spec, mark), flush=True)


if __name__ == "__main__":
    main()
