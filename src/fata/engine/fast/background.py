"""Compiling beside a stream: one background thread of the process, and what it works on.

It traces a shadow of the network: other modules with hooks and attributes of their own, on the
memory of the same weights. So nothing that it does is seen by the stream, but what it has compiled
reads the weights where they are. The stream takes that up between two batches.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fata.engine.fast import captured
from fata.engine.fast.captured import CapturedFunction
from fata.engine.fast.trace import Flat

SWITCH = 1e-4  # seconds after which the thread lets the stream run: Python's 5 ms stall a batch
TAKEN = 5.0  # seconds that it waits for the stream to take up what is compiled
ENDING = 5.0  # seconds that the end of the process waits for it


@dataclass(eq=False)
class Job:
    """A function to compile, and what came of it.

    Args:
        function: of the shadow.
        inputs: to compile for, and to capture with.
        around: contexts to trace in; gives the rows that are passed.
    """

    function: CapturedFunction
    inputs: list[Tensor]
    around: Callable[[], AbstractContextManager[dict[str, int]]]
    flat: Flat | None = None
    passed: dict[str, int] = field(default_factory=dict)
    error: Exception | None = None
    seconds: float = 0.0
    cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Nobody waits for it."""
        self.cancelled = True
        self.taken.set()

    def run(self) -> None:
        """Compile it."""
        begun, device = time.perf_counter(), self.inputs[0].device
        place = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with place, captured.alone(), self.around() as passed:
                self.flat = captured.compiled(self.function.plain, self.inputs)
                self.passed = dict(passed)
        except Exception as error:  # the compiler's own are of many kinds
            self.error = error
        self.seconds = time.perf_counter() - begun
        self.done.set()


class Compiler:
    """One daemon thread for all streams of the process; it ends when there is nothing to do."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """No thread and nothing to do: a forked process has none of the other's threads."""
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Compile it some time."""
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fata", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Drop all jobs, and interrupt the one at hand; the process ends."""
        with self._lock:
            thread = self._thread
            for job in self._jobs:
                job.cancel()
        if thread is not None and thread.ident is not None:
            interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
            interrupt(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            thread.join(ENDING)

    def _work(self) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH, before))
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the compiler's hint
        try:
            while (job := self._next()) is not None:
                if not job.cancelled:
                    job.run()
                    job.taken.wait(TAKEN)
        except SystemExit:  # the process ends
            return
        finally:
            sys.setswitchinterval(before)

    def _next(self) -> Job | None:
        with self._lock:
            if not self._jobs:
                self._thread = None
                return None
            return self._jobs.popleft()


COMPILER = Compiler()
atexit.register(COMPILER.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=COMPILER.renew)


class Pending:
    """What of one stream is being compiled."""

    def __init__(self) -> None:
        self._jobs: dict[Job, Callable[[Job], bool]] = {}
        self.seconds = 0.0  # that were spent on compiling, beside the stream

    def submit(self, job: Job, take: Callable[[Job], bool]) -> None:
        """Compile it, and then `take` it up, which may say that it is too early."""
        self._jobs[job] = take
        COMPILER.submit(job)

    def poll(self) -> None:
        """Take up what is ready; warn of what could not be compiled."""
        for job in [job for job in self._jobs if job.done.is_set()]:
            if job.error is not None:
                captured.left("compiled", job.error)
            elif not self._jobs[job](job):
                continue
            self.seconds += job.seconds
            job.taken.set()
            del self._jobs[job]

    def wait(self, seconds: float) -> None:
        """Until all is ready, or so long."""
        for job in self._jobs:
            job.done.wait(seconds)

    def cancel(self) -> None:
        """Nothing of it is wanted."""
        for job in self._jobs:
            job.cancel()
        self._jobs.clear()


def fitting(rows: Sequence[int], parts: int, batch: int, share: float) -> int:
    """The least rows, in parts of a batch, that are enough for a share of these numbers."""
    ordered = sorted(rows)
    enough = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    part = -(-batch // parts)
    return min(batch, -(-enough // part) * part)
