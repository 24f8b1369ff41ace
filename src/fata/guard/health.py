"""An estimate of accuracy without labels, from what the guard compares.

The source's accuracy is taken to be its mean confidence. What the adapted model loses is the mean
of x (see `evidence`): the share of images that it moved to frequent classes, less that of those
that it took from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fata.methods.base import Memory


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
        """What the guard keeps says; waits for the device."""
        latest = memory.get("latest")
        if latest is None or not len(latest):
            return None
        source = float(latest[:, 2].mean())
        return cls(source, min(1.0, max(0.0, source - float(memory["lost"]))))
