"""Batch renormalisation (Ioffe, 2017), for what learns with blended BatchNorm statistics.

    y  =  (h r + d) gamma + beta        h = (x - m) / s,   r = s / sigma,   d = (m - mu) / sigma

mu and sigma are the blend's, m and s the batch's. r and d are constants, so y is what mu and sigma
give, and the gradient is the one through the batch's statistics:

    g  <-  g - mean(g) - h mean(g h)

If mu and sigma were constants, layers would learn to shift and scale the channels of the next one.
On long streams accuracy then falls below that without learning: docs/lab/batchnorm.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fata._torch import BatchNorm
from fata.network.norms import override_affine
from fata.network.shrinkage import Source


def batch_moments(images: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    """Of the batch, by a, s, s^2 and a^2 of each image in units of the source's deviation."""
    shift, _, square, _ = images.mean(0)
    var = torch.addcmul(square, shift, shift, value=-1).clamp(min=0) * source.square
    return torch.addcmul(source.mean, shift, source.deviation), var


def renormalise(
    layer: BatchNorm, mean: Tensor, var: Tensor, batch_mean: Tensor, batch_var: Tensor
) -> None:
    """Have a layer that normalises with the batch give what this mean and variance would."""
    scale, spread = (var + layer.eps).rsqrt(), (batch_var + layer.eps).sqrt()
    gain, far = scale if layer.weight is None else layer.weight * scale, batch_mean - mean
    shift = far * gain if layer.bias is None else torch.addcmul(layer.bias, far, gain)
    override_affine(layer, spread * gain, shift)
