"""Class balance: the mean over a term's rows weighs rare classes more, so that none takes over.

    m  <-  a m + (1 - a) mean_B p,   a = 0.9^(B / 64)     the first time: mean_B p
    L   =  sum_S r w l / sum_S r,    r = 1 / m[y]         instead of mean_S w l

m is the mean prediction of about the last 640 images, and y = argmax p. A class that is predicted
twice as often weighs half a row, so all classes in view have equal parts in the loss. Where
predictions are balanced, and where there is one class only, this is the plain mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fata.methods.base import Batch, Memory

KEPT = 0.9  # of m, after a batch of
ROWS = 64


def mean_prediction(batch: Batch, memory: Memory) -> Tensor:
    """m, (C,), with this batch; rows that are not finite have no part in it."""
    rows = batch.group.sum(batch.finite.sum())
    total = batch.group.sum(torch.where(batch.finite[:, None], batch.probs, 0).sum(0))
    mean = total / rows.clamp(min=1)
    if "mean_probs" not in memory:
        return mean
    kept = KEPT ** (rows / ROWS)
    return kept * memory["mean_probs"].to(mean) + (1 - kept) * mean


def rarity(batch: Batch, mean_probs: Tensor) -> Tensor:
    """1 / m[y] of each row, at least 1."""
    return 1 / mean_probs[batch.pseudo_label].clamp(min=torch.finfo(mean_probs.dtype).tiny, max=1)
