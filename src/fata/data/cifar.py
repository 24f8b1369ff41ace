"""CIFAR-10 and CIFAR-10-C from the files in which they circulate."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
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
_PARTS = {
    "train": [f"data_batch_{number}" for number in range(1, 6)],
    "test": ["test_batch"],
}


def read(folder: Path, split: str = "test") -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) as bytes, and labels.

    Reads the python pickles (`data_batch_1`, ..., also inside `cifar-10-batches-py`) or PNG files
    of one image a row (`data_batch_1.png`, ..., also inside `package`; labels in two JSON lists).
    """
    files = _find(folder, split)
    if not files:
        raise DataError(
            f"no CIFAR-10 in {folder}: expected the python version's files ({_PARTS[split][0]}, "
            f"...) or PNG files ({_PARTS[split][0]}.png, ...), there or in cifar-10-batches-py/. "
            f"download=True (--download) downloads the former."
        )
    if missing := [file for file in files if not file.exists()]:
        raise DataError(f"CIFAR-10 is not complete: {missing[0]} is missing.")
    return _png_images(files, split) if files[0].suffix == ".png" else _pickles(files)


def _find(folder: Path, split: str) -> list[Path]:
    """The files of a split where the first is there, or none."""
    for inner in (folder, folder / "cifar-10-batches-py", folder / "package"):
        for suffix in ("", ".png"):
            files = [inner / f"{part}{suffix}" for part in _PARTS[split]]
            if files[0].exists():
                return files
    return []


def _png_images(files: list[Path], split: str) -> tuple[Tensor, Tensor]:
    lists = [files[0].with_name(f"{split}_{name}.json") for name in ("lables", "labels")]
    listed = next((file for file in lists if file.exists()), None)
    if listed is None:
        raise DataError(f"the labels of {files[0]} are missing: expected {lists[0]}.")
    images = torch.cat([_rows(file) for file in files])
    labels = _reading(listed, lambda: torch.tensor(json.loads(listed.read_text())))
    return images, _checked(listed, labels, len(images))


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


def _pickles(files: list[Path]) -> tuple[Tensor, Tensor]:
    batches = [_reading(file, partial(_unpickled, file)) for file in files]
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def _unpickled(file: Path) -> tuple[Tensor, Tensor]:
    with file.open("rb") as opened:
        batch = _Unpickler(opened, encoding="bytes").load()
    batch = {name.decode() if isinstance(name, bytes) else name: batch[name] for name in batch}
    images = torch.from_numpy(batch["data"].values.reshape(-1, 3, 32, 32))
    return images, _checked(file, torch.tensor(batch["labels"]), len(images))


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


def dataset(spec: str, folder: Path, jpeg: bool) -> Dataset:
    """The test images; corruptions are made on the fly."""
    source = ImageArrays(*read(folder))
    return Dataset(spec, CLASSES, MADE, lambda _: source, made=True, jpeg=jpeg)


def corrupted(spec: str, folder: Path) -> Dataset:
    """CIFAR-10-C: one file for each corruption, five severities in it; some may be missing."""
    names = [name for name in BY_NAME if (folder / f"{name}.npy").exists()]
    known = folder / "labels.npy"
    if not names or not known.exists():
        raise DataError(
            f"no CIFAR-10-C in {folder}: expected labels.npy and files such as gaussian_noise.npy."
        )
    every = _reading(known, lambda: torch.from_numpy(np.load(known)))
    labels = _checked(known, every, len(every))
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

    return Dataset(spec, CLASSES, domains, source)


def download(folder: Path) -> None:
    """Download the python version with torchvision, unless CIFAR-10 is there."""
    if all(_find(folder, split) for split in _PARTS):
        return
    try:
        from torchvision.datasets import CIFAR10
    except ModuleNotFoundError as error:
        raise DataError("downloading CIFAR-10 needs torchvision: pip install fata[zoo]") from error
    try:
        CIFAR10(str(folder), download=True)
    except Exception as error:  # whatever the network does
        raise DataError(
            f"CIFAR-10 cannot be downloaded to {folder}: {error}. Put the files there yourself; "
            f"docs/data.md lists them."
        ) from error


def _checked(file: Path, labels: Tensor, images: int) -> Tensor:
    """The labels of a file, validated."""
    if labels.shape != (images,) or labels.is_floating_point():
        raise DataError(f"{file}: expected {images:,} labels, one an image, all whole numbers.")
    if images == 0 or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(f"{file}: expected labels from 0 to {len(CLASSES) - 1}.")
    return labels.long()


def _reading(file: Path, how: Callable[[], Any]) -> Any:
    """Read a file; an error names it."""
    try:
        return how()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error
