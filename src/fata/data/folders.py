"""Data sets that are folders of images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fata._text import listed
from fata.corruptions import BY_NAME, SEVERITIES
from fata.data.dataset import MADE, Dataset, Domain, ImageFiles, ImageSource
from fata.data.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

View = Callable[["Image.Image"], "Image.Image"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
OFFICE_HOME = {
    "art": "Art",
    "clipart": "Clipart",
    "product": "Product",
    "realworld": "Real World",
    "real": "Real World",
}
_MOST_CLASSES = 100_000


def imagenet(spec: str, folder: Path, view: View, jpeg: bool) -> Dataset:
    """Validation images in a folder a synset; corruptions are made on the fly."""
    place = folder / "val" if (folder / "val").is_dir() else folder
    synsets = _synsets()
    source = _files(place, _synset_folders(place, synsets), view)
    return Dataset(spec, tuple(synsets), MADE, lambda _: source, made=True, jpeg=jpeg)


def imagenet_c(spec: str, folder: Path, view: View) -> Dataset:
    """The released layout, `corruption/severity/synset/image`; parts may be missing."""
    synsets = _synsets()
    places = {
        Domain(corruption.name, int(severity.name)): severity
        for parent in (folder, *_folders(folder))  # as unpacked, or below noise/, blur/, ...
        for corruption in _folders(parent)
        if corruption.name in BY_NAME
        for severity in _folders(corruption)
        if severity.name in map(str, SEVERITIES)
    }
    if not places:
        raise DataError(
            f"no ImageNet-C in {folder}: expected folders such as gaussian_noise/5/n01440764/, "
            f"found {_found(folder)}."
        )
    order = list(BY_NAME)
    domains = sorted(places, key=lambda domain: (order.index(domain.name), domain.severity))

    def source(domain: Domain) -> ImageSource:
        place = places[domain]
        return _files(place, _synset_folders(place, synsets), view)

    return Dataset(spec, tuple(synsets), tuple(domains), source)


def office_home(spec: str, folder: Path, view: View) -> Dataset:
    """Four domains of 65 classes, under any of the spellings that circulate."""
    place = max((folder, *_folders(folder)), key=lambda place: len(_office_home(place)))
    domains = _office_home(place)
    names = dict.fromkeys(OFFICE_HOME.values())
    if missing := [name for name in names if name not in domains]:
        raise DataError(
            f"Office-Home in {place}: no folder for {listed(missing)} (spellings such as "
            f"'Real World', 'Real_World', 'RealWorld' are all right); found {_found(place)}."
        )
    dataset = _with_domains(spec, {name: domains[name] for name in names}, view)
    if len(dataset.classes) != 65:
        raise DataError(f"Office-Home has 65 classes; {place} has {len(dataset.classes)}.")
    return dataset


def _office_home(place: Path) -> dict[str, Path]:
    spelled = {re.sub("[^a-z]", "", inner.name.lower()): inner for inner in _folders(place)}
    return {OFFICE_HOME[key]: inner for key, inner in spelled.items() if key in OFFICE_HOME}


def folder_of(spec: str, folder: Path, view: View, jpeg: bool) -> Dataset:
    """One folder a class, corrupted on the fly; or one folder a domain with those in it."""
    inner = _folders(folder)
    if not inner:
        raise DataError(f"{folder} has no folders: expected one a class, or one a domain.")
    domains = [one for one in inner if _folders(one) and not _image_names(one)]
    if not domains:
        classes, labels = _numbered(folder, [one.name for one in inner])
        source = _files(folder, labels, view)
        return Dataset(spec, classes, MADE, lambda _: source, made=True, jpeg=jpeg)
    if other := [one for one in inner if one not in domains]:
        raise DataError(
            f"{domains[0]} has folders in it, {other[0]} has none: expected either one folder a "
            f"class in {folder}, or one a domain with one a class in it."
        )
    if jpeg:
        raise DataError(f"jpeg: the domains of {folder} are taken as they are on the disk.")
    return _with_domains(spec, {domain.name: domain for domain in domains}, view)


def _with_domains(spec: str, domains: Mapping[str, Path], view: View) -> Dataset:
    names = {domain: {one.name for one in _folders(place)} for domain, place in domains.items()}
    every = set().union(*names.values())
    for domain, there in names.items():
        if gone := sorted(every - there):
            raise DataError(
                f"{domains[domain]} has no folder for the class{'es' if len(gone) > 1 else ''} "
                f"{listed(gone, 6)}, which other domains have."
            )
    classes, labels = _numbered(next(iter(domains.values())), every)
    return Dataset(
        spec,
        classes,
        tuple(Domain(name) for name in domains),
        lambda domain: _files(domains[domain.name], labels, view),
    )


def _numbered(folder: Path, names: Iterable[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Classes and the label of each: in alphabetical order, unless their names are numbers."""
    names = sorted(names)
    if not all(name.isdecimal() for name in names):
        return tuple(names), {name: label for label, name in enumerate(names)}
    labels = {name: int(name) for name in names}
    highest = max(names, key=int)
    if labels[highest] >= _MOST_CLASSES:
        raise DataError(
            f"{folder / highest}: folders named by numbers are taken for labels, 0 to "
            f"{_MOST_CLASSES - 1:,}. Rename them where their numbers are none."
        )
    return tuple(str(label) for label in range(labels[highest] + 1)), labels


