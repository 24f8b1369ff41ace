"""The fast way of one batch: the engine's passes as recorded programs, in bfloat16.

    predict    a gradient-free program over all rows
    learn      a program over the selected rows, padded to a few fixed numbers of rows; padding
               weighs nothing. BatchNorm rows share statistics and are never padded.

On a GPU a program is recorded as a CUDA graph when it is wanted for the second time with the same
number of rows, and replayed from then on: one launch instead of some thousand. Weights that do not
adapt are held in bfloat16; what adapts, losses and sums stay in float32. On the CPU programs run as
they are, in the model's own precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fata.augment import Perturb, channel_axis
from fata.engine import Engine, Pass, Terms
from fata.method import Batch
from fata.outputs import logits_of
from fata.selection import Selection

PARTS = 8  # numbers of rows that are recorded: eighths of a batch

Function = Callable[..., tuple[Tensor, ...]]


@dataclass
class Program:
    """A function of tensors of fixed shapes; recorded when it is first called, then replayed.

    Args:
        function: gives the same outputs for the same inputs and weights.
        pool: memory that all programs share; they never run at the same time.
    """

    function: Function
    pool: Any
    _graph: torch.cuda.CUDAGraph | None = None
    _inputs: list[Tensor] = field(default_factory=list, repr=False)
    _outputs: tuple[Tensor, ...] = field(default=(), repr=False)
    _fails: bool = False

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it; on a GPU the outputs are overwritten by the next run."""
        if self._graph is None and not self._fails and inputs[0].is_cuda:
            self._record(inputs)
        if self._graph is None:
            return self.function(*inputs)
        for here, given in zip(self._inputs, inputs, strict=True):
            here.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _record(self, inputs: Sequence[Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        own = [tensor.clone() for tensor in inputs]
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self._outputs = self.function(*own)
        except RuntimeError as error:
            self._fails = True
            warnings.warn(
                f"the model cannot be recorded and runs launch by launch: {error}", stacklevel=2
            )
            return
        self._graph, self._inputs = graph, own


class FastEngine(Engine):
    """An engine whose passes are programs."""

    _programs: dict[object, tuple[Program, dict[str, int | Tensor]]]
    _halves: list[tuple[nn.Module, str, nn.Parameter]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._forget()
        self._rows = 0  # of the batch at hand

    def move(self) -> None:
        """Follow the model to another device, where everything is recorded anew."""
        super().move()
        self._forget()

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images; without a gradient, by a program."""
        if torch.is_grad_enabled():
            return super().forward(images)
        size = self._padded(len(images))
        (logits,) = self._run("look", self._look, _filled(images, size))
        return logits[: len(images)].clone()

    def _step(self, images: Tensor) -> Tensor:
        self._rows = len(images)
        try:
            return super()._step(images)
        finally:
            self._rows = 0

    @property
    def _joint(self) -> bool:
        """Clean and augmented rows share statistics: then there is no pass of the clean alone."""
        return self.coupled and self.plus is not None and self.plus.bn_stats == "joint"

    def _dense(self) -> bool:
        return self._joint

    def _tapped(self, images: Tensor, perturb: Perturb | None = None) -> Pass:
        if torch.is_grad_enabled() or self.tap is None or self.plus is None or self._joint:
            return super()._tapped(images, perturb)
        logits, z = self._run("feel", self._feel, images)
        axis = channel_axis(z, self.tap.target)
        perturb = self.plus.perturb(z, axis, self.state.plus, self.generator("plus"))
        return Pass(logits.clone(), None, perturb)

    def _slope(
        self, first: Pass, terms: Terms, rows: Tensor, plus: bool, tap: bool = True
    ) -> Tensor:
        rows = torch.ones_like(rows) if self.coupled else rows
        perturb = first.perturb if tap else None
        tensors = self._gathered(perturb, terms, rows)

        def slope(*tensors: Tensor) -> tuple[Tensor, ...]:
            here, at = self._rebuilt(tensors, perturb)
            return (self._gradient(here, at, plus),)

        (gradient,) = self._run(("slope", plus, tap), slope, *tensors)
        return gradient

    def _slope_there(
        self, first: Pass, terms: Terms, rows: Tensor, plus: bool
    ) -> tuple[Tensor | None, Terms]:
        if self._joint:
            return super()._slope_there(first, terms, rows, plus)
        perturb, memory = first.perturb, self.state.host
        names = sorted(memory)

        def slope(*tensors: Tensor) -> tuple[Tensor, ...]:
            kept = dict(zip(names, tensors, strict=False))
            here, at = self._rebuilt(tensors[len(names) :], perturb)
            again = replace(at.batch, logits=here.logits.detach())
            host = self.method.select(again, kept).among(at.host.rows & again.finite)
            gradient = self._gradient(here, replace(at, host=host), plus)
            return gradient, again.logits, host.rows

        tensors = self._gathered(perturb, terms, rows)
        remembered = [memory[name] for name in names]
        gradient, logits, kept = self._run(("there", plus, *names), slope, *remembered, *tensors)
        again = self._seen(tensors[0], logits.clone())
        host = self.method.select(again, memory).among(kept.clone())
        some = plus or bool(host.rows.any())
        return gradient if some else None, Terms(again, host, Selection.none(again.entropy))

    # -- programs -----------------------------------------------------------------------------

    def _run(self, name: object, function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run a program, recorded or not; either counts the rows that it passes."""
        active = self.statistics is None or self.statistics.active
        at = (name, active, *(tensor.shape for tensor in tensors))
        if at not in self._programs:
            with self.counted_apart() as counts:
                outputs = self._in_half(function)(*tensors)
            self._programs[at] = Program(self._in_half(function), self._pool), counts
        else:
            program, counts = self._programs[at]
            with self.counted_apart():
                outputs = program(*tensors)
        self.state.count(**counts)
        return outputs

    def _look(self, images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (super().forward(images),)

    def _feel(self, images: Tensor) -> tuple[Tensor, ...]:
        assert self.tap is not None
        with torch.no_grad():
            self.state.count(rows_forward=len(images))
            recording = self.tap.feature(images)
            return logits_of(recording.output, len(images)), recording.z

    def _gathered(self, perturb: Perturb | None, terms: Terms, rows: Tensor) -> list[Tensor]:
        """What a program learns from: the rows asked for, padded by rows of weight zero."""
        index = rows.nonzero()[:, 0]
        count, size = len(index), self._padded(len(index))
        index = torch.cat((index, index.new_zeros(size - count)))
        index = index.to(terms.batch.logits.device, non_blocking=True)
        at = terms.at(index)
        real = torch.arange(size, device=index.device) < count
        tensors = [at.batch.images, at.batch.logits]
        for selection in (at.host, at.plus):
            tensors += [selection.rows & real, selection.weights]
        if perturb is not None:
            some = perturb.at(index)
            tensors += [some.alpha, some.beta, some.delta]
        return tensors

    def _rebuilt(self, tensors: Sequence[Tensor], perturb: Perturb | None) -> tuple[Pass, Terms]:
        """A pass with gradient over what `_gathered` gave."""
        images, logits, host, host_weights, plus, plus_weights = tensors[:6]
        batch = Batch(images, logits, self.predict, 0)
        terms = Terms(batch, Selection(host, host_weights), Selection(plus, plus_weights))
        with torch.enable_grad():
            if perturb is None:
                return Pass(super().forward(images)), terms
            alpha, beta, delta = tensors[6:]
            return super()._tapped(images, Perturb(alpha, beta, delta, perturb.axis)), terms

    def _padded(self, rows: int) -> int:
        """How many rows a program is run with."""
        if self.coupled or rows > self._rows:
            return rows
        part = max(1, self._rows // PARTS)
        return min(self._rows, -(-rows // part) * part)

    def _in_half(self, function: Function) -> Function:
        if not self._halves:
            return function

        def halved(*tensors: Tensor) -> tuple[Tensor, ...]:
            with _swapped(self._halves), torch.autocast("cuda", torch.bfloat16):
                return function(*tensors)

        return halved

    def _forget(self) -> None:
        self._programs = {}
        on_gpu = self.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._halves = list(_halves(self.model, self.theta.parameters)) if on_gpu else []


def _filled(images: Tensor, size: int) -> Tensor:
    """The images, and as many copies of the first as are missing."""
    missing = size - len(images)
    return torch.cat((images, images[:1].expand(missing, *images.shape[1:]))) if missing else images


def _halves(
    model: nn.Module, adapted: Sequence[Tensor]
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Copies in bfloat16 of what convolutions and linear layers multiply by and does not adapt."""
    moving = {id(parameter) for parameter in adapted}
    for module in model.modules():
        if isinstance(module, nn.Linear | _ConvNd):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in moving:
                    half = parameter.detach().bfloat16()
                    yield module, name, nn.Parameter(half, requires_grad=False)


@contextmanager
def _swapped(halves: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> Iterator[None]:
    """The model with these parameters inside the context."""
    before = [(module, name, module._parameters[name]) for module, name, _ in halves]
    try:
        for module, name, half in halves:
            module._parameters[name] = half
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
