"""The classifier of any nn.Module, and the penultimate feature z that it sees: o = W z + b."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fata._text import listed, near
from fata.network.logits import Columns, logits_of
from fata.network.norms import widened

CLOSE = 0.02  # of the largest logit: products may be in half precision


class Head:
    """The linear layer of a model that gives its logits; `remove` takes the hook off.

    Args:
        model: maps images to logits.
        name: of the layer; `auto`: the last linear layer of the model.
    """

    def __init__(self, model: nn.Module, name: str = "auto") -> None:
        self.model, self._checked = model, False
        self._known = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        if not self._known:
            raise ValueError(
                f"head={name!r}: {type(model).__name__} has no linear layer, and this method needs "
                f"one that gives the logits."
            )
        self.name = [*self._known][-1] if name == "auto" else name
        if self.name not in self._known:
            raise ValueError(
                f"head={name!r}: no such linear layer in {type(model).__name__}."
                f"{near(name, self._known)} Candidates: {listed(self._known)}."
            )
        self.layer = self._known[self.name]
        self._seen: list[Tensor] = []
        self._handle = self.layer.register_forward_pre_hook(self._see)

    @property
    def weight(self) -> Tensor:
        """W, (C, D), in full precision and without a gradient; of the classes that are kept."""
        return self._kept(self.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """b, (C,), likewise; None: there is none."""
        return None if self.layer.bias is None else self._kept(self.layer.bias)

    def __call__(self, z: Tensor) -> Tensor:
        """The logits of a feature; the gradient flows to z alone."""
        weight, bias = self.weight, self.bias
        return F.linear(z, weight.to(z), None if bias is None else bias.to(z))

    def take(self) -> Tensor:
        """The feature z of the pass that was made last, in full precision."""
        seen, self._seen = self._seen, []
        if len(seen) != 1 or seen[0].ndim != 2:
            raise self._error(f"was called {len(seen)} times" if len(seen) != 1 else "is no (B, D)")
        return widened(seen[0])

    def forget(self) -> None:
        """Drop what a pass left."""
        self._seen = []

    def check(self, call: Callable[[Tensor], Any], images: Tensor) -> None:
        """Raise, at the first batch, if the model's logits are not those of the layer."""
        if self._checked or not len(images):
            return
        self.forget()
        with torch.no_grad():
            logits = logits_of(call(images[:2]), len(images[:2]))
            expected = self(self.take())
        same = expected.shape == logits.shape
        if not same or not (expected - logits).abs().max() <= CLOSE * logits.abs().max():
            if bool(logits.isfinite().all()):
                raise self._error("does not give them")
            return  # of these images nothing can be told
        self._checked = True

    def add(self, shift: Tensor | None) -> None:
        """Add to the bias, if there is anything to add, for a model used without this library."""
        if shift is None:
            return
        with torch.no_grad():
            if self.layer.bias is None:
                own = shift.to(self.layer.weight)
                self.layer.bias = nn.Parameter(own, requires_grad=False)
            else:
                self.layer.bias.add_(shift.to(self.layer.bias))

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()
        self.forget()

    def _see(self, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._seen.append(given[0])

    def _kept(self, rows: Tensor) -> Tensor:
        rows = widened(rows.detach())
        for hook in self.model._forward_hooks.values():
            if isinstance(hook, Columns):
                rows = rows.index_select(0, hook.index(rows.device))
        return rows

    def _error(self, problem: str) -> ValueError:
        return ValueError(
            f"head: this method needs the linear layer of {type(self.model).__name__} whose output "
            f"is the logits, called once a pass; {self.name!r} {problem}. Name it: head=... of "
            f"{listed(self._known)}."
        )
