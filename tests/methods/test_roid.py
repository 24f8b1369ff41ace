"""ROID: its selection, loss and correction by hand; batches without any spread."""

import math

import pytest
import torch

import fata
from fata.methods.base import Outputs
from fata.methods.class_prior import class_prior
from fata.methods.pixels import Rng
from fata.methods.views import roid_view
from fata.testing.cases import images, network
from precision import DOUBLE


def batch_of(probs):
    return fata.Batch(None, torch.tensor(probs, dtype=torch.float64).log(), None, 0)


def made(net="resnet_gn", spec="roid", **fields):
    fields = {"lr": 1e-2, "guard": None, "augment": lambda x: x.flip(3), **fields}
    return fata.adapt(network(net).double(), spec, **fields)


def test_it_learns_from_diverse_rows():
    probs = [[0.98, 0.01, 0.01], [0.4, 0.3, 0.3], [0.01, 0.01, 0.98]]
    q = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64)
    batch = batch_of(probs)
    selection = fata.Roid(batch_size=4).select(batch, {"class_probs": q})
    cosine = torch.tensor(
        [(batch.probs[i] @ q / batch.probs[i].norm() / q.norm()).item() for i in range(3)]
    )
    d = 1 - cosine
    d = (d - d.min()) / (d.max() - d.min())
    c = -batch.entropy.float()
    c = (c - c.min()) / (c.max() - c.min())
    assert selection.rows.tolist() == (d >= d.mean()).tolist() == [False, False, True]
    expected = 1 / 4 * math.exp(d[2] * c[2] * 3)  # of one row, divided by N
    assert selection.weights[2].item() == pytest.approx(expected, rel=1e-5)


def test_the_mean_prediction_moves_by_all_rows():
    batch, method = batch_of([[0.9, 0.1], [0.5, 0.5]]), fata.Roid()
    memory = method.observe(batch, method.select(batch, {}), {})
    assert memory["class_probs"].tolist() == pytest.approx([0.52, 0.48])
    memory = method.observe(batch, method.select(batch, memory), memory)
    assert memory["class_probs"].tolist() == pytest.approx([0.9 * 0.52 + 0.07, 0.9 * 0.48 + 0.03])


def test_loss_by_hand_with_gradient_to_both_sides():
    draw = torch.Generator().manual_seed(0)
    logits, view = (4 * torch.randn(5, 10, generator=draw).double() for _ in range(2))
    logits.requires_grad_(), view.requires_grad_()
    found = fata.Roid().row_loss(Outputs(logits, views=[view]))
    p, v = logits.softmax(1), view.softmax(1)
    a = torch.where(p > 0.99, 0.99, p)
    expected = -(a * (a / (1 - a) + 1e-5).log()).sum(1)
    expected = expected - ((p * v.log()).sum(1) + (v * p.log()).sum(1)) / 2
    torch.testing.assert_close(found, expected, **DOUBLE)
    gradients = [torch.autograd.grad(x.sum(), [logits, view]) for x in (found, expected)]
    torch.testing.assert_close(*gradients, **DOUBLE)
    assert gradients[0][1].any()


@pytest.mark.parametrize("correction", ["multiply", "additive", None])
def test_predictions_are_corrected_by_the_batchs_classes(correction):
    adapter, plain = made(correction=correction), network("resnet_gn").double().eval()
    batch = images(8).double()
    o = plain(batch).detach()
    pi = o.softmax(1).mean(0)
    s = max(1 / 8, 1 / 10) / pi.max()
    prior = (pi + s) / (1 + s * 10)
    assert prior.sum().item() == pytest.approx(1)
    expected = {"multiply": o * prior, "additive": o + prior.log(), None: o}[correction]
    torch.testing.assert_close(adapter(batch), expected, **DOUBLE)
    with adapter.frozen():  # what is not learned from is not corrected
        found = adapter(batch)
    adapter.unwrap()
    torch.testing.assert_close(found, adapter.model(batch).detach(), **DOUBLE)


def test_many_classes_and_few_rows_give_an_even_prior():
    few = fata.Batch(None, torch.eye(100)[:1] * 50, None, 0)
    many = fata.Batch(None, torch.eye(100)[:1].expand(5000, 100) * 50, None, 0)
    assert class_prior(few).max() < 0.02
    assert class_prior(many).max() > 0.45


def test_parameters_return_to_the_source_by_a_share():
    moved = {}
    for share in (0.0, 0.25, 1.0):
        adapter = made(source_share=share)
        adapter(images(8).double())
        moved[share] = adapter._live().state.theta - adapter._live().source
    torch.testing.assert_close(moved[0.25], 0.75 * moved[0.0], **DOUBLE)
    assert moved[0.0].any()
    assert not moved[1.0].any()


@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_views_of_the_kept_rows_alone_count(net):
    """Whatever the views of the other rows are, the step is the same: also BatchNorm's."""
    ends = []
    for noise in (0.0, 1.0):
        adapter = made(net)
        kept = adapter.method.select(
            adapter._live()._batch(None, fata.adapt(network(net).double(), "norm")(STREAM)), {}
        ).rows
        spoil = torch.where(kept[:, None, None, None], STREAM.flip(3), noise)
        ends.append(made(net, augment=lambda x, spoil=spoil: spoil))
        ends[-1](STREAM)
    one, other = (adapter._live().state.theta for adapter in ends)
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(one, other, **DOUBLE)


STREAM = images(16).double()


@pytest.mark.parametrize("net", ["resnet_gn", "vit_ln"])
@pytest.mark.parametrize("rows", [1, 4])
def test_images_that_are_all_alike_have_no_spread(net, rows):
    """Where the released code is not finite, every row is learned from."""
    adapter = made(net)
    for seed in (1, 2):
        logits = adapter(images(1, seed=seed).double().expand(rows, -1, -1, -1))
        assert logits.isfinite().all()
    assert adapter.counts["selected"]["roid"] == 2 * rows
    assert adapter.counts["stepped"] == 2
    assert adapter._live().state.theta.isfinite().all()


def test_views_reflect_at_the_border_and_follow_their_generator():
    pixels = torch.ones(2, 3, 16, 16)
    one, two, other = (
        roid_view(images(2), Rng(torch.Generator().manual_seed(s))) for s in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)
    assert 0 <= one.min() <= one.max() <= 1
    for seed in range(8):  # a white image has no black border
        view = roid_view(pixels, Rng(torch.Generator().manual_seed(seed)))
        assert view.min() > 0.3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"correction": "add"}, r"Roid\(correction='add'\): choose one of 'multiply', 'additive'"),
        ({"batch_size": 0}, "or None for the rows at hand"),
        ({"source_share": 2}, r"in \[0, 1\]"),
        ({"mean": (0.5,) * 3}, "give both"),
    ],
)
def test_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        made(**fields)


def test_normalised_images_need_mean_and_std():
    adapter = fata.adapt(network("resnet_gn"), "roid")
    with pytest.raises(ValueError, match="mean and std that they were normalised with"):
        adapter(4 * images(4) - 2)
