"""What a method is: which rows to learn from, with what weight, and what to minimise on a row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fata.distributed.ranks import SINGLE, Ranks
from fata.methods.losses import entropy
from fata.methods.pixels import Rng
from fata.methods.selection import Selection
from fata.network.head import Head
from fata.network.parameters import Theta

Memory = dict[str, Tensor]

SELECTS_ALONE = (
    "a method whose `select` runs the model or draws random numbers must say so: "
    "select_runs_model = True."
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one pass over some images gave: all that a method may use."""

    images: Tensor
    logits: Tensor  # (B, C), full precision, no graph
    predict: Callable[[Tensor], Tensor]  # logits of other images, same weights, no gradient
    seed: int | None  # for this method's random draws on this batch; None: it must not draw
    group: Ranks = SINGLE  # who has the batch's other rows
    features: Sequence[Tensor] = ()  # z, (B, D), for a method of the penultimate feature
    head: Head | None = None  # which z goes through, likewise
    real: bool = True  # false for the stand-in of a rank without rows

    @property
    def classes(self) -> int:
        """Number of classes, C."""
        return self.logits.shape[1]

    @cached_property
    def probs(self) -> Tensor:
        """Softmax of the logits."""
        return self.logits.softmax(1)

    @cached_property
    def entropy(self) -> Tensor:
        """H of each row, in nats."""
        return entropy(self.logits)

    @cached_property
    def finite(self) -> Tensor:
        """Rows whose logits are all finite, or -inf for a class that is left out."""
        finite = self.entropy.isfinite()
        return finite if self.real else torch.zeros_like(finite)

    @cached_property
    def pseudo_label(self) -> Tensor:
        """The class that each row is predicted to be."""
        return self.logits.argmax(1)

    @property
    def generator(self) -> torch.Generator:
        """A new generator for the method's random draws, the same each time."""
        if self.seed is None:
            raise RuntimeError(SELECTS_ALONE)
        return torch.Generator(self.logits.device).manual_seed(self.seed)

    def at(self, index: Tensor) -> Batch:
        """The same pass, of the rows `index` only."""
        features = [feature[index] for feature in self.features]
        images, logits = self.images[index], self.logits[index]
        return dataclasses.replace(self, images=images, logits=logits, features=features)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a pass with gradient gave of some rows: all that a loss may use."""

    logits: Tensor
    features: Sequence[Tensor] = ()  # z, for a method of the penultimate feature
    head: Head | None = None  # which z goes through, likewise
    learned: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # of `Method.modules`
    views: Sequence[Tensor] = ()  # logits of the rows' augmented views, if the method has them


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the family; the defaults are TENT's, but for the rows, which each one selects.

    `select` is pure: the same batch and memory give the same rows. `observe` is the only place
    where memory changes. The engine does the rest.

    Args:
        balance: whether all predicted classes have equal parts in the loss (`balance.py`).
        blend: whether BatchNorm normalises with a blend of its running statistics and the stream's
            (`network/blend.py`), instead of the batch's.
    """

    balance: bool = dataclasses.field(default=False, kw_only=True)
    blend: bool = dataclasses.field(default=False, kw_only=True)

    name: ClassVar[str]
    params: ClassVar[str | None] = "norm-truncated"  # None: nothing adapts
    batch_statistics: ClassVar[bool] = True  # BatchNorm on the batch at hand; else running ones
    select_runs_model: ClassVar[bool] = False  # or draws random numbers, or waits for values
    gradient_free: ClassVar[bool] = False  # learns by `observe` alone, also without parameters
    nesterov: ClassVar[bool] = False  # the momentum of SGD
    has_views: ClassVar[bool] = False  # the loss compares rows with augmented views of them

    def __post_init__(self) -> None:
        """Raise for fields out of range."""

    @property
    def prior(self) -> float:
        """Weight of BatchNorm's running statistics against the batch's; 0 = the batch alone."""
        return 0.0

    @property
    def sam_rho(self) -> float | None:
        """SAM's rho; None: a plain step."""
        return None

    @property
    def wants_fisher(self) -> bool:
        """Whether the regulariser weighs parameters by their Fisher information."""
        return False

    @property
    def source_share(self) -> float:
        """How far the parameters return to the source weights after each step, in [0, 1]."""
        return 0.0

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Rows to learn from and their weights."""
        raise NotImplementedError(f"{type(self).__name__} must say which rows it selects")

    def loss(self, logits: Tensor) -> Tensor:
        """What to minimise on each row."""
        return entropy(logits)

    def row_loss(self, outputs: Outputs) -> Tensor:
        """The same, for a method that needs more than the logits."""
        return self.loss(outputs.logits)

    def view(self, images: Tensor, rng: Rng) -> Tensor:
        """Augmented views of a batch's images, one a row, if the method `has_views`."""
        raise NotImplementedError(f"{type(self).__name__} must say what its views are")

    def modules(self, width: int) -> dict[str, Tensor]:
        """Tensors that are learned beside the network, as they start; `width` is that of z."""
        return {}

    def modules_rate(self, vit: bool) -> float:
        """Their learning rate, in units of that of the network's parameters."""
        return 1.0

    def answer(self, batch: Batch, memory: Memory, learned: bool) -> Tensor:
        """The logits to return, from a memory that has seen the batch; `learned`: not frozen."""
        if batch.head is None or (shift := self.shift(batch.head.weight, memory)) is None:
            return batch.logits
        return batch.logits + shift.to(batch.logits)

    def shift(self, weight: Tensor, memory: Memory) -> Tensor | None:
        """What is added to all logits, by the classifier's W; a plain model has it in its bias."""
        return None

    def regulariser(self, theta: Tensor, source: Tensor, fisher: Tensor | None) -> Tensor | None:
        """A penalty on the parameters, added to the loss of every step that is taken."""
        return None

    def observe(self, batch: Batch, selection: Selection, memory: Memory) -> Memory:
        """The memory after a batch: of what this method selected, never of another term's."""
        return memory

    def recover(self, memory: Memory) -> Tensor | None:
        """Whether to restart from the source weights; a bool scalar, or None: never."""
        return None

    def fixed_rate(self, vit: bool) -> float | None:
        """The method's own learning rate, or None for that of the preset."""
        return None


