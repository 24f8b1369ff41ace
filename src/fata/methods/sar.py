"""SAR: sharpness-aware and reliable entropy minimisation (Niu et al., ICLR 2023).

    min_theta  mean_S  max_{|eps| <= rho} H(x; theta + eps),      S = {H < E0},  E0 = 0.4 ln C

SAM climbs to theta + eps on the reliable rows; of those, the rows that are still reliable there
give the gradient of the step from theta. The mean entropy of the second pass is averaged
(0.9 / 0.1); if the average falls under 0.2 the model has collapsed, and restarts from the source
weights.

The released code keeps its average and SGD's momentum through a recovery; here weights, momentum
and average are cleared together. The second pass sees the selected rows only, as in the code behind
the FATA paper's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fata.methods.base import Batch, Memory, in_range, is_threshold
from fata.methods.come import EntropyMethod
from fata.methods.losses import weighted_mean
from fata.methods.selection import Selection, reliable


@dataclass(frozen=True)
class Sar(EntropyMethod):
    """Learns from reliable rows by SAM, and recovers from a collapse.

    Args:
        threshold: entropy filter, in units of ln C; `math.inf`: none.
        rho: radius of SAM's ascent.
        recovery: moving average of the entropy, in nats, below which the model restarts from the
            source weights; 0: never.
    """

    threshold: float = 0.4
    rho: float = 0.05
    recovery: float = 0.2

    name: ClassVar[str] = "sar"

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        super().__post_init__()
        is_threshold(self, "threshold")
        in_range(self, "rho", 0)
        in_range(self, "recovery", 0, hint=" nats (0: never recover)")

    @property
    def sam_rho(self) -> float:
        """SAM's rho."""
        return self.rho

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Reliable rows, with weight 1."""
        rows = reliable(self.entropy_of(batch), self.threshold, batch.classes)
        return Selection(rows, batch.entropy.new_ones(()))

    def observe(self, batch: Batch, selection: Selection, memory: Memory) -> Memory:
        """Average the entropy of the second pass; stay where it selected none."""
        group = batch.group
        now = group.sum(weighted_mean(self.entropy_of(batch), selection, group))
        old = memory.get("entropy", torch.full_like(now, torch.inf))
        moved = torch.where(old.isinf(), now, 0.9 * old + 0.1 * now)
        return {"entropy": torch.where(group.sum(selection.rows.sum()) > 0, moved, old)}

    def recover(self, memory: Memory) -> Tensor | None:
        """Whether the average entropy is lower than any healthy model's."""
        return memory["entropy"] < self.recovery if memory else None
