"""Folders of images: one folder a class, or one folder a domain with those in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fata._text import listed
from fata.data.dataset import MADE, Dataset, Domain, ImageFiles, View
from fata.data.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
_MOST_CLASSES = 100_000


def folder_of(
    spec: str, folder: Path, view: View, jpeg: bool, known: Sequence[str] = ()
) -> Dataset:
    """One folder a class, corrupted on the fly; or one folder a domain with those in it.

    Classes are numbered as in `known`, those of the model, if the folders are a part of them.
    """
    inner = folders_in(folder)
    if not inner:
        raise DataError(f"{folder} has no folders: expected one a class, or one a domain.")
    domains = [one for one in inner if folders_in(one) and not _image_names(one)]
    if not domains:
        classes, labels = _numbered(folder, [one.name for one in inner], known)
        source = image_files(folder, labels, view)
        return Dataset(spec, classes, MADE, lambda _: source, made=True, jpeg=jpeg)
    if other := [one for one in inner if one not in domains]:
        raise DataError(
            f"{domains[0]} has folders in it, {other[0]} has none: expected either one folder a "
            f"class in {folder}, or one a domain with one a class in it."
        )
    if jpeg:
        raise DataError(f"jpeg: the domains of {folder} are taken as they are on the disk.")
    return domain_folders(spec, {domain.name: domain for domain in domains}, view, known)


def domain_folders(
    spec: str, domains: Mapping[str, Path], view: View, known: Sequence[str] = ()
) -> Dataset:
    """One folder a class in each domain; a domain may lack some of the classes."""
    names = {domain: {one.name for one in folders_in(place)} for domain, place in domains.items()}
    every = set().union(*names.values())
    classes, labels = _numbered(next(iter(domains.values())), every, known)

    def source(domain: Domain) -> ImageFiles:
        place, there = domains[domain.name], names[domain.name]
        with_images = {
            name: label
            for name, label in labels.items()
            if name in there and _image_names(place / name)
        }
        if not with_images:
            raise DataError(f"{place} has no image in any of its folders.")
        return image_files(place, with_images, view)

    return Dataset(spec, classes, tuple(Domain(name) for name in domains), source)


def _numbered(
    folder: Path, names: Iterable[str], known: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Classes and the label of each: in alphabetical order, unless their names are numbers."""
    names = sorted(names)
    if set(names) < set(known):
        places = {name: label for label, name in enumerate(known)}
        return tuple(known), {name: places[name] for name in names}
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


def image_files(folder: Path, labels: Mapping[str, int], view: View) -> ImageFiles:
    """The images of the folders of classes, which all must have some."""
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
    inside = {path.rpartition("/")[0] for path in source.paths}
    used = {*source.paths, *inside, *(str(outer) for one in inside for outer in Path(one).parents)}

    def walk(prefix: str) -> Iterator[str]:
        for name, is_folder in _listing(source.folder / prefix):
            path = f"{prefix}{name}"
            if path not in used:
                yield str(source.folder / path)
            elif is_folder:
                yield from walk(f"{path}/")

    return walk("")


def listed_files(file: Path) -> list[tuple[str, int]]:
    """Paths and labels of a text file with lines such as `dog/0001.jpg 5`."""
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        path, _, label = line.rpartition(" ")
        if path and label.isdecimal():
            found.append((path, int(label)))
        elif line.strip():
            raise DataError(f"{file}, line {number}: expected a path and a label, got {line!r}.")
    if not found:
        raise DataError(f"{file} lists no image: expected lines such as 'dog/0001.jpg 5'.")
    return found


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, in order."""
    return [folder / name for name, is_folder in _listing(folder) if is_folder]


def found_in(folder: Path) -> str:
    """What a folder holds, for an error."""
    return listed((name for name, _ in _listing(folder)), 6) or "nothing"


def _image_names(folder: Path) -> list[str]:
    names = (name for name, is_folder in _listing(folder) if not is_folder)
    return [name for name in names if name.lower().endswith(SUFFIXES)]


def _listing(folder: Path) -> list[tuple[str, bool]]:
    """Names in a folder in order, without hidden ones, and whether each is a folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e.name, e.is_dir()) for e in entries if not e.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}.") from error
