"""NCTTA: test-time adaptation by neural collapse (CVPR 2026).

    h    =  z / |z|,   w_c = W_c / |W_c|,   s_c = h . w_c,   D_c = 1 - s_c
    A    =  the k classes with the largest p
    g    =  softmax_A( -(D - mean_A D) / std_A D )            near weights
    r    =  p / sum_A p                                       likely classes
    y    =  (1 - b) g + b r
    l    =  - ln ( sum_A y_c exp(s_c) / sum_c exp(s_c) )
    L    =  mean_S v (H + a l),   S = {H < E0}
    v    =  exp(E_w - H) + nu / (1 + eta |h - w_y|)

with E0 = E_w = 0.4 ln C, k = 10, b = 0.3, a = 5, nu = 5, eta = 1, y = argmax o in v. In a network
that is trained to the end, features point along the weights of their class: l pulls them there.
The gradient flows through the target y too, as in the released code; W is constant.

The released code has ln 1000 in the place of ln C, and steps on where nothing is selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fata.methods.base import Batch, Memory, Outputs, in_range, is_threshold
from fata.methods.feature import FeatureMethod, feature
from fata.methods.losses import entropy
from fata.methods.selection import Selection, confidence, reliable

EPS = 1e-8


@dataclass(frozen=True)
class Nctta(FeatureMethod):
    """Learns from reliable rows, and aligns their features with the classifier's weights.

    Args:
        threshold: E0, in units of ln C.
        scale: E_w, in units of ln C.
        top_k: number of classes that a target is spread over.
        mix: share of the predictions in the target; the rest is that of the distances.
        alignment: weight of the alignment beside the entropy.
        nu: weight of rows whose feature is near the weights of the predicted class.
        eta: how fast that falls with the distance.
    """

    threshold: float = 0.4
    scale: float = 0.4
    top_k: int = 10
    mix: float = 0.3
    alignment: float = 5.0
    nu: float = 5.0
    eta: float = 1.0

    name: ClassVar[str] = "nctta"
    params: ClassVar[str | None] = "norm"
    nesterov: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        super().__post_init__()
        is_threshold(self, "threshold")
        is_threshold(self, "scale", unlimited=False)
        in_range(self, "top_k", 1, whole=True)
        in_range(self, "mix", 0, 1)
        for name in ("alignment", "nu", "eta"):
            in_range(self, name, 0)

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Reliable rows; confident ones and those near their class weigh more."""
        z, head = feature(batch)
        near = F.normalize(head.weight.to(z), dim=1)[batch.pseudo_label]
        distance = (F.normalize(z, dim=1) - near).norm(dim=1)
        weights = confidence(batch.entropy, self.scale, batch.classes)
        weights = weights + self.nu / (1 + self.eta * distance)
        return Selection(reliable(batch.entropy, self.threshold, batch.classes), weights)

    def row_loss(self, outputs: Outputs) -> Tensor:
        """H + a l of each row."""
        return entropy(outputs.logits) + self.alignment * self._misalignment(outputs)

    def _misalignment(self, outputs: Outputs) -> Tensor:
        z, head = feature(outputs)
        probs = outputs.logits.softmax(1)
        cosine = F.normalize(z, dim=1) @ F.normalize(head.weight.to(z), dim=1).T
        top = probs.detach().topk(min(self.top_k, probs.shape[1]), dim=1).indices
        distance = 1 - cosine.gather(1, top).clamp(-1, 1)
        target = self._target(distance, probs.gather(1, top))
        near = cosine.gather(1, top) + target.log()
        return cosine.logsumexp(1) - near.logsumexp(1)

    def _target(self, distance: Tensor, probs: Tensor) -> Tensor:
        """The blend y, of the distances and the probabilities of the classes in A."""
        variance, mean = torch.var_mean(distance, 1, correction=0, keepdim=True)
        deviation = variance.clamp(min=EPS**3).sqrt()  # of one class alone it has no gradient
        geometric = (-(distance - mean) / (deviation + EPS)).softmax(1)
        likely = (probs + EPS) / (probs + EPS).sum(1, keepdim=True)
        if self.mix in (0, 1):
            return likely if self.mix else geometric
        blend = (1 - self.mix) * geometric + self.mix * likely + EPS
        return blend / blend.sum(1, keepdim=True)
