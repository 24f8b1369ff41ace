"""A batch whose rows may have pixels that are not finite."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from fata.engine.direct import NotFiniteError
from fata.engine.engine import Engine


def run(engine: Engine, images: Tensor, learning: bool) -> Tensor:
    """Logits of a batch, learned from or not.

    Rows with a pixel that is not finite get the logits that the plain model gives them, are never
    learned from, and do not affect the other rows.
    """
    engine.learned, engine.selected, engine.loss = False, None, None
    predict = engine.step if learning else engine.predict_only
    if learning and len(images) and engine.captures_steps:
        with suppress(NotFiniteError):  # what follows would wait for the device
            return predict(images).detach()
    finite = images.flatten(1).isfinite().all(1)
    whole = bool(finite.all())
    here = len(images) if whole else int(finite.sum())
    usable, others = engine.group.meet(here, len(images) - here, engine.state, learning)
    if whole and usable:
        logits = predict(images).detach()
    else:
        with engine.network.running_statistics():
            bad = engine.predict_only(images[~finite])
        logits = bad.new_empty(len(images), bad.shape[1])
        logits[~finite] = bad
        if usable:
            logits[finite] = predict(images[finite]).detach()
            if engine.selected is not None:
                host, plus = (_spread(rows, finite) for rows in engine.selected)
                engine.selected = host, plus
    if others and learning:
        engine.state.count(seen=others, not_finite=others)
    return logits


def _spread(rows: Tensor, finite: Tensor) -> Tensor:
    """A selection of the finite rows, as one of the whole batch."""
    return torch.zeros_like(finite).masked_scatter(finite, rows)
