"""Online label shift: a stream in which one class after another dominates.

The exact generator behind the published index files of SAR and DeYO, for any data set. Time is cut
into one block a class; in its block a class is drawn R times as often as each other one. Draws are
with replacement. The class order comes from Python's generator with the given seed, the labels and
images from NumPy's with the constant 2022, as in the published script.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# The script wrote one file a ratio in this order from one generator: the order of the classes for
# a ratio is as many shuffles into it.
_PUBLISHED = (1, 1000, 2000, 3000, 4000, 5000, 500_000)


def label_shift(
    labels: Tensor, ratio: float = 500_000, length: int | None = None, seed: int = 2022
) -> Tensor:
    """Indices of the images in the order of the stream.

    Args:
        labels: class of every image, 0 to C - 1, each with at least one image.
        ratio: how many times as often the class of a block is drawn as each other class; 1: no
            shift.
        length: of the stream; None: twice the images, as published.
        seed: of the order of the classes.
    """
    if ratio < 1:
        raise ValueError(f"label_shift(ratio={ratio!r}): must be at least 1 (1: no shift).")
    images = [torch.nonzero(labels == c)[:, 0] for c in range(int(labels.max()) + 1)]
    empty = [c for c, members in enumerate(images) if not len(members)]
    if empty:
        raise ValueError(f"label shift needs an image of every class; class {empty[0]} has none.")
    classes = len(images)
    length = 2 * len(labels) if length is None else length
    if length < classes:
        raise ValueError(f"label_shift(length={length}): must be at least one a class ({classes}).")
    rng = np.random.RandomState(2022)
    drawn = _labels(rng, _class_order(classes, ratio, seed), ratio, length)
    stream = torch.empty(length, dtype=torch.int64)
    for c, members in enumerate(images):
        places = np.flatnonzero(drawn == c)
        stream[places] = members[rng.randint(0, len(members), len(places))]
    return stream


def _class_order(classes: int, ratio: float, seed: int) -> Sequence[int]:
    shuffles = 1 + (_PUBLISHED.index(int(ratio)) if ratio in _PUBLISHED else 0)
    python = random.Random(seed)
    for _ in range(shuffles):
        order = list(range(classes))
        python.shuffle(order)
    return order


def _labels(
    rng: np.random.RandomState, order: Sequence[int], ratio: float, length: int
) -> np.ndarray:
    """A label a moment, by the law of its block."""
    classes = len(order)
    minor = 1 / (ratio + classes - 1)
    uniform = rng.random_sample(length)
    drawn = np.empty(length, dtype=np.int64)
    starts = [block * length // classes for block in range(classes + 1)]
    for block, (start, end) in enumerate(pairwise(starts)):
        law = np.full(classes, minor)
        law[order[block]] = ratio * minor
        cumulative = law.cumsum()
        cumulative /= cumulative[-1]
        drawn[start:end] = cumulative.searchsorted(uniform[start:end], side="right")
    return drawn
