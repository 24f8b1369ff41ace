"""What class balance gives to a host, to FATA and to both: `python -m benchmarks.balance`.

    python -m benchmarks.balance --models mini_resnet_gn --scenarios normal label-shift
    python -m benchmarks.balance --models tiny200_resnet_gn --data tiny-imagenet:DIR --device cuda

On the extra corruptions unless others are named, without the guard. Prints a table of means, and
for each form of FATA how often it is at most 0.3 points below its host, by how much at most, and
how many streams end over a point below the unadapted model. `--form` takes another form of the
balance than the package's, for the ablation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import fata
from benchmarks.presets import HOSTS
from benchmarks.tables import markdown
from fata.bench.grid import Grid
from fata.bench.run.local import missing, run
from fata.bench.run.runner import CellRunner
from fata.bench.store import Record, Store
from fata.commands.progress import ProgressDisplay
from fata.corruptions import EXTRA
from fata.engine import step
from fata.methods import balance
from fata.methods.base import Batch, Memory
from fata.methods.losses import weighted_mean
from fata.methods.selection import Selection
from fata.zoo import Loaded, Weights

COLUMNS = {  # of a host: what is added to its name
    "host": "",
    "host balanced": ":balance=True",
    "+fata": "+fata",
    "+fata, fata balanced": "+fata:fata_balance=True",
    "+fata, both balanced": "+fata:balance=True:fata_balance=True",
}
NEAR, HARM = 0.3, 1.0  # points


# -- other forms ----------------------------------------------------------------------------------


def _counted(batch: Batch, memory: Memory) -> Tensor:
    """The mean of predicted classes instead of probabilities."""
    certain = torch.nn.functional.one_hot(batch.pseudo_label, batch.classes) * 1e4
    return balance.mean_prediction(replace(batch, logits=certain.float()), memory)


def _share(batch: Batch, mean_probs: Tensor) -> Tensor:
    """min(1, 1 / (C m[y])): rows of rare classes count no more than others."""
    return (1 / (batch.classes * mean_probs[batch.pseudo_label])).clamp(max=1)


def _bounded(batch: Batch, mean_probs: Tensor) -> Tensor:
    """2 / (m[y] + 1 / C): no class counts over twice as much as one with an even share."""
    return 2 / (mean_probs[batch.pseudo_label] + 1 / batch.classes)


def _shrunk(values: Tensor, selection: Selection, *others: Any) -> Tensor:
    """The mean of w f l: less is learned where classes are uneven."""
    group, factor = others
    if factor is not None:
        selection = Selection(selection.rows, selection.weights * factor)
    return weighted_mean(values, selection, group)


FORMS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "equal parts": {},
    "bounded": {"rarity": _bounded},
    "counts": {"mean_prediction": _counted},
    "shrunk": {"rarity": _share, "weighted_mean": _shrunk},
}


@dataclass
class Formed(CellRunner):
    """A runner whose process balances by another form."""

    form: str = "equal parts"

    def __post_init__(self) -> None:
        """Also called in the processes of a run."""
        super().__post_init__()
        for name, function in FORMS[self.form].items():
            setattr(step, name, function)

    def _load(self, name: str) -> Loaded:
        loaded = super()._load(name)
        if not FORMS[self.form]:
            return loaded
        weights = Weights.of(loaded.model, loaded.weights.tag, f"balanced by {self.form}")
        return replace(loaded, weights=weights)


# -- the table ------------------------------------------------------------------------------------


def column(record: Record) -> str:
    """Which of `COLUMNS` a cell is."""
    protocol = record.protocol
    host, plus = protocol["host"]["balance"], protocol["plus"]
    if plus is None:
        return "host balanced" if host else "host"
    both = {(False, False): "", (False, True): ", fata balanced", (True, True): ", both balanced"}
    return "+fata" + both[host, plus["balance"]]


def show(records: Iterable[Record]) -> None:
    """Means by network, scenario and host; then how the forms of FATA compare with the host."""
    found: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for record in records:
        protocol = record.protocol
        at = (protocol["model"], protocol["scenario"]["name"], protocol["host"]["name"])
        cell = f"{protocol['domains']} {protocol['seed']}"
        found.setdefault(at, {}).setdefault(column(record), {})[cell] = record.result["accuracy"]
    rows, gaps = [], dict[str, list[tuple[float, float]]]()
    for (model, scenario, host), own in found.items():
        if host == "source" or "host" not in own:
            continue
        source = found[model, scenario, "source"]["host"]
        means = [f"{mean(own[name].values()):.2f}" if name in own else "" for name in COLUMNS]
        rows.append([model, scenario, host, f"{mean(source.values()):.2f}", *means])
        for name in COLUMNS:
            for cell in own.get(name, {}).keys() & own["host"].keys():
                gap = own[name][cell] - own["host"][cell], own[name][cell] - source[cell]
                gaps.setdefault(name, []).append((round(gap[0], 6), round(gap[1], 6)))
    print(markdown(["network", "scenario", "host", "source", *COLUMNS], rows))
    print()
    for name, both in gaps.items():
        over, unadapted = zip(*both, strict=True)
        near = 100 * mean(gap >= -NEAR for gap in over)
        harmed = sum(gap < -HARM for gap in unadapted)
        print(
            f"{name}: {mean(over):+.2f} over the host in {len(both)} cells, at most {NEAR} below "
            f"it in {near:.1f} %, at worst {min(over):+.2f}; {harmed} end {HARM:g} below source"
        )


def main() -> None:
    """Run what is missing, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["mini_resnet_gn"])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--fisher", help="data with clean images; those of --data, if not given")
    parser.add_argument("--hosts", nargs="+", default=list(HOSTS), choices=HOSTS)
    parser.add_argument("--scenarios", nargs="+", default=["normal"])
    parser.add_argument("--domains", nargs="+", default=list(EXTRA))
    parser.add_argument("--images", type=int, help="of each corruption; all, if not given")
    parser.add_argument("--form", default="equal parts", choices=list(FORMS))
    parser.add_argument("--fields", default="", help="of every method: fisher_alpha=0:lr=0.0025")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--store", type=Path, default=Path("balance.db"))
    args = parser.parse_args()
    names = [host + more for host in args.hosts for more in COLUMNS.values()]
    fields = f":{args.fields}" if args.fields else ""
    grid = Grid(
        models=tuple(args.models),
        data=(args.data,),
        methods=("source", *(f"{name}{fields}" for name in names)),
        scenarios=tuple(args.scenarios),
        domains=tuple(args.domains),
        images=args.images,
        fisher=args.fisher,
    )
    store, runner = Store(args.store), Formed(args.device, fisher=args.fisher, form=args.form)
    tasks = missing(list(grid.cells(fata.data.open)), store, runner, again=False)
    with ProgressDisplay(len(tasks)) as watcher:
        run(tasks, store, runner, watcher, args.jobs)
    show(store)


if __name__ == "__main__":
    main()
