"""What changes while a model adapts, and what the parts of a step hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fata.guard.events import Watched
from fata.methods.base import Batch, Memory
from fata.methods.fata import Perturb
from fata.methods.selection import Selection


@dataclass
class State:
    """All that changes while a model adapts. Tensors are replaced, never changed in place."""

    theta: Tensor
    velocity: Tensor
    seed: int
    host: Memory = field(default_factory=dict)
    plus: Memory = field(default_factory=dict)
    classes: Memory = field(default_factory=dict)  # the mean prediction, where a term is balanced
    batches: int = 0
    share: float = 1.0  # moving average of the share of selected rows; 1: none is known
    counts: dict[str, int | Tensor] = field(default_factory=dict)
    guard: Memory = field(default_factory=dict)
    watched: Watched = field(default_factory=Watched)
    norm: Memory = field(default_factory=dict)  # of BatchNorm's statistics, where they are blended

    def count(self, **more: int | Tensor) -> None:
        """Add to the counters; those on the device stay there until they are read."""
        for name, number in more.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def move(self, device: torch.device) -> None:
        """To another device; the counters are read."""
        self.theta, self.velocity = self.theta.to(device), self.velocity.to(device)
        for name in ("host", "plus", "classes", "guard", "norm"):
            memory: Memory = getattr(self, name)
            setattr(self, name, {at: tensor.to(device) for at, tensor in memory.items()})
        self.counts = {name: int(number) for name, number in self.counts.items()}

    def return_to(self, source: Tensor) -> None:
        """Go on from the source weights, with no momentum and no memory of the host."""
        self.theta, self.velocity = source, torch.zeros_like(source)
        self.host, self.share = {}, 1.0

    def restarted(self, source: Tensor) -> State:
        """As before the first batch; random draws, counters and the guard's events go on."""
        return State(
            source,
            torch.zeros_like(source),
            self.seed,
            batches=self.batches,
            counts=self.counts,
            watched=Watched(events=self.watched.events),
        )

    def summary(self, host: str, plus: bool) -> dict[str, Any]:
        """The counters as plain numbers; waits for the device."""
        counts = {name: int(number) for name, number in self.counts.items()}
        names = ("seen", "not_finite", "stepped", "dropped", "recovered", "reset", "kept")
        rows = ("rows_forward", "rows_tail", "rows_backward", "rows_source")
        selected = {host: counts.get("host", 0)}
        if plus:
            selected["fata"] = counts.get("plus", 0)
        return {
            **{name: counts.get(name, 0) for name in names},
            "selected": selected,
            **{name: counts.get(name, 0) for name in rows},
        }


@dataclass(frozen=True)
class Pass:
    """One forward pass over some images: logits of z, and (on demand) of z'."""

    logits: Tensor
    augmented: Callable[[Tensor | None], Tensor] | None = None  # of some rows; None: of all
    perturb: Perturb | None = None
    features: Sequence[Tensor] = ()  # the penultimate one, for a method that needs it, or none
    tail: Tensor | None = None  # rows that FATA learns from, to pass no others again; None: all
    norm: Memory = field(default_factory=dict)  # with this batch


@dataclass(frozen=True)
class Terms:
    """A batch, and the rows of it that each term of the loss selected."""

    batch: Batch
    host: Selection
    plus: Selection
    mean_probs: Sequence[Tensor] = ()  # one where a term is balanced over the classes, or none
    views: Sequence[Tensor] = ()  # augmented images, if the host has views, or none

    def at(self, index: Tensor) -> Terms:
        """The same, of the rows `index` only."""
        batch, host, plus = self.batch.at(index), self.host.at(index), self.plus.at(index)
        return Terms(batch, host, plus, self.mean_probs, [view[index] for view in self.views])

    def among(self, rows: Tensor) -> Terms:
        """What is selected here and also true in `rows`."""
        return replace(self, host=self.host.among(rows), plus=self.plus.among(rows))


class Given(NamedTuple):
    """What the first pass over a batch needs."""

    images: Tensor
    noise: Sequence[Tensor]  # FATA's alpha and beta, or nothing
    host: Memory
    plus: Memory
    classes: Memory
    norm: Memory
    views: Sequence[Tensor] = ()  # augmented images, or nothing


class Rows(NamedTuple):
    """Rows to gather from a batch."""

    positions: Tensor
    real: Tensor | None = None  # which of them are not padding; None: all


class Moving(NamedTuple):
    """What moves, and how fast."""

    theta: Tensor
    velocity: Tensor
    lr: Tensor  # one for all, or one for each


class Moved(NamedTuple):
    """What a step gave."""

    theta: Tensor
    velocity: Tensor
    host: Memory
    stepped: Tensor
    dropped: Tensor
    loss: Tensor  # stays on the device


@dataclass(frozen=True)
class Seen:
    """The outcome of the first pass: the selection, and what was learned on the way.

    Args:
        terms: the batch and what is selected of it.
        perturb: FATA's perturbation of the batch, or None.
        finite: rows whose logits are.
        pixels: rows whose pixels are known to be; if one is not, the step is undone.
        norm: memory of BatchNorm's statistics, with this batch; empty where they are not blended.
        first: the pass, if it carries a gradient.
        climbed: whether the model is at SAM's ascent point already.
        moved: the outcome of the whole step, if it was taken already.
    """

    terms: Terms
    perturb: Perturb | None
    finite: Tensor
    pixels: Tensor
    norm: Memory = field(default_factory=dict)
    first: Pass | None = None
    climbed: bool = False
    moved: Moved | None = None
