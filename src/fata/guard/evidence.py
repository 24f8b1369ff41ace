"""Evidence of harm that needs no labels, from two models' predictions for the same images.

The source model predicts class s for an image with confidence p, and the adapted one class a. Where
they differ the image was moved. N0[c] and N[c] count how often source and adapted model predicted
class c for the latest n images, and M = max(N, N0):

    x  =  z(M[a], M[s])         towards a class that is predicted more often: +
    z(u, v)  =  (u - v) / sqrt(u + v)       x is kept within [-1, 1]

A model that goes wrong moves images to the classes that are frequent already, since entropy is
lowest when all get one class. One that adapts well takes them from the classes that a shift makes
the source predict too often. The mean of x over all images is close to the accuracy that is lost.

That holds while all classes are in view. Where some really are more frequent, ln N0[s] and p
correlate. Above a limit (in the batch alone, by more than its standard deviation: then only the
batch is counted) the source is most confident of the frequent classes. Images belong to those; the
image at hand is not counted:

    x  =  -z(N0[a], N0[s] - 1);  1 if p is above its mean and x above -1

Below minus that limit it is least confident of them: some are frequent, some only predicted too
often. E[c], the images that its confidence speaks for, tells them apart:

    x  =  z(M[a], E[a]) - z(M[s], E[s])     E[c] = n sum p^2 over images of s = c / sum p^2

BatchNorm with the batch's statistics moves images by itself, if batches are small or classes
unequal. The source weights with the batch's statistics predict b, with confidence q. If a = b, s
and b are of the same weights with other statistics. Unless that correlation is above the limit,
their confidences are compared:

    x  =  1 if p > q,  -1 if p < q,  each by more than that limit;  else 0

If images were moved by chance, the odds would stay even. x is a bet against that, and against a
loss of a point, which is no harm yet:

    ln odds of harm  =  sum of ln(1 + k (x - 0.01))      of gain  =  sum of ln(1 - k x)

each since it was last 0 (CUSUM). It takes 1 / level checks of a harmless model, on average, until
the odds reach 1 : level, whatever k is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fata.distributed.ranks import Ranks
from fata.guard.health import Health

POINT = 0.01  # of the accuracy, that may be lost
CERTAIN = 100.0  # log odds of what needs no evidence, such as logits that have become NaN


class Evidence(NamedTuple):
    """What one check shows."""

    latest: Tensor  # a row an image: s, a, p, and p - q if a = b, else 0
    harm: float  # log odds by the images of this check
    gain: float
    health: Health | None  # None: no image has been compared


def predictions(source: Tensor, logits: Tensor, beside: Tensor | None, group: Ranks) -> Tensor:
    """A row for each image of all ranks, on the CPU, as in `Evidence`; a is -1 if there is none.

    Args:
        source: logits of the source model.
        logits: of the adapted one.
        beside: of the source weights with the batch's statistics; None: there are none.
        group: the ranks that share the images.
    """
    p, s = source.float().softmax(1).max(1)
    a = logits.argmax(1).masked_fill(logits.isnan().any(1), -1)
    d = torch.zeros_like(p)
    if beside is not None:
        q, b = beside.float().softmax(1).max(1)
        d = torch.where(a == b, p - q, 0.0).nan_to_num(0.0)
    total, here = group.place(len(p))
    rows = p.new_zeros(total, 4)
    rows[here] = torch.stack((s.to(p), a.to(p), p, d), 1)
    return group.sum(rows).cpu()


def compare(
    latest: Tensor | None, now: Tensor, classes: int, rows: int, bet: float, real: float
) -> Evidence:
    """What some more images show.

    Args:
        latest: rows of the checks before; None at the first.
        now: from `predictions`. A row without a is harm; one without p, NaN, counts nothing.
        classes: number of classes.
        rows: images that are counted.
        bet: k.
        real: limit of the correlation, and of a difference of confidences.
    """
    now = now[~now[:, 2].isnan()]
    fine = now[now[:, 1] >= 0]
    latest = fine if latest is None else torch.cat((latest, fine))[-max(rows, len(fine)) :]
    few = _few(fine, classes) - max(1, len(fine)) ** -0.5 > real
    x = _harm(fine if few else latest, classes, real)
    here, certain = x[len(x) - len(fine) :], CERTAIN * (len(now) - len(fine))
    harm = (bet * (here - POINT).clamp(min=-1)).log1p().sum().item() + certain
    gain = (-bet * here).log1p().sum().item() - certain
    health = None
    if len(latest):
        confidence = latest[:, 2].mean().item()
        health = Health(confidence, min(1.0, max(0.0, confidence - x.mean().item())))
    return Evidence(latest[-rows:], harm, gain, health)


def _harm(rows: Tensor, classes: int, real: float) -> Tensor:
    """The x of each row."""
    s, a = rows[:, 0].long(), rows[:, 1].long()
    p, d = rows[:, 2], rows[:, 3]
    moved, (n0, n) = a != s, (c.bincount(minlength=classes).to(p) for c in (s, a))
    few, most = _few(rows, classes), torch.maximum(n0, n)
    if few > real:
        x = -_z(n0[a], n0[s] - moved.to(p)).clamp(-1, 1)
        return torch.where(moved & (p > p.mean()) & (x > -1), 1, x)
    if few < -real:
        meant = s.bincount(p.square(), minlength=classes) * len(p) / p.square().sum()
        beyond = _z(most, meant)
        x = beyond[a] - beyond[s]
    else:
        x = _z(most[a], most[s])
    return torch.where(moved & (d != 0), d.sign() * (d.abs() > real), x.clamp(-1, 1))


def _z(more: Tensor, less: Tensor) -> Tensor:
    """The difference of two counts, in standard deviations."""
    return (more - less) / (more + less).clamp(min=1).sqrt()


def _few(rows: Tensor, classes: int) -> float:
    """Correlation of ln N0[s] with p; 0 where one of them does not vary."""
    s, p = rows[:, 0].long(), rows[:, 2]
    u = s.bincount(minlength=classes)[s].log()
    u, p = u - u.mean(), p - p.mean()
    return float((u * p).sum() / (u.norm() * p.norm()).clamp(min=1e-3))
