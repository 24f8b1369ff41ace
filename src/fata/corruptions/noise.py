"""Gaussian, shot, impulse and speckle noise."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fata.corruptions.rng import ImageRng

_BITS = 14


def gaussian_noise(x: Tensor, deviation: float, rng: ImageRng) -> Tensor:
    """Add noise of one deviation to every value."""
    return rng.normal(*x.shape[1:]).mul_(deviation).add_(x)


def speckle_noise(x: Tensor, deviation: float, rng: ImageRng) -> Tensor:
    """Noise in proportion to the value."""
    return x + x * rng.normal(*x.shape[1:]).mul_(deviation)


def impulse_noise(x: Tensor, amount: float, rng: ImageRng) -> Tensor:
    """Set a share of all values to black or white."""
    u = rng.uniform(0, 1, *x.shape[1:])
    x = torch.where(u < amount / 2, 0.0, x)
    return torch.where((u >= amount / 2) & (u < amount), 1.0, x)


def shot_noise(x: Tensor, photons: float, rng: ImageRng) -> Tensor:
    """Poisson noise of a number of photons at full brightness, for 256 levels of an image."""
    table = _poisson_quantiles(photons).to(x.device)
    level = (x * 255).round_().long()
    place = rng.uniform(0, 1 << _BITS, *x.shape[1:]).long()
    return table[level.mul_(1 << _BITS).add_(place)] / photons


@cache
def _poisson_quantiles(photons: float) -> Tensor:
    """Counts by level and by probability in steps of 2^-14, flat."""
    rate = torch.linspace(0, photons, 256, dtype=torch.float64)[:, None]
    counts = torch.arange(int(photons + 10 * photons**0.5 + 20), dtype=torch.float64)
    log_pmf = torch.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)
    cdf = log_pmf.exp().cumsum(1)
    middle = (torch.arange(1 << _BITS, dtype=torch.float64) + 0.5) / (1 << _BITS)
    return torch.searchsorted(cdf, middle.expand(256, -1).contiguous()).float().flatten()
