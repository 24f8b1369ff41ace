"""A function of tensors as a graph of torch's own operations, whatever it does in Python.

PyTorch's `make_fx` gives the same graph. But it replaces methods of every module of the process
meanwhile, which a stream beside it must not see, and takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from fata._torch import WeakTensors, tree_map
from fata.engine.fast.decompositions import TABLE
from fata.engine.fast.operations import OperationHook

Flat = Callable[..., Sequence[Tensor]]


class Trace(OperationHook):
    """Notes every operation inside the context as a node of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = fx.Graph(), nn.Module()
        self._nodes = WeakTensors()  # by the tensor that a node gives

    def given(self, tensor: Tensor) -> None:
        """An input of the function, one after the other."""
        self._nodes[tensor] = self.graph.placeholder(f"given_{len(self.graph.nodes)}")

    def node(self, leaf: Any) -> Any:
        """The node that gives a tensor; of one that is found rather than made, a constant."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf not in self._nodes:
            name = f"found_{len(self.graph.nodes)}"
            if isinstance(leaf, nn.Parameter):
                self.root.register_parameter(name, leaf)
            else:
                self.root.register_buffer(name, leaf)
            self._nodes[leaf] = self.graph.get_attr(name)
        return self._nodes[leaf]

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an operation, or those that it is made of."""
        if func in TABLE:
            with self:
                made = TABLE[func](*args, **kwargs)
            if made is not NotImplemented:
                return made
        nodes = tree_map(self.node, (args, kwargs))
        made = func(*args, **kwargs)
        several = isinstance(made, (tuple, list))
        parts = list(made) if several else [made]
        if any(isinstance(part, Tensor) for part in parts):  # others tell of types and sizes
            node = self.graph.call_function(func, *nodes)
            for place, part in enumerate(parts):
                if isinstance(part, Tensor):
                    got = self.graph.call_function(getitem, (node, place)) if several else node
                    self._nodes[part] = got
        return made


def traced(function: Flat, given: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function, for tensors like these."""
    trace = Trace()
    for tensor in given:
        trace.given(tensor)
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), trace:
        outputs = function(*given)
    trace.graph.output(tuple(trace.node(tensor) for tensor in outputs))
    return fx.GraphModule(trace.root, trace.graph)
