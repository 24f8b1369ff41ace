"""Logits out of whatever a classifier returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def logits_of(output: Any, rows: int) -> Tensor:
    """The (rows, classes) logits of a model's output, in full precision.

    Takes a tensor, an object or a dict with `logits` (Hugging Face), or a tuple led by the tensor.
    """
    found = found_in(output)
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != rows:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"the model must map {rows} images to logits of shape ({rows}, classes), to a tuple "
            f"led by them, or to an object or dict that has them as `logits`; it gave "
            f"{type(output).__name__}{shape}."
        )
    if found.shape[1] < 2:
        raise ValueError(
            f"the model gives {found.shape[1]} class a row; adaptation by entropy needs at least "
            f"two. A single sigmoid output can be given as two logits, (0, o)."
        )
    return found.to(torch.promote_types(found.dtype, torch.float32))


def found_in(output: Any) -> Any:
    """What should be the logits in a model's output; None: there is nothing."""
    if isinstance(output, Mapping):
        return output.get("logits")
    if isinstance(output, Tensor):
        return output
    return getattr(output, "logits", output[0] if isinstance(output, tuple) else None)


def restrict(model: nn.Module, classes: Sequence[int]) -> RemovableHandle:
    """From now on the model gives the logits of these classes alone, in this order.

    Its modules and parameters keep their names. `remove()` on what is returned undoes it.
    """
    return model.register_forward_hook(Columns(classes))


class Columns:
    """A forward hook that keeps some columns of the logits."""

    def __init__(self, classes: Sequence[int]) -> None:
        self._classes, self._index = list(classes), torch.empty(0)

    def __call__(self, model: nn.Module, given: tuple[Tensor, ...], output: Any) -> Tensor:
        """The logits of the kept classes."""
        logits = logits_of(output, len(given[0]))
        return logits.index_select(1, self.index(logits.device))

    def index(self, device: torch.device) -> Tensor:
        """Which columns are kept."""
        if self._index.is_floating_point() or self._index.device != device:
            with torch.inference_mode(False):  # once: a copy in every pass would wait
                self._index = torch.tensor(self._classes, device=device)
        return self._index
