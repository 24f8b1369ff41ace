"""Who may use a model: one adapter at a time, and one thread at a time inside it."""

from __future__ import annotations

import os
import threading
import weakref
from copy import deepcopy
from typing import Any, ClassVar, NoReturn, Self
from weakref import WeakSet

from torch import nn

from fata.engine.checkpoint import StateError
from fata.engine.engine import Engine

_OWNED: set[int] = set()  # ids of the models and parameters that an adapter has now


class Lock:
    """Lets one thread in at a time; a copy has a lock of its own, and so has a forked process."""

    all: ClassVar[WeakSet[Lock]] = WeakSet()

    def __init__(self) -> None:
        self.renew()
        self.all.add(self)

    def renew(self) -> None:
        """Unlocked: a forked process has none of the other threads."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: object) -> Lock:
        return Lock()


def _renew() -> None:
    for lock in Lock.all:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Settings:
    """Modes and flags of a model as they were given."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._model = model

    @property
    def _parts(self) -> set[int]:
        """Ids of the model and its parameters, which live as long as their adapter has them."""
        return {id(self._model), *(id(parameter) for parameter, _ in self._flags)}

    def own(self) -> None:
        """No other adapter may take the model from now on."""
        _OWNED.update(self._parts)

    def restore(self, engine: Engine) -> None:
        """Give the model back with its own statistics, modes and flags; the weights stay."""
        engine.close()
        for module, training in self._modes:
            module.training = training
        for parameter, requires_grad in self._flags:
            parameter.requires_grad_(requires_grad)
        _OWNED.difference_update(self._parts)


class ModelOwner(nn.Module):
    """A module that has a model to itself: copies it along, and gives it back."""

    _engine: Engine | None = None

    def _own(self, engine: Engine, given: Settings) -> None:
        """The model is this adapter's, until unwrap() or until the adapter is garbage."""
        self._engine, self._given, self._lock = engine, given, Lock()
        self._hold(engine)

    def _hold(self, engine: Engine) -> None:
        self._given.own()
        self._release = weakref.finalize(self, self._given.restore, engine)
        self._release.atexit = False

    def _give_back(self) -> None:
        self._release()
        self._engine = None

    def _live(self) -> Engine:
        if self._engine is None:
            raise StateError("this adapter was unwrapped; make a new one with fata.adapt")
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An adapter of its own, with a copy of the model, that continues from here."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        with self._lock:
            own = {name: part for name, part in self.__dict__.items() if name != "_release"}
            twin.__dict__.update(deepcopy(own, memo))
        if twin._engine is not None:
            twin._hold(twin._engine)
        return twin

    def __reduce__(self) -> NoReturn:
        """Raise: an adapter cannot be pickled."""
        raise TypeError(
            "an adapter cannot be pickled: save(path) writes its state, and load(path) continues "
            "from it in an adapter made alike."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the state along with the model: `.to`, `.cuda`, `.cpu`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._engine is not None:
            self._engine.move()
        return self


def check_free(model: nn.Module) -> None:
    """Raise if another adapter has the model or a part of it."""
    if not _OWNED.isdisjoint({id(model), *map(id, model.parameters())}):
        raise ValueError(
            "another adapter has this model, or a part of it (a module or a parameter that both "
            "share): call unwrap() on that one first (reset() before, for the source weights), or "
            "give a copy of the model."
        )
