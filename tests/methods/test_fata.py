"""FATA's augmentation against the paper's equation, and a hand-computed case for each loss."""

import math

import numpy as np
import pytest
import torch

import fata
from fata.methods.base import Batch
from fata.methods.fata import channel_mean
from fata.network.tap import channel_axis
from fata.testing.cases import Case, network
from precision import DOUBLE


def paper(z, alpha, beta, average, ema, spread):
    """z' and the moving average, as the paper writes them, in NumPy; z is (B, D, H, W)."""
    mu = z.mean((2, 3))
    sigma = mu.std(0, ddof=1) if spread == "std" else mu.var(0, ddof=1)
    delta = sigma / sigma.max()
    average = delta if average is None or ema is None else ema * average + (1 - ema) * delta
    wide = (..., None, None)
    return alpha[wide] * z + (average * (beta - alpha) * mu)[wide], average


def perturbed(plugin, z, axis, memory, generator=None):
    """The perturbation of a batch by the plug-in's own noise."""
    noise = plugin.draw(len(z), z.shape[axis], generator, z.device)
    return plugin.perturb(z, axis, memory, noise)


@pytest.mark.parametrize("spread", ["std", "variance"])
@pytest.mark.parametrize("ema", [0.95, 0.5, None])
def test_augmentation_is_the_papers_equation(spread, ema):
    rng = np.random.default_rng(0)
    memory, average = {}, None
    for _ in range(4):
        z = rng.normal(size=(5, 6, 3, 2)) * np.arange(1, 7)[None, :, None, None]
        alpha, beta = rng.normal(1, 1, size=(2, 5, 6))
        expected, average = paper(z, alpha, beta, average, ema, spread)
        plugin = fata.Fata(spread=spread, ema=ema)
        noise = [torch.from_numpy(part) for part in (alpha, beta)]
        perturb = plugin.perturb(torch.from_numpy(z), 1, memory, noise)
        memory = plugin.observe(perturb, memory)
        np.testing.assert_allclose(perturb(torch.from_numpy(z)).numpy(), expected, **DOUBLE)
    assert ("delta" in memory) == (ema is not None)


@pytest.mark.parametrize("shape", [(4, 9, 6), (4, 3, 3, 6), (4, 6)])
def test_channels_last_and_tokens_equal_the_map(shape):
    """Tokens and channels-last maps are perturbed like the same numbers in a (B, D, H, W) map."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(shape, generator=generator).double()
    alpha, beta = 1 + torch.randn(2, 4, 6, generator=generator).double()
    plugin = fata.Fata(noise=lambda rows, channels: (alpha, beta))
    last = perturbed(plugin, z, z.ndim - 1, {})(z)
    as_map = z.movedim(-1, 1).reshape(4, 6, -1, 1)
    expected = perturbed(plugin, as_map, 1, {})(as_map).reshape(4, 6, *shape[1:-1])
    torch.testing.assert_close(last, expected.movedim(1, -1), **DOUBLE)


def test_noise_has_the_given_deviation_and_is_drawn_per_row_and_channel():
    z = torch.ones(400, 50, 1, 1)
    generator = torch.Generator().manual_seed(0)
    perturb = perturbed(fata.Fata(sigma=0.3), z, 1, {}, generator)
    count = 400 * 50
    for noise in (perturb.alpha, perturb.beta):
        assert noise.shape == (400, 50)
        # Within six standard errors of a mean, of a standard deviation and of a correlation.
        assert abs(noise.mean() - 1) < 6 * 0.3 / count**0.5
        assert abs(noise.std() - 0.3) < 6 * 0.3 / (2 * count) ** 0.5
    correlation = torch.corrcoef(torch.stack((perturb.alpha.flatten(), perturb.beta.flatten())))
    assert abs(correlation[0, 1]) < 6 / count**0.5


def test_no_noise_is_no_perturbation():
    z = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    perturb = perturbed(fata.Fata(sigma=0.0), z, 1, {}, torch.Generator().manual_seed(0))
    torch.testing.assert_close(perturb(z), z, **DOUBLE)


def test_one_row_has_delta_one_half_and_leaves_the_average_alone():
    plugin, memory = fata.Fata(), {"delta": torch.tensor([0.1, 1.0])}
    perturb = perturbed(plugin, torch.randn(1, 2, 3, 3), 1, memory, torch.Generator())
    assert perturb.delta.tolist() == [0.5, 0.5]
    assert plugin.observe(perturb, memory) is memory


def test_gradient_flows_through_z_and_mu_but_not_through_delta():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.double)
    perturb = perturbed(fata.Fata(), z, 1, {}, generator)
    assert torch.autograd.gradcheck(perturb, z.clone().requires_grad_())  # delta held fixed
    assert not perturbed(fata.Fata(), z.requires_grad_(), 1, {}, generator).delta.requires_grad


def test_noise_is_asked_once_a_batch_for_every_row():
    asked = []

    def noise(rows, channels):
        asked.append((rows, channels))
        return torch.ones(rows, channels), torch.ones(rows, channels)

    adapter = fata.adapt(network("resnet_gn"), "sar+fata", noise=noise)
    for images in Case(None, None, "resnet_gn", 16).stream():
        adapter(images)
    assert adapter.counts["selected"]["fata"] not in (0, 48)  # some rows, and not all
    assert asked == [(16, 24)] * 3


def test_selection_and_weights():
    """H < 0.5 ln C, weight exp(0.4 ln C - H): the uniform row out, the sharp one in."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 5.0]])
    selection = fata.Fata().select(Batch(None, logits, None, 0))
    assert selection.rows.tolist() == [False, True]
    p = 1 / (1 + math.exp(-5))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert selection.weights[1].item() == pytest.approx(math.exp(0.4 * math.log(2) - entropy))


