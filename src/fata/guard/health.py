"""An estimate of accuracy without labels, from what the guard compares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Health:
    """Estimated accuracies on the images that were compared lately, from 0 to 1.

    The source's is its mean confidence. The adapted model loses the mean of x (`guard.evidence`):
    the share of images moved to classes predicted too often, less that taken from them.
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
