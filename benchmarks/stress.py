"""The guard under stress: `python -m benchmarks.stress --data cifar10:DIR --device cuda --jobs 8`.

Rates far too high, one class alone, images without content, a domain that changes, single images,
an adversary (`benchmarks.ordeals`): not adapting, each method without the guard and with it. The
bound is at most a point below not adapting, which for BatchNorm is the better of `source` and
`norm`; each part of a stream counts for itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

import fata
from benchmarks.ordeals import ORDEALS, Batch, Scene
from benchmarks.speed import conditions, markdown
from fata.data import DataError
from fata.methods import HOSTS
from fata.network.norms import batch_norms
from fata.zoo import embedded, mini

METHODS = ("tent", "tent+fata", "eata+fata", "sar", "deyo+fata")
BOUND = -1.0  # points


class Run(NamedTuple):
    """One method through one ordeal."""

    scene: Scene
    ordeal: str
    spec: str
    guard: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    accuracy: dict[str, float]  # of each part, in percent
    finite: bool  # all answers were
    events: list[str]  # what the guard did


@dataclass(frozen=True)
class Line:
    """A part of an ordeal, for one network and method."""

    ordeal: str
    part: str
    model: str
    method: str
    still: dict[str, float]  # not adapting, by method
    free: float
    held: float
    finite: bool
    events: list[str]

    @property
    def margin(self) -> float:
        """Points above not adapting, with the guard."""
        return self.held - max(self.still.values())

    @property
    def holds(self) -> bool:
        """Whether the bound does."""
        return self.finite and self.margin >= BOUND


def carry_out(run: Run) -> Outcome:
    """Let a method meet an ordeal; the network is its source again afterwards."""
    scene, ordeal = _same(run.scene), ORDEALS[run.ordeal]
    fields = ordeal.settings(scene, run.spec)
    adapter = fata.adapt(scene.loaded.model, run.spec, guard=run.guard, **fields)
    try:
        accuracy, finite = score(adapter, ordeal.stream(scene, adapter))
        events = adapter.guard.events if adapter.guard else []
        return Outcome(accuracy, finite, [f"{e.action} at {e.batch}" for e in events])
    finally:
        adapter.reset()
        adapter.unwrap()


@cache
def _same(scene: Scene) -> Scene:
    """A scene that was loaded before in this process."""
    return scene


def score(adapter: fata.Adapter, batches: Iterator[Batch]) -> tuple[dict[str, float], bool]:
    """Percent right in each part, and whether all answers were finite."""
    right: dict[str, torch.Tensor] = {}
    seen: dict[str, int] = {}
    finite = torch.tensor(True)
    for batch in batches:
        logits = adapter(batch.images)
        finite = finite.to(logits.device) & logits.isfinite().all()
        if batch.labels is not None:
            here = (logits.argmax(1) == batch.labels).sum()
            right[batch.part] = right.get(batch.part, 0) + here
            seen[batch.part] = seen.get(batch.part, 0) + len(logits)
    return {part: 100 * right[part].item() / seen[part] for part in seen}, bool(finite)


def still(scene: Scene) -> tuple[str, ...]:
    """Ways not to adapt."""
    model = fata.zoo.load(scene.model).model  # a scene that has loaded its own travels with it
    return ("source", "norm") if batch_norms(model) else ("source",)


def runs(scenes: Sequence[Scene], ordeals: Sequence[str], methods: Sequence[str]) -> list[Run]:
    """All that a table needs."""
    return [
        run
        for ordeal in ordeals
        for scene in scenes
        for run in (
            *(Run(scene, ordeal, spec, False) for spec in still(scene)),
            *(Run(scene, ordeal, spec, guard) for spec in methods for guard in (False, True)),
        )
    ]


def lines(outcomes: dict[Run, Outcome]) -> list[Line]:
    """A line a part and guarded run."""
    found = []
    for run, held in outcomes.items():
        if not run.guard:
            continue
        free = outcomes[run._replace(guard=False)]
        at = [(s, outcomes.get(run._replace(spec=s, guard=False))) for s in ("source", "norm")]
        for part in held.accuracy:
            unmoved = {spec: o.accuracy[part] for spec, o in at if o is not None}
            names = (run.ordeal, part, run.scene.model, run.spec)
            right = (free.accuracy[part], held.accuracy[part])
            found.append(Line(*names, unmoved, *right, held.finite, held.events))
    return found


def table(found: Sequence[Line]) -> str:
    """As Markdown."""
    head = ["stress", "network", "method", "source", "norm", "without guard", "with"]
    head += ["against not adapting", "events", "last", "bound"]
    rows = [
        [
            _name(line),
            line.model,
            line.method,
            *(f"{line.still[s]:.2f}" if s in line.still else "" for s in ("source", "norm")),
            f"{line.free:.2f}",
            f"{line.held:.2f}",
            f"{line.margin:+.2f}",
            f"{len(line.events)}",
            line.events[-1] if line.events else "",
            "holds" if line.holds else "**does not hold**" if line.finite else "**not finite**",
        ]
        for line in found
    ]
    return markdown(head, rows)


def worst(found: Sequence[Line]) -> str:
    """A line a part of an ordeal and network: the method that loses most, without and with."""
    some: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        some.setdefault((_name(line), line.model), []).append(line)
    head = ["stress", "network", "methods", "the bound holds", "worst without guard", "worst with"]
    rows = [
        [
            *at,
            f"{len(own)}",
            f"{sum(line.holds for line in own)}",
            f"{min(line.free - max(line.still.values()) for line in own):+.2f}",
            f"{min(line.margin for line in own):+.2f}",
        ]
        for at, own in some.items()
    ]
    return markdown(head, rows)


def _name(line: Line) -> str:
    return f"{line.ordeal}: {line.part}" if line.part else line.ordeal


def summary(found: Sequence[Line]) -> str:
    """How many hold, and where the adversary was too weak to tell."""
    told = [f"The bound holds in {sum(line.holds for line in found)} of {len(found)} lines."]
    for line in found:
        harm = line.free - max(line.still.values())
        if line.ordeal.startswith("adversary") and line.method == "tent" and harm >= BOUND:
            told.append(
                f"{line.ordeal}: TENT on {line.model} takes no harm even without the guard."
            )
    return "\n".join(told)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--models", nargs="+", default=list(mini.CIFAR10), choices=embedded.NAMES)
    specs = [host + plus for host in HOSTS for plus in ("", "+fata")]
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=specs)
    parser.add_argument("--only", nargs="+", default=list(ORDEALS), choices=ORDEALS)
    parser.add_argument("--images", type=int, help="of a corruption; all, if not given")
    parser.add_argument(
        "--batches", type=int, default=2000, help="of one class; a tenth of grey, and of noise"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.batches < 1 or args.jobs < 1:
        parser.error("--batches and --jobs must be at least 1.")
    scenes = [Scene(m, args.data, args.images, args.batches, args.device) for m in args.models]
    try:
        fata.stream(fata.data.open(args.data), images=args.images)
    except DataError as error:
        parser.error(str(error))
    asked = runs(scenes, args.only, args.methods)
    outcomes = dict(zip(asked, _all(asked, args.jobs), strict=True))
    found = lines(outcomes)
    print(table(found))
    print(f"\n{worst(found)}")
    print(f"\n{summary(found)}")
    if args.json:
        kept = [{**asdict(line), "margin": line.margin, "holds": line.holds} for line in found]
        whole: dict[str, Any] = {"conditions": conditions(args), "lines": kept}
        args.json.write_text(json.dumps(whole, indent=2) + "\n")


def _all(asked: list[Run], jobs: int) -> Iterator[Outcome]:
    """One after another, or in processes; how far it is on stderr."""
    console = Console(stderr=True)
    if jobs == 1:
        yield from track(map(carry_out, asked), "runs", len(asked), console=console)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from track(pool.map(carry_out, asked), "runs", len(asked), console=console)


if __name__ == "__main__":
    main()
