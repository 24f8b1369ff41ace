"""Data sets: images with labels, in one or more domains."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fata._text import listed, near
from fata._view import as_rgb
from fata.corruptions import BY_NAME, NAMES, SEVERITIES, unchecked, weather
from fata.data.errors import DataError
from fata.data.kinds import KINDS
from fata.network.logits import restrict

if TYPE_CHECKING:
    from PIL import Image

CLEAN = "clean"
View = Callable[["Image.Image"], "Image.Image"]  # to the size that a model takes


class Domain(NamedTuple):
    """A corruption at a severity, a folder of images, or the clean ones."""

    name: str
    severity: int | None = None

    def __str__(self) -> str:
        return self.name if self.severity is None else f"{self.name}-{self.severity}"


class ImageSource(Protocol):
    """Images of one domain."""

    @property
    def on_disk(self) -> bool:
        """Whether they are files, which worker processes read."""

    @property
    def labels(self) -> Tensor:
        """The class of each image."""

    def read(self, index: int) -> Tensor:
        """One image, (3, H, W), bytes."""

    def name(self, index: int) -> str:
        """The image's name, for errors."""

    @property
    def digest(self) -> str:
        """Equal for equal images, wherever they are stored."""


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Images in memory."""

    on_disk = False
    images: Tensor  # (N, 3, H, W), bytes
    labels: Tensor

    def read(self, index: int) -> Tensor:
        """One image, (3, H, W), bytes."""
        return self.images[index]

    def name(self, index: int) -> str:
        """Its number."""
        return f"image {index}"

    @cached_property
    def digest(self) -> str:
        """Of pixels and labels."""
        return digest_of(self.images.contiguous().numpy().data, self.labels.numpy().data)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images on the disk, decoded when they are read."""

    on_disk = True
    folder: Path
    paths: Sequence[str]  # inside the folder
    labels: Tensor
    view: View

    def read(self, index: int, view: View | None = None) -> Tensor:
        """One image, (3, H, W), bytes; through another view, if one is given."""
        return pixels_of(self.folder / self.paths[index], view or self.view)

    def name(self, index: int) -> str:
        """Its path."""
        return str(self.folder / self.paths[index])

    @cached_property
    def digest(self) -> str:
        """Of names, sizes and labels: reading every image would take too long."""
        sizes = (f"{path} {_size(f'{self.folder}/{path}')}" for path in self.paths)
        return digest_of(os.fsencode("\n".join(sizes)), self.labels.numpy().data)