def _files(folder: Path, labels: Mapping[str, int], view: View) -> ImageFiles:
    paths: list[str] = []
    numbers: list[int] = []
    for name, label in labels.items():
        inside = _image_names(folder / name)
        if not inside:
            raise DataError(
                f"{folder / name} has no image: expected files ending in {', '.join(SUFFIXES)}."
            )
        paths += [f"{name}/{file}" for file in inside]
        numbers += [label] * len(inside)
    return ImageFiles(folder, paths, torch.tensor(numbers), view)


def ignored_files(source: ImageFiles) -> Iterator[str]:
    """Files and folders that are not read, apart from hidden ones."""
    used = set(source.paths)
    classes = {path.partition("/")[0] for path in used}
    for name, _ in _listing(source.folder):
        if name not in classes:
            yield str(source.folder / name)
            continue
        for inner, _ in _listing(source.folder / name):
            if f"{name}/{inner}" not in used:
                yield str(source.folder / name / inner)


def _synset_folders(folder: Path, synsets: Mapping[str, int]) -> dict[str, int]:
    names = [inner.name for inner in _folders(folder)]
    labels = {name: synsets[name] for name in names if name in synsets}
    if not labels:
        raise DataError(
            f"no ImageNet images in {folder}: expected a folder a synset, such as n01440764/; "
            f"found {_found(folder)}. Validation images in one folder must be sorted "
            f"into those first."
        )
    return labels


def _synsets() -> dict[str, int]:
    try:
        from timm.data.imagenet_info import ImageNetInfo
    except ModuleNotFoundError as error:
        raise DataError("the classes of ImageNet need timm: pip install fata[zoo]") from error

    names = ImageNetInfo("imagenet-1k").label_names()  # type: ignore[no-untyped-call]
    return {name: label for label, name in enumerate(names)}


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name, is_folder in _listing(folder) if is_folder]


def _image_names(folder: Path) -> list[str]:
    names = (name for name, is_folder in _listing(folder) if not is_folder)
    return [name for name in names if name.lower().endswith(SUFFIXES)]


def _found(folder: Path) -> str:
    return listed((name for name, _ in _listing(folder)), 6) or "nothing"


def _listing(folder: Path) -> list[tuple[str, bool]]:
    """Names in a folder in order, without hidden ones, and whether each is a folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e.name, e.is_dir()) for e in entries if not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}.") from error
