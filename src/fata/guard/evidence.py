"""Evidence of harm that needs no labels: pure numbers from two models' predictions.

The source model predicts some of the same images. n are the shares of the classes that the adapted
model predicts, n0 those of the source model, H their entropy, C the number of classes:

    S  =  (H(n0) - H(n)) / ln C     narrowing
    N  =  n0[c] - n[c]              neglect, if the source predicts one class c for over half

A model that adapts well predicts a more balanced distribution of classes than a source model that
the shift has confused: S < 0. One that goes wrong lets a class take over: S > 0, long before it has
collapsed. If a stream really has few classes the source model sees that too; there a model that
adapts well predicts the majority more often still (N < 0), and one that goes wrong prefers another
class. Of M images, on which the two agree but for a share d, either is known to about sqrt(d / M)
(S: of ln C); what exceeds one and a half times that is significant.

BatchNorm, of whose harm S shows little, has a third statistic. Source weights with the statistics
of the batch are hardly more confident than they are right: a model that agrees with them on fewer
images than their confidence has unlearned some. a is the share on which both agree, c0 the source's
mean confidence:

    A  =  c0 - a                    estrangement
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fata._device import Deferred
from fata.distributed.ranks import SINGLE, Ranks
from fata.methods.base import Memory
from fata.methods.losses import entropy

DEVIATIONS = 1.5  # of a statistic, beyond which it is significant
BRIEF = 64  # predictions that a statistic is averaged over to see what happens at once
ALARM = 0.4  # share of one class among the latest predictions that calls for a check
LEAST = 384  # predictions that make a share of the running statistics' classes reliable
ENOUGH = 10  # predictions a class to tell how balanced they are,
LONG_RUN = 4  # over so many times `rows`
MIXED = 0.77  # of the most that H(n0) can be, above which a batch is of many classes:
MIXED_MORE = 0.05  # if the running ones are not so much more confident, and S is not significant
TWICE = 0.4, 0.05  # share that is a majority for BatchNorm's statistics, if the running ones are
LONGER = 0.3, 0.02  # so much more confident: in two checks running, or in the average of many;
LESS = 0.1  # if they are so much less confident than with the batch's, no share is


@dataclass(frozen=True)
class Evidence:
    """How far two models' predictions are apart, in the way that means harm."""

    name: str  # "narrowing", "neglect" or "estrangement"
    value: float
    margin: float
    limit: float
    lacking: float = 1.0  # of ln C in H(n0), corrected for sampling: the source's imbalance
    mixed: bool = False  # whether the latest predictions are of many classes, by the source

    @property
    def excess(self) -> float:
        """How far it exceeds limit and margin of error; above 0 it is harm."""
        return self.value - self.margin - self.limit

    @property
    def good(self) -> bool:
        """Significantly below 0: the adapted model is better."""
        return self.value < -self.margin


class Alarm:
    """Whether one class fills the latest predictions; read a batch later, to avoid a wait."""

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._most: Deferred | None = None

    def __deepcopy__(self, memo: object) -> Alarm:
        """An empty one: what is on its way from the device would arrive here."""
        return Alarm()

    def write(self, latest: Tensor) -> None:
        """These are the shares now."""
        self._of, self._most = latest, Deferred(latest.amax())

    def read(self, latest: Tensor | None) -> bool:
        """Whether these shares, of the batch before, call for a check."""
        if latest is None:
            return False
        if latest is not self._of:
            self.write(latest)
        assert self._most is not None
        return self._most.read() > ALARM


def over_half(brief: Memory, before: Memory) -> Tensor:
    """Whether over half of the source's predictions are one class."""
    return brief["brief.source"].amax() > 0.5


def batch_of_few_classes(brief: Memory, before: Memory) -> Tensor:
    """Whether a batch is of few classes, by the predictions with running statistics.

    A shift makes these favour one class too, but with less confidence. With a batch of one class
    it is the batch's statistics that take a model's confidence away.
    """
    share, gap = brief["brief.source"].amax(), brief["brief.confidence_gap"]
    majority = (share > 0.5) & (gap > -LESS)
    if "many.confidence_gap" not in before:
        return majority
    twice = _likely(brief, "brief", *TWICE) & _likely(before, "brief", *TWICE)
    longer = _likely(before, "many", *LONGER) & (before["many.rows"] >= LEAST)
    return majority | twice | longer


