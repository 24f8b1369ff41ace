"""Files that are whole or not there."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: str) -> None:
    """Write under a temporary name and rename: a full disk leaves what was there before."""
    path = path.resolve()  # a link stays one
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
