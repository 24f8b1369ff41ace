"""Update rules against torch's own and by hand, losses and selections by hand."""

import math

import pytest
import torch

from fata.engine.updates import ascend, sgd
from fata.methods.losses import entropy, marginal_entropy, soft_cross_entropy, weighted_mean
from fata.methods.selection import Selection, confidence, distinct, reliable, shuffle_patches


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs(nesterov):
    generator = torch.Generator().manual_seed(0)
    theta, velocity = torch.randn(5, generator=generator), torch.zeros(5)
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        parameter.grad = torch.randn(5, generator=generator)
        theta, velocity = sgd(theta, velocity, parameter.grad, 0.1, nesterov)
        optimizer.step()
        torch.testing.assert_close(theta, parameter.detach())


def test_sam_climbs_rho_along_the_gradient():
    """f = (x^2 + 4 y^2) / 2 at (3, 1): gradient (3, 4), a climb of 0.5 is (0.3, 0.4)."""
    there = ascend(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 4.0]), 0.5)
    assert there.tolist() == pytest.approx([3.3, 1.4])
    assert ascend(torch.ones(2), torch.zeros(2), 0.5).tolist() == [1.0, 1.0]


def test_entropy_and_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(2), 0.0, -math.inf, -math.inf]])
    assert entropy(logits[:1]).item() == pytest.approx(math.log(4))
    expected = -2 / 3 * math.log(2 / 3) - 1 / 3 * math.log(1 / 3)
    masked = logits[1:].clone().requires_grad_()
    assert entropy(masked).item() == pytest.approx(expected)
    assert torch.autograd.grad(entropy(masked).sum(), masked)[0].isfinite().all()
    assert soft_cross_entropy(logits[:1], logits[:1]).item() == pytest.approx(math.log(4))


def test_marginal_entropy_is_that_of_the_mean_prediction():
    sure = torch.tensor([[20.0, 0.0], [0.0, 20.0]])
    assert marginal_entropy(sure).item() == pytest.approx(math.log(2), rel=1e-5)
    assert marginal_entropy(sure[:1]).item() == pytest.approx(entropy(sure[:1]).item(), abs=1e-6)


def test_weighted_mean_divides_by_the_selected_rows():
    values = torch.tensor([1.0, 2.0, math.nan, 4.0], requires_grad=True)
    rows = torch.tensor([True, False, False, True])
    mean = weighted_mean(values, Selection(rows, torch.tensor([3.0, 1.0, 1.0, 0.5])))
    assert mean.item() == (3 + 2) / 2
    (gradient,) = torch.autograd.grad(mean, values)
    assert gradient.tolist() == [1.5, 0.0, 0.0, 0.25]  # the row that is not a number, too
    assert weighted_mean(values, Selection.none(values)).item() == 0


def test_filters_are_strict_and_in_units_of_ln_c():
    at = torch.tensor([0.4 * math.log(10)])
    assert not reliable(at, 0.4, 10)
    assert reliable(at - 1e-4, 0.4, 10)
    assert reliable(at, 0.4, 11)
    assert confidence(at, 0.4, 10).item() == pytest.approx(1.0)


def test_distinct_is_about_the_angle():
    mean = torch.tensor([0.5, 0.5])
    probs = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert distinct(probs, mean, 0.8).tolist() == [False, True]


def test_shuffle_patches_puts_the_named_patch_in_place():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    order = torch.tensor([[3, 1, 2, 0]])
    shuffled = shuffle_patches(image, order, 2)[0, 0]
    assert shuffled.tolist() == [[10, 11, 2, 3], [14, 15, 6, 7], [8, 9, 0, 1], [12, 13, 4, 5]]


def test_shuffle_patches_keeps_the_size_of_sides_that_do_not_divide():
    images = torch.rand(2, 3, 18, 21, generator=torch.Generator().manual_seed(0))
    same = torch.arange(16).expand(2, 16)
    assert shuffle_patches(images, same, 4).shape == images.shape


def test_selection_at_and_among():
    selection = Selection(torch.tensor([True, True, False]), torch.tensor([1.0, 2.0, 3.0]))
    picked = selection.at(torch.tensor([2, 1]))
    assert (picked.rows.tolist(), picked.weights.tolist()) == ([False, True], [3.0, 2.0])
    assert selection.among(torch.tensor([False, True, True])).rows.tolist() == [False, True, False]
