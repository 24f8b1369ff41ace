"""The entropy of opinion: range, gradient, and logits at which the formula is not finite."""

import math

import pytest
import torch

import fata
from fata.methods.come import opinion_entropy


def test_its_gradient_has_no_part_along_the_logits():
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(opinion_entropy(logits).sum(), logits)
    along = (gradient * logits).sum(1) / logits.norm(dim=1)
    assert gradient.norm(dim=1).min() > 0.01
    torch.testing.assert_close(along, torch.zeros_like(along), atol=1e-12, rtol=0)


def test_doubt_and_beliefs_in_equal_parts_are_the_most_uncertain():
    even = opinion_entropy(torch.zeros(1, 9))
    nothing = opinion_entropy(torch.full((1, 9), -20.0))  # no evidence: doubt alone
    sure = opinion_entropy(torch.tensor([[20.0] + [-20.0] * 8]))
    assert nothing < 1e-4
    assert sure < 1e-4
    assert even == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(18), abs=1e-4)


@pytest.mark.parametrize("logits", [[300.0, 0, 0], [0.0, 0, 0], [3.0, -torch.inf, 1]])
def test_value_and_gradient_are_finite(logits):
    row = torch.tensor([logits], requires_grad=True)
    value = opinion_entropy(row)
    (gradient,) = torch.autograd.grad(value.sum(), row)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_an_unknown_entropy_is_named():
    with pytest.raises(
        ValueError, match=r"Tent\(entropy='Come'\): choose one of 'softmax', 'come'"
    ):
        fata.adapt(fata.tiny.build("resnet_gn"), "tent", entropy="Come")
