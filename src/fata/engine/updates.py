"""How parameters move: plain SGD, and SAM's ascent before it; and whether they move at all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOMENTUM = 0.9
FIRST = 4  # steps of which one should move something


class Update(NamedTuple):
    """Parameters and momentum after a step, and whether they moved (0 or 1 each)."""

    theta: Tensor
    velocity: Tensor
    stepped: Tensor
    dropped: Tensor


def sgd(
    theta: Tensor, velocity: Tensor, gradient: Tensor, lr: float | Tensor, nesterov: bool = False
) -> tuple[Tensor, Tensor]:
    """One step of SGD with momentum 0.9; returns the new theta and velocity."""
    velocity = MOMENTUM * velocity + gradient
    direction = gradient + MOMENTUM * velocity if nesterov else velocity
    return theta - lr * direction, velocity


def guarded_sgd(
    theta: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    lr: float | Tensor,
    some: Tensor | None = None,
    nesterov: bool = False,
) -> Update:
    """A step of SGD that is dropped if the gradient is not finite; never waits for the device.

    `some`: whether there is anything to learn from; if not, nothing moves and nothing is counted.
    """
    fine = gradient.isfinite().all()
    some = torch.ones_like(fine) if some is None else some
    after, momentum = sgd(theta, velocity, gradient, lr, nesterov)
    moves = some & fine & momentum.any()
    theta, velocity = (
        torch.where(some & fine, new, old) for new, old in ((after, theta), (momentum, velocity))
    )
    return Update(theta, velocity, moves.long(), (some & ~moves).long())


def ensemble(update: Update, source: Tensor, share: float) -> Update:
    """Parameters that have moved, averaged with the source weights; momentum stays."""
    back = torch.lerp(update.theta, source, share)
    return update._replace(theta=torch.where(update.stepped > 0, back, update.theta))


def ascend(theta: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """SAM's ascent point, theta + rho g / |g|; theta itself if that is not finite."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    there = theta + rho * gradient / (norm + 1e-12)
    return torch.where(there.isfinite().all(), there, theta)
