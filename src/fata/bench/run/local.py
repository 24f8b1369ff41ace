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
from fata.bench.run.runner import Workshop
from fata.bench.store import Store

Group = tuple[str, str, tuple[str, ...]]  # model and pictures that cells have in common


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
    following = [task.cell for task in tasks[1:]]
    for task, then in zip_longest(tasks, following):
        try:
            result = workshop.run(task.cell, partial(watcher.tick, task), then)
        except Exception as error:
            watcher.failed(task, told(error))
            if workshop.group is not None:
                return  # the ranks may no longer be at the same place
            continue
        store.put(task.key, task.protocol, here, result)
        watcher.done(task, result)


def _in_processes(
    tasks: Sequence[Task], store: Store, workshop: Workshop, watcher: Watcher, jobs: int
) -> None:
    """Workers measure; this process alone hands out, writes and shows."""
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    threads = max(1, torch.get_num_threads() // jobs)
    workers = threads if workshop.workers is None else workshop.workers
    bare = replace(workshop, workers=workers, share=workshop.share / jobs)  # with nothing loaded
    todo = Todo(tasks)
    hands = []
    for name in range(jobs):
        inbox = context.SimpleQueue()
        process = context.Process(target=_work, args=(bare, threads, name, inbox, news))
        hands.append(Hand(process, inbox))
    for hand in hands:
        hand.process.start()
        for _ in range(2):  # one to run, and one to decode meanwhile
            hand.give(todo)
    try:
        _follow(tasks, todo, store, watcher, news, hands)
    finally:
        for hand in hands:
            hand.process.kill()  # they hold nothing; and a driver may keep one that is asked to end


class Todo:
    """Tasks not handed out yet; who has met certain pictures gets more of those."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.left: dict[Group, deque[int]] = {}
        for number, task in enumerate(tasks):
            self.left.setdefault(group_of(task.cell), deque()).append(number)
        self._given: Counter[Group] = Counter()

    def next(self, last: Group | None) -> int | None:
        """The number of a task; of the same pictures as the last, if there is one.

        Else of those with the most work left for each worker that they were given to.
        """
        group = self._choose(last)
        if group is None:
            return None
        if group != last:
            self._given[group] += 1
        number = self.left[group].popleft()
        if not self.left[group]:
            del self.left[group]
        return number

    def peek(self, last: Group | None) -> int | None:
        """What would be next, if it were asked for now."""
        group = self._choose(last)
        return None if group is None else self.left[group][0]

    def back(self, number: int) -> None:
        """A task that was handed out is to be done after all, and soon."""
        self.left.setdefault(group_of(self.tasks[number].cell), deque()).appendleft(number)

    def __len__(self) -> int:
        return sum(map(len, self.left.values()))

    def _choose(self, last: Group | None) -> Group | None:
        if last in self.left or not self.left:
            return last if self.left else None
        return max(self.left, key=lambda group: self._work(group) / (1 + self._given[group]))

    def _work(self, group: Group) -> int:
        """Images left."""
        return sum(self.tasks[number].protocol["length"] for number in self.left[group])


@dataclass
class Hand:
    """A worker: its process, and the tasks that it has, the first of them running."""

    process: BaseProcess
    inbox: Any
    has: deque[int] = field(default_factory=deque)
    last: Group | None = None

    def give(self, todo: Todo) -> None:
        """Another task, where there is one; else the word that there is none."""
        number = todo.next(self.last)
        if number is None:
            self.inbox.put(None)
            return
        self.last = group_of(todo.tasks[number].cell)
        self.has.append(number)
        self.inbox.put((number, todo.tasks[number].cell))


def group_of(cell: Cell) -> Group:
    """What it has in common with others."""
    return cell.model, cell.data, cell.domains


def _follow(
    tasks: Sequence[Task],
    todo: Todo,
    store: Store,
    watcher: Watcher,
    news: Any,
    hands: Sequence[Hand],
) -> None:
    while todo.left or any(hand.has for hand in hands):
        try:
            name, number, what, *facts = news.get(timeout=1)
        except Empty:
            ended = [hand for hand in hands if not hand.process.is_alive()]
            for number in [number for hand in ended for number in hand.has]:
                watcher.failed(tasks[number], "its process was ended from outside")
            for hand in ended:
                hand.has.clear()
            if len(ended) == len(hands):
                while (number := todo.next(None)) is not None:
                    watcher.failed(tasks[number], "its process was ended from outside")
            continue
        task = tasks[number]
        if what == "tick":
            watcher.tick(task, *facts)
            continue
        hands[name].has.remove(number)
        hands[name].give(todo)
        if what == "failed":
            watcher.failed(task, *facts)
        else:
            here, result = facts
            store.put(task.key, task.protocol, here, result)
            watcher.done(task, result)


def _work(workshop: Workshop, threads: int, name: int, inbox: Any, news: Any) -> None:
    """A worker: cell after cell, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that shows ends its workers
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    here = circumstances(torch.device(workshop.device))
    item = inbox.get()
    while item is not None:
        number, cell = item
        item = inbox.get()
        following = None if item is None else item[1]
        try:
            result = workshop.run(cell, partial(_tell, news, name, number), following)
        except Exception as error:
            news.put((name, number, "failed", told(error)))
        else:
            news.put((name, number, "done", here, result))


def _end_with_parent() -> None:
    """Wait for the end of the process that shows, however it ends, and end this one too."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _tell(news: Any, name: int, number: int, seen: int, accuracy: float) -> None:
    news.put((name, number, "tick", seen, accuracy))


def told(error: Exception) -> str:
    """Why a cell could not be measured."""
    return f"{type(error).__name__}: {error}"
