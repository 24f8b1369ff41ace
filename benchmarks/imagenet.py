"""Real ImageNet pictures and weights, by every method, next to the reference implementations.

    python -m benchmarks.imagenet --assets DIR --device cuda --jobs 6

DIR holds the weights, the pictures (tar files) and the `load.py` that the reference figures were
made with; the rates are those of the reference, and no method has a Fisher penalty. With
`--rates 0` the methods are taken as they are given, at the rates of the package. `--nudge 1e-3`
changes the weights as `benchmarks.chance` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fata
from benchmarks.chance import Nudged
from fata.bench.grid import Grid
from fata.bench.report.formats import markdown
from fata.bench.report.tables import comparisons
from fata.bench.run.local import missing, run
from fata.bench.store import Store
from fata.commands.progress import ProgressDisplay
from fata.zoo import Loaded, Preprocess, Weights

RATES = {"resnet50": (2.5e-4, 5e-4), "vit_tiny": (1e-3, 2.5e-4)}
STATISTICS = {"resnet50": "IMAGENET", "vit_tiny": "HALF"}
HOSTS = ("tent", "eata:fisher_alpha=0", "sar", "deyo")


def network(name: str, folder: str | Path) -> Loaded:
    """A network of the folder, `vit_tiny` or `resnet50`."""
    spec = importlib.util.spec_from_file_location("load", Path(folder) / "load.py")
    assert spec is not None
    assert spec.loader is not None
    load: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(load)
    statistics, model = getattr(load, STATISTICS[name]), getattr(load, name)()
    use = Preprocess(resize=224, size=224, interpolation="bilinear", **statistics)
    return Loaded(name, model, use, 1000, Weights.of(model, name, "assets"))


def unpack(folder: str | Path, place: Path) -> str:
    """Unpack the pictures of the folder; returns their name for `fata.data.open`."""
    for file in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(file) as tar:
            tar.extractall(place / "imagenet-pictures", filter="data")
    return f"folder:{place / 'imagenet-pictures'}"


@dataclass
class Assets(Nudged):
    """A runner that also knows the networks of a folder."""

    folder: str = ""

    def _load(self, name: str) -> Loaded:
        return self.nudged(network(name, self.folder)) if name in RATES else super()._load(name)


def methods(rates: tuple[float, ...]) -> tuple[str, ...]:
    """All methods, at each rate."""
    hosts = [host.partition(":") for host in HOSTS]
    return (
        "source",
        "norm",
        *(
            f"{host}{plus}:lr={rate}{colon}{fields}"
            for rate in rates
            for host, colon, fields in hosts
            for plus in ("", "+fata")
        ),
    )


def named(model: str, chosen: list[str] | None, rates: int) -> tuple[str, ...]:
    """The chosen methods (None: all) at so many of the reference's rates; 0: as they are."""
    if not rates:
        return tuple(chosen or ())
    known = methods(RATES[model][:rates])
    own = (m for m in known if chosen is None or m.partition(":")[0] in chosen)
    given = (f"{m}:lr={lr}" for lr in RATES[model][:rates] for m in chosen or () if ":" in m)
    return *own, *given


def main() -> None:
    """Unpack, run what is missing, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--assets", required=True)
    parser.add_argument("--models", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--images", type=int, help="of each corruption; all, if not given")
    parser.add_argument("--domains", nargs="+", help="the 15, if not given")
    parser.add_argument("--scenarios", nargs="+", default=["normal"])
    parser.add_argument("--methods", nargs="+", help="as deyo+fata, or with fields; default: all")
    parser.add_argument("--rates", type=int, default=2, help="how many of the reference's rates")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--speed", default="exact")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument(
        "--nudge", type=float, default=0, help="change the weights at random by so much"
    )
    parser.add_argument("--store", type=Path, default=Path("imagenet.db"))
    args = parser.parse_args()
    store, runner = Store(args.store), Assets(args.device, folder=args.assets, by=args.nudge)
    with tempfile.TemporaryDirectory() as folder:
        data, tasks = unpack(args.assets, Path(folder)), []
        for model in args.models:
            grid = Grid(
                models=(model,),
                data=(data,),
                methods=named(model, args.methods, args.rates),
                scenarios=tuple(args.scenarios),
                domains=tuple(args.domains) if args.domains else None,
                images=args.images,
                speed=args.speed,
                guard=args.guard,
            )
            tasks += missing(list(grid.cells(fata.data.open)), store, runner, again=False)
        with ProgressDisplay(len(tasks)) as watcher:
            run(tasks, store, runner, watcher, args.jobs)
    for comparison in comparisons(store):
        print(markdown(comparison))


if __name__ == "__main__":
    main()
