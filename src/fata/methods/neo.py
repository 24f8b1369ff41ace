"""NEO: no-optimisation test-time adaptation through latent re-centring (ICLR 2026).

    mu  <-  mean of z over all images so far        with alpha: (1 - alpha) mu + alpha mean_B z
    o'   =  W (z - mu) + b                          mu has seen this batch

z is the penultimate feature and W, b the classifier. Nothing trains and nothing is differentiated.
BatchNorm uses the batch's statistics, as the released code's variant for such networks does.

mu starts at zero. The first image of a stream of single images is its own mean, so that its logits
are b: `warmup` leaves so many images as they are. With FATA the weights move and mu is to follow
them: give `alpha`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fata.methods.base import Batch, Memory, in_range
from fata.methods.feature import FeatureMethod, feature
from fata.methods.selection import Selection


@dataclass(frozen=True)
class Neo(FeatureMethod):
    """Subtracts the mean feature of the stream from every feature.

    Args:
        alpha: how far the mean moves to that of each batch (0.1 in the released code), for a
            stream that changes; None: it is of all images so far.
        warmup: images that must have been seen before the mean is subtracted.
    """

    alpha: float | None = None
    warmup: int = 0

    name: ClassVar[str] = "neo"
    params: ClassVar[str | None] = None
    gradient_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        super().__post_init__()
        if self.alpha is not None:
            in_range(self, "alpha", 0, 1, hint=", or None for the mean of all images")
        in_range(self, "warmup", 0, whole=True)

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """No row."""
        return Selection.none(batch.entropy)

    def observe(self, batch: Batch, selection: Selection, memory: Memory) -> Memory:
        """Move the mean to the features of a batch; those that are not finite have no part."""
        z, _ = feature(batch)
        rows = batch.group.sum(batch.finite.sum())
        total = batch.group.sum(torch.where(batch.finite[:, None], z, 0).sum(0))
        old = memory.get("mean", torch.zeros_like(total))
        count = memory.get("count", torch.zeros_like(rows)) + rows
        mean = total / rows.clamp(min=1)
        share = rows.to(mean) / count.clamp(min=1)
        if self.alpha is not None:
            share = self.alpha * (rows > 0).to(mean)
        return {"mean": old + share * (mean - old), "count": count}

    def shift(self, weight: Tensor, memory: Memory) -> Tensor | None:
        """-W mu, once there are images enough."""
        if not memory:
            return None
        known = memory["count"] >= self.warmup
        return torch.where(known, -(weight.to(memory["mean"]) @ memory["mean"]), 0)