def test_each_loss_by_hand():
    """Two classes; the clean row says (3/4, 1/4), the augmented one (1/2, 1/2)."""
    clean, augmented = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, 0.0]])
    batch = Batch(None, clean, None, 0)
    expected = {
        "fata": math.log(2),  # -log p'(argmax p)
        "simple_ce": math.log(2),  # -sum p log p', p' uniform
        "simple_aug": math.log(2),  # entropy of p'
        "mse": math.log(3) ** 2 / 2,  # of the logits
    }
    for loss, value in expected.items():
        found = fata.Fata(loss=loss).row_loss(augmented, clean, batch)
        assert found.item() == pytest.approx(value), loss


def test_the_losses_differ_where_the_augmented_row_is_sure():
    clean, augmented = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, math.log(4)]])
    batch = Batch(None, clean, None, 0)
    found = {
        name: fata.Fata(loss=name).row_loss(augmented, clean, batch).item()
        for name in ("fata", "simple_ce", "simple_aug")
    }
    assert found["fata"] == pytest.approx(math.log(5))
    assert found["simple_ce"] == pytest.approx(0.75 * math.log(5) + 0.25 * math.log(5 / 4))
    assert found["simple_aug"] == pytest.approx(0.2 * math.log(5) + 0.8 * math.log(5 / 4))


def test_only_mse_learns_through_the_clean_branch():
    for loss, reaches in (
        ("fata", False),
        ("simple_ce", False),
        ("simple_aug", False),
        ("mse", True),
    ):
        clean = torch.zeros(2, 3, requires_grad=True)
        augmented = torch.ones(2, 3, requires_grad=True)
        rows = fata.Fata(loss=loss).row_loss(augmented, clean, Batch(None, clean.detach(), None, 0))
        (gradient,) = torch.autograd.grad(rows.sum(), clean, allow_unused=True)
        assert (gradient is not None) == reaches, loss


def test_channel_axis():
    linear, conv = torch.nn.Linear(4, 6), torch.nn.Conv2d(3, 6, 1)
    assert channel_axis(torch.zeros(2, 6, 5, 5), conv) == 1
    assert channel_axis(torch.zeros(2, 5, 5, 6), linear) == 3
    assert channel_axis(torch.zeros(2, 6, 6, 6), linear) == 1  # both fit: a map
    assert channel_axis(torch.zeros(2, 6, 9), linear) == 1
    assert channel_axis(torch.zeros(2, 9, 6), linear) == 2
    assert channel_axis(torch.zeros(2, 7, 6), torch.nn.ReLU()) == 2
    assert channel_axis(torch.zeros(2, 7, 6, 5), torch.nn.ReLU()) == 1
    assert channel_axis(torch.zeros(2, 6), linear) == 1
    heads = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 5))  # 5: not a width
    assert channel_axis(torch.zeros(2, 5, 5, 6), heads) == 3


def test_channel_mean_of_half_precision_is_taken_in_full():
    z = torch.full((1, 1, 64, 64), 0.1, dtype=torch.float16)
    assert channel_mean(z, 1).dtype == torch.float32


@pytest.mark.parametrize(
    "position", ["conv1", "layer1", "layer2", "layer2.0.norm1", "layer4", "fc"]
)
def test_any_position(position):
    adapter = fata.adapt(network("resnet_gn"), "eata+fata", layer=position, fisher_alpha=0)
    before = adapter.model.layer1[0].norm1.weight.clone()
    for images in Case(None, None, "resnet_gn", 16).stream():
        adapter(images)
    assert adapter.layer == position
    assert adapter.counts["rows_tail"] > 0
    assert not torch.equal(before, adapter.model.layer1[0].norm1.weight)


@pytest.mark.parametrize("net", ["resnet_gn", "vit_ln"])
def test_joint_equals_separate_without_batchnorm(net):
    ends = []
    for bn_stats in ("joint", "separate"):
        adapter = fata.adapt(network(net), "sar+fata", bn_stats=bn_stats)
        ends.append(torch.cat([adapter(x) for x in Case(None, None, net, 16).stream()]))
    assert torch.equal(*ends)


def test_joint_changes_the_clean_rows_of_batchnorm_and_separate_does_not():
    images = Case(None, None, "resnet_bn", 16).stream()[0]
    plain = fata.adapt(network("resnet_bn"), "norm")(images)
    free = {"spec": "tent+fata", "guard": None}
    separate = fata.adapt(network("resnet_bn"), **free)(images)
    joint = fata.adapt(network("resnet_bn"), **free, bn_stats="joint")(images)
    assert torch.equal(separate, plain)
    assert not torch.allclose(joint, plain)
