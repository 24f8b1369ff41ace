"""What a model meets: pictures with labels, in one or more domains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fata.corruptions import BY_NAME, NAMES, SEVERITIES, corrupt, weather
from fata.data.errors import DataError
from fata.structure import listed, near

CLEAN = "clean"


class Domain(NamedTuple):
    """A corruption at a severity, a folder of pictures, or the clean ones."""

    name: str
    severity: int | None = None

    def __str__(self) -> str:
        return self.name if self.severity is None else f"{self.name}-{self.severity}"


class Pictures(Protocol):
    """Pictures of one domain."""

    @property
    def labels(self) -> Tensor:
        """The class of each."""

    def read(self, index: int) -> Tensor:
        """One picture, (3, H, W), bytes."""

    def name(self, index: int) -> str:
        """What the picture is called, for errors."""

    @property
    def digest(self) -> str:
        """Equal for equal pictures, wherever they lie."""


@dataclass(frozen=True)
class Arrays:
    """Pictures in memory."""

    images: Tensor  # (N, 3, H, W), bytes
    labels: Tensor

    def read(self, index: int) -> Tensor:
        """One picture, (3, H, W), bytes."""
        return self.images[index]

    def name(self, index: int) -> str:
        """Its number."""
        return f"picture {index}"

    @cached_property
    def digest(self) -> str:
        """Of pixels and labels."""
        parts = (self.images.contiguous().numpy(), self.labels.numpy())
        return _digest(b"".join(hashlib.sha256(part.tobytes()).digest() for part in parts))


@dataclass(frozen=True)
class Files:
    """Pictures on the disk, decoded when they are read."""

    folder: Path
    paths: Sequence[str]  # inside the folder
    labels: Tensor
    view: Callable[[Image.Image], Image.Image]  # to the size that the model takes

    def read(self, index: int) -> Tensor:
        """One picture, (3, H, W), bytes."""
        with Image.open(self.folder / self.paths[index]) as picture:
            pixels = np.array(self.view(picture.convert("RGB")))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def name(self, index: int) -> str:
        """Its path."""
        return str(self.folder / self.paths[index])

    @cached_property
    def digest(self) -> str:
        """Of names, sizes and labels: reading every picture would take too long."""
        sizes = (f"{path} {(self.folder / path).stat().st_size}" for path in self.paths)
        return _digest("\n".join(sizes).encode() + self.labels.numpy().tobytes())


@dataclass(frozen=True)
class Dataset:
    """Pictures by domain; corruptions are either on the disk or made on the fly."""

    spec: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]  # what can be met, in the benchmark's order
    pictures: Callable[[Domain], Pictures]
    made: bool = False  # corruptions are made here
    jpeg: bool = False  # ... and go through JPEG, as the released files did
    _opened: dict[Domain, Pictures] = field(default_factory=dict, repr=False)

    def of(self, domain: Domain) -> Pictures:
        """The pictures of a domain, before any corruption that is made."""
        if domain not in self.domains:
            raise DataError(self._unknown(domain))
        key = Domain(CLEAN) if self.made else domain
        if key not in self._opened:
            self._opened[key] = self.pictures(key)
        return self._opened[key]

    def finish(self, pixels: Tensor, domain: Domain, ids: Sequence[int]) -> Tensor:
        """Corrupt pixels in [0, 1] where the corruption is not on the disk already."""
        if not self.made or domain.severity is None:
            return pixels
        return corrupt(pixels, domain.name, domain.severity, ids=ids, jpeg=self.jpeg)

    def named(self, names: Sequence[str] | None, severity: int) -> list[Domain]:
        """Domains by name; corruptions at one severity. None: the benchmark's, or all folders."""
        if names is None:
            names = list(dict.fromkeys(d.name for d in self.domains if d.name in NAMES))
        if not names:
            names = [domain.name for domain in self.domains]
        known = {domain.name for domain in self.domains if domain.severity is None}
        wanted = [Domain(name, None if name in known else severity) for name in names]
        if missing := [domain for domain in wanted if domain not in self.domains]:
            raise DataError(self._unknown(missing[0]))
        return wanted

    @property
    def provenance(self) -> dict[str, str]:
        """What a result should be kept with."""
        facts = {"data": self.spec, "images": self.of(self.domains[0]).digest}
        if self.made:
            facts["corruptions"] = f"made, {'through JPEG 85' if self.jpeg else 'no JPEG'}"
            facts["frost"] = weather.frost_source()
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


MADE = (Domain(CLEAN), *(Domain(name, severity) for name in BY_NAME for severity in SEVERITIES))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
