"""Settings of the embedded networks, found on corruptions that the benchmark never sees.

    python -m benchmarks.presets --data cifar10:DIR --fisher embedded --images 5000 --device cuda
    python -m benchmarks.presets --data tiny-imagenet:DIR --models tiny200_resnet_gn --device cuda

Tries rates (and EATA's margin and penalty) on the four extra corruptions, and writes for each host
those that are best in the mean of host and host with FATA into the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import fata
from fata.bench.grid import Grid
from fata.bench.run.local import missing, run
from fata.bench.run.runner import CellRunner
from fata.bench.store import Record, Store
from fata.commands.progress import ProgressDisplay
from fata.corruptions import EXTRA
from fata.zoo import embedded, mini

HOSTS = ("tent", "eata", "sar", "deyo")
RATES = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2)
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
    return [{**fields, "lr": rate} for fields in tried for rate in RATES]


def methods(model: str) -> tuple[str, ...]:
    """All that is tried, as `fata bench` takes it."""
    return tuple(
        ":".join([host + plus, *(f"{name}={value}" for name, value in fields.items())])
        for host in HOSTS
        for fields in settings(model, host)
        for plus in ("", "+fata")
    )


def best(models: Sequence[str], records: list[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each network and host the settings with the highest mean, FATA or not."""
    chosen: dict[str, dict[str, dict[str, Any]]] = {}
    for model in models:
        for host in HOSTS:
            found: dict[str, list[float]] = {}
            for record in records:
                protocol = record.protocol
                if protocol["model"] == model and protocol["host"]["name"] == host:
                    here = {**protocol["host"], "lr": protocol["lr"]}
                    for fields in settings(model, host):
                        if fields.items() <= here.items():
                            accuracy = record.result["accuracy"]
                            found.setdefault(json.dumps(fields), []).append(accuracy)
            winner = max(found, key=lambda key: mean(found[key]))
            print(f"{model:15} {host:5} {mean(found[winner]):6.2f} {winner}")
            chosen.setdefault(model, {})[host] = json.loads(winner)
    return chosen


def main() -> None:
    """Try, choose, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--models", nargs="+", default=mini.CIFAR10, choices=mini.NAMES)
    parser.add_argument("--fisher", help="data with clean images; those of --data, if not given")
    parser.add_argument("--images", type=int, help="of each corruption; all, if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--store", type=Path, default=Path("presets.db"))
    args = parser.parse_args()
    cells = [
        cell
        for model in args.models
        for cell in Grid(
            models=(model,),
            data=(args.data,),
            methods=methods(model),
            domains=tuple(EXTRA),
            images=args.images,
            fisher=args.fisher,
        ).cells(fata.data.open)
    ]
    store, runner = Store(args.store), CellRunner(args.device, fisher=args.fisher)
    tasks = missing(cells, store, runner, again=False)
    with ProgressDisplay(len(tasks)) as watcher:
        run(tasks, store, runner, watcher, args.jobs)
    presets = {**json.loads(embedded.PRESETS.read_text()), **best(args.models, list(store))}
    embedded.PRESETS.write_text(json.dumps(presets, indent=2) + "\n")


if __name__ == "__main__":
    main()
