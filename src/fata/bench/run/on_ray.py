"""Run cells on a Ray cluster: workers on its nodes measure; this process hands out and writes.

A worker is an actor. It holds its share of a GPU, and stays with its model and pictures from cell
to cell; Ray starts a new process for every plain task that has a GPU.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

import fata
from fata.bench.cell import Cell, circumstances
from fata.bench.run.local import Group, Task, Todo, Watcher, group_of, told
from fata.bench.run.ray_objects import Kit, Larder, Stocked
from fata.bench.run.runner import Workshop
from fata.bench.store import Store
from fata.corruptions import weather
from fata.data.dataset import Pictures

TRIES = 3  # of a cell whose worker is lost, and of starting a worker
_LOOK = 0.5  # seconds between looks at what is going on
_PICTURES = 0.25  # of a node's object store, for pictures of one domain


class ClusterError(RuntimeError):
    """A cluster that cannot be reached, or cannot run a cell."""


class Staff(Watcher, Protocol):
    """A watcher that is told of the workers too."""

    def staffed(self, workers: Mapping[str, Task | None]) -> None:
        """Who is there, by name, and the cell that each is at."""

    def lost(self, worker: str) -> None:
        """A worker is gone; its cell goes to another."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """The cluster at an address; None: the one that Ray finds, else one on this machine alone."""
    if ray.is_initialized():
        yield
        return
    _knock(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray cluster at {address or 'hand'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Refuse an address where nobody answers, which Ray would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise ClusterError(f"no Ray cluster at {address}: {error}.") from error


@dataclass(frozen=True)
class Share:
    """What a worker takes of its node: on a CPU its threads, else a share of the GPUs."""

    threads: int
    gpus: float = 0

    def fits(self, node: Mapping[str, float]) -> int:
        """How many find room on a node with such resources."""
        if not self.gpus:
            return int(node.get("CPU", 0) // self.threads)
        if self.gpus < 1:
            return int(node.get("GPU", 0)) * int(1 / self.gpus + 1e-6)
        return int(node.get("GPU", 0) // self.gpus)


def share(gpus: float | None, jobs: int) -> Share:
    """What a worker takes on the cluster that we are connected to.

    Args:
        gpus: for a cell; None: one where the cluster has some, else none.
        jobs: cells at a time on a node without GPUs, if it is like this machine.

    Raises:
        ClusterError: no node has as much.
    """
    nodes = _nodes()
    most = max(nodes, key=lambda node: node.get("GPU", 0))
    if gpus is None:
        gpus = 1 if most.get("GPU", 0) >= 1 else 0
    if gpus > 1 and gpus != int(gpus):
        raise ClusterError(f"{gpus} GPUs a cell: give a part of one, or a whole number.")
    if gpus:
        cells = Share(1, gpus).fits(most)
        if not cells:
            raise ClusterError(
                f"no node of the cluster has {gpus:g} GPU for a cell: the most is "
                f"{most.get('GPU', 0):g}."
            )
        return Share(max(1, int(most.get("CPU", 0) // cells)), gpus)
    cores = int(max(node.get("CPU", 0) for node in nodes))
    if not cores:
        raise ClusterError("no node of the cluster has a CPU to give.")
    return Share(min(max(1, torch.get_num_threads() // jobs), cores))


def run(
    tasks: Sequence[Task], store: Store, workshop: Workshop, watcher: Staff, one: Share
) -> None:
    """Measure and store, on the cluster that we are connected to; what is stored stays."""
    nodes = _nodes()
    cells = max(1, *map(one.fits, nodes))
    workers = one.threads if workshop.workers is None else workshop.workers
    stocked = Stocked(
        "cuda" if one.gpus else "cpu",
        workshop.jpeg,
        workshop.fisher,
        workers,
        workshop.skip_damaged,
        workshop.share * min(1, one.gpus) if one.gpus else workshop.share / cells,
    )
    room = int(_PICTURES * min(node["object_store_memory"] for node in nodes))
    crew = Crew(tasks, store, watcher, one, stocked, Larder(tasks, workshop, room))
    try:
        crew.work()
    finally:
        crew.dismiss()


class Hello(NamedTuple):
    """What a worker says of itself."""

    name: str
    fata: str
    frost: str
    here: dict[str, str]


class Worker:
    """In a process on a node: cell after cell, with the model and the pictures of the last."""

    def __init__(self, workshop: Stocked, threads: int) -> None:
        self.workshop, self.threads = workshop, threads
        self._at = (-1, 0, 0.0)

    def hello(self) -> Hello:
        """Who is here, and with what."""
        here = circumstances(torch.device(self.workshop.device))
        name = f"{platform.node()}:{os.getpid()}"
        return Hello(name, fata.__version__, weather.frost_source(), here)

    def run(
        self, number: int, cell: Cell, kit: Kit, *pictures: Pictures
    ) -> tuple[dict[str, Any] | None, str]:
        """A cell's result; or why there is none."""
        torch.set_num_threads(self.threads)
        self._at = (number, 0, 0.0)

        def tick(seen: int, accuracy: float) -> None:
            self._at = (number, seen, accuracy)

        try:
            self.workshop.stock(cell, kit, pictures)
            return self.workshop.run(cell, tick), ""
        except Exception as error:
            return None, told(error)

    def progress(self) -> tuple[int, int, float]:
        """The number of the cell, the images that it has seen, and the share that was right."""
        return self._at


@dataclass
class Hand:
    """A worker as it is seen from here."""

    actor: Any
    awaited: Any  # a reference to what will come: its hello, then what becomes of its task
    name: str = ""
    here: dict[str, str] = field(default_factory=dict)
    has: int | None = None  # the number of its task
    last: Group | None = None
    look: Any = None  # a reference to its progress


