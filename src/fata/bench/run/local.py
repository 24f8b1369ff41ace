"""Run the cells that a store does not have yet, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, parent_process
from queue import Empty
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch

from fata.bench.cell import Cell, circumstances, key
from fata.bench.run.runner import CellRunner
from fata.bench.store import Store

Affinity = tuple[str, str, tuple[str, ...]]  # model, data and domains: what cells can share


@dataclass(frozen=True)
class Task:
    """A cell to be measured, with the key and protocol that it will be stored by."""

    cell: Cell
    key: str
    protocol: dict[str, Any]


class Watcher(Protocol):
    """Receives the progress of a run."""

    def tick(self, task: Task, seen: int, accuracy: float) -> None:
        """A cell has seen so many images, with this accuracy so far."""

    def done(self, task: Task, result: dict[str, Any]) -> None:
        """A cell is in the store."""

    def failed(self, task: Task, why: str) -> None:
        """A cell could not be measured; the others continue."""


def missing(cells: Sequence[Cell], store: Store, runner: CellRunner, again: bool) -> list[Task]:
    """Cells that are to be run, each once: those not in the store, or with `again` all."""
    tasks: dict[str, Task] = {}
    for cell in cells:
        protocol = runner.protocol(cell)
        name = key(protocol)
        if again or name not in store:
            tasks.setdefault(name, Task(cell, name, protocol))
    return list(tasks.values())


class Estimate(NamedTuple):
    """Time and memory of a grid, one cell at a time."""

    seconds: float
    memory: int  # bytes, at most


def estimate(tasks: Sequence[Task], store: Store, runner: CellRunner) -> Estimate:
    """From finished cells of the same model and method; if there are none, from two batches."""
    speeds: dict[tuple[str, str], tuple[float, int]] = {}
    for record in store:
        at = (record.protocol["model"], record.protocol["method"])
        speeds[at] = (record.result["images_per_second"], record.result["peak_memory"])
    seconds, memory = 0.0, 0
    for task in tasks:
        at = (task.cell.model, task.cell.method)
        if at not in speeds:
            rows = 2 * task.protocol["batch_size"] + (task.cell.window or 0)
            two = replace(task.cell, scenario="normal", options={}, images=rows)
            result = runner.run(replace(two, domains=two.domains[:1]), lambda *_: None)
            speeds[at] = (result["images_per_second"], result["peak_memory"])
        speed, peak = speeds[at]
        seconds, memory = seconds + task.protocol["length"] / speed, max(memory, peak)
    return Estimate(seconds, memory)


def run(
    tasks: Sequence[Task], store: Store, runner: CellRunner, watcher: Watcher, jobs: int = 1
) -> None:
    """Measure and store; what is stored stays, whenever this ends."""
    if jobs > 1 and len(tasks) > 1:
        _in_processes(tasks, store, runner, watcher, min(jobs, len(tasks)))
        return
    here = circumstances(torch.device(runner.device))
    following = [task.cell for task in tasks[1:]]
    for task, then in zip_longest(tasks, following):
        try:
            result = runner.run(task.cell, partial(watcher.tick, task), then)
        except Exception as error:
            watcher.failed(task, failure(error))
            if runner.group is not None:
                return  # the ranks may no longer be at the same place
            continue
        store.put(task.key, task.protocol, here, result)
        watcher.done(task, result)


def _in_processes(
    tasks: Sequence[Task], store: Store, runner: CellRunner, watcher: Watcher, jobs: int
) -> None:
    """Worker processes measure; this process assigns tasks, writes results and shows progress."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    threads = max(1, torch.get_num_threads() // jobs)
    decoders = threads if runner.workers is None else runner.workers
    empty = replace(runner, workers=decoders, share=runner.share / jobs)  # with nothing loaded
    queue = TaskQueue(tasks)
    workers = []
    for name in range(jobs):
        inbox = context.SimpleQueue()
        process = context.Process(target=_work, args=(empty, threads, name, inbox, messages))
        workers.append(WorkerProcess(process, inbox))
    for worker in workers:
        worker.process.start()
        for _ in range(2):  # one to run, and one to decode meanwhile
            worker.assign(queue)
    try:
        _collect(tasks, queue, store, watcher, messages, workers)
    finally:
        for worker in workers:
            worker.process.kill()  # it holds nothing, and a GPU driver may ignore a polite request


