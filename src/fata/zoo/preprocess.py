"""Preprocessing of images: resize, centre crop, normalise."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fata._view import View
from fata.methods.pixels import Pixels

if TYPE_CHECKING:
    from PIL import Image

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")  # of Pillow


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing that a network was trained for.

    Args:
        resize: length of an image's shorter side, before the crop.
        size: side of the square that the network takes.
        interpolation: of the resize; Pillow's name in lower case, such as `bicubic`.
        mean: of each channel, of pixels in [0, 1].
        std: likewise.
        squash: resize both sides, whatever the image's shape.

    Example:
        >>> import torch
        >>> from PIL import Image
        >>> from fata.zoo.preprocess import Preprocess
        >>> preprocess = Preprocess(256, 224, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        >>> preprocess(Image.new("RGB", (640, 480))).shape
        torch.Size([3, 224, 224])
        >>> preprocess(torch.zeros(8, 3, 224, 224)).unique()
        tensor([-1.])
    """

    resize: int
    size: int
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    squash: bool = False

    def __post_init__(self) -> None:
        """Raise for impossible sizes, modes or statistics."""
        if self.resize < 1 or self.size < 1:
            raise ValueError(
                f"Preprocess(resize={self.resize!r}, size={self.size!r}): give lengths in pixels."
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"Preprocess(interpolation={self.interpolation!r}): choose one of "
                f"{', '.join(INTERPOLATIONS)}."
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"Preprocess(mean={self.mean!r}, std={self.std!r}): give three numbers each, and "
                f"a std above 0."
            )

    def __call__(self, images: Image.Image | Tensor) -> Tensor:
        """The network's input, from a Pillow image or from pixels in [0, 1].

        Args:
            images: an image, which is resized and cropped; or pixels (B, 3, H, W) that are already.
        """
        if isinstance(images, Tensor):
            return self.normalise(images)
        return self.normalise(self.pixels(images))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Preprocess:
        """The preprocessing with fields from JSON."""
        return cls(**{**fields, "mean": tuple(fields["mean"]), "std": tuple(fields["std"])})

    def pixels(self, image: Image.Image) -> Tensor:
        """Resized and cropped pixels, (3, size, size) in [0, 1]."""
        return torch.from_numpy(np.array(self.view(image))).permute(2, 0, 1).float().div(255)

    def picture(self, image: Image.Image) -> Tensor:
        """Former name of `pixels`."""
        message = "preprocess.picture is now preprocess.pixels; the old name goes next."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.pixels(image)

    @property
    def geometry(self) -> View:
        """What it does with an image before it is normalised."""
        return View(self.resize, self.size, self.interpolation, self.squash)

    def view(self, image: Image.Image) -> Image.Image:
        """The same as a Pillow image."""
        return self.geometry(image)

    def crop(self, image: Image.Image) -> Image.Image:
        """Centre crop of an image that is resized already, such as ImageNet-C's.

        An image smaller than `size` is resized.
        """
        return self.geometry.crop(image)

    def normalise(self, pixels: Tensor) -> Tensor:
        """The network's input, from pixels (B, 3, H, W) in [0, 1]."""
        return Pixels(self.mean, self.std).back(pixels)