class Learned(Protocol):
    """What a step changes: the weights, their momentum, the method's memory, the counts."""

    theta: Tensor
    velocity: Tensor
    host: Memory

    def count(self, **more: int | Tensor) -> None:
        """Add to the counters."""


class Engine(Protocol):
    """What a method with a step of its own may use: the model at given weights, and an update."""

    vit: bool  # whether the network is like a transformer
    theta: Theta
    rate: Callable[[int], float]  # for a batch of so many rows

    @property
    def source(self) -> Tensor:
        """The parameters before the first batch."""

    @property
    def group(self) -> Ranks:
        """The ranks that share every batch."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    @property
    def state(self) -> Learned:
        """All that changes while a model adapts."""

    def predict(self, images: Tensor, running: bool = False) -> Tensor:
        """Logits without a gradient; with `running` of BatchNorm's running statistics."""

    def forward(self, images: Tensor) -> Tensor:
        """Logits with a gradient."""

    def update(self, gradient: Tensor, lr: float, nesterov: bool = False) -> None:
        """Descend."""

    def generator(self, purpose: str, device: str | None = None) -> torch.Generator:
        """Random numbers for one purpose on this batch."""

    def local_statistics(self) -> AbstractContextManager[None]:
        """BatchNorm uses this rank's rows alone."""


class CustomStep(Method):
    """A method with a step of its own (a teacher, one image at a time)."""

    episodic: ClassVar[bool] = False  # restarts from the source at every batch: nothing to save

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """No row by the common step."""
        return Selection.none(batch.entropy)

    def prediction_weights(self, engine: Engine) -> Tensor:
        """The weights that predict when nothing is learned."""
        return engine.state.theta

    def step(self, engine: Engine, images: Tensor) -> Tensor:
        """Predict a batch and learn from it; returns the logits."""
        raise NotImplementedError(f"{type(self).__name__} must say how it steps")


def in_range(
    owner: object,
    field: str,
    low: float,
    high: float = math.inf,
    *,
    whole: bool = False,
    hint: str = "",
) -> None:
    """Raise for a field that is no number, or no whole number, in [low, high]."""
    value = getattr(owner, field)
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        bounds = f"in [{low:g}, {high:g}]" if high < math.inf else f"at least {low:g}"
        kind = "a whole number" if whole else "a number"
        raise ValueError(
            f"{type(owner).__name__}({field}={value!r}): must be {kind} {bounds}{hint}."
        )


def is_threshold(owner: object, field: str, unlimited: bool = True) -> None:
    """Raise for an entropy that is not in units of ln C."""
    value = getattr(owner, field)
    if unlimited and value == math.inf:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            f"{type(owner).__name__}({field}={value!r}): entropies are in units of ln C: above 0 "
            f"and at most 1 (the papers use 0.4 and 0.5)"
            f"{', or math.inf for no filter' if unlimited else ''}."
        )
