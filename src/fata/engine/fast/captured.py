"""Functions of tensors of fixed shapes that are captured, and compiled on demand.

Captured as a CUDA graph, a pass is one launch instead of some thousand. Compiled, it is one graph
of torch's own operations, with loss and backward pass, whatever the model does in Python:
element-wise work is fused into what it belongs to, and convolutions run channels-last.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fata._torch import compile_graph, copy_all
from fata.engine.fast.operations import ExternalMemory, Waits
from fata.engine.fast.trace import Flat, traced
from fata.engine.fast.trees import flatten, rebuild, structure

log = logging.getLogger("fata.compile")

_ALONE = threading.RLock()


def alone() -> AbstractContextManager[Any]:
    """No other thread captures or compiles: that waits for all of a device, and this forbids it."""
    return _ALONE


def _renew() -> None:
    global _ALONE
    _ALONE = threading.RLock()  # of a thread that a forked process does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class MemoryPool:
    """Memory that captures share, since they never run at the same time; ends with the last."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class MemoryPools:
    """One pool for compiled functions, and one for others: once all are compiled, it is free."""

    def __init__(self) -> None:
        self._used: weakref.WeakValueDictionary[bool, MemoryPool] = weakref.WeakValueDictionary()
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """To capture on; torch's own is on the GPU that came first."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream

    def of(self, compiled: bool) -> MemoryPool:
        """The one in use, or a new one: torch takes none up again that was given back."""
        pool = self._used.get(compiled) or MemoryPool()
        self._used[compiled] = pool
        return pool


class StaticInputs:
    """Where a batch is put once, for all captures that read it; ends with the last of them."""

    def __init__(self) -> None:
        self._places: weakref.WeakValueDictionary[object, Tensor] = weakref.WeakValueDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return any(tensor is place for place in self._places.values())

    def put(self, tensor: Tensor, large: bool) -> Tensor:
        """Its values, where others of its shape were before."""
        at = tensor.shape, tensor.dtype
        place = self._places.get(at)
        if place is None:
            place = self._places[at] = own(tensor, large)
        else:
            place.copy_(tensor, non_blocking=True)
        return place


@dataclass
class CapturedFunction:
    """A function of trees of tensors; on a GPU captured at its second call.

    Args:
        function: gives the same outputs for the same inputs and weights, and changes nothing.
        arguments: their structure.
        after: what is done with the first output in the end, or None.
        pools: memory to capture in.
        name: what a message calls it.
        large: whether it is of a large network.
        static: tensors that are read where they are; all others are copied.
    """

    function: Callable[..., Any]
    arguments: Any
    after: Callable[[Tensor], None] | None
    pools: MemoryPools
    name: str
    large: bool
    static: StaticInputs = field(default_factory=StaticInputs)
    _flat: Flat | None = None  # compiled
    _calls: int = 0
    _waits: str | None = None  # what of the first call waits for the device
    _graph: torch.cuda.CUDAGraph | None = None
    _inputs: list[Tensor] = field(default_factory=list, repr=False)
    _outputs: Sequence[Tensor] = field(default=(), repr=False)
    _outcome: Any = None  # its structure
    _pool: MemoryPool | None = None
    _external: ExternalMemory | None = field(default=None, repr=False)

    @property
    def compiled(self) -> bool:
        """Whether it is."""
        return self._flat is not None

    @property
    def calls(self) -> int:
        """How often it was called."""
        return self._calls

    @property
    def again(self) -> bool:
        """Whether it was called more than once."""
        return self._calls > 1

    def __call__(self, given: list[Tensor]) -> Any:
        """Run it; what it gives is the caller's own."""
        calls = self._calls + 1
        if calls == 2:
            self._inputs = self.owned(given)
            if given[0].is_cuda and not self._captured_now():
                calls = 1  # while something is compiled; the next call tries again
        if self._graph is None and not self.compiled:  # what it gives may be of what it was given
            mine = [t.clone() if t in self.static else t for t in given]
            outputs = self._first(mine) if calls == 1 else self._through(mine)
        else:
            copy(self._inputs, given)
            if self._graph is None:
                self._outputs = self._through(self._inputs)
            else:
                self._graph.replay()
            outputs = [torch.empty_like(output) for output in self._outputs]
            copy(outputs, self._outputs)
        self._calls = calls  # where that was interrupted, the next call does it again
        return rebuild(self._outcome, iter(outputs))

    def owned(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Tensors to capture with: those that are read where they are, and copies of the others."""
        return [t if t in self.static else own(t, self.large) for t in given]

    def take(self, flat: Flat, of: CapturedFunction, inputs: list[Tensor]) -> bool:
        """Run what another function of the same name was compiled to; False: not yet."""
        before = self._flat, self._outcome, self._inputs
        self._flat, self._outcome, self._inputs = flat, of._outcome, inputs
        if inputs[0].is_cuda and not self._captured_now():
            self._flat, self._outcome, self._inputs = before
            return False
        self._calls = max(2, self._calls)
        return True

    def compile(self) -> float:
        """Compile it for inputs like those of its second call; the seconds that it took."""
        begun = time.perf_counter()
        log.info("compiling a pass (%s)", self.name)
        try:
            with alone(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler hints that products could be in TF32
                self._flat = compiled(self.plain, self._inputs)
                if self._inputs[0].is_cuda:
                    self._capture()
        except Exception as error:  # the compiler's own are of many kinds
            left("compiled", error)
        seconds = time.perf_counter() - begun
        log.info("compiling a pass (%s) took %.0f s", self.name, seconds)
        return seconds

    def _first(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The first call; notes whether it could be captured."""
        if not given[0].is_cuda:
            return self._through(given)
        with Waits(given[0].device) as waits:
            outputs = self._through(given)
        self._waits = waits.found
        return outputs

    def _through(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = (self._flat or self.plain)(*given)
        if self.after:
            self.after(outputs[0])
        return outputs

    def plain(self, *given: Tensor) -> Sequence[Tensor]:
        """The function, of the tensors of its arguments."""
        outcome = self.function(*rebuild(self.arguments, iter(given)))
        outputs = list[Tensor]()
        flatten(outcome, outputs, [])
        self._outcome = structure(outcome)
        return outputs

    def _captured_now(self) -> bool:
        """Capture it, unless another thread captures or compiles: whether that is done."""
        if not _ALONE.acquire(blocking=False):
            return False
        try:
            self._capture()
        finally:
            _ALONE.release()
        return True

    def _capture(self) -> None:
        graph, own = torch.cuda.CUDAGraph(), self._inputs
        pool = self.pools.of(compiled=self.compiled)
        stream, external = self.pools.stream(own[0].device), ExternalMemory()
        try:
            if self._waits and not self.compiled:  # perhaps for what is kept since
                with Waits(own[0].device) as waits:
                    self.plain(*own)
                if waits.found:
                    raise RuntimeError(waits.found)
            with (
                _keeping_garbage(),
                nullcontext() if self.compiled else external,  # what is compiled holds its own
                _capturing(graph, pool, stream),
            ):
                outputs = self._through(own)
        except RuntimeError as error:
            left("captured", error)  # if there is a capture already, it stays
        else:
            self._graph, self._outputs = graph, outputs
            self._pool, self._external = pool, external


def compiled(function: Flat, given: Sequence[Tensor]) -> Flat:
    """The same function, compiled for tensors like these."""
    with torch.no_grad():  # the backward pass is part of the graph
        run = compile_graph(traced(function, given), given)
        run(*given)

    def without_gradient(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return run(*tensors)

    return without_gradient


def copy(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Values of many tensors, at once where they are alike; one that stays has them already."""
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for own, new in zip(into, given, strict=True):
        if own.stride() != new.stride():
            own.copy_(new, non_blocking=True)
        elif own is not new:
            ours, theirs = alike.setdefault(own.dtype, ([], []))
            ours.append(own)
            theirs.append(new)
    for ours, theirs in alike.values():
        copy_all(ours, theirs, non_blocking=True)


def own(tensor: Tensor, large: bool) -> Tensor:
    """A copy to capture with; for a large network, as its convolutions want it."""
    tensor = channels_last(tensor) if large else tensor
    return tensor.clone(memory_format=torch.preserve_format)


def channels_last(tensor: Tensor) -> Tensor:
    """The same values in the order that convolutions are fastest with."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@contextmanager
def _capturing(
    graph: torch.cuda.CUDAGraph, pool: MemoryPool, stream: torch.cuda.Stream
) -> Iterator[None]:
    """As torch.cuda.graph, which frees all cached memory first: a later pass would wait for it."""
    torch.cuda.synchronize()
    if torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():
        torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """To free a capture spoils the one at hand, and garbage may hold some."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def left(what: str, error: Exception) -> None:
    """Warn that a model runs as it is."""
    warnings.warn(f"the model cannot be {what} and runs without: {error}", stacklevel=4)
