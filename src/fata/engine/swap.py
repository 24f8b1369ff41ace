"""Many streams on one engine: each one's state is swapped in and out, in memory.

A state in memory is this process's own, so nothing of it is copied, checked or hashed: tensors of a
state are replaced, never changed in place. Only the parameters that adapt are written to the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fata.engine.engine import Engine
from fata.engine.state import State
from fata.guard.events import Snapshot
from fata.methods.base import Memory


@dataclass
class Held:
    """All of one stream that an engine holds while it is at work on it."""

    state: State
    snapshots: tuple[Snapshot, ...] = field(default=())


def fresh(engine: Engine) -> Held:
    """A stream before its first batch."""
    return Held(engine.fresh())


def take(engine: Engine) -> Held:
    """The stream that the engine is at work on."""
    return Held(engine.state, engine.watch.states if engine.watch else ())


def put(engine: Engine, held: Held) -> None:
    """Let the engine work on this stream."""
    engine.state, engine.selected = held.state, None
    if engine.watch:
        engine.watch.states = held.snapshots
    engine.write()


def pack_snapshots(snapshots: Sequence[Snapshot]) -> dict[str, Tensor]:
    """The guard's snapshots as tensors by name."""
    tensors: dict[str, Tensor] = {}
    for number, one in enumerate(snapshots):
        facts = torch.tensor([one.narrowing, one.batch], dtype=torch.float64)
        groups = {"": {"facts": facts, "theta": one.theta}, "host.": one.host, "plus.": one.plus}
        tensors |= {
            f"snapshot.{number}.{group}{name}": tensor.detach().clone()
            for group, members in groups.items()
            for name, tensor in members.items()
        }
    return tensors


def unpack_snapshots(tensors: Mapping[str, Tensor], device: torch.device) -> tuple[Snapshot, ...]:
    """What `pack_snapshots` gave; from a state without snapshots, none."""
    found: list[Snapshot] = []
    while f"snapshot.{len(found)}.facts" in tensors:
        prefix = f"snapshot.{len(found)}."
        narrowing, batch = tensors[f"{prefix}facts"].tolist()
        theta = tensors[f"{prefix}theta"].to(device, copy=True)
        host, plus = (_memory(tensors, f"{prefix}{group}.", device) for group in ("host", "plus"))
        found.append(Snapshot(narrowing, int(batch), theta, host, plus))
    return tuple(found)


def _memory(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> Memory:
    named = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): t.to(device, copy=True) for name, t in named.items()}
