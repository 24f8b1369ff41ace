"""The guard: looks for signs of harm that need no labels, lets the source answer, goes back.

The source model answers some of the same images and is the witness. n are the shares of the classes
that the adapted model answers, n0 those of the source model, H their entropy, C the classes:

    S  =  (H(n0) - H(n)) / ln C     narrowing
    N  =  n0[c] - n[c]              neglect, where over half of the source's answers are one class c

A model that adapts well spreads its answers more evenly than a source model that the shift has
confused: S < 0. One that goes wrong lets a class take over: S > 0, long before it has collapsed.
Where a stream really has few classes the source model sees that too; there a model that adapts well
answers the majority more often still (N < 0), and one that goes wrong clings to another class.
Of M images, on which the two agree but for a share d, either is known to about sqrt(d / M) (S: of
ln C): what goes beyond one and a half times that is beyond doubt.

A model in doubt goes on to learn while its source answers: many a host narrows as it begins, and
recovers. It is taken back if it does not, and answers again only once it has proved better, or
where it has proved nothing for so long that it begins anew.

Where the source's answers are as even as the classes can be, S shows no gain, for there is no room
for it, nor slow harm; and little is to be gained by a model that is not confused. There the source
answers.

BatchNorm, of whose harm S shows little, has a third sign. Source weights with the statistics of the
batch are hardly surer than they are right: a model that agrees with them on fewer images than they
are sure of has unlearned some. a is the share on which both agree, c0 how sure the source is:

    A  =  c0 - a                    estrangement

BatchNorm is watched twice: the adapted model by the source weights with the batch's statistics, and
those by the source model with its own, for batches too small or too uniform to normalise with.
While those do harm, every batch is judged, with the 64 latest answers: one of many classes, whose
statistics do none, is answered with them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fata._device import Deferred
from fata.distributed.ranks import SINGLE, Ranks
from fata.methods.base import Learned, Memory, in_range
from fata.methods.losses import entropy
from fata.network.parameters import Theta

log = logging.getLogger("fata.guard")

DOUBT = 1.5  # deviations of a sign
BRIEF = 64  # answers that a sign is averaged over to see what happens at once
ALARM = 0.4  # share of one class among the latest answers that calls for a look
EARLY = range(1, 8)  # batches after which the first looks are
LEAST = 384  # answers that the source gives in the adapted model's place before that is trusted,
AGAIN = 2  # times as many each time that it had been and failed
SETTLED = 256  # batches after which looks come half as often;
SOONER = 64  # with BatchNorm, of whose slow harm S shows little, and its
RARELY = 4  # statistics are looked at in every fourth of them
LATEST = 400  # events that are kept: more would make the state of a ResNet-50 over 600 KiB
ENOUGH = 10  # answers a class to tell how even they are,
LONG_RUN = 4  # over so many times `rows`
LONG = 8  # times `rows` answers without a majority, before those of the batch are tried again;
MIXED = 0.77  # of the most that H(n0) can be, above which a batch is of many classes:
MIXED_SURER = 0.05  # where the running ones are not so much surer, and S is not above 0 beyond
# doubt; `rows` such answers are enough
TWICE = 0.4, 0.05  # share that is a majority for BatchNorm's statistics, where the running ones are
LONGER = 0.3, 0.02  # so much surer: in two looks one after the other, or in the average of many;
UNSURE = 0.1  # where they are so much less sure than with the batch's, no share is


@dataclass(frozen=True)
class Guard:
    """When to look, what is too much, and what follows.

    Args:
        every: batches between two looks at the source model's answers, half as often once 256 (64
            with BatchNorm) went well; the first come sooner, as do looks at small batches, and at
            ever more answers of one class.
        rows: how many answers a sign is averaged over to see what happens slowly.
        narrowing: the S, beyond doubt, above which the model is taken back.
        neglect: the N, beyond doubt, above which it is.
        even: the share of ln C missing in H(n0), beside what chance takes, below which the source
            answers, until S is below 0 beyond doubt. 0: it does not. Not with BatchNorm.
        trial: answers that the source gives before the model is taken back, while it goes on to
            learn: it is trusted again where the sign is below 0 beyond doubt. 0: it is taken back
            at once. Then, too, the source answers until it is.
        ring: states kept to go back to, of looks with S below 0 beyond doubt; the source is
            always one.
        slower: factor of the rate after going back.
        patience: how often to try again before resting at the source.
        term: answers after which a model begins anew at the source, unless S is below 0 beyond
            doubt: slow harm that narrows nothing shows in no sign.
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
        """Refuse fields out of range."""
        for name in ("every", "rows", "ring", "term"):
            in_range(self, name, 1, whole=True)
        for name in ("trial", "patience"):
            in_range(self, name, 0, whole=True)
        for name in ("narrowing", "neglect", "even", "slower"):
            in_range(self, name, 0, 1)


