"""An estimate of accuracy without labels, from what the guard compares.

The source's accuracy is taken to be its mean confidence. What the adapted model gains or loses is
the mean of x (see `evidence`): the share of images that it took from frequent classes, less that of
those that it moved to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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

    def as_dict(self) -> dict[str, float]:
        """Both accuracies and the gain, by name."""
        return {"source": self.source, "adapted": self.adapted, "gain": self.gain}

    @classmethod
    def of(cls, memory: Memory) -> Health | None:
        """What the guard's averages say; waits for the device, once after each check."""
        latest = memory.get("shown.moved")  # a new tensor at every check
        if latest is None:
            return None
        if latest not in _known:
            source, lost = torch.stack((memory["shown.p"], latest)).tolist()
            _known[latest] = cls(_share(source), _share(source - lost))
        found: Health = _known[latest]
        return found


_known = WeakIdKeyDictionary()  # what was read already, as long as a state has the tensor


def _share(number: float) -> float:
    return min(1.0, max(0.0, number))


def noted(before: Memory, after: Memory, moved: Tensor) -> Memory:
    """The averages with the mean of x of one more check."""
    old = before.get("moved", moved)
    return {**after, "moved": old + LATEST * (moved - old)}
