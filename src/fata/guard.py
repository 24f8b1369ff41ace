"""The guard: looks for signs of a collapse that need no labels, and takes the model back.

    S  =  (H(n0) - H(n)) / ln C

n are the shares of the classes that the adapted model answers, n0 those of the source model for the
same images (some hundred of them), H their entropy. A model that adapts well spreads its answers
more evenly than a source model that the shift has confused: S < 0. One that goes wrong lets a class
take over: S > 0, long before it has collapsed. Where a stream really has few classes, the source
model sees that too. Of M images, on which the two agree but for a share d, S is known to about
sqrt(d / M) / ln C: what goes beyond one and a half times that is beyond doubt.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fata.method import Memory, in_range

if TYPE_CHECKING:
    from fata.engine import Engine

DOUBT = 1.5  # deviations of S


@dataclass(frozen=True)
class Guard:
    """When to look, what is too much, and what follows.

    Args:
        every: batches between two looks at the source model's answers; the first come sooner.
        rows: how many answers S is averaged over.
        narrowing: the S, beyond doubt, above which the model is taken back.
        ring: states of good looks that are kept to go back to; the source is always one.
        slower: factor of the rate after going back.
        patience: how often to try again before resting at the source.
    """

    every: int = 8
    rows: int = 448
    narrowing: float = 0.003
    ring: int = 4
    slower: float = 0.3
    patience: int = 3

    def __post_init__(self) -> None:
        """Refuse fields out of range."""
        for name in ("every", "rows", "ring"):
            in_range(self, name, 1, whole=True)
        in_range(self, "patience", 0, whole=True)
        in_range(self, "narrowing", 0, 1)
        in_range(self, "slower", 0, 1)


@dataclass(frozen=True)
class Event:
    """What the guard did, and why."""

    batch: int  # after which
    narrowing: float  # S
    doubt: float  # of it
    action: str  # "back" or "rest"
    to: int  # the batch after which the state was that it went back to; 0: the source
    rate: float  # factor of the rate from now on


@dataclass
class Watched:
    """What the guard remembers; part of the adapter's state."""

    since: int = 0  # batches since the start, or since it last went back
    rows: int = 0  # answers in the averages
    scale: float = 1.0  # of the rate
    failures: int = 0
    resting: bool = False
    events: list[Event] = field(default_factory=list)

    def pack(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Watched:
        """What `pack` gave."""
        return cls(**{**packed, "events": [Event(**event) for event in packed["events"]]})


@dataclass(frozen=True)
class Snapshot:
    """A state to go back to."""

    narrowing: float
    batch: int
    theta: Tensor
    host: Memory
    plus: Memory


class Watch:
    """A guard at work on one engine."""

    def __init__(self, guard: Guard, engine: Engine) -> None:
        self.guard, self._engine = guard, engine
        self._ring: deque[Snapshot] = deque(maxlen=guard.ring)

    @property
    def events(self) -> list[Event]:
        """What was done so far."""
        return list(self._engine.state.watched.events)

    @property
    def resting(self) -> bool:
        """Whether the guard has given up: the model answers as its source and learns no more."""
        return self._engine.state.watched.resting

    def forget(self) -> None:
        """Nothing to go back to but the source."""
        self._ring.clear()

    def see(self, images: Tensor, logits: Tensor) -> None:
        """After a batch was learned from: look, where it is time to."""
        watched = self._engine.state.watched
        if watched.resting:
            return
        due = watched.since in (1, 2, 4) or (watched.since and not watched.since % self.guard.every)
        watched.since += 1
        if due:
            self._look(images, logits)

    def _look(self, images: Tensor, logits: Tensor) -> None:
        state = self._engine.state
        narrowing, doubt = self._narrowing(images, logits)
        if narrowing > self.guard.narrowing + doubt:
            self._take_back(narrowing, doubt)
        else:
            here = Snapshot(narrowing, state.batches + 1, state.theta, state.host, state.plus)
            self._ring.append(here)

    def _narrowing(self, images: Tensor, logits: Tensor) -> tuple[float, float]:
        """S with this batch in it, and its doubt."""
        engine, watched = self._engine, self._engine.state.watched
        with engine.counted_apart(), engine.theta.at(engine.source, back=engine.state.theta):
            witness = engine.predict(images)
        engine.state.count(rows_witness=len(images))
        watched.rows += len(images)
        known = min(watched.rows, self.guard.rows)
        weight = min(1.0, max(2 / (1 + self.guard.rows / len(images)), len(images) / watched.rows))
        now = {
            "adapted": _shares(logits),
            "source": _shares(witness),
            "differ": (logits.argmax(1) != witness.argmax(1)).float().mean(),
        }
        before = engine.state.guard or now
        engine.state.guard = {n: torch.lerp(before[n], now[n], weight) for n in now}
        spread = [torch.special.entr(engine.state.guard[n]).sum() for n in ("source", "adapted")]
        # A wait for the device, at every look.
        source, adapted, differ = torch.stack([*spread, engine.state.guard["differ"]]).tolist()
        classes = math.log(logits.shape[1])
        return (source - adapted) / classes, DOUBT * math.sqrt(differ / known) / classes

    def _take_back(self, narrowing: float, doubt: float) -> None:
        """To the state whose answers were the most spread; the source's S is 0."""
        engine, state = self._engine, self._engine.state
        watched = state.watched
        source = Snapshot(0.0, 0, engine.source, {}, {})
        watched.failures += 1
        watched.resting = watched.failures > self.guard.patience
        watched.scale *= self.guard.slower
        good = source if watched.resting else min((source, *self._ring), key=lambda s: s.narrowing)
        action = "rest" if watched.resting else "back"
        watched.events.append(
            Event(state.batches + 1, narrowing, doubt, action, good.batch, watched.scale)
        )
        state.theta, state.velocity = good.theta, torch.zeros_like(good.theta)
        state.host, state.plus, state.guard = good.host, good.plus, {}
        watched.since = watched.rows = 0
        self._ring.clear()
        if good.batch:
            self._ring.append(good)
        engine.theta.write(state.theta)


def _shares(logits: Tensor) -> Tensor:
    """How large a share of the rows each class has."""
    counts = torch.zeros(logits.shape[1], device=logits.device)
    answers = logits.argmax(1)
    return counts.index_add_(0, answers, torch.ones_like(answers, dtype=counts.dtype)) / len(logits)
