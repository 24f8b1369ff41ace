"""What happens to a batch, as functions of tensors: written once, run directly or captured.

    images -> first      logits of all rows, FATA's perturbation ---------------> logits
                v select     host: rows + weights      FATA: rows + weights + pseudo-labels
                v climb      SAM alone: the host's gradient, and up to the ascent point
                v descend    forward with gradient on the union of the rows (FATA's tap runs only
                |            the tail again, from z'); sum of weighted means, one a term, and the
                |            host's regulariser; a step of SGD
                v observe    the host's running means

`engine.py` calls these in order. `direct.py` runs them as they are, `fast/execution.py` captures
them. GroupNorm and LayerNorm rows do not see each other, so `descend_rows` may run on the selected
rows alone: the same gradient for less work. BatchNorm rows share statistics, so there the first
pass carries the gradient and `descend` reuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fata.engine.network import Network, stand_in
from fata.engine.state import Given, Moved, Moving, Pass, Rows, Terms
from fata.engine.updates import ascend, ensemble, guarded_sgd
from fata.methods.balance import mean_prediction, rarity
from fata.methods.base import Batch, Memory, Method, Outputs
from fata.methods.fata import Fata, Perturb
from fata.methods.losses import weighted_mean
from fata.methods.selection import Selection
from fata.network.parameters import Theta

# From this share of selected rows on, one pass with gradient over all rows costs less than a
# gradient-free one over all and a second over the selected (`python -m benchmarks.passes`).
DENSE = 0.6


class Step:
    """The parts of a step of one method on one network; they change nothing but counters.

    Args:
        network: runs the model.
        method: the host.
        plus: FATA, or None.
        theta: the parameters that adapt.
    """

    def __init__(self, network: Network, method: Method, plus: Fata | None, theta: Theta) -> None:
        self.network, self.method, self.plus, self.theta = network, method, plus, theta
        self.source = theta.read()
        self.fisher: Tensor | None = None

    @property
    def balanced(self) -> bool:
        """Whether a term is balanced over the classes."""
        return self.method.balance or bool(self.plus and self.plus.balance)

    def observe(self, images: Tensor, norm: Memory) -> tuple[Tensor, Memory]:
        """Logits of a batch that nothing is learned from, and the memory of BatchNorm's blend."""
        with self.network.observing(norm, len(images)):
            logits = self.network.predict(images)
            return logits, self.network.observed(logits)

    def refer(self, images: Tensor, norm: Memory) -> tuple[Tensor, Memory]:
        """The same with the statistics of the source model beside the adapted one."""
        reference = self.network.reference
        assert reference is not None
        with self.network.referring(reference.observing(norm, len(images))):
            logits = self.network.predict(images)
            return logits, reference.observed(logits)

    def recall(self, images: Tensor, norm: Memory) -> Tensor:
        """Logits of images that have no part in those statistics."""
        reference = self.network.reference
        assert reference is not None
        with self.network.referring(reference.recalling(norm)):
            return self.network.predict(images)

    def first(self, given: Given) -> Pass:
        """A pass over the whole batch, with FATA's perturbation of it; inside `observing`."""

        def perturbation(z: Tensor) -> Perturb:
            assert self.plus is not None
            assert self.network.tap is not None
            axis, group = self.network.tap.channel_axis(z), self.network.group
            return self.plus.perturb(z, axis, given.plus, given.noise, group)

        here = self.network.tapped(given.images, perturbation)
        return replace(here, norm=self.network.observed(here.logits))

    def select(self, batch: Batch, given: Given) -> Terms:
        """The rows that each term selects, of those with finite logits."""
        host = self.method.select(batch, given.host)
        plus = self.plus.select(batch) if self.plus else Selection.none(batch.entropy)
        means = [mean_prediction(batch, given.classes)] if self.balanced else []
        return Terms(batch, host, plus, means, given.views).among(batch.finite)

    def climb(self, here: Pass, at: Terms, theta: Tensor) -> tuple[Tensor]:
        """SAM's ascent point, by the host's loss alone."""
        assert self.method.sam_rho is not None
        gradient, _ = self._gradient(replace(here, augmented=None), at)
        return (ascend(theta, gradient, self.method.sam_rho),)

    def climb_rows(self, rows: Rows, terms: Terms, theta: Tensor) -> tuple[Tensor]:
        """The same, by a new pass over some rows."""
        return self.climb(*self._again(rows, terms, []), theta)

    def descend(self, here: Pass, at: Terms, seen: Terms, memory: Memory, moving: Moving) -> Moved:
        """A step by the gradient of the selected rows, if there are any; then observe.

        Args:
            here: the pass that carries the gradient.
            at: what is selected of its rows.
            seen: what the host observes.
            memory: the host's.
            moving: what moves.
        """
        gradient, loss = self._gradient(here, at)
        gradient = gradient + self._regulariser(moving.theta)
        some = self.network.group.sum((at.host.rows | at.plus.rows).sum()) > 0
        update = guarded_sgd(
            moving.theta, moving.velocity, gradient, moving.lr, some, self.method.nesterov
        )
        if self.method.source_share:
            update = ensemble(update, self.source, self.method.source_share)
        host = self.method.observe(seen.batch, seen.host, memory)
        return Moved(update.theta, update.velocity, host, update.stepped, update.dropped, loss)

    def descend_rows(
        self, rows: Rows, terms: Terms, perturb: Sequence[Perturb], memory: Memory, moving: Moving
    ) -> Moved:
        """The same, by a new pass over some rows.

        At SAM's ascent point the host selects again, among the rows it had.
        """
        if self.method.sam_rho is None:
            return self.descend(*self._again(rows, terms, perturb), terms, memory, moving)
        with self.network.statistics_of(rows.real):
            here, at = self._again(rows, terms, perturb)
            again = replace(at.batch, logits=here.logits.detach())
            host = self.method.select(again, memory).among(at.host.rows & again.finite)
            at = replace(at, host=host)
            return self.descend(here, at, replace(at, batch=again), memory, moving)

    def _again(self, rows: Rows, terms: Terms, perturb: Sequence[Perturb]) -> tuple[Pass, Terms]:
        """A pass with gradient over some rows of the batch, and what is selected of them."""
        at = terms.at(rows.positions)
        if rows.real is not None:
            at = at.among(rows.real)
        if not self.network.group.real:
            at = replace(at, batch=replace(at.batch, images=stand_in(at.batch.images)))
        with torch.enable_grad():
            if perturb:
                one = perturb[0].at(rows.positions)
                return self.network.tapped(at.batch.images, lambda _: one), at
            return self.network.featured(at.batch.images), at

    def _gradient(self, here: Pass, at: Terms) -> tuple[Tensor, Tensor]:
        """Gradient of the sum of the terms' weighted means, and that sum, of this rank's rows."""
        group = self.network.group
        self.network.passed(rows_backward=len(here.logits))
        rare = rarity(at.batch, *at.mean_probs) if at.mean_probs else None
        rows = self.method.row_loss(self._outputs(here, at))
        loss = weighted_mean(rows, at.host, group, rare if self.method.balance else None)
        if self.plus and here.augmented:
            clean, some = here.logits, here.tail
            if some is not None:
                at, clean, rare = at.at(some), clean[some], None if rare is None else rare[some]
            rows = self.plus.row_loss(here.augmented(some), clean, at.batch)
            loss = loss + weighted_mean(rows, at.plus, group, rare if self.plus.balance else None)
        return group.sum(self.theta.gradient(loss)), loss.detach()

    def _outputs(self, here: Pass, at: Terms) -> Outputs:
        """What the host's loss sees; views are passed with the statistics of the rows it has."""
        views = []
        for images in at.views:
            self.network.passed(rows_backward=len(images))
            with torch.enable_grad(), self.network.statistics_of(at.host.rows):
                views.append(self.network.forward(images))
        learned = self.theta.beside
        return Outputs(here.logits, here.features, self.network.head, learned, views)

    def _regulariser(self, theta: Tensor) -> Tensor:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            penalty = self.method.regulariser(theta, self.source, self.fisher)
            if penalty is None:
                return theta.new_zeros(())
            return torch.autograd.grad(penalty, theta)[0]
