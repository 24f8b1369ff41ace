"""ZeroSiam: its loss by hand, and a predictor that is state but no part of the model."""

import copy

import pytest
import torch

import fata
from fata.methods.base import Outputs
from fata.network.head import Head
from fata.testing.cases import images, network
from precision import DOUBLE


def made(**fields):
    return fata.adapt(network("resnet_gn").double(), "zerosiam", lr=1e-2, guard=None, **fields)


def predictor(adapter):
    engine = adapter._live()
    named = dict(zip(engine.theta.names, engine.theta.split(engine.state.theta), strict=True))
    return named["beside:predictor"]


def test_loss_by_hand():
    model = network("resnet_gn").double().eval()
    head = Head(model)
    logits = model(images(6).double())
    z = head.take()
    square = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).double() / 6
    square.requires_grad_()
    method = fata.Zerosiam(alignment=0.5)
    found = method.row_loss(Outputs(logits, [z], head, {"predictor": square}))
    t = model.fc(z).detach()
    n = (
        torch.stack([model.fc.weight.detach() @ (square @ row) for row in z])
        + model.fc.bias.detach()
    )
    p, q = t.softmax(1), n.softmax(1)
    entropy = -(q * q.log()).sum(1)
    both = (p * (p / q).log()).sum(1) + (q * (q / p).log()).sum(1)
    torch.testing.assert_close(found, entropy + 0.5 * both, **DOUBLE)
    to = [square, model.bn1.weight]
    gradients = [
        torch.autograd.grad(loss.sum(), to, retain_graph=True)
        for loss in (found, entropy + 0.5 * both)
    ]
    torch.testing.assert_close(*gradients, **DOUBLE)


def test_the_predictor_has_a_rate_of_its_own():
    moved = {}
    for rate in (1.0, 3.0):
        adapter = made(predictor_rate=rate)
        adapter(images(8).double())
        theta = adapter._live().state.theta - adapter._live().source
        moved[rate] = predictor(adapter) - torch.eye(32), theta[: -32 * 32]
    torch.testing.assert_close(moved[3.0][0], 3 * moved[1.0][0], **DOUBLE)
    torch.testing.assert_close(moved[3.0][1], moved[1.0][1], **DOUBLE)
    assert moved[1.0][0].any()


@pytest.mark.parametrize(("net", "times"), [("resnet_gn", 10), ("vit_ln", 1)])
def test_its_rates_are_those_of_the_released_script(net, times):
    adapter = fata.adapt(network(net), "zerosiam")
    engine = adapter._live()
    at = {"resnet_gn": {64: 2.5e-3, 1: 1.5625e-4}, "vit_ln": {64: 5e-3, 1: 1.5625e-4}}[net]
    for rows, rate in at.items():
        rates = engine.theta.rates(torch.tensor(engine.rate(rows)))
        assert rates[0].item() == pytest.approx(rate)
        assert rates[-1].item() == pytest.approx(times * rate)


def test_it_is_state_and_no_part_of_the_model(tmp_path):
    adapter, other = made(), made()
    adapter(images(8).double())
    assert not torch.equal(predictor(adapter), torch.eye(32).double())
    assert adapter.trainable == [n for n in adapter.trainable if "norm" in n or "bn" in n]
    adapter.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert torch.equal(predictor(other), predictor(adapter))
    twin = copy.deepcopy(adapter)
    assert torch.equal(twin(images(8, seed=2).double()), adapter(images(8, seed=2).double()))
    assert torch.equal(predictor(twin), predictor(adapter))
    assert not torch.equal(predictor(twin), predictor(other))
    adapter.reset()
    assert torch.equal(predictor(adapter), torch.eye(32).double())
    assert set(adapter.unwrap().state_dict()) == set(network("resnet_gn").state_dict())


def test_fata_does_not_move_the_predictor():
    alone, both = (
        made(),
        fata.adapt(network("resnet_gn").double(), "zerosiam+fata", lr=1e-2, guard=None),
    )
    for adapter in (alone, both):
        adapter(images(8).double())
    torch.testing.assert_close(predictor(both), predictor(alone), **DOUBLE)
    theirs, ours = (a.model.bn1.weight for a in (both, alone))
    assert not torch.allclose(theirs, ours)


def test_a_rate_out_of_range():
    with pytest.raises(ValueError, match=r"Zerosiam\(predictor_rate=-1\).*or None"):
        made(predictor_rate=-1)
