"""A sliding window for single images."""

import pytest
import torch

import fata
from fata import tiny

IMAGES = torch.rand(14, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def adapters(net="resnet_bn", spec="tent", **options):
    """Two that are alike."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(fata.adapt(tiny.build(net), spec, lr=0.01, **options))
    return made


@pytest.mark.parametrize("spec", ["norm", "tent", "sar+fata"])
@pytest.mark.parametrize("net", ["resnet_bn", "vit_ln"])
def test_the_newest_is_predicted_from_the_batch_of_the_window(net, spec):
    ours, theirs = adapters(net, spec)
    window = fata.Window(ours, 4, every=1)
    for last in range(1, len(IMAGES) + 1):
        logits = window(IMAGES[last - 1 : last])
        batch = IMAGES[max(0, last - 4) : last]
        assert torch.equal(logits, theirs(batch)[-1:])
        assert torch.equal(window.images, batch)
    assert ours.counts == theirs.counts  # it learned from every window
    assert ours.counts["seen"] == 1 + 2 + 3 + 11 * 4


@pytest.mark.parametrize("every", [None, 3])
def test_in_between_it_predicts_without_learning(every):
    """By default each image is learned from once, as in batches of four."""
    ours, theirs = adapters(spec="tent+fata")
    window, learned = fata.Window(ours, 4, every), 0
    for last in range(1, len(IMAGES) + 1):
        batch = IMAGES[max(0, last - 4) : last]
        logits = window(IMAGES[last - 1 : last])
        if last % (every or 4) == 0:
            assert torch.equal(logits, theirs(batch)[-1:])
            learned += len(batch)
        else:
            with theirs.frozen():
                assert torch.equal(logits, theirs(batch)[-1:])
        assert ours.counts["seen"] == learned
    assert ours.counts == theirs.counts
    assert learned + window.rows_frozen == 1 + 2 + 3 + 11 * 4


def test_several_at_once_are_predicted_together():
    ours, theirs = adapters()
    window = fata.Window(ours, 4, every=1)
    for part, batch in (
        (slice(0, 3), slice(0, 3)),
        (slice(3, 6), slice(2, 6)),
        (slice(6, 12), slice(6, 12)),  # more than the window holds
        (slice(12, 13), slice(9, 13)),
    ):
        logits = window(IMAGES[part])
        assert torch.equal(logits, theirs(IMAGES[batch])[-len(logits) :])
        assert len(logits) == len(IMAGES[part])


def test_the_window_holds_no_more_than_its_images():
    window = fata.Window(adapters()[0], 4)
    for part in (slice(0, 1), slice(1, 4), slice(4, 11), slice(11, 12)):
        window(IMAGES[part])
        assert len(window.images) <= 4
        assert window.images.untyped_storage().nbytes() <= IMAGES[:4].nbytes


def test_a_buffer_may_be_used_again():
    window, buffer = fata.Window(adapters()[0], 4), torch.empty(1, 3, 16, 16)
    for image in IMAGES[:3]:
        buffer.copy_(image)
        window(buffer)
    assert torch.equal(window.images, IMAGES[:3])


def test_a_reset_empties_it():
    ours, theirs = adapters()
    window = fata.Window(ours, 4)
    for image in IMAGES[:6]:
        window(image[None])
    window.reset()
    assert window.images is None
    assert window.new == 0
    assert ours.counts["seen"] == 0
    for last in range(1, 5):
        logits = window(IMAGES[last - 1 : last])
    assert torch.equal(logits, theirs(IMAGES[:4])[-1:])
    assert ours.counts == theirs.counts


def test_frozen_it_predicts_and_learns_nothing():
    ours, theirs = adapters()
    window = fata.Window(ours, 4)
    with ours.frozen(), theirs.frozen():
        for last in range(1, 7):
            logits = window(IMAGES[last - 1 : last])
            assert torch.equal(logits, theirs(IMAGES[max(0, last - 4) : last])[-1:])
    assert ours.counts["seen"] == 0


def test_images_that_fail_do_not_stay():
    window = fata.Window(adapters()[0], 4)
    window(IMAGES[:2])
    with pytest.raises(ValueError, match=r"shape \(3, 8, 8\), .* after images of shape \(3, 16"):
        window(torch.rand(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"torch.float64, on cpu after .* torch.float32"):
        window(IMAGES[:1].double())
    assert torch.equal(window.images, IMAGES[:2])
    assert window(IMAGES[2:3]).shape == (1, 10)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_wrong_size_is_told(size):
    with pytest.raises(ValueError, match=r"size=.*at least 1"):
        fata.Window(adapters()[0], size)
    with pytest.raises(ValueError, match=r"every=.*at least 1"):
        fata.Window(adapters()[0], 4, size)


def test_what_leaves_images_out_or_is_no_adapter_is_told():
    with pytest.raises(ValueError, match=r"every=5.*at most size=4"):
        fata.Window(adapters()[0], 4, every=5)
    with pytest.raises(TypeError, match=r"give an adapter"):
        fata.Window(adapters()[0].model, 4)
