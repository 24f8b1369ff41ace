"""The fast execution of a step: its functions captured, compiled on request, in bfloat16.

    see        a gradient-free pass over all rows, and what each term selects; a method that runs
               the model to select does so behind it
    climb      SAM's ascent, by the host's rows
    descend    a pass with gradient over the selected rows, update, observe
    whole      all of it (up: as far as the ascent), where most rows are selected or where rows
               share BatchNorm's statistics

A capture has fixed shapes, so rows are padded to a few sizes. Padding weighs nothing, in
BatchNorm's statistics neither. Between two captures one result is waited for: which rows to gather.

Weights that do not adapt are held in bfloat16; what adapts, logits and sums stay in float32. On a
CPU nothing is captured: the step runs directly, in bfloat16 where the CPU has a unit for its matrix
products (Intel's AMX).
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fata._device import Deferred
from fata._torch import version
from fata.engine.direct import Direct, NotFiniteError
from fata.engine.fast.bfloat16 import HalfWeight, half_weights, in_half, logit_layers, pays_on_cpu
from fata.engine.fast.captured import (
    CapturedFunction,
    Kind,
    MemoryPools,
    StaticInputs,
    channels_last,
    held,
)
from fata.engine.fast.trees import batch_of, flatten, structure
from fata.engine.state import Given, Moved, Moving, Pass, Rows, Seen, Terms
from fata.engine.step import Step
from fata.methods.base import Batch, Memory
from fata.methods.fata import Perturb
from fata.methods.selection import Selection
from fata.network.norms import norm_layers

LARGE = 5_000_000  # parameters from which on a network is worth compiling
MOST = 64  # captures that are kept, where batches are of many sizes
ALONE = {"predict", "observe", "refer", "recall"}  # functions that pass the network and no more
PARTS = 5  # of a batch, that there are captures for: the first calls of each are slow


class Outcome(NamedTuple):
    """What a capture gives of the first pass."""

    logits: Tensor
    finite: Tensor  # rows whose logits are
    pixels: Tensor  # whether all of the images' are
    host: Selection
    plus: Selection
    mean_probs: Sequence[Tensor]  # one, or none
    perturb: Sequence[Perturb]  # likewise
    features: Sequence[Tensor]  # likewise
    norm: Memory


@dataclass
class Cached:
    """A captured function, the rows that it passes, and when it last ran."""

    function: CapturedFunction
    passed: dict[str, int] | None = None
    latest: float = 0


class Fast(Direct):
    """Runs the functions of a step captured on a GPU, and in bfloat16 where that pays."""

    _cache: dict[object, Cached]
    _kinds: dict[str, Kind]
    _halves: list[HalfWeight] | None

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.compile_seconds = 0.0
        self._rows = 0  # of the batch at hand
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, which makes its own captures: they know where this model's weights are."""
        return {**self.__dict__, "_cache": None, "_pools": None, "_inputs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def forget(self) -> None:
        """Capture everything again."""
        model = self.network.model
        self._cache, self._kinds = {}, defaultdict(Kind)
        self._parameters = list(model.parameters())
        moving = {id(parameter) for parameter in self.step.theta.parameters}
        self._fixed = [p for p in self._parameters if id(p) not in moving and not p.is_inference()]
        self._known = self._weights()
        self._captures = on_gpu = self.network.device.type == "cuda"
        self._pools, self._inputs = MemoryPools(), StaticInputs()
        self._large = on_gpu and sum(p.numel() for p in self._parameters) >= LARGE
        self._norms = [norm for _, norm in norm_layers(model)]
        self._grouped = any(isinstance(norm, nn.GroupNorm) for norm in self._norms)
        self._heads: list[nn.Module] = []
        self._halves = None  # until the first batch

    def close(self) -> None:
        """Give back the memory of all captures."""
        self._cache.clear()
        self._halves = []

    @property
    def captures_steps(self) -> bool:  # type: ignore[override]
        """What came of captures can be undone when it is known that a pixel is not finite."""
        return not self._directly

    @property
    def _directly(self) -> bool:
        """Whether a step is not captured: on a CPU, or if it runs the model at SAM's point."""
        method = self.step.method
        return not self._captures or (method.select_runs_model and method.sam_rho is not None)

    # -- as Direct ----------------------------------------------------------------------------

    def predict(self, images: Tensor) -> Tensor:
        """Logits of the images without a gradient, by a capture."""
        if not self._rows:
            self._find_weights(images)
        if not self._captures:
            with self._in_half():
                return super().predict(images)
        rows, real = len(images), list[Tensor]()
        size, shared = self._size(rows), self.network.coupled and rows < self._rows
        if size > rows or shared:
            padded, mask = self._padded(torch.arange(rows), size)
            images = images[padded] if size > rows else images
            real = [mask] if shared else []
        logits: Tensor = self._captured("predict", self._predict, images, real)
        return logits[:rows]

    @contextmanager
    def stepping(self, images: Tensor) -> Iterator[None]:
        """Surrounds a step on these images."""
        self._find_weights(images)
        self._rows = 0 if self._directly else len(images)
        try:
            with self._in_half() if self._directly and not self._captures else nullcontext():
                yield
        finally:
            self._rows = 0

    def place(self, images: Tensor) -> Tensor:
        """The images where the captures read them."""
        captured = images.is_cuda and not self._directly
        return self._inputs.put(images, self._large) if captured else images

    def see(
        self,
        given: Given,
        moving: Moving,
        dense: bool,
        batch: Callable[[Tensor, Sequence[Tensor]], Batch],
    ) -> Seen:
        """The first pass; with all that follows, where all rows learn."""
        if self._directly:
            return super().see(given, moving, dense, batch)
        method, coupled = self.step.method, self.network.coupled
        dense = dense and not method.select_runs_model
        sharp, moved = method.sam_rho is not None, None
        if not dense:
            outcome = self._captured("see", self._see, given)
        elif sharp:
            _, outcome = self._captured("up", self._up, given, moving.theta, moves=True)
        else:
            fine = Deferred(given.images.isfinite().all()) if coupled else None
            moved, outcome = self._captured("whole", self._whole, given, moving, moves=True)
            if fine and not fine.read():  # known while the capture still runs
                raise NotFiniteError
        self.network.write(outcome.norm)
        shown = batch(outcome.logits, outcome.features)
        terms = Terms(shown, outcome.host, outcome.plus, outcome.mean_probs, given.views)
        if method.select_runs_model:
            terms = self.step.select(terms.batch, given)
        perturb = outcome.perturb[0] if outcome.perturb else None
        pixels = outcome.pixels.expand_as(outcome.finite)
        seen = Seen(terms, perturb, outcome.finite, pixels, outcome.norm, moved=moved)
        return replace(seen, climbed=dense and sharp)

    def rows(self, index: Tensor) -> Rows:
        """Rows to gather, padded to a size that there is a capture for."""
        if self._directly:
            return super().rows(index)
        return Rows(*self._padded(index, self._size(len(index))))

    def sizes(self, rows: int) -> list[int]:
        """Numbers of selected rows of a batch that are captured apart."""
        part = -(-rows // PARTS)
        return [] if self._directly else [*range(part, rows, part), rows]

    def run(self, name: str, function: Callable[..., Any], *given: Any, moves: bool = False) -> Any:
        """Run a function of the step captured."""
        run = super().run if self._directly else self._captured
        return run(name, function, *given, moves=moves)

    # -- what is captured: functions of tensors; one that moves the model gives its weights first --

    def _predict(self, images: Tensor, real: Sequence[Tensor]) -> Tensor:
        with self.network.statistics_of(real[0] if real else None):
            return self.network.predict(images)

    def _see(self, given: Given) -> Outcome:
        with torch.no_grad(), self._observing(given):
            return _outcome(*self._first(given))

    def _up(self, given: Given, theta: Tensor) -> tuple[Tensor, Outcome]:
        with self._observing(given):
            first, terms = self._first(given)
            return *self.step.climb(first, terms, theta), _outcome(first, terms)

    def _whole(self, given: Given, moving: Moving) -> tuple[Moved, Outcome]:
        with self._observing(given):
            first, terms = self._first(given)
            moved = self.step.descend(first, terms, terms, given.host, moving)
            return moved, _outcome(first, terms)

    def _observing(self, given: Given) -> AbstractContextManager[None]:
        return self.network.observing(given.norm, len(given.images))

    def _first(self, given: Given) -> tuple[Pass, Terms]:
        """A pass over the batch, and what is selected of it; nothing yet if that runs the model."""
        first = self.step.first(given)
        features = [feature.detach() for feature in first.features]
        batch = batch_of(given.images, first.logits.detach(), features, self.network.head)
        if self.step.method.select_runs_model:
            nothing = Selection.none(batch.entropy)
            return first, Terms(batch, nothing, nothing, views=given.views)
        return first, self.step.select(batch, given)

    # -- padding ------------------------------------------------------------------------------

    def _size(self, rows: int) -> int:
        """How many rows the capture has that they go through."""
        if not self._captures or not 0 < rows <= self._rows:
            return rows
        part = -(-self._rows // PARTS)
        return min(self._rows, -(-rows // part) * part)

    def _padded(self, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """These rows and as many copies of the first as fill a capture; which of them are real."""
        rows, device = len(index), self.network.device
        index = torch.cat((index, index[:1].expand(size - rows)))
        real = torch.arange(size) < rows
        return index.to(device, non_blocking=True), real.to(device, non_blocking=True)

    # -- capturing ----------------------------------------------------------------------------

    def _captured(
        self, name: str, function: Callable[..., Any], *given: Any, moves: bool = False
    ) -> Any:
        """Run a function captured. The rows that it passes are counted as in its first call."""
        statistics = self.network.statistics
        tensors, signature = list[Tensor](), [name, statistics is None or statistics.active]
        flatten(given, tensors, signature)
        at = tuple(signature)
        cached = self._cache.get(at) or self._new(name, function, given, len(tensors[0]), moves)
        with self.network.counted_apart() as passed:
            outcome = cached.function(tensors)
        if self.compiles and self._large:  # a small one gains nothing
            with self.network.counted_apart():
                self.compile_seconds += cached.function.compile(tensors)
        if cached.passed is None:
            cached.passed = passed
            while len(self._cache) >= MOST:
                del self._cache[min(self._cache, key=lambda at: self._cache[at].latest)]
            self._cache[at] = cached
        cached.latest = time.monotonic()
        self.network.passed(**cached.passed)
        return outcome

    def _new(
        self, name: str, function: Callable[..., Any], given: Any, rows: int, moves: bool
    ) -> Cached:
        def halved(*given: Any) -> Any:
            with self._in_half():
                return function(*given)

        captured = CapturedFunction(
            halved if self._halves else function,
            structure(given),
            self.step.theta.write if moves else None,
            self._pools,
            f"{name}, {rows} rows",
            self._large,
            self._inputs,
            self._kind(name),
            partial(held, self.network.model),
        )
        return Cached(captured)

    def _kind(self, name: str) -> Kind:
        """Of a function; what passes the network alone waits as little as what does more."""
        own = self._kinds[name]
        more = (kind for kind in self._kinds.values() if kind.waits is not None and not kind.waits)
        return next(more, own) if name in ALONE else own

    # -- bfloat16 -----------------------------------------------------------------------------

    def _in_half(self) -> AbstractContextManager[None]:
        """The model computes in bfloat16 inside the context, where that pays."""
        if not self._halves or not self._pays:
            return nullcontext()
        return in_half(self._halves, self._norms, self._heads, self.network.device)

    @property
    def _pays(self) -> bool:
        """Not with GroupNorm that is not compiled: in float32, it copies what is channels-last."""
        return self.compiles or not (self._large and self._grouped)

    def _find_weights(self, images: Tensor) -> None:
        """Capture again if the weights are others, as after `model.half()`."""
        if self._known != self._weights():
            self.forget()
        if self._halves is None:
            model, device, halves = self.network.model, self.network.device, list[HalfWeight]()
            if device.type == "cuda" or pays_on_cpu(model, device):
                halves += half_weights(model, self.step.theta.parameters, self._large)
                with self.network.counted_apart():
                    self._heads = logit_layers(model, lambda: self._tried(images, halves))
            self._halves = [half for half in halves if half[0] not in self._heads]

    def _tried(self, images: Tensor, halves: list[HalfWeight]) -> Tensor:
        """Logits, by the kernels that the first step needs: a GPU loads them slowly.

        A model that fails in bfloat16 stays in float32: not every operation has both.
        """
        plain = images.dtype != torch.float32  # of another type than the model: it says so
        images = channels_last(images) if self._large else images
        if plain or not self._pays:
            return self.network.learn(images)
        try:
            with in_half(halves, self._norms, [], self.network.device):
                return self.network.learn(images)
        except (RuntimeError, TypeError) as error:
            logits = self.network.learn(images)  # fails as well, if precision is not the reason
            why = str(error).partition("\n")[0]
            warnings.warn(f"the model fails in bfloat16 and stays in float32: {why}", stacklevel=2)
            halves.clear()
            return logits

    def _weights(self) -> list[int]:
        """Where all are, and how often those were changed that do not adapt."""
        return [p.data_ptr() for p in self._parameters] + [version(p) for p in self._fixed]


def _outcome(first: Pass, terms: Terms) -> Outcome:
    perturb = [first.perturb] if first.perturb else []
    batch, pixels = terms.batch, terms.batch.images.isfinite().all()
    shown = batch.logits, batch.finite, pixels
    terms_of = terms.host, terms.plus, terms.mean_probs
    return Outcome(*shown, *terms_of, perturb, batch.features, first.norm)
