"""COME: conservatively minimising entropy (Zhang et al., ICLR 2025), for hosts that minimise H.

    v  =  o |o|_const / |o|                     o, without the gradient along o
    b  =  exp(v) / S,   u  =  C / S             S = sum_c exp(v_c) + C
    E  =  - sum_q q ln q                        over q = b_1 + 1e-7, ..., b_C + 1e-7, u + 1e-7

E, the entropy of opinion, takes the place of H in a host's loss, filter and weights. b are beliefs
in the classes and u is the doubt: a model may say that it does not know. Where predictions
themselves are compared (EATA's redundancy, the Fisher information, FATA's rows) they stay softmax.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from fata.methods.base import Batch, Method
from fata.methods.losses import entropy

ENTROPIES = ("softmax", "come")


def opinion_entropy(logits: Tensor) -> Tensor:
    """E of each row, in nats. A class at -inf has no part in it, a row of zeros no gradient."""
    finite = logits.clamp(min=-1e4)
    length = finite.norm(dim=1, keepdim=True)
    v = finite * (length.detach() / length.clamp(min=torch.finfo(length.dtype).tiny))
    doubt = torch.full_like(v[:, :1], math.log(v.shape[1]))
    q = torch.cat([v, doubt], 1).softmax(1) + 1e-7
    return -(q * q.log()).sum(1)


@dataclasses.dataclass(frozen=True)
class EntropyMethod(Method):
    """A method that minimises an entropy.

    Args:
        entropy: `softmax`, or `come`: the entropy of opinion in its place.
    """

    entropy: str = dataclasses.field(default="softmax", kw_only=True)

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        if self.entropy not in ENTROPIES:
            raise ValueError(
                f"{type(self).__name__}(entropy={self.entropy!r}): choose one of "
                f"{', '.join(map(repr, ENTROPIES))}."
            )

    def entropy_of(self, batch: Batch) -> Tensor:
        """H of each row, or E."""
        return batch.entropy if self.entropy == "softmax" else opinion_entropy(batch.logits)

    def loss(self, logits: Tensor) -> Tensor:
        """The same, with a gradient."""
        return entropy(logits) if self.entropy == "softmax" else opinion_entropy(logits)
