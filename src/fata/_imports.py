"""Functions and classes of a user's own modules, by name."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_own(name: str) -> bool:
    """Whether a name is like `my_module:build`, of a module that exists."""
    if not _NAME.fullmatch(name):
        return False
    try:
        return importlib.util.find_spec(name.partition(":")[0]) is not None
    except (ModuleNotFoundError, ValueError):  # of a package around it
        return False


def imported(name: str) -> Callable[..., Any]:
    """What `my_module:build` names, to be called; raises ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ValueError(f"{name!r}: {error}.") from error
    except Exception as error:  # whatever the module does
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name!r} cannot be imported: {why}.") from error
    if not callable(found):
        raise ValueError(f"{name!r} is neither a function nor a class.")
    return found  # type: ignore[no-any-return]
