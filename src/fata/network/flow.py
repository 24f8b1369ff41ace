"""Which of some tensors the output of a call depends on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fata._torch import TorchDispatchMode, place_of, tree_leaves

OPEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # Python sees values
BEHIND = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr"}  # so it does; no operations


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values through the operations inside the context, by the memory that holds them.

    `read` are the names of those that Python saw or that an operation in place had a part in;
    `into` adds those that reach an output.

    Args:
        roots: the tensors to follow, by name; they must live as long as this.
    """

    def __init__(self, roots: Mapping[Hashable, Sequence[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[Hashable] = set()
        self._held: dict[int, set[Hashable]] = {}  # whose values are in a memory
        for name, tensors in roots.items():
            for tensor in tensors:
                self._held.setdefault(_place(tensor), set()).add(name)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation; what it gives has the values of what it takes."""
        names = self._names((args, kwargs))
        given = func(*args, **(kwargs or {}))
        outputs = _tensors(given)
        writes, tags = func._schema.is_mutable, set(func.tags)  # type: ignore[attr-defined]
        if not outputs or writes or tags & OPEN:
            self.read |= names
        for tensor in outputs:  # a new one may be where an old one was
            self._held[_place(tensor)] = names
        return given

    def into(self, output: Any) -> set[Hashable]:
        """Names of all that were read or reach this output."""
        return self.read | self._names(output)

    def functions(self) -> TorchFunctionMode:
        """For the context too: what Python reads without an operation."""
        return _Functions(self)

    def _names(self, tree: Any) -> set[Hashable]:
        return set().union(*(self._held.get(_place(t), ()) for t in _tensors(tree)))


class _Functions(TorchFunctionMode):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of tensors."""
        if getattr(func, "__name__", None) in BEHIND:
            self._flow.read |= self._flow.into(args)
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    strided = tensor.layout is torch.strided  # others have no storage of their own
    return place_of(tensor.untyped_storage()) if strided else -id(tensor)
