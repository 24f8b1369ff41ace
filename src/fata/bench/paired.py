"""Two methods on the same images: a paired difference and its confidence interval."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

Z = 1.96  # of a 95 % interval
Flags = np.ndarray  # bool, one for each image of a stream, in order


class Gain(NamedTuple):
    """A difference of accuracies in percentage points, with its 95 % interval over images."""

    mean: float
    low: float
    high: float
    images: int

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes zero; 0: within noise."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def pack(right: Tensor) -> str:
    """Flags as text, six to a character."""
    return base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()


def unpack(text: str, rows: int) -> Flags:
    """The flags that `pack` was given."""
    bits = np.frombuffer(base64.b64decode(text), np.uint8)
    return np.unpackbits(bits, count=rows).astype(bool)


def gain(before: Sequence[Flags], after: Sequence[Flags]) -> Gain:
    """Over the streams that both methods ran on; an image counts as often as it occurs.

    The difference on an image is -1, 0 or 1; the interval is that of their mean. It does not cover
    other orders of the images.
    """
    difference = np.concatenate(after).astype(float) - np.concatenate(before)
    mean, number = 100 * float(difference.mean()), len(difference)
    half = 100 * Z * float(difference.std(ddof=1)) / math.sqrt(number) if number > 1 else math.inf
    return Gain(mean, mean - half, mean + half, number)