class Crew:
    """Workers on a cluster: as many as find room, nodes coming and going."""

    def __init__(
        self,
        tasks: Sequence[Task],
        store: Store,
        watcher: Staff,
        one: Share,
        workshop: Stocked,
        larder: Larder,
    ) -> None:
        self.tasks, self.store, self.watcher, self.one = tasks, store, watcher, one
        self.todo, self.larder = Todo(tasks), larder
        self.hands: list[Hand] = []
        self._workshop = workshop
        self._lost: Counter[int] = Counter()  # by task: workers that were lost at it
        self._unborn = 0  # workers in a row that were lost before they said hello
        self._looked = 0.0
        self._actor = ray.remote(
            num_cpus=0 if one.gpus else one.threads,
            num_gpus=one.gpus,
            concurrency_groups={"looks": 1},
        )(Worker)

    def work(self) -> None:
        """Until every task is done or has failed."""
        while self.todo.left or any(hand.has is not None for hand in self.hands):
            if time.monotonic() - self._looked > _LOOK:
                self._looked = time.monotonic()
                self._hire()
                self._look()
            awaited = {hand.awaited: hand for hand in self.hands}
            if not awaited:  # no node, or none with room
                time.sleep(_LOOK)
                continue
            for ref in ray.wait(list(awaited), timeout=_LOOK)[0]:
                self._settle(awaited[ref])

    def dismiss(self) -> None:
        """End the workers, whatever they are at."""
        for hand in self.hands:
            ray.kill(hand.actor)
        self.hands.clear()

    def _hire(self) -> None:
        """Workers for what is left to do, as many as there is room for."""
        room = sum(map(self.one.fits, _nodes()))
        busy = sum(hand.has is not None for hand in self.hands)
        for _ in range(min(room, len(self.todo) + busy) - len(self.hands)):
            actor = self._actor.remote(self._workshop, self.one.threads)
            self.hands.append(Hand(actor, actor.hello.remote()))

    def _look(self) -> None:
        """Pass on how far each worker is; a worker that is lost is found out by its cell."""
        for hand in self.hands:
            if hand.look is not None and ray.wait([hand.look], timeout=0)[0]:
                try:
                    number, seen, accuracy = ray.get(hand.look)
                except RayError:
                    number = -1
                if number == hand.has and seen:
                    self.watcher.tick(self.tasks[number], seen, accuracy)
                hand.look = None
            if hand.look is None and hand.has is not None:
                hand.look = hand.actor.progress.options(concurrency_group="looks").remote()

    def _settle(self, hand: Hand) -> None:
        try:
            answer = ray.get(hand.awaited)
        except RayTaskError as error:
            if hand.has is None:
                raise ClusterError(f"a worker cannot start: {error}") from error
            answer = (None, told(error.cause or error))  # its pictures could not be decoded
        except RayError as error:
            self._lose(hand, error)
            return
        if isinstance(answer, Hello):
            self._welcome(hand, answer)
        else:
            self._finish(hand, *answer)
        self._give(hand)
        self._tell()

    def _welcome(self, hand: Hand, hello: Hello) -> None:
        ours = (fata.__version__, weather.frost_source())
        if (hello.fata, hello.frost) != ours:
            raise ClusterError(
                f"{hello.name} has fata {hello.fata} with {hello.frost} frost, but here is fata "
                f"{ours[0]} with {ours[1]} frost: results would not be those of one protocol."
            )
        hand.name, hand.here = hello.name, hello.here
        self._unborn = 0

    def _finish(self, hand: Hand, result: dict[str, Any] | None, why: str) -> None:
        assert hand.has is not None
        task, hand.has = self.tasks[hand.has], None
        self.larder.release(task)
        if result is None:
            self.watcher.failed(task, why)
        else:
            self.store.put(task.key, task.protocol, hand.here, result)
            self.watcher.done(task, result)

    def _give(self, hand: Hand) -> None:
        """A task, and pictures of the next are decoded meanwhile; who gets none may go."""
        number = self.todo.next(hand.last)
        if number is None:
            ray.kill(hand.actor)
            self.hands.remove(hand)
            return
        task = self.tasks[number]
        kit, pictures = self.larder.serve(task)
        hand.has, hand.last = number, group_of(task.cell)
        hand.awaited = hand.actor.run.remote(number, task.cell, kit, *pictures)
        following = self.todo.peek(hand.last)
        if following is not None:
            self.larder.serve(self.tasks[following])

    def _lose(self, hand: Hand, error: RayError) -> None:
        """Its task goes to another, though not without end."""
        ray.kill(hand.actor)
        self.hands.remove(hand)
        if hand.has is None:
            self._unborn += 1
            if self._unborn == TRIES:
                raise ClusterError(f"workers cannot start: {error}") from error
            return
        task = self.tasks[hand.has]
        self._lost[hand.has] += 1
        if self._lost[hand.has] == TRIES:
            self.larder.release(task)
            self.watcher.failed(task, f"its worker was lost {TRIES} times: {error}")
        else:
            if not isinstance(error, RayActorError):
                self.larder.renew(task)
            self.todo.back(hand.has)
        self.watcher.lost(hand.name)
        self._tell()

    def _tell(self) -> None:
        named = [hand for hand in self.hands if hand.name]
        self.watcher.staffed(
            {hand.name: None if hand.has is None else self.tasks[hand.has] for hand in named}
        )


def _nodes() -> list[dict[str, float]]:
    """What each living node has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
