"""Memory that worker processes decode into, and that a GPU copies from directly.

A DataLoader's worker writes a batch to shared memory; the main process maps, copies and pins it.
That is more work for one process than decoding is for many workers.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor


class SharedBatches:
    """A ring of batches in memory that forked processes share with this one.

    Args:
        count: number of batches.
        shape: of a batch, (rows, 3, H, W), bytes.
    """

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        memory = mmap.mmap(-1, count * math.prod(shape))  # no file, so no limit of /dev/shm's
        self.pixels = torch.frombuffer(memory, dtype=torch.uint8).view(count, *shape)
        self._copied: list[torch.cuda.Event | None] = [None] * count

    def free(self) -> Iterator[int]:
        """Numbers of slots, in turn, once the batch in the slot has been copied."""
        for number in cycle(range(len(self.pixels))):
            if event := self._copied[number]:
                event.synchronize()
            yield number

    def copied(self, number: int, rows: int, device: torch.device) -> Tensor:
        """The first rows of a slot, on the device; a GPU copies on a stream of its own."""
        pixels = self.pixels[number, :rows]
        if device.type != "cuda":
            return pixels.to(device, copy=True)
        place = torch.cuda.current_device() if device.index is None else device.index
        copies, now = _copy_stream(place), torch.cuda.current_stream(place)
        with torch.cuda.stream(copies):
            copy = pixels.to(device, non_blocking=True)
        now.wait_stream(copies)
        copy.record_stream(now)
        self._copied[number] = now.record_event()  # the process stays only some slots ahead
        return copy

    @contextmanager
    def pinned(self, device: torch.device) -> Iterator[None]:
        """Page-lock the memory inside the context, if the system permits."""
        if device.type != "cuda" or not self._pin(device):
            yield
            return
        try:
            yield
        finally:
            for event in filter(None, self._copied):
                event.synchronize()
            torch.cuda.check_error(_runtime().cudaHostUnregister(self.pixels.data_ptr()))

    def _pin(self, device: torch.device) -> bool:
        at, size = self.pixels.data_ptr(), self.pixels.nbytes
        try:
            torch.cuda.check_error(_runtime().cudaHostRegister(at, size, 1))
        except RuntimeError as error:
            warnings.warn(
                f"copying images from memory that is not pinned: {error}",
                stacklevel=2,
            )
            with suppress(RuntimeError):
                torch.zeros((), device=device)  # otherwise the next kernel would report this error
            return False
        return True


@cache
def _copy_stream(place: int) -> torch.cuda.Stream:
    """A CUDA stream for copies."""
    return torch.cuda.Stream(place)  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
