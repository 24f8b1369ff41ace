"""The way of one batch, once for all methods.

    images -> predict -> logits of all rows ------------------------------------> returned
                |
                v select     host: rows + weights      FATA: rows + weights + pseudo-labels
                v learn      forward with gradient on the union of the rows;
                |            FATA's tap runs only the tail again, from z'
                v loss       sum of weighted means, one a term (+ the host's regulariser)
                v update     plain step, or SAM: ascend, learn again, descend
                v observe    running means, moving averages
                v recover    SAR's rule
                v guard      a look at the source model's answers now and then

Rows of GroupNorm and LayerNorm networks do not see each other, so `learn` may run on the selected
rows alone after a gradient-free `predict`: the same gradient for less work. BatchNorm rows share
statistics, so there one pass with gradient serves both.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fata._text import listed
from fata.distributed.ranks import ALONE, Alone, Group
from fata.engine.updates import ascend, either, sgd
from fata.guard.policy import Guard, Watch, Watched
from fata.methods.base import Batch, Memory, Method, OwnStep
from fata.methods.fata import Fata, Perturb, channel_axis
from fata.methods.losses import weighted_mean
from fata.methods.selection import Selection
from fata.network.norms import BatchStatistics, batch_norms, spare_group_norms
from fata.network.outputs import logits_of
from fata.network.parameters import Theta
from fata.network.tap import Tap

# From this share of selected rows on, one pass with gradient over all rows costs less than a
# gradient-free one over all and a second over the selected (`python -m benchmarks.passes`).
DENSE = 0.6
FIRST = 4  # steps of which one should move something


@dataclass
class State:
    """All that changes while a model adapts. Tensors are replaced, never changed in place."""

    theta: Tensor
    velocity: Tensor
    seed: int
    host: Memory = field(default_factory=dict)
    plus: Memory = field(default_factory=dict)
    batches: int = 0
    share: float = 0.0  # moving average of the share of selected rows
    counts: dict[str, int | Tensor] = field(default_factory=dict)
    guard: Memory = field(default_factory=dict)
    watched: Watched = field(default_factory=Watched)

    def count(self, **more: int | Tensor) -> None:
        """Add to the counters; those on the device stay there until somebody asks."""
        for name, number in more.items():
            self.counts[name] = self.counts.get(name, 0) + number


@dataclass(frozen=True)
class Pass:
    """One pass over some images: logits of z, and (on demand) of z'."""

    logits: Tensor
    augmented: Callable[[], Tensor] | None = None
    perturb: Perturb | None = None


@dataclass(frozen=True)
class Terms:
    """What was seen of some rows, and what each term of the loss selected of them."""

    batch: Batch
    host: Selection
    plus: Selection

    def at(self, index: Tensor) -> Terms:
        """The same, of the rows `index` only."""
        return Terms(self.batch.at(index), self.host.at(index), self.plus.at(index))

    def among(self, rows: Tensor) -> Terms:
        """What is selected here and also true in `rows`."""
        return Terms(self.batch, self.host.among(rows), self.plus.among(rows))


class NotFiniteError(Exception):
    """There are pixels that are not finite; the step was undone."""


