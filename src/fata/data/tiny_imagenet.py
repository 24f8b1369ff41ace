"""Tiny-ImageNet: 200 classes of ImageNet; corruptions are made on the fly.

Classes are in the order of their WordNet ids, as a folder of them is sorted, or in the model's.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fata.data.dataset import MADE, Dataset, ImageFiles, ImageSource, View, digest_of, pixels_of
from fata.data.errors import DataError
from fata.data.folders import folders_in, found_in, image_files

CLASSES = 200


@dataclass(frozen=True, eq=False)
class ImageBlob:
    """Encoded images in memory, one after another, decoded when they are read."""

    on_disk = False
    blob: np.ndarray  # bytes
    ends: np.ndarray  # where each image ends
    labels: Tensor
    view: View

    def read(self, index: int) -> Tensor:
        """One image, (3, H, W), bytes."""
        start = self.ends[index - 1] if index else 0
        return pixels_of(io.BytesIO(self.blob[start : self.ends[index]].tobytes()), self.view)

    def name(self, index: int) -> str:
        """Its number."""
        return f"image {index}"

    @cached_property
    def digest(self) -> str:
        """Of the encoded images and the labels."""
        return digest_of(self.blob.data, self.ends.data, self.labels.numpy().data)


def tiny_imagenet(
    spec: str, folder: Path, view: View, jpeg: bool, known: Sequence[str] = ()
) -> Dataset:
    """The validation images: in class folders, by `val_annotations.txt`, or in one `val.npz`."""
    inner = folder / "tiny-imagenet-200"
    place = inner if inner.is_dir() else folder
    if (place / "val.npz").exists():
        classes: tuple[str, ...] = tuple(map(str, range(CLASSES)))
        source: ImageSource = _from_npz(place / "val.npz", view)
    else:
        classes, source = _from_files(place, view, known)
    return Dataset(spec, classes, MADE, lambda _: source, made=True, jpeg=jpeg)


def _from_files(
    place: Path, view: View, known: Sequence[str]
) -> tuple[tuple[str, ...], ImageFiles]:
    """Classes in the model's order, if it says which ones it has; else sorted."""
    val, wnids = place / "val" if (place / "val").is_dir() else place, place / "wnids.txt"
    annotated = _annotated(val)
    names = [one.name for one in folders_in(val) if re.fullmatch(r"n\d{8}", one.name)]
    if not (annotated or names):
        raise DataError(
            f"no Tiny-ImageNet in {place}: expected val/images/ with val/val_annotations.txt, or "
            f"class folders such as val/n01443537/; found {found_in(val)}."
        )
    listed = wnids.read_text().split() if wnids.exists() else annotated.values() or names
    classes = sorted(set(listed))
    order = tuple(known) if sorted(known) == classes else tuple(classes)
    labels = {name: label for label, name in enumerate(order)}
    if unknown := [name for name in (*annotated.values(), *names) if name not in labels]:
        raise DataError(f"{val}: {unknown[0]!r} is no class of {wnids}.")
    if not annotated:
        return order, image_files(val, {_with_images(val, n): labels[n] for n in names}, view)
    numbers = torch.tensor([labels[name] for name in annotated.values()])
    return order, ImageFiles(val / "images", list(annotated), numbers, view)


def _annotated(val: Path) -> dict[str, str]:
    """The class of each image file, unless the files were sorted into class folders."""
    file = val / "val_annotations.txt"
    if not file.exists():
        return {}
    lines = [line.split("\t") for line in file.read_text().splitlines() if line.strip()]
    if short := next((line for line in lines if len(line) < 2), None):
        raise DataError(f"{file}: expected a file and a class in each line, got {short[0]!r}.")
    found = {name: wnid for name, wnid, *_ in lines}
    return found if found and (val / "images" / next(iter(found))).exists() else {}


def _with_images(val: Path, name: str) -> str:
    """A class folder, or the folder `images` in it, as the training images have it."""
    return f"{name}/images" if (val / name / "images").is_dir() else name


def _from_npz(file: Path, view: View) -> ImageBlob:
    """Arrays `blob`, `lens` and `labels`: JPEG files one after another, bytes and label of each."""
    try:
        with np.load(file) as arrays:
            blob, lengths, labels = (arrays[name] for name in ("blob", "lens", "labels"))
    except Exception as error:  # of the ZIP file or of NumPy
        raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error
    ends = lengths.astype(np.int64).cumsum()
    if not len(labels) or len(labels) != len(ends) or ends[-1] != len(blob):
        raise DataError(f"{file}: blob, lens and labels do not belong together.")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(f"{file}: expected labels from 0 to {CLASSES - 1}.")
    return ImageBlob(blob, ends, torch.from_numpy(labels.astype(np.int64)), view)
