"""An estimate of accuracy without labels, from what the guard compares.

The source's accuracy is taken to be its mean confidence. What the adapted model gains or loses is
the mean of x (see `evidence`): the share of images that it took from frequent classes, less that of
those that it moved to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fata.methods.base import Memory

LATEST = 0.1  # weight of a check in the mean of x


@dataclass(frozen=True)
class Health:
    """Estimated accuracies on the images that were compared lately, from 0 to 1.

    Args:
        source: of the source model.
        adapted: of the adapted model.
    """

    source: float
    adapted: float

    @property
    def gain(self) -> float:
        """Of the adapted model over the source model."""
        return self.adapted - self.source

    @classmethod
    def of(cls, memory: Memory) -> Health | None:
        """What the guard's averages say; waits for the device."""
        if "shown.p" not in memory:
            return None
        source = float(memory["shown.p"])
        return cls(source, min(1.0, max(0.0, source - float(memory["shown.moved"]))))


def noted(before: Memory, after: Memory, moved: Tensor) -> Memory:
    """The averages with the mean of x of one more check."""
    old = before.get("moved", moved)
    return {**after, "moved": old + LATEST * (moved - old)}
