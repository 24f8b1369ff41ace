"""The cells of each table and figure of the paper, and their data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from fata._text import near
from fata.bench.cell import Cell
from fata.bench.grid import Grid, GridError
from fata.bench.paper.experiments import Experiment, experiments
from fata.corruptions import NAMES
from fata.data import open as open_data
from fata.data.domains import OFFICE_HOME

CORRUPTIONS = NAMES
DOMAINS = tuple(dict.fromkeys(OFFICE_HOME.values()))

# Networks of the package in place of the paper's, and their name of the layer.
STAND_INS = {
    "resnet50_bn": "mini_resnet_bn",
    "resnet50_gn": "mini_resnet_gn",
    "vit_base": "mini_vit",
}
_STEM = {"layer=maxpool": "layer=bn1"}
_SMALL = ("embedded", "cifar10", "cifar10-c")
_PUBLISHED = {"vit_base": "vit_base@sar"}  # the protocol of the paper's numbers


@dataclass(frozen=True)
class DataPaths:
    """Where the user's data is."""

    data: str | None = None  # for the networks in the package, or for `model`
    imagenet_c: Path | None = None
    imagenet: Path | None = None
    office_home: Path | None = None
    sources: Path = Path()  # models trained on Office-Home
    model: str | None = None  # in place of the paper's


class TableCell(NamedTuple):
    """A cell, and its place in the paper's table."""

    row: str
    part: str  # a corruption, or a shift such as `Art to Clipart`
    cell: Cell


@dataclass(frozen=True)
class Plan:
    """An experiment on the user's data."""

    cells: tuple[TableCell, ...]
    notes: tuple[str, ...] = ()  # what is not as in the paper
    jpeg: bool = False
    fisher: str | None = None


def experiment(name: str) -> Experiment:
    """An experiment by name."""
    if name not in experiments():
        raise GridError(
            f"nothing is called {name!r}: choose from {', '.join(experiments())}."
            f"{near(name, experiments())}"
        )
    return experiments()[name]


def plan(one: Experiment, given: DataPaths, seeds: int = 1, images: int | None = None) -> Plan:
    """The cells of an experiment; raises `GridError` for data that is not for it."""
    folders = (given.imagenet_c, given.imagenet, given.office_home)
    if given.data is not None and any(folders):
        raise GridError(f"--data {given.data} is instead of other data: give it alone.")
    if given.model is not None:
        made = _other(one, given.model, given.data, seeds, images)
    elif given.data is not None:
        made = _small(one, given.data, seeds, images)
    elif one.numbers.data == "office-home":
        made = _shifts(one, given, seeds, images)
    else:
        made = _corrupted(one, given, seeds, images)
    if images is None:
        return made
    return replace(made, notes=(*made.notes, f"At most {images} images of each stream."))


def with_methods(one: Experiment, methods: Sequence[str]) -> Experiment:
    """An experiment with further rows, which the paper does not have."""
    if methods and one.figure:
        raise GridError(f"--methods: {one.name} is a figure; give a table.")
    return replace(one, methods=(*one.methods, *methods))


def _other(one: Experiment, model: str, data: str | None, seeds: int, images: int | None) -> Plan:
    """With any model, on data that fits it."""
    if data is None:
        raise GridError(f"--model {model}: give --data too, such as --data folder:DIR.")
    note = (
        f"{model} on {data} in place of {one.numbers.model}: the paper's numbers are of another "
        f"network, so the difference is no test of anything."
    )
    return Plan(_cells(one, model, data, seeds, images), (note,))


