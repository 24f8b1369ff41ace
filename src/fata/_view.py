"""Resize and centre crop of Pillow images, as a network expects them; without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class View:
    """The square that a network sees of an image.

    Args:
        resize: length of the image's shorter side, before the crop.
        size: side of the square.
        interpolation: of the resize; Pillow's name in lower case, such as `bicubic`.
        squash: resize both sides, whatever the image's shape.
    """

    resize: int
    size: int
    interpolation: str
    squash: bool = False

    def __call__(self, image: Image.Image) -> Image.Image:
        """Resized and cropped."""
        return self._middle(self._resized(as_rgb(image), self.resize, self.squash))

    def crop(self, image: Image.Image) -> Image.Image:
        """Cropped; an image smaller than the square is resized."""
        image = as_rgb(image)
        if min(image.size) < self.size:
            image = self._resized(image, self.size, squash=False)
        return self._middle(image)

    def _resized(self, image: Image.Image, side: int, squash: bool) -> Image.Image:
        from PIL.Image import Resampling

        width, height = image.size
        short = min(width, height)
        shape = (side, side) if squash else (side * width // short, side * height // short)
        if shape == image.size:
            return image
        return image.resize(shape, Resampling[self.interpolation.upper()])

    def _middle(self, image: Image.Image) -> Image.Image:
        if image.size == (self.size, self.size):
            return image
        left, top = (round((side - self.size) / 2) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB; an RGB image is not copied."""
    return image if image.mode == "RGB" else image.convert("RGB")
