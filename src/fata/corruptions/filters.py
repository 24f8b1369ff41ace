"""What several corruptions are built of: blurs, borders, zooms, motion."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def pad(x: Tensor, border: tuple[int, int], mode: str) -> Tensor:
    """Pad rows and columns: `replicate`, `reflect` (dcb|abcd|cba) or `symmetric` (cba|abc|cba)."""
    if mode == "replicate":
        return F.pad(x, (border[1], border[1], border[0], border[0]), mode="replicate")
    for axis, wide in ((2, border[0]), (3, border[1])):
        size = x.shape[axis]
        place = torch.arange(-wide, size + wide, device=x.device)
        period = 2 * size if mode == "symmetric" else max(2 * size - 2, 1)
        place = place.remainder(period)
        mirrored = period - place - (1 if mode == "symmetric" else 0)
        x = x.index_select(axis, torch.where(place < size, place, mirrored))
    return x


@cache
def _bell(sigma: float, truncate: float) -> Tensor:
    radius = int(truncate * sigma + 0.5)
    place = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (place / sigma) ** 2)
    return (weights / weights.sum()).float()


@cache
def _band(size: int, sigma: float, truncate: float, mode: str) -> Tensor:
    """A Gaussian blur of a line as a (size, size) matrix, its border included."""
    weights = _bell(sigma, truncate)
    radius = len(weights) // 2
    lines = pad(torch.eye(size)[None, None], (radius, 0), mode)[0, 0]  # (size + 2 radius, size)
    return F.conv1d(lines.mT[:, None], weights[None, None])[:, 0].mT.contiguous()


def gaussian_blur(
    x: Tensor,
    sigma: float | tuple[float, float],
    truncate: float = 4.0,
    mode: str = "replicate",
) -> Tensor:
    """Separable Gaussian blur, truncated at a number of standard deviations."""
    sigmas = sigma if isinstance(sigma, tuple) else (sigma, sigma)
    sides = zip(x.shape[-2:], sigmas, strict=True)
    rows, columns = (_band(size, s, truncate, mode).to(x.device) for size, s in sides)
    return rows @ x @ columns.mT


def convolve(x: Tensor, kernel: Tensor, mode: str) -> Tensor:
    """Correlate with one kernel (k, k), or one a row (B, 1, k, k), in the Fourier domain."""
    kernel = kernel if kernel.ndim == 4 else kernel[None, None]
    half = kernel.shape[-1] // 2
    height, width = x.shape[-2:]
    padded = pad(x, (half, half), mode)
    size = [_smooth(side) for side in padded.shape[-2:]]
    spectrum = torch.fft.rfft2(padded, s=size) * torch.fft.rfft2(kernel, s=size).conj()
    blurred: Tensor = torch.fft.irfft2(spectrum, s=size)
    return blurred[..., :height, :width]


@cache
def _smooth(size: int) -> int:
    """The next length whose only factors are 2, 3 and 5: a fast transform."""
    while True:
        rest = size
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def motion_blur(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Smear each image along its own angle (degrees, (B,)), ahead of the object only."""
    width = 2 * radius + 1
    step = torch.arange(width, device=x.device)
    weights = torch.exp(-0.5 * (step / sigma) ** 2)
    weights = weights / weights.sum()
    way = torch.deg2rad(angle)[:, None]
    down = (step * way.sin() - 0.5).ceil().long()  # (B, width): offset of each tap
    right = (step * way.cos() - 0.5).ceil().long()
    side = 2 * width - 1
    kernel = torch.zeros(len(x), side * side, device=x.device)
    inside = (down.abs() < x.shape[-2]) & (right.abs() < x.shape[-1])
    inside = inside.cummin(1).values  # motion that has left the image does not come back
    place = (down + width - 1) * side + right + width - 1
    kernel.scatter_add_(1, place, weights * inside)
    return convolve(x, kernel.view(-1, 1, side, side), "replicate")


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The centre of an image, enlarged by a factor to the size of the image."""
    height, width = (math.ceil(side / factor) for side in x.shape[-2:])
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    centre = x[..., top : top + height, left : left + width]
    size = (round(height * factor), round(width * factor))
    large = F.interpolate(centre, size, mode="bilinear", align_corners=True)
    top, left = (size[0] - x.shape[-2]) // 2, (size[1] - x.shape[-1]) // 2
    return large[..., top : top + x.shape[-2], left : left + x.shape[-1]]
