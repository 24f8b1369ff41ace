"""Differences between two methods on the same images."""

import math

import numpy as np
import pytest
import torch

from fata.bench.paired import Gain, gain, pack, unpack


@pytest.mark.parametrize("rows", [1, 7, 8, 65])
def test_flags_come_back(rows):
    flags = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < 0.5
    assert unpack(pack(flags), rows).tolist() == flags.tolist()


def test_a_gain_by_hand():
    """Of eight images two became right and one wrong."""
    before = [np.array([1, 1, 1, 0], bool), np.array([0, 0, 0, 1], bool)]
    after = [np.array([1, 1, 0, 1], bool), np.array([1, 0, 0, 1], bool)]
    found = gain(before, after)
    assert found.images == 8
    assert found.mean == pytest.approx(100 * (5 - 4) / 8)
    deviation = math.sqrt((2 * (1 - 1 / 8) ** 2 + (-1 - 1 / 8) ** 2 + 5 * (1 / 8) ** 2) / 7)
    assert found.high - found.mean == pytest.approx(196 * deviation / math.sqrt(8))
    assert found.low == pytest.approx(2 * found.mean - found.high)


def test_one_image_of_a_thousand_is_no_gain():
    before, after = np.zeros(1000, bool), np.zeros(1000, bool)
    after[3] = True
    assert gain([before], [after]).sign == 0
    after[:50] = True
    assert gain([before], [after]).sign == 1
    assert gain([after], [before]).sign == -1


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Of 2,000 draws 95 % are 1,900; the bounds are 6 standard deviations away."""
    draws = np.random.default_rng(0)
    truth, covered = 100 * (0.1 - 0.06), 0
    for _ in range(2000):
        kind = draws.choice(3, 500, p=[0.1, 0.06, 0.84])
        found = gain([kind == 1], [kind == 0])
        covered += found.low <= truth <= found.high
    assert abs(covered - 1900) < 6 * math.sqrt(2000 * 0.95 * 0.05)


def test_a_gain_reads_with_its_interval():
    assert str(Gain(0.5, -0.25, 1.25, 100)) == "+0.50 [-0.25, +1.25]"
