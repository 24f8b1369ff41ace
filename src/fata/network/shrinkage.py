"""BatchNorm's statistics between the source's and the stream's: the equations.

For each layer, over the n latest images, in units of the source's standard deviation:

    a, s  =  mean and root mean square of a channel over the pixels of an image
    A, S, Q  =  mean of a, of s and of s^2, over the images
    D     =  sum over channels of  A^2 + (sqrt(Q) - 1)^2          the distance from the source
    V     =  sum over channels of the variances of a and s over the images
    E     =  (P - 1/C) / (1 - P)      P: that two images have one predicted class, without bias
    w     =  1 - (1 / (n - 1) + k E) V / D      in [0, 1]

    mean  =  w A        variance  =  1 + w (Q - 1 - w A^2)

Of D, V / (n - 1) is expected of n images that have not shifted, and E V of classes that are out of
balance, however many images there are, if classes are what V comes from; k makes up for the layers
where it is more. The rest is shift, and w its share: the positive part of James and Stein's
shrinkage. A stream that has not shifted keeps the source's statistics, whatever its batches and
classes are.

The past counts as far as a batch of B images agrees with it:

    D'    =  sum over channels of  (A_B - A)^2 + (S_B - S)^2
    n    <-  B + n min(1, k (1 / (B - 1) + 1 / n + E') V / D')      E': E within batches

so that after a change of domain the stream's statistics begin again, and classes that take turns
change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

VECTORS = ("shift", "rms", "square")  # A, S and Q: a number for each channel
SCALARS = ("variance", "images", "weight")  # V, n and w: one for each layer

Memory = dict[str, Tensor]


class Source(NamedTuple):
    """What a layer, or all, had before the first batch; kernels are fewer if it is all at hand."""

    mean: Tensor
    var: Tensor
    deviation: Tensor
    square: Tensor  # of the deviation
    rest: Tensor  # var - square
    scale: Tensor  # 1 / deviation
    offset: Tensor  # of a channel, in units of the deviation: x scale + offset is its shift
    level: Tensor  # -offset^2

    @classmethod
    def of(cls, mean: Tensor, var: Tensor, eps: Tensor) -> Source:
        """From BatchNorm's running statistics."""
        deviation = (var + eps).sqrt()
        scale, square = 1 / deviation, deviation * deviation
        offset = -mean * scale
        return cls(mean, var, deviation, square, var - square, scale, offset, -offset * offset)


class Known(NamedTuple):
    """The memory of one layer, or of all."""

    vectors: Tensor  # VECTORS
    variance: Tensor
    images: Tensor
    weight: Tensor


class Past(NamedTuple):
    """What of that may count, in each layer."""

    images: Tensor
    part: Tensor  # of the batch, if all of it counts
    chance: Tensor  # k (1 / (B - 1) + 1 / n + E')
    uneven: Tensor  # k E
    rows: Tensor  # B


class Channels:
    """Channels of one layer."""

    def sums(self, values: Tensor) -> Tensor:
        """Sums over a layer's values, some for each channel."""
        return values.sum().reshape(1)

    def spread(self, values: Tensor) -> Tensor:
        """For each channel its layer's value."""
        return values


@dataclass
class AllChannels(Channels):
    """Channels of all layers, one after the other; by kernels that a first pass loads anyhow."""

    sizes: list[int]

    def sums(self, values: Tensor) -> Tensor:
        """Sums over a layer's values, some for each channel."""
        return torch.stack([own.sum() for own in torch.split(values, self.sizes, 1)])

    def spread(self, values: Tensor) -> Tensor:
        """For each channel its layer's value."""
        layers = zip(torch.split(values, 1), self.sizes, strict=True)
        return torch.cat([own.expand(size) for own, size in layers])


def blended(source: Source, shift: Tensor, square: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance between the source's (weight 0) and the stream's (weight 1)."""
    moved = weight * shift
    there = torch.addcmul(square, moved, shift, value=-1)
    var = source.var.lerp(torch.addcmul(source.rest, source.square, there), weight)
    return torch.addcmul(source.mean, moved, source.deviation), var.clamp(min=0)


def known(memory: Memory) -> Known:
    """Of all layers."""
    return Known(torch.stack([memory[n] for n in VECTORS]), *(memory[n] for n in SCALARS))


def joined(here: Tensor, old: Known, past: Past, channels: Channels) -> Known:
    """A memory with a batch, of which A, S, Q and the mean of a^2 are `here`."""
    means, squares = here[:2], here[2:]
    within = channels.sums(torch.addcmul(squares, means, means, value=-1))
    finite = within < math.inf  # NaN is not
    new = torch.where(channels.spread(finite), here[:3], old.vectors)
    within = torch.where(finite, within, old.variance).clamp(min=0)
    change = (new - old.vectors)[:2]
    apart = channels.sums(change * change)  # D'

    likely = past.chance * torch.lerp(old.variance, within, past.part)
    images = torch.addcmul(past.rows, past.images, (likely / apart).nan_to_num(1).clamp(max=1))
    part = past.rows / images
    vectors = torch.lerp(old.vectors, new, channels.spread(part))
    spread = torch.addcmul(within + apart, part, apart, value=-1)
    variance = torch.lerp(old.variance, spread, part)

    shift, _, square = vectors
    away = torch.stack((shift, square.sqrt() - 1))
    distance = channels.sums(away * away)
    doubt = past.uneven + (images - 1).reciprocal()
    weight = torch.addcmul(distance, doubt, variance, value=-1) / distance
    return Known(vectors, variance, images, weight.clamp(0, 1).nan_to_num(0))


def moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Mean and length of each channel over the pixels of an image, in this precision; how many."""
    if x.ndim == 2:
        return x.to(dtype), x.to(dtype), 1
    pixels = tuple(range(2, x.ndim))
    length = torch.linalg.vector_norm(x, dim=pixels, dtype=dtype)
    return x.mean(pixels, dtype=dtype), length, math.prod(x.shape[2:])


def same(shares: Tensor, rows: Tensor) -> Tensor:
    """P, by the shares of the predicted classes of some images."""
    return (rows * (shares * shares).sum() - 1) / (rows - 1).clamp(min=1)


def odds(same: Tensor, classes: Tensor) -> Tensor:
    """E."""
    return (same - 1 / classes.shape[-1]).clamp(min=0) / (1 - same).clamp(min=1e-6)