class Engine:
    """A model that moves: its parameters theta, its state, and the parts that every step shares."""

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
    ) -> None:
        self.model, self.method, self.plus, self.theta, self.rate = model, method, plus, theta, rate
        self.vit, self.seed = vit, seed
        self.tap = Tap(model, plus.layer, self._call) if plus else None
        self.coupled = bool(batch_norms(model)) and method.batch_statistics
        self.source = theta.read()
        self.statistics = BatchStatistics(model, method.prior) if method.batch_statistics else None
        self._spared = spare_group_norms(model)
        self._overwrites: bool | None = None  # whether the model changes its images; None: unknown
        self.fisher: Tensor | None = None
        self.group: Alone = ALONE
        self.selected: tuple[Tensor, Tensor] | None = None  # rows of the last batch, by term
        self._moves = False  # whether a step has moved something, or was said not to
        self.compile_seconds = 0.0
        self.state = self.fresh()
        self.watch = Watch(guard, self) if guard and self._drifts() else None

    def _drifts(self) -> bool:
        """Whether there is something that could go wrong over time."""
        return bool(self.theta.names) and not (
            isinstance(self.method, OwnStep) and self.method.episodic
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        tensors = chain(self.model.parameters(), self.model.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def fresh(self) -> State:
        """The state before the first batch."""
        return State(self.source, torch.zeros_like(self.source), self.seed)

    def generator(self, purpose: str, device: str | None = None) -> torch.Generator:
        """Draws for one purpose on this batch; they depend on (seed, batch, purpose) alone."""
        return torch.Generator(device or self.device).manual_seed(self._seed(purpose))

    def predict(self, images: Tensor, running: bool = False) -> Tensor:
        """Logits of the images as the model stands, without a gradient.

        With `running`, BatchNorm normalises with its running statistics.
        """
        own = self.statistics.suspended() if running and self.statistics else nullcontext()
        with own, torch.no_grad():
            return self.forward(images)

    def still(self, images: Tensor) -> Tensor:
        """Logits of a model that does not learn; of its running statistics, if the guard says."""
        return self.predict(images, self.state.watched.running)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images in full precision, with a gradient where it is enabled.

        A rank without images passes a stand-in, so that it meets the others.
        """
        if not len(images):
            with self.group.standing_in():
                return self.forward(_stand_in(images))[:0]
        return self._pass(images)

    def _pass(self, images: Tensor) -> Tensor:
        self._passed(rows_forward=len(images))
        return logits_of(self._call(images), len(images))

    def apart(self) -> AbstractContextManager[None]:
        """What is passed inside has no part in what other ranks pass."""
        return self.statistics.apart() if self.statistics else nullcontext()

    @property
    def answering(self) -> Tensor:
        """The weights that answer: the adapted ones, the source's or a teacher's."""
        if self.state.watched.source_answers:
            return self.source
        if isinstance(self.method, OwnStep):
            return self.method.answering(self)
        return self.state.theta

    def answer(self, images: Tensor) -> Tensor:
        """Logits of the images from the weights that answer; learns and counts nothing."""
        weights, back = self.answering, self.state.theta
        moved = nullcontext() if weights is back else self.theta.at(weights, back)
        with self.counted_apart(), moved:
            return self.still(images)

    @contextmanager
    def counted_apart(self) -> Iterator[dict[str, int | Tensor]]:
        """What is counted inside is given to the caller instead of to the state."""
        before, counts = self.state.counts, dict[str, int | Tensor]()
        try:
            self.state.counts = counts
            yield counts
        finally:
            self.state.counts = before

    @property
    def checks_pixels(self) -> bool:
        """Whether a step finds out by itself that a pixel is not finite, and says so."""
        return False

    def step(self, images: Tensor) -> Tensor:
        """Predict a batch and learn from it; returns the logits of the clean images.

        A step that fails, or is interrupted, leaves model and state as they were before it.
        """
        watched = replace(self.state.watched, events=list(self.state.watched.events))
        before = replace(self.state, counts=dict(self.state.counts), watched=watched)
        states = self.watch.states if self.watch else ()
        try:
            if not self.theta.names or watched.resting or watched.running:
                self.selected = None
                logits = self.still(images)
            elif isinstance(self.method, OwnStep):
                logits = self.method.step(self, images)
            elif len(images):
                logits = self._step(images)
            else:
                with self.group.standing_in():
                    logits = self._step(_stand_in(images))[:0]
                self.selected = logits[:, 0].bool(), logits[:, 0].bool()
            if self.watch:
                own, logits = logits, self.watch.see(images, logits)
                if logits is not own:
                    self.selected = None  # what was learned from is not what is answered
            self.state.count(seen=len(images))
            self.group.tally(self.state.counts, before.counts)
            if not self._moves:
                self._check_moves(before.counts)
        except BaseException as error:
            self.state, self.selected = before, None
            self.theta.write(before.theta)
            if self.watch:
                self.watch.states = states
            self.group.tell(error)
            raise
        self.state.batches += 1
        return logits

    def join(self, group: Group) -> None:
        """Be one of several ranks from now on."""
        self.group = group
        if self.statistics is not None:
            self.statistics.join(group)
        if self.fisher is not None:
            self.fisher = group.sum(self.fisher) / group.size

    def _call(self, images: Tensor) -> Any:
        """The model's output; from a copy, where the model overwrites the images it is given."""
        if self._overwrites is None:
            copy = images.clone()
            output = self._first(copy)
            self._overwrites = copy._version > 0
            return output
        return self._output(images.clone() if self._overwrites else images)

    def _output(self, images: Tensor) -> Any:
        try:
            return self.model(images)
        except BaseException:
            if self.statistics is not None:
                self.statistics.restore()
            raise

    def _first(self, images: Tensor) -> Any:
        """The first output; where it fails because of another precision, say so."""
        try:
            return self._output(images)
        except RuntimeError as error:
            own = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
            if images.dtype in own or torch.is_autocast_enabled(images.device.type):
                raise
            raise TypeError(
                f"images are {images.dtype} and the model is {', '.join(map(str, own))}: give "
                f"images.to(...) of that type, or call it within torch.autocast."
            ) from error

    def update(self, gradient: Tensor, lr: float, nesterov: bool = False) -> None:
        """Descend. A gradient that is not finite moves nothing, nor does one of zero by itself."""
        state, fine = self.state, gradient.isfinite().all()
        lr *= state.watched.scale
        after = sgd(state.theta, state.velocity, gradient, lr, nesterov)
        moves = fine & after[1].any()
        state.theta, state.velocity = either(fine, after, (state.theta, state.velocity))
        state.count(stepped=moves.long(), dropped=(~moves).long())

    def _check_moves(self, before: Mapping[str, int | Tensor]) -> None:
        """Warn once of parameters that stay; waits for the device until a step has moved some."""
        counts, names, unused = self.state.counts, self.theta.names, self.theta.unused or []
        if all(counts.get(name, 0) == before.get(name, 0) for name in ("host", "plus")):
            return
        stepped, dropped = (int(counts.get(name, 0)) for name in ("stepped", "dropped"))
        reached = len(unused) < len(names)
        if not stepped and dropped < (FIRST if reached else 1):  # a black image may have none
            return
        self._moves = True
        if stepped and not unused:
            return
        what = f"{len(unused)} of {len(names)} parameters that adapt will never move"
        why, which = "no gradient reaches them", unused
        if reached and not stepped:
            what = f"the first {dropped} steps moved nothing"
            why, which = "the gradient of what adapts is zero or not finite", names
        warnings.warn(
            f"{what}: {why} ({listed(which, 4)}). Choose others by params=[...]; of a quantised "
            f"model adapt the float one, and quantise what unwrap() returns.",
            RuntimeWarning,
            stacklevel=6,
        )

    def move(self) -> None:
        """Follow the model to another device."""
        here, state = self.device, self.state
        self.source = self.source.to(here)
        self.fisher = None if self.fisher is None else self.fisher.to(here)
        state.theta, state.velocity = state.theta.to(here), state.velocity.to(here)
        state.host = {name: tensor.to(here) for name, tensor in state.host.items()}
        state.plus = {name: tensor.to(here) for name, tensor in state.plus.items()}
        state.guard = {name: tensor.to(here) for name, tensor in state.guard.items()}
        if self.watch:
            self.watch.forget()
        state.counts = {name: int(number) for name, number in state.counts.items()}

    def leave(self) -> None:
        """Give the model its own statistics back."""
        if self.statistics is not None:
            self.statistics.remove()
        for handle in self._spared:
            handle.remove()

    def check(self, images: Tensor) -> None:
        """Refuse what is no batch of images that the model could take."""
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a tensor, got {type(images).__name__}.")
        if not images.is_floating_point():
            raise TypeError(
                f"images are {images.dtype}: give floating-point images, preprocessed as the model "
                f"expects them (from bytes: images / 255, then mean and std)."
            )
        row, rows = math.prod(images.shape[1:]), images.shape[:1].numel()
        if images.ndim < 2 or not row or (not rows and self.group is ALONE):
            raise ValueError(
                f"images of shape {tuple(images.shape)}: give a batch of at least one image."
            )
        if images.ndim == 3 and any(isinstance(m, nn.Conv2d) for m in self.model.modules()):
            raise ValueError(
                f"images of shape {tuple(images.shape)} are one image: give a batch, image[None]."
            )
        if images.device != self.device:
            raise ValueError(
                f"images are on {images.device} and the model on {self.device}: move one of them."
            )

    def _step(self, images: Tensor) -> Tensor:
        dense = self._dense()
        with torch.set_grad_enabled(dense):
            first = self._tapped(images, self._drawn)
        terms = self._terms(self._seen(images, first.logits), self.state.host)
        self.selected = terms.host.rows, terms.plus.rows
        self._learn(first, terms, dense)
        if self.plus and first.perturb:
            self.state.plus = self.plus.observe(first.perturb, self.state.plus)
        return terms.batch.logits

    def _terms(self, seen: Batch, memory: Memory) -> Terms:
        """What each term selects."""
        host = self.method.select(seen, memory)
        plus = self.plus.select(seen) if self.plus else Selection.none(seen.entropy)
        return Terms(seen, host, plus).among(seen.finite)

    def _drawn(self, z: Tensor) -> Perturb:
        """This batch's perturbation."""
        assert self.tap is not None
        assert self.plus is not None
        axis, draws = channel_axis(z, self.tap.target), self.generator("plus")
        return self.plus.perturb(z, axis, self.state.plus, draws, self.group)

    def _dense(self) -> bool:
        """Whether one pass with gradient over all rows is to serve both."""
        return self.coupled or self.state.share >= DENSE

    def _learn(self, first: Pass, terms: Terms, dense: bool) -> None:
        """Gradient of the selected rows, update, observe, recover."""
        state, seen = self.state, terms.batch
        # A wait for the device: which rows to gather.
        *selected, finite = torch.stack((terms.host.rows, terms.plus.rows, seen.finite)).cpu()
        chosen = torch.stack(selected)
        rows = self.group.rows(len(finite))
        host, plus, either, fine = self.group.numbers(*chosen, chosen.any(0), finite)
        share = self._noted(host, plus, either, rows)
        dense = dense and (self.coupled or fine == rows)  # 0 x NaN is no 0 in a gradient
        last = terms
        if share and self.method.ascent is not None:
            gradient, last = self._sharp(first, terms, chosen, dense, bool(host), bool(plus))
        elif share:
            gradient = (
                self._gradient(first, terms, bool(plus))
                if dense
                else self._slope(first, terms, chosen.any(0), bool(plus))
            )
        else:
            gradient = None
        if gradient is not None:
            self.update(gradient + self._regulariser(state.theta), self.rate(rows))
        state.host = self.method.observe(last.batch, last.host, state.host)
        recovered = self._recover()
        if gradient is not None or recovered:
            self.theta.write(state.theta)

    def _noted(self, host: int, plus: int, either: int, rows: int) -> float:
        """Count the selected rows; the share of them."""
        state = self.state
        state.count(host=host, plus=plus)
        share = (torch.tensor(float(either)) / rows).item()
        state.share = share if not state.batches else 0.9 * state.share + 0.1 * share
        return share

    def _sharp(
        self, first: Pass, terms: Terms, chosen: Tensor, dense: bool, host: bool, plus: bool
    ) -> tuple[Tensor | None, Terms]:
        """SAM: climb on the host's loss alone, then the gradient of all terms up there."""
        theta, rho = self.state.theta, self.method.ascent
        there = theta
        if rho is not None and host:
            gradient = (
                self._gradient(first, terms, plus=False)
                if dense
                else self._slope(first, terms, chosen[0], plus=False, tap=False)
            )
            there = ascend(theta, gradient, rho)
        with self.theta.at(there, back=theta):
            return self._slope_there(first, terms, chosen.any(0), plus)

    def _slope(
        self, first: Pass, terms: Terms, rows: Tensor, plus: bool, tap: bool = True
    ) -> Tensor:
        """Gradient of the terms over some rows of the batch."""
        with self.group.taking(rows.nonzero()[:, 0]) as index:
            here, at = self._again(first, terms, index, tap)
            return self._gradient(here, at, plus)

    def _slope_there(
        self, first: Pass, terms: Terms, rows: Tensor, plus: bool
    ) -> tuple[Tensor | None, Terms]:
        """The same where SAM has climbed to: the host selects again, among the rows it had."""
        with self.group.taking(rows.nonzero()[:, 0]) as index:
            second, last = self._again(first, terms, index)
            again = self._seen(last.batch.images, second.logits)
            host = self.method.select(again, self.state.host).among(last.host.rows & again.finite)
            gradient = None
            if plus or any(self.group.numbers(host.rows)):
                gradient = self._gradient(second, replace(last, host=host), plus=plus)
            return gradient, Terms(again, host, last.plus)

    def _again(
        self, first: Pass, terms: Terms, index: Tensor, tap: bool = True
    ) -> tuple[Pass, Terms]:
        """A pass with gradient over some rows of the batch."""
        index = index.to(terms.batch.logits.device)
        terms = terms.at(index)
        if not self.group.real:
            terms = replace(terms, batch=replace(terms.batch, images=_stand_in(terms.batch.images)))
        with torch.enable_grad():
            if tap and first.perturb:
                perturb = first.perturb.at(index)
                return self._tapped(terms.batch.images, lambda _: perturb), terms
            return Pass(self.forward(terms.batch.images)), terms

    def _tapped(self, images: Tensor, perturbation: Callable[[Tensor], Perturb]) -> Pass:
        """A pass that also knows z's perturbation and, where gradients flow, the tail behind it."""
        if self.tap is None or self.plus is None:
            return Pass(self._pass(images))
        rows = len(images)
        self._passed(rows_forward=rows)
        joint = self.coupled and self.plus.bn_stats == "joint"
        tail = joint or torch.is_grad_enabled()
        recording = self.tap.record(images) if tail else self.tap.feature(images)
        z = recording.z
        perturb = perturbation(z)
        if joint:
            self._passed(rows_tail=2 * rows)
            both = logits_of(recording.tail(torch.cat((z, perturb(z)))), 2 * rows)
            return Pass(both[:rows], lambda: both[rows:], perturb)

        def augmented() -> Tensor:
            self._passed(rows_tail=rows)
            return logits_of(recording.tail(perturb(z)), rows)

        return Pass(logits_of(recording.output, rows), augmented, perturb)

    def _gradient(self, here: Pass, terms: Terms, plus: bool) -> Tensor:
        """Gradient of the sum of the terms' weighted means."""
        self._passed(rows_backward=len(here.logits))
        loss = weighted_mean(self.method.loss(here.logits), terms.host, self.group)
        if plus and self.plus and here.augmented:
            rows = self.plus.row_loss(here.augmented(), here.logits, terms.batch)
            loss = loss + weighted_mean(rows, terms.plus, self.group)
        return self.group.sum(self.theta.gradient(loss))

    def _regulariser(self, theta: Tensor) -> Tensor:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            penalty = self.method.regulariser(theta, self.source, self.fisher)
            if penalty is None:
                return theta.new_zeros(())
            return torch.autograd.grad(penalty, theta)[0]

    def _recover(self) -> bool:
        """Back to the source where the method says so: weights, momentum and its own memory."""
        state, lost = self.state, self.method.recover(self.state.host)
        if lost is None or not lost:
            return False
        state.count(recovered=1)
        state.theta, state.velocity, state.host = self.source, torch.zeros_like(self.source), {}
        return True

    def _seen(self, images: Tensor, logits: Tensor) -> Batch:
        return Batch(images, logits.detach(), self.predict, self._seed("host"), self.group)

    def _passed(self, **rows: int) -> None:
        """Count rows that the network was run on."""
        if self.group.real:
            self.state.count(**rows)

    def _seed(self, purpose: str) -> int:
        text = f"{self.state.seed}/{self.state.batches}/{purpose}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def _stand_in(images: Tensor) -> Tensor:
    """One black image."""
    return images.new_zeros(1, *images.shape[1:])
