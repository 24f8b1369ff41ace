"""The published label-shift streams, index for index."""

import pytest
import torch

from fata.data.label_shift import label_shift

IMAGENET = torch.arange(1000).repeat_interleave(50)


def test_the_published_streams():
    """Known values of the files for seed 2022 and ratios 500,000 and 1,000."""
    stream = label_shift(IMAGENET, 500_000)
    assert stream[:12].tolist() == [
        24635, 24638, 24636, 24636, 24606, 24623, 24616, 24603, 24602, 24614, 24640, 24605,
    ]  # fmt: skip
    assert stream[-5:].tolist() == [19868, 19891, 19866, 19862, 19880]
    assert (len(stream), stream.sum().item(), len(stream.unique())) == (
        100_000,
        2_499_900_518,
        43_288,
    )
    milder = label_shift(IMAGENET, 1_000)
    assert milder[:6].tolist() == [925, 36240, 11315, 4966, 36229, 36210]
    assert milder.sum().item() == 2_507_674_468


def test_blocks_are_as_pure_as_the_ratio_says():
    labels = torch.arange(10).repeat(30)
    stream = label_shift(labels, 90.0, length=5_000)
    blocks = labels[stream].view(10, 500)
    shares = [(block == block.mode().values).float().mean().item() for block in blocks]
    assert sum(shares) / 10 == pytest.approx(90 / 99, abs=0.02)
    assert sorted(block.mode().values.item() for block in blocks) == list(range(10))


def test_ratio_one_is_no_shift_and_seeds_order_the_classes():
    labels = torch.arange(10).repeat(30)
    even = labels[label_shift(labels, 1, length=10_000)].bincount()
    assert even.min() > 850
    first = [labels[label_shift(labels, 1e9, seed=s)][0].item() for s in range(12)]
    assert len(set(first)) > 3


def test_uneven_classes_draw_their_own_images():
    labels = torch.tensor([0, 1, 1, 1, 2])
    stream = label_shift(labels, 3.0, length=300)
    assert set(stream.tolist()) == set(range(5))


@pytest.mark.parametrize(
    ("labels", "fields", "message"),
    [
        ([0, 2], {}, "class 1 has none"),
        ([0, 1], {"ratio": 0.5}, "must be at least 1"),
        ([0, 1, 2], {"length": 2}, "at least one a class"),
    ],
)
def test_wrong_input(labels, fields, message):
    with pytest.raises(ValueError, match=message):
        label_shift(torch.tensor(labels), **fields)
