"""Differences between two methods on the same images."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fata.bench.paired import Gain, gain, interval, over_seeds, pack, unpack


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
    first = 1 + 1 + 1 - 0 / 4  # one up, one down, half an image added to each; of four
    second = 1 + 0 + 1 - 1 / 4
    half = 196 * math.sqrt(first / 4**2 + second / 4**2) / 2
    assert found.high - found.mean == pytest.approx(half)
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
    assert str(Gain(0.5, 0.5, 0.5, 0)) == "+0.50"
    both = Gain(0.5, -0.25, 1.25, 100, (0.25, 0.75))
    assert str(both) == "+0.50 [-0.25, +1.25] [+0.25, +0.75] over seeds"


def test_streams_weigh_alike_whatever_their_length():
    short, long = np.zeros(10, bool), np.zeros(1000, bool)
    after = [np.ones(10, bool), long]
    assert gain([short, long], after).mean == pytest.approx(50)


def test_more_seeds_do_not_narrow_the_interval_over_images():
    before, after = np.zeros(400, bool), np.arange(400) < 20
    one = gain([before], [after])
    three = over_seeds([one, one, one])
    assert (three.low, three.high, three.images) == pytest.approx((one.low, one.high, 400))
    assert three.seeds == pytest.approx((5, 5))


@pytest.mark.parametrize("degrees", [1, 4, 10, 11, 40])
def test_an_interval_over_seeds_is_students(degrees):
    values = np.random.default_rng(degrees).normal(size=degrees + 1)
    low, high = interval(values.tolist())
    half = stats.t.ppf(0.975, degrees) * values.std(ddof=1) / math.sqrt(len(values))
    assert (low + high) / 2 == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(half, rel=0.005)


def test_a_gain_needs_both_intervals():
    assert Gain(1, 0.5, 1.5, 100, (0.2, 1.8)).sign == 1
    assert Gain(1, 0.5, 1.5, 100, (-3, 5)).sign == 0
    assert Gain(-1, -1, -1, 0, (-1.5, -0.5)).sign == -1
    assert Gain(1, 1, 1, 0).sign == 0  # nothing is known
