"""EATA's Fisher information: how much each parameter matters on clean images."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fata._text import listed

if TYPE_CHECKING:
    from fata.engine.engine import Engine

FisherData = Iterable[Any] | Mapping[str, Tensor]


def fisher(engine: Engine, data: FisherData) -> Tensor:
    """The mean over batches of the squared gradient of the loss at the model's own labels.

    Args:
        engine: at the source weights.
        data: batches of clean images, or (images, labels) as a DataLoader gives them; or a Fisher
            that was computed before, by parameter.
    """
    theta = engine.theta
    if isinstance(data, Mapping):
        shapes = [tuple(p.shape) for p in theta.parameters]
        given = [tuple(data[name].shape) if name in data else None for name in theta.names]
        if len(data) != len(shapes) or given != shapes:
            raise ValueError(
                f"fisher_data: a Fisher of other parameters ({listed(data, 6)}) than those that "
                f"adapt ({listed(theta.names, 6)})."
            )
        return theta.join([data[name] for name in theta.names]).to(engine.device)
    if not isinstance(data, Iterable) or (isinstance(data, Tensor) and data.ndim < 5):
        given_ = f"one tensor of shape {tuple(data.shape)}" if isinstance(data, Tensor) else data
        raise TypeError(f"fisher_data must give batches of images, such as [images]; got {given_}.")
    total, batches = torch.zeros_like(engine.source), 0
    for batch in _shown(data):
        images = batch[0] if isinstance(batch, tuple | list) else batch
        engine.network.check(images)
        if not images.isfinite().all():
            raise ValueError("fisher_data: an image has pixels that are not finite.")
        with torch.inference_mode(False), torch.enable_grad():
            logits = engine.forward(images.detach().clone())
            total += theta.gradient(F.cross_entropy(logits, logits.argmax(1))).square()
        batches += 1
    if not batches:
        raise ValueError(
            "fisher_data gave no batch: EATA's penalty needs batches of clean images "
            "(about 500 images suffice); leave fisher_data out for ETA."
        )
    return total / batches


def _shown(data: Iterable[Any]) -> Iterable[Any]:
    """The batches, with a progress bar on a terminal if `rich` is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return data
    from rich.console import Console
    from rich.progress import track

    return track(data, "Fisher", console=Console(stderr=True), transient=True)
