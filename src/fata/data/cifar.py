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
from PIL import Image
from torch import Tensor

from fata.corruptions import BY_NAME, SEVERITIES
from fata.data.dataset import MADE, Arrays, Dataset, Domain
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
    of one image a row (`data_batch_1.png`, ..., labels in two JSON lists).
    """
    for inner in (folder, folder / "cifar-10-batches-py", folder / "package"):
        for suffix, reader in (("", _pickles), (".png", _pictures)):
            files = [inner / f"{part}{suffix}" for part in _PARTS[split]]
            if files[0].exists():
                missing = [file for file in files if not file.exists()]
                if missing:
                    raise DataError(f"CIFAR-10 is not complete: {missing[0]} is missing.")
                images, labels = reader(files, split)
                if len(images) != len(labels):
                    raise DataError(
                        f"{inner}: {len(images)} images but {len(labels)} labels ({split})."
                    )
                return images, labels
    raise DataError(
        f"no CIFAR-10 in {folder}: expected the python version's files ({_PARTS[split][0]}, ...) "
        f"or PNG files ({_PARTS[split][0]}.png, ...), there or in cifar-10-batches-py/. "
        f"download=True (--download) fetches the former."
    )


def rows(file: Path) -> Tensor:
    """Images of a PNG file with one 32 x 32 image a row of 1,024 pixels."""
    pixels = reading(file, lambda: np.asarray(_open(file).convert("RGB")))
    if pixels.shape[1] != 1024:
        raise DataError(f"{file}: rows of {pixels.shape[1]} pixels; expected 1,024 (32 x 32).")
    images = torch.from_numpy(pixels.reshape(-1, 32, 32, 3).copy())
    return images.permute(0, 3, 1, 2).contiguous()


def reading(file: Path, how: Callable[[], Any]) -> Any:
    """What reading a file gives; a file that cannot be read is named."""
    try:
        return how()
    except Exception as error:
        raise DataError(f"cannot read {file}: {type(error).__name__}: {error}") from error


def _open(file: Path) -> Image.Image:
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # ten thousand images in one
    try:
        return Image.open(file)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _pictures(files: list[Path], split: str) -> tuple[Tensor, Tensor]:
    lists = [files[0].with_name(f"{split}_{name}.json") for name in ("lables", "labels")]
    listed = next((file for file in lists if file.exists()), None)
    if listed is None:
        raise DataError(f"{files[0].parent}: the labels, {lists[0].name}, are missing.")
    labels = reading(listed, lambda: torch.tensor(json.loads(listed.read_text())))
    return torch.cat([rows(file) for file in files]), labels


def _pickles(files: list[Path], split: str) -> tuple[Tensor, Tensor]:
    batches = [reading(file, partial(_unpickled, file)) for file in files]
    images = [torch.from_numpy(batch[b"data"].reshape(-1, 3, 32, 32)) for batch in batches]
    return torch.cat(images), torch.cat([torch.tensor(batch[b"labels"]) for batch in batches])


def _unpickled(file: Path) -> Any:
    with file.open("rb") as opened:
        return _Arrays(opened, encoding="bytes").load()


class _Arrays(pickle.Unpickler):
    """Reads arrays and plain values; anything else in a pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Only what NumPy arrays are made of."""
        if module.startswith("numpy") and name in (
            "_reconstruct",
            "ndarray",
            "dtype",
            "_frombuffer",
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in CIFAR-10")


def dataset(spec: str, folder: Path, jpeg: bool) -> Dataset:
    """The test images; corruptions are made on the fly."""
    pictures = Arrays(*read(folder))
    return Dataset(spec, CLASSES, MADE, lambda _: pictures, made=True, jpeg=jpeg)


def corrupted(spec: str, folder: Path) -> Dataset:
    """CIFAR-10-C: a file a corruption, five severities after each other; whatever is there."""
    names = [name for name in BY_NAME if (folder / f"{name}.npy").exists()]
    if not names or not (folder / "labels.npy").exists():
        raise DataError(
            f"no CIFAR-10-C in {folder}: expected labels.npy and files such as gaussian_noise.npy."
        )
    labels = _array(folder / "labels.npy", 1)
    domains = tuple(Domain(name, severity) for name in names for severity in SEVERITIES)

    def pictures(domain: Domain) -> Arrays:
        file = folder / f"{domain.name}.npy"
        every, severity = _array(file, 4), domain.severity or 0
        n = len(every) // 5
        if every.shape[1:] != (32, 32, 3) or len(every) != len(labels):
            raise DataError(
                f"{file}: shape {every.shape}; expected ({len(labels)}, 32, 32, 3), as labels.npy."
            )
        part = slice((severity - 1) * n, severity * n)
        images = torch.from_numpy(np.array(every[part])).permute(0, 3, 1, 2).contiguous()
        return Arrays(images, torch.from_numpy(labels[part].astype(np.int64)))

    return Dataset(spec, CLASSES, domains, pictures)


def download(folder: Path) -> None:
    """Fetch the python version through torchvision, unless it is there."""
    from torchvision.datasets import CIFAR10

    try:
        CIFAR10(str(folder), download=True)
    except Exception as error:  # whatever the network does
        raise DataError(
            f"CIFAR-10 cannot be downloaded to {folder}: {error}. Put the files there by hand; "
            f"docs/data.md says which."
        ) from error


def _array(file: Path, axes: int) -> np.ndarray:
    array = reading(file, lambda: np.load(file, mmap_mode="r"))
    if array.ndim != axes or array.dtype.kind not in "iu":
        raise DataError(f"{file}: {array.dtype} of shape {array.shape} is not CIFAR-10-C's.")
    return array  # type: ignore[no-any-return]
