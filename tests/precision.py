"""Bounds that follow from the precision, and so hold on every processor.

Two ways to compute the same differ by rounding. How much depends on the processor, on the threads
and on the kernels that PyTorch picks. So no test compares them by a tolerance that was found by
trying:

- In float64 each operation rounds by at most 2^-53. `DOUBLE` asks for half of these 53 bits: a
  network may amplify rounding a hundred million times, and a wrong row, weight or sign still shows.
- bfloat16 is compared with `in_bfloat16`, the same network that rounds as bfloat16 does and
  computes in float64 in between. Both are as far from the exact network, but for a small factor,
  `FACTOR`.
"""

import copy

import torch
from torch import nn

DOUBLE = {"rtol": 2**-26, "atol": 2**-26}
FACTOR = 3  # of root mean squares over hundreds of values, each from hundreds of roundings


class _Round(torch.autograd.Function):
    """Rounds to bfloat16 in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


def in_bfloat16(model):
    """A copy in float64 that rounds images, weights and what modules give; not the last layer's."""
    model = copy.deepcopy(model).double()
    *layers, head = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.copy_(parameter.bfloat16())
    for module in model.modules():
        if module not in (model, head):
            module.register_forward_hook(lambda module, given, output: _Round.apply(output))
    model.register_forward_pre_hook(lambda model, given: _Round.apply(given[0]))
    return model


def rms(tensors):
    """The root mean square over all values."""
    return torch.cat([tensor.double().flatten().cpu() for tensor in tensors]).square().mean().sqrt()


def assert_rounded_alike(found, rounded, exact):
    """What was computed in bfloat16 is as exact as a network that rounds to it."""
    errors = (
        [a.cpu() - b.cpu() for a, b in zip(one, exact, strict=True)] for one in (found, rounded)
    )
    own, allowed = map(rms, errors)
    assert own <= FACTOR * allowed, (
        f"{own:.2e} from the exact values; bfloat16 allows {allowed:.2e}"
    )
