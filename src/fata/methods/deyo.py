"""DeYO: entropy is not enough for test-time adaptation (Lee et al., ICLR 2024).

    PLPD  =  p_y(x) - p_y(x'),   y = argmax p(x),   x' = x with its patches shuffled
    S     =  H < tau_ent  and  PLPD > tau_plpd
    L     =  mean_S (exp(E0 - H) + exp(PLPD)) H

with tau_ent = 0.5 ln C, E0 = 0.4 ln C, tau_plpd = 0.2: a row that is as confident on an
image whose shape was destroyed does not use the shape, and is not learned from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fata.methods.base import Batch, Memory, Method, in_range, is_threshold
from fata.methods.selection import Selection, confidence, reliable, shuffle_patches


@dataclass(frozen=True)
class Deyo(Method):
    """Learns from reliable rows whose prediction depends on the object's shape.

    Args:
        threshold: entropy filter, in units of ln C.
        scale: E0 of the entropy weight, in units of ln C.
        plpd_threshold: how far the probability must drop when the patches are shuffled.
        patches: patches a side.
        shuffle: `shuffle(rows, patches)` gives the order of the patches of each row,
            (rows, patches^2), instead of drawing it.
    """

    threshold: float = 0.5
    scale: float = 0.4
    plpd_threshold: float = 0.2
    patches: int = 4
    shuffle: Callable[[int, int], Tensor] | None = None

    name: ClassVar[str] = "deyo"
    select_runs_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        is_threshold(self, "threshold")
        is_threshold(self, "scale", unlimited=False)
        in_range(self, "plpd_threshold", -math.inf)
        if self.plpd_threshold >= 1:
            raise ValueError(
                f"Deyo(plpd_threshold={self.plpd_threshold!r}): a difference of probabilities is "
                f"never above 1, so nothing would be selected; give a number below 1."
            )
        in_range(self, "patches", 1, whole=True)

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Reliable and with enough PLPD; both weigh."""
        keep = reliable(batch.entropy, self.threshold, batch.classes)
        plpd = self._plpd(batch, keep.nonzero()[:, 0])
        weights = confidence(batch.entropy, self.scale, batch.classes) + plpd.exp()
        return Selection(keep & (plpd > self.plpd_threshold), weights)

    def _plpd(self, batch: Batch, rows: Tensor) -> Tensor:
        """Pseudo-label probability difference of some rows; -inf elsewhere."""
        plpd = torch.full_like(batch.entropy, -torch.inf)
        count, here = batch.group.place(len(rows))
        if count:
            order = self._order(count, batch)[here]
            shuffled = shuffle_patches(batch.images[rows], order, self.patches)
            label = batch.pseudo_label[rows, None]
            before = batch.probs[rows].gather(1, label)
            after = batch.predict(shuffled).softmax(1).gather(1, label)
            plpd[rows] = (before - after)[:, 0]
        return plpd

    def _order(self, rows: int, batch: Batch) -> Tensor:
        if self.shuffle is not None:
            return self.shuffle(rows, self.patches).to(batch.images.device)
        draws = torch.rand(
            rows, self.patches**2, generator=batch.generator, device=batch.images.device
        )
        return draws.argsort(1)
