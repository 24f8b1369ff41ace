"""The stored summary of a stream: numbers, curves and histograms of its rows."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fata.bench import paired
from fata.guard.events import Health

POINTS = 100  # of a curve
BINS = 50  # of the histogram of entropies
WINDOW = 640  # rows in which a collapse is detected


@dataclass(frozen=True)
class Rows:
    """One entry a row of the stream, in order."""

    label: Tensor
    prediction: Tensor
    confidence: Tensor
    entropy: Tensor
    host: Tensor  # selected by the host
    plus: Tensor  # selected by FATA

    def __len__(self) -> int:
        return len(self.label)

    @property
    def right(self) -> Tensor:
        """Where the prediction is the label."""
        return self.label == self.prediction


def summary(rows: Rows, classes: int, terms: Sequence[str], ends: Sequence[int]) -> dict[str, Any]:
    """Numbers over the whole stream.

    Args:
        rows: of the stream.
        classes: number of classes.
        terms: names of the terms that select rows (host, FATA).
        ends: row at which each batch ends; any batch may be short.
    """
    selected = dict(zip(terms, (rows.host, rows.plus), strict=False))
    accuracy = 100 * rows.right.double().mean().item()
    return {
        "rows": len(rows),
        "accuracy": accuracy,
        "right": paired.pack(rows.right),
        "predictions": predictions(rows),
        "error": 100 - accuracy,
        "calibration_error": calibration_error(rows),
        "classes": by_class(rows, classes, selected),
        "curve": curve(rows, selected, ends),
        "entropies": entropies(rows, classes),
        "pseudo_labels": {name: _percent(rows.right[on]) for name, on in selected.items()},
        "collapsed_at": collapsed_at(rows, ends),
    }


def predictions(rows: Rows) -> str:
    """A hash of the predicted classes: equal for methods that predict alike."""
    return hashlib.sha256(rows.prediction.int().numpy().tobytes()).hexdigest()[:16]


def calibration_error(rows: Rows, bins: int = 15) -> float:
    """Expected calibration error in percentage points, over equal-width bins."""
    place = (rows.confidence * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64)
    gap.index_add_(0, place, rows.confidence.double() - rows.right.double())
    return 100 * gap.abs().sum().item() / len(rows)


def by_class(rows: Rows, classes: int, selected: dict[str, Tensor]) -> dict[str, Any]:
    """By class: images and correct ones; by predicted class: rows that each term selected."""
    return {
        "images": _counts(rows.label, classes),
        "right": _counts(rows.label[rows.right], classes),
        "selected": {n: _counts(rows.prediction[on], classes) for n, on in selected.items()},
    }


def curve(rows: Rows, selected: dict[str, Tensor], ends: Sequence[int]) -> dict[str, Any]:
    """At most a hundred points, each the mean over the batches since the one before."""
    batches = _places(len(ends))
    parts = [slice(*two) for two in pairwise([0, *(ends[batch - 1] for batch in batches)])]
    return {
        "batch": batches,
        "accuracy": [_percent(rows.right[part]) for part in parts],
        "online": [_percent(rows.right[: part.stop]) for part in parts],
        "entropy": [rows.entropy[part].mean().item() for part in parts],
        "selected": {n: [_percent(on[part]) for part in parts] for n, on in selected.items()},
        "pseudo_labels": {
            n: [_percent(rows.right[part][on[part]]) for part in parts]
            for n, on in selected.items()
        },
    }


def health(estimates: Sequence[tuple[Health, bool]]) -> dict[str, Any] | None:
    """The estimated accuracies after each batch in percent: means over the stream, and curves.

    Args:
        estimates: the guard's, and whether the source model predicted the batch; empty: no guard.
    """
    if not estimates:
        return None
    known = {
        "source": [100 * health.source for health, _ in estimates],
        "adapted": [100 * health.adapted for health, _ in estimates],
    }
    pairs = zip(estimates, known["source"], known["adapted"], strict=True)
    known["predicted"] = [source if by else adapted for (_, by), source, adapted in pairs]
    batches = _places(len(estimates))
    parts = [slice(*two) for two in pairwise([0, *batches])]
    lines = {name: [fmean(some[part]) for part in parts] for name, some in known.items()}
    means = {name: fmean(some) for name, some in known.items()}
    return {**means, "curve": {"batch": batches, **lines}}


def _places(batches: int) -> list[int]:
    """The batches after which a curve has its points."""
    step = math.ceil(batches / POINTS)
    return [min(batch, batches) for batch in range(step, batches + step, step)]


def entropies(rows: Rows, classes: int) -> dict[str, list[int]]:
    """Histogram of H / ln C over [0, 1], of right and of wrong rows."""
    place = (rows.entropy / math.log(classes) * BINS).long().clamp(0, BINS - 1)
    return {"right": _counts(place[rows.right], BINS), "wrong": _counts(place[~rows.right], BINS)}


def collapsed_at(rows: Rows, ends: Sequence[int]) -> int | None:
    """The batch from which one class takes over until the end; None: no collapse.

    It takes over if its share of the predictions in a window exceeds that of the most frequent
    label by 0.5. Windows are long enough to contain mixed labels, if the stream has them.
    """
    window = min(WINDOW, len(rows))
    while window < len(rows) and any(
        _top(rows.label[s : s + window]) > 0.5 for s in _starts(window, len(rows))
    ):
        window = min(2 * window, len(rows))
    starts = _starts(window, len(rows))
    taken = [
        _top(rows.prediction[s : s + window]) > _top(rows.label[s : s + window]) + 0.5
        for s in starts
    ]
    if not taken[-1]:
        return None
    first = len(taken) - next((i for i, t in enumerate(reversed(taken)) if not t), len(taken))
    return bisect_right(ends, starts[first])


def _starts(window: int, length: int) -> range:
    return range(0, length - window + 1, max(1, window // 4))


def _top(values: Tensor) -> float:
    return values.bincount().max().item() / len(values)


def _counts(values: Tensor, length: int) -> list[int]:
    return values.bincount(minlength=length).tolist()


def _percent(flags: Tensor) -> float | None:
    return 100 * flags.float().mean().item() if len(flags) else None
