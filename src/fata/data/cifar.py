"""CIFAR-10, CIFAR-100 and their corrupted versions from the files in which they circulate."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fata.corruptions import BY_NAME, SEVERITIES
from fata.data.dataset import MADE, Dataset, Domain, ImageArrays
from fata.data.errors import DataError

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip


@dataclass(frozen=True)
class Version:
    """CIFAR-10 or CIFAR-100: how its files are named, and the labels in them."""

    title: str
    folder: str  # of the archive
    parts: Mapping[str, Sequence[str]]  # files of each split
    labels: str
    classes: int


CIFAR10 = Version(
    "CIFAR-10",
    "cifar-10-batches-py",
    {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]},
    "labels",
    10,
)
CIFAR100 = Version(
    "CIFAR-100", "cifar-100-python", {"train": ["train"], "test": ["test"]}, "fine_labels", 100
)


def read(folder: Path, split: str = "test", version: Version = CIFAR10) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) as bytes, and labels.

    Reads the python pickles (`data_batch_1`, ..., also inside `cifar-10-batches-py`) or PNG files
    of one image a row (`data_batch_1.png`, ..., also inside `package`; labels in two JSON lists).
    """
    files, first = _find(folder, split, version), version.parts[split][0]
    if not files:
        raise DataError(
            f"no {version.title} in {folder}: expected the python version's files ({first}, ...) "
            f"or PNG files ({first}.png, ...), there or in {version.folder}/. download=True "
            f"(--download) downloads the former."
        )
    if missing := [file for file in files if not file.exists()]:
        raise DataError(f"{version.title} is not complete: {missing[0]} is missing.")
    if files[0].suffix == ".png":
        return _png_images(files, split, version)
    return _pickles(files, version)


def _find(folder: Path, split: str, version: Version) -> list[Path]:
    """The files of a split where the first is there, or none."""
    for inner in (folder, folder / version.folder, folder / "package"):
        for suffix in ("", ".png"):
            files = [inner / f"{part}{suffix}" for part in version.parts[split]]
            if files[0].is_file():
                return files
    return []


def _png_images(files: list[Path], split: str, version: Version) -> tuple[Tensor, Tensor]:
    lists = [files[0].with_name(f"{split}_{name}.json") for name in ("lables", "labels")]
    listed = next((file for file in lists if file.exists()), None)
    if listed is None:
        raise DataError(f"the labels of {files[0]} are missing: expected {lists[0]}.")
    images = torch.cat([_rows(file) for file in files])
    labels = _reading(listed, lambda: torch.tensor(json.loads(listed.read_text())))
    return images, _checked(listed, labels, len(images), version)


def _rows(file: Path) -> Tensor:
    """Images of a PNG file with one 32 x 32 image a row of 1,024 pixels."""
    from PIL import Image

    def pixels() -> np.ndarray:
        with Image.open(file) as image:
            return np.array(image.convert("RGB"))

    rows = _reading(file, pixels)
    if rows.shape[1] != 1024:
        raise DataError(f"{file}: rows of {rows.shape[1]} pixels; expected 1,024 (32 x 32).")
    return torch.from_numpy(rows.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2).contiguous()


def _pickles(files: list[Path], version: Version) -> tuple[Tensor, Tensor]:
    batches = [_reading(file, partial(_batch, file, version)) for file in files]
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def _batch(file: Path, version: Version) -> tuple[Tensor, Tensor]:
    batch = _unpickled(file)
    images = torch.from_numpy(batch["data"].values.reshape(-1, 3, 32, 32))
    return images, _checked(file, torch.tensor(batch[version.labels]), len(images), version)


