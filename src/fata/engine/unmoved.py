"""Parameters that adapt, but stay as they are: what a user is told of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from fata._text import listed
from fata.network.parameters import Theta

FIRST = 4  # steps of which one should move something

Counts = Mapping[str, int | Tensor]


def check(theta: Theta, counts: Counts, before: Counts) -> bool:
    """Warn of parameters that stay; whether that is known, so that nobody need ask again.

    Waits for the device until a step has moved some.
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
