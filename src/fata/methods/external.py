"""Methods of other modules, such as a user's own."""

from __future__ import annotations

from fata._imports import imported
from fata.methods.base import Method


def external(target: str) -> type[Method]:
    """The class that `my_module:MyMethod` names."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r}: give a module and a class, as my_module:MyMethod.")
    kind = imported(target)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"{target!r} is no subclass of fata.Method.")
    return kind
