"""Functions of tensors of fixed shapes that are captured, and compiled where that is asked for.

Captured as a CUDA graph, a pass is one launch instead of some thousand. Compiled, it is one graph
of torch's own operations, with loss and backward pass, whatever the model does in Python:
element-wise work is fused into what it belongs to, and convolutions run channels-last.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fata._torch import TorchDispatchMode, copy_all
from fata.engine.fast.decompositions import TABLE
from fata.engine.fast.trees import flatten, rebuild, structure

log = logging.getLogger("fata.compile")

WAITS = {  # operations that wait for the device
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
    "lift_fresh",  # a value of Python's that was copied there
}
COPIES = {"_to_copy", "copy_"}  # do, from one device to another
TREES = tuple, list, dict
MAY_WAIT = {*WAITS, *COPIES, "index"}
_CAPTURING = threading.Lock()

Flat = Callable[..., Sequence[Tensor]]


class MemoryPool:
    """Memory that captures share, since they never run at the same time; ends with the last."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class MemoryPools:
    """One pool for compiled functions, and one for others."""

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


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what waits for a device. A capture raises for it, but torch before 2.12 is broken then.

    Args:
        device: that would capture.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.found = device.type, list[str]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation."""
        given = func(*args, **(kwargs or {}))
        name = _name(func)
        tensors = list(_tensors((args, given))) if name in MAY_WAIT else []
        if any(t.device.type == self.device for t in tensors):
            apart = len({t.device for t in tensors}) > 1
            copies = apart and name in COPIES and not (kwargs or {}).get("non_blocking")
            masked = name == "index" and any(t.dtype == torch.bool for t in tensors[1:-1])
            if copies or masked or name in WAITS:
                self.found.append(str(func))
        return given


@functools.cache
def _name(func: Callable[..., Any]) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def held(model: nn.Module) -> list[Tensor]:
    """All tensors that the modules of a model hold: a capture reads them for ever.

    A model may drop some, such as what it keeps for the size of the latest images.
    """
    found, seen = list[Tensor](), set[int]()
    trees: list[Any] = [vars(module) for module in model.modules()]
    while trees:  # thousands, most of them empty: as fast as Python goes
        tree = trees.pop()
        if isinstance(tree, Tensor):
            found.append(tree.detach())
        elif id(tree) not in seen:
            seen.add(id(tree))
            branches = tree.values() if isinstance(tree, dict) else tree
            trees += [b for b in branches if isinstance(b, Tensor) or (isinstance(b, TREES) and b)]
    return found


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All in a tree; torch's own trees take longer than a kernel."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, TREES):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(branch)


@dataclass
class Kind:
    """What functions have in common that differ in the sizes of their tensors alone."""

    waits: Sequence[str] | None = None  # what waits for the device; None: no call was watched


@dataclass
class CapturedFunction:
    """A function of trees of tensors; on a GPU captured at its second call.

    To compile it takes up to a minute, so it is never done by itself.

    Args:
        function: gives the same outputs for the same inputs and weights, and changes nothing.
        arguments: their structure.
        after: what is done with the first output in the end, or None.
        pools: memory to capture in.
        name: what a message calls it.
        large: whether the network is, whose convolutions then run channels-last.
        static: tensors that are read where they are; all others are copied.
        kind: of the function; its first call is watched.
        held: what the function reads beside its arguments.
    """

    function: Callable[..., Any]
    arguments: Any
    after: Callable[[Tensor], None] | None
    pools: MemoryPools
    name: str
    large: bool
    static: StaticInputs = field(default_factory=StaticInputs)
    kind: Kind = field(default_factory=Kind)
    held: Callable[[], list[Tensor]] = list
    _flat: Flat | None = None  # compiled
    _tried: bool = False  # to compile it
    _calls: int = 0
    _graph: torch.cuda.CUDAGraph | None = None
    _inputs: list[Tensor] = field(default_factory=list, repr=False)
    _outputs: Sequence[Tensor] = field(default=(), repr=False)
    _outcome: Any = None  # its structure
    _pool: MemoryPool | None = None
    _held: list[Tensor] = field(default_factory=list, repr=False)

    def __call__(self, given: list[Tensor]) -> Any:
        """Run it; what it gives is the caller's own."""
        calls = self._calls + 1
        waits = Waits(given[0].device) if given[0].is_cuda and self.kind.waits is None else None
        if given[0].is_cuda and not waits and calls == 2:
            self._capture(given)
        self._calls = 1 if waits else calls  # where that was interrupted, it is done again
        if self._graph is None:  # what it gives may be of what it was given
            with waits or nullcontext():
                outputs = self._through([t.clone() if t in self.static else t for t in given])
            if waits:
                self.kind.waits = waits.found
        else:
            copy(self._inputs, given)
            self._graph.replay()
            outputs = [torch.empty_like(output) for output in self._outputs]
            copy(outputs, self._outputs)
        return rebuild(self._outcome, iter(outputs))

    def compile(self, given: Sequence[Tensor]) -> float:
        """Compile it, unless that was tried, and capture it at the next call; returns seconds."""
        if self._tried:
            return 0.0
        begun = time.perf_counter()
        log.info("compiling a pass (%s)", self.name)
        try:
            self._flat = compiled(self._plain, self._own(given))
        except Exception as error:  # the compiler's own are of many kinds
            _left("compiled", error)
        else:
            self._calls, self._graph, self._inputs, self._outputs = 1, None, [], ()
            self._pool, self._held = None, []
        self._tried = True
        seconds = time.perf_counter() - begun
        log.info("compiling a pass (%s) took %.0f s", self.name, seconds)
        return seconds

    def _through(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = (self._flat or self._plain)(*given)
        if self.after:
            self.after(outputs[0])
        return outputs

    def _plain(self, *given: Tensor) -> Sequence[Tensor]:
        outcome = self.function(*rebuild(self.arguments, iter(given)))
        outputs = list[Tensor]()
        flatten(outcome, outputs, [])
        self._outcome = structure(outcome)
        return outputs

    def _capture(self, given: Sequence[Tensor]) -> None:
        if self.kind.waits and self._flat is None:
            _left("captured", RuntimeError(f"{self.kind.waits[0]} waits for the device"))
            return
        graph, own = torch.cuda.CUDAGraph(), self._own(given)
        torch.cuda.synchronize()
        pool = self.pools.of(compiled=self._flat is not None)
        stream, held = self.pools.stream(own[0].device), self.held()
        try:
            with (
                _keeping_garbage(),
                torch.cuda.stream(torch.cuda.current_stream()),  # torch leaves its own, if it fails
                torch.cuda.graph(
                    graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                outputs = self._through(own)
        except RuntimeError as error:
            _left("captured", error)
        else:
            self._graph, self._inputs, self._outputs = graph, own, outputs
            self._pool, self._held = pool, held

    def _own(self, given: Sequence[Tensor]) -> list[Tensor]:
        return [t if t in self.static else own(t, self.large) for t in given]


def compiled(function: Flat, given: Sequence[Tensor]) -> Flat:
    """The same function, compiled for tensors like these."""
    with torch.autograd.set_multithreading_enabled(False):  # tracing follows one thread
        graph = make_fx(lambda *tensors: function(*tensors), TABLE)(*given)
    run = torch.compile(graph, fullgraph=True, dynamic=False)

    def without_gradient(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():  # the backward pass is part of the graph
            return run(*tensors)  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler hints that products could be in TF32
        without_gradient(*given)
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
def _keeping_garbage() -> Iterator[None]:
    """To free a capture spoils the one at hand, and garbage may hold some. One at a time."""
    with _CAPTURING:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _left(what: str, error: Exception) -> None:
    warnings.warn(f"the model cannot be {what} and runs without: {error}", stacklevel=4)
