"""FATA: feature augmentation based test-time adaptation (Cho et al., WACV 2025).

    z'      =  alpha z + delta (beta - alpha) mu                alpha, beta ~ N(1, sigma_n), (B, D)
    delta   =  moving average of  s / max_c s,   s = std_b(mu)  mu = mean of z over space, (B, D)
    L_FATA  =  mean_S w CE(p(z'), y),   S = {H < E0},  w = exp(E_w - H),  y = argmax p(z)

z is the output of one layer, E0 = 0.5 ln C, E_w = 0.4 ln C. The gradient flows through z and mu,
not through alpha, beta and delta. A batch of one row has no deviation: delta is 0.5 there and the
average stays as it is.

The fields give the paper's ablations: NP+ is ``Fata(spread="variance", ema=None)``, the losses of
its Table 7 are ``loss="simple_aug"`` (entropy of p(z')), ``"mse"`` (between the logits of z' and z,
with gradient to both) and ``"simple_ce"`` (cross entropy to the soft prediction p(z)), and
``layer`` is the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fata.distributed.ranks import SINGLE, Ranks
from fata.methods.base import Batch, Memory, in_range, is_threshold
from fata.methods.losses import entropy, soft_cross_entropy
from fata.methods.selection import Selection, confidence, reliable

LOSSES = ("fata", "simple_aug", "mse", "simple_ce")


@dataclass(frozen=True)
class Fata:
    """The plug-in: learns to predict from a perturbed feature what the clean one predicts.

    Args:
        layer: name of the layer whose output is augmented; `auto` finds one.
        sigma: standard deviation of the noise.
        ema: how much of the moving average of delta stays at each batch; None: no average.
        spread: `std` or `variance` of the channel means over the batch.
        threshold: E0, in units of ln C.
        scale: E_w, in units of ln C.
        loss: `fata`, or an ablation of the paper: `simple_aug`, `mse`, `simple_ce`.
        bn_stats: BatchNorm statistics of clean and augmented rows `separate`, or `joint`, as in
            the released code.
        noise: `noise(rows, channels)` gives alpha and beta instead of drawing them.
        weight: factor of the loss; at 0 nothing is selected and the host is itself.
        balance: whether all predicted classes have equal parts in the loss; the paper's have not.
    """

    layer: str = "auto"
    sigma: float = 1.0
    ema: float | None = 0.95
    spread: str = "std"
    threshold: float = 0.5
    scale: float = 0.4
    loss: str = "fata"
    bn_stats: str = "separate"
    noise: Callable[[int, int], Sequence[Tensor]] | None = None
    weight: float = 1.0
    balance: bool = False

    name = "fata"

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        if not isinstance(self.layer, str):
            raise TypeError(f"Fata(layer={self.layer!r}): give the name of a module, or 'auto'.")
        in_range(self, "sigma", 0)
        if self.ema is not None:
            in_range(self, "ema", 0, 1, hint=", or None for no moving average")
        is_threshold(self, "threshold")
        is_threshold(self, "scale", unlimited=False)
        in_range(self, "weight", 0)
        _one_of(self, "spread", ("std", "variance"))
        _one_of(self, "loss", LOSSES)
        _one_of(self, "bn_stats", ("separate", "joint"))

    def select(self, batch: Batch) -> Selection:
        """Rows with H < E0, whatever the host selects; confident rows weigh more."""
        rows = reliable(batch.entropy, self.threshold, batch.classes)
        weights = self.weight * confidence(batch.entropy, self.scale, batch.classes)
        return Selection(rows if self.weight else torch.zeros_like(rows), weights)

    def row_loss(self, augmented: Tensor, clean: Tensor, batch: Batch) -> Tensor:
        """The loss of each row, from the logits of z' and of z, and the batch's predictions."""
        if self.loss == "fata":
            return F.cross_entropy(augmented, batch.pseudo_label, reduction="none")
        if self.loss == "simple_ce":
            return soft_cross_entropy(augmented, batch.logits)
        if self.loss == "simple_aug":
            return entropy(augmented)
        return (augmented - clean).square().mean(1)

    def draw(
        self, rows: int, channels: int, generator: torch.Generator | None, device: torch.device
    ) -> Sequence[Tensor]:
        """What a batch is perturbed by, alpha and beta."""
        if self.noise is not None:
            return self.noise(rows, channels)
        draws = torch.randn(2, rows, channels, generator=generator, device=device)
        return [*(1 + self.sigma * draws)]

    def perturb(
        self, z: Tensor, axis: int, memory: Memory, noise: Sequence[Tensor], group: Ranks = SINGLE
    ) -> Perturb:
        """The perturbation of one batch, from its clean feature z; asked once a batch.

        `noise` is what `draw` gave for these rows.
        """
        mu = channel_mean(z.detach(), axis)
        alpha, beta = (part.to(mu) for part in noise)
        single = group.rows(len(mu)) == 1
        delta = torch.full_like(mu[0], 0.5) if single else self.delta(mu, memory, group)
        return Perturb(alpha, beta, delta, axis, single)

    def delta(self, mu: Tensor, memory: Memory, group: Ranks = SINGLE) -> Tensor:
        """How freely each channel's mean may move, (D,), at most 1."""
        single = torch.full_like(mu[0], 0.5)
        spread = group.deviation(mu, squared=self.spread == "variance")
        delta = spread / spread.max().clamp(min=1e-12)
        if self.ema is not None and "delta" in memory:
            single = memory["delta"].to(delta)  # the model may be in another precision by now
            delta = torch.lerp(delta, single, self.ema)
        return torch.where(delta.isfinite().all(), delta, single)  # a row may have overflowed

    def observe(self, perturb: Perturb, memory: Memory) -> Memory:
        """Keep the moving average that this batch's delta was."""
        if self.ema is None or perturb.single:
            return memory
        return {"delta": perturb.delta}


@dataclass(frozen=True)
class Perturb:
    """z -> alpha z + delta (beta - alpha) mu, for the rows of a batch."""

    alpha: Tensor  # (B, D)
    beta: Tensor  # (B, D)
    delta: Tensor  # (D,)
    axis: int  # of the channels in z
    single: bool = False  # of a batch of one row, which has no deviation

    def at(self, index: Tensor) -> Perturb:
        """The same perturbation, for the rows `index` only."""
        return replace(self, alpha=self.alpha[index], beta=self.beta[index])

    def __call__(self, z: Tensor) -> Tensor:
        """z', with the gradient through z and its channel means."""
        shape = [len(z)] + [1] * (z.ndim - 1)
        shape[self.axis] = -1
        shift = self.delta * (self.beta - self.alpha) * channel_mean(z, self.axis)
        return (self.alpha.view(shape) * z + shift.view(shape)).to(z.dtype)


def channel_mean(z: Tensor, axis: int) -> Tensor:
    """mu: the mean of each row's channels over space or tokens, (B, D), in full precision."""
    z = z.movedim(axis, 1)
    return z.flatten(2).to(torch.promote_types(z.dtype, torch.float32)).mean(2) if z.ndim > 2 else z


def _one_of(owner: Fata, field: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, field)
    if value not in choices:
        raise ValueError(f"Fata({field}={value!r}): choose one of {', '.join(map(repr, choices))}.")
