"""The guard: it asks the engine for the source model's predictions, and decides what follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fata.distributed.ranks import Ranks
from fata.guard.events import Event, Health, Phase, Watched
from fata.guard.evidence import CERTAIN, FEW, Evidence, compare, predictions
from fata.methods.base import in_range

log = logging.getLogger("fata.guard")

ONE_BATCH = 0.5  # most log odds of a gain by one batch: its images are not independent
FAILED = "%d failures: nothing is learned until reset(); adapter.guard.events says when"
LATEST = 400  # events that are kept: more would make the state of a ResNet-50 over 650 KiB


@dataclass(frozen=True)
class Guard:
    """When to check, what is too much, and what follows.

    Args:
        every: most batches between two checks against the source model,
        part: of which no more pass than this part of the batches before: the first come soon.
        rows: images that the averages are over.
        bet: k, what is bet on an image; see `fata.guard.evidence`.
        level: of the odds of harm that puts the adapted model aside.
        real: above it, a correlation or a difference of confidences is taken to be real.
        trial: images that the source model predicts before an adapted one that still does harm
            restarts; once in so many the batch's statistics are judged without doubt.
        slower: factor of the rate when it does.
        patience: restarts before the model rests.
    """

    every: int = 16
    part: float = 0.125
    rows: int = 448
    bet: float = 0.3
    level: float = 0.1
    real: float = 0.3
    trial: int = 2048
    slower: float = 0.1
    patience: int = 3

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        for name, least in (("every", 1), ("rows", 1), ("trial", 0), ("patience", 0)):
            in_range(self, name, least, whole=True)
        for name in ("part", "bet", "level", "real", "slower"):
            in_range(self, name, 0, 1)

    def limit(self, images: int = 0) -> float:
        """The log odds at which something follows; each `rows` images are one more chance."""
        return math.log(max(1.0, images / self.rows) / self.level) if self.level else math.inf


# In a phase, the first of its conditions that holds decides: the action, and the next phase.
TRANSITIONS: tuple[tuple[Phase, Callable[[Guard, Watched], bool], str, Phase], ...] = (
    (Phase.ADAPTING, lambda g, w: w.harm > g.limit(w.images), "aside", Phase.ASIDE),
    (Phase.ASIDE, lambda g, w: w.gain > g.limit(), "trusted", Phase.ADAPTING),
    (Phase.ASIDE, lambda g, w: _failed(g, w) and w.failures < g.patience, "back", Phase.ASIDE),
    (Phase.ASIDE, lambda g, w: _failed(g, w), "rest", Phase.REST),
)


def _failed(guard: Guard, watched: Watched) -> bool:
    return watched.aside >= guard.trial and watched.harm > guard.limit(watched.images)


class Engine(Protocol):
    """What a guard uses of an engine."""

    state: Any  # all that changes while a model adapts
    source_model: Any  # the source weights, in their place for a pass

    @property
    def group(self) -> Ranks:
        """The ranks that share every batch."""


class Watch:
    """A guard at work on one engine."""

    def __init__(self, guard: Guard, engine: Engine) -> None:
        self.guard, self._engine = guard, engine

    def __repr__(self) -> str:
        return f"Watch({self.phase}, {len(self.events)} events)"

    @property
    def _watched(self) -> Watched:
        watched: Watched = self._engine.state.watched
        return watched

    @property
    def events(self) -> list[Event]:
        """What was done so far, the latest 400."""
        return list(self._watched.events)

    @property
    def phase(self) -> str:
        """`adapting`; `aside`: the source model predicts; `rest`: and nothing is learned."""
        return str(self._watched.phase)

    @property
    def resting(self) -> bool:
        """Whether the guard has given up: the source model predicts, and nothing is learned."""
        return self._watched.phase is Phase.REST

    @property
    def health(self) -> Health | None:
        """Estimated accuracies, as of the last check; None: there was none yet."""
        return self._watched.health

    def see(self, images: Tensor, logits: Tensor) -> Tensor:
        """After a batch was learned from: check, if it is time to. Returns what is predicted."""
        engine, watched, rows = self._engine, self._watched, self._engine.group.rows(len(images))
        if not self.resting:
            watched.since, watched.images = watched.since + 1, watched.images + rows
        if self.resting or not (watched.source_predicts or self._due(rows)):
            return logits  # at rest the engine predicted with the source weights
        turn, latest = max(1, self.guard.trial // rows), engine.state.guard.get("latest", ())
        judged = len(latest) < self.guard.rows or watched.since // turn > watched.last // turn
        judged = judged or watched.source_predicts or watched.harm > 0
        watched.last = watched.since
        source: Tensor = engine.source_model.predict(images, engine.state)
        beside = engine.source_model.beside(images, engine.state) if judged else None
        found = self._compared(source, logits, beside)
        first = watched.since == 1 and not watched.source_predicts
        few = first and beside is not None and rows < FEW
        watched.harm = max(0.0, watched.harm + found.harm + CERTAIN * few)
        watched.gain = max(0.0, watched.gain + min(ONE_BATCH, found.gain))
        watched.aside += rows if watched.source_predicts else 0
        self._decide()
        if watched.source_predicts:
            return source
        if watched.gain > self.guard.limit() or not self.guard.level:
            return logits
        worse = found.worse[engine.group.place(len(logits))[1]]
        engine.state.count(kept=int(worse.sum()))
        return source.where(worse[:, None].to(logits.device), logits)

    def _due(self, rows: int) -> bool:
        """Whether the batch is compared; of small ones more are, for as many images."""
        guard, watched = self.guard, self._watched
        most = min(guard.every, max(guard.every // 4, guard.every * rows // FEW))
        return watched.since - watched.last >= min(most, max(1, int(guard.part * watched.since)))

    def _compared(self, source: Tensor, logits: Tensor, beside: Tensor | None) -> Evidence:
        """What this batch shows, which is kept."""
        state, guard = self._engine.state, self.guard
        known = state.guard["latest"].cpu() if "latest" in state.guard else None
        now = predictions(source, logits, beside, self._engine.group)  # a wait for the device
        found = compare(known, now, source.shape[1], guard.rows, guard.bet, guard.real)
        state.guard = {**state.guard, "latest": found.latest.to(source.device)}
        state.watched.health = found.health
        return found

    def _decide(self) -> None:
        """The first transition that the odds call for."""
        watched, guard, state = self._watched, self.guard, self._engine.state
        called = (row for row in TRANSITIONS if row[0] is watched.phase and row[1](guard, watched))
        _, _, action, phase = next(called, (None, None, "", None))
        if phase is None:
            return
        odds = watched.gain if phase is Phase.ADAPTING else watched.harm
        if watched.source_predicts and phase is not Phase.ADAPTING:  # it begins again, slower
            watched.failures, watched.scale = watched.failures + 1, watched.scale * guard.slower
            watched.since = watched.last = watched.images = 0
            self._engine.source_model.restart(state)
        event = Event(state.batches + 1, action, round(odds, 2), watched.scale)
        watched.events[:] = [*watched.events, event][-LATEST:]
        watched.phase, watched.harm, watched.gain, watched.aside = phase, 0.0, 0.0, 0
        if phase is Phase.REST:
            log.warning(FAILED, watched.failures)
