"""What the guard did and keeps: events, its part of the state, snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from fata.methods.base import Memory


@dataclass(frozen=True)
class Event:
    """What the guard did, and why.

    Actions: `aside`: falls back to the source model while the adapted one learns; `trusted`: the
    adapted model predicts again; `even`: falls back to the source model, whose predicted classes
    are balanced; `uneven`: the adapted model predicts again; `back`: rolled back to a snapshot, and
    the source model predicts until it is `trusted`; `rest`: stays at the source weights; `restart`:
    from the source weights, after a long time; `running`: the source model with its
    running statistics, since the batch's do harm; `batch`: with the batch's again.
    """

    batch: int  # after which
    sign: str
    value: float
    doubt: float
    action: str
    to: int  # the batch after which the snapshot was taken that was restored; 0: the source
    rate: float  # factor of the rate from now on


@dataclass
class Watched:
    """What the guard keeps beside its averages; part of the adapter's state."""

    since: int = 0  # batches since the start, or since the last rollback
    last: int = 0  # of them, at the last check
    answers: int = 0  # predictions since the model was its source
    aside: int | None = None  # predictions of the source model while the adapted one learns
    trusted: int = 0  # times that the adapted model was, since the last rollback
    scale: float = 1.0  # of the rate
    failures: int = 0
    resting: bool = False
    running: bool = False  # the model predicts with its running statistics
    mixed: int = 0  # predictions since then, in a row, of batches of many classes
    even: bool = False  # the source predicts: its classes are balanced, and S shows no gain
    events: list[Event] = field(default_factory=list)

    @property
    def source_predicts(self) -> bool:
        """Whether the source model predicts while the adapted one learns."""
        return self.aside is not None or self.even

    @property
    def phase(self) -> str:
        """`adapting`, or the action in force: `aside`, `even`, `running`, `rest`."""
        if self.resting:
            return "rest"
        if self.running:
            return "running"
        if self.aside is not None:
            return "aside"
        return "even" if self.even else "adapting"

    def pack(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Watched:
        """What `pack` gave."""
        return cls(**{**packed, "events": [Event(**event) for event in packed["events"]]})


@dataclass(frozen=True)
class Snapshot:
    """A state to roll back to."""

    narrowing: float
    batch: int
    theta: Tensor
    host: Memory
    plus: Memory
