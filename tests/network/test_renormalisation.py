"""What learns with blended statistics has the gradient of batch renormalisation."""

import pytest
import torch
from torch import nn

from fata.network.blend import StreamStatistics
from precision import DOUBLE

MAPS, VECTORS = (6, 3, 4, 4), (6, 3)


def layer_of(shape, affine=True):
    layer = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3, affine=affine)
    layer.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
    layer.running_var.copy_(torch.tensor([2.0, 0.3, 1.0]))
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return layer.double().eval()


def gradients(found, layer, x):
    """Of the input and the parameters, of some function that every value has a part in."""
    weights = torch.linspace(-1, 2, found.numel(), dtype=torch.double).view_as(found)
    return torch.autograd.grad((found.sin() * weights).sum(), [x, *layer.parameters()])


def renormalised(layer, x, rows=slice(None)):
    """As the paper has it, with constant r and d, by the statistics of some rows."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    var, mean = torch.var_mean(x[rows], axes, correction=0)
    s, sigma = (var + layer.eps).sqrt(), (layer.running_var + layer.eps).sqrt()
    r, d = (s / sigma).detach(), ((mean - layer.running_mean) / sigma).detach()
    y = (x - mean.view(shape)) / s.view(shape) * r.view(shape) + d.view(shape)
    if layer.weight is None:
        return y
    return y * layer.weight.view(shape) + layer.bias.view(shape)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [MAPS, VECTORS])
def test_the_gradient_is_through_the_batch_and_the_output_is_not(shape, affine):
    layer, x = layer_of(shape, affine), torch.randn(shape).double().requires_grad_()
    plain, expected = layer(x), gradients(renormalised(layer, x), layer, x)
    statistics = StreamStatistics(layer)
    found = layer(x)
    torch.testing.assert_close(found, plain, **DOUBLE)
    for one, other in zip(gradients(found, layer, x), expected, strict=True):
        torch.testing.assert_close(one, other, **DOUBLE)
    statistics.remove()
    assert torch.equal(layer(x), plain)


def test_rows_that_pad_a_batch_have_no_part():
    layer, x = layer_of(MAPS), torch.randn(MAPS).double().requires_grad_()
    real = torch.tensor([True] * 4 + [False] * 2)
    expected = gradients(renormalised(layer, x, real)[real], layer, x)
    statistics = StreamStatistics(layer)
    with statistics.of(real):
        found = gradients(layer(x)[real], layer, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **DOUBLE)


def test_no_shift_or_scale_of_a_channel_is_learned():
    layer, x = layer_of(MAPS), torch.randn(MAPS).double().requires_grad_()
    layer.eps = 1e-12
    StreamStatistics(layer)
    gradient = gradients(layer(x), layer, x)[0]
    zero = torch.zeros(3).double()
    torch.testing.assert_close(gradient.sum((0, 2, 3)), zero, **DOUBLE)
    torch.testing.assert_close((gradient * x.detach()).sum((0, 2, 3)), zero, **DOUBLE)


def test_one_value_has_no_statistics_to_go_through():
    layer, x = layer_of(VECTORS), torch.randn(1, 3).double().requires_grad_()
    expected = gradients(layer(x), layer, x)
    StreamStatistics(layer)
    for one, other in zip(gradients(layer(x), layer, x), expected, strict=True):
        torch.testing.assert_close(one, other, **DOUBLE)


def test_a_weight_that_another_module_computes_still_counts():
    layer, x = layer_of(MAPS), torch.randn(MAPS).double().requires_grad_()
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    plain = layer(x)
    StreamStatistics(layer)
    torch.testing.assert_close(layer(x), plain, **DOUBLE)
