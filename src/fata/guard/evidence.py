"""Evidence of harm that needs no labels, from two models' predictions for the same images.

The equations, and why they are these: "The rule" in docs/lab/guard.md. Their names are used here:
the source model predicts class s with confidence p, the adapted one a, and the source weights with
the statistics of the batch, where BatchNorm uses them, b with confidence q.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fata.distributed.ranks import Ranks
from fata.guard.events import Health

FEW = 32  # images; fewer show little of their classes, and of BatchNorm's statistics
POINT = 0.01  # of the accuracy, that may be lost
CERTAIN = 100.0  # log odds of what needs no evidence, such as logits that have become NaN


class Evidence(NamedTuple):
    """What one check shows."""

    latest: Tensor  # a row an image: s, a, p, and p - q if a = b and a != s, else 0
    harm: float  # log odds by the images of this check
    gain: float
    health: Health | None  # None: no image has been compared
    worse: Tensor  # of each image: p > q if a = b and a != s, else x > 0; true if there is no a


def predictions(source: Tensor, logits: Tensor, beside: Tensor | None, group: Ranks) -> Tensor:
    """A row for each image of all ranks, on the CPU, as in `Evidence`; a is -1 if there is none.

    From the logits of the source model, of the adapted one, and of the source weights with the
    batch's statistics, if there are any.
    """
    top, a = logits.max(1)
    p, s = source.float().softmax(1).max(1)
    q, b = (p, s) if beside is None else beside.float().softmax(1).max(1)
    total, here = group.place(len(p))
    rows = p.new_zeros(total, 6)
    rows[here] = torch.stack((s.to(p), a.to(p), p, b.to(p), q, top.to(p)), 1)
    s, a, p, b, q, top = group.sum(rows).cpu().unbind(1)  # few kernels: a GPU loads each at first
    d = torch.where((a == b) & (a != s), p - q, 0.0).nan_to_num(0.0)
    return torch.stack((s, a.masked_fill(top.isnan(), -1), p, d), 1)


def compare(
    latest: Tensor | None, now: Tensor, classes: int, rows: int, bet: float, real: float
) -> Evidence:
    """What some more images show, after the rows of the checks before.

    A row without a is harm; one without p, NaN, counts nothing. The latest `rows` are counted;
    `bet` is k, and `real` the limit of a correlation and of a difference of confidences.
    """
    known, told = ~now[:, 2].isnan(), now[:, 1] >= 0
    fine = now[known & told]
    latest = fine if latest is None else torch.cat((latest, fine))[-max(rows, len(fine)) :]
    x = _harm(latest, max(FEW, len(fine)), classes, real)
    here, certain = x[len(x) - len(fine) :], CERTAIN * int((known & ~told).sum())
    harm = (bet * (here - POINT).clamp(min=-1)).log1p().sum().item() + certain
    gain = (-bet * here).log1p().sum().item() - certain
    confidence, lost = latest[:, 2].mean().item(), x.mean().item()
    health = Health(confidence, min(1.0, max(0.0, confidence - lost))) if len(latest) else None
    worse = (~told).masked_scatter(known & told, fine[:, 3].where(fine[:, 3] != 0, here) > 0)
    return Evidence(latest[-rows:], harm, gain, health, worse)


def _harm(rows: Tensor, here: int, classes: int, real: float) -> Tensor:
    """The x of each row, of which so many are of this check."""
    s, a = rows[:, 0].long(), rows[:, 1].long()
    p, d = rows[:, 2], rows[:, 3]
    most = torch.maximum(s.bincount(minlength=classes), a.bincount(minlength=classes)).to(p)
    expected = torch.full_like(most, len(p) / classes)
    unequal = max(_between(s[-some:], p[-some:], classes) for some in (len(s), here)) > real
    if unequal:
        expected = s.bincount(p.square(), minlength=classes) * len(p) / p.square().sum()
    beyond = (most - expected) / (most + expected).clamp(min=1).sqrt()
    x = (beyond[a] - beyond[s]).clamp(-1, 1)
    return x if unequal else torch.where(d != 0, d.sign() * (d.abs() > real), x)


def _between(s: Tensor, p: Tensor, classes: int) -> float:
    """Correlation of p with the mean p of the other images of its class and one average image."""
    others, total = s.bincount(minlength=classes)[s] - 1, s.bincount(p, minlength=classes)[s]
    shrunk = (total - p + p.mean()) / (others + 1)
    u, v = shrunk - shrunk.mean(), p - p.mean()
    return float((u * v).sum() / (u.norm() * v.norm()).clamp(min=1e-3))
