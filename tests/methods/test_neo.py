"""NEO: the mean feature by hand, frozen, unwrapped, and at the beginning of a stream."""

import pytest
import torch

import fata
from fata.testing.cases import images, network
from precision import DOUBLE


def parts(net="resnet_gn"):
    return network(net).double(), images(32).double().split(16)


def features(model, batch):
    """What the classifier sees."""
    seen = []
    handle = model.fc.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model.eval()(batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_the_mean_has_seen_the_batch(alpha):
    model, batches = parts()
    adapter = fata.adapt(network("resnet_gn").double(), "neo", alpha=alpha, guard=None)
    z = [features(model, batch) for batch in batches]
    first, both = z[0].mean(0), torch.cat(z).mean(0)
    means = [first, both] if alpha is None else [0.1 * first, 0.09 * first + 0.1 * z[1].mean(0)]
    for batch, feature, mean in zip(batches, z, means, strict=True):
        expected = model.fc(feature - mean).detach()
        torch.testing.assert_close(adapter(batch), expected, **DOUBLE)
    assert adapter.trainable == []
    assert adapter.counts["rows_backward"] == adapter.counts["stepped"] == 0


def test_frozen_it_subtracts_the_mean_and_leaves_it():
    model, (first, second) = parts()
    adapter = fata.adapt(network("resnet_gn").double(), "neo", guard=None)
    adapter(first)
    mean = features(model, first).mean(0)
    with adapter.frozen():
        for _ in range(2):
            expected = model.fc(features(model, second) - mean).detach()
            torch.testing.assert_close(adapter(second), expected, **DOUBLE)


def test_the_plain_model_has_the_mean_in_its_bias():
    adapter = fata.adapt(network("resnet_gn").double(), "neo", guard=None)
    first, second = parts()[1]
    adapter(first)
    with adapter.frozen():
        expected = adapter(second)
    with torch.no_grad():
        torch.testing.assert_close(adapter.unwrap()(second), expected, **DOUBLE)


def test_after_a_reset_the_plain_model_is_the_source():
    adapter = fata.adapt(network("resnet_gn"), "neo")
    adapter(images(16))
    adapter.reset()
    assert torch.equal(adapter.unwrap().fc.bias, network("resnet_gn").fc.bias)


def test_the_first_single_image_is_its_own_mean_unless_it_warms_up():
    plain = network("resnet_gn").double().eval()
    alone = fata.adapt(network("resnet_gn").double(), "neo", guard=None)
    warm = fata.adapt(network("resnet_gn").double(), "neo", warmup=2, guard=None)
    one, two = images(2).double().split(1)
    torch.testing.assert_close(alone(one)[0], plain.fc.bias.detach(), **DOUBLE)
    torch.testing.assert_close(warm(one), plain(one).detach(), **DOUBLE)
    torch.testing.assert_close(warm(two), alone(two), **DOUBLE)


def test_a_guard_watches_it():
    adapter = fata.adapt(network("resnet_gn"), "neo")
    assert adapter.guard is not None
    assert adapter.health is None
    adapter(images(16))
    assert adapter.health is not None  # the first batch is compared
    assert adapter.counts["rows_source"] == 0  # with logits that are known


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"alpha": 2}, r"Neo\(alpha=2\).*in \[0, 1\], or None"), ({"warmup": -1}, "whole number")],
)
def test_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        fata.adapt(network("resnet_gn"), "neo", **fields)
