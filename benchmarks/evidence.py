"""What the guard decides on streams that were recorded without it: `python -m benchmarks.evidence`.

    python -m benchmarks.evidence                            # what lies in benchmarks/runs
    python -m benchmarks.evidence --ablate                   # with one number of the guard changed
    python -m benchmarks.evidence --long                     # streams of 50,000 images
    python -m benchmarks.evidence --health                   # how far its estimates are off
    python -m benchmarks.evidence --record mini_resnet_gn --file evidence.jsonl --seconds 600
    python -m benchmarks.evidence --record tiny200_vit --data tiny-imagenet:DIR --device cuda \
        --file evidence.jsonl

A recording holds, for some batches of a stream, the label of each image, both models' predictions
and the source's confidence, with BatchNorm also what the batch's statistics predict: enough to try
a guard without running a network again. The streams are clean images and the four corruptions that
the benchmark never uses. While the source predicts, the adapted model learns as it did when it was
recorded; once it restarts, it is taken to be as good as the source.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import correlation, mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fata
from benchmarks.archive import lines
from benchmarks.guard import Case
from fata.corruptions import EXTRA
from fata.distributed.ranks import SINGLE
from fata.guard import evidence as rule
from fata.guard import policy
from fata.guard.events import Health, Watched
from fata.guard.policy import Guard, Watch
from fata.network.norms import has_running

SCENARIOS: dict[str, dict[str, Any]] = {
    "normal": {},
    "label-shift": {},
    "few-classes 2": {"classes": 2},
    "few-classes 4": {"classes": 4},
    "few-classes 4 in turn": {"classes": 4, "every": 320},
    "skewed 0.35": {"share": 0.35},
    "skewed 0.5": {"share": 0.5},
    "skewed 0.9": {"share": 0.9},
    "normal 8": {"batch_size": 8},
    "normal 1": {"batch_size": 1},
}
METHODS = ("auto", "tent", "tent+fata", "eata+fata", "sar", "deyo+fata")
RATES = (1, 10)
ABLATIONS = (
    {}, {"every": 8}, {"every": 32}, {"part": 0.0625}, {"part": 0.5}, {"rows": 128}, {"rows": 2048},
    {"bet": 0.15}, {"bet": 0.5}, {"level": 0.3}, {"level": 0.01}, {"real": 0.2}, {"real": 0.4},
    {"real": 1.0}, {"trial": 512}, {"trial": 8192},
)  # fmt: skip
HARM = -1.0  # percentage points


class Shown(NamedTuple):
    """One batch: logits of three predictions, and the labels."""

    source: Tensor
    adapted: Tensor
    beside: Tensor | None  # the source weights with the batch's statistics
    labels: Tensor

    def gain(self, returned: Tensor) -> int:
        """How many more images are right than by the source model."""
        right = returned.argmax(1) == self.labels
        return int(right.sum() - (self.source.argmax(1) == self.labels).sum())


@dataclass(frozen=True)
class Recording:
    """One stream: what the models predicted, batch by batch."""

    group: str
    batches: list[Shown]
    every: int  # of the stream's batches one is kept

    @property
    def images(self) -> int:
        """That are kept."""
        return sum(len(batch.source) for batch in self.batches)

    @property
    def gain(self) -> float:
        """Of the adapted model over the source, in percentage points."""
        return 100 * sum(batch.gain(batch.adapted) for batch in self.batches) / self.images


# -- recording --------------------------------------------------------------------------------


class Recorded(Case):
    """A case on one of `SCENARIOS`."""

    streams = SCENARIOS


def record(case: Recorded, every: int) -> dict[str, Any]:
    """Run one stream."""
    adapted, loaded = case.adapter(guard=False), case.load()
    blends: dict[str, Any] = {"blend": True} if has_running(loaded.model) else {}
    source = fata.adapt(loaded.model, "norm", **blends)
    moves = blends and case.method != "auto"
    beside = fata.adapt(case.load().model, "norm") if moves else None
    batches = []
    for number, (images, labels, _) in enumerate(case.batches()):
        learned = adapted(images).argmax(1)
        if number % every:
            continue
        confidence, unadapted = source(images).softmax(1).max(1)
        found = [labels, learned, unadapted, (confidence * 1000).round().long()]
        if beside:
            confidence, moved = beside(images).softmax(1).max(1)
            found += [moved, (confidence * 1000).round().long()]
        batches.append([column.tolist() for column in found])
    values = {"model": case.model, "scenario": case.stream, "domain": case.domains[0]}
    values["method"] = case.method
    figures = {"rate": case.rate, "classes": loaded.classes, "every": every}
    return {**values, **figures, "batches": batches}


# -- judging ----------------------------------------------------------------------------------


def recordings(name: str) -> Iterator[Recording]:
    """All that are kept in a file."""
    for cell in lines(name):
        batches = []
        for columns in cell["batches"]:
            labels, answers, still, sure, *moved = (torch.tensor(column) for column in columns)
            source = _logits(still, cell["classes"], sure / 1000)
            beside = _logits(moved[0], cell["classes"], moved[1] / 1000) if moved else None
            batches.append(Shown(source, _logits(answers, cell["classes"]), beside, labels))
        group = f"{cell['model']}, {cell['scenario'].split()[0]}"
        yield Recording(group, batches, cell["every"])


def _logits(classes: Tensor, of: int, confidence: Tensor | None = None) -> Tensor:
    """Of rows with these predictions and confidences (None: one half)."""
    sure = torch.full(classes.shape, 0.5) if confidence is None else confidence
    sure = sure.clamp(1.01 / of, 0.999)
    margin = (sure * (of - 1) / (1 - sure)).log()
    return torch.nn.functional.one_hot(classes, of) * margin[:, None]


def kept_gain(recording: Recording, guard: Guard) -> float:
    """Of the predictions that the guard returns over the source's, in percentage points."""
    total = sum(now.gain(returned) for now, returned, _ in guarded(recording, guard))
    return 100 * total / recording.images


