"""What is minimised on a row, and the mean over the rows of a term."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fata.distributed.ranks import SINGLE, Ranks
from fata.methods.selection import Selection


def entropy(logits: Tensor) -> Tensor:
    """H(o) = -sum_c p_c log p_c of each row, in nats. A class at -inf has no part in any loss."""
    log_probs = _log_probs(logits)
    return -(log_probs.exp() * log_probs).sum(1)


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """-sum_c q_c log p_c of each row, with q the softmax of `target_logits`."""
    return -(target_logits.softmax(1) * _log_probs(logits)).sum(1)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) of each row, of the softmax of `logits` and of `other`; gradient to both."""
    log_probs = _log_probs(logits)
    return (log_probs.exp() * (log_probs - _log_probs(other))).sum(1)


def likelihood_ratio(logits: Tensor) -> Tensor:
    """-sum_c a_c ln(a_c / (1 - a_c) + 1e-5) of each row, a = min(p, 0.99) (ROID)."""
    probs = logits.softmax(1).clamp(max=0.99)
    return -(probs * (probs / (1 - probs) + 1e-5).log()).sum(1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction of all rows (MEMO), in log space; a scalar."""
    log_mean = _log_probs(logits).logsumexp(0) - torch.tensor(len(logits)).log()
    return -(log_mean.exp() * log_mean).sum()


def _log_probs(logits: Tensor) -> Tensor:
    """Finite, where a class is left out: 0 times that is 0."""
    return F.log_softmax(logits, 1).clamp(min=-1e4)


def weighted_mean(
    values: Tensor, selection: Selection, group: Ranks = SINGLE, rarity: Tensor | None = None
) -> Tensor:
    """Mean of weight x value over the selected rows; 0 where none is selected.

    With `rarity` (at least 1 for each row), rows count as much in the mean.

    In a group it is this rank's part of it: the sum of all parts is the mean.
    It divides by the number of selected rows, never by the batch. Rows that are not selected are
    cut off before the product, so that one that is not finite does not reach the sum.
    """
    rows = selection.rows
    weighted = torch.where(rows, selection.weights, 0) * torch.where(rows, values, 0)
    if rarity is None:
        return weighted.sum() / group.sum(rows.sum()).clamp(min=1)
    counted = torch.where(rows, rarity, 0)
    return (counted * weighted).sum() / group.sum(counted.sum()).clamp(min=1)
