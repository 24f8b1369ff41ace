"""NCTTA: its loss written out, what its gradient runs through, and its limits."""

import math

import pytest
import torch

import fata
from fata.methods.base import Outputs
from fata.network.head import Head
from fata.testing.cases import images, network
from precision import DOUBLE


def parts(rows=6):
    """Logits and features of a network in float64, with a graph, and its classifier."""
    model = network("resnet_gn").double().eval()
    head = Head(model)
    logits = model(images(rows).double())
    return logits, head.take(), head


def written_out(logits, z, weight, k, mix):
    """The misalignment of one row, class by class."""
    h, w = z / z.norm(), weight / weight.norm(dim=1, keepdim=True)
    s, p = w @ h, logits.softmax(0)
    top = p.argsort(descending=True)[:k].tolist()
    far = torch.stack([1 - s[c] for c in top])
    g = (-(far - far.mean()) / ((far - far.mean()).square().mean().sqrt() + 1e-8)).softmax(0)
    r = torch.stack([p[c] + 1e-8 for c in top])
    y = (1 - mix) * g + mix * r / r.sum() + 1e-8
    y = y / y.sum()
    return -(sum(y[i] * s[c].exp() for i, c in enumerate(top)) / s.exp().sum()).log()


def test_loss_and_gradient_by_hand():
    logits, z, head = parts()
    method = fata.Nctta(top_k=4, mix=0.3, alignment=2.0)
    found = method.row_loss(Outputs(logits, [z], head))
    probs = logits.softmax(1)
    entropy = -(probs * probs.log()).sum(1)
    aligned = torch.stack(
        [written_out(o, f, head.weight, 4, 0.3) for o, f in zip(logits, z, strict=True)]
    )
    expected = entropy + 2.0 * aligned
    torch.testing.assert_close(found, expected, **DOUBLE)
    parameter = head.model.layer1[0].norm1.weight
    gradients = [
        torch.autograd.grad(loss.sum(), parameter, retain_graph=True)[0]
        for loss in (found, expected)
    ]
    torch.testing.assert_close(*gradients, **DOUBLE)


def test_rows_near_their_class_weigh_more():
    logits, z, head = parts()
    z = torch.cat((100 * head.weight[[3]], -head.weight[[3]]))  # lengths do not matter
    logits = torch.zeros(2, 10).double()
    logits[:, 3] = 8.0
    batch = fata.Batch(None, logits, None, 0, features=[z], head=head)
    near, far = fata.Nctta(nu=5, eta=1).select(batch, {}).weights.tolist()
    shared = math.exp(0.4 * math.log(10) - batch.entropy[0].item())
    assert near == pytest.approx(shared + 5)
    assert far == pytest.approx(shared + 5 / 3)  # a distance of 2


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"mix": 0}, {"mix": 1}, {"top_k": 50}])
def test_limits_have_a_finite_gradient(fields):
    logits, z, head = parts()
    loss = fata.Nctta(**fields).row_loss(Outputs(logits, [z], head)).sum()
    gradient = torch.autograd.grad(loss, head.model.bn1.weight)[0]
    assert gradient.isfinite().all()
    assert gradient.any()


def test_no_row_no_step():
    adapter = fata.adapt(network("vit_ln"), "nctta", lr=0.1, threshold=1e-9)
    for _ in range(2):
        adapter(images(8))
    assert adapter.counts["stepped"] == 0
    assert torch.equal(adapter._live().state.theta, adapter._live().source)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, r"Nctta\(top_k=0\)"),
        ({"mix": 1.5}, r"in \[0, 1\]"),
        ({"threshold": 2.76}, "units of ln C"),
    ],
)
def test_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        fata.adapt(network("resnet_gn"), "nctta", **fields)


def test_its_rate_is_its_own():
    adapter = fata.adapt(network("resnet_gn"), "nctta", lr="release")
    assert [adapter._live().rate(rows) for rows in (64, 32)] == [1e-3, 5e-4]