@dataclass(frozen=True, eq=False)
class Dataset(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images by domain; corruptions are either on the disk or made on the fly.

    For PyTorch it is a map-style data set of `(image, label)`, pixels in [0, 1]: the images that
    are on the disk, domain after domain. `data.domain("fog", severity=3)` is one of its domains.
    """

    spec: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]  # in the benchmark's order
    source: Callable[[Domain], ImageSource]
    made: bool = False  # corruptions are made here
    jpeg: bool = False  # ... and go through JPEG, as the released files did
    model_classes: tuple[str, ...] = ()  # of the models it is for, if these have more classes
    _opened: dict[Domain, ImageSource] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        names = dict.fromkeys(domain.name for domain in self.domains)
        about = f"{len(self.classes):,} classes, {len(names)} domains"
        return (
            f"Dataset({self.spec!r}, {about}, corruptions made)"
            if self.made
            else (f"Dataset({self.spec!r}, {about})")
        )

    def __len__(self) -> int:
        """Images on the disk."""
        return sum(len(self.of(domain).labels) for domain in self.stored)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image on the disk and its label."""
        if index < 0:
            index += len(self)
        for domain in self.stored:
            one = self.domain(domain.name, domain.severity)
            if 0 <= index < len(one):
                return one[index]
            index -= len(one)
        raise IndexError(f"{self.spec} has {len(self):,} images on the disk")

    @property
    def stored(self) -> tuple[Domain, ...]:
        """Domains with images on the disk, not made on the fly."""
        return self.domains[:1] if self.made else self.domains

    def domain(self, name: str, severity: int | None = 5) -> DomainImages:
        """The images of one domain as a torch data set; a folder has no severity."""
        (domain,) = self.named([name], severity or 5)
        return DomainImages(self, domain)

    @cached_property
    def mask(self) -> tuple[int, ...] | None:
        """Which of a model's logits belong to the classes, in their order; None: all."""
        if not self.model_classes:
            return None
        places = {name: place for place, name in enumerate(self.model_classes)}
        return tuple(places[name] for name in self.classes)

    def restrict(self, model: nn.Module) -> RemovableHandle | None:
        """From now on the model gives the logits of the mask alone; without a mask, all of them.

        `remove()` on what is returned undoes it.
        """
        return restrict(model, self.mask) if self.mask else None

    def of(self, domain: Domain) -> ImageSource:
        """The images of a domain, before any corruption made on the fly."""
        if domain not in self.domains:
            raise DataError(self._unknown(domain))
        if domain not in self._opened:
            self._opened[domain] = self.source(domain)
        return self._opened[domain]

    def hold(self, sources: Mapping[Domain, ImageSource]) -> None:
        """Keep these images open, and release others."""
        self._opened.clear()
        self._opened.update(sources)

    def finish(self, pixels: Tensor, domain: Domain, ids: Sequence[int]) -> Tensor:
        """Corrupt pixels in [0, 1], unless the corruption is on the disk already."""
        if not self.made or domain.severity is None:
            return pixels
        return unchecked(pixels, domain.name, domain.severity, 0, ids, self.jpeg)

    def named(self, names: Sequence[str] | None, severity: int) -> list[Domain]:
        """Domains by name; corruptions at one severity. None: the benchmark's, or all folders."""
        if names is None:
            every = list(dict.fromkeys(domain.name for domain in self.domains))
            made = {domain.name for domain in self.domains if domain.severity is not None}
            names = [name for name in NAMES if name in made] or every
        if not names or len(set(names)) < len(names):
            raise DataError(f"domains={list(names)!r}: give at least one, and each once.")
        known = {domain.name for domain in self.domains if domain.severity is None}
        wanted = [Domain(name, None if name in known else severity) for name in names]
        if missing := [domain for domain in wanted if domain not in self.domains]:
            raise DataError(self._unknown(missing[0]))
        return wanted

    def fingerprint(self, domains: Iterable[Domain]) -> str:
        """Equal for equal images of these domains; reads the size of every file."""
        digests = {str(domain): self.of(domain).digest for domain in domains}
        if self.made:
            return self.of(Domain(CLEAN)).digest
        return digest_of("\n".join(map(" ".join, digests.items())).encode())

    @property
    def provenance(self) -> dict[str, str]:
        """What to store with a result, apart from the fingerprint of the images."""
        facts = {"data": self.spec}
        if self.made:
            facts["corruptions"] = f"made, {'through JPEG 85' if self.jpeg else 'no JPEG'}"
            facts["frost"] = weather.frost_source()
        if self.mask:
            content = digest_of(" ".join(map(str, self.mask)).encode())
            facts["mask"] = f"{len(self.mask)} of {len(self.model_classes)} classes, {content}"
        return facts

    def _unknown(self, domain: Domain) -> str:
        names = list(dict.fromkeys(known.name for known in self.domains))
        if domain.name not in names:
            hint = near(domain.name, names)
            return f"{self.spec} has no {domain.name!r}: it has {listed(names, 20)}.{hint}"
        severities = [str(d.severity) for d in self.domains if d.name == domain.name]
        return (
            f"{self.spec} has no {domain.name!r} at severity {domain.severity}: "
            f"it has {', '.join(severities)}."
        )


@dataclass(frozen=True, eq=False)
class DomainImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """One domain as a torch data set of `(image, label)`, pixels in [0, 1]."""

    dataset: Dataset
    of: Domain

    def __repr__(self) -> str:
        return f"DomainImages({self.dataset.spec!r}, {str(self.of)!r}, {len(self):,} images)"

    def __len__(self) -> int:
        return len(self.dataset.of(self.of).labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image, corrupted if corruptions are made on the fly, and its label."""
        source = self.dataset.of(self.of)
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self!r} has no image {index}")
        index %= len(self)
        pixels = source.read(index)[None].float() / 255
        return self.dataset.finish(pixels, self.of, [index])[0], int(source.labels[index])


def data_name(spec: str) -> str:
    """The name of data without its path: its kind, the folder's own name, or your function's."""
    kind, _, folder = spec.partition(":")
    if kind == "folder":
        return Path(folder).expanduser().resolve().name
    if kind == "hf":
        return f"hf:{'/'.join(Path(folder).parts[-2:])}"
    return kind if kind in KINDS else spec


MADE = (Domain(CLEAN), *(Domain(name, severity) for name in BY_NAME for severity in SEVERITIES))


def pixels_of(file: Path | BinaryIO, view: View) -> Tensor:
    """An encoded image as the model takes it, (3, H, W), bytes."""
    from PIL import Image

    with Image.open(file) as image:
        return pixels_of_image(image, view)


def pixels_of_image(image: Image.Image, view: View) -> Tensor:
    """A Pillow image as the model takes it, (3, H, W), bytes."""
    pixels = np.asarray(view(_rgb(image)))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())  # in order: quick to batch


def digest_of(*parts: bytes | memoryview) -> str:
    """Equal for equal bytes."""
    whole = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(whole).hexdigest()[:16]


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:  # reading it will raise
        return -1


def _rgb(image: Image.Image) -> Image.Image:
    """As torchvision's folders: EXIF orientation is ignored. 16-bit grey is scaled, not clipped."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P":  # Pillow warns of see-through colours, unless it may keep them
        image = image.convert("RGBA")
    return as_rgb(image)