def _likely(averages: Memory, window: str, share: float, gap: float) -> Tensor:
    top = averages[f"{window}.source"].amax()
    return (top > share) & (averages[f"{window}.confidence_gap"] > gap)


def compare(
    before: Memory,
    source: Tensor,
    logits: Tensor,
    rows: int,
    majority: Callable[[Memory, Memory], Tensor] = over_half,
    group: Ranks = SINGLE,
) -> tuple[Memory, Tensor]:
    """What two models predict for the same images, added to the averages; what they show.

    `majority` says whether it is one class, by the averages of the latest predictions and those
    before.

    Returns:
        the averages, and: whether the source has a majority class; a statistic at once and its
        margin of error, the statistic over some `rows` and its margin (N if there is a majority,
        else S); the same of A; whether the latest predictions are of many classes; the imbalance
        of the source's, a share of ln C.
    """
    classes = math.log(logits.shape[1])
    theirs, ours = _predicted(source), _predicted(logits)
    now = {
        "source": _shares(theirs, source, group),
        "adapted": _shares(ours, logits, group),
        "differ": group.mean((ours != theirs).float()),
        "confidence": group.mean(_confidence(source)),
        "confidence_gap": group.mean(_confidence(source) - _confidence(logits)),
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

    def margin(window: str, most: int) -> Tensor:
        known = after[f"{window}.rows"].clamp(1, most)
        return (after[f"{window}.differ"] / known).sqrt() * DEVIATIONS

    def narrowing(window: str) -> Tensor:
        spread = [torch.special.entr(after[f"{window}.{n}"]).sum() for n in ("source", "adapted")]
        return torch.sub(*spread) / classes

    at_once, lately = margin("brief", max(BRIEF, count)), margin("few", rows)
    n = torch.stack((neglect, at_once, after["few.value"], lately))
    over_time = margin("many", rows) / classes
    s = torch.stack((narrowing("brief"), at_once / classes, narrowing("many"), over_time))
    signs = torch.where(uniform, n, s)
    lacking = _lacking(after["long.source"], after["long.rows"].clamp(1, most))
    lacking = torch.where(uniform, 1, lacking)
    most_even = math.log(min(logits.shape[1], max(BRIEF, count)))
    mixed = torch.special.entr(brief["brief.source"]).sum() > MIXED * most_even
    mixed &= (brief["brief.confidence_gap"] < MIXED_MORE) & (s[0] <= s[1])
    a = [
        after[f"{window}.confidence"] - (1 - after[f"{window}.differ"])
        for window in ("brief", "many")
    ]
    apart = (a[0], at_once, a[1], margin("many", rows))
    return after, torch.stack((uniform.to(n), *signs, *apart, mixed.to(n), lacking))


def _lacking(shares: Tensor, known: Tensor) -> Tensor:
    """The share of ln C that their entropy lacks, corrected for sampling; 1: it cannot be told.

    Of two classes one has the majority nearly always, and predictions of the other are few.
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


def latest_shares(before: Tensor | None, logits: Tensor, group: Ranks) -> Tensor:
    """Shares of the classes among the latest predictions; NaN counts as the first class."""
    now = _shares(logits.argmax(1), logits, group)
    before = torch.zeros_like(now) if before is None else before
    return torch.lerp(before, now, min(1.0, group.rows(len(logits)) / BRIEF))


def _confidence(logits: Tensor) -> Tensor:
    """The largest probability of each row; 0 if it overflows."""
    return logits.softmax(1).amax(1).nan_to_num(0)


def _predicted(logits: Tensor) -> Tensor:
    """The class of each row; beyond the last if it has no probabilities."""
    return torch.where(entropy(logits).isfinite(), logits.argmax(1), logits.shape[1])


def _shares(predicted: Tensor, logits: Tensor, group: Ranks) -> Tensor:
    """How large a share of the rows each class has."""
    counts = torch.zeros(logits.shape[1] + 1, device=logits.device)
    counts.index_add_(0, predicted, torch.ones_like(predicted, dtype=counts.dtype))
    return group.sum(counts[:-1]) / group.rows(len(logits))
