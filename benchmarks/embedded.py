"""The embedded networks under corruption, by every method, with and without FATA.

    python -m benchmarks.embedded table --data cifar10:DIR --seeds 3 --device cuda --jobs 15
    python -m benchmarks.embedded presets --data cifar10:DIR --images 5000 --device cuda --jobs 15

`table` runs the benchmark's 15 corruptions with the presets in the package; `presets` finds those:
it tries settings on the four extra corruptions, which the table never sees, and keeps for each host
those that are best in the mean of host and host with FATA. Every run is a line of a JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import fata
from fata.corruptions import EXTRA, NAMES
from fata.data import Dataset, Domain, Stream
from fata.losses import entropy
from fata.zoo import Loaded, embedded

HOSTS = ("tent", "eata", "sar", "deyo")
SPECS = ("source", "norm", *(f"{host}{plus}" for host in HOSTS for plus in ("", "+fata")))
RATES = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2)
TRIED: dict[str, list[dict[str, Any]]] = {
    "tent": [{}],
    "eata": [
        {"redundancy": margin, "fisher_alpha": alpha}
        for margin, alpha in ((0.4, 2000.0), (0.4, 1.0), (1.0, 1.0))
    ],
    "sar": [{}],
    "deyo": [{"plpd_threshold": 0.2}],
}


@dataclass(frozen=True)
class Run:
    """One network, one domain, one order, one method with its settings."""

    model: str
    domain: str
    severity: int
    seed: int
    images: int | None
    spec: str
    fields: dict[str, Any] = field(hash=False)


@lru_cache(1)
def _data(spec: str) -> Dataset:
    return fata.data.open(spec)


@lru_cache(1)
def _model(name: str, device: str) -> Loaded:
    loaded = fata.zoo.load(name)
    loaded.model.to(device)
    return loaded


@lru_cache(1)
def _images(spec: str, model: str, domain: Domain, device: str) -> tuple[Tensor, Tensor]:
    """All images of a domain as the network takes them, and their labels, on the device."""
    pictures = _data(spec).of(domain)
    assert isinstance(pictures, fata.data.dataset.Arrays)
    pixels = torch.cat(
        [
            _data(spec).finish(part.to(device).float() / 255, domain, ids)
            for part, ids in zip(
                pictures.images.split(2000),
                torch.arange(len(pictures.labels)).split(2000),
                strict=True,
            )
        ]
    )
    return _model(model, device).preprocess.normalise(pixels), pictures.labels.to(device)


@lru_cache(1)
def _fisher(model: str, device: str) -> dict[str, Tensor]:
    """Of the clean images in the package."""
    loaded = _model(model, device)
    clean = fata.stream(fata.data.open("embedded"), domains=["clean"])
    batches = (loaded.preprocess.normalise(b.images) for b in clean.serve(device))
    adapter = fata.adapt(loaded.model, "eata", fisher_data=batches)
    fisher = adapter.fisher
    adapter.unwrap()
    assert fisher is not None
    return fisher


def work(job: tuple[str, str, list[Run]]) -> list[dict[str, Any]]:
    """Runs that share a network and a domain."""
    spec, device, runs = job
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    return [{**asdict(run), **measure(spec, device, run)} for run in runs]


def measure(data: str, device: str, run: Run) -> dict[str, Any]:
    """Accuracy over the stream, and what tells a collapse from a success."""
    loaded = _model(run.model, device)
    (domain,) = _data(data).named([run.domain], run.severity)
    images, labels = _images(data, run.model, domain, device)
    order = _order(data, run)
    settings = {**loaded.settings(run.spec), **run.fields}
    if run.spec.startswith("eata"):
        settings["fisher_data"] = _fisher(run.model, device)
    adapter = fata.adapt(loaded.model, run.spec, seed=run.seed, **settings)
    started = time.perf_counter()
    logits = torch.cat(
        [adapter(images[order.index[first:last].to(device)]) for first, last, _ in order.spans]
    )
    took = time.perf_counter() - started
    counts = adapter.counts
    adapter.reset()
    adapter.unwrap()
    right = (logits.argmax(1) == labels[order.index.to(device)]).float()
    late = slice(3 * len(right) // 4, None)
    sure = entropy(logits) < 0.5 * math.log(logits.shape[1])
    return {
        "settings": {k: v for k, v in settings.items() if k != "fisher_data"},
        "accuracy": 100 * right.mean().item(),
        "late": 100 * right[late].mean().item(),
        "top_class": 100 * logits[late].argmax(1).bincount().max().item() / len(right[late]),
        "sure": 100 * sure.float().mean().item(),
        "sure_right": 100 * right[sure].mean().item() if sure.any() else None,
        "selected": {k: 100 * v / len(right) for k, v in counts["selected"].items()},
        "seconds": took,
    }


def _order(data: str, run: Run) -> Stream:
    return fata.stream(
        _data(data),
        "normal",
        domains=[run.domain],
        severity=run.severity,
        seed=run.seed,
        images=run.images,
    )


def run_all(
    data: str, device: str, jobs: int, groups: Sequence[list[Run]], out: Path
) -> list[dict[str, Any]]:
    """Every run, some processes at a time; each is written as soon as its group is done."""
    todo = [(data, device, runs) for runs in groups]
    results: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, out.open("a") as file:
        done = pool.imap_unordered(work, todo)
        for part in track(done, "running", total=len(todo)):
            results += part
            file.writelines(json.dumps(result) + "\n" for result in part)
            file.flush()
    return results


def table(args: argparse.Namespace) -> list[list[Run]]:
    """The 15 corruptions; a group a network, corruption and seed."""
    return [
        [Run(model, name, args.severity, seed, args.images, spec, {}) for spec in args.methods]
        for seed in range(args.seeds)
        for model in reversed(args.models)
        for name in NAMES
    ]


def presets(args: argparse.Namespace) -> list[list[Run]]:
    """Settings on the extra corruptions; a group a network, corruption and host."""
    return [
        [
            Run(model, name, args.severity, 0, args.images, host + plus, {**fields, "lr": rate})
            for fields in TRIED[host]
            for rate in args.rates
            for plus in ("", "+fata")
        ]
        for host in ("eata", "deyo", "sar", "tent")
        for name in EXTRA
        for model in reversed(args.models)
    ]


def show_table(results: list[dict[str, Any]], specs: Sequence[str]) -> None:
    """One table a network: mean over seeds, and the deviation of the average."""
    for model in dict.fromkeys(r["model"] for r in results):
        print(f"\n### {model}\n\n| | {' | '.join(specs)} |\n|---|{'---|' * len(specs)}")
        cells = {
            (name, spec): [
                r["accuracy"]
                for r in sorted(results, key=lambda r: r["seed"])
                if (r["model"], r["domain"], r["spec"]) == (model, name, spec)
            ]
            for name in NAMES
            for spec in specs
        }
        for name in NAMES:
            row = (f"{statistics.mean(cells[name, spec]):.2f}" for spec in specs)
            print(f"| {name} | {' | '.join(row)} |")
        means = {
            spec: [statistics.mean(v) for v in zip(*(cells[n, spec] for n in NAMES), strict=True)]
            for spec in specs
        }
        row = (
            f"{statistics.mean(v):.2f} ± {statistics.stdev(v) if len(v) > 1 else 0:.2f}"
            for v in means.values()
        )
        print(f"| **mean** | {' | '.join(row)} |")


def best(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings of each network and host, alone and with FATA, with the highest mean."""
    chosen: dict[str, dict[str, dict[str, Any]]] = {}
    for model in embedded.NAMES:
        for host in HOSTS:
            found: dict[str, list[float]] = {}
            for r in results:
                if r["model"] == model and r["spec"] in (host, f"{host}+fata"):
                    found.setdefault(json.dumps(r["fields"]), []).append(r["accuracy"])
            ranked = sorted(found, key=lambda key: -statistics.mean(found[key]))
            for key in ranked[:3]:
                print(f"{model:15} {host:5} {statistics.mean(found[key]):6.2f} {key}")
            chosen.setdefault(model, {})[host] = json.loads(ranked[0])
    return chosen


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["table", "presets"])
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--models", nargs="+", default=list(embedded.NAMES))
    parser.add_argument("--methods", nargs="+", default=list(SPECS))
    parser.add_argument("--images", type=int, help="of each corruption; all, if not given")
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="to try")
    parser.add_argument("--earlier", type=Path, help="runs to choose the presets from as well")
    parser.add_argument("--out", type=Path, default=Path("embedded.jsonl"))
    args = parser.parse_args()
    started = time.perf_counter()
    print(json.dumps(_data(args.data).provenance))
    groups = table(args) if args.what == "table" else presets(args)
    results = run_all(args.data, args.device, args.jobs, groups, args.out)
    if args.what == "table":
        show_table(results, args.methods)
    else:
        earlier = args.earlier.read_text().splitlines() if args.earlier else []
        chosen = best(results + [json.loads(line) for line in earlier])
        embedded.PRESETS.write_text(json.dumps(chosen, indent=2) + "\n")
    print(f"\n{len(results)} runs in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
