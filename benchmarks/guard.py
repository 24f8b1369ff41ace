"""The guard on corruptions that the benchmark never sees: `python -m benchmarks.guard`.

    python -m benchmarks.guard --data cifar10:DIR --images 4000

Not adapting, and each method without and with the guard, on the four extra corruptions; what the
guard did. The rates of some are too high on purpose.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fata
from fata.bench.grid import Grid
from fata.bench.run.local import missing, run
from fata.bench.run.runner import CellRunner
from fata.bench.store import Record, Store
from fata.commands.progress import ProgressDisplay
from fata.corruptions import EXTRA
from fata.zoo import mini

HOSTS = ("tent", "eata", "sar", "deyo")
RATES = ("", ":lr=0.001", ":lr=0.1")  # the package's own, gentler than most of those, far too high
METHODS = tuple(f"{host}{plus}{rate}" for host in HOSTS for plus in ("", "+fata") for rate in RATES)


def show(records: list[Record]) -> None:
    """A line a cell: not adapting, without and with the guard, and its events."""
    found: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        p = record.protocol
        at = (p["model"], p["scenario"]["name"], p["domains"][0], str(p["seed"]))
        kind = "guarded" if p["guard"] else "free"
        found.setdefault(at, {})[f"{p['method']} {p['lr']} {kind}"] = record
    worst = 0.0
    for at, cells in found.items():
        still = max(
            record.result["accuracy"]
            for name, record in cells.items()
            if name.split()[0] in ("source", "norm")
        )
        for name, record in cells.items():
            if name.endswith("guarded") and name.split()[0] not in ("source", "norm"):
                free = cells[name.replace("guarded", "free")].result["accuracy"]
                held = record.result["accuracy"]
                worst = min(worst, held - still)
                events = [f"{e['action']} at {e['batch']}" for e in record.result["guard"]]
                method = " ".join(name.split()[:2])
                print(
                    f"{' '.join(at):45} {method:18} {still:6.2f} {free:6.2f} {held:6.2f} {events}"
                )
    print(
        f"not adapting, without, with the guard; with it at worst {worst:+.2f} against not adapting"
    )


def main() -> None:
    """Run what is missing, and show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--models", nargs="+", default=list(mini.CIFAR10))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--domains", nargs="+", default=list(EXTRA))
    parser.add_argument("--scenarios", nargs="+", default=["normal"])
    parser.add_argument("--images", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--store", type=Path, default=Path("guard.db"))
    args = parser.parse_args()
    store, runner = Store(args.store), CellRunner(args.device, fisher="embedded")
    fields = {
        "models": tuple(args.models),
        "data": (args.data,),
        "scenarios": tuple(args.scenarios),
        "domains": tuple(args.domains),
        "images": args.images,
        "fisher": "embedded",
    }
    tasks = []
    for guard in (False, True):
        grid = Grid(**fields, methods=("source", "norm", *args.methods), guard=guard)
        tasks += missing(list(grid.cells(fata.data.open)), store, runner, again=False)
    with ProgressDisplay(len(tasks)) as watcher:
        run(tasks, store, runner, watcher, args.jobs)
    show(list(store))


if __name__ == "__main__":
    main()
