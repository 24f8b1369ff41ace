"""Run cells on a Ray cluster: workers on its nodes measure; this process assigns and stores.

A worker is an actor. It holds its share of a GPU and keeps its model and images from cell to cell;
Ray would start a new process for every plain task that has a GPU. `ray.util.ActorPool` is not used:
it neither replaces lost actors nor lets a task choose the actor that has its images.
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
from fata.bench.run.local import Affinity, Task, TaskQueue, Watcher, affinity_of, failure
from fata.bench.run.ray_objects import CellInputs, RayCellRunner, SharedObjects
from fata.bench.run.runner import CellRunner
from fata.bench.store import Store
from fata.corruptions import weather
from fata.data.dataset import ImageSource

TRIES = 3  # of a cell whose worker is lost, and of starting a worker
_POLL = 0.5  # seconds between two polls of the workers
_IMAGE_SHARE = 0.25  # of a node's object store, for the images of one domain


class ClusterError(RuntimeError):
    """A cluster that cannot be reached, or cannot run a cell."""


class ClusterWatcher(Watcher, Protocol):
    """Receives the progress of a run, and which workers there are."""

    def workers_changed(self, workers: Mapping[str, Task | None]) -> None:
        """The workers by name, each with the cell that it runs."""

    def lost(self, worker: str) -> None:
        """A worker is lost; its cell goes to another."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """The cluster at an address; None: the one that Ray finds, or a new one on this machine."""
    if ray.is_initialized():
        yield
        return
    _check_reachable(address)
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


def _check_reachable(address: str | None) -> None:
    """Raise for an address that does not respond, which Ray would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise ClusterError(f"no Ray cluster at {address}: {error}.") from error


