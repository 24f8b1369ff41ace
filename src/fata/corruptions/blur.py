"""Defocus, glass, motion, zoom and Gaussian blur."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from fata.corruptions import filters
from fata.corruptions.rng import ImageRng


def gaussian_blur(x: Tensor, sigma: float, rng: ImageRng) -> Tensor:
    """Out of focus, softly."""
    return filters.gaussian_blur(x, sigma)


def defocus_blur(x: Tensor, constants: tuple[int, float], rng: ImageRng) -> Tensor:
    """Out of focus: every point becomes a disk."""
    return filters.convolve(x, _disk(*constants).to(x.device), "reflect")


@cache
def _disk(radius: int, softness: float) -> Tensor:
    """A disk that sums to one, its edge blurred."""
    reach = max(8, radius)
    place = torch.arange(-reach, reach + 1)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).float()
    disk = disk / disk.sum()
    half = 1 if radius <= 8 else 2
    bell = torch.exp(-0.5 * (torch.arange(-half, half + 1) / softness) ** 2)
    bell = bell / bell.sum()
    kernel = (bell[:, None] * bell)[None, None]
    soft = torch.nn.functional.conv2d(
        filters.pad(disk[None, None], (half, half), "reflect"), kernel
    )
    return soft[0, 0]


def motion_blur(x: Tensor, constants: tuple[int, float], rng: ImageRng) -> Tensor:
    """The camera moved, at an angle of up to 45 degrees."""
    radius, sigma = constants
    return filters.motion_blur(x, radius, sigma, rng.uniform(-45, 45))


def zoom_blur(x: Tensor, constants: tuple[float, float], rng: ImageRng) -> Tensor:
    """The camera came nearer: the mean of the image and its enlargements."""
    end, step = constants
    factors = [1 + step * i for i in range(math.ceil((end - 1) / step))]
    total = x.clone()
    for factor in factors:
        total += filters.zoomed(x, factor)
    return total / (len(factors) + 1)


def glass_blur(x: Tensor, constants: tuple[float, int, int], rng: ImageRng) -> Tensor:
    """Seen through ribbed glass: pixels take the values of near ones, between two soft blurs."""
    sigma, reach, rounds = constants
    x = (filters.gaussian_blur(x, sigma) * 255).floor() / 255
    return filters.gaussian_blur(_scattered(x, reach, rounds, rng), sigma)


def _scattered(x: Tensor, reach: int, rounds: int, rng: ImageRng) -> Tensor:
    """Give each pixel the value of one up to `reach` away, in a scan from the last to the first.

    Values travel: each pixel sees what those before it took. (The published code means to swap the
    two, but its swap of array views copies one way only, and so are the released files.) Pixels 2 x
    reach columns apart on neighbouring rows do not see each other, so that all on one slanted line
    are done at once, with the result of one after the other.
    """
    rows, channels, height, width = x.shape
    place, counts = _slanted(height, width, reach, x.device)
    origin = torch.arange(height * width, device=x.device).repeat(rows, 1)
    for _ in range(rounds):
        down, right = rng.integer(-reach, reach, 2, len(place)).unbind(1)
        taken = place + down * width + right
        for here, there in zip(
            torch.split(place, counts), torch.split(taken, counts, 1), strict=True
        ):
            origin.index_copy_(1, here, origin.gather(1, there))
    return x.flatten(2).gather(2, origin[:, None].expand(-1, channels, -1)).view_as(x)


@cache
def _slanted(height: int, width: int, reach: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Flat places in the order of slanted lines, and the number of places on each line."""
    h = torch.arange(height - reach, reach, -1)
    w = torch.arange(width - reach, reach, -1)
    time = (2 * reach * torch.arange(len(h))[:, None] + torch.arange(len(w))).flatten()
    place = (h[:, None] * width + w).flatten()[time.argsort(stable=True)]
    return place.to(device), [n for n in time.bincount().tolist() if n]
