"""How much chance decides in a cell: `python -m benchmarks.chance`.

    python -m benchmarks.chance --model mini_vit --data cifar10:DIR --methods deyo \
        --domains impulse_noise

Runs the same cells with weights that are changed at random, by a thousandth or two, about as much
as bfloat16 rounds them by. Where that moves a cell by a point, so may anything, and two ways of
computing it are not to be told apart there.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from torch import nn

import fata
from benchmarks.tables import markdown
from fata.bench.cell import key
from fata.bench.grid import Grid
from fata.bench.run.local import missing, run
from fata.bench.run.runner import CellRunner
from fata.bench.store import Store
from fata.commands.progress import ProgressDisplay
from fata.zoo import Loaded, Weights, ZooError

NUDGES = (0, 1e-3, -1e-3, 2e-3)


def nudge(model: nn.Module, by: float) -> None:
    """Change the weights at random, by such a share of each; the same numbers at every call."""
    draw = torch.Generator().manual_seed(0)
    for weights in model.parameters():
        weights.data *= (1 + by * torch.randn(weights.shape, generator=draw)).to(weights.device)


@dataclass
class Nudged(CellRunner):
    """A runner of such models."""

    by: float = 0

    def nudged(self, loaded: Loaded) -> Loaded:
        """What was loaded, changed."""
        if not self.by:
            return loaded
        nudge(loaded.model, self.by)
        weights = Weights.of(loaded.model, loaded.weights.tag, f"nudged by {self.by}")
        return replace(loaded, weights=weights)

    def _load(self, name: str) -> Loaded:
        return self.nudged(super()._load(name))


def numbers(text: str) -> list[float]:
    """With commas between."""
    return [float(number) for number in text.split(",")]


def table(args: argparse.Namespace) -> str:
    """Run what is missing; a line a cell, a column a nudge, and what they are on average."""
    store = Store(args.store)
    grid = Grid(
        models=(args.model,),
        data=(args.data,),
        methods=tuple(args.methods),
        domains=tuple(args.domains),
        images=args.images,
        fisher=args.fisher,
        speed=args.speed,
    )
    cells = list(grid.cells(fata.data.open))
    found: list[list[float]] = [[] for _ in cells]
    for by in args.nudges:
        runner = Nudged(args.device, fisher=args.fisher, by=by)
        tasks = missing(cells, store, runner, again=False)
        with ProgressDisplay(len(tasks)) as watcher:
            run(tasks, store, runner, watcher, args.jobs)
        accuracy = {record.key: record.result["accuracy"] for record in store}
        for own, cell in zip(found, cells, strict=True):
            own.append(accuracy.get(key(runner.protocol(cell)), math.nan))
    head = ["cell", *(f"{by:+g}" if by else "as it is" for by in args.nudges), "mean"]
    rows = [
        [f"{cell.method}, {cell.domains[0]}", *(f"{one:.2f}" for one in (*own, mean(own)))]
        for cell, own in zip(cells, found, strict=True)
    ]
    return markdown(head, rows)


def main() -> None:
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--fisher", default="embedded", help="clean images for EATA")
    parser.add_argument("--methods", nargs="+", required=True, help="as deyo+fata")
    parser.add_argument("--domains", nargs="+", required=True)
    parser.add_argument("--images", type=int, help="of each corruption; all, if not given")
    parser.add_argument("--nudges", type=numbers, default=NUDGES, help="as --nudges=0,-1e-3")
    parser.add_argument("--speed", default="exact")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--store", type=Path, default=Path("chance.db"))
    args = parser.parse_args()
    try:
        print(table(args))
    except (ValueError, ZooError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
