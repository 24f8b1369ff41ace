"""Ours, the straightforward way and a plain forward in one run: `python -m benchmarks.speed`.

    python -m benchmarks.speed --share embedded
    python -m benchmarks.speed --models resnet50_gn vit_base_patch16_224 resnet50_bn --device cuda
    python -m benchmarks.speed --models resnet50_gn --methods eata eata+fata --guard

Random weights, noise images on the device, and a learning rate near zero, so that the share of
selected rows stays as it was set. The ways of a host, with FATA and without, take turns; printed
are medians over the rounds, and of ratios those of the two times in one round. All without the
guard: with `--guard`, what that adds to a step is measured instead, over whole turns of its checks;
with `--guard first`, over the batches after a start, in which it checks more often.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fata
from benchmarks import share as shares
from benchmarks.plain import Plain
from benchmarks.presets import HOSTS
from benchmarks.race import Call, Runner, race, times
from benchmarks.share import Share
from benchmarks.tables import markdown
from fata.zoo import ZooError, mini

FIRST = 256  # batches
TURN = 10  # calls in a row on a GPU, as in a stream: what is launched early waits there
SPECS = tuple(host + plus for host in HOSTS for plus in ("", "+fata"))
Line = dict[str, Any]


@dataclass(frozen=True)
class Track:
    """A network, a batch for it, and how it is run."""

    name: str
    model: nn.Module
    images: Tensor
    share: str
    speeds: list[str]
    rounds: int

    def fields(self, spec: str) -> dict[str, Any]:
        """Settings of a method by which it selects as many rows as are asked for."""
        if self.share == "embedded":
            wanted = shares.embedded(self.name, spec)
        else:
            wanted = Share.of_all(float(self.share))
        return shares.settings(self.model, spec, self.images, wanted)

    def forward(self) -> Call:
        """A gradient-free pass, in the precision that the model has."""
        return torch.no_grad()(copy.deepcopy(self.model).eval())

    def plain(self, spec: str, fields: dict[str, Any]) -> Call:
        """The straightforward way."""
        return Plain(copy.deepcopy(self.model), spec, **fields)

    def ours(
        self, spec: str, fields: dict[str, Any], speed: str, guard: fata.Guard | None = None
    ) -> fata.Adapter:
        """An adapter."""
        return fata.adapt(copy.deepcopy(self.model), spec, guard=guard, speed=speed, **fields)


def compare(track: Track, host: str, specs: list[str]) -> list[Line]:
    """A line a method: images a second of each way, ratios, the share that was selected."""
    ways: dict[str, Callable[[], Call]] = {"forward": track.forward}
    for spec in specs:
        fields = track.fields(spec)
        ways[f"{spec} plain"] = partial(track.plain, spec, fields)
        for speed in track.speeds:
            ways[f"{spec} {speed}"] = partial(track.ours, spec, fields, speed)
    ran = race(ways, track.images, track.rounds, TURN if track.images.is_cuda else 1)
    return [_line(track, host, spec, ran) for spec in specs]


def _line(track: Track, host: str, spec: str, ran: dict[str, Runner]) -> Line:
    rows, ceiling, plain = len(track.images), ran["forward"], ran[f"{spec} plain"]
    line: Line = {"model": track.name, "method": spec, "ways": {}}
    for way in ("plain", *track.speeds):
        runner = ran[f"{spec} {way}"]
        line["ways"][way] = found = {
            "images_per_second": runner.per_second(rows),
            "over_plain": times(plain, runner),
            "over_forward": times(ceiling, runner),
            "peak": runner.peak,
        }
        alone = ran.get(f"{host} {way}")
        found["over_host"] = times(runner, alone) if alone and spec != host else None
        if isinstance(runner.call, fata.Adapter):
            line["selected"] = _selected(runner.call)
    line["forward"] = ceiling.per_second(rows)
    return line


def _selected(adapter: fata.Adapter) -> dict[str, float]:
    counts = adapter.counts
    return {term: count / counts["seen"] for term, count in counts["selected"].items()}


@dataclass(frozen=True)
class Checks:
    """How often the guard checks, long after a start or from the `first` batch on."""

    first: bool

    @property
    def turn(self) -> int:
        """Batches after which they come again."""
        return FIRST if self.first else 2 * fata.Guard().every

    def of(self, adapter: fata.Adapter, images: Tensor) -> Call:
        """The adapter at that age; what it compares with is captured by then."""
        engine = adapter._engine
        if images.is_cuda:
            adapter.warm_up(len(images), images.shape[1:])
        watched = engine.state.watched
        if not self.first:
            watched.since = watched.last = 10 * FIRST
            return adapter

        def young(images: Tensor) -> Tensor:
            if watched.since >= self.turn:
                watched.since = watched.last = 0
            return adapter(images)

        return young


def guarded(track: Track, spec: str, checks: Checks) -> list[Line]:
    """A line a speed: a step with the guard over one without; rows it passes through the source."""
    fields, lines = track.fields(spec), []
    for speed in track.speeds:
        guard = fata.Guard(level=0.0)  # it finds nothing
        watched = track.ours(spec, fields, speed, guard)
        ways = {
            "without": partial(track.ours, spec, fields, speed),
            "with": partial(checks.of, watched, track.images),
        }
        ran = race(ways, track.images, track.rounds, checks.turn)
        before = watched.counts["rows_source"]
        for _ in range(checks.turn):
            ran["with"].call(track.images)
        if watched.guard.events:
            raise RuntimeError(f"the guard stepped in: {watched.guard.events}")
        seen = watched.counts["rows_source"] - before
        lines.append(
            {
                "model": track.name,
                "method": spec,
                "speed": speed,
                "without": ran["without"].per_second(len(track.images)),
                "with": ran["with"].per_second(len(track.images)),
                "costs": times(ran["with"], ran["without"]),
                "checked": seen / (checks.turn * len(track.images)),
            }
        )
    return lines


def table(lines: list[Line]) -> str:
    """The comparison, as a table of Markdown."""
    ways = list(lines[0]["ways"])
    ours = ways[1:]
    gpu = lines[0]["ways"]["plain"]["peak"] is not None
    head = ["network", "method", "rows", "forward", *ways]
    head += [f"{way} / plain" for way in ours] + [f"{way} / forward" for way in ours]
    head += ["FATA / host"]
    found = []
    for line in lines:
        own = line["ways"]
        row = [line["model"], line["method"]]
        row.append(", ".join(f"{share:.0%}" for share in line["selected"].values()))
        row.append(f"{line['forward']:,.0f}")
        for way in ways:
            memory = f" ({own[way]['peak'] / 2**30:.1f})" if gpu else ""
            row.append(f"{own[way]['images_per_second']:,.0f}{memory}")
        row += [f"{own[way]['over_plain']:.2f}" for way in ours]
        row += [f"{own[way]['over_forward']:.2f}" for way in ours]
        costs = [own[way]["over_host"] for way in ours]
        row.append(", ".join(f"{cost:.2f}" for cost in costs if cost is not None))
        found.append(row)
    return markdown(head, found)


def guard_table(lines: list[Line]) -> str:
    """What the guard costs, as a table of Markdown."""
    head = [
        "network",
        "method",
        "speed",
        "without",
        "with the guard",
        "with / without",
        "checked",
    ]
    rows = [
        [
            *(line[name] for name in ("model", "method", "speed")),
            *(f"{line[name]:,.0f}" for name in ("without", "with")),
            f"{line['costs']:.3f}",
            f"{line['checked']:.1%}",
        ]
        for line in lines
    ]
    return markdown(head, rows)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """What a figure depends on."""
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    given = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    return {**given, "on": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def run(args: argparse.Namespace) -> list[Line]:
    """All networks and methods that were asked for."""
    lines = []
    for name in args.models:
        torch.manual_seed(0)
        model, side = shares.build(name)
        images = torch.randn(args.batch, 3, side, side).to(args.device)
        model = shares.spread(model.to(args.device), images)
        track = Track(name, model, images, args.share, args.speeds, args.rounds)
        if args.guard:
            checks = Checks(args.guard == "first")
            lines += [line for spec in args.methods for line in guarded(track, spec, checks)]
            continue
        for host in dict.fromkeys(spec.partition("+")[0] for spec in args.methods):
            own = [spec for spec in args.methods if spec.partition("+")[0] == host]
            lines += compare(track, host, own)
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(mini.CIFAR10))
    parser.add_argument("--methods", nargs="+", default=list(SPECS), choices=SPECS)
    parser.add_argument("--speeds", nargs="+", default=["exact", "fast"], choices=["exact", "fast"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of the CPU; torch's own choice, if not given")
    parser.add_argument(
        "--share", default="0.4", help="of the rows that a term selects; or `embedded`"
    )
    parser.add_argument(
        "--guard",
        nargs="?",
        const="settled",
        choices=["settled", "first"],
        help="measure what the guard costs: long after a start, or in the first batches",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        lines = run(args)
    except (ValueError, ZooError) as error:
        parser.error(str(error))
    print((guard_table if args.guard else table)(lines))
    if args.json:
        found = {"conditions": conditions(args), "lines": lines}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
