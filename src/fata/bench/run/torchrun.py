"""A benchmark on several ranks, as torchrun starts them: the first writes and shows.

Every rank runs the same cells, with its share of every batch; all read all pictures.
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
from fata.bench.run.runner import Workshop
from fata.engine.arguments import check_group


def join(device: str) -> tuple[dist.ProcessGroup | None, str]:
    """The ranks and this one's device, where torchrun started several; else None."""
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return None, device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    atexit.register(dist.destroy_process_group)
    return dist.group.WORLD, device


def check(group: dist.ProcessGroup | None, cells: Sequence[Cell]) -> None:
    """Refuse cells whose batches cannot be shared."""
    for cell in cells:
        try:
            check_group(group, cell.speed)
        except ValueError as error:
            raise GridError(f"under torchrun: {error}") from error


def follows(group: dist.ProcessGroup | None) -> bool:
    """Whether another rank leads."""
    return group is not None and dist.get_rank(group) > 0


def lead(group: dist.ProcessGroup | None, tasks: Sequence[Task]) -> None:
    """Tell the others what is to be run."""
    if group is not None:
        dist.broadcast_object_list([[task.cell for task in tasks]], 0, group)


def follow(workshop: Workshop) -> None:
    """Run what the first rank runs, in silence."""
    told: list[list[Cell]] = [[]]
    try:
        dist.broadcast_object_list(told, 0, workshop.group)
    except RuntimeError:
        raise SystemExit(1) from None  # the first rank has ended, and said why
    for cell in told[0]:
        try:
            workshop.run(cell, lambda *_: None)
        except Exception as error:
            rank = dist.get_rank(workshop.group)
            raise SystemExit(f"rank {rank} ends: {type(error).__name__}: {error}") from error
