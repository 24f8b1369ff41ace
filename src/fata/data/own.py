"""Data of your own: `my_module:loader`, a function that returns a torch data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fata._imports import imported
from fata.data.dataset import MADE, Dataset, Domain, View, digest_of, pixels_of_image
from fata.data.errors import DataError

_DIGESTED = 64  # images that the fingerprint covers


def own(spec: str, view: View, jpeg: bool) -> Dataset:
    """The data that a function returns.

    One map-style torch data set of `(image, label)` is corrupted on the fly. A dict has one for
    each domain, used as they are. A `fata.data.Dataset` is taken as it is.
    """
    try:
        given = imported(spec)()
    except Exception as error:  # whatever the function does
        raise DataError(f"{spec}: {error}.") from error
    if isinstance(given, Dataset):
        return given
    if not isinstance(given, Mapping):
        source = OwnImages(spec, given, view)
        classes = _classes([source])
        return Dataset(spec, classes, MADE, lambda _: source, made=True, jpeg=jpeg)
    if jpeg or not given:
        raise DataError(f"{spec}: jpeg is for corruptions made on the fly; give one domain or more")
    sources = {Domain(str(name)): OwnImages(spec, one, view) for name, one in given.items()}
    return Dataset(spec, _classes(list(sources.values())), tuple(sources), sources.__getitem__)


class OwnImages:
    """Images of a map-style torch data set, whose items are `(image, label)`.

    An image is Pillow's, which is resized and cropped for the model; or a tensor (3, H, W), bytes
    or in [0, 1], of the size that the model takes.
    """

    on_disk = False

    def __init__(self, spec: str, items: Any, view: View) -> None:
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__") and len(items)):
            raise DataError(
                f"{spec} returns {type(items).__name__}: return a torch data set of (image, label) "
                f"with len(), or a dict of these by domain."
            )
        self.spec, self.items, self.view = spec, items, view

    @cached_property
    def labels(self) -> Tensor:
        """The class of each image: `targets` of the data set, or read image by image."""
        targets = getattr(self.items, "targets", None)
        if targets is None:
            targets = [self._item(index)[1] for index in range(len(self.items))]
        return torch.as_tensor(targets, dtype=torch.int64)

    @property
    def classes(self) -> Sequence[str]:
        """Their names, if the data set has them."""
        return getattr(self.items, "classes", ())

    def read(self, index: int, view: View | None = None) -> Tensor:
        """One image, (3, H, W), bytes; through another view, if one is given."""
        image = self._item(index)[0]
        if not isinstance(image, Tensor):
            return pixels_of_image(image, view or self.view)
        pixels = self._bytes(index, image)
        if view is None:
            return pixels
        from PIL import Image

        return pixels_of_image(Image.fromarray(pixels.permute(1, 2, 0).numpy()), view)

    def _bytes(self, index: int, image: Tensor) -> Tensor:
        if image.ndim != 3 or len(image) != 3:
            raise DataError(f"{self.name(index)} is {tuple(image.shape)}: expected (3, H, W).")
        if image.dtype == torch.uint8:
            return image
        if image.min() < 0 or image.max() > 1:
            raise DataError(
                f"{self.name(index)} has pixels outside [0, 1]: give them without normalisation, "
                f"which is the model's."
            )
        return (image * 255).round().byte()

    def name(self, index: int) -> str:
        """Its number."""
        return f"{self.spec}[{index}]"

    @cached_property
    def digest(self) -> str:
        """Of the labels and some images: reading every one would take too long."""
        step = max(1, len(self.items) // _DIGESTED)
        images = (self.read(index) for index in range(0, len(self.items), step))
        return digest_of(
            self.labels.numpy().data, *(one.contiguous().numpy().data for one in images)
        )

    def _item(self, index: int) -> tuple[Any, Any]:
        match self.items[index]:
            case (image, label):
                return image, label
        raise DataError(f"{self.name(index)}: expected (image, label).")


def _classes(sources: Sequence[OwnImages]) -> tuple[str, ...]:
    """Names of the classes; without them their numbers, up to the highest label."""
    named = next((tuple(map(str, one.classes)) for one in sources if one.classes), ())
    highest = max(int(one.labels.max()) for one in sources)
    return named or tuple(str(label) for label in range(highest + 1))