@dataclass(frozen=True)
class WorkerResources:
    """What a worker takes of its node: CPU threads, or a share of the GPUs."""

    threads: int
    gpus: float = 0

    def fits(self, node: Mapping[str, float]) -> int:
        """How many workers a node with these resources can run."""
        if not self.gpus:
            return int(node.get("CPU", 0) // self.threads)
        if self.gpus < 1:
            return int(node.get("GPU", 0)) * int(1 / self.gpus + 1e-6)
        return int(node.get("GPU", 0) // self.gpus)


def worker_resources(gpus: float | None, jobs: int) -> WorkerResources:
    """What a worker takes on the cluster that we are connected to.

    Args:
        gpus: for a cell; None: one if the cluster has any, else none.
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
        cells = WorkerResources(1, gpus).fits(most)
        if not cells:
            raise ClusterError(
                f"no node of the cluster has {gpus:g} GPU for a cell: the most is "
                f"{most.get('GPU', 0):g}."
            )
        return WorkerResources(max(1, int(most.get("CPU", 0) // cells)), gpus)
    cores = int(max(node.get("CPU", 0) for node in nodes))
    if not cores:
        raise ClusterError("no node of the cluster has a CPU to give.")
    return WorkerResources(min(max(1, torch.get_num_threads() // jobs), cores))


def run(
    tasks: Sequence[Task],
    store: Store,
    runner: CellRunner,
    watcher: ClusterWatcher,
    resources: WorkerResources,
) -> None:
    """Measure and store, on the cluster that we are connected to; what is stored stays."""
    nodes, gpus = _nodes(), resources.gpus
    cells = max(1, *map(resources.fits, nodes))
    remote = RayCellRunner(
        "cuda" if gpus else "cpu",
        runner.jpeg,
        runner.fisher,
        resources.threads if runner.workers is None else runner.workers,
        runner.skip_damaged,
        runner.share * min(1, gpus) if gpus else runner.share / cells,
    )
    capacity = int(_IMAGE_SHARE * min(node["object_store_memory"] for node in nodes))
    shared = SharedObjects(tasks, runner, capacity)
    pool = WorkerPool(tasks, store, watcher, resources, remote, shared)
    try:
        pool.work()
    finally:
        pool.stop()


class WorkerInfo(NamedTuple):
    """What a worker reports when it starts."""

    name: str
    fata: str
    frost: str
    here: dict[str, str]


class Worker:
    """In a process on a node: cell after cell, with the model and the images of the last."""

    def __init__(self, runner: RayCellRunner, threads: int) -> None:
        self.runner, self.threads = runner, threads
        self._at = (-1, 0, 0.0)

    def info(self) -> WorkerInfo:
        """Where this worker runs, and with which versions."""
        here = circumstances(torch.device(self.runner.device))
        name = f"{platform.node()}:{os.getpid()}"
        return WorkerInfo(name, fata.__version__, weather.frost_source(), here)

    def run(
        self, number: int, cell: Cell, inputs: CellInputs, *sources: ImageSource
    ) -> tuple[dict[str, Any] | None, str]:
        """A cell's result, or None and why it failed."""
        torch.set_num_threads(self.threads)
        self._at = (number, 0, 0.0)

        def tick(seen: int, accuracy: float) -> None:
            self._at = (number, seen, accuracy)

        try:
            self.runner.load(cell, inputs, sources)
            return self.runner.run(cell, tick), ""
        except Exception as error:
            return None, failure(error)

    def progress(self) -> tuple[int, int, float]:
        """The number of the cell, the images that it has seen, and its accuracy so far."""
        return self._at


@dataclass
class RemoteWorker:
    """A worker as this process sees it."""

    actor: Any
    awaited: Any  # a reference to its info, then to the outcome of its task
    name: str = ""
    here: dict[str, str] = field(default_factory=dict)
    task: int | None = None  # the number of its task
    last: Affinity | None = None
    progress: Any = None  # a reference to its progress


class WorkerPool:
    """As many workers as the cluster has room for; nodes may come and go."""

    def __init__(
        self,
        tasks: Sequence[Task],
        store: Store,
        watcher: ClusterWatcher,
        resources: WorkerResources,
        runner: RayCellRunner,
        shared: SharedObjects,
    ) -> None:
        self.tasks, self.store, self.watcher, self.resources = tasks, store, watcher, resources
        self.queue, self.shared = TaskQueue(tasks), shared
        self.workers: list[RemoteWorker] = []
        self._runner = runner
        self._lost: Counter[int] = Counter()  # workers lost, by task
        self._failed_starts = 0  # workers in a row that were lost before they reported
        self._polled = 0.0
        self._actor = ray.remote(
            num_cpus=0 if resources.gpus else resources.threads,
            num_gpus=resources.gpus,
            concurrency_groups={"progress": 1},
        )(Worker)

    def work(self) -> None:
        """Until every task is done or has failed."""
        while self.queue.left or any(worker.task is not None for worker in self.workers):
            if time.monotonic() - self._polled > _POLL:
                self._polled = time.monotonic()
                self._start_workers()
                self._poll_progress()
            awaited = {worker.awaited: worker for worker in self.workers}
            if not awaited:  # no node, or none with room
                time.sleep(_POLL)
                continue
            for ref in ray.wait(list(awaited), timeout=_POLL)[0]:
                self._receive(awaited[ref])

    def stop(self) -> None:
        """End the workers, whatever they run."""
        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers.clear()

    def _start_workers(self) -> None:
        """As many as there are tasks and room for."""
        room = sum(map(self.resources.fits, _nodes()))
        busy = sum(worker.task is not None for worker in self.workers)
        for _ in range(min(room, len(self.queue) + busy) - len(self.workers)):
            actor = self._actor.remote(self._runner, self.resources.threads)
            self.workers.append(RemoteWorker(actor, actor.info.remote()))

    def _poll_progress(self) -> None:
        """Pass on the progress of each worker; `_receive` notices the lost ones."""
        for worker in self.workers:
            if worker.progress is not None and ray.wait([worker.progress], timeout=0)[0]:
                try:
                    number, seen, accuracy = ray.get(worker.progress)
                except RayError:
                    number = -1
                if number == worker.task and seen:
                    self.watcher.tick(self.tasks[number], seen, accuracy)
                worker.progress = None
            if worker.progress is None and worker.task is not None:
                ask = worker.actor.progress.options(concurrency_group="progress")
                worker.progress = ask.remote()

    def _receive(self, worker: RemoteWorker) -> None:
        try:
            outcome = ray.get(worker.awaited)
        except RayTaskError as error:
            if worker.task is None:
                raise ClusterError(f"a worker cannot start: {error}") from error
            outcome = (None, failure(error.cause or error))  # its images could not be decoded
        except RayError as error:
            self._remove(worker, error)
            return
        if isinstance(outcome, WorkerInfo):
            self._register(worker, outcome)
        else:
            self._finish(worker, *outcome)
        self._assign(worker)
        self._report_workers()

    def _register(self, worker: RemoteWorker, info: WorkerInfo) -> None:
        ours = (fata.__version__, weather.frost_source())
        if (info.fata, info.frost) != ours:
            raise ClusterError(
                f"{info.name} has fata {info.fata} with {info.frost} frost, but here is fata "
                f"{ours[0]} with {ours[1]} frost: results would not be those of one protocol."
            )
        worker.name, worker.here = info.name, info.here
        self._failed_starts = 0

    def _finish(self, worker: RemoteWorker, result: dict[str, Any] | None, why: str) -> None:
        assert worker.task is not None
        task, worker.task = self.tasks[worker.task], None
        self.shared.release(task)
        if result is None:
            self.watcher.failed(task, why)
        else:
            self.store.put(task.key, task.protocol, worker.here, result)
            self.watcher.done(task, result)

    def _assign(self, worker: RemoteWorker) -> None:
        """A task, or the end of the worker; images of the next task are decoded meanwhile."""
        number = self.queue.next(worker.last)
        if number is None:
            ray.kill(worker.actor)
            self.workers.remove(worker)
            return
        task = self.tasks[number]
        inputs, sources = self.shared.inputs(task)
        worker.task, worker.last = number, affinity_of(task.cell)
        worker.awaited = worker.actor.run.remote(number, task.cell, inputs, *sources)
        following = self.queue.peek(worker.last)
        if following is not None:
            self.shared.inputs(self.tasks[following])

    def _remove(self, worker: RemoteWorker, error: RayError) -> None:
        """Drop a lost worker; its task goes to another one, up to TRIES times."""
        ray.kill(worker.actor)
        self.workers.remove(worker)
        if worker.task is None:
            self._failed_starts += 1
            if self._failed_starts == TRIES:
                raise ClusterError(f"workers cannot start: {error}") from error
            return
        task = self.tasks[worker.task]
        self._lost[worker.task] += 1
        if self._lost[worker.task] == TRIES:
            self.shared.release(task)
            self.watcher.failed(task, f"its worker was lost {TRIES} times: {error}")
        else:
            if not isinstance(error, RayActorError):
                self.shared.renew(task)
            self.queue.put_back(worker.task)
        self.watcher.lost(worker.name)
        self._report_workers()

    def _report_workers(self) -> None:
        named = [worker for worker in self.workers if worker.name]
        self.watcher.workers_changed(
            {
                worker.name: None if worker.task is None else self.tasks[worker.task]
                for worker in named
            }
        )


def _nodes() -> list[dict[str, float]]:
    """Resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
