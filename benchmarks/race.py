"""Taking time: several ways through the same batch, warmed up, taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fata

WARM = 3  # calls before the clock starts: the tap finds its way, passes are captured

Call = Callable[[Tensor], Any]


@dataclass
class Runner:
    """One way through a batch, and what it took."""

    call: Call
    seconds: list[float] = field(default_factory=list)  # of a call, one a round
    peak: int | None = None  # bytes on a GPU, its own copy of the network included

    def per_second(self, rows: int) -> float:
        """Rows a second, by the median round."""
        return rows / median(self.seconds)


def race(
    ways: Mapping[str, Callable[[], Call]],
    images: Tensor,
    rounds: int,
    calls: int = 1,
) -> dict[str, Runner]:
    """Make each way and warm it up, then let them take turns of some calls."""
    runners = {}
    for name, make in ways.items():
        before = (allocated(), held()) if images.is_cuda else None
        runners[name] = runner = Runner(make())
        if images.is_cuda and isinstance(runner.call, fata.Adapter):
            runner.call.warm_up(len(images), images.shape[1:])
        for _ in range(WARM):
            runner.call(images)
        if before is not None:
            runner.peak = needed(runner.call, images, *before)
    for _ in range(rounds):
        for runner in runners.values():
            runner.seconds.append(seconds(runner.call, images, calls))
    return runners


def seconds(call: Call, images: Tensor, calls: int = 1) -> float:
    """What a call takes, in the mean of some."""
    wait(images)
    start = time.perf_counter()
    for _ in range(calls):
        call(images)
    wait(images)
    return (time.perf_counter() - start) / calls


def times(one: Runner, other: Runner) -> float:
    """How many times as long the first takes: the median over rounds."""
    return median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def allocated() -> int:
    """Bytes in use on the GPU; its peak is counted from here."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def held() -> int:
    """Bytes of the GPU that torch cannot give back: tensors, and what recorded programs keep."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def needed(call: Call, images: Tensor, tensors: int, reserved: int) -> int:
    """Bytes that a way takes beside what was there before it, `tensors` of what was `reserved`.

    It is the peak of a call, or what is kept between calls where that is more: programs have the
    memory that they run in to themselves, and while they run nothing is allocated there.
    """
    kept = held() - reserved
    allocated()
    call(images)
    torch.cuda.synchronize()
    return max(kept, torch.cuda.max_memory_allocated() - tensors)


def wait(images: Tensor) -> None:
    """For what was launched."""
    if images.is_cuda:
        torch.cuda.synchronize()