class TaskQueue:
    """Tasks that are not assigned yet; a worker gets tasks with the images that it has."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.left: dict[Affinity, deque[int]] = {}
        for number, task in enumerate(tasks):
            self.left.setdefault(affinity_of(task.cell), deque()).append(number)
        self._workers: Counter[Affinity] = Counter()

    def next(self, last: Affinity | None) -> int | None:
        """The number of a task with the same affinity as the last, if there is one.

        Otherwise from the affinity with the most work left for each worker that it has.
        """
        affinity = self._choose(last)
        if affinity is None:
            return None
        if affinity != last:
            self._workers[affinity] += 1
        number = self.left[affinity].popleft()
        if not self.left[affinity]:
            del self.left[affinity]
        return number

    def peek(self, last: Affinity | None) -> int | None:
        """What `next` would return now."""
        affinity = self._choose(last)
        return None if affinity is None else self.left[affinity][0]

    def put_back(self, number: int) -> None:
        """Return an assigned task; it comes first among those of its affinity."""
        self.left.setdefault(affinity_of(self.tasks[number].cell), deque()).appendleft(number)

    def __len__(self) -> int:
        return sum(map(len, self.left.values()))

    def _choose(self, last: Affinity | None) -> Affinity | None:
        if last in self.left or not self.left:
            return last if self.left else None
        return max(self.left, key=lambda one: self._work(one) / (1 + self._workers[one]))

    def _work(self, affinity: Affinity) -> int:
        """Images left."""
        return sum(self.tasks[number].protocol["length"] for number in self.left[affinity])


@dataclass
class WorkerProcess:
    """A worker process and the tasks assigned to it, the first of them running."""

    process: BaseProcess
    inbox: Any
    assigned: deque[int] = field(default_factory=deque)
    last: Affinity | None = None

    def assign(self, queue: TaskQueue) -> None:
        """Send another task, or None if there is none left."""
        number = queue.next(self.last)
        if number is None:
            self.inbox.put(None)
            return
        self.last = affinity_of(queue.tasks[number].cell)
        self.assigned.append(number)
        self.inbox.put((number, queue.tasks[number].cell))


def affinity_of(cell: Cell) -> Affinity:
    """Equal for cells that share model and images."""
    return cell.model, cell.data, cell.domains


def _collect(
    tasks: Sequence[Task],
    queue: TaskQueue,
    store: Store,
    watcher: Watcher,
    messages: Any,
    workers: Sequence[WorkerProcess],
) -> None:
    """Receive what the workers send, until every task is done or has failed."""
    while queue.left or any(worker.assigned for worker in workers):
        try:
            name, number, what, *facts = messages.get(timeout=1)
        except Empty:
            ended = [worker for worker in workers if not worker.process.is_alive()]
            for number in [number for worker in ended for number in worker.assigned]:
                watcher.failed(tasks[number], "its worker process was killed")
            for worker in ended:
                worker.assigned.clear()
            if len(ended) == len(workers):
                while (number := queue.next(None)) is not None:
                    watcher.failed(tasks[number], "its worker process was killed")
            continue
        task = tasks[number]
        if what == "tick":
            watcher.tick(task, *facts)
            continue
        workers[name].assigned.remove(number)
        workers[name].assign(queue)
        if what == "failed":
            watcher.failed(task, *facts)
        else:
            here, result = facts
            store.put(task.key, task.protocol, here, result)
            watcher.done(task, result)


def _work(runner: CellRunner, threads: int, name: int, inbox: Any, messages: Any) -> None:
    """The main function of a worker process: cell after cell, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends its workers
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    here = circumstances(torch.device(runner.device))
    item = inbox.get()
    while item is not None:
        number, cell = item
        item = inbox.get()
        following = None if item is None else item[1]
        try:
            result = runner.run(cell, partial(_send_progress, messages, name, number), following)
        except Exception as error:
            messages.put((name, number, "failed", failure(error)))
        else:
            messages.put((name, number, "done", here, result))


def _end_with_parent() -> None:
    """Wait for the end of the parent process, however it ends, and end this one too."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _send_progress(messages: Any, name: int, number: int, seen: int, accuracy: float) -> None:
    messages.put((name, number, "tick", seen, accuracy))


def failure(error: Exception) -> str:
    """Why a cell could not be measured."""
    return f"{type(error).__name__}: {error}"
