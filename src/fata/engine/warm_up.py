"""All passes of a stream, run on noise before its first image, to compile and capture them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fata._torch import Convolution
from fata.engine import swap
from fata.engine.engine import Engine
from fata.engine.state import Seen
from fata.methods.base import CustomStep
from fata.methods.selection import Selection

FACTS = ("selected", "loss", "source_predicted", "_moves", "watch")  # not in the state


def warm_up(engine: Engine, rows: int, size: int | Sequence[int]) -> float:
    """Run noise through all that a batch of so many images may need; returns the seconds.

    The state, the random numbers and the model are as before. Where passes are captured each runs
    twice: it is compiled after the first time, captured at the second. Elsewhere one step runs.
    """
    begun, device = time.perf_counter(), engine.device
    shape = _shape(engine.network.model, rows, size)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    images = noise.to(device, _precision(engine))
    engine.network.check(images)
    place = torch.cuda.device_of(images)  # type: ignore[no-untyped-call]
    with place, torch.random.fork_rng([device] if images.is_cuda else []), _apart(engine):
        sizes = engine.execution.sizes(rows)
        for _ in range(2 if sizes else 0):
            _pass_all(engine, images, sizes)
        if not sizes:
            swap.put(engine, swap.fresh(engine))
            engine.step(images)
    if images.is_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _pass_all(engine: Engine, images: Tensor, sizes: Sequence[int]) -> None:
    """A first batch, later ones of which more and more rows are selected, and the guard's passes.

    What a function is given decides which capture it is: a first batch has no memory yet. Only what
    nearly every batch needs is compiled.
    """
    rows = len(images)
    swap.put(engine, swap.fresh(engine))
    _step(engine, images, rows, share=1)
    _remember(engine, images)
    engine.execution.compiles = True
    for selected in [rows] if engine.coupled else sizes:
        _step(engine, images, selected, share=0)
    if not engine.coupled:
        _step(engine, images, rows, share=1)
    if engine.method.select_runs_model:
        with engine.execution.stepping(images), engine.counted_apart():
            for some in sizes:
                engine.predict(images[:some])
    engine.execution.compiles = False
    engine.predict_only(images)
    if engine.adapts:
        for _ in range(2):  # before the first check there are no statistics of its own
            engine.source_model.predict(images, engine.state)
        engine.source_model.recall(images, engine.state)


def _step(engine: Engine, images: Tensor, selected: int, share: float) -> None:
    """A step that learns from the first rows, whatever is selected of noise.

    `share` is that of the stream so far: if it is large, one pass predicts and learns.
    """

    def rows(seen: Seen) -> tuple[Tensor, bool, bool, bool]:
        chosen = torch.arange(len(seen.finite)).expand(2, -1) < selected
        some = bool(engine.theta.names)  # NEO has none
        return chosen, some, some and engine.plus is not None, True

    engine.state.share = share
    engine.__dict__["_rows"] = rows
    try:
        engine.step(images)
    finally:
        del engine.__dict__["_rows"]


def _remember(engine: Engine, images: Tensor) -> None:
    """Give the host the memory that it has once it selected some rows."""
    if engine.learns and not isinstance(engine.method, CustomStep):
        with torch.no_grad(), engine.counted_apart():
            here = engine.network.featured(images)
        batch = engine._batch(images, here.logits, here.features)
        every = Selection(torch.ones_like(batch.finite), torch.ones_like(batch.entropy))
        engine.state.host = engine.method.observe(batch, every, engine.state.host)


@contextmanager
def _apart(engine: Engine) -> Iterator[None]:
    """A stream of its own inside the context, without a guard; then the engine is where it was."""
    held, facts = swap.take(engine), {name: engine.__dict__[name] for name in FACTS}
    engine.__dict__.update(watch=None, _moves=True)  # nobody is told of noise
    try:
        yield
    finally:
        engine.execution.compiles = False
        swap.put(engine, held)
        engine.__dict__.update(facts)


def _shape(model: nn.Module, rows: int, size: int | Sequence[int]) -> tuple[int, ...]:
    """Of a batch, by the side of its images, their height and width, or with channels."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    whole = all(isinstance(n, int) and n > 0 for n in (rows, *sides))
    if not whole or len(sides) not in (2, 3):
        raise ValueError(
            f"warm_up({rows!r}, {size!r}): give the images of a batch, and a side, (height, width) "
            f"or (channels, height, width)."
        )
    first = next((m for m in model.modules() if isinstance(m, Convolution)), None)
    channels = (first.in_channels if first else 3,) if len(sides) == 2 else ()
    return rows, *channels, *sides


def _precision(engine: Engine) -> torch.dtype:
    """Of the model's weights."""
    weights = (p.dtype for p in engine.network.model.parameters() if p.is_floating_point())
    return next(weights, torch.get_default_dtype())
