"""ZeroSiam: a predictor keeps entropy minimisation from collapsing (ICLR 2026).

    t  =  W z + b, a constant          what is predicted
    n  =  W (P z) + b                  the predictor P, (D, D), is the identity at the start
    L  =  mean_B  H(n)  +  a [ KL(t || n) + KL(n || t) ]                     a = 1

z is the penultimate feature. The entropy is that of n alone: P takes up its short cuts, and the
divergence keeps what is predicted near it. All normalisation layers train, and P with them, at a
rate of its own: ten times theirs, or the same in transformers, as for the ResNet50-GN and the ViT-B
of the released script. FATA's features go through the classifier without P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fata.methods.base import Batch, Memory, Outputs, in_range
from fata.methods.feature import FeatureMethod, feature
from fata.methods.losses import divergence, entropy
from fata.methods.selection import Selection


@dataclass(frozen=True)
class Zerosiam(FeatureMethod):
    """Minimises the entropy behind a predictor, and keeps the predictions near it.

    Args:
        alignment: weight of the divergence.
        predictor_rate: the predictor's learning rate, in units of the normalisation layers'; None:
            1 in transformers and 10 elsewhere.
    """

    alignment: float = 1.0
    predictor_rate: float | None = None

    name: ClassVar[str] = "zerosiam"
    params: ClassVar[str | None] = "norm"

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        super().__post_init__()
        in_range(self, "alignment", 0)
        if self.predictor_rate is not None:
            in_range(self, "predictor_rate", 0, hint=", or None for that of the kind of network")

    def modules(self, width: int) -> dict[str, Tensor]:
        """The predictor."""
        return {"predictor": torch.eye(width)}

    def modules_rate(self, vit: bool) -> float:
        """The predictor's rate, in units of the normalisation layers'."""
        if self.predictor_rate is not None:
            return self.predictor_rate
        return 1.0 if vit else 10.0

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Every row, with weight 1."""
        return Selection(torch.ones_like(batch.finite), batch.entropy.new_ones(()))

    def row_loss(self, outputs: Outputs) -> Tensor:
        """H(n) and the divergence of each row."""
        z, head = feature(outputs)
        online = head(F.linear(z, outputs.learned["predictor"].to(z)))
        target = outputs.logits.detach()
        apart = divergence(target, online) + divergence(online, target)
        return entropy(online) + self.alignment * apart
