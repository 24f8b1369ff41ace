"""ImageNet's validation images, and the data sets with its classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fata.corruptions import BY_NAME, SEVERITIES
from fata.data.dataset import MADE, Dataset, Domain, ImageSource, View
from fata.data.errors import DataError
from fata.data.folders import folders_in, found_in, image_files

SYNSETS = {  # files of timm
    "imagenet": "imagenet_synsets.txt",
    "imagenet-r": "imagenet_r_synsets.txt",
    "imagenet-a": "imagenet_a_synsets.txt",
}


def imagenet(spec: str, folder: Path, view: View, jpeg: bool) -> Dataset:
    """Validation images in a folder a synset; corruptions are made on the fly."""
    place = folder / "val" if (folder / "val").is_dir() else folder
    synsets = _synsets()
    source = image_files(place, _synset_folders(place, synsets), view)
    return Dataset(spec, tuple(synsets), MADE, lambda _: source, made=True, jpeg=jpeg)


def imagenet_c(spec: str, folder: Path, view: View) -> Dataset:
    """The released layout, `corruption/severity/synset/image`; parts may be missing."""
    synsets = _synsets()
    places = {
        Domain(corruption.name, int(severity.name)): severity
        for parent in (folder, *folders_in(folder))  # as unpacked, or below noise/, blur/, ...
        for corruption in folders_in(parent)
        if corruption.name in BY_NAME
        for severity in folders_in(corruption)
        if severity.name in map(str, SEVERITIES)
    }
    if not places:
        raise DataError(
            f"no ImageNet-C in {folder}: expected folders such as gaussian_noise/5/n01440764/, "
            f"found {found_in(folder)}."
        )
    order = list(BY_NAME)
    domains = sorted(places, key=lambda domain: (order.index(domain.name), domain.severity))

    def source(domain: Domain) -> ImageSource:
        place = places[domain]
        return image_files(place, _synset_folders(place, synsets), view)

    return Dataset(spec, tuple(synsets), tuple(domains), source)


def natural_shift(spec: str, folder: Path, view: View, kind: str) -> Dataset:
    """ImageNet-R, -A and -Sketch, one folder a synset: one domain, named as the kind.

    ImageNet-R and -A have 200 of the classes; a model's other logits are masked.
    """
    every = _synsets()
    kept = _synsets(kind) if kind in SYNSETS else every
    place = _inside(folder, kept)
    labels = _synset_folders(place, kept)
    return Dataset(
        spec,
        tuple(kept),
        (Domain(kind),),
        lambda _: image_files(place, labels, view),
        model_classes=tuple(every) if len(kept) < len(every) else (),
    )


def imagenet_v2(spec: str, folder: Path, view: View) -> Dataset:
    """ImageNet-V2: folders are named by the number of the class, 0 to 999."""
    synsets = tuple(_synsets())
    numbers = {str(label): label for label in range(len(synsets))}
    place = _inside(folder, numbers)
    labels = {one.name: numbers[one.name] for one in folders_in(place) if one.name in numbers}
    if not labels:
        raise DataError(
            f"no ImageNet-V2 in {folder}: expected folders 0/ to 999/, found {found_in(folder)}."
        )
    labels = dict(sorted(labels.items(), key=lambda item: item[1]))
    domain = Domain("imagenet-v2")
    return Dataset(spec, synsets, (domain,), lambda _: image_files(place, labels, view))


def _inside(folder: Path, names: Mapping[str, int]) -> Path:
    """The folder with the classes: this one, or the one that it holds, as archives are unpacked."""
    inner = folders_in(folder)
    if any(one.name in names for one in inner):
        return folder
    return next((one for one in inner if any(two.name in names for two in folders_in(one))), folder)


def _synset_folders(folder: Path, synsets: Mapping[str, int]) -> dict[str, int]:
    names = [inner.name for inner in folders_in(folder)]
    labels = {name: synsets[name] for name in names if name in synsets}
    if not labels:
        raise DataError(
            f"no ImageNet images in {folder}: expected a folder a synset, such as "
            f"{next(iter(synsets))}/; found {found_in(folder)}. Validation images in one folder "
            f"must be sorted into those first."
        )
    return labels


@cache
def _synsets(kind: str = "imagenet") -> dict[str, int]:
    """The label of each synset."""
    try:
        from importlib.resources import files

        listed = files("timm.data._info") / SYNSETS[kind]
    except ModuleNotFoundError as error:
        raise DataError("the classes of ImageNet need timm: pip install fata[zoo]") from error
    return {name: label for label, name in enumerate(listed.read_text().split())}
