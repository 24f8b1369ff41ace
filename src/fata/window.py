"""A sliding window: batches for images that come one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fata.adapter import Adapter


class Window:
    """Makes a batch of the latest images, learns from it, and predicts the newest alone.

    BatchNorm and most methods need a batch to learn from. Every image is passed as often as it is
    in the window, so an image costs as much as a whole batch. Not for several threads.

    Args:
        adapter: from `fata.adapt`.
        size: number of images; the batch size that the learning rate is for.

    Example:
        >>> import fata, torch
        >>> adapted = fata.adapt(fata.tiny.build("resnet_bn"), "tent")
        >>> window = fata.Window(adapted, 8)
        >>> for image in torch.rand(20, 3, 16, 16):
        ...     logits = window(image[None])
        >>> logits.shape, len(window.images)
        (torch.Size([1, 10]), 8)
    """

    def __init__(self, adapter: Adapter, size: int = 64) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"Window(size={size!r}): must be a whole number, at least 1.")
        self.adapter, self.size = adapter, size
        self.images: Tensor | None = None  # the latest, oldest first

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of these images, the last rows of a batch with those before them."""
        before = images[:0] if self.images is None else self.images
        if _kind(before) != _kind(images):
            raise ValueError(
                f"images of {_kind(images)} after images of {_kind(before)}: all images of a "
                f"window must be alike; reset() empties it."
            )
        batch = torch.cat((before[max(0, len(before) + len(images) - self.size) :], images))
        logits: Tensor = self.adapter(batch)[len(batch) - len(images) :]
        self.images = batch if len(batch) <= self.size else batch[-self.size :].clone()
        return logits

    def reset(self, seed: int | None = None) -> None:
        """Empty the window, and restore the source model as `adapter.reset` does."""
        self.images = None
        self.adapter.reset(seed)


def _kind(images: Tensor) -> str:
    return f"shape {tuple(images.shape[1:])}, {images.dtype}, on {images.device}"