def _small(one: Experiment, data: str, seeds: int, images: int | None) -> Plan:
    """On images of 32 pixels, with the networks in the package."""
    kind = data.partition(":")[0]
    if kind not in _SMALL:
        raise GridError(
            f"--data {data}: the networks in the package take embedded, cifar10:DIR or "
            f"cifar10-c:DIR; for other data there are --imagenet-c, --imagenet and --office-home."
        )
    asked = one.numbers.model
    model = STAND_INS[asked]
    notes = [
        f"{model} on {data} in place of {asked}: the paper's numbers are of other networks and "
        f"images, so the difference is no test of anything."
    ]
    if one.numbers.data == "office-home":
        notes.append("The 15 corruptions stand in for the 12 shifts of Office-Home.")
    cells = _cells(one, model, data, seeds, images)
    return Plan(cells, tuple(notes), fisher="embedded" if kind == "cifar10-c" else None)


def _corrupted(one: Experiment, given: DataPaths, seeds: int, images: int | None) -> Plan:
    model = _PUBLISHED.get(one.numbers.model, one.numbers.model)
    clean = f"imagenet:{given.imagenet}" if given.imagenet else None
    if given.imagenet_c is not None:
        cells = _cells(one, model, f"imagenet-c:{given.imagenet_c}", seeds, images)
        return Plan(cells, fisher=clean)
    if clean is None:
        raise GridError(
            f"{one.name} is run on ImageNet-C: give --imagenet-c DIR, or --imagenet DIR, whose "
            f"images are then corrupted here. --data embedded works at once, on networks and "
            f"images in the package."
        )
    notes = ("ImageNet, corrupted here and passed through JPEG: not the released images.",)
    return Plan(_cells(one, model, clean, seeds, images), notes, jpeg=True)


def _shifts(one: Experiment, given: DataPaths, seeds: int, images: int | None) -> Plan:
    """From each domain of Office-Home to the three others."""
    if given.office_home is None:
        raise GridError(
            f"{one.name} is run on Office-Home: give --office-home DIR, and --sources DIR with "
            f"what fata train-source made of each domain. --data embedded works at once, on "
            f"networks and images in the package."
        )
    data = f"office-home:{given.office_home}"
    files = {domain: _source(one, given, domain) for domain in DOMAINS}
    if missing := [domain for domain, file in files.items() if not file.is_file()]:
        domain = "all" if len(missing) == len(DOMAINS) else missing[0]
        command = ["fata", "train-source", "--data", data, "--domain", domain]
        command += ["--model", one.numbers.model, "-o", str(given.sources)]
        raise GridError(
            f"there is no source model {', '.join(str(files[name]) for name in missing)}: "
            f"{shlex.join(command)} makes {'them' if domain == 'all' else 'it'}."
        )
    cells: list[TableCell] = []
    for domain, file in files.items():
        targets = tuple(name for name in DOMAINS if name != domain)
        cells += _cells(one, str(file), data, seeds, images, targets, source=domain)
    notes = ("The source models are trained by our recipe: the paper does not say how.",)
    return Plan(tuple(cells), notes)


def _source(one: Experiment, given: DataPaths, domain: str) -> Path:
    """The file that `fata train-source` writes for a domain."""
    name = f"{one.numbers.model}-office-home-{domain.replace(' ', '-')}.safetensors"
    return given.sources / name


def _cells(
    one: Experiment,
    model: str,
    data: str,
    seeds: int,
    images: int | None,
    domains: Sequence[str] = (),
    source: str = "",
) -> tuple[TableCell, ...]:
    methods = one.methods
    if model in STAND_INS.values():
        methods = tuple(_at_stem(method) for method in methods)
    where = tuple(domains) or one.corruptions or CORRUPTIONS
    scenario = one.numbers.scenario
    grid = Grid((model,), (data,), methods, (scenario,), where, seeds=seeds, images=images)
    before = f"{source} to " if source else ""
    rows = cycle(m for m in one.methods for _ in range(seeds))  # in the order of a grid's cells
    cells = grid.cells(open_data)
    return tuple(TableCell(next(rows), before + cell.domains[0], cell) for cell in cells)


def _at_stem(method: str) -> str:
    return ":".join(_STEM.get(part, part) for part in method.split(":"))
