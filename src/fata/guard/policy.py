"""The guard: checks for harm, falls back to the source model, rolls back.

`evidence.py` has the statistics. A model under suspicion continues to learn while the source model
predicts: many a host collapses a little as it begins, and recovers. It is rolled back if it does
not, and predicts again only once it is significantly better, or if it has been neither better nor
worse for so long that it restarts from the source weights.

If the source's predicted-class distribution is as balanced as it can be, S can show no gain, nor
slow harm; and a model that is not confused has little to gain. There the source model predicts.

BatchNorm is checked twice: the adapted model against the source weights with the batch's
statistics, and those against the source model with its running ones, for batches too small or too
uniform to normalise with. While those do harm, every batch is judged together with the 64 latest
predictions: one of many classes, whose statistics do none, is predicted with them.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fata.distributed.ranks import Ranks
from fata.guard import evidence
from fata.guard.events import Event, Snapshot, Watched
from fata.guard.evidence import Alarm, Evidence, latest_shares
from fata.methods.base import Learned, Memory, in_range
from fata.network.parameters import Theta

log = logging.getLogger("fata.guard")

EARLY = range(1, 8)  # batches after which the first checks are
AGAIN = 2  # times as many predictions on trial each time that the model had passed and failed
SETTLED = 256  # batches after which checks come half as often;
SOONER = 64  # with BatchNorm, of whose slow harm S shows little, and its
RARELY = 4  # statistics are checked in every fourth of them
LATEST = 400  # events that are kept: more would make the state of a ResNet-50 over 600 KiB
LONG = 8  # times `rows` predictions without a majority, before the batch's statistics are retried


@dataclass(frozen=True)
class Guard:
    """When to check, what is too much, and what follows.

    Args:
        every: batches between two checks against the source model, half as often once 256 (64 with
            BatchNorm) went well; the first come sooner, as do checks of small batches, and when
            one class is predicted ever more often.
        rows: predictions that a statistic is averaged over to see what happens slowly.
        narrowing: the S, less its margin of error, above which the model is rolled back.
        neglect: the N, less its margin of error, above which it is.
        even: the share of ln C missing in H(n0), corrected for sampling, below which the source
            model predicts, until S is significantly below 0. 0: it does not. Not with BatchNorm.
        trial: predictions of the source model before the adapted one is rolled back, while it
            continues to learn: it predicts again if the statistic is significantly below 0. 0: it
            is rolled back at once. Then, too, the source model predicts until it is.
        ring: snapshots kept, of checks with S significantly below 0; the source is always one.
        slower: factor of the rate after a rollback.
        patience: rollbacks before it stays at the source weights.
        term: predictions after which a model restarts from the source weights, unless S is
            significantly below 0: slow harm without a loss of class balance cannot be detected.
    """

    every: int = 8
    rows: int = 448
    narrowing: float = 0.003
    neglect: float = 0.01
    even: float = 0.006
    trial: int = 2048
    ring: int = 4
    slower: float = 0.1
    patience: int = 3
    term: int = 16_384

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        for name in ("every", "rows", "ring", "term"):
            in_range(self, name, 1, whole=True)
        for name in ("trial", "patience"):
            in_range(self, name, 0, whole=True)
        for name in ("narrowing", "neglect", "even", "slower"):
            in_range(self, name, 0, 1)


class Adapting(Learned, Protocol):
    """The state of a model that a guard watches."""

    batches: int
    plus: Memory
    guard: Memory
    watched: Watched


class Engine(Protocol):
    """What a guard uses: the model at the source weights, and its state."""

    theta: Theta

    @property
    def source(self) -> Tensor:
        """The parameters before the first batch."""

    @property
    def group(self) -> Ranks:
        """The ranks that share every batch."""

    @property
    def coupled(self) -> bool:
        """Whether the rows of a batch see each other, by BatchNorm."""

    @property
    def batch_statistics(self) -> bool:
        """Whether BatchNorm normalises with the batch at hand alone."""

    @property
    def state(self) -> Adapting:
        """All that changes while a model adapts."""

    def predict(self, images: Tensor, running: bool = False) -> Tensor:
        """Logits without a gradient; with `running` of BatchNorm's running statistics."""

    def counted_apart(self) -> AbstractContextManager[Any]:
        """What is counted inside is not the state's."""


