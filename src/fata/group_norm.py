"""GroupNorm for compiled programs: sums over each channel, then over the channels of a group.

Channels-last, a group's values are a few neighbours here and there, which a sum over the group
reads in tiny pieces. A channel at a time, neighbouring threads read neighbouring values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised values, and each group's mean and 1 / deviation."""
    wide, size = x.float(), channels // groups * places
    first, second = (_by_group(s, groups).sum(2) / size for s in _sums(wide, wide.square()))
    rstd = torch.rsqrt((second - first.square()).clamp(min=0) + eps)
    scale = _by_channel(rstd, channels)
    if weight is not None:
        scale = scale * weight
    shift = -_by_channel(first, channels) * scale
    if bias is not None:
        shift = shift + bias
    return (wide * _over(scale, x) + _over(shift, x)).to(x.dtype), first, rstd


def backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    rows: int,
    channels: int,
    places: int,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The way back to the input, the weight and the bias, where it is wanted."""
    g, wide, size = gradient.float(), x.float(), channels // groups * places
    with_x, alone = _sums(g * wide, g)
    m, r = (_by_channel(of, channels) for of in (mean, rstd))
    into_weight = ((with_x - alone * m) * r).sum(0) if wanted[1] else None
    into_bias = alone.sum(0) if wanted[2] else None
    if not wanted[0]:
        return None, into_weight, into_bias
    scale = r if weight is None else r * weight
    a, b = (_by_group(s if weight is None else s * weight, groups).sum(2) for s in (with_x, alone))
    slope = (b * mean - a) * rstd**3 / size
    level = -slope * mean - b * rstd / size
    into_x = g * _over(scale, x)
    into_x = into_x + wide * _over(_by_channel(slope, channels), x)
    into_x = into_x + _over(_by_channel(level, channels), x)
    return into_x.to(x.dtype), into_weight, into_bias


def _sums(*values: Tensor) -> list[Tensor]:
    """Over the places of each row's channels."""
    return [v.sum(tuple(range(2, v.ndim))) if v.ndim > 2 else v for v in values]


def _by_group(values: Tensor, groups: int) -> Tensor:
    return values.reshape(len(values), groups, -1)


def _by_channel(values: Tensor, channels: int) -> Tensor:
    rows, groups = values.shape
    return values[:, :, None].expand(rows, groups, channels // groups).flatten(1)


def _over(values: Tensor, x: Tensor) -> Tensor:
    """Of rows and channels, for every place."""
    return values.view(*values.shape, *(1 for _ in x.shape[2:]))


aten = torch.ops.aten
TABLE: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: forward,
    aten.native_group_norm_backward.default: backward,
}
