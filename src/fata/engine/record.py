"""What one batch came to, for callbacks, logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fata.engine.engine import Engine
from fata.guard.events import Event, Health
from fata.methods.losses import entropy


@dataclass(frozen=True)
class StepRecord:
    """What one batch came to.

    Args:
        batch: its number in the stream, from 1.
        rows: images in it.
        selected: rows that each term selected, by its name; empty if it was not learned from, or if
            the source model's predictions were returned.
        entropy: mean entropy of the predictions, in nats: what the hosts minimise.
        stepped: steps that moved the weights, since the stream's start.
        phase: the guard's: `adapting`; `aside`: the source model predicts while the adapted one
            learns; `rest`: nothing is learned; `off`: there is no guard.
        source_predicted: whether the predictions are the source model's.
        events: what the guard did after this batch.
        loss: what was minimised: the sum of the terms' weighted means, without EATA's penalty; for
            SAR at the ascent point; in a group, this rank's share. None: no step was taken, or one
            of CoTTA or MEMO.
        health: estimated accuracies as of the guard's last check; None: no guard, or no check yet.
    """

    batch: int
    rows: int
    selected: dict[str, int]
    entropy: float
    stepped: int
    phase: str
    source_predicted: bool
    events: tuple[Event, ...] = ()
    loss: float | None = None
    health: Health | None = None


class Callback(Protocol):
    """Is told of every batch that is learned from."""

    def on_step(self, record: StepRecord, /) -> None:
        """A batch was learned from."""


def record(engine: Engine, logits: Tensor) -> StepRecord:
    """Of the batch that an engine was given last, frozen or not; waits for the device, once."""
    state, learned = engine.state, engine.learned
    latest = [e for e in state.watched.events if learned and e.batch == state.batches]
    terms = (engine.method.name, "fata") if engine.plus else (engine.method.name,)
    rows = engine.selected or ()
    loss = [engine.loss] if learned and engine.loss is not None else []
    numbers = entropy(logits.float()).mean(), *(chosen.sum() for chosen in rows), *loss
    mean, *found = torch.stack([number.float() for number in numbers]).tolist()
    return StepRecord(
        batch=state.batches,
        rows=len(logits),
        selected={term: int(count) for term, count in zip(terms, found[: len(rows)], strict=False)},
        entropy=mean,
        stepped=int(state.counts.get("stepped", 0)),
        phase=str(state.watched.phase) if engine.watch else "off",
        source_predicted=engine.source_predicted,
        events=tuple(latest),
        loss=found[-1] if loss else None,
        health=engine.watch.health if engine.watch else None,
    )