@dataclass(frozen=True)
class Sign:
    """How far two models' answers are apart, in the way that means harm."""

    name: str  # "narrowing", "neglect" or "estrangement"
    value: float
    doubt: float
    limit: float
    lacking: float = 1.0  # of ln C in H(n0), beside what chance takes: how uneven the witness is
    mixed: bool = False  # whether the latest answers are of many classes, by the witness

    @property
    def excess(self) -> float:
        """How far it is beyond doubt; above 0 it is harm."""
        return self.value - self.doubt - self.limit

    @property
    def good(self) -> bool:
        """Below 0 beyond doubt: the adapted model is better."""
        return self.value < -self.doubt


@dataclass(frozen=True)
class Event:
    """What the guard did, and why.

    Actions: `aside`: the source answers while the adapted model learns; `trusted`: it answers
    again; `even`: the source answers, whose answers are; `uneven`: the adapted model answers again;
    `back` to an earlier state, the source answers until it is trusted; `rest` at the source
    weights; `anew` from them, after a long time, and answers at once; `running`, the source model
    with its running statistics, where the batch's do harm; `batch`, to the batch's again.
    """

    batch: int  # after which
    sign: str
    value: float
    doubt: float
    action: str
    to: int  # the batch after which the state was that it went back to; 0: the source
    rate: float  # factor of the rate from now on