def guarded(recording: Recording, guard: Guard) -> Iterator[tuple[Shown, Tensor, Health | None]]:
    """Each batch until a restart, what the guard returns of it, and the estimates after it."""
    now = recording.batches[0]
    state = SimpleNamespace(watched=Watched(), guard={}, batches=0, count=lambda **_: None)
    source = SimpleNamespace(
        predict=lambda *_: now.source, beside=lambda *_: now.beside, restart=lambda _: None
    )
    engine: Any = SimpleNamespace(state=state, group=SINGLE, source_model=source)
    watch = Watch(replace(guard, trial=guard.trial // recording.every), engine)
    for now in recording.batches:
        returned = watch.see(now.adapted, now.adapted)
        state.watched.since += recording.every - 1
        state.watched.images += (recording.every - 1) * len(now.labels)
        state.batches += recording.every
        if watch.events and watch.events[-1].action in ("back", "rest"):
            return
        yield now, returned, watch.health


def _batches_alone(*known: Any) -> rule.Evidence:
    found = rule.compare(*known)
    return found._replace(worse=torch.zeros_like(found.worse))


LIMIT = Guard.limit
CHANGES = {
    "a lost point is harm": (rule, "POINT", 0.0),
    "one batch may show a gain": (policy, "ONE_BATCH", 9.0),
    "small batches are as others": (policy, "FEW", 1),
    "no image keeps the source's prediction": (policy, "compare", _batches_alone),
    "odds do not count against the images": (Guard, "limit", lambda guard, _=0: LIMIT(guard)),
}


def judge(streams: list[Recording], guard: Guard) -> dict[str, list[tuple[float, float]]]:
    """Gains without and with the guard, by group."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in streams:
        found.setdefault(one.group, []).append((one.gain, kept_gain(one, guard)))
    return found


def show(found: dict[str, list[tuple[float, float]]]) -> None:
    """A line a group."""
    print("| streams | not harmed | pp lost | most | harmed | without guard | with | over 1 pp |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for group, pairs in sorted(found.items()):
        print(f"| {group} | {_line(pairs)} |")


def ablated(name: str, streams: list[Recording], guard: Guard) -> None:
    """A line over all groups."""
    pairs = [pair for some in judge(streams, guard).values() for pair in some]
    print(f"| {name} | {_line(pairs)} |", flush=True)


def _line(pairs: list[tuple[float, float]]) -> str:
    fine = [free - held for free, held in pairs if free >= HARM]
    hurt = [pair for pair in pairs if pair[0] < HARM]
    lost = f"{mean(fine):.2f} | {max(fine):.2f}" if fine else " | "
    rescued = f"{mean(f for f, _ in hurt):.2f} | {mean(h for _, h in hurt):.2f}" if hurt else " | "
    below = sum(held < HARM for _, held in pairs)
    return f"{len(fine)} | {lost} | {len(hurt)} | {rescued} | {below}"


def health_errors(streams: list[Recording], guard: Guard) -> None:
    """A line for each network: how far the mean estimates are off, in percentage points."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in streams:
        batches = [(now, health) for now, _, health in guarded(one, guard) if health]
        for kind in ("source", "adapted"):
            told = mean(getattr(health, kind) for _, health in batches)
            right = torch.cat([getattr(now, kind).argmax(1) == now.labels for now, _ in batches])
            pair = 100 * told, 100 * right.double().mean().item()
            for name in (one.group.split(",")[0], "all"):
                found.setdefault(name, {}).setdefault(kind, []).append(pair)
    print("| network | streams | source: off by | too high by | correlation | adapted: off by "
          "| too high by | correlation |\n|---|" + "---:|" * 7)  # fmt: skip
    for name, kinds in sorted(found.items(), key=lambda item: item[0] == "all"):
        errors = " | ".join(_errors(pairs) for pairs in kinds.values())
        print(f"| {name} | {len(kinds['source'])} | {errors} |")


def _errors(pairs: list[tuple[float, float]]) -> str:
    differences = [told - true for told, true in pairs]
    alike = f"{correlation(*zip(*pairs, strict=True)):.2f}" if len(pairs) > 1 else ""
    return f"{mean(map(abs, differences)):.1f} | {mean(differences):+.1f} | {alike}"


def main() -> None:
    """Record, or judge what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", nargs="+", metavar="MODEL")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--health", action="store_true", help="how far the estimates are off")
    parser.add_argument("--long", action="store_true", help="judge the long streams")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--every", type=int, default=2, help="batches between two that are kept")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the streams")
    parser.add_argument("--file", type=Path, help="to record to")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not args.record:
        streams = list(recordings("evidence-long" if args.long else "evidence"))
        guard = Guard()
        if args.health:
            health_errors(streams, guard)
            return
        if not args.ablate:
            show(judge(streams, guard))
            return
        for change in ABLATIONS:
            said = " ".join(f"`{k}={v}`" for k, v in change.items()) or "as it is"
            ablated(said, streams, replace(guard, **change))
        blind = [
            replace(one, batches=[b._replace(beside=None) for b in one.batches]) for one in streams
        ]
        ablated("statistics do not count", blind, guard)
        for said, (module, name, value) in CHANGES.items():
            before = getattr(module, name)
            setattr(module, name, value)
            ablated(said, streams, guard)
            setattr(module, name, before)
        return
    if args.file is None:
        parser.error("--record needs --file")
    streams_of = list(product(args.record, SCENARIOS, ("clean", *EXTRA), METHODS, RATES))
    random.Random(args.seed).shuffle(streams_of)
    begun = time.monotonic()
    with args.file.open("a") as file:
        for model, name, domain, method, rate in streams_of:
            if time.monotonic() - begun > args.seconds:
                return
            images = min(args.images, 640) if name == "normal 1" else args.images
            every = 1 if name == "normal 1" else args.every
            case = Recorded(model, args.data, name, (domain,), method, rate, images, args.device)
            print(json.dumps(record(case, every)), file=file, flush=True)


if __name__ == "__main__":
    main()
