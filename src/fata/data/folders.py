"""Data sets that are folders of pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from PIL import Image

from fata.corruptions import BY_NAME
from fata.data.dataset import MADE, Dataset, Domain, Files, Pictures
from fata.data.errors import DataError
from fata.structure import listed

View = Callable[[Image.Image], Image.Image]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
OFFICE_HOME = {
    "Art": ("art",),
    "Clipart": ("clipart",),
    "Product": ("product",),
    "Real World": ("realworld", "real"),
}


def imagenet(spec: str, folder: Path, view: View, jpeg: bool) -> Dataset:
    """Validation pictures in a folder a synset; corruptions are made on the fly."""
    folder = _inside(folder, "val")
    synsets = _synsets()
    pictures = _files(folder, _synset_folders(folder, synsets), view)
    return Dataset(spec, tuple(synsets), MADE, lambda _: pictures, made=True, jpeg=jpeg)


def imagenet_c(spec: str, folder: Path, view: View) -> Dataset:
    """The released layout, `corruption/severity/synset/picture`, whatever of it is there."""
    synsets = _synsets()
    places = {
        Domain(corruption.name, int(severity.name)): severity
        for parent in (folder, *_folders(folder))  # as unpacked, or below noise/, blur/, ...
        for corruption in _folders(parent)
        if corruption.name in BY_NAME
        for severity in _folders(corruption)
        if severity.name in "12345"
    }
    if not places:
        raise DataError(
            f"no ImageNet-C in {folder}: expected folders such as gaussian_noise/5/n01440764/, "
            f"found {_found(folder)}."
        )
    order = list(BY_NAME)
    domains = sorted(places, key=lambda domain: (order.index(domain.name), domain.severity))

    def pictures(domain: Domain) -> Pictures:
        place = places[domain]
        return _files(place, _synset_folders(place, synsets), view)

    return Dataset(spec, tuple(synsets), tuple(domains), pictures)


def office_home(spec: str, folder: Path, view: View) -> Dataset:
    """Four domains of 65 classes, under any of the spellings that circulate."""
    place = _inside(folder, "OfficeHomeDataset_10072016", "OfficeHome", "office_home")
    spelled = {re.sub("[^a-z]", "", inner.name.lower()): inner for inner in _folders(place)}
    domains = {
        domain: next(spelled[key] for key in keys if key in spelled)
        for domain, keys in OFFICE_HOME.items()
        if any(key in spelled for key in keys)
    }
    missing = [domain for domain in OFFICE_HOME if domain not in domains]
    if missing:
        raise DataError(
            f"Office-Home in {place}: no folder for {listed(missing)} (spellings such as "
            f"'Real World', 'Real_World', 'RealWorld' are all right); found {_found(place)}."
        )
    dataset = _with_domains(spec, domains, view)
    if len(dataset.classes) != 65:
        raise DataError(f"Office-Home has 65 classes; {place} has {len(dataset.classes)}.")
    return dataset


def folder_of(spec: str, folder: Path, view: View, jpeg: bool) -> Dataset:
    """One folder a class, corrupted on the fly; or one folder a domain with those in it."""
    inner = _folders(folder)
    if not inner:
        raise DataError(f"{folder} has no folders: expected one a class, or one a domain.")
    if all(_folders(domain) for domain in inner):
        return _with_domains(spec, {domain.name: domain for domain in inner}, view)
    classes, labels = _numbered([one.name for one in inner])
    pictures = _files(folder, labels, view)
    return Dataset(spec, classes, MADE, lambda _: pictures, made=True, jpeg=jpeg)


def _with_domains(spec: str, domains: Mapping[str, Path], view: View) -> Dataset:
    names = {domain: {one.name for one in _folders(place)} for domain, place in domains.items()}
    every = set().union(*names.values())
    for domain, there in names.items():
        if gone := sorted(every - there):
            raise DataError(
                f"{domains[domain]} has no folder for the class{'es' if len(gone) > 1 else ''} "
                f"{listed(gone, 6)}, which other domains have."
            )
    classes, labels = _numbered(every)
    return Dataset(
        spec,
        classes,
        tuple(Domain(name) for name in domains),
        lambda domain: _files(domains[domain.name], labels, view),
    )


def _numbered(names: Iterable[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Classes and the label of each: in alphabetical order, unless their names are numbers."""
    names = sorted(names)
    if all(name.isdecimal() for name in names):
        labels = {name: int(name) for name in names}
        return tuple(str(label) for label in range(max(labels.values()) + 1)), labels
    return tuple(names), {name: label for label, name in enumerate(names)}


def _files(folder: Path, labels: Mapping[str, int], view: View) -> Files:
    paths: list[str] = []
    numbers: list[int] = []
    for name, label in labels.items():
        inside = [e.name for e in os.scandir(folder / name) if e.name.lower().endswith(SUFFIXES)]
        inside = sorted(file for file in inside if not file.startswith("."))
        if not inside:
            raise DataError(
                f"{folder / name} has no picture: expected files ending in {', '.join(SUFFIXES)}."
            )
        paths += [f"{name}/{file}" for file in inside]
        numbers += [label] * len(inside)
    return Files(folder, paths, torch.tensor(numbers), view)


def _synset_folders(folder: Path, synsets: Mapping[str, int]) -> dict[str, int]:
    labels = {
        inner.name: synsets[inner.name] for inner in _folders(folder) if inner.name in synsets
    }
    if not labels:
        raise DataError(
            f"no ImageNet pictures in {folder}: expected a folder a synset, such as n01440764/; "
            f"found {_found(folder)}. Validation pictures that lie in one folder must be sorted "
            f"into those first."
        )
    return labels


def _synsets() -> dict[str, int]:
    from timm.data.imagenet_info import ImageNetInfo

    names = ImageNetInfo("imagenet-1k").label_names()  # type: ignore[no-untyped-call]
    return {name: label for label, name in enumerate(names)}


def _inside(folder: Path, *names: str) -> Path:
    """The folder, or the one of these names in it."""
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _found(folder: Path) -> str:
    return listed(sorted(p.name for p in folder.iterdir()), 6) or "nothing"
