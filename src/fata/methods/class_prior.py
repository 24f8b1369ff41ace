"""The prior of the classes in a batch, and logits that are corrected by it.

    pi   =  mean_B p
    s    =  max(1/B, 1/C) / max_c pi_c
    pi'  =  (pi + s) / (1 + s C)                smoothed: few rows say little about many classes

`multiply` gives o pi', as the released code of ROID does: the logits shrink, and where one is
negative a frequent class gets the lower one. `additive` gives o + ln pi', the correction of a
posterior. No filter and no loss may see corrected logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fata.methods.base import Batch

CORRECTIONS = ("multiply", "additive")


def class_prior(batch: Batch) -> Tensor:
    """The smoothed prior, (C,), of all ranks' rows; rows that are not finite have no part in it."""
    rows = batch.group.sum(batch.finite.sum()).clamp(min=1)
    total = batch.group.sum(torch.where(batch.finite[:, None], batch.probs, 0).sum(0))
    prior, classes = total / rows, batch.classes
    most = (1 / rows.to(prior)).clamp(min=1 / classes)
    smooth = most / prior.amax().clamp(min=torch.finfo(prior.dtype).tiny)
    return (prior + smooth) / (1 + smooth * classes)


def corrected(batch: Batch, correction: str) -> Tensor:
    """The batch's logits, corrected by its prior."""
    prior = class_prior(batch)
    return batch.logits * prior if correction == "multiply" else batch.logits + prior.log()
