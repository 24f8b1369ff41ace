"""Data sets, and streams over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fata._imports import is_own
from fata._text import near
from fata.data import cifar, domains, folders, imagenet, tiny_imagenet
from fata.data.dataset import CLEAN, Dataset, Domain, View
from fata.data.errors import DataError
from fata.data.hugging_face import hub
from fata.data.kinds import KINDS
from fata.data.own import own
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

_MADE_HERE = ("embedded", "cifar10", "cifar100", "imagenet", "tiny-imagenet", "folder")
_OWN, _HUB = "own", "hf"
_SMALL = ("embedded", "cifar10", "cifar10-c", "cifar100", "cifar100-c")  # 32 pixels
_DOWNLOADS = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}
_EMBEDDED = Path(__file__).with_name("embedded")
_USUAL = Preprocess(256, 224, "bilinear", IMAGENET_MEAN, IMAGENET_STD)


def open(
    spec: str, *, fit: Loaded | None = None, jpeg: bool = False, download: bool = False
) -> Dataset:
    """A data set by its kind and folder.

    Args:
        spec: `embedded`, or `KIND:DIR` with a kind of `KINDS`, such as `imagenet-c:ImageNet-C`;
            `hf:NAME@SPLIT` of the Hugging Face hub; or `my_module:loader`, a function of your own
            that returns a torch data set.
        fit: the model to be tested on it; its preprocessing is applied, and its classes must be
            those of the data, or include them if the data set has a mask. None: resize to 256,
            crop to 224.
        jpeg: corruptions made on the fly are JPEG-compressed at quality 85, as the released ones.
        download: download CIFAR-10 or CIFAR-100 with torchvision if it is missing.

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
    use, labels = (fit.preprocess, fit.labels) if fit else (_USUAL, ())
    kind, _, where = spec.partition(":")
    if kind == _HUB or (kind not in KINDS and is_own(spec)):
        there = (hub if kind == _HUB else own)(spec, use.view, jpeg)
        return there if fit is None else _fitted(there, _HUB if kind == _HUB else _OWN, fit)
    if kind not in KINDS:
        path = not where and ("/" in spec or Path(spec).is_dir())
        hint = f" A folder is folder:{spec}." if path else near(kind, KINDS)
        raise DataError(
            f"unknown data {spec!r}: give embedded, KIND:DIR or your own my_module:loader; KIND is "
            f"one of {', '.join(k for k in KINDS if k != 'embedded')}.{hint}"
        )
    if (kind == "embedded") == bool(where):
        raise DataError(f"{spec!r}: give {kind if kind == 'embedded' else f'{kind}:DIR'}.")
    if jpeg and kind not in _MADE_HERE:
        raise DataError(f"jpeg: the images of {kind} are used as they are on the disk.")
    if download and kind not in _DOWNLOADS:
        raise DataError(
            f"download: {kind} cannot be downloaded; docs/data.md says where to get it."
        )
    folder = Path(where).expanduser() if where else _EMBEDDED
    if download:
        cifar.download(folder, _DOWNLOADS[kind])
    if not folder.is_dir():
        raise DataError(f"{spec!r}: there is no folder {str(folder)!r}.")
    dataset = _OPENERS[kind](_Request(spec, kind, folder, use, jpeg, labels))
    return dataset if fit is None else _fitted(dataset, kind, fit)


class _Request(NamedTuple):
    """What is asked for."""

    spec: str
    kind: str
    folder: Path
    use: Preprocess
    jpeg: bool
    labels: tuple[str, ...]  # the model's names of its classes, if known

    @property
    def stored(self) -> tuple[str, Path, View]:
        """For images that are used as they are on the disk."""
        return self.spec, self.folder, self.use.view

    @property
    def made(self) -> tuple[str, Path, View, bool]:
        """For corruptions that are made on the fly."""
        return *self.stored, self.jpeg


_OPENERS: dict[str, Callable[[_Request], Dataset]] = {
    "embedded": lambda r: cifar.dataset(r.spec, r.folder, r.jpeg),
    "cifar10": lambda r: cifar.dataset(r.spec, r.folder, r.jpeg),
    "cifar10-c": lambda r: cifar.corrupted(r.spec, r.folder),
    "cifar100": lambda r: cifar.dataset(r.spec, r.folder, r.jpeg, cifar.CIFAR100),
    "cifar100-c": lambda r: cifar.corrupted(r.spec, r.folder, cifar.CIFAR100),
    "imagenet": lambda r: imagenet.imagenet(*r.made),
    "imagenet-c": lambda r: imagenet.imagenet_c(r.spec, r.folder, r.use.crop),
    "imagenet-r": lambda r: imagenet.natural_shift(*r.stored, r.kind),
    "imagenet-a": lambda r: imagenet.natural_shift(*r.stored, r.kind),
    "imagenet-v2": lambda r: imagenet.imagenet_v2(*r.stored),
    "imagenet-sketch": lambda r: imagenet.natural_shift(*r.stored, r.kind),
    "tiny-imagenet": lambda r: tiny_imagenet.tiny_imagenet(*r.made, r.labels),
    "office-home": lambda r: domains.office_home(*r.stored),
    "domainnet": lambda r: domains.domainnet(*r.stored),
    "visda-c": lambda r: domains.visda_c(*r.stored),
    "pacs": lambda r: domains.pacs(*r.stored),
    "folder": lambda r: folders.folder_of(*r.made, r.labels),
}


def _fitted(dataset: Dataset, kind: str, model: Loaded) -> Dataset:
    """The data set for a model; raises if that has other classes, or takes another size.

    A mask is for models of all classes: one with the classes of the data alone needs none.
    """
    if dataset.mask and len(dataset.classes) == model.classes:
        dataset = replace(dataset, model_classes=())
    classes = dataset.model_classes or dataset.classes
    have, want = len(classes), model.classes
    numbered = kind in ("folder", _OWN) and all(
        name.isdecimal() for name in classes
    )  # may be fewer
    if have > want or (have < want and not numbered):
        masked = f" ({have} before the mask)" if dataset.mask else ""
        raise DataError(
            f"{dataset.spec} has {len(dataset.classes)} classes{masked}, but {model.name} has "
            f"{want}: choose a model that was trained on these classes (fata train-source makes "
            f"one)."
        )
    if model.labels != classes and sorted(model.labels) == sorted(classes):
        raise DataError(f"{model.name} has the classes of {dataset.spec} in another order.")
    if kind in _SMALL and model.preprocess.size != 32:
        raise DataError(
            f"{dataset.spec} has images of 32 pixels, but {model.name} takes "
            f"{model.preprocess.size}."
        )
    return dataset
