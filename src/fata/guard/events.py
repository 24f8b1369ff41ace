"""What the guard did, estimates and keeps: its part of an adapter's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Who predicts, and whether anything is learned."""

    ADAPTING = "adapting"  # the adapted model predicts
    ASIDE = "aside"  # the source model predicts, and the adapted one learns
    REST = "rest"  # the source model predicts, and nothing is learned


@dataclass(frozen=True)
class Event:
    """What the guard did: `aside`, `trusted`, `back` or `rest`; see `policy.TRANSITIONS`."""

    batch: int  # after which
    action: str
    odds: float  # log odds of harm (`trusted`: of a gain) that led to it
    rate: float  # factor of the rate from now on


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


@dataclass
class Watched:
    """What the guard keeps beside its averages; part of the adapter's state."""

    phase: Phase = Phase.ADAPTING
    since: int = 0  # batches since the start, or since the last rollback
    images: int = 0  # in them
    last: int = 0  # batches at the last check
    aside: int = 0  # predictions of the source model since it was put aside
    harm: float = 0.0  # log odds, since they were last in favour of the adapted model
    gain: float = 0.0  # log odds, since they were last against it
    failures: int = 0
    scale: float = 1.0  # of the rate
    health: Health | None = None  # as of the last check; None: there was none
    events: list[Event] = field(default_factory=list)

    @property
    def source_predicts(self) -> bool:
        """Whether the source model predicts."""
        return self.phase is not Phase.ADAPTING

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Watched:
        """From a dictionary of all fields, as JSON has them."""
        health = Health(**packed["health"]) if packed["health"] else None
        events = [Event(**event) for event in packed["events"]]
        changed = {"phase": Phase(packed["phase"]), "health": health, "events": events}
        return cls(**{**packed, **changed})
