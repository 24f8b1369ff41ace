"""EATA: efficient test-time adaptation without forgetting (Niu et al., ICML 2022).

    S(x)  =  H < E0  and  |cos(p, m)| < d                       reliable and not redundant
    L     =  mean_S exp(E0 - H) H  +  a sum_j F_j (theta_j - theta0_j)^2
    m     <- 0.9 m + 0.1 mean_S p                               the first time: mean_S p

with E0 = 0.4 ln C. F is the Fisher information of the source model on clean images; without such
images there is no penalty, and the method is ETA.

d = 0.05 is the papers' for 1,000 classes; predictions of fewer classes are more alike and need more
(0.4 for 10 classes is what others use).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fata.methods.base import Batch, Memory, in_range, is_threshold
from fata.methods.come import EntropyMethod
from fata.methods.selection import Selection, confidence, distinct, reliable


@dataclass(frozen=True)
class Eata(EntropyMethod):
    """Learns from reliable rows that are unlike the mean prediction, and stays near the source.

    Args:
        threshold: entropy filter, in units of ln C.
        redundancy: cosine similarity with the mean prediction from which on a row is redundant;
            1 or more: no filter. 0.05 is for 1,000 classes; with ten, 0.4 is in use.
        fisher_alpha: weight of the penalty on moving parameters that matter; 0: none (ETA).
    """

    threshold: float = 0.4
    redundancy: float = 0.05
    fisher_alpha: float = 2000.0

    name: ClassVar[str] = "eata"
    params: ClassVar[str | None] = "norm"

    @property
    def wants_fisher(self) -> bool:
        """Whether there is a penalty to weigh."""
        return self.fisher_alpha > 0

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        super().__post_init__()
        is_threshold(self, "threshold", unlimited=False)
        in_range(self, "redundancy", 0, hint=" (1 or more: no filter)")
        in_range(self, "fisher_alpha", 0)

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Reliable and not redundant; confident rows weigh more."""
        entropy = self.entropy_of(batch)
        keep = reliable(entropy, self.threshold, batch.classes)
        if memory:
            keep &= distinct(batch.probs, memory["mean_probs"], self.redundancy) | ~memory["begun"]
        return Selection(keep, confidence(entropy, self.threshold, batch.classes))

    def regulariser(self, theta: Tensor, source: Tensor, fisher: Tensor | None) -> Tensor | None:
        """EWC: a sum_j F_j (theta_j - theta0_j)^2."""
        if fisher is None:
            return None
        return self.fisher_alpha * (fisher * (theta - source).square()).sum()

    def observe(self, batch: Batch, selection: Selection, memory: Memory) -> Memory:
        """Move the mean prediction towards that of the selected rows; stay where there are none."""
        count = batch.group.sum(selection.rows.sum())
        total = batch.group.sum(torch.where(selection.rows[:, None], batch.probs, 0).sum(0))
        mean = total / count.clamp(min=1)
        if memory:
            old, begun = memory["mean_probs"], memory["begun"]
            moved = torch.where(begun, 0.9 * old + 0.1 * mean, mean)
            return {
                "mean_probs": torch.where(count > 0, moved, old),
                "begun": begun | (count > 0),
            }
        return {"mean_probs": mean, "begun": count > 0}
