"""Test-time adaptation of image classifiers, with feature augmentation (FATA)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fata import callbacks, corruptions, data, zoo
    from fata.adapter import Adapter, adapt
    from fata.corruptions import corrupt
    from fata.data.streams import stream
    from fata.distributed.group import GroupError
    from fata.engine.checkpoint import StateError
    from fata.fleet import Fleet, StreamBusyError
    from fata.guard.policy import Guard
    from fata.methods import (
        Cotta,
        Deyo,
        Eata,
        Memo,
        Nctta,
        Neo,
        Norm,
        Roid,
        Sar,
        Source,
        Tent,
        Zerosiam,
    )
    from fata.methods.base import Batch, Memory, Method
    from fata.methods.fata import Fata
    from fata.methods.selection import Selection
    from fata.network.structure import layers
    from fata.window import Window

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Batch",
    "Cotta",
    "Deyo",
    "Eata",
    "Fata",
    "Fleet",
    "GroupError",
    "Guard",
    "Memo",
    "Memory",
    "Method",
    "Nctta",
    "Neo",
    "Norm",
    "Roid",
    "Sar",
    "Selection",
    "Source",
    "StateError",
    "StreamBusyError",
    "Tent",
    "Window",
    "Zerosiam",
    "adapt",
    "callbacks",
    "corrupt",
    "corruptions",
    "data",
    "layers",
    "results",
    "stream",
    "tiny",
    "zoo",
]

# Where the names above are; they are imported when first asked for, as PyTorch takes seconds.
_FROM = {
    "adapter": ("Adapter", "adapt"),
    "corruptions": ("corrupt",),
    "data.streams": ("stream",),
    "distributed.group": ("GroupError",),
    "guard.policy": ("Guard",),
    "methods": (
        "Cotta",
        "Deyo",
        "Eata",
        "Memo",
        "Nctta",
        "Neo",
        "Norm",
        "Roid",
        "Sar",
        "Source",
        "Tent",
        "Zerosiam",
    ),
    "methods.base": ("Batch", "Memory", "Method"),
    "methods.fata": ("Fata",),
    "methods.selection": ("Selection",),
    "network.structure": ("layers",),
    "engine.checkpoint": ("StateError",),
    "fleet": ("Fleet", "StreamBusyError"),
    "window": ("Window",),
}
_PLACES = {name: module for module, names in _FROM.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fata' has no attribute {name!r}")
    if name == "tiny":
        return import_module("fata.zoo.tiny")
    if name not in _PLACES:
        return import_module(f"fata.{name}")
    globals()[name] = value = getattr(import_module(f"fata.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
