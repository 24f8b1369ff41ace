"""What a stream of a fleet is called, and what is set for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fata._files import STREAM, write_whole
from fata.engine.checkpoint import StateError
from fata.engine.rates import check_rate
from fata.methods import SPECS


def check_name(name: str) -> None:
    """Raise for what is no stream's name: letters, digits, `.`, `_` and `-`, never a path."""
    if not isinstance(name, str) or not STREAM.fullmatch(name):
        raise ValueError(
            f"stream {name!r}: give a name of at most 128 letters, digits, '.', '_' and '-', that "
            f"begins with a letter or a digit."
        )


@dataclass(frozen=True)
class StreamSettings:
    """What is set for one stream.

    Args:
        frozen: predict without learning.
        lr: learning rate; None: the adapter's.
        method: its name, such as `sar+fata`; None: the adapter's.
    """

    frozen: bool = False
    lr: float | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        """Raise for values that cannot be."""
        if not isinstance(self.frozen, bool):
            raise ValueError(f"frozen={self.frozen!r}: must be True or False.")
        if isinstance(self.lr, str):
            raise ValueError(f"lr={self.lr!r}: a stream's rate is a positive number, or None.")
        check_rate(self.lr)
        if self.method is not None and self.method not in SPECS:
            raise ValueError(
                f"method={self.method!r}: choose one of {', '.join(SPECS)}, or None: the adapter's."
            )

    def write(self, path: Path) -> None:
        """Keep them in a file."""
        write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> StreamSettings:
        """Those of a file; the defaults if there is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (TypeError, ValueError) as error:
            raise StateError(f"{str(path)!r} is damaged: {error}") from error
