"""Many streams on one engine: each one's state is swapped in and out, in memory.

A state in memory is this process's own, so nothing of it is copied, checked or hashed: tensors of a
state are replaced, never changed in place. Only the parameters that adapt are written to the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from fata.engine.engine import Engine
from fata.engine.state import State


@dataclass
class Held:
    """All of one stream that an engine holds while it is at work on it."""

    state: State


def fresh(engine: Engine) -> Held:
    """A stream before its first batch."""
    return Held(engine.fresh())


def take(engine: Engine) -> Held:
    """The stream that the engine is at work on."""
    return Held(engine.state)


def put(engine: Engine, held: Held) -> None:
    """Let the engine work on this stream."""
    engine.state, engine.selected = held.state, None
    engine.write()
