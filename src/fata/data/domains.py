"""Data sets for domain adaptation, in the layouts in which they circulate."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fata._text import listed
from fata.data.dataset import Dataset, Domain, ImageFiles, ImageSource, View
from fata.data.errors import DataError
from fata.data.folders import domain_folders, folders_in, found_in, listed_files

OFFICE_HOME = {
    "art": "Art",
    "clipart": "Clipart",
    "product": "Product",
    "realworld": "Real World",
    "real": "Real World",
}
PACS = {
    "artpainting": "art_painting",
    "art": "art_painting",
    "cartoon": "cartoon",
    "photo": "photo",
    "sketch": "sketch",
}
DOMAINNET = {
    name: name for name in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
}
VISDA = {name: name for name in ("train", "validation", "test")}


def office_home(spec: str, folder: Path, view: View) -> Dataset:
    """Four domains of 65 classes, under any of the spellings that circulate."""
    return _complete(spec, folder, view, "Office-Home", OFFICE_HOME, 65)


def pacs(spec: str, folder: Path, view: View) -> Dataset:
    """Four domains of 7 classes."""
    return _complete(spec, folder, view, "PACS", PACS, 7)


def domainnet(spec: str, folder: Path, view: View) -> Dataset:
    """Up to six domains; the images and classes of the `DOMAIN_list.txt` files, if there are any.

    Those of DomainNet-126 list 126 of the 345 classes: the logits of the others are masked.
    """
    place, domains = _domains(folder, DOMAINNET, "DomainNet", "clipart/")
    lists = {name: place / f"{name}_list.txt" for name in domains}
    lists = {name: file for name, file in lists.items() if file.exists()}
    if not lists:
        return domain_folders(spec, domains, view)
    images = {name: _inside(domains[name], file) for name, file in lists.items()}
    classes = _listed_classes(lists, images)
    every = {one.name for inner in domains.values() for one in folders_in(inner)} | set(classes)
    return Dataset(
        spec,
        classes,
        tuple(map(Domain, images)),
        lambda domain: _files(domains[domain.name], images[domain.name], view),
        model_classes=tuple(sorted(every)) if len(classes) < len(every) else (),
    )


def visda_c(spec: str, folder: Path, view: View) -> Dataset:
    """`train`, `validation` and `test`, 12 classes; `test` by its `image_list.txt`, if it has one.

    Folders of `train` or `validation` name the classes.
    """
    place, domains = _domains(folder, VISDA, "VisDA-C", "train/ or validation/")
    test = place / "test" / "image_list.txt"
    named = {name: inner for name, inner in domains.items() if name != "test" or not test.exists()}
    if not named:
        raise DataError(f"VisDA-C in {place}: train/ or validation/ must name the classes.")
    dataset = domain_folders(spec, named, view)
    if len(dataset.classes) != 12:
        raise DataError(f"VisDA-C has 12 classes; {place} has {listed(dataset.classes)}.")
    images = listed_files(test) if test.exists() else []
    if any(label >= 12 for _, label in images):
        raise DataError(f"{test}: expected labels from 0 to 11.")

    def source(domain: Domain) -> ImageSource:
        return dataset.of(domain) if domain.name in named else _files(place / "test", images, view)

    return Dataset(spec, dataset.classes, tuple(map(Domain, domains)), source)


def _complete(
    spec: str, folder: Path, view: View, title: str, spellings: Mapping[str, str], classes: int
) -> Dataset:
    """A data set whose domains all have all classes."""
    place, domains = _domains(folder, spellings, title, *spellings.values())
    names = dict.fromkeys(spellings.values())
    if missing := [name for name in names if name not in domains]:
        raise DataError(
            f"{title} in {place}: no folder for {listed(missing)} (case, blanks and underscores "
            f"do not matter); found {found_in(place)}."
        )
    there = {name: {one.name for one in folders_in(inner)} for name, inner in domains.items()}
    every = set().union(*there.values())
    for name in names:
        if gone := sorted(every - there[name]):
            raise DataError(
                f"{domains[name]} has no folder for the class{'es' if len(gone) > 1 else ''} "
                f"{listed(gone, 6)}, which other domains have."
            )
    if len(every) != classes:
        raise DataError(f"{title} has {classes} classes; {place} has {len(every)}.")
    return domain_folders(spec, {name: domains[name] for name in names}, view)


def _domains(
    folder: Path, spellings: Mapping[str, str], title: str, *expected: str
) -> tuple[Path, dict[str, Path]]:
    """The folder that holds the domains, this one or one in it, and the folder of each domain."""
    places = {place: _spelled(place, spellings) for place in (folder, *folders_in(folder))}
    place = max(places, key=lambda place: len(places[place]))
    if not places[place]:
        raise DataError(
            f"no {title} in {folder}: expected folders such as {expected[0]}; found "
            f"{found_in(folder)}."
        )
    order = list(dict.fromkeys(spellings.values()))
    found = sorted(places[place].items(), key=lambda item: order.index(item[0]))
    return place, dict(found)


def _spelled(place: Path, spellings: Mapping[str, str]) -> dict[str, Path]:
    spelled = {re.sub("[^a-z]", "", inner.name.lower()): inner for inner in folders_in(place)}
    return {spellings[key]: inner for key, inner in spelled.items() if key in spellings}


def _inside(domain: Path, file: Path) -> list[tuple[str, int]]:
    """The images of a list, by their paths inside the domain's folder."""
    found = []
    for path, label in listed_files(file):
        first, _, rest = path.partition("/")
        if first != domain.name or "/" not in rest:
            raise DataError(f"{file}: expected {domain.name}/CLASS/FILE, got {path!r}.")
        found.append((rest, label))
    return found


def _listed_classes(
    lists: Mapping[str, Path], images: Mapping[str, Sequence[tuple[str, int]]]
) -> tuple[str, ...]:
    """The name of each label: the folder of its images, the same in every list."""
    names: dict[int, str] = {}
    for domain, some in images.items():
        for path, label in some:
            name = path.partition("/")[0]
            if names.setdefault(label, name) != name:
                raise DataError(
                    f"{lists[domain]}: label {label} is {name!r} here and {names[label]!r} before."
                )
    if sorted(names) != list(range(len(names))) or len(set(names.values())) < len(names):
        first = next(iter(lists.values()))
        raise DataError(f"{first}: expected labels 0, 1, ..., each of one class and none missing.")
    return tuple(names[label] for label in range(len(names)))


def _files(folder: Path, images: Sequence[tuple[str, int]], view: View) -> ImageFiles:
    paths, labels = zip(*images, strict=True)
    return ImageFiles(folder, paths, torch.tensor(labels), view)
