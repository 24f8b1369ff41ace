"""ROID: weight ensembling, diversity weighting and prior correction (Marsden et al., WACV 2024).

    d    =  1 - cos(p, q),   c = -H                    both scaled to [0, 1] over the batch
    S    =  d >= mean_B d,   w = exp(d c / T)          diverse rows; certain ones weigh more
    l    =  - sum_c a_c ln( a_c / (1 - a_c) + 1e-5 ),  a = min(p, 0.99)
    l'   =  - 1/2 sum_c p_c ln p'_c - 1/2 sum_c p'_c ln p_c,    p' of an augmented view
    L    =  1/N sum_S w (l + l')
    q   <-  0.9 q + 0.1 mean_B p                       at the start 1/C each
    theta <- 0.99 theta + 0.01 theta0                  after each step

with T = 1/3. The gradient flows into both predictions of l'. L is a sum over N, the batch size, not
a mean over S. The prediction is corrected by the prior of the batch's classes (`class_prior.py`).

One image, or images that all look alike, have no spread of d or c: it is 0 then and every row is
learned from, where the released code is not finite. Streams of single images need `fata.Window`;
predictions without a step, as between two steps of a window, are not corrected. Views are made in
[0, 1]: images that were normalised need `mean` and `std`. The released code steps by Adam on CIFAR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fata.methods.base import Batch, Memory, Method, Outputs, in_range
from fata.methods.class_prior import CORRECTIONS, corrected
from fata.methods.losses import likelihood_ratio, soft_cross_entropy
from fata.methods.pixels import Pixels, Rng
from fata.methods.selection import Selection


@dataclass(frozen=True)
class Roid(Method):
    """Learns from diverse rows and views of them, and stays near the source weights.

    Args:
        temperature: T of the weights.
        decay: how much of the mean prediction q stays at each batch.
        source_share: share of the source weights in the parameters after each step.
        correction: of the predictions by the prior of the classes: `multiply`, `additive`, or None.
        batch_size: N, which the loss is divided by; None: the rows at hand.
        mean: what the images were normalised with; None: they are in [0, 1].
        std: likewise.
        augment: `augment(images)` gives the views instead of ROID's own augmentation.
    """

    temperature: float = 1 / 3
    decay: float = 0.9
    source_share: float = 0.01
    correction: str | None = "multiply"
    batch_size: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    augment: Callable[[Tensor], Tensor] | None = None

    name: ClassVar[str] = "roid"
    params: ClassVar[str | None] = "norm"
    nesterov: ClassVar[bool] = True
    has_views: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        in_range(self, "temperature", 1e-3)
        in_range(self, "decay", 0, 1)
        in_range(self, "source_share", 0, 1)
        if self.batch_size is not None:
            in_range(self, "batch_size", 1, whole=True, hint=", or None for the rows at hand")
        if self.correction not in (*CORRECTIONS, None):
            raise ValueError(
                f"Roid(correction={self.correction!r}): choose one of "
                f"{', '.join(map(repr, CORRECTIONS))}, or None."
            )
        Pixels(self.mean, self.std)  # refuses one without the other

    def view(self, images: Tensor, rng: Rng) -> Tensor:
        """One augmented view of each row, by the same random draws for the whole batch."""
        if self.augment is not None:
            return self.augment(images)
        from fata.methods.views import roid_view  # torchvision takes seconds to import

        space = Pixels(self.mean, self.std)
        return space.back(roid_view(space.of(images), rng))

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Rows that are unlike the mean prediction; certain ones weigh more."""
        group, finite = batch.group, batch.finite
        diversity = _scaled(1 - F.cosine_similarity(batch.probs, _mean(batch, memory)[None]), batch)
        certainty = _scaled(-batch.entropy, batch)
        count = group.sum(finite.sum()).clamp(min=1)
        average = group.sum(torch.where(finite, diversity, 0).sum()) / count
        rows = (diversity >= average) & finite
        share = group.sum(rows.sum()) / (self.batch_size or count)  # the engine takes a mean
        return Selection(rows, share * (diversity * certainty / self.temperature).exp())

    def row_loss(self, outputs: Outputs) -> Tensor:
        """The likelihood ratio, and the cross-entropies between a row and its view."""
        logits, (view,) = outputs.logits, outputs.views
        consistency = soft_cross_entropy(view, logits) + soft_cross_entropy(logits, view)
        return likelihood_ratio(logits) + consistency / 2

    def observe(self, batch: Batch, selection: Selection, memory: Memory) -> Memory:
        """Move the mean prediction by that of all rows."""
        rows = batch.group.sum(batch.finite.sum())
        total = batch.group.sum(torch.where(batch.finite[:, None], batch.probs, 0).sum(0))
        old = _mean(batch, memory)
        moved = self.decay * old + (1 - self.decay) * total / rows.clamp(min=1)
        return {"class_probs": torch.where(rows > 0, moved, old)}

    def answer(self, batch: Batch, memory: Memory, learned: bool) -> Tensor:
        """The logits, corrected by the prior of the batch that was learned from."""
        if self.correction is None or not learned:
            return batch.logits
        return corrected(batch, self.correction)


def _mean(batch: Batch, memory: Memory) -> Tensor:
    """The mean prediction q."""
    even = batch.probs.new_full((batch.classes,), 1 / batch.classes)
    return memory["class_probs"].to(even) if memory else even


def _scaled(values: Tensor, batch: Batch) -> Tensor:
    """Scaled to [0, 1] over the rows of all ranks; 0 where they are all alike."""
    low, high = batch.group.extremes(values, batch.finite)
    spread = high - low
    some = spread > 1e-12
    return torch.where(some, (values - low) / torch.where(some, spread, 1), 0)
