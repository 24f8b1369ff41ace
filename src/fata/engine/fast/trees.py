"""Nested tuples, dicts and dataclasses of tensors, as the flat lists that a capture needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor

from fata.distributed.ranks import SINGLE
from fata.engine.state import Terms
from fata.methods.base import SELECTS_ALONE, Batch
from fata.methods.fata import Perturb
from fata.methods.selection import Selection
from fata.network.head import Head


def batch_of(
    images: Tensor, logits: Tensor, features: Sequence[Tensor], head: Head | None
) -> Batch:
    """A batch as a captured function may see it: no other images, no random draws."""

    def predict(images: Tensor) -> Tensor:
        raise RuntimeError(SELECTS_ALONE)

    return Batch(images, logits, predict, None, SINGLE, features, head)


# What else than tuples, lists and dicts holds tensors: its parts and what is fixed in it, and back.
NODES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    Selection: (lambda s: ([s.rows, s.weights], None), lambda parts, _: Selection(*parts)),
    Perturb: (
        lambda p: ([p.alpha, p.beta, p.delta], (p.axis, p.single)),
        lambda parts, fixed: Perturb(*parts, *fixed),
    ),
    Batch: (
        lambda b: ([b.images, b.logits, b.features], b.head),
        lambda parts, head: batch_of(parts[0], parts[1], parts[2], head),
    ),
    Terms: (
        lambda t: ([t.batch, t.host, t.plus, t.mean_probs, t.views], None),
        lambda parts, _: Terms(*parts),
    ),
}


def flatten(tree: Any, tensors: list[Tensor], signature: list[Any]) -> None:
    """Append the tensors of a tree, and what all trees have in common that one capture is for."""
    parts: Iterable[Any]
    fixed: Any
    if isinstance(tree, Tensor):
        tensors.append(tree)
        parts, fixed = (), (tree.shape, tree.dtype)
    elif isinstance(tree, dict):
        parts, fixed = tree.values(), tuple(tree)
    elif isinstance(tree, (tuple, list)):
        parts, fixed = tree, len(tree)
    else:
        parts, fixed = NODES[type(tree)][0](tree)
    signature.append(fixed)
    for part in parts:
        flatten(part, tensors, signature)


def structure(tree: Any) -> Any:
    """The same tree with None in the place of every tensor."""
    return rebuild(tree, repeat(None))


def rebuild(tree: Any, tensors: Iterator[Any]) -> Any:
    """The tree with other tensors, in the order in which `flatten` gives them."""
    if tree is None or isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: rebuild(part, tensors) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [rebuild(part, tensors) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    apart, together = NODES[type(tree)]
    parts, fixed = apart(tree)
    return together([rebuild(part, tensors) for part in parts], fixed)
