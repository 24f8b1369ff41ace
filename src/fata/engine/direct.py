"""How the functions of a step are run: here directly; `fast/execution.py` captures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fata.engine.state import Given, Moving, Rows, Seen
from fata.engine.step import Step
from fata.methods.base import Batch


class NotFiniteError(Exception):
    """There are pixels that are not finite; the step was undone."""


class Direct:
    """Runs the functions of a step as they are, in the model's own precision.

    Args:
        step: has the functions.
    """

    compile_seconds = 0.0
    compiles = False  # whether a pass is compiled when it runs
    captures_steps = False  # whether a step is captured, and raises NotFiniteError by itself

    def __init__(self, step: Step) -> None:
        self.step, self.network = step, step.network

    def predict(self, images: Tensor) -> Tensor:
        """Logits of the images without a gradient."""
        return self.network.predict(images)

    def stepping(self, images: Tensor) -> AbstractContextManager[None]:
        """Surrounds a step on these images."""
        return nullcontext()

    def place(self, images: Tensor) -> Tensor:
        """The images where the functions read them."""
        return images

    def see(
        self,
        given: Given,
        moving: Moving,
        dense: bool,
        batch: Callable[[Tensor, Sequence[Tensor]], Batch],
    ) -> Seen:
        """The first pass, and what is selected.

        Args:
            given: the batch and what its first pass needs.
            moving: what would move.
            dense: whether the pass is to carry the gradient of all rows.
            batch: what a method is shown, by its logits and penultimate feature.
        """
        observing = self.network.observing(given.norm, len(given.images))
        with torch.set_grad_enabled(dense), observing:
            first = self.step.first(given)
        self.network.write(first.norm)
        features = [feature.detach() for feature in first.features]
        terms = self.step.select(batch(first.logits.detach(), features), given)
        finite = terms.batch.finite
        carries = first if dense else None
        pixels = torch.ones_like(finite)
        return Seen(terms, first.perturb, finite, pixels, first.norm, first=carries)

    def rows(self, index: Tensor) -> Rows:
        """Rows to gather."""
        return Rows(index.to(self.network.device))

    def sizes(self, rows: int) -> list[int]:
        """Numbers of selected rows of a batch that are captured apart; none: nothing is."""
        return []

    def run(self, name: str, function: Callable[..., Any], *given: Any, moves: bool = False) -> Any:
        """Call a function of the step; if it `moves`, its first output becomes the weights."""
        outcome = function(*given)
        if moves:
            self.step.theta.write(outcome[0])
        return outcome

    def forget(self) -> None:
        """The model is on another device now."""

    def close(self) -> None:
        """Give all memory back."""