def _unpickled(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        content = _Unpickler(opened, encoding="bytes").load()
    return {_text(name): content[name] for name in content}


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


class _Unpickler(pickle.Unpickler):
    """Reads plain values and arrays of bytes.

    Anything else could run code; so could NumPy's own classes, which take pointers from a file.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins for what pickled arrays are made of."""
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if module.partition(".")[0] == "numpy" and name in _STAND_INS:
            return _STAND_INS[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in CIFAR-10")


class _Array:
    def __init__(self, *_: object) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, _, fortran, content = state
        values = np.frombuffer(content, np.uint8).copy()
        self.values = values.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    def __init__(self, name: str | bytes, *_: object) -> None:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of {name!r}; expected bytes, 'u1'")

    def __setstate__(self, state: object) -> None: ...


def _array_of(content: bytes, kind: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    """As arrays are written since Python 3.8."""
    array = _Array()
    array.__setstate__((1, shape, kind, order == "F", content))
    return array


def _encode(text: str, _: str) -> bytes:
    """As Python 3 writes bytes for Python 2 to read."""
    return text.encode("latin1")


_STAND_INS = {"_reconstruct": _Array, "ndarray": _Array, "dtype": _Dtype, "_frombuffer": _array_of}


def dataset(spec: str, folder: Path, jpeg: bool, version: Version = CIFAR10) -> Dataset:
    """The test images; corruptions are made on the fly."""
    source, classes = ImageArrays(*read(folder, version=version)), CLASSES
    if version is CIFAR100:
        file = _find(folder, "test", version)[0].with_name("meta")
        classes = _reading(file, lambda: tuple(map(_text, _unpickled(file)["fine_label_names"])))
    return Dataset(spec, classes, MADE, lambda _: source, made=True, jpeg=jpeg)


def corrupted(spec: str, folder: Path, version: Version = CIFAR10) -> Dataset:
    """CIFAR-10-C: one file for each corruption, five severities in it; some may be missing."""
    names = [name for name in BY_NAME if (folder / f"{name}.npy").exists()]
    known = folder / "labels.npy"
    if not names or not known.exists():
        raise DataError(
            f"no {version.title}-C in {folder}: expected labels.npy and files such as "
            f"gaussian_noise.npy."
        )
    every = _reading(known, lambda: torch.from_numpy(np.load(known)))
    labels = _checked(known, every, len(every), version)
    if len(labels) % 5:
        raise DataError(f"{known}: {len(labels)} labels are not as many for five severities.")
    domains = tuple(Domain(name, severity) for name in names for severity in SEVERITIES)

    def source(domain: Domain) -> ImageArrays:
        file, severity = folder / f"{domain.name}.npy", domain.severity or 0
        every = _reading(file, lambda: np.load(file, mmap_mode="r"))
        if every.shape != (len(labels), 32, 32, 3) or every.dtype != np.uint8:
            raise DataError(
                f"{file}: {every.dtype} of shape {every.shape}; expected uint8 of "
                f"({len(labels)}, 32, 32, 3), as many as labels.npy has."
            )
        n = len(labels) // 5
        part = slice((severity - 1) * n, severity * n)
        images = torch.from_numpy(np.array(every[part])).permute(0, 3, 1, 2).contiguous()
        return ImageArrays(images, labels[part])

    classes = CLASSES if version is CIFAR10 else tuple(map(str, range(version.classes)))
    return Dataset(spec, classes, domains, source)


def download(folder: Path, version: Version = CIFAR10) -> None:
    """Download the python version with torchvision, unless it is there."""
    if all(_find(folder, split, version) for split in version.parts):
        return
    try:
        from torchvision import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"downloading {version.title} needs torchvision: pip install fata[zoo]"
        ) from error
    get = datasets.CIFAR10 if version is CIFAR10 else datasets.CIFAR100
    try:
        get(str(folder), download=True)
    except Exception as error:  # whatever the network does
        raise DataError(
            f"{version.title} cannot be downloaded to {folder}: {error}. Put the files there "
            f"yourself; docs/data.md lists them."
        ) from error


def _checked(file: Path, labels: Tensor, images: int, version: Version) -> Tensor:
    """The labels of a file, validated."""
    if labels.shape != (images,) or labels.is_floating_point():
        raise DataError(f"{file}: expected {images:,} labels, one an image, all whole numbers.")
    if images == 0 or labels.min() < 0 or labels.max() >= version.classes:
        raise DataError(f"{file}: expected labels from 0 to {version.classes - 1}.")
    return labels.long()


def _reading(file: Path, how: Callable[[], Any]) -> Any:
    """Read a file; an error names it."""
    try:
        return how()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error
