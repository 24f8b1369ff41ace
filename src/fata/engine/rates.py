"""Learning rates: the paper's table and the released code's, for a kind of network and batch size.

The paper gives two networks: ResNet-50 and ViT-B. Any other network takes the rate of the one whose
normalisation it has: LayerNorm (and RMSNorm) that of the ViT, the others that of the ResNet.
"""

from __future__ import annotations

import math
from numbers import Real

from torch import nn

from fata.methods.base import Method
from fata.network.norms import norm_layers

PRESETS = ("paper", "release")


def is_transformer_like(model: nn.Module) -> bool:
    """Whether most normalisation layers are neither BatchNorm nor GroupNorm."""
    names = [type(module).__name__ for _, module in norm_layers(model)]
    return 2 * sum("Batch" not in name and "Group" not in name for name in names) > len(names)


def rate(preset: str, method: Method, vit: bool, batch: int) -> float:
    """Learning rate for a batch of so many rows."""
    fixed = method.fixed_rate(vit)
    if fixed is not None:
        return fixed
    if preset == "paper":  # supplement, table of hyperparameters
        base, single = (1e-3, 1.6e-5) if vit else (5e-4, 2.5e-4)
        return single if batch == 1 else base * min(1.0, batch / 64)
    doubled = 2 if batch == 1 and method.name in ("sar", "deyo") else 1
    if vit:
        return doubled * 1e-3 / 64 * batch
    return 2.5e-4 if batch >= 32 else doubled * 2.5e-4 / 64 * batch * 2


def check_rate(lr: float | str | None) -> None:
    """Raise for a rate that is not positive and no preset's name."""
    if lr is None or lr in PRESETS:
        return
    if isinstance(lr, bool) or not isinstance(lr, Real) or not 0 < lr < math.inf:
        raise ValueError(
            f"lr={lr!r}: must be a positive number, 'paper' or 'release' (None is 'paper')."
        )
