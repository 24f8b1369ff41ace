"""A benchmark on several ranks, started by torchrun: the first writes and shows progress.

Every rank runs the same cells, with its share of every batch; all read all images.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fata.bench.cell import Cell
from fata.bench.grid import GridError
from fata.bench.run.local import Task
from fata.bench.run.runner import CellRunner
from fata.engine.arguments import check_group


def join(device: str) -> tuple[dist.ProcessGroup | None, str]:
    """The process group and this rank's device, if torchrun started several ranks."""
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return None, device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    atexit.register(dist.destroy_process_group)
    return dist.group.WORLD, device


def check(group: dist.ProcessGroup | None, cells: Sequence[Cell]) -> None:
    """Raise for cells whose batches cannot be shared."""
    for cell in cells:
        if group is not None and cell.window:
            raise GridError("under torchrun: a window of the latest images cannot be shared.")
        try:
            check_group(group, cell.speed)
        except ValueError as error:
            raise GridError(f"under torchrun: {error}") from error


def follows(group: dist.ProcessGroup | None) -> bool:
    """Whether another rank leads."""
    return group is not None and dist.get_rank(group) > 0


def lead(group: dist.ProcessGroup | None, tasks: Sequence[Task]) -> None:
    """Broadcast the cells to the other ranks."""
    if group is not None:
        dist.broadcast_object_list([[task.cell for task in tasks]], 0, group)


def follow(runner: CellRunner) -> None:
    """Run the cells of the first rank, without output."""
    cells: list[list[Cell]] = [[]]
    try:
        dist.broadcast_object_list(cells, 0, runner.group)
    except RuntimeError:
        raise SystemExit(1) from None  # the first rank has ended with a message
    for cell in cells[0]:
        try:
            runner.run(cell, lambda *_: None)
        except Exception as error:
            rank = dist.get_rank(runner.group)
            raise SystemExit(f"rank {rank} ends: {type(error).__name__}: {error}") from error
