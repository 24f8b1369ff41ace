"""How parameters move: plain SGD, and SAM's ascent before it; and whether they move at all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fata._text import listed
from fata.network.parameters import Theta

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


def ascend(theta: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """SAM's ascent point, theta + rho g / |g|; theta itself if that is not finite."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    there = theta + rho * gradient / (norm + 1e-12)
    return torch.where(there.isfinite().all(), there, theta)


def check_moves(
    counts: Mapping[str, int | Tensor], before: Mapping[str, int | Tensor], theta: Theta
) -> bool:
    """Whether a step has moved something, or was said not to: warns of parameters that stay.

    Waits for the device.
    """
    names, unused = theta.names, theta.unused or []
    if all(counts.get(name, 0) == before.get(name, 0) for name in ("host", "plus")):
        return False
    stepped, dropped = (int(counts.get(name, 0)) for name in ("stepped", "dropped"))
    reached = len(unused) < len(names)
    if not stepped and dropped < (FIRST if reached else 1):  # a black image may have none
        return False
    if stepped and not unused:
        return True
    what = f"{len(unused)} of {len(names)} parameters that adapt will never move"
    why, which = "no gradient reaches them", unused
    if reached and not stepped:
        what = f"the first {dropped} steps moved nothing"
        why, which = "the gradient of what adapts is zero or not finite", names
    warnings.warn(
        f"{what}: {why} ({listed(which, 4)}). Choose others by params=[...]; of a quantised "
        f"model adapt the float one, and quantise what unwrap() returns.",
        RuntimeWarning,
        stacklevel=7,
    )
    return True
