"""Adapters of several methods on one network, and the streams that they are at work on.

They share every weight that none of them moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fata.adapter import Adapter, adapt
from fata.engine import checkpoint, swap
from fata.methods import parse
from fata.stream_settings import StreamSettings

Make = Callable[[nn.Module, str], Adapter]


@dataclass(eq=False)
class Member:
    """The adapter of one method, and the stream that it is at work on."""

    adapter: Adapter
    active: str | None = None

    def __post_init__(self) -> None:
        """Note how the adapter was given."""
        engine = self.adapter._live()
        self.rate, self._own = engine.rate, swap.take(engine)

    def fresh(self) -> swap.Held:
        """A stream before its first batch."""
        return swap.fresh(self.adapter._live())

    def pack(self, held: swap.Held) -> dict[str, Any]:
        """A state in memory as `adapter.load_state_dict` takes it."""
        with torch.inference_mode(False):
            return checkpoint.pack(self.adapter._live(), self.adapter._source(), held)

    def unpack(self, packed: Mapping[str, Any]) -> swap.Held:
        """A state in memory, from one that was read; raises `StateError` if it does not fit."""
        engine = self.adapter._live()
        with torch.inference_mode(False):
            state, _ = checkpoint.unpack(engine, self.adapter._source(), packed)
            return swap.Held(state)

    def restore(self) -> None:
        """The adapter is as it was given."""
        engine = self.adapter._live()
        engine.rate, self.active = self.rate, None
        swap.put(engine, self._own)


@dataclass
class Stream:
    """A stream in memory."""

    held: swap.Held
    settings: StreamSettings
    member: Member  # of its method
    changed: bool = False  # since it was saved
    unsaved: int = 0  # batches since then

    @property
    def mark(self) -> tuple[int, int, int]:
        """Another one once the state has changed."""
        state = self.held.state
        return id(state), state.batches, int(state.counts.get("not_finite", 0))

    @property
    def source_only(self) -> bool:
        """Whether the source model predicts each of its rows by itself, as nothing is learned."""
        engine, state = self.member.adapter._live(), self.held.state
        if engine.coupled or not engine.adapts:
            return not engine.coupled
        fresh = state.theta is engine.source and not state.host
        return self.settings.frozen and (fresh or state.watched.source_predicts)


class SharedNetwork:
    """One adapter a method, made when it is first asked for.

    Args:
        adapter: of the method that is used where none is named.
        make: an adapter of the method of that name, on a model; None: `fata.adapt`.
    """

    def __init__(self, adapter: Adapter, make: Make | None = None) -> None:
        self.default, self._make = Member(adapter), make or self._alike
        self._members = {adapter.name: self.default}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def member(self, method: str | None) -> Member:
        """The adapter of a method; None: the default one."""
        if method is None:
            return self.default
        if method not in self._members:
            self._members[method] = Member(self._made(method))
        return self._members[method]

    def _alike(self, model: nn.Module, method: str) -> Adapter:
        """Another method with the guard, seed and speed of the default one."""
        adapter = self.default.adapter
        engine, fields = adapter._live(), dict[str, Any]()
        if parse(method)[0].wants_fisher:
            fields["fisher_alpha"] = 0  # there are no clean images here
        guard = engine.watch.guard if engine.watch else None
        return adapt(model, method, guard=guard, seed=engine.seed, speed=adapter.speed, **fields)

    def _made(self, method: str) -> Adapter:
        adapter = self._make(_twin(self.default.adapter), method)
        for parameter in adapter._live().theta.parameters:
            parameter.data = parameter.data.clone()  # what moves is its own
        return adapter


def _twin(adapter: Adapter) -> nn.Module:
    """The source model again, in the memory of the same weights, but for those that move there."""
    moved = {id(parameter) for parameter in adapter._live().theta.parameters}
    shared = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=False)
        for parameter in adapter.model.parameters()
        if id(parameter) not in moved
    }
    twin = deepcopy(adapter, shared)
    twin.reset()
    return twin.unwrap(batch_statistics=False)
