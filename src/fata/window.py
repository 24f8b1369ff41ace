"""A sliding window over a stream of single images."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fata.adapter import Adapter


class Window:
    """Makes a batch of the latest images, and predicts the newest alone.

    BatchNorm normalises with the statistics of the whole window, and most methods need its rows to
    learn from. Every image is learned from once, as in a stream of batches, unless `every` is
    smaller. A prediction costs a forward pass over the window. Not for several threads.

    Args:
        adapter: from `fata.adapt`.
        size: number of images; the batch size that the learning rate is for.
        every: images between two steps of adaptation; None: `size`. With fewer, an image is
            learned from several times: lower the learning rate in proportion.

    Example:
        >>> import fata, torch
        >>> adapted = fata.adapt(fata.tiny.build("resnet_bn"), "tent")
        >>> window = fata.Window(adapted, 8)
        >>> for image in torch.rand(20, 3, 16, 16):
        ...     logits = window(image[None])
        >>> logits.shape, len(window.images), adapted.counts["seen"]
        (torch.Size([1, 10]), 8, 16)
    """

    def __init__(self, adapter: Adapter, size: int = 64, every: int | None = None) -> None:
        if not isinstance(adapter, Adapter):
            raise TypeError("Window(adapter): give an adapter, such as fata.adapt(model).")
        for name, value in (("size", size), ("every", every)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not (whole or (name == "every" and value is None)):
                raise ValueError(f"Window({name}={value!r}): must be a whole number, at least 1.")
        if every and every > size:
            raise ValueError(f"Window(every={every}): at most size={size}, or images are left out.")
        self.adapter, self.size, self.every = adapter, size, every or size
        self._clear()

    def _clear(self) -> None:
        self.images: Tensor | None = None  # the latest, oldest first
        self.new = 0  # how many of them came since the last step
        self.rows_frozen = 0  # rows of passes without a step, which `adapter.counts` leaves out

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of these images, the last rows of a batch with those before them."""
        before = images[:0] if self.images is None else self.images
        if _kind(before) != _kind(images):
            raise ValueError(
                f"images of {_kind(images)} after images of {_kind(before)}: all images of a "
                f"window must be alike; reset() empties it."
            )
        batch = torch.cat((before[max(0, len(before) + len(images) - self.size) :], images))
        new = self.new + len(images)
        learns = new >= self.every
        with nullcontext() if learns else self.adapter.frozen():
            logits: Tensor = self.adapter(batch)[len(batch) - len(images) :]
        self.new = 0 if learns else new
        self.rows_frozen += 0 if learns else len(batch)
        self.images = batch if len(batch) <= self.size else batch[-self.size :].clone()
        return logits

    def reset(self, seed: int | None = None) -> None:
        """Empty the window, and restore the source model as `adapter.reset` does."""
        self._clear()
        self.adapter.reset(seed)


def _kind(images: Tensor) -> str:
    return f"shape {tuple(images.shape[1:])}, {images.dtype}, on {images.device}"
