"""Data sets, and streams over them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fata._text import near
from fata.data import cifar, folders
from fata.data.dataset import CLEAN, Dataset, Domain
from fata.data.errors import DataError
from fata.data.serve import Samples
from fata.data.streams import Stream, replay, stream
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

if TYPE_CHECKING:
    from fata.zoo import Loaded

__all__ = [
    "CLEAN",
    "KINDS",
    "DataError",
    "Dataset",
    "Domain",
    "Samples",
    "Stream",
    "open",
    "replay",
    "stream",
]

KINDS = {
    "embedded": "2,000 test images of CIFAR-10, in the package",
    "cifar10": "the python version's files, or PNG files of one image a row",
    "cifar10-c": "the released .npy files",
    "imagenet": "validation images, one folder a synset",
    "imagenet-c": "the released layout, corruption/severity/synset",
    "office-home": "Art, Clipart, Product, Real World; 65 classes",
    "folder": "one folder a class, or one folder a domain with one a class in it",
}
_EMBEDDED = Path(__file__).with_name("embedded")
_USUAL = Preprocess(256, 224, "bilinear", IMAGENET_MEAN, IMAGENET_STD)


def open(
    spec: str, *, fit: Loaded | None = None, jpeg: bool = False, download: bool = False
) -> Dataset:
    """A data set by its kind and folder.

    Args:
        spec: `embedded`, or `KIND:DIR` with a kind of `KINDS`, such as `imagenet-c:ImageNet-C`.
        fit: the model to be tested on it; its preprocessing is applied, and its classes must be
            those of the data. None: resize to 256, crop to 224.
        jpeg: corruptions made on the fly are JPEG-compressed at quality 85, as the released ones.
        download: download CIFAR-10 with torchvision if it is missing.

    Example:
        >>> import fata
        >>> data = fata.data.open("embedded")
        >>> len(data.classes), len(data.domains)
        (10, 96)
    """
    if not isinstance(spec, str) or not (fit is None or hasattr(fit, "preprocess")):
        raise TypeError(
            "fata.data.open takes a name such as 'embedded', and as fit what fata.zoo.load gives."
        )
    if find_spec("PIL") is None:
        raise DataError("data sets need Pillow: pip install fata[bench]")
    kind, _, where = spec.partition(":")
    if kind not in KINDS:
        raise DataError(
            f"unknown data {spec!r}: give embedded or KIND:DIR, KIND one of "
            f"{', '.join(k for k in KINDS if k != 'embedded')}.{near(kind, KINDS)}"
        )
    if (kind == "embedded") == bool(where):
        raise DataError(f"{spec!r}: give {kind if kind == 'embedded' else f'{kind}:DIR'}.")
    if jpeg and kind in ("imagenet-c", "cifar10-c", "office-home"):
        raise DataError(f"jpeg: the images of {kind} are used as they are on the disk.")
    if download and kind != "cifar10":
        raise DataError(
            f"download: {kind} cannot be downloaded; docs/data.md says where to get it."
        )
    folder = Path(where).expanduser() if where else _EMBEDDED
    if download:
        cifar.download(folder)
    if not folder.is_dir():
        raise DataError(f"{spec!r}: there is no folder {str(folder)!r}.")
    dataset = _OPENERS[kind](spec, folder, fit.preprocess if fit else _USUAL, jpeg)
    if fit is not None:
        _check(dataset, kind, fit)
    return dataset


_OPENERS: dict[str, Callable[[str, Path, Preprocess, bool], Dataset]] = {
    "embedded": lambda spec, folder, _, jpeg: cifar.dataset(spec, folder, jpeg),
    "cifar10": lambda spec, folder, _, jpeg: cifar.dataset(spec, folder, jpeg),
    "cifar10-c": lambda spec, folder, *_: cifar.corrupted(spec, folder),
    "imagenet": lambda spec, folder, use, jpeg: folders.imagenet(spec, folder, use.view, jpeg),
    "imagenet-c": lambda spec, folder, use, _: folders.imagenet_c(spec, folder, use.crop),
    "office-home": lambda spec, folder, use, _: folders.office_home(spec, folder, use.view),
    "folder": lambda spec, folder, use, jpeg: folders.folder_of(spec, folder, use.view, jpeg),
}


def _check(dataset: Dataset, kind: str, model: Loaded) -> None:
    """Raise if the model has other classes than the data, or takes images of another size."""
    have, want = len(dataset.classes), model.classes
    numbered = all(name.isdecimal() for name in dataset.classes)  # some may be missing at the end
    if have > want or (have < want and not numbered):
        raise DataError(
            f"{dataset.spec} has {have} classes, but {model.name} has {want}: "
            f"choose a model that was trained on these classes (fata train-source makes one)."
        )
    if model.labels != dataset.classes and sorted(model.labels) == sorted(dataset.classes):
        raise DataError(f"{model.name} has the classes of {dataset.spec} in another order.")
    if kind in ("embedded", "cifar10", "cifar10-c") and model.preprocess.size != 32:
        raise DataError(
            f"{dataset.spec} has images of 32 pixels, but {model.name} takes "
            f"{model.preprocess.size}."
        )
