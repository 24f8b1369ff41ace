"""Learning rates: the paper's table and the released code's, for a kind of network and batch size.

The paper gives two networks: ResNet-50 and ViT-B. Any other network takes the rate of the one whose
normalisation it has: LayerNorm (and RMSNorm) that of the ViT, the others that of the ResNet.

Hosts that the paper does not have keep the rates that they were published with (`PUBLISHED`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from torch import nn

from fata.methods.base import Method
from fata.network.norms import norm_layers

PRESETS = ("paper", "release")


@dataclass(frozen=True)
class Published:
    """Learning rates of a method's own release, by kind of network and batch size.

    Args:
        rate: `rate(vit, batch)`.
        protocol: what the rates were published for.
    """

    rate: Callable[[bool, int], float]
    protocol: str


def _zerosiam(vit: bool, batch: int) -> float:
    doubled = 2 if batch == 1 else 1
    if vit:
        return 5 * doubled * 1e-3 / 64 * batch
    return 10 * (2.5e-4 if batch >= 32 else doubled * 2.5e-4 / 64 * batch * 2)


PUBLISHED = {
    "roid": Published(
        lambda vit, batch: 2.5e-4 * min(1.0, batch / 64),
        "released code: ImageNet-C in sequence, ResNet-50, Swin-B and ViT-B/16, batches of 64",
    ),
    "nctta": Published(
        lambda vit, batch: 1e-3 * min(1.0, batch / 64),
        "defaults of the released code: any network, batches of 64; what its tables used is not "
        "known, and smaller batches are scaled by us",
    ),
    "zerosiam": Published(
        _zerosiam,
        "script of the released code: ImageNet-C, ResNet50-GN and ViT-B, batches of 64 and of 1",
    ),
}


def is_transformer_like(model: nn.Module) -> bool:
    """Whether most normalisation layers are neither BatchNorm nor GroupNorm."""
    names = [type(module).__name__ for _, module in norm_layers(model)]
    return 2 * sum("Batch" not in name and "Group" not in name for name in names) > len(names)


def own_rate(method: Method, vit: bool, batch: int) -> float | None:
    """The method's own learning rate, which no preset changes; None: it has none."""
    if method.name in PUBLISHED:
        return PUBLISHED[method.name].rate(vit, batch)
    return method.fixed_rate(vit)


def rate(preset: str, method: Method, vit: bool, batch: int) -> float:
    """Learning rate for a batch of so many rows."""
    own = own_rate(method, vit, batch)
    if own is not None:
        return own
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
