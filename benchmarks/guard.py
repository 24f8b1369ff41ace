"""Does the guard do no harm? `python -m benchmarks.guard`: streams of all kinds, drawn at random.

    python -m benchmarks.guard --seconds 1200 --file guard.jsonl            # the extra corruptions
    python -m benchmarks.guard --seconds 1200 --file guard.jsonl --judge    # the benchmark's 15
    python -m benchmarks.guard --show guard.jsonl

Each line of the file is one stream: the accuracy of `source` and `norm`, of a method with the guard
and without, the guard's events, and what `adapter.health` said beside what was true. A guard
without events changes nothing, so the method alone runs only where there were some.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation, mean
from typing import Any

import torch
from torch import Tensor

import fata
from fata.adapter import BALANCED, Adapter
from fata.bench.cell import Cell
from fata.corruptions import EXTRA, NAMES
from fata.network.norms import has_running
from fata.zoo import mini

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
}
METHODS = ("auto", *(h + plus for h in ("tent", "eata", "sar", "deyo") for plus in ("", "+fata")))
HARM = -1.0  # percentage points against not adapting


@dataclass(frozen=True)
class Case:
    """A method at a multiple of its rate on one stream."""

    model: str
    data: str
    stream: str
    domains: tuple[str, ...]
    method: str
    rate: int
    images: int  # of each domain

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images as the network takes them, labels, and which of them count."""
        options = {**STREAMS[self.stream]}
        noise, loaded = options.pop("noise", False), fata.zoo.load(self.model)
        stream = fata.stream(
            fata.data.open(self.data, fit=loaded), self.stream.split(",")[0], **options,
            domains=list(self.domains), images=self.images,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        for batch in stream:
            images, count = batch.images, torch.ones(len(batch.images), dtype=torch.bool)
            if noise:
                count[::2] = False
                values = torch.rand(images.shape, generator=generator)
                images = torch.where(count[:, None, None, None], images, values.to(images))
            yield loaded.preprocess.normalise(images), batch.labels, count

    def adapter(self, *, guard: bool) -> Adapter:
        """As `fata.adapt` gives it, at the rate of the benchmark."""
        loaded, size = fata.zoo.load(self.model), STREAMS[self.stream].get("batch_size", 64)
        spec, fields = self.method, {}
        if self.method == "auto":
            spec, fields = "eata+fata", {**BALANCED, "lr": "paper"}
            fields |= {"blend": True} if has_running(loaded.model) else {}
        elif spec.startswith("eata"):
            fields = {"lr": "paper"}  # their own rates go with the Fisher penalty
        else:
            fields = loaded.settings(spec, size)
        rates = {"lr": fields["lr"]} if "lr" in fields else {}
        cell = Cell(self.model, self.data, "normal", ("fog",), 5, spec, 0, size, fields=rates)
        fields |= {"lr": self.rate * (cell.rate(loaded).value or 0)}
        return fata.adapt(loaded.model, spec, guard=guard or None, **fields)

    def run(self) -> dict[str, Any]:
        """Accuracies in %, the guard's events, and health beside what is true."""
        loaded = fata.zoo.load(self.model)
        rivals = ("source", "norm") if has_running(loaded.model) else ("source",)
        still = {name: fata.adapt(fata.zoo.load(self.model).model, name) for name in rivals}
        guarded = self.adapter(guard=True)
        right, seen = dict.fromkeys((*rivals, "with"), 0), 0
        told: dict[str, list[float]] = {"health_source": [], "health_adapted": []}
        for images, labels, count in self.batches():
            answers = {"with": guarded(images), **{name: still[name](images) for name in rivals}}
            found = {name: int((a.argmax(1) == labels)[count].sum()) for name, a in answers.items()}
            right = {name: right[name] + found[name] for name in right}
            seen += int(count.sum())
            health = guarded.health
            if health is not None:
                told["health_source"].append(health.source)
                told["health_adapted"].append(health.adapted)
        accuracy = {name: 100 * n / seen for name, n in right.items()}
        assert guarded.guard is not None
        events = [(event.batch, event.action) for event in guarded.guard.events]
        accuracy["without"] = self._alone() if events else accuracy["with"]
        estimates = {name: 100 * mean(values) for name, values in told.items()}
        return {**asdict(self), **accuracy, "events": events, **estimates}

    def _alone(self) -> float:
        adapted, right, seen = self.adapter(guard=False), 0, 0
        for images, labels, count in self.batches():
            right += int((adapted(images).argmax(1) == labels)[count].sum())
            seen += int(count.sum())
        return 100 * right / seen


def cases(
    models: list[str], data: str, domains: list[str], images: int, seed: int
) -> Iterable[Case]:
    """All of them, in random order."""
    rng = random.Random(seed)
    while True:
        stream = rng.choice(list(STREAMS))
        several = [rng.choice(domains)]
        if stream in SEVERAL:
            several = rng.sample([name for name in domains if name != "clean"], 4)
        small = STREAMS[stream].get("batch_size", 64) < 4
        few = images // {"gradual": 16}.get(stream, 4 if small or len(several) > 1 else 1)
        yield Case(
            rng.choice(models), data, stream, tuple(several), rng.choice(METHODS),
            rng.choice((1, 10)), few,
        )  # fmt: skip


# -- tables -----------------------------------------------------------------------------------


def show(found: list[dict[str, Any]]) -> None:
    """A line a kind of stream, and what health is worth."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault(one["stream"], []).append(one)
    print("| streams | | healthy | changed by | worst | harmed | without | with | below | worst |")
    print("|---|" + "---:|" * 9)
    for name, some in (*((n, groups[n]) for n in STREAMS if n in groups), ("together", found)):
        print(f"| {' | '.join((name, *_row(some)))} |")
    for one in sorted(found, key=_against)[:20]:
        if _against(one) < HARM:
            print(_against(one), {k: v for k, v in one.items() if not k.startswith("health")})
    for model in dict.fromkeys(one["model"] for one in found):
        some = [one for one in found if one["model"] == model]
        pairs = [(one["health_source"], one["source"]) for one in some]
        print(
            f"{model}: health.source is off by {mean(abs(a - b) for a, b in pairs):.1f} points, "
            f"correlation {correlation(*zip(*pairs, strict=True)):.2f}"
        )


def _best(one: dict[str, Any]) -> float:
    return max(one["source"], one.get("norm", 0))


def _against(one: dict[str, Any]) -> float:
    return one["with"] - _best(one)


def _row(some: list[dict[str, Any]]) -> tuple[str, ...]:
    healthy = [one["with"] - one["without"] for one in some if one["without"] - _best(one) >= HARM]
    harmed = [one for one in some if one["without"] - _best(one) < HARM]
    return (
        str(len(some)),
        str(len(healthy)),
        f"{mean(healthy):+.2f}" if healthy else "",
        f"{min(healthy):+.2f}" if healthy else "",
        str(len(harmed)),
        f"{mean(one['without'] - _best(one) for one in harmed):+.2f}" if harmed else "",
        f"{mean(_against(one) for one in harmed):+.2f}" if harmed else "",
        str(sum(_against(one) < HARM for one in some)),
        f"{min(map(_against, some)):+.2f}",
    )


def main() -> None:
    """Run streams for a while, or show what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--models", nargs="+", default=list(mini.CIFAR10))
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--judge", action="store_true", help="the 15 instead of the extra ones")
    parser.add_argument("--images", type=int, default=2000, help="of a stream")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the draw of the streams")
    parser.add_argument("--file", type=Path, default=Path("guard.jsonl"))
    args = parser.parse_args()
    if args.show:
        show([json.loads(line) for path in args.show for line in path.read_text().splitlines()])
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    domains = list(NAMES) if args.judge else ["clean", *EXTRA]
    begun = time.monotonic()
    with args.file.open("a") as file:
        for case in cases(args.models, args.data, domains, args.images, args.seed):
            if time.monotonic() - begun > args.seconds:
                return
            print(json.dumps(case.run()), file=file, flush=True)


if __name__ == "__main__":
    main()
