"""What compiled functions are made of, where torch's own operations are slow channels-last.

GroupNorm: a group's values are a few neighbours here and there, which a sum over the group reads in
tiny pieces. A channel at a time, neighbouring threads read neighbouring values; groups come after.

The backward pass of a 1 x 1 convolution is a product of matrices. As such it is given to the
library for those, whose kernels for recent GPUs are better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fata.network.norms import widened


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised values, and each group's mean and 1 / deviation.

    Squares are of what is left of a channel's values without the first of them: their sum has no
    digits to lose, however far from 0 the values are.
    """
    wide = widened(x)
    first = wide.flatten(2)[:, :, 0] if x.ndim > 2 else wide
    off = wide - _over(first, x)
    one, two = (s / places for s in _sums(off, off.square()))
    means, spreads = (_by_group(s, groups) for s in (first + one, two - one.square()))
    mean = means.mean(2)
    spread = (spreads.clamp(min=0) + (means - mean[:, :, None]).square()).mean(2)
    rstd = torch.rsqrt(spread + eps)
    m, scale = (_by_channel(of, channels) for of in (mean, rstd))
    scale = scale if weight is None else scale * weight
    y = (wide - _over(m, x)) * _over(scale, x)
    y = y if bias is None else y + _over(bias[None], x)
    return y.to(x.dtype), mean, rstd


def group_norm_backward(
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
    """Gradients of the input, the weight and the bias, those that are wanted."""
    size = channels // groups * places
    m, r = (_by_channel(of, channels) for of in (mean, rstd))
    g, off = widened(gradient), widened(x) - _over(m, x)
    with_x, alone = _sums(g * off, g)
    into_weight = (with_x * r).sum(0) if wanted[1] else None
    into_bias = alone.sum(0) if wanted[2] else None
    if not wanted[0]:
        return None, into_weight, into_bias
    w = torch.ones_like(r[0]) if weight is None else weight
    a, b = (_by_group(s * w, groups).sum(2) for s in (with_x, alone))
    slope, level = a * rstd**3 / size, b * rstd / size
    into_x = g * _over(r * w, x)
    into_x = into_x - off * _over(_by_channel(slope, channels), x)
    into_x = into_x - _over(_by_channel(level, channels), x)
    return into_x.to(x.dtype), into_weight, into_bias


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """Gradient of the input of a 1 x 1 convolution; of any other, torch's own."""
    pointwise = {*weight.shape[2:], *stride} == {1} and {*padding} == {0}
    if transposed or groups > 1 or not pointwise or list(wanted) != [True, False, False]:
        return NotImplemented
    rows = gradient.movedim(1, -1)
    into_x = rows.flatten(0, -2) @ weight.flatten(1)
    return into_x.reshape(*rows.shape[:-1], weight.shape[1]).movedim(-1, 1), None, None


def _sums(*values: Tensor) -> list[Tensor]:
    """Over the places of each row's channels."""
    return [v.sum(tuple(range(2, v.ndim))) if v.ndim > 2 else v for v in values]


def _by_group(values: Tensor, groups: int) -> Tensor:
    rows, channels = values.shape
    return values.reshape(rows, groups, channels // groups)


def _by_channel(values: Tensor, channels: int) -> Tensor:
    rows, groups = values.shape
    return values[:, :, None].expand(rows, groups, channels // groups).flatten(1)


def _over(values: Tensor, x: Tensor) -> Tensor:
    """Of rows and channels, for every place."""
    return values.view(*values.shape, *(1 for _ in x.shape[2:]))


aten = torch.ops.aten
TABLE: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.convolution_backward.default: convolution_backward,
}
