"""Methods of other modules, such as a user's own."""

from __future__ import annotations

import importlib

from fata.methods.base import Method


def external(target: str) -> type[Method]:
    """The class that `my_module:MyMethod` names."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r}: give a module and a class, as my_module:MyMethod.")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ValueError(f"{target!r}: {error}.") from error
    except Exception as error:  # whatever the module does
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{target!r} cannot be imported: {why}.") from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"{target!r} is no subclass of fata.Method.")
    return kind
