"""What the guard does first, on streams that were recorded without it.

    python -m benchmarks.verdicts                                 # what lies in benchmarks/runs
    python -m benchmarks.verdicts --record mini_vit tent eata --data cifar10:DIR --file signs.jsonl

A recording holds, batch by batch, which class the adapted model and the source weights answered and
how many of each are right: enough to try signs and limits without running a network again. The
corruptions are the four that the benchmark never sees. While the source answers, the model learns
as it did when it was recorded; once it is taken back, it is taken to be as good as its source.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fata
from benchmarks.archive import lines
from fata.bench.grid import Grid
from fata.corruptions import EXTRA
from fata.distributed.ranks import SINGLE
from fata.engine.state import State
from fata.guard.events import Event
from fata.guard.policy import Guard, Watch

Batch = dict[str, Any]  # "pairs": [adapted, source, how often]; "right", "still": how many are


def record(model: str, methods: list[str], data: str, images: int) -> Iterator[dict[str, Any]]:
    """Run the methods over the extra corruptions, shuffled and class by class."""
    loaded = fata.zoo.load(model)
    grid = Grid((model,), (data,), tuple(methods), ("normal", "label-shift"), EXTRA, images=images)
    for cell in grid.cells(fata.data.open):
        adapter = fata.adapt(loaded.model, cell.method, guard=None, **cell.settings(loaded))
        engine = adapter._engine
        assert engine is not None
        batches = []
        for batch in cell.stream(fata.data.open(data, fit=loaded)):
            pictures = loaded.preprocess.normalise(batch.images)
            answers = adapter(pictures).argmax(1)
            with engine.counted_apart(), engine.theta.at(engine.source, back=engine.state.theta):
                source = engine.predict(pictures).argmax(1)
            batches.append(summed(answers, source, batch.labels))
        adapter.reset()
        adapter.unwrap()
        yield {
            "model": model,
            "scenario": cell.scenario,
            "domain": cell.domains[0],
            "method": cell.method,
            "fields": dict(cell.fields),
            "classes": loaded.classes,
            "batches": batches,
        }


def summed(answers: Tensor, source: Tensor, labels: Tensor) -> Batch:
    """What is kept of a batch."""
    pairs, counts = torch.stack((answers, source)).unique(dim=1, return_counts=True)
    return {
        "pairs": torch.cat((pairs, counts[None])).T.tolist(),
        "right": (answers == labels).sum().item(),
        "still": (source == labels).sum().item(),
    }


def answers(cell: dict[str, Any], guard: Guard) -> tuple[list[bool], list[Event]]:
    """Which batches the adapted model answers, until it is taken back; what the guard does."""
    nothing = torch.zeros(1)
    witness: list[Tensor] = []
    engine: Any = SimpleNamespace(
        state=State(nothing, nothing, 0),
        group=SINGLE,
        coupled="_bn" in cell["model"],
        source=nothing,
        theta=SimpleNamespace(at=lambda *_, **__: nullcontext(), write=lambda _: None),
        counted_apart=nullcontext,
        predict=lambda *_: witness[-1],
    )
    watch = Watch(guard, engine)
    own = []
    for batch in cell["batches"]:
        rows = torch.tensor(batch["pairs"])
        adapted, source = rows[:, :2].repeat_interleave(rows[:, 2], 0).T
        logits, plain = (
            torch.nn.functional.one_hot(one, cell["classes"]).float() for one in (adapted, source)
        )
        witness[:] = [plain]
        own.append(watch.see(logits, logits) is logits)
        engine.state.batches += 1
        if watch.events and watch.events[-1].action in ("back", "rest"):
            break
    return own, watch.events


def gains(cell: dict[str, Any]) -> list[float]:
    """Of the adapted model over its source, batch by batch, in points of the whole stream."""
    images = sum(pair[2] for batch in cell["batches"] for pair in batch["pairs"])
    return [100 * (batch["right"] - batch["still"]) / images for batch in cell["batches"]]


def judge(cells: list[dict[str, Any]], guard: Guard) -> None:
    """A line a network and scenario."""
    print(guard)
    print(
        f"{'':32}not harmed: of them stepped in, points lost | harmed: missed, points lost"
        " without and with, over a point with"
    )
    found: dict[tuple[str, str], list[tuple[float, float, bool]]] = {}
    for cell in cells:
        steps, (own, events) = gains(cell), answers(cell, guard)
        kept = sum(step for step, adapted in zip(steps, own, strict=False) if adapted)
        at = found.setdefault((cell["model"], cell["scenario"]), [])
        at.append((sum(steps), kept, bool(events)))
    for (model, scenario), some in sorted(found.items()):
        fine = [(before - after, seen) for before, after, seen in some if before >= -1]
        hurt = [(before, after, seen) for before, after, seen in some if before < -1]
        print(
            f"{model:16} {scenario:14}",
            f"{len(fine):3}: {sum(seen for _, seen in fine):3},",
            f"{mean(lost for lost, _ in fine) if fine else 0:5.2f} |",
            f"{len(hurt):3}: {sum(not seen for *_, seen in hurt):3},",
            f"{mean(b for b, *_ in hurt) if hurt else 0:6.2f},",
            f"{mean(a for _, a, _ in hurt) if hurt else 0:5.2f},",
            f"{sum(a < -1 for _, a, _ in hurt)}",
        )


def main() -> None:
    """Record, or judge what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", nargs="+", metavar="NAME", help="a model, and methods")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--images", type=int, default=5120)
    parser.add_argument("--file", type=Path, help="of a recording; benchmarks/runs, if not given")
    for name in ("narrowing", "neglect", "even"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Guard(), name))
    for name in ("every", "rows", "trial"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Guard(), name))
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if args.record:
        model, *methods = args.record
        with args.file.open("a") as file:
            for cell in record(model, methods, args.data, args.images):
                print(json.dumps(cell), file=file, flush=True)
        return
    cells = [json.loads(line) for line in args.file.open()] if args.file else lines("signs")
    tried = ("narrowing", "neglect", "even", "every", "rows", "trial")
    judge(cells, Guard(**{name: getattr(args, name) for name in tried}))


if __name__ == "__main__":
    main()
