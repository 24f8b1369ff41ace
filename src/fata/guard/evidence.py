"""Evidence of harm that needs no labels, from two models' predictions for the same images.

The source model predicts class s for an image, and the adapted one a. Where they differ the image
was moved. N0[c] and N[c] are how often source and adapted model predicted class c lately, p the
source's confidence:

    x  =  z(max(N, N0))                 towards a class that is predicted more often: +
    z(N)  =  (N[a] - N[s]) / sqrt(N[a] + N[s]),  within [-1, 1]

A model that goes wrong moves images to the classes that are frequent already, since entropy is
lowest when all get one class. One that adapts well takes them from the classes that a shift makes
the source predict too often. The mean of x over all images is close to the accuracy that is lost.

In a stream that really has few classes it is the other way round: images belong to the frequent
ones. There the source is surer of frequent classes than of others; where a shift makes it predict
them, it is not. r is the correlation of ln N0[s] with p. If it is above a limit (or that of the
batch alone is, less its standard deviation; then N0 is the batch's),

    x  =  -z(N0);   1 if p is above its mean: moved although the source was sure

If images were moved by chance, the odds would stay even. x is a bet against that:

    ln odds of harm  =  sum of ln(1 + k x)      of gain  =  sum of ln(1 - k x)

each since it was last 0 (CUSUM). It takes 1 / level checks of a harmless model, on average, until
the odds reach 1 : level, whatever k is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fata.distributed.ranks import SINGLE, Ranks
from fata.methods.base import Memory

CERTAIN = 100.0  # log odds of an image whose logits have become NaN
MOMENTS = ("l", "p", "ll", "pp", "lp")  # means of ln N0[s], of p, and of their products


class Evidence(NamedTuple):
    """What one check shows, as numbers on the device."""

    harm: Tensor  # log odds
    gain: Tensor  # log odds
    moved: Tensor  # mean of x over the images


def compare(
    before: Memory,
    source: Tensor,
    logits: Tensor,
    rows: int,
    bet: float,
    real: float,
    group: Ranks = SINGLE,
) -> tuple[Memory, Evidence]:
    """What both models predict for some images, added to the averages; what it shows.

    Args:
        before: averages of the checks before; empty at the first.
        source: logits of the source model.
        logits: of the adapted one. A row with NaN is harm, unless the source's has one too.
        rows: images that the averages are over.
        bet: k.
        real: the limit of r.
        group: the ranks that share the images.
    """
    known = ~source.isnan().any(1) & group.real
    lost = known & logits.isnan().any(1)
    fine = known & ~lost
    p, s = source.softmax(1).max(1)
    a, p = logits.argmax(1), p.nan_to_num(0)
    images = s, a, p, fine, rows, logits.shape[1], group
    after, alone = _with(before, *images), _with({}, *images)
    of_batch = _correlation(alone) - group.rows(len(s)) ** -0.5 > real
    frequent = torch.where(of_batch, alone["N0"], after["N0"])
    sure = (a != s) & (p > after["p"])
    few = torch.where(sure, 1, -_towards(frequent, a, s))
    x = _towards(torch.maximum(after["N0"], after["N"]), a, s)
    x = torch.where(of_batch | (_correlation(after) > real), few, x) * fine
    certain = CERTAIN * lost.sum()
    sums = torch.log1p(bet * x).sum() + certain, torch.log1p(-bet * x).sum() - certain, x.sum()
    harm, gain, moved = group.sum(torch.stack(sums))
    return after, Evidence(harm, gain, moved / group.rows(len(logits)))


def _towards(counts: Tensor, a: Tensor, s: Tensor) -> Tensor:
    """z: whether an image goes to a class that is counted more often, in standard deviations."""
    here, there = counts[a], counts[s]
    return ((here - there) / (here + there).clamp(min=1).sqrt()).clamp(-1, 1)


def _with(
    before: Memory,
    s: Tensor,
    a: Tensor,
    p: Tensor,
    fine: Tensor,
    rows: int,
    classes: int,
    group: Ranks,
) -> Memory:
    """The averages with some images: older ones fade out."""
    now = group.rows(len(s))
    kept = max(0.0, 1 - now / rows)
    after = {}
    for name, predicted in (("N0", s), ("N", a)):
        here = p.new_zeros(classes).index_add_(0, predicted, fine.to(p))
        after[name] = kept * before.get(name, torch.zeros_like(here)) + group.sum(here)
    ln = (after["N0"][s].clamp(min=1) / after["N0"].sum().clamp(min=1)).log()
    values = torch.stack((ln, p, ln * ln, p * p, ln * p)) * fine
    sums = group.sum(torch.cat((values.sum(1), fine.sum()[None].to(p))))
    seen = kept * before.get("images", p.new_zeros(())) + sums[-1]
    for name, total in zip(MOMENTS, sums, strict=False):
        old = before.get(name, p.new_zeros(()))
        after[name] = old + (total - sums[-1] * old) / seen.clamp(min=1)
    return {**after, "images": seen}


def _correlation(mean: Memory) -> Tensor:
    """r; 0 where nothing varies."""
    varies = (mean["ll"] - mean["l"].square()) * (mean["pp"] - mean["p"].square())
    together = mean["lp"] - mean["l"] * mean["p"]
    return torch.where(varies > 1e-9, together / varies.clamp(min=1e-9).sqrt(), 0)
