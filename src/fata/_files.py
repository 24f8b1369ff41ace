"""Files that are whole or not there, and tensors in them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from torch import Tensor

STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # a stream's name, and so its file's


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write under a temporary name and rename it: no reader ever sees half a file.

    A full disk leaves what was there before. A symbolic link stays, and its target is written.
    """
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r}; make it")
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def tensor_bytes(packed: Mapping[str, Any]) -> bytes:
    """The content of a safetensors file: tensors by name, and `meta` beside them."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in packed.items() if name != "meta"}
    return save(tensors, {"meta": json.dumps(packed["meta"])})


def save_tensors(path: str | os.PathLike[str], packed: Mapping[str, Any]) -> None:
    """Write tensors by name, and `meta` beside them, to one safetensors file."""
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise FileNotFoundError(f"cannot save to {str(path)!r}: make the folder first")
    try:
        write_whole(path, tensor_bytes(packed))
    except OSError as error:
        why = f"cannot save the state, what was there before is whole: {error.strerror}"
        raise OSError(error.errno, why, str(path)) from error


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Equal for equal tensors of equal names."""
    import torch

    content = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().cpu().contiguous()
        content.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
        content.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:32]
