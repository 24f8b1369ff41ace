"""Run the cells that a store does not have yet, in this process or in several."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any, NamedTuple, Protocol

import torch

from fata.bench.cell import Cell, circumstances, key
from fata.bench.store import Store
from fata.bench.workshop import Workshop


@dataclass(frozen=True)
class Task:
    """A cell to be measured, with the key and protocol that it will be stored by."""

    cell: Cell
    key: str
    protocol: dict[str, Any]


class Watcher(Protocol):
    """Is told what happens."""

    def tick(self, task: Task, seen: int, accuracy: float) -> None:
        """A cell has seen so many images, of which such a share was right."""

    def done(self, task: Task, result: dict[str, Any]) -> None:
        """A cell is in the store."""

    def failed(self, task: Task, why: str) -> None:
        """A cell could not be measured; the others go on."""


def missing(cells: Sequence[Cell], store: Store, workshop: Workshop, again: bool) -> list[Task]:
    """Cells that are to be run: not in the store, each once; all of them where asked `again`."""
    tasks: dict[str, Task] = {}
    for cell in cells:
        protocol = workshop.protocol(cell)
        name = key(protocol)
        if again or name not in store:
            tasks.setdefault(name, Task(cell, name, protocol))
    return list(tasks.values())


class Estimate(NamedTuple):
    """What a grid will take, one cell at a time."""

    seconds: float
    memory: int  # bytes, at most


def estimate(tasks: Sequence[Task], store: Store, workshop: Workshop) -> Estimate:
    """From finished cells of the same model and method; where there are none, from two batches."""
    speeds: dict[tuple[str, str], tuple[float, int]] = {}
    for record in store:
        at = (record.protocol["model"], record.protocol["method"])
        speeds[at] = (record.result["images_per_second"], record.result["peak_memory"])
    seconds, memory = 0.0, 0
    for task in tasks:
        at = (task.cell.model, task.cell.method)
        if at not in speeds:
            rows = 2 * task.protocol["batch_size"]
            two = replace(task.cell, scenario="normal", options={}, images=rows)
            result = workshop.run(replace(two, domains=two.domains[:1]), lambda *_: None)
            speeds[at] = (result["images_per_second"], result["peak_memory"])
        speed, peak = speeds[at]
        seconds, memory = seconds + task.protocol["length"] / speed, max(memory, peak)
    return Estimate(seconds, memory)


def run(
    tasks: Sequence[Task], store: Store, workshop: Workshop, watcher: Watcher, jobs: int = 1
) -> None:
    """Measure and store; what is stored stays, whenever this ends."""
    if jobs > 1 and len(tasks) > 1:
        _in_processes(tasks, store, workshop, watcher, min(jobs, len(tasks)))
        return
    here = circumstances(torch.device(workshop.device))
    for task in tasks:
        try:
            result = workshop.run(task.cell, partial(watcher.tick, task))
        except Exception as error:
            watcher.failed(task, _told(error))
            continue
        store.put(task.key, task.protocol, here, result)
        watcher.done(task, result)


def _in_processes(
    tasks: Sequence[Task], store: Store, workshop: Workshop, watcher: Watcher, jobs: int
) -> None:
    """Workers measure; this process alone writes and shows."""
    context = multiprocessing.get_context("spawn")
    todo, news = context.Queue(), context.Queue()
    for number, task in enumerate(tasks):
        todo.put((number, task.cell))
    for _ in range(jobs):
        todo.put(None)
    bare = Workshop(
        workshop.device, workshop.jpeg, workshop.fisher, workshop.workers, workshop.skip_damaged
    )
    threads = max(1, torch.get_num_threads() // jobs)
    workers = [
        context.Process(target=_work, args=(bare, threads, todo, news), daemon=False)
        for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()
    try:
        _follow(tasks, store, watcher, news, workers)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _follow(
    tasks: Sequence[Task], store: Store, watcher: Watcher, news: Any, workers: Sequence[BaseProcess]
) -> None:
    left = set(range(len(tasks)))
    while left:
        try:
            number, what, *facts = news.get(timeout=1)
        except Empty:
            if not any(worker.is_alive() for worker in workers):
                for number in sorted(left):
                    watcher.failed(tasks[number], "its process was ended from outside")
                return
            continue
        task = tasks[number]
        if what == "tick":
            watcher.tick(task, *facts)
            continue
        left.discard(number)
        if what == "failed":
            watcher.failed(task, *facts)
        else:
            here, result = facts
            store.put(task.key, task.protocol, here, result)
            watcher.done(task, result)


def _work(workshop: Workshop, threads: int, todo: Any, news: Any) -> None:
    """A worker: cell after cell, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that shows ends its workers
    torch.set_num_threads(threads)
    here = circumstances(torch.device(workshop.device))
    while (item := todo.get()) is not None:
        number, cell = item
        try:
            result = workshop.run(cell, partial(_tell, news, number))
        except Exception as error:
            news.put((number, "failed", _told(error)))
        else:
            news.put((number, "done", here, result))


def _tell(news: Any, number: int, seen: int, accuracy: float) -> None:
    news.put((number, "tick", seen, accuracy))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