class Watch:
    """A guard at work on one engine."""

    def __init__(self, guard: Guard, engine: Engine) -> None:
        self.guard, self._engine = guard, engine
        self._ring: deque[Snapshot] = deque(maxlen=guard.ring)
        self._alarm = Alarm()

    def __repr__(self) -> str:
        resting = ", resting" if self.resting else ""
        return (
            f"Watch(a check every {self.guard.every} batches, {len(self.events)} events{resting})"
        )

    @property
    def events(self) -> list[Event]:
        """What was done so far, the latest 400."""
        return list(self._engine.state.watched.events)

    @property
    def resting(self) -> bool:
        """Whether the guard has given up: the source model predicts, and nothing is learned."""
        return self._engine.state.watched.resting

    @property
    def phase(self) -> str:
        """`adapting`, or the action in force: `aside`, `even`, `running`, `rest`."""
        return self._engine.state.watched.phase

    def forget(self) -> None:
        """Drop all snapshots."""
        self._ring.clear()

    @property
    def states(self) -> tuple[Snapshot, ...]:
        """The snapshots, beside the source."""
        return tuple(self._ring)

    @states.setter
    def states(self, states: tuple[Snapshot, ...]) -> None:
        self._ring = deque(states, self.guard.ring)

    def see(self, images: Tensor, logits: Tensor) -> Tensor:
        """After a batch was learned from: check, if it is time to. Returns what is predicted."""
        state, group, coupled = self._engine.state, self._engine.group, self._engine.coupled
        watched = state.watched
        batch_statistics = self._engine.batch_statistics
        if watched.resting and not batch_statistics:
            return logits
        rows = group.rows(len(images))
        interval = min(self.guard.every, max(2, self.guard.every * rows // evidence.BRIEF))
        settled = watched.since > (SOONER if coupled else SETTLED)
        interval *= 2 if settled else 1
        since, alarmed = watched.since, self._alarm.read(state.guard.get("latest"))
        due = since in EARLY or bool(since and not since % interval)
        due = due or (alarmed and since - watched.last > 1)
        state.guard = {
            **state.guard,
            "latest": latest_shares(state.guard.get("latest"), logits, group),
        }
        self._alarm.write(state.guard["latest"])
        watched.since += 1
        watched.answers += rows
        adapted = (due or watched.source_predicts) and not watched.resting
        statistics = batch_statistics and due and (not settled or not since % (RARELY * interval))
        statistics = statistics or watched.running
        if not adapted and not statistics:
            return logits
        watched.last = since
        source = self._source_logits(images)
        predicted = self._check_statistics(images, logits, source) if statistics else None
        if predicted is None:
            predicted = self._check(logits, source, due) if adapted else logits
        return predicted

    def _check_statistics(self, images: Tensor, logits: Tensor, source: Tensor) -> Tensor | None:
        """Check what BatchNorm normalises with; the logits to return if the batch's do harm."""
        watched = self._engine.state.watched
        own = logits if watched.running else self._source_logits(images, running=True)
        sign = self._compare("statistics", own, source)
        if watched.running:
            rows = self._engine.group.rows(len(images))
            watched.mixed = watched.mixed + rows if sign.mixed else 0
            if self._mixed_again(sign):
                self._normalise(sign, running=False)
            return source if sign.mixed else own
        if sign.excess > 0:
            self._normalise(sign, running=True)
            return own
        return None

    def _check(self, logits: Tensor, source: Tensor, due: bool) -> Tensor:
        """Check the adapted model; returns the logits to return.

        A check that is not `due` happens only because the source model predicts; ever more of them
        would find harm by chance.
        """
        engine, watched = self._engine, self._engine.state.watched
        sign = self._compare("adapted", source, logits)
        if watched.aside is not None:
            watched.aside += engine.group.rows(len(logits))
            return logits if self._trusted(sign) else source
        even = sign.lacking < self.guard.even and not sign.good and not engine.coupled
        if sign.excess > 0 and (due or not even):
            self._suspect(sign)
            return source
        if sign.good and sign.name == "narrowing":
            state = engine.state
            here = Snapshot(sign.value, state.batches + 1, state.theta, state.host, state.plus)
            self._ring.append(here)
        elif watched.answers >= self.guard.term:
            self._go(self._source, sign, "restart")
        if even != watched.even:
            watched.even = even
            lacking = replace(sign, name="lacking", value=sign.lacking, margin=0.0)
            self._note(sign if sign.good else lacking, "even" if even else "uneven")
        return source if even else logits

    def _suspect(self, sign: Evidence) -> None:
        if not self.guard.trial:
            self._roll_back(sign)
            return
        watched = self._engine.state.watched
        watched.aside, watched.even = 0, False
        self._note(sign, "aside")
        if sign.name == "neglect":
            self._ring.clear()

    def _trusted(self, sign: Evidence) -> bool:
        """Whether a model on trial predicts again; if it fails it is rolled back."""
        watched = self._engine.state.watched
        assert watched.aside is not None
        needed = min(evidence.LEAST, self.guard.trial) * AGAIN**watched.trusted
        if sign.good and watched.aside >= needed:
            watched.aside = None
            watched.trusted += 1
            self._note(sign, "trusted")
            return True
        if watched.aside >= self.guard.trial:
            if sign.excess > 0:
                self._roll_back(sign)
            elif watched.answers >= self.guard.term and not sign.good:
                self._go(self._source, sign, "restart")
        return False

    def _mixed_again(self, sign: Evidence) -> bool:
        """Whether batches have long been of many classes, and their statistics do no harm."""
        state = self._engine.state
        if state.watched.mixed >= self.guard.rows:
            return True
        if sign.name == "neglect":
            state.guard = {}
            return False
        if sign.value >= 0:
            return False
        return bool(state.guard["statistics.many.rows"] >= LONG * self.guard.rows)

    def _source_logits(self, images: Tensor, running: bool = False) -> Tensor:
        """Logits of the source weights."""
        engine = self._engine
        engine.state.count(rows_source=len(images))
        with engine.counted_apart(), engine.theta.at(engine.source, back=engine.state.theta):
            return engine.predict(images, running)

    def _compare(self, name: str, source: Tensor, logits: Tensor) -> Evidence:
        """The worse of the evidence at once and over time; A, if it is harm and worse.

        A shows no gain: healthy models agree with their source more or less.
        """
        state = self._engine.state
        before = {n.removeprefix(f"{name}."): t for n, t in state.guard.items()}
        majority = evidence.over_half
        if name == "statistics":
            majority = evidence.batch_of_few_classes
        after, signs = evidence.compare(
            before, source, logits, self.guard.rows, majority, self._engine.group
        )
        state.guard = {**state.guard, **{f"{name}.{n}": after[n] for n in after}}
        # A wait for the device, at every check.
        few, *values, mixed, lacking = signs.tolist()
        kind, limit = "narrowing", self.guard.narrowing
        if few:
            kind, limit = "neglect", self.guard.neglect
        kinds = [(kind, limit)] * 2 + [("estrangement", 0.0)] * 2
        found = [
            Evidence(kind, value, doubt, limit, lacking, bool(mixed))
            for (kind, limit), value, doubt in zip(kinds, values[::2], values[1::2], strict=True)
        ]
        sign, apart = (max(two, key=lambda one: one.excess) for two in (found[:2], found[2:]))
        if name == "adapted" and self._engine.coupled and apart.excess > max(0, sign.excess):
            return apart
        return sign

    def _roll_back(self, sign: Evidence) -> None:
        """To the snapshot with the most balanced predictions; the source's S is 0."""
        state = self._engine.state
        watched = state.watched
        watched.failures += 1
        watched.resting = watched.failures > self.guard.patience
        if watched.resting:
            log.warning(
                "the guard has rolled the model back %d times: the source model predicts, and "
                "nothing is learned until reset(); adapter.guard.events says why",
                watched.failures,
            )
        watched.scale *= self.guard.slower
        good = self._source
        if sign.name == "narrowing" and not watched.resting:
            good = min((good, *self._ring), key=lambda snapshot: snapshot.narrowing)
        self._go(good, sign, "rest" if watched.resting else "back")
        watched.aside, watched.even = None if watched.resting else 0, False

    def _normalise(self, sign: Evidence, running: bool) -> None:
        """From now on with the running statistics, or with the batch's again."""
        self._engine.state.watched.running = running
        self._engine.state.watched.mixed = 0
        self._go(self._source, sign, "running" if running else "batch")

    @property
    def _source(self) -> Snapshot:
        return Snapshot(0.0, 0, self._engine.source, {}, {})

    def _go(self, good: Snapshot, sign: Evidence, action: str) -> None:
        self._note(sign, action, good.batch)
        state = self._engine.state
        watched = state.watched
        state.theta, state.velocity = good.theta, torch.zeros_like(good.theta)
        state.host, state.plus = good.host, good.plus
        state.guard = {n: t for n, t in state.guard.items() if n.startswith("adapted.long.")}
        watched.since = watched.last = 0
        watched.aside, watched.trusted = None, 0
        self._ring.clear()
        if good.batch:
            self._ring.append(good)
        else:
            watched.answers = 0
        self._engine.theta.write(state.theta)

    def _note(self, sign: Evidence, action: str, to: int = 0) -> None:
        state = self._engine.state
        here, scale = state.batches + 1, state.watched.scale
        event = Event(here, sign.name, sign.value, sign.margin, action, to, scale)
        state.watched.events[:] = [*state.watched.events, event][-LATEST:]
