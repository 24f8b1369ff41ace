"""The fast way of one batch: a few programs, recorded and compiled, in bfloat16.

    see        a gradient-free pass over all rows, and what each term selects; a method that looks
               at other images to select does so behind it
    climb      SAM's: gradient of the host's rows, and up
    descend    a pass with gradient over the selected rows, update, observe
    whole      all of it (up: as far as the climb), where most rows are selected or where rows share
               BatchNorm's statistics

Rows are padded to a few fixed numbers, since another takes another recording; padding weighs
nothing, in BatchNorm's statistics neither. Between two programs one answer is waited for: which
rows to gather.

Weights that do not adapt are held in bfloat16; what adapts, logits and sums stay in float32. On a
CPU nothing is recorded or padded, so that a method may look in the midst of a pass over all rows,
and bfloat16 is there where it has a unit for its products (Intel's AMX).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_structure

from fata._device import Deferred
from fata.engine.fast.bfloat16 import Half, halves, heads_of, in_half, pays_on_cpu
from fata.engine.fast.programs import Kept, Pools, Program
from fata.engine.step import Engine, NotFiniteError, Pass, Terms
from fata.engine.updates import ascend, either, sgd
from fata.methods.base import BLIND, Batch, Memory, OwnStep
from fata.methods.fata import Perturb, channel_axis
from fata.methods.selection import Selection
from fata.network.norms import norm_layers
from fata.network.outputs import logits_of

LARGE = 5_000_000  # parameters from which on a network is worth compiling
MOST = 64  # programs that are kept, where batches are of many sizes
PARTS = 16  # of a batch, that there are programs for
ROOM = 2  # times the rows that a compiled program may have; one not compiled is 2.5 times as slow
RARE = 64  # times that some number of rows goes through any compiled program that is large enough


class Seen(NamedTuple):
    """What a program is given to see a batch."""

    images: Tensor
    noise: Sequence[Tensor]  # alpha and beta, or nothing
    host: Memory
    plus: Memory


class Where(NamedTuple):
    """Rows to gather."""

    rows: Tensor
    real: Tensor  # which of them are no padding


class Told(NamedTuple):
    """What a program tells of a batch that it saw."""

    logits: Tensor
    finite: Tensor  # rows whose logits are
    pixels: Tensor  # whether all of the images' are
    host: Selection
    plus: Selection
    perturb: Sequence[Perturb]  # one, or none


class Moving(NamedTuple):
    """What moves, and how fast."""

    theta: Tensor
    velocity: Tensor
    lr: Tensor


class Moved(NamedTuple):
    """What a step gave."""

    theta: Tensor
    velocity: Tensor
    host: Memory
    stepped: Tensor
    dropped: Tensor


@dataclass
class Ran:
    """A program, the rows that it passes, and when it last ran."""

    program: Program
    rows: int  # that it is given, with padding,
    of: tuple[str, int]  # for what, and of a batch of how many
    passed: dict[str, int | Tensor] | None = None
    latest: float = 0


class FastEngine(Engine):
    """An engine whose passes are programs."""

    _programs: dict[object, Ran]
    _halves: list[Half] | None
    _heads: list[nn.Module]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._forget()
        self._rows = 0  # of the batch at hand
        self._channels: int | None = None  # of z

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, which records its own: a program knows where this model's weights are."""
        return {**self.__dict__, "_programs": None, "_pools": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def checks_pixels(self) -> bool:
        """Where it learns by programs: what came of them can be undone when that is known.

        Not where rows share statistics on a CPU: there it is known at once.
        """
        by_programs = not isinstance(self.method, OwnStep) and not self._looks_within
        watched = self.state.watched
        learns = bool(self.theta.names) and not (watched.resting or watched.running)
        return by_programs and learns and (self._pads or not self.coupled)

    def move(self) -> None:
        """Follow the model to another device, where everything is recorded anew."""
        super().move()
        self._forget()

    def leave(self) -> None:
        """Also give back the memory of all programs."""
        super().leave()
        self._programs.clear()
        self._halves = []

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images; without a gradient, by a program."""
        if torch.is_grad_enabled():
            return super().forward(images)
        if not self._rows:
            self._find_weights(images)
        rows, real = len(images), list[Tensor]()
        size, shared = self._size(rows, "look"), self.coupled and self._pads and rows < self._rows
        if size > rows or shared:
            where = self._where(torch.arange(rows), size)
            images = images[where.rows] if size > rows else images
            real = [where.real] if shared else []
        logits: Tensor = self._run("look", self._look, images, real)
        return logits[:rows]

    def _step(self, images: Tensor) -> Tensor:
        self._find_weights(images)
        if self._looks_within:
            step = super()._step
            return step(images) if self._pads else self._in_half(step)(images)
        self._rows = len(images)
        try:
            return self._by_programs(images)
        finally:
            self._rows = 0

    @property
    def _looks_within(self) -> bool:
        """Whether it looks in the midst of a pass, which a program cannot."""
        return self.method.looks and (self.method.ascent is not None or not self._pads)

    def _by_programs(self, images: Tensor) -> Tensor:
        state, method = self.state, self.method
        pixels = self._kept.put(images, self._large) if images.is_cuda else images
        given = Seen(pixels, self._noise(images), state.host, state.plus)
        if self.coupled and not method.looks and method.ascent is None:
            told = self._at_once(given)
        else:
            told = self._in_turn(given, images)
        if self._recover():
            self.theta.write(state.theta)
        if self.plus:
            state.plus = self.plus.observe(told.perturb[0], state.plus)
        return told.logits

    def _at_once(self, given: Seen) -> Told:
        """Where rows share statistics, and all learn at once: one program, and no wait for it."""
        fine = Deferred(given.images.isfinite().all())
        moved, told = self._run("whole", self._whole, given, self._moving(), leaves=True)
        self.selected = told.host.rows, told.plus.rows
        if not fine.read():  # known while the program still runs
            raise NotFiniteError
        self.state.count(host=told.host.rows.sum(), plus=told.plus.rows.sum())
        self._take(moved)
        return told  # type: ignore[no-any-return]

    def _in_turn(self, given: Seen, images: Tensor) -> Told:
        """See, wait for the selected rows, learn; learn at once, where most rows were selected."""
        state, sharp = self.state, self.method.ascent is not None
        moving, moved = self._moving(), None
        dense = self._dense() and not self.method.looks
        if not dense:
            told = self._run("see", self._see, given)
        elif sharp:
            _, told = self._run("up", self._up, given, state.theta, leaves=True)
        else:
            moved, told = self._run("whole", self._whole, given, moving, leaves=True)
        terms = Terms(self._seen(images, told.logits), told.host, told.plus)
        if self.method.looks:
            terms = self._terms(terms.batch, state.host)
        self.selected = terms.host.rows, terms.plus.rows
        chosen, fine = self._counted(told)
        if dense and not (fine or self.coupled):  # 0 x NaN is no 0 in a gradient
            self.theta.write(state.theta)
            moved, dense = None, False
        if moved is None:
            self._learn_from(terms, given.images, chosen, told.perturb, moving, climbed=dense)
        else:
            self._take(moved)
        return told  # type: ignore[no-any-return]

    def _learn_from(
        self,
        terms: Terms,
        pixels: Tensor,
        chosen: Tensor,
        perturb: Sequence[Perturb],
        moving: Moving,
        climbed: bool,
    ) -> None:
        """The selected rows' programs, which read the pixels from where the first one did."""
        state, sharp = self.state, self.method.ascent is not None
        host, plus = (bool(rows.any()) for rows in chosen)
        if not host and not plus:
            state.host = self.method.observe(terms.batch, terms.host, state.host)
            return
        terms = replace(terms, batch=replace(terms.batch, images=pixels))
        every = torch.arange(self._rows)
        if sharp and host and not climbed:
            index = every if self.coupled else chosen[0].nonzero()[:, 0]
            where = self._where(index, self._size(len(index), "climb"))
            self._run("climb", self._climb, where, terms, state.theta, leaves=True)
        shared = self.coupled and not sharp  # statistics of the whole batch
        name = "descend with FATA" if plus else "descend"
        index = every if shared else chosen.any(0).nonzero()[:, 0]
        where = self._where(index, self._size(len(index), name))
        given = (where, terms, perturb if plus else [], state.host, moving)
        self._take(self._run(name, self._descend, *given, leaves=True))

    def _take(self, moved: Moved) -> None:
        state = self.state
        state.theta, state.velocity, state.host, stepped, dropped = moved
        state.count(stepped=stepped, dropped=dropped)

    def _counted(self, told: Told) -> tuple[Tensor, bool]:
        """Which rows each term selected, and whether all are finite: a wait for the device."""
        assert self.selected is not None
        pixels = told.pixels.expand_as(told.finite)
        found = torch.stack((*self.selected, told.finite, pixels)).cpu()
        host, plus, finite, fine = found.sum(1).tolist()
        if fine < self._rows:
            raise NotFiniteError
        chosen = found[:2]
        self._noted(host, plus, int(chosen.any(0).sum()), self._rows)
        return chosen, finite == self._rows

    def _noise(self, images: Tensor) -> list[Tensor]:
        """What a batch is perturbed by, alpha and beta."""
        if self.tap is None or self.plus is None:
            return []
        if self._channels is None:
            with torch.no_grad():
                z = self.tap.feature(images[:1]).z
            self._channels = z.shape[channel_axis(z, self.tap.target)]
        draws = self.generator("plus")
        noise = self.plus.draw(self._rows, self._channels, draws, images.device)
        return [part.to(images.device) for part in noise]  # one's own may be elsewhere

    def _moving(self) -> Moving:
        state = self.state
        rate = self.rate(self._rows) * state.watched.scale
        return Moving(state.theta, state.velocity, torch.full_like(state.theta[0], rate))

    def _size(self, rows: int, name: str) -> int:
        """How many rows the program has that they go through."""
        if not self._pads or not 0 < rows <= self._rows:
            return rows
        part = -(-self._rows // PARTS)
        size = min(self._rows, -(-rows // part) * part)
        return min(self._roomy(size, name), default=size)

    def _where(self, index: Tensor, size: int) -> Where:
        """These rows, and as many copies of the first of them as fill a program."""
        rows, device = len(index), self.device
        index = torch.cat((index, index[:1].expand(size - rows)))
        real = torch.arange(size) < rows
        return Where(*(part.to(device, non_blocking=True) for part in (index, real)))

    def _roomy(self, size: int, name: str) -> list[int]:
        """Rows of compiled programs for this that would do: to compile takes a minute or more.

        Even the first calls of a program not compiled take as long as a hundred others.
        """
        at = (name, self._rows)
        self._asked[at, size] += 1
        alike = [ran for ran in self._programs.values() if ran.of == at]
        rare = self._asked[at, size] <= RARE and all(ran.rows != size for ran in alike)
        most = self._rows if rare else min(size * ROOM, self._rows)
        return [ran.rows for ran in alike if size <= ran.rows <= most and ran.program.compiled]

    # -- programs: functions of tensors; one that moves the model gives its weights first ---------

    def _look(self, images: Tensor, real: Sequence[Tensor]) -> Tensor:
        with self._statistics_of(real), torch.no_grad():
            return self._pass(images)

    def _see(self, given: Seen) -> Told:
        with torch.no_grad():
            return _told(*self._pass_over(given))

    def _up(self, given: Seen, theta: Tensor) -> tuple[Tensor, Told]:
        first, terms = self._pass_over(given)
        return self._ascended(first, terms, theta), _told(first, terms)

    def _whole(self, given: Seen, moving: Moving) -> tuple[Moved, Told]:
        first, terms = self._pass_over(given)
        return self._descended(first, terms, terms, given.host, moving), _told(first, terms)

    def _climb(self, where: Where, terms: Terms, theta: Tensor) -> tuple[Tensor]:
        at = terms.at(where.rows).among(where.real)
        return (self._ascended(Pass(self._pass(at.batch.images)), at, theta),)

    def _descend(
        self,
        where: Where,
        terms: Terms,
        perturb: Sequence[Perturb],
        memory: Memory,
        moving: Moving,
    ) -> Moved:
        at = terms.at(where.rows).among(where.real)
        sharp = self.method.ascent is not None
        with self._statistics_of([where.real] if sharp and self._pads else []):
            here = self._again_from(at.batch.images, [one.at(where.rows) for one in perturb])
            if sharp:  # the host selects again, among the rows it had
                again = replace(at.batch, logits=here.logits.detach())
                host = self.method.select(again, memory).among(at.host.rows & again.finite)
                at = replace(at, host=host)
                terms = replace(at, batch=again)
            return self._descended(here, at, terms, memory, moving)

    # -- their parts --------------------------------------------------------------------------

    def _pass_over(self, given: Seen) -> tuple[Pass, Terms]:
        """A pass over the batch, and what is selected of it."""

        def perturbed(z: Tensor) -> Perturb:
            assert self.tap is not None
            assert self.plus is not None
            plus = replace(self.plus, noise=lambda *_: given.noise)
            return plus.perturb(z, channel_axis(z, self.tap.target), given.plus, None)

        first = self._tapped(given.images, perturbed)
        seen = _blind(given.images, first.logits.detach())
        nothing = Selection.none(seen.entropy)
        if self.method.looks:
            return first, Terms(seen, nothing, nothing)
        return first, self._terms(seen, given.host)

    def _again_from(self, images: Tensor, perturb: Sequence[Perturb]) -> Pass:
        """A pass over some rows, with the tail of z' where there is one."""
        if perturb:
            return self._tapped(images, lambda _: perturb[0])
        return Pass(self._pass(images))

    def _ascended(self, here: Pass, at: Terms, theta: Tensor) -> Tensor:
        assert self.method.ascent is not None
        there = ascend(theta, self._gradient(here, at, plus=False), self.method.ascent)
        return torch.where(there.isfinite().all(), there, theta)

    def _descended(
        self, here: Pass, at: Terms, terms: Terms, memory: Memory, moving: Moving
    ) -> Moved:
        """One step, if there are rows to learn from and their gradient is finite; observe."""
        before = moving.theta, moving.velocity
        gradient = self._gradient(here, at, plus=True) + self._regulariser(moving.theta)
        some, fine = at.host.rows.any() | at.plus.rows.any(), gradient.isfinite().all()
        after = sgd(*before, gradient, moving.lr)
        moves = some & fine & after[1].any()
        theta, velocity = either(some & fine, after, before)
        host = self.method.observe(terms.batch, terms.host, memory)
        return Moved(theta, velocity, host, moves.long(), (some & ~moves).long())

    def _statistics_of(self, real: Sequence[Tensor]) -> AbstractContextManager[None]:
        """BatchNorm's statistics without the padding."""
        return self.statistics.of(real[0]) if real and self.statistics else nullcontext()

    # -- how they are run ---------------------------------------------------------------------

    def _run(
        self, name: str, function: Callable[..., Any], *given: Any, leaves: bool = False
    ) -> Any:
        """Run a program; it counts the rows that it passes, and may leave weights in the model."""
        active = self.statistics is None or self.statistics.active
        tensors, alike = list[Tensor](), [name, active]
        flatten(given, tensors, alike)
        at = tuple(alike)
        ran = self._programs.get(at)
        if ran is None:
            after = self.theta.write if leaves else None
            rows = len(tensors[0])
            what = f"{name}, {rows} rows"
            function, spec = self._in_half(function), tree_structure(given)
            program = Program(function, spec, after, self._pools, what, self._large, self._kept)
            ran = Ran(program, rows, (name, self._rows))
        before = ran.program.compile_seconds
        with self.counted_apart() as passed:
            outcome = ran.program(tensors)
        self.compile_seconds += ran.program.compile_seconds - before
        if ran.passed is None:
            ran.passed = passed
            while len(self._programs) >= MOST:
                del self._programs[min(self._programs, key=lambda at: self._programs[at].latest)]
            self._programs[at] = ran
        ran.latest = time.monotonic()
        self.state.count(**ran.passed)
        return outcome

    def _in_half(self, function: Callable[..., Any]) -> Callable[..., Any]:
        weights = self._halves
        if not weights:
            return function

        def halved(*given: Any) -> Any:
            with in_half(weights, self._norms, self._heads, self.device):
                return function(*given)

        return halved

    def _find_weights(self, images: Tensor) -> None:
        """Begin anew where they are others, as after `model.half()`."""
        if self._known != self._weights():
            self._forget()
        if self._halves is None:
            pays = self.device.type == "cuda" or pays_on_cpu(self.model, self.device)
            self._halves = list(self._halved(images)) if pays else []

    def _weights(self) -> list[int]:
        """Where all are, and how often those were changed that do not adapt."""
        return [p.data_ptr() for p in self._parameters] + [p._version for p in self._still]

    def _halved(self, images: Tensor) -> Iterator[Half]:
        def logits() -> Tensor:
            with torch.no_grad():
                return logits_of(self._call(images), len(images))

        self._heads = heads_of(self.model, logits)
        return halves(self.model, self.theta.parameters, self._heads, self._large)

    def _forget(self) -> None:
        self._programs, self._asked = {}, Counter[object]()
        self._parameters = list(self.model.parameters())
        moving = {id(parameter) for parameter in self.theta.parameters}
        self._still = [p for p in self._parameters if id(p) not in moving and not p.is_inference()]
        self._known = self._weights()
        self._pads = on_gpu = self.device.type == "cuda"
        self._pools, self._kept = Pools(), Kept()
        self._large = on_gpu and sum(p.numel() for p in self.model.parameters()) >= LARGE
        self._norms = [norm for _, norm in norm_layers(self.model)]
        self._halves, self._heads = None, []  # until the first images come


def _no_look(images: Tensor) -> NoReturn:
    raise RuntimeError(BLIND)


def _blind(images: Tensor, logits: Tensor) -> Batch:
    """A batch as a program may see it."""
    return Batch(images, logits, _no_look, None)


def _told(first: Pass, terms: Terms) -> Told:
    perturb = [first.perturb] if first.perturb else []
    batch, pixels = terms.batch, terms.batch.images.isfinite().all()
    return Told(batch.logits, batch.finite, pixels, terms.host, terms.plus, perturb)


# What else than tuples, lists and dicts holds tensors: its parts and what is fixed in it, and back.
NODES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    Selection: (lambda s: ([s.rows, s.weights], None), lambda parts, _: Selection(*parts)),
    Perturb: (
        lambda p: ([p.alpha, p.beta, p.delta], (p.axis, p.single)),
        lambda parts, fixed: Perturb(*parts, *fixed),
    ),
    Batch: (lambda b: ([b.images, b.logits], None), lambda parts, _: _blind(*parts)),
    Terms: (lambda t: ([t.batch, t.host, t.plus], None), lambda parts, _: Terms(*parts)),
}
for kind, (apart, together) in NODES.items():
    register_pytree_node(kind, apart, together)


def flatten(tree: Any, tensors: list[Tensor], alike: list[Any]) -> None:
    """Its tensors, in torch's order, and what all trees have in common that one program is for.

    Torch's own takes four times as long, while the device waits.
    """
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
    alike.append(fixed)
    for part in parts:
        flatten(part, tensors, alike)
