"""The guard: when to compare with the source model, and what follows.

    adapting  -- odds of harm; BatchNorm and a first batch of few images ------> aside
    aside     -- odds of gain, twice as long each time ------------------------> adapting
    aside     -- odds of harm after so many predictions: from the source ------> aside
                                                         for the fourth time --> rest

It asks the engine for the source model's predictions; the engine does what it decides.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fata.distributed.ranks import Ranks
from fata.guard.events import Event, Phase, Watched
from fata.guard.evidence import CERTAIN, compare, predictions
from fata.guard.health import Health
from fata.methods.base import in_range

log = logging.getLogger("fata.guard")

FEW = 32  # images; smaller batches are compared more often, and their statistics not trusted
ONE_BATCH = 0.5  # most log odds of a gain by one batch: its images are not independent
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
        real: above it, a correlation of frequency and confidence, or a difference of confidences,
            is taken to be real.
        trial: predictions of the source model before an adapted one that still does harm restarts.
        slower: factor of the rate when it does.
        patience: restarts before the model rests.
    """

    every: int = 16
    part: float = 0.125
    rows: int = 448
    bet: float = 0.3
    level: float = 0.1
    real: float = 0.25
    trial: int = 2048
    slower: float = 0.1
    patience: int = 3

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        for name in ("every", "rows"):
            in_range(self, name, 1, whole=True)
        for name in ("trial", "patience"):
            in_range(self, name, 0, whole=True)
        for name in ("part", "bet", "level", "real", "slower"):
            in_range(self, name, 0, 1)


class Engine(Protocol):
    """What a guard uses of an engine."""

    @property
    def group(self) -> Ranks:
        """The ranks that share every batch."""

    @property
    def state(self) -> Any:
        """All that changes while a model adapts."""

    @property
    def source_model(self) -> Any:
        """The source weights, in their place for a pass: `fata.engine.source_model`."""


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
        engine, watched = self._engine, self._watched
        rows = engine.group.rows(len(images))
        if watched.phase is Phase.REST:
            return logits  # the engine predicted with the source weights
        watched.since += 1
        if watched.phase is Phase.ADAPTING and not self._due(rows):
            return logits
        watched.last = watched.since
        source = engine.source_model.predict(images, engine.state)
        beside = engine.source_model.beside(images, engine.state)
        harm, gain = self._compare(source, logits, beside)
        if watched.since == 1 and beside is not None and rows < FEW:
            harm += CERTAIN
        watched.harm = max(0.0, watched.harm + harm)
        watched.gain = max(0.0, watched.gain + min(ONE_BATCH, gain))
        return logits if self._trusts(rows) else source

    def _due(self, rows: int) -> bool:
        """Whether the batch is compared; of small ones more are, for as many images."""
        guard, watched = self.guard, self._watched
        most = min(guard.every, max(guard.every // 4, guard.every * rows // FEW))
        return watched.since - watched.last >= min(most, max(1, int(guard.part * watched.since)))

    def _compare(
        self, source: Tensor, logits: Tensor, beside: Tensor | None
    ) -> tuple[float, float]:
        """Log odds of harm and gain by this batch alone."""
        state, guard = self._engine.state, self.guard
        known = state.guard.get("latest")
        now = predictions(source, logits, beside, self._engine.group)  # a wait for the device
        found = compare(
            None if known is None else known.cpu(), now, source.shape[1],
            guard.rows, guard.bet, guard.real,
        )  # fmt: skip
        state.guard = {**state.guard, "latest": found.latest.to(source.device)}
        state.watched.health = found.health
        return found.harm, found.gain

    def _trusts(self, rows: int) -> bool:
        """Whether the adapted model predicts, after what follows from the odds."""
        watched, guard = self._watched, self.guard
        limit = math.log(1 / guard.level) if guard.level else math.inf
        if not watched.source_predicts:
            if watched.harm > limit:
                self._go(Phase.ASIDE, "aside", watched.harm)
        else:
            watched.aside += rows
            if watched.gain > limit * 2**watched.trusted:
                watched.trusted += 1
                self._go(Phase.ADAPTING, "trusted", watched.gain)
            elif watched.aside >= guard.trial and watched.harm > limit:
                self._restart()
        return not watched.source_predicts

    def _restart(self) -> None:
        """The adapted model begins again at the source weights, slower; or it rests."""
        watched, guard = self._watched, self.guard
        watched.failures, watched.scale = watched.failures + 1, watched.scale * guard.slower
        if watched.failures > guard.patience:
            self._go(Phase.REST, "rest", watched.harm)
            log.warning(
                "the adapted model has failed %d times: the source model predicts, and nothing is "
                "learned until reset(); adapter.guard.events says when",
                watched.failures,
            )
        else:
            self._go(Phase.ASIDE, "back", watched.harm)
        self._engine.source_model.restart(self._engine.state)
        watched.since = watched.last = watched.trusted = 0

    def _go(self, phase: Phase, action: str, odds: float) -> None:
        watched = self._watched
        event = Event(self._engine.state.batches + 1, action, round(odds, 2), watched.scale)
        watched.events[:] = [*watched.events, event][-LATEST:]
        watched.phase, watched.harm, watched.gain, watched.aside = phase, 0.0, 0.0, 0
