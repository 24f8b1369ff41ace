"""Which rows of a batch to learn from, and with what weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Rows to learn from and the weight of each.

    Args:
        rows: (B,) bool, true where a row is selected.
        weights: (B,) weight of each row; means something only where `rows` is true.
    """

    rows: Tensor
    weights: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Selection:
        """No row of a batch with the rows of `like`."""
        return cls(torch.zeros(len(like), dtype=torch.bool, device=like.device), like.new_zeros(()))

    def at(self, index: Tensor) -> Selection:
        """The same selection, for a batch of the rows `index` only."""
        return Selection(self.rows[index], self.weights.expand(len(self.rows))[index])

    def among(self, rows: Tensor) -> Selection:
        """What is selected here and also true in `rows`."""
        return Selection(self.rows & rows, self.weights)


def reliable(entropy: Tensor, threshold: float, classes: int) -> Tensor:
    """H < threshold x ln C: the model is confident enough on these rows."""
    return entropy < threshold * math.log(classes)


def confidence(entropy: Tensor, scale: float, classes: int) -> Tensor:
    """exp(scale x ln C - H): confident rows weigh more."""
    return (scale * math.log(classes) - entropy).exp()


def distinct(probs: Tensor, mean_probs: Tensor, margin: float) -> Tensor:
    """|cos(p, mean p)| < margin: rows that say something the past ones did not.

    In squares, by kernels that a pass has loaded: a GPU takes 50 ms for those of torch's cosine.
    """
    product = (probs * mean_probs).sum(1)
    lengths = (probs * probs).sum(1) * (mean_probs * mean_probs).sum()
    return product * product < margin**2 * lengths


def shuffle_patches(images: Tensor, permutations: Tensor, grid: int) -> Tensor:
    """Cut each image into grid x grid patches and put patch `permutations[i, j]` at place j.

    Sides that are no multiple of the grid are resized to the multiple below for it, and back.
    """
    if images.ndim != 4 or min(images.shape[-2:]) < grid:
        raise ValueError(
            f"images of shape {tuple(images.shape)} cannot be cut into {grid} x {grid} patches."
        )
    rows, channels, height, width = images.shape
    h, w = height // grid, width // grid
    cut = (h * grid, w * grid)
    if cut != (height, width):
        images = _resized(images, cut)
    patches = images.reshape(rows, channels, grid, h, grid, w).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(rows, grid * grid, channels, h, w)
    patches = patches[torch.arange(rows, device=images.device)[:, None], permutations]
    patches = patches.reshape(rows, grid, grid, channels, h, w).permute(0, 3, 1, 4, 2, 5)
    images = patches.reshape(rows, channels, *cut)
    return images if cut == (height, width) else _resized(images, (height, width))


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    whole = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return whole.to(images.dtype)
