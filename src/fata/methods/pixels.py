"""Pixels of images, and random scalars, for augmented views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Between the images that a model takes and pixels in [0, 1], in which views are made."""

    mean: Sequence[float] | None
    std: Sequence[float] | None

    def __post_init__(self) -> None:
        """Raise for what nothing can be normalised with."""
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std: give both, or neither for images in [0, 1].")
        if self.mean is None or self.std is None:
            return
        if isinstance(self.mean, int | float) or isinstance(self.std, int | float):
            raise TypeError("mean and std: give a number a channel, such as (0.5, 0.5, 0.5).")
        if len(self.mean) != len(self.std) or not all(0 < s < math.inf for s in self.std):
            raise ValueError(
                f"mean={self.mean!r}, std={self.std!r}: give as many of each, and std above 0."
            )

    def of(self, images: Tensor) -> Tensor:
        """Pixels of images; refuses images that are plainly not in [0, 1]."""
        if self.mean is not None and self.std is not None:
            images = images * self._column(self.std, images) + self._column(self.mean, images)
        if not len(images):  # of a rank that has no rows
            return images
        low, high = images.amin().item(), images.amax().item()
        if low < -0.1 or high > 1.1:
            raise ValueError(
                f"augmented views need pixels in [0, 1], but these images span [{low:.2f}, "
                f"{high:.2f}]: give the mean and std that they were normalised with: "
                f"fata.adapt(model, ..., mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))."
            )
        return images.clamp(0, 1)

    def back(self, pixels: Tensor) -> Tensor:
        """Images as the model takes them."""
        if self.mean is None or self.std is None:
            return pixels
        return (pixels - self._column(self.mean, pixels)) / self._column(self.std, pixels)

    @staticmethod
    def _column(values: Sequence[float], like: Tensor) -> Tensor:
        if not like.is_floating_point():
            raise TypeError(f"images are {like.dtype}: give pixels in [0, 1], as images / 255.")
        if like.numel() and like.shape[-3:-2] != (len(values),):  # none at all are of any shape
            raise ValueError(
                f"images of shape {tuple(like.shape)} with the mean and std of {len(values)} "
                f"channels: give (rows, {len(values)}, height, width)."
            )
        column = torch.tensor(values, dtype=like.dtype)[:, None, None]
        return column.to(like.device, non_blocking=True)  # made on a GPU it would be waited for


class Rng:
    """Scalars from a generator on the CPU, and noise for the rows of a batch.

    Args:
        generator: of the random numbers.
        place: how many rows the batch has on all ranks, and which are here; None: all are.
    """

    def __init__(self, generator: torch.Generator, place: tuple[int, slice] | None = None) -> None:
        self.generator, self.place = generator, place

    def uniform(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * torch.rand((), generator=self.generator).item()

    def integer(self, low: int, high: int) -> int:
        """An integer in low..high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def coin(self) -> bool:
        """True half of the time."""
        return self.uniform(0, 1) < 0.5

    def order(self, n: int) -> list[int]:
        """0..n-1 in a random order."""
        return torch.randperm(n, generator=self.generator).tolist()

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal noise of a tensor's shape; drawn for all ranks."""
        rows, here = self.place or (len(like), slice(None))
        return torch.randn(rows, *like.shape[1:], generator=self.generator)[here].to(like)