@dataclass
class Watched:
    """What the guard remembers beside its averages; part of the adapter's state."""

    since: int = 0  # batches since the start, or since it last went back
    last: int = 0  # of them, when it last looked
    answers: int = 0  # since the model was its source
    aside: int | None = None  # answers that the source has given while the model learns
    trusted: int = 0  # times that the model was, since it last went back
    scale: float = 1.0  # of the rate
    failures: int = 0
    resting: bool = False
    running: bool = False  # the model answers with its running statistics
    mixed: int = 0  # answers since then, one after the other, for batches of many classes
    even: bool = False  # the source answers: its answers are even, and the model has proved nothing
    events: list[Event] = field(default_factory=list)

    @property
    def source_answers(self) -> bool:
        """Whether the source does while the model learns."""
        return self.aside is not None or self.even

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

    @property
    def events(self) -> list[Event]:
        """What was done so far, the latest 400."""
        return list(self._engine.state.watched.events)

    @property
    def resting(self) -> bool:
        """Whether the guard has given up: the model answers as its source and learns no more."""
        return self._engine.state.watched.resting

    def forget(self) -> None:
        """Nothing to go back to but the source."""
        self._ring.clear()

    @property
    def states(self) -> tuple[Snapshot, ...]:
        """What it could go back to, beside the source."""
        return tuple(self._ring)

    @states.setter
    def states(self, states: tuple[Snapshot, ...]) -> None:
        self._ring = deque(states, self.guard.ring)

    def see(self, images: Tensor, logits: Tensor) -> Tensor:
        """After a batch was learned from: look, where it is time to. Returns what is answered."""
        state, group, coupled = self._engine.state, self._engine.group, self._engine.coupled
        watched = state.watched
        if watched.resting and not coupled:
            return logits
        rows = group.rows(len(images))
        interval = min(self.guard.every, max(2, self.guard.every * rows // BRIEF))
        settled = watched.since > (SOONER if coupled else SETTLED)
        interval *= 2 if settled else 1
        since, alarmed = watched.since, self._alarm.read(state.guard.get("latest"))
        due = since in EARLY or bool(since and not since % interval)
        due = due or (alarmed and since - watched.last > 1)
        state.guard = {**state.guard, "latest": _latest(state.guard.get("latest"), logits, group)}
        self._alarm.write(state.guard["latest"])
        watched.since += 1
        watched.answers += rows
        adapted = (due or watched.source_answers) and not watched.resting
        statistics = coupled and due and (not settled or not since % (RARELY * interval))
        statistics = statistics or watched.running
        if not adapted and not statistics:
            return logits
        watched.last = since
        witness = self._witness(images)
        answered = self._look_at_statistics(images, logits, witness) if statistics else None
        if answered is None:
            answered = self._look(logits, witness, due) if adapted else logits
        return answered

    def _look_at_statistics(self, images: Tensor, logits: Tensor, witness: Tensor) -> Tensor | None:
        """At what BatchNorm normalises with; what is answered, where the batch's do harm."""
        watched = self._engine.state.watched
        own = logits if watched.running else self._witness(images, running=True)
        sign = self._compare("statistics", own, witness)
        if watched.running:
            rows = self._engine.group.rows(len(images))
            watched.mixed = watched.mixed + rows if sign.mixed else 0
            if self._mixed_again(sign):
                self._normalise(sign, running=False)
            return witness if sign.mixed else own
        if sign.excess > 0:
            self._normalise(sign, running=True)
            return own
        return None

    def _look(self, logits: Tensor, witness: Tensor, due: bool) -> Tensor:
        """At the adapted model; returns what is answered.

        A look that is not `due` is there since the source answers; ever more of them would find
        harm by chance, where none is done.
        """
        engine, watched = self._engine, self._engine.state.watched
        sign = self._compare("adapted", witness, logits)
        if watched.aside is not None:
            watched.aside += engine.group.rows(len(logits))
            return logits if self._trusted(sign) else witness
        even = sign.lacking < self.guard.even and not sign.good and not engine.coupled
        if sign.excess > 0 and (due or not even):
            self._doubt(sign)
            return witness
        if sign.good and sign.name == "narrowing":
            state = engine.state
            here = Snapshot(sign.value, state.batches + 1, state.theta, state.host, state.plus)
            self._ring.append(here)
        elif watched.answers >= self.guard.term:
            self._go(self._source, sign, "anew")
        if even != watched.even:
            watched.even = even
            lacking = replace(sign, name="lacking", value=sign.lacking, doubt=0.0)
            self._note(sign if sign.good else lacking, "even" if even else "uneven")
        return witness if even else logits

    def _doubt(self, sign: Sign) -> None:
        if not self.guard.trial:
            self._take_back(sign)
            return
        watched = self._engine.state.watched
        watched.aside, watched.even = 0, False
        self._note(sign, "aside")
        if sign.name == "neglect":
            self._ring.clear()

    def _trusted(self, sign: Sign) -> bool:
        """Whether a model on trial answers again; if it fails it is taken back."""
        watched = self._engine.state.watched
        assert watched.aside is not None
        if sign.good and watched.aside >= min(LEAST, self.guard.trial) * AGAIN**watched.trusted:
            watched.aside = None
            watched.trusted += 1
            self._note(sign, "trusted")
            return True
        if watched.aside >= self.guard.trial:
            if sign.excess > 0:
                self._take_back(sign)
            elif watched.answers >= self.guard.term and not sign.good:
                self._go(self._source, sign, "anew")
        return False

    def _mixed_again(self, sign: Sign) -> bool:
        """Whether batches have been of many classes for long, and their statistics do no harm."""
        state = self._engine.state
        if state.watched.mixed >= self.guard.rows:
            return True
        if sign.name == "neglect":
            state.guard = {}
            return False
        if sign.value >= 0:
            return False
        return bool(state.guard["statistics.many.rows"] >= LONG * self.guard.rows)

    def _witness(self, images: Tensor, running: bool = False) -> Tensor:
        """What the source weights answer."""
        engine = self._engine
        engine.state.count(rows_source=len(images))
        with engine.counted_apart(), engine.theta.at(engine.source, back=engine.state.theta):
            return engine.predict(images, running)

    def _compare(self, name: str, witness: Tensor, logits: Tensor) -> Sign:
        """The worse of the sign at once and the sign over time; A, where it is harm and worse.

        It proves no gain: healthy models agree with their source more or less.
        """
        state = self._engine.state
        before = {n.removeprefix(f"{name}."): t for n, t in state.guard.items()}
        majority = _of_the_batch if name == "statistics" else _over_half
        after, signs = compare(
            before, witness, logits, self.guard.rows, majority, self._engine.group
        )
        state.guard = {**state.guard, **{f"{name}.{n}": after[n] for n in after}}
        # A wait for the device, at every look.
        few, *values, mixed, lacking = signs.tolist()
        kind, limit = "narrowing", self.guard.narrowing
        if few:
            kind, limit = "neglect", self.guard.neglect
        kinds = [(kind, limit)] * 2 + [("estrangement", 0.0)] * 2
        found = [
            Sign(kind, value, doubt, limit, lacking, bool(mixed))
            for (kind, limit), value, doubt in zip(kinds, values[::2], values[1::2], strict=True)
        ]
        sign, apart = (max(two, key=lambda one: one.excess) for two in (found[:2], found[2:]))
        if name == "adapted" and self._engine.coupled and apart.excess > max(0, sign.excess):
            return apart
        return sign

    def _take_back(self, sign: Sign) -> None:
        """To the state whose answers were the most spread; the source's S is 0."""
        state = self._engine.state
        watched = state.watched
        watched.failures += 1
        watched.resting = watched.failures > self.guard.patience
        if watched.resting:
            log.warning(
                "the guard has taken the model back %d times: it rests at the source weights and "
                "learns no more, until reset(); adapter.guard.events says why",
                watched.failures,
            )
        watched.scale *= self.guard.slower
        good = self._source
        if sign.name == "narrowing" and not watched.resting:
            good = min((good, *self._ring), key=lambda snapshot: snapshot.narrowing)
        self._go(good, sign, "rest" if watched.resting else "back")
        watched.aside, watched.even = None if watched.resting else 0, False

    def _normalise(self, sign: Sign, running: bool) -> None:
        """From now on with the running statistics, or with the batch's again."""
        self._engine.state.watched.running = running
        self._engine.state.watched.mixed = 0
        self._go(self._source, sign, "running" if running else "batch")

    @property
    def _source(self) -> Snapshot:
        return Snapshot(0.0, 0, self._engine.source, {}, {})

    def _go(self, good: Snapshot, sign: Sign, action: str) -> None:
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

    def _note(self, sign: Sign, action: str, to: int = 0) -> None:
        state = self._engine.state
        here, scale = state.batches + 1, state.watched.scale
        event = Event(here, sign.name, sign.value, sign.doubt, action, to, scale)
        state.watched.events[:] = [*state.watched.events, event][-LATEST:]


class Alarm:
    """Whether one class fills the latest answers; read a batch later, so that nobody waits."""

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._most: Deferred | None = None

    def __deepcopy__(self, memo: object) -> Alarm:
        """Written anew when it is read: what is on its way would arrive here."""
        return Alarm()

    def write(self, latest: Tensor) -> None:
        """These are the shares now."""
        self._of, self._most = latest, Deferred(latest.amax())

    def read(self, latest: Tensor | None) -> bool:
        """Whether these shares, of the batch before, call for a look."""
        if latest is None:
            return False
        if latest is not self._of:
            self.write(latest)
        assert self._most is not None
        return self._most.read() > ALARM


def _over_half(brief: Memory, before: Memory) -> Tensor:
    """Whether the witness has a majority."""
    return brief["brief.source"].amax() > 0.5


def _of_the_batch(brief: Memory, before: Memory) -> Tensor:
    """The same of running statistics: a shift, too, makes them answer one class, but less surely.

    With a batch of one class it is the batch's statistics that make a model unsure.
    """
    share, surer = brief["brief.source"].amax(), brief["brief.surer"]
    majority = (share > 0.5) & (surer > -UNSURE)
    if "many.surer" not in before:
        return majority
    twice = _likely(brief, "brief", *TWICE) & _likely(before, "brief", *TWICE)
    longer = _likely(before, "many", *LONGER) & (before["many.rows"] >= LEAST)
    return majority | twice | longer


def _likely(averages: Memory, window: str, share: float, surer: float) -> Tensor:
    top = averages[f"{window}.source"].amax()
    return (top > share) & (averages[f"{window}.surer"] > surer)


def compare(
    before: Memory,
    witness: Tensor,
    logits: Tensor,
    rows: int,
    majority: Callable[[Memory, Memory], Tensor] = _over_half,
    group: Ranks = SINGLE,
) -> tuple[Memory, Tensor]:
    """What two models answer for the same images, added to the averages; what they show.

    `majority` says whether it is one class, by the averages of the latest answers and those before.

    Returns:
        the averages, and: whether the witness has a majority class; a sign at once and its doubt,
        the sign over some `rows` and its doubt (N where there is a majority, else S); the same of
        A; whether the latest answers are of many classes; what the witness's lack to be even, a
        share of ln C.
    """
    classes = math.log(logits.shape[1])
    theirs, ours = _answers(witness), _answers(logits)
    now = {
        "source": _shares(theirs, witness, group),
        "adapted": _shares(ours, logits, group),
        "differ": group.mean((ours != theirs).float()),
        "sure": group.mean(_confidence(witness)),
        "surer": group.mean(_confidence(witness) - _confidence(logits)),
    }
    count = group.rows(len(logits))
    brief = _mean(before, "brief", now, count, max(BRIEF, count))
    top = brief["brief.source"].argmax()
    uniform = majority(brief, before)
    neglect = brief["brief.source"][top] - brief["brief.adapted"][top]
    some = {"value": neglect, "differ": now["differ"]}
    few = _mean(before, "few", some, count, rows)
    many = _mean(before, "many", now, count, rows)
    most = max(LONG_RUN * rows, count)
    many |= _mean(before, "long", {"source": now["source"]}, count, most)
    after = {
        **brief,
        **{n: torch.where(uniform, few[n], before.get(n, torch.zeros_like(few[n]))) for n in few},
        **{
            n: torch.where(uniform, before.get(n, torch.zeros_like(many[n])), many[n]) for n in many
        },
    }

    def doubt(window: str, most: int) -> Tensor:
        known = after[f"{window}.rows"].clamp(1, most)
        return (after[f"{window}.differ"] / known).sqrt() * DOUBT

    def narrowing(window: str) -> Tensor:
        spread = [torch.special.entr(after[f"{window}.{n}"]).sum() for n in ("source", "adapted")]
        return torch.sub(*spread) / classes

    at_once, lately = doubt("brief", max(BRIEF, count)), doubt("few", rows)
    n = torch.stack((neglect, at_once, after["few.value"], lately))
    over_time = doubt("many", rows) / classes
    s = torch.stack((narrowing("brief"), at_once / classes, narrowing("many"), over_time))
    signs = torch.where(uniform, n, s)
    lacking = _lacking(after["long.source"], after["long.rows"].clamp(1, most))
    lacking = torch.where(uniform, 1, lacking)
    most_even = math.log(min(logits.shape[1], max(BRIEF, count)))
    mixed = torch.special.entr(brief["brief.source"]).sum() > MIXED * most_even
    mixed &= (brief["brief.surer"] < MIXED_SURER) & (s[0] <= s[1])
    a = [after[f"{window}.sure"] - (1 - after[f"{window}.differ"]) for window in ("brief", "many")]
    apart = (a[0], at_once, a[1], doubt("many", rows))
    return after, torch.stack((uniform.to(n), *signs, *apart, mixed.to(n), lacking))


def _lacking(shares: Tensor, known: Tensor) -> Tensor:
    """The share of ln C that their entropy lacks, less what chance takes; 1: none can tell.

    Of two classes one has the majority nearly always, and the other answers are few.
    """
    classes = len(shares)
    if classes < 3:
        return torch.ones_like(known)
    chance = (classes - 1) / (2 * known)
    lacking = 1 - (torch.special.entr(shares).sum() + chance) / math.log(classes)
    return torch.where(known < ENOUGH * classes, 1, lacking.clamp(min=0))


def _mean(before: Memory, window: str, now: Memory, count: int, rows: int) -> Memory:
    """Averages over the last `rows` or so, with `count` new ones."""
    device = next(iter(now.values())).device
    known = before.get(f"{window}.rows", torch.zeros((), device=device)) + count
    weight = (count / known).clamp(min(1.0, 2 / (1 + rows / count)), 1)
    means = {
        f"{window}.{name}": torch.lerp(before.get(f"{window}.{name}", new), new, weight.to(new))
        for name, new in now.items()
    }
    return {**means, f"{window}.rows": known}


def _latest(before: Tensor | None, logits: Tensor, group: Ranks) -> Tensor:
    """Shares of the classes among the latest answers; one that is not finite is of the first."""
    now = _shares(logits.argmax(1), logits, group)
    before = torch.zeros_like(now) if before is None else before
    return torch.lerp(before, now, min(1.0, group.rows(len(logits)) / BRIEF))


def _confidence(logits: Tensor) -> Tensor:
    """How sure each answer is; not at all, where it overflows."""
    return logits.softmax(1).amax(1).nan_to_num(0)


def _answers(logits: Tensor) -> Tensor:
    """The class of each row; beyond the last, where it has no probabilities: it answers none."""
    return torch.where(entropy(logits).isfinite(), logits.argmax(1), logits.shape[1])


def _shares(answers: Tensor, logits: Tensor, group: Ranks) -> Tensor:
    """How large a share of the rows each class has."""
    counts = torch.zeros(logits.shape[1] + 1, device=logits.device)
    counts.index_add_(0, answers, torch.ones_like(answers, dtype=counts.dtype))
    return group.sum(counts[:-1]) / group.rows(len(logits))
