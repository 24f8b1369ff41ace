"""One adapting model: calls the parts of a step in order, keeps the state, undoes what fails.

    images -> see -> logits of all rows -------------------------------------------> returned
               v rows        which rows were selected: the one wait for the device
               v learn       SAM's ascent, descent, the host's running means
               v recover     SAR's rule
               v observe     FATA's moving average
               v guard       compares with the source model's predictions now and then

`step.py` has the functions of a step, `direct.py` how they are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fata.distributed.ranks import Ranks
from fata.engine import draws, unmoved
from fata.engine.direct import Direct, NotFiniteError
from fata.engine.network import Network, stand_in
from fata.engine.source_model import Known, SourceModel
from fata.engine.state import Given, Moved, Moving, Seen, State
from fata.engine.step import DENSE, Step
from fata.engine.updates import guarded_sgd
from fata.guard.events import Phase
from fata.guard.policy import Guard, Watch
from fata.methods.base import Batch, CustomStep, Method
from fata.methods.fata import Fata
from fata.network.parameters import Theta


class Engine:
    """A model that moves: its parameters theta, its state, and the step that changes both."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        plus: Fata | None,
        theta: Theta,
        rate: Callable[[int], float],
        vit: bool,
        seed: int,
        guard: Guard | None = None,
        execution: type[Direct] = Direct,
        reset_every: int | None = None,
    ) -> None:
        self.reset_every = reset_every  # batches
        self.theta, self.rate, self.vit, self.seed = theta, rate, vit, seed
        self.network = Network(model, method, plus, self._count)
        self.functions = Step(self.network, method, plus, theta)
        self.execution = execution(self.functions)
        self.source_model = SourceModel(self.functions, self.execution)
        self.selected: tuple[Tensor, Tensor] | None = None  # rows of the last batch, by term
        self.loss: Tensor | None = None  # of the last batch; None: no step was taken
        self.learned = self.source_predicted = False  # the last batch: learned from, by the source
        self._moves = False  # whether a step has moved something, or was said not to
        self.state = self.fresh()
        drifts = self.adapts and not (isinstance(method, CustomStep) and method.episodic)
        self.watch = Watch(guard, self) if guard and drifts else None
        if self.watch:
            self.network.refer()

    @property
    def adapts(self) -> bool:
        """Whether there is anything that could be learned."""
        return bool(self.theta.names) or self.method.gradient_free

    @property
    def method(self) -> Method:
        """The host."""
        return self.functions.method

    @property
    def plus(self) -> Fata | None:
        """FATA, or None."""
        return self.functions.plus

    @property
    def layer(self) -> str | None:
        """Name of the layer that FATA taps."""
        return self.network.tap.layer if self.network.tap else None

    @property
    def source(self) -> Tensor:
        """The parameters before the first batch."""
        return self.functions.source

    @property
    def group(self) -> Ranks:
        """The ranks that share every batch."""
        return self.network.group

    @property
    def coupled(self) -> bool:
        """Whether the rows of a batch see each other, by BatchNorm."""
        return self.network.coupled

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.network.device

    def fresh(self) -> State:
        """The state before the first batch."""
        return State(self.source, torch.zeros_like(self.source), self.seed)

    def generator(self, purpose: str, device: str | None = None) -> torch.Generator:
        """Random draws for one purpose on this batch; they depend on (seed, batch, purpose)."""
        return torch.Generator(device or self.device).manual_seed(draws.seed(self.state, purpose))

    # -- predicting ---------------------------------------------------------------------------

    def predict(self, images: Tensor, running: bool = False) -> Tensor:
        """Logits as the model stands, without a gradient; `running`: of running statistics."""
        statistics = self.network.running_statistics() if running else nullcontext()
        with statistics, torch.no_grad():
            return self.execution.predict(images)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images, with a gradient where it is enabled."""
        run = self.network.forward if torch.is_grad_enabled() else self.execution.predict
        return run(images)

    @property
    def prediction_weights(self) -> Tensor:
        """The weights that predict: the adapted ones, the source's or a teacher's."""
        if self.state.watched.source_predicts:
            return self.source
        if isinstance(self.method, CustomStep):
            return self.method.prediction_weights(self)
        return self.state.theta

    def predict_only(self, images: Tensor) -> Tensor:
        """What a frozen adapter predicts; learns and counts nothing."""
        weights, back = self.prediction_weights, self.state.theta
        self.source_predicted = weights is self.source or not self.learns
        if self.state.watched.source_predicts:
            return self.source_model.recall(images, self.state)
        moved = nullcontext() if weights is back else self.theta.at(weights, back)
        with self.counted_apart(), moved:
            self.network.check_head(images)
            logits = self.predict(images)
        if not self.learns:
            return logits
        return self.method.answer(self._batch(images, logits), self.state.host, learned=False)

    def shift(self) -> None:
        """Give the model's classifier what the method adds to its logits, before it is given up."""
        head = self.network.head
        if head and self.adapts and not self.state.watched.source_predicts:
            head.add(self.method.shift(head.layer.weight.detach(), self.state.host))

    def counted_apart(self) -> AbstractContextManager[dict[str, int]]:
        """The rows that are passed inside are not counted in the state."""
        return self.network.counted_apart()

    def local_statistics(self) -> AbstractContextManager[None]:
        """BatchNorm uses this rank's rows alone."""
        return self.network.local_statistics()

    # -- one batch ----------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether the next batch is learned from."""
        return self.adapts and self.state.watched.phase is not Phase.REST

    @property
    def captures_steps(self) -> bool:
        """Whether the next step raises NotFiniteError by itself."""
        custom = isinstance(self.method, CustomStep)
        return self.learns and not custom and self.execution.captures_steps

    def step(self, images: Tensor) -> Tensor:
        """Predict a batch and learn from it; if that fails, all is as it was before."""
        watched = replace(self.state.watched, events=list(self.state.watched.events))
        before = replace(self.state, counts=dict(self.state.counts), watched=watched)
        try:
            self._reset_in_time()
            self.source_model.known = None
            self.source_predicted = not self.learns
            logits = self._learned(images)
            if self.watch:
                logits = self.watch.see(images, logits)
                if self.state.watched.source_predicts:
                    self.selected, self.source_predicted = None, True  # others were learned from
            self.state.count(seen=len(images))
            self.group.tally(self.state.counts, before.counts)
            if not self._moves:
                self._moves = unmoved.check(self.theta, self.state.counts, before.counts)
        except BaseException as error:
            self.state, self.selected = before, None
            self.write()
            self.group.tell(error)
            raise
        self.state.batches, self.learned = self.state.batches + 1, True
        return logits

    def _reset_in_time(self) -> None:
        """Restart from the source weights after every so many batches (RDumb)."""
        if not self.reset_every or not self.state.batches or self.state.batches % self.reset_every:
            return
        self.state = self.state.restarted(self.source)
        self.state.count(reset=1)
        self.write()

    def _learned(self, images: Tensor) -> Tensor:
        """Logits of a batch, once it is learned from."""
        if not self.learns:
            self.selected = None
            if self.adapts:
                return self.source_model.predict(images, self.state)
            return self._observed(images)
        if isinstance(self.method, CustomStep):
            return self.method.step(self, images)
        self.network.check_head(images)
        if len(images):
            with self.execution.stepping(images):
                return self._step(images)
        with self.group.standing_in():
            logits = self._step(stand_in(images))[:0]
        self.selected = logits[:, 0].bool(), logits[:, 0].bool()
        return logits

    def _observed(self, images: Tensor) -> Tensor:
        """Logits of a batch that is not learned from; it has a part in BatchNorm's blend."""
        if self.network.blend is None:
            return self.predict(images)
        self._begin_blend(images)
        with self.execution.stepping(images):
            given = self.functions.observe, images, self.state.norm
            logits, self.state.norm = self.execution.run("observe", *given)
        self.network.write(self.state.norm)
        return logits  # type: ignore[no-any-return]

    def _begin_blend(self, images: Tensor) -> None:
        """By the predictions of the first batch, with the source's statistics."""
        if self.network.blend is not None and not self.state.norm:
            with self.counted_apart():
                self.state.norm = self.network.blend.begin(self.predict(images, running=True))

    def _step(self, images: Tensor) -> Tensor:
        """The step of one batch; see the top of this file."""
        state, begins = self.state, not self.state.norm and not self.state.guard
        first = not state.batches and state.theta is self.source
        self._begin_blend(images)
        placed = self.execution.place(images)
        noise = draws.noise(self.network, self.plus, images, self.generator)
        views = draws.views(self.method, self.group, images, self.generator)
        given = Given(placed, noise, state.host, state.plus, state.classes, state.norm, views)
        rate = self.rate(self.group.rows(len(images))) * state.watched.scale
        lr = self.theta.rates(state.theta.new_full((), rate))
        moving = Moving(state.theta, state.velocity, lr)
        behind = self.network.blend and self.method.select_runs_model  # as a capture learns
        dense = bool(self.theta.names) and not behind and (self.coupled or state.share >= DENSE)
        seen = self.execution.see(given, moving, dense, partial(self._batch, images))
        terms, moved, state.norm = seen.terms, seen.moved, seen.norm
        self.selected = terms.host.rows, terms.plus.rows
        if first:
            self.source_model.known = Known(terms.batch.logits, state.norm if begins else {})
        if moved is not None and self.coupled:  # all rows learn at once: nothing to wait for
            state.count(host=terms.host.rows.sum(), plus=terms.plus.rows.sum())
        else:
            moved = self._learn(seen, given.images, moving)
        if moved is not None:
            state.theta, state.velocity, state.host, stepped, dropped, self.loss = moved
            state.count(stepped=stepped, dropped=dropped)
        if terms.mean_probs:
            state.classes = {"mean_probs": terms.mean_probs[0]}
        if self._recover():
            self.theta.write(state.theta)
        if self.plus and seen.perturb:
            state.plus = self.plus.observe(seen.perturb, state.plus)
        return self.method.answer(terms.batch, state.host, learned=True)

    def _learn(self, seen: Seen, images: Tensor, moving: Moving) -> Moved | None:
        """Learn from the selected rows, read from `images`; None: there are none."""
        chosen, host, plus, whole = self._rows(seen)
        if not whole:  # 0 x NaN is not 0 in a gradient of all rows
            self.theta.write(moving.theta)
            seen = replace(seen, first=None, climbed=False, moved=None)
        if seen.moved is not None:
            return seen.moved
        terms = seen.terms
        if not host and not plus:
            self.state.host = self.method.observe(terms.batch, terms.host, self.state.host)
            return None
        seen = replace(seen, terms=replace(terms, batch=replace(terms.batch, images=images)))
        if self.method.sam_rho is not None:
            if host and not seen.climbed:
                self._climb(seen, chosen[0], moving)
            return self._descend(seen, chosen.any(0), plus, moving)
        if seen.first is None:
            rows = torch.ones_like(chosen[0]) if self.coupled else chosen.any(0)
            return self._descend(seen, rows, plus, moving)
        first = seen.first if plus else replace(seen.first, augmented=None)
        if chosen[1].any() and not chosen[1].all() and not self.coupled:
            first = replace(first, tail=chosen[1].nonzero()[:, 0].to(self.device))
        given = first, terms, terms, self.state.host, moving
        moved: Moved = self.execution.run("descend", self.functions.descend, *given, moves=True)
        return moved

    def _climb(self, seen: Seen, rows: Tensor, moving: Moving) -> None:
        """The model goes to SAM's ascent point."""
        functions, run = self.functions, self.execution.run
        if seen.first is not None:
            run("climb", functions.climb, seen.first, seen.terms, moving.theta, moves=True)
            return
        rows = torch.ones_like(rows) if self.coupled else rows
        with self.group.taking(rows.nonzero()[:, 0]) as index:
            given = self.execution.rows(index), seen.terms, moving.theta
            run("climb", functions.climb_rows, *given, moves=True)

    def _descend(self, seen: Seen, rows: Tensor, plus: bool, moving: Moving) -> Moved:
        """A step by a new pass over some rows."""
        name = "descend with FATA" if plus else "descend"
        perturb = [seen.perturb] if plus and seen.perturb else []
        with self.group.taking(rows.nonzero()[:, 0]) as index:
            given = self.execution.rows(index), seen.terms, perturb, self.state.host, moving
            moved: Moved = self.execution.run(name, self.functions.descend_rows, *given, moves=True)
        return moved

    def _rows(self, seen: Seen) -> tuple[Tensor, bool, bool, bool]:
        """Which rows each term selected: the wait for the device.

        Also whether each term selected any, on some rank; and whether a gradient of all rows will
        do: rows that are not finite spoil it, unless they share statistics with the others anyway.
        """
        state, terms = self.state, seen.terms
        found = torch.stack((terms.host.rows, terms.plus.rows, seen.finite, seen.pixels)).cpu()
        if not found[3].all():
            raise NotFiniteError
        chosen, finite = found[:2], found[2]
        rows = self.group.rows(len(finite))
        host, plus, either, fine = self.group.numbers(*chosen, chosen.any(0), finite)
        state.count(host=host, plus=plus)
        # Where steps are captured, a new number of rows costs more than some batches in one pass.
        kept = 0.9 * (state.share < 1 or self.execution.captures_steps)
        state.share = kept * state.share + (1 - kept) * (torch.tensor(float(either)) / rows).item()
        return chosen, bool(host), bool(plus), self.coupled or fine == rows

    def _recover(self) -> bool:
        """Restart from the source weights where the method says so, with no momentum or memory."""
        state = self.state
        if not self.method.recover(state.host):
            return False
        state.count(recovered=1)
        state.return_to(self.source)
        return True

    def update(self, gradient: Tensor, lr: float, nesterov: bool = False) -> None:
        """Descend. A gradient that is not finite moves nothing, nor does one of zero by itself."""
        state = self.state
        lr *= state.watched.scale
        update = guarded_sgd(state.theta, state.velocity, gradient, lr, nesterov=nesterov)
        state.theta, state.velocity, stepped, dropped = update
        state.count(stepped=stepped, dropped=dropped)

    def _batch(self, images: Tensor, logits: Tensor, features: Sequence[Tensor] = ()) -> Batch:
        """A batch as a method sees it."""
        seed, group, head = draws.seed(self.state, "host"), self.group, self.network.head
        return Batch(images, logits, self.predict, seed, group, features, head, group.real)

    # -- where it is --------------------------------------------------------------------------

    def join(self, group: Ranks) -> None:
        """Share every batch with other ranks from now on."""
        self.network.join(group)
        if self.functions.fisher is not None:
            self.functions.fisher = group.sum(self.functions.fisher) / group.size

    def move(self) -> None:
        """Follow the model to another device."""
        here, functions = self.device, self.functions
        functions.source = functions.source.to(here)
        self.theta.move(here)
        functions.fisher = None if functions.fisher is None else functions.fisher.to(here)
        self.state.move(here)
        self.network.move(here)
        self.execution.forget()

    def write(self) -> None:
        """Give the model the weights and the statistics of the state."""
        self.theta.write(self.state.theta)
        self.network.write(self.state.norm)

    def close(self) -> None:
        """Give the model its own statistics back."""
        self.network.close()
        self.execution.close()

    def _count(self, **rows: int) -> None:
        self.state.count(**rows)
