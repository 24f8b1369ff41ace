"""How parameters move: plain SGD, and SAM's climb before it. Pure functions of flat vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MOMENTUM = 0.9


def sgd(
    theta: Tensor, velocity: Tensor, gradient: Tensor, lr: float | Tensor, nesterov: bool = False
) -> tuple[Tensor, Tensor]:
    """One step of SGD with momentum 0.9; returns the new theta and velocity."""
    velocity = MOMENTUM * velocity + gradient
    direction = gradient + MOMENTUM * velocity if nesterov else velocity
    return theta - lr * direction, velocity


def ascend(theta: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """SAM's climb to the worst place within rho: theta + rho g / |g|."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return theta + rho * gradient / (norm + 1e-12)


def either(condition: Tensor, yes: Sequence[Tensor], no: Sequence[Tensor]) -> Iterator[Tensor]:
    """All of `yes` where the condition holds, all of `no` where not, without waiting for it."""
    return (torch.where(condition, a, b) for a, b in zip(yes, no, strict=True))
