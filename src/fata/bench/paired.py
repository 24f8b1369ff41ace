"""Two methods on the same images: a paired difference and its confidence intervals."""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

Z = 1.96  # of a 95 % interval
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 1 to 10 degrees
Flags = np.ndarray  # bool, one for each image of a stream, in order


class Gain(NamedTuple):
    """A difference of accuracies in percentage points, with its 95 % intervals."""

    mean: float
    low: float  # over images
    high: float
    images: int  # 0: unknown, as is the interval over them
    seeds: tuple[float, float] | None = None  # the interval over seeds; None: of a single one

    @property
    def sign(self) -> int:
        """1 or -1 if every known interval excludes zero; 0: within noise, or nothing known."""
        known = [(self.low, self.high)] if self.images else []
        known += [self.seeds] if self.seeds else []
        signs = {(low > 0) - (high < 0) for low, high in known}
        return signs.pop() if len(signs) == 1 else 0

    @property
    def texts(self) -> dict[str, str]:
        """The mean and each known interval, by the head of its column."""
        known = {"over images": (self.low, self.high)} if self.images else {}
        known |= {"over seeds": self.seeds} if self.seeds else {}
        intervals = {head: f"[{low:+.2f}, {high:+.2f}]" for head, (low, high) in known.items()}
        return {"gain": f"{self.mean:+.2f}", **intervals}

    def __str__(self) -> str:
        mean, *intervals = self.texts.items()
        return " ".join([mean[1], *(f"{t} {h}" if "seeds" in h else t for h, t in intervals)])


def pack(right: Tensor) -> str:
    """Flags as text, six to a character."""
    return base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()


def unpack(text: str, rows: int) -> Flags:
    """The flags that `pack` was given."""
    bits = np.frombuffer(base64.b64decode(text), np.uint8)
    return np.unpackbits(bits, count=rows).astype(bool)


def gain(before: Sequence[Flags], after: Sequence[Flags]) -> Gain:
    """The mean over the streams that both methods ran on, every stream with the same weight.

    The interval is Agresti and Min's for matched pairs: that of McNemar's counts, with half an
    image added to each, so that a handful of changed images is within noise. It does not cover
    other orders of the images.
    """
    means, variances = [], []
    for one, other in zip(before, after, strict=True):
        number, up, down = len(one), int((other & ~one).sum()), int((one & ~other).sum())
        means.append((up - down) / number)
        variances.append((up + down + 1 - (up - down) ** 2 / number) / number**2)
    mean = 100 * statistics.fmean(means)
    half = 100 * Z * math.sqrt(sum(variances)) / len(means)
    return Gain(mean, mean - half, mean + half, sum(map(len, before)))


def over_seeds(gains: Sequence[Gain]) -> Gain:
    """Gains of several seeds as one: the same images in other orders.

    More seeds do not add images, so the interval over images is as wide as that of one seed.
    """
    mean = statistics.fmean(one.mean for one in gains)
    half = statistics.fmean((one.high - one.low) / 2 for one in gains)
    seeds = interval([one.mean for one in gains]) if len(gains) > 1 else None
    return Gain(mean, mean - half, mean + half, gains[0].images, seeds)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of two values or more."""
    mean, degrees = statistics.fmean(values), len(values) - 1
    quantile = _T[degrees - 1] if degrees <= len(_T) else Z + 2.6 / degrees
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half
