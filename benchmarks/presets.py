"""Settings of the embedded networks, found on corruptions that the benchmark never sees.

    python -m benchmarks.presets --data cifar10:DIR --fisher embedded --images 5000 --device cuda
    python -m benchmarks.presets --data tiny-imagenet:DIR --models tiny200_resnet_gn --device cuda
    python -m benchmarks.presets --hosts roid zerosiam nctta --device cuda

Tries rates (and EATA's margin and penalty) on the four extra corruptions, and writes for each host
those that are best in the mean of host and host with FATA into the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fata.bench import tune
from fata.bench.cell import Cell, key
from fata.bench.run.local import missing, run
from fata.bench.run.runner import CellRunner
from fata.bench.store import Record, Store
from fata.commands.progress import ProgressDisplay
from fata.zoo import embedded, mini

HOSTS = ("tent", "eata", "sar", "deyo")
NEWER = ("roid", "zerosiam", "nctta")  # tried at every other rate
MARGINS = {  # EATA's redundancy margin and Fisher penalty
    mini.CIFAR10: ((0.4, 2000.0), (0.4, 1.0), (1.0, 1.0)),
    mini.TINY200: ((0.05, 2000.0), (0.4, 2000.0), (0.4, 1.0)),
}


def settings(model: str, host: str) -> list[dict[str, float]]:
    """What is tried of a host, alone and with FATA."""
    tried: list[dict[str, float]] = [{}]
    if host == "eata":
        margins = next(margins for models, margins in MARGINS.items() if model in models)
        tried = [{"redundancy": margin, "fisher_alpha": alpha} for margin, alpha in margins]
    if host == "deyo":
        tried = [{"plpd_threshold": 0.2}]
    rates = tune.RATES[1::2] if host in NEWER else tune.RATES
    return [{**fields, "lr": rate} for fields in tried for rate in rates]


def cells(model: str, hosts: Sequence[str], **grid: Any) -> dict[str, dict[str, list[Cell]]]:
    """All that is tried, by host and by its settings as JSON: alone and with FATA."""
    return {
        host: {
            json.dumps(fields): [
                cell
                for plus in ("", "+fata")
                for cell in tune.cells(model, tune.spelled(host + plus, fields), **grid)
            ]
            for fields in settings(model, host)
        }
        for host in hosts
    }


def best(
    model: str, tried: dict[str, list[Cell]], kept: dict[str, Record], runner: CellRunner
) -> Any:
    """The settings of a host with the highest mean, FATA or not."""
    means = {
        fields: tune.accuracy([kept[key(runner.protocol(cell))] for cell in some])
        for fields, some in tried.items()
    }
    winner = max(means, key=means.__getitem__)
    print(f"{model:15} {means[winner]:6.2f} {winner}")
    return json.loads(winner)


def main() -> None:
    """Try, choose, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--models", nargs="+", default=mini.CIFAR10, choices=mini.NAMES)
    parser.add_argument("--hosts", nargs="+", default=HOSTS, choices=HOSTS + NEWER)
    parser.add_argument("--fisher", help="data with clean images; those of --data, if not given")
    parser.add_argument("--images", type=int, help="of each corruption; all, if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--store", type=Path, default=Path("presets.db"))
    args = parser.parse_args()
    grid = {"data": (args.data,), "images": args.images}
    tried = {model: cells(model, args.hosts, **grid) for model in args.models}
    every = [
        c for hosts in tried.values() for by in hosts.values() for some in by.values() for c in some
    ]
    store, runner = Store(args.store), CellRunner(args.device, fisher=args.fisher)
    tasks = missing(every, store, runner, again=False)
    with ProgressDisplay(len(tasks)) as watcher:
        run(tasks, store, runner, watcher, args.jobs)
    kept = {record.key: record for record in store}
    presets = json.loads(embedded.PRESETS.read_text())
    for model, hosts in tried.items():
        found = {host: best(model, by, kept, runner) for host, by in hosts.items()}
        presets[model] = {**presets.get(model, {}), **found}
    embedded.PRESETS.write_text(json.dumps(presets, indent=2) + "\n")


if __name__ == "__main__":
    main()
