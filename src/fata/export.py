"""The adapted model as one file for other programs: a `torch.export` program, or ONNX."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from fata._files import write_whole
from fata.engine.engine import Engine
from fata.network.logits import found_in

if TYPE_CHECKING:
    from torch.export import ExportedProgram

log = logging.getLogger("fata")

SUFFIXES = (".pt2", ".onnx")


class Adapting(Protocol):
    """An adapter."""

    @property
    def name(self) -> str:
        """Name of the method."""

    def _live(self) -> Engine:
        """Its engine."""

    def unwrap(self, batch_statistics: bool | None = None) -> nn.Module:
        """The plain model."""


class Exported(nn.Module):
    """Maps images to logits, whatever the model returns them in.

    Args:
        model: with the weights and statistics that predict.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images."""
        logits: Tensor = found_in(self.model(images))
        return logits.float()


def check_path(path: str | os.PathLike[str]) -> Path:
    """Raise for a file of another kind."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"export({str(path)!r}): give a name that ends with .pt2 (torch.export) or .onnx."
        )
    return path


def write(path: Path, twin: Adapting, shape: torch.Size | None) -> None:
    """Write what a copy of an adapter predicts; the copy is used up.

    Args:
        path: an older file there is replaced whole.
        twin: the copy.
        shape: of a batch; None: there was none.
    """
    if shape is None:
        raise ValueError("export(path): no batch was seen yet; give images, for their shape.")
    engine = twin._live()
    if engine.coupled and engine.method.prior:
        raise ValueError(
            f"export(path): {twin.name} mixes BatchNorm's statistics, which plain modules "
            f"cannot; export is for the other methods."
        )
    own = engine.coupled and not engine.state.watched.running
    plain = twin.unwrap(None if engine.network.blend else own)
    parameter = next(plain.parameters())
    _write(path, plain, parameter.new_zeros(max(2, shape[0]), *shape[1:]))


def _write(path: Path, model: nn.Module, images: Tensor) -> None:
    exported = Exported(model).eval()
    if path.suffix == ".pt2":
        buffer = io.BytesIO()
        torch.export.save(_program(exported, images), buffer)
        write_whole(path, buffer.getvalue())
        return
    program = torch.onnx.export(
        _program(exported, images),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    write_whole(path, program.model_proto.SerializeToString())


def _program(model: nn.Module, images: Tensor) -> ExportedProgram:
    rows = {"images": {0: torch.export.Dim.AUTO}}
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=rows)
    if not program.range_constraints:
        log.warning("export: the model's code fixes the batch size, at %d images", len(images))
    return program
