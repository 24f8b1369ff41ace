"""Spatter: drops of water, or splashes of mud, on the lens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fata.corruptions import filters
from fata.corruptions.rng import ImageRng

_SOBEL = (
    ((-1, -2, -1), (0, 0, 0), (1, 2, 1)),  # down
    ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1)),  # to the right
)
_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))
_SUM = ((1, 1, 1),) * 3
_FAR = 20  # where the distance to a rim ends
_STEPS = {  # what a step to a neighbour costs, and a knight's move
    (down * a, right * b): cost
    for i, j, cost in ((0, 1, 1.0), (1, 1, 1.4), (1, 2, 2.1969))
    for down, right in ((i, j), (j, i))
    for a in (-1, 1)
    for b in (-1, 1)
}


def spatter(x: Tensor, constants: tuple[float, ...], rng: ImageRng) -> Tensor:
    """Drops of water or splashes of mud on the lens."""
    mean, deviation, sigma, threshold, strength, mud = constants
    layer = mean + deviation * rng.normal(1, *x.shape[-2:])
    layer = filters.gaussian_blur(layer, sigma)
    layer = torch.where(layer < threshold, 0.0, layer)
    if mud:
        mask = filters.gaussian_blur((layer > threshold).float(), strength)
        mask = torch.where(mask < 0.8, 0.0, mask)
        brown = torch.tensor([63.0, 42.0, 20.0], device=x.device)[:, None, None] / 255
        return x * (1 - mask) + brown * mask
    turquoise = torch.tensor([175.0, 238.0, 238.0], device=x.device)[:, None, None] / 255
    return x + strength * drops((layer * 255).floor()) * turquoise


def drops(liquid: Tensor) -> Tensor:
    """Light on drops, at most 1: the liquid (B, 1, H, W), in bytes, times its relief."""
    lit = liquid * _relief(_distance(_rims(liquid)))
    return lit / lit.amax((1, 2, 3), keepdim=True).clamp(min=1e-9)


def _rims(liquid: Tensor) -> Tensor:
    """Canny's edges: slopes steeper than those before and behind, of 150 or joined to such.

    Those of 50 are looked for up to four pixels away.
    """
    down, right = (_filtered(liquid, k, "replicate") for k in _SOBEL)
    slope = down.abs() + right.abs()
    flat = math.tan(math.pi / 8)
    aslant = torch.where(down * right < 0, _crest(slope, 1, -1), _crest(slope, 1, 1))
    crest = torch.where(right.abs() < flat * down.abs(), _crest(slope, 1, 0), aslant)
    crest = torch.where(down.abs() < flat * right.abs(), _crest(slope, 0, 1), crest)
    edge, joined = crest & (slope > 150), crest & (slope > 50)
    for _ in range(4):
        near = edge | _moved(edge, 0, 1) | _moved(edge, 0, -1)
        edge = joined & (near | _moved(near, 1, 0) | _moved(near, -1, 0))
    return edge


def _crest(slope: Tensor, down: int, right: int) -> Tensor:
    """Where it is steeper than on either side; of two equal ones on a row or column, the first."""
    before, behind = _moved(slope, -down, -right), _moved(slope, down, right)
    return (slope > before) & ((slope > behind) if down and right else (slope >= behind))


def _distance(edge: Tensor) -> Tensor:
    """From each pixel to the nearest edge, in steps to neighbours and knight's moves.

    The order of steps does not matter, so all in one direction are taken together, by doubling.
    """
    distance = torch.where(edge, 0.0, float(_FAR))
    for (down, right), cost in _STEPS.items():
        for times in (1, 2, 4, 8, 16):
            further = _moved(distance, times * down, times * right, _FAR) + times * cost
            distance = torch.minimum(distance, further)
    return distance


def _relief(distance: Tensor) -> Tensor:
    """The distance to a rim in whole pixels, equalised and embossed, softened before and after."""
    level = (_filtered(distance, _SUM, "reflect") / 9).flatten(1).long()
    ones = torch.ones(level.shape, device=level.device)
    rank = ones.new_zeros(len(level), _FAR + 1).scatter_add_(1, level, ones).cumsum(1)
    lowest = torch.where(rank > 0, rank, torch.inf).amin(1, keepdim=True)
    most = rank[:, -1:]
    equalised = (255 * (rank - lowest) / (most - lowest).clamp(min=1)).clamp(min=0).round()
    height = equalised.gather(1, level).view_as(distance)
    embossed = _filtered(height, _EMBOSS, "reflect").clamp(0, 255)
    return (_filtered(embossed, _SUM, "reflect") / 9).round()


def _filtered(x: Tensor, kernel: tuple[tuple[float, ...], ...], border: str) -> Tensor:
    """Correlate with a kernel of 3 x 3, a tap at a time: faster here than a convolution."""
    height, width = x.shape[-2:]
    wide, total = filters.pad(x, (1, 1), border), torch.zeros_like(x)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight:
                total.add_(wide[..., i : i + height, j : j + width], alpha=weight)
    return total


def _moved(x: Tensor, down: int, right: int, beyond: float = 0) -> Tensor:
    """The image shifted up and to the left by a number of pixels."""
    if abs(down) >= x.shape[-2] or abs(right) >= x.shape[-1]:
        return torch.full_like(x, beyond)
    return F.pad(x, (-right, right, -down, down), value=beyond)
