"""Everything that a stream needs, captured and compiled before its first image."""

from __future__ import annotations

import logging
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

log = logging.getLogger("fata.compile")

TWICE = 2  # then a pass is captured
FACTS = ("selected", "loss", "source_predicted", "_moves")  # of the last batch


def batch_shape(model: nn.Module, rows: int, size: int | Sequence[int]) -> tuple[int, ...]:
    """Of a batch, by the side of its images, their height and width, or with channels."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    whole = all(isinstance(side, int) and side > 0 for side in (rows, *sides))
    if not whole or len(sides) not in (2, 3):
        raise ValueError(
            f"warm_up({rows!r}, {size!r}): give the images of a batch, and a side, (height, width) "
            f"or (channels, height, width)."
        )
    first = next((m for m in model.modules() if isinstance(m, Convolution)), None)
    channels = (first.in_channels if first else 3,) if len(sides) == 2 else ()
    return rows, *channels, *sides


def warm_up(engine: Engine, rows: int, size: int | Sequence[int]) -> float:
    """Run noise through all that a batch may need; seconds it took. No state changes.

    Where nothing is captured, on a CPU, nothing is done.
    """
    begun, device = time.perf_counter(), engine.device
    shape = batch_shape(engine.network.model, rows, size)
    if engine.execution.captures or device.type == "cuda":
        log.info("warming up for batches of %d images", rows)
        draws = torch.Generator().manual_seed(0)
        images = torch.rand(shape, generator=draws).to(device, _precision(engine))
        place = torch.cuda.device_of(images)  # type: ignore[no-untyped-call]
        with place, torch.random.fork_rng([device] if images.is_cuda else []), _unchanged(engine):
            _pass_everything(engine, images)
        if images.is_cuda:
            torch.cuda.synchronize(device)
        log.info("warming up took %.0f s", time.perf_counter() - begun)
    return time.perf_counter() - begun


def _pass_everything(engine: Engine, images: Tensor) -> None:
    """A first batch and later ones; the later ones' passes are compiled. Then a first one again."""
    _step(engine, images)
    for _ in range(TWICE):
        _remember(engine, images)
        _step(engine, images)
    for _ in range(TWICE if engine.watch else 0):
        with engine.counted_apart():
            engine.predict(images)
            if engine.batch_statistics:
                engine.predict(images, running=True)
    engine.execution.compile()
    swap.put(engine, swap.fresh(engine))
    _step(engine, images)


def _step(engine: Engine, images: Tensor) -> None:
    """A step that looks first and then learns, as where few rows are selected."""
    engine.state.share = 0.0
    with _every_row(engine):
        engine.step(images)


def _remember(engine: Engine, images: Tensor) -> None:
    """The host has what it keeps of rows that it selected: functions are captured with it."""
    if engine.learns and not isinstance(engine.method, CustomStep):
        with torch.no_grad(), engine.counted_apart():
            here = engine.network.featured(images)
        batch = engine._batch(images, here.logits, here.features)
        every = Selection(torch.ones_like(batch.finite), torch.ones_like(batch.entropy))
        engine.state.host = engine.method.observe(batch, every, engine.state.host)


@contextmanager
def _every_row(engine: Engine) -> Iterator[None]:
    """All rows are passed with a gradient, whatever is selected of noise."""

    def rows(seen: Seen) -> tuple[Tensor, bool, bool, bool]:
        return torch.ones(2, len(seen.finite), dtype=torch.bool), True, bool(engine.plus), True

    engine.__dict__["_rows"] = rows
    try:
        yield
    finally:
        del engine.__dict__["_rows"]


@contextmanager
def _unchanged(engine: Engine) -> Iterator[None]:
    """A stream of its own inside the context; after it the engine is where it was."""
    held = swap.take(engine)
    facts = {name: engine.__dict__[name] for name in FACTS}
    swap.put(engine, swap.fresh(engine))
    engine.__dict__["_moves"] = True  # of noise nobody is told
    try:
        yield
    finally:
        swap.put(engine, held)
        engine.__dict__.update(facts)


def _precision(engine: Engine) -> torch.dtype:
    """Of the model's weights."""
    weights = (p.dtype for p in engine.network.model.parameters() if p.is_floating_point())
    return next(weights, torch.get_default_dtype())
