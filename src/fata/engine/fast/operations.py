"""What is done with every operation of a pass: its memory is held, its waits are noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fata._torch import TorchDispatchMode, place_of, tree_leaves

WAITS = {  # operations that wait for the device
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
    "lift_fresh",  # a value of Python's that was copied there
}


class OperationHook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every operation inside the context to `run`."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As torch calls it."""
        return self.run(func, args, kwargs or {})

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)


class ExternalMemory(OperationHook):
    """Holds the memory that a function finds, rather than makes: a capture reads it for ever.

    A model may drop it before, such as what it keeps for the size of the latest images.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._made: set[int] = set()

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation takes and no other has given was there before."""
        taken = {place_of(s): s for s in _storages((args, kwargs))}
        self.storages |= {place: s for place, s in taken.items() if place not in self._made}
        given = func(*args, **kwargs)
        self._made |= {place_of(s) for s in _storages(given)}
        return given


class Waits(OperationHook):
    """Notes what waits for a device. A capture raises for it, but torch before 2.12 is broken then.

    Args:
        device: that would capture.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.found: str | None = None  # the last operation that waits

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        given = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        if any(t.device.type == self.device for t in tensors):
            name = str(func).removeprefix("aten.").partition(".")[0]
            apart = len({t.device for t in tensors}) > 1
            copies = apart and name in ("_to_copy", "copy_") and not kwargs.get("non_blocking")
            masked = name == "index" and any(t.dtype == torch.bool for t in tensors[1:-1])
            if copies or masked or name in WAITS:
                self.found = f"{func} waits for the device"
        return given


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)]
