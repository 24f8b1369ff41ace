"""Random draws of a step: they depend on (seed, batch, purpose) and are the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from fata.distributed.ranks import Ranks
from fata.engine.network import Network
from fata.engine.state import State
from fata.methods.base import Method
from fata.methods.fata import Fata
from fata.methods.pixels import Rng

Generators = Callable[..., torch.Generator]  # by purpose, and a device other than the model's


def seed(state: State, purpose: str) -> int:
    """Of the draws for one purpose on the next batch."""
    text = f"{state.seed}/{state.batches}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def noise(
    network: Network, plus: Fata | None, images: Tensor, generator: Generators
) -> list[Tensor]:
    """FATA's alpha and beta for these rows, from one draw for all ranks."""
    if plus is None or network.tap is None:
        return []
    rows, here = network.group.place(len(images))
    channels, device = network.tap.channels(images), images.device
    drawn = plus.draw(rows, channels, generator("plus"), device)
    return [part[here].to(device) for part in drawn]  # one's own may be elsewhere


def views(method: Method, group: Ranks, images: Tensor, generator: Generators) -> list[Tensor]:
    """The host's augmented views of these rows."""
    if not method.has_views:
        return []
    return [method.view(images, Rng(generator("views", "cpu"), group.place(len(images))))]
