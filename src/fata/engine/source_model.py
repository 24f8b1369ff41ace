"""The source model beside the adapted one: what the guard compares with and falls back to.

Where there is BatchNorm, its statistics are a blend of the source's and the stream's, with a memory
of its own: those of a batch of few images or classes, or of an adapted model, would spoil it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fata.engine.direct import Direct
from fata.engine.state import State
from fata.engine.step import Step
from fata.methods.base import Memory
from fata.network.shrinkage import VECTORS

PREFIX = "norm."  # of that memory, in the guard's
MOST = torch.finfo(torch.half).max


class Known(NamedTuple):
    """What the first step of a stream, from the source weights, shows of the source model.

    Args:
        logits: with the adapted model's statistics.
        norm: memory of these, if the source model's begin with them; else empty.
    """

    logits: Tensor
    norm: Memory


class SourceModel:
    """The source weights of one engine, put in the adapted ones' place for a pass."""

    def __init__(self, functions: Step, execution: Direct) -> None:
        self._functions, self._execution = functions, execution
        self.known: Known | None = None  # of the batch at hand; None: a pass must find out

    def predict(self, images: Tensor, state: State) -> Tensor:
        """Logits of the batch at hand, which has a part in BatchNorm's statistics."""
        statistics, execution = self._functions.network.reference, self._execution
        if self.known and (statistics is None or self.known.norm):
            self._keep(state, self.known.norm)
            return self.known.logits[: len(images)]
        state.count(rows_source=len(images))
        with self._in_place(state):
            if statistics is None:
                return execution.predict(images)
            known = self.memory(state)
            if not known:
                with self._functions.network.running_statistics():
                    known = statistics.begin(execution.predict(images))
            with execution.stepping(images):
                logits, after = execution.run("refer", self._functions.refer, images, known)
        self._keep(state, after)
        return logits  # type: ignore[no-any-return]

    def beside(self, images: Tensor, state: State) -> Tensor | None:
        """Logits with the batch's own statistics; None where BatchNorm does not use them."""
        network = self._functions.network
        if network.reference is None or network.blend:
            return None
        if self.known:
            return self.known.logits[: len(images)]
        state.count(rows_source=len(images))
        with self._in_place(state):
            return self._execution.predict(images)

    def recall(self, images: Tensor, state: State) -> Tensor:
        """Logits of images that have no part in anything."""
        known, execution = self.memory(state), self._execution
        with self._in_place(state):
            if not known:
                return execution.predict(images)
            with execution.stepping(images):
                recalled = execution.run("recall", self._functions.recall, images, known)
        return recalled  # type: ignore[no-any-return]

    def restart(self, state: State) -> None:
        """Give the adapted model the source weights, and no momentum or memory."""
        source = self._functions.source
        state.return_to(source)
        state.plus = {}
        self._functions.theta.write(source)

    def leave_statistics(self, state: State) -> None:
        """Put those of the source model in BatchNorm's own buffers."""
        statistics = self._functions.network.reference
        if statistics is not None:
            statistics.write(self.memory(state))

    def memory(self, state: State) -> Memory:
        """Of BatchNorm's statistics; empty before the first check."""
        found, statistics = state.guard.items(), self._functions.network.reference
        kept = {n.removeprefix(PREFIX): t for n, t in found if n.startswith(PREFIX)}
        return statistics.widen(kept) if statistics else {}

    def _keep(self, state: State, norm: Memory) -> None:
        state.guard = {**state.guard, **{PREFIX + name: _kept(name, norm[name]) for name in norm}}

    @contextmanager
    def _in_place(self, state: State) -> Iterator[None]:
        functions = self._functions
        at_source = functions.theta.at(functions.source, back=state.theta)
        with functions.network.counted_apart(), torch.no_grad(), at_source:
            yield


def _kept(name: str, tensor: Tensor) -> Tensor:
    """As it is kept: what has a number for each channel in half precision, for a smaller state."""
    return tensor.clamp(-MOST, MOST).half() if name in VECTORS else tensor
