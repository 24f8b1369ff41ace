"""Functions of a step that are captured: which there are, for how many rows, and when.

A function is captured at its second call, and what other numbers of selected rows will need with
it. One that is called often is compiled in the background, if the network is large.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from fata.engine.direct import Direct
from fata.engine.fast.background import Job, Pending, fitting
from fata.engine.fast.captured import CapturedFunction, MemoryPools, StaticInputs
from fata.engine.fast.trees import flatten, structure
from fata.engine.state import Rows
from fata.engine.step import Step

MOST = 64  # captures that are kept, where batches are of many sizes
OFTEN = 64  # calls after which a function is compiled beside the stream
PARTS = 16  # of a batch, that one may be compiled for
MOSTLY = 0.9  # of its calls, that it has rows enough for


@dataclass
class Cached:
    """A captured function, the rows it passes, and when it last ran."""

    function: CapturedFunction
    passed: dict[str, int] | None = None
    latest: float = 0
    due: int | None = OFTEN  # calls after which it is compiled; None: it is, or cannot be


class Captures(Direct):
    """Runs functions captured, with the number of rows that there is a capture for."""

    _captures = False  # whether on a GPU
    _large = False  # whether the network is worth compiling

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._seconds = 0.0  # that warming up took to compile
        self._rows = 0  # of the batch at hand
        self._kind: tuple[str, int, int] = "", 0, 0  # of the last call: name, rows, tensors
        self._second = False  # whether it was the second of its kind
        self._tensors = 0  # that the first pass of this batch was given
        self._pending = Pending()
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, which makes its own captures: they know where this model's weights are."""
        own = ("_cache", "_pools", "_inputs", "_pending", "_shadow", "_numbers", "_fitted")
        return {**self.__dict__, **dict.fromkeys(own)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pending=Pending())
        self.forget()

    def forget(self) -> None:
        """Capture everything again."""
        self._cache: dict[tuple[Any, ...], Cached] = {}
        self._asked = Counter[object]()
        self._numbers: defaultdict[Any, deque[int]] = defaultdict(lambda: deque(maxlen=OFTEN))
        self._fitted: defaultdict[Any, set[int]] = defaultdict(set)
        self._pools, self._inputs = MemoryPools(), StaticInputs()
        self._shadow: Captures | None = None
        self._pending.cancel()

    def close(self) -> None:
        """Give back the memory of all captures."""
        self._cache.clear()
        self._pending.cancel()
        self._shadow = None

    @property
    def compile_seconds(self) -> float:  # type: ignore[override]
        """How long compiling took so far, ahead of a stream and beside it."""
        return self._seconds + self._pending.seconds

    def compile(self) -> None:
        """Compile everything that was called more than once, if the network is large."""
        for at, cached in self._cache.items() if self._large else ():
            if cached.function.again and not cached.function.compiled:
                active = at[1]
                statistics = nullcontext() if active else self.network.running_statistics()
                with self.network.counted_apart(), statistics:
                    self._seconds += cached.function.compile()
                cached.due = None

    def wait(self, seconds: float) -> None:
        """Until what is compiled in the background is ready, or so long."""
        self._pending.wait(seconds)

    @property
    def captures(self) -> bool:  # type: ignore[override]
        """Whether passes are captured: on a GPU."""
        return self._captures

    # -- padding ------------------------------------------------------------------------------

    @property
    def _sizes(self) -> list[int]:
        """Rows of captures for the batch at hand: half of it, and all."""
        return sorted({-(-self._rows // 2), self._rows})

    def _size(self, rows: int, name: str) -> int:
        """How many rows the capture has that they go through."""
        if not self._captures or not 0 < rows <= self._rows:
            return rows
        sizes = {*self._sizes, *self._fitted[name, self._rows, self._tensors]}
        return min(size for size in sizes if size >= rows)

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
        tensors, signature = list[Tensor](), [name, self._active]
        flatten(given, tensors, signature)
        at = tuple(signature)
        cached = self._cache.get(at) or self._new(name, function, given, len(tensors[0]), moves)
        with self.network.counted_apart() as passed:
            outcome = cached.function(tensors)
        if cached.passed is None:
            cached.passed = passed
            while len(self._cache) >= MOST:
                del self._cache[min(self._cache, key=lambda at: self._cache[at].latest)]
            self._cache[at] = cached
        cached.latest = time.monotonic()
        self.network.passed(**cached.passed)
        self._kind = kind = name, self._rows, len(tensors)  # whatever number of rows is selected
        self._asked[kind] += 1
        self._second = self._asked[kind] == 2
        if self._large and cached.due is not None and cached.function.calls >= cached.due:
            self._compile_beside(cached, name, function, given, moves)
        return outcome

    def _compile_beside(
        self, cached: Cached, name: str, function: Callable[..., Any], given: Any, moves: bool
    ) -> None:
        """Have a function compiled in the background, for as many rows as it mostly has."""
        cached.due, owner = None, getattr(function, "__self__", None)
        here = self.network.device.type
        if owner not in (self, self.step) or torch.is_autocast_enabled(here):
            return
        one, at = cached, (name, self._rows, self._tensors)
        if isinstance(given[0], Rows):
            numbers = self._numbers[*at, len(given[0].positions)]
            size = fitting(numbers, PARTS, self._rows, MOSTLY)
            if size < len(given[0].positions):
                rows = Rows(*self._padded(torch.zeros(1, dtype=torch.int64), size))
                given = rows, *given[1:]
                one = self._new(name, function, given, size, moves)
        tensors = list[Tensor]()
        flatten(given, tensors, signature := [name, self._active])
        self._shadow = shadow = self._shadow or self.shadow()
        bound = getattr(shadow if owner is self else shadow.step, function.__name__)
        twin = shadow._new(name, bound, given, len(tensors[0]), moves).function

        def take(job: Job) -> bool:
            assert job.flat is not None
            if not one.function.take(job.flat, job.function, job.inputs):
                return False
            if one is not cached:
                one.passed, one.due, one.latest = job.passed, None, time.monotonic()
                self._cache[tuple(signature)] = one
                self._fitted[at].add(size)
                cached.due = cached.function.calls + OFTEN
            return True

        around = partial(shadow._alike, self._active)
        self._pending.submit(Job(twin, one.function.owned(tensors), around), take)

    def shadow(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that has its own modules, on the memory of the same weights.

        `memo` is filled with the parts of the copy, by the identity of what they are copies of.
        """
        memo, step, blend = {} if memo is None else memo, self.step, self.network.blend
        model = self.network.model
        shared = [*model.parameters(), *model.buffers(), *step.theta.beside.values(), step.source]
        shared += blend.tensors if blend else []
        shared += [] if step.fisher is None else [step.fisher]
        memo.update({id(tensor): tensor for tensor in shared})
        with self.network.counted_apart():  # into what nobody reads
            return deepcopy(self, memo)

    @contextmanager
    def _alike(self, active: bool) -> Iterator[dict[str, int]]:
        """Passes run as in the stream, and the rows that they pass are counted."""
        statistics = nullcontext() if active else self.network.running_statistics()
        with statistics, self.network.counted_apart() as passed:
            yield passed

    @property
    def _active(self) -> bool:
        """Whether BatchNorm uses the statistics of its method."""
        statistics = self.network.statistics
        return statistics is None or statistics.active

    def _prepare(
        self, name: str, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
    ) -> None:
        """Capture what moves the model, for arguments that may come; this changes nothing."""
        here = self.step.theta.read()
        try:
            with self.network.counted_apart():
                for given in calls:
                    for _ in range(2):
                        self._captured(name, function, *given, moves=True)
        except torch.OutOfMemoryError:  # then it is left to those that come
            torch.cuda.empty_cache()
        finally:
            self.step.theta.write(here)

    def _new(
        self, name: str, function: Callable[..., Any], given: Any, rows: int, moves: bool
    ) -> Cached:
        def halved(*given: Any) -> Any:
            with self._in_half():
                return function(*given)

        captured = CapturedFunction(
            halved,
            structure(given),
            self.step.theta.write if moves else None,
            self._pools,
            f"{name}, {rows} rows",
            self._large,
            self._inputs,
        )
        return Cached(captured)

    def _in_half(self) -> AbstractContextManager[None]:
        """Surrounds what is captured."""
        return nullcontext()
