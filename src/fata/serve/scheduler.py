"""Gathers the requests of each stream into batches, in order, and runs them one after another."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from fata.engine.record import StepRecord
from fata.fleet import Fleet, StreamBusyError
from fata.serve.errors import ServiceError
from fata.serve.pixels import together

log = logging.getLogger("fata.serve")

HAND_OVER = 0.05  # seconds between two checks whether another server waits for a stream
AGAIN = 0.02  # seconds between two tries for a stream that another server holds


@dataclass(frozen=True)
class Gathering:
    """When a batch is run.

    Args:
        batch: images that fill one.
        wait: seconds that the first of them waits for more.
        deadline: seconds after which an image is predicted without learning, which is faster.
        handed: seconds to wait for a stream that another server holds.
    """

    batch: int = 16
    wait: float = 0.05
    deadline: float = 2.0
    handed: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Args:
        logits: one row an image, on the CPU.
        record: of its last batch; None: the step failed, and the source model predicted.
        learned: whether it was learned from.
        note: why not, or None.
    """

    logits: Tensor
    record: StepRecord | None
    learned: bool
    note: str | None = None

    def as_reply(self) -> dict[str, Any]:
        """What the client is told beside the predictions."""
        record = self.record
        return {
            "predicted_by": "source" if record is None or record.source_predicted else "adapted",
            "phase": record.phase if record else None,
            "batch": record.batch if record else None,
            "health": record.health.as_dict() if record and record.health else None,
            "learned": self.learned,
            "note": self.note,
        }


@dataclass(eq=False)
class _Request:
    images: Tensor
    outcome: Future[Outcome] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


_Batch = dict[str, list[_Request]]  # by stream
Observer = Callable[[str, Tensor, Outcome, float], None]  # stream, pixels, what became, seconds


class Scheduler:
    """One thread that runs the network, and a queue a stream.

    Args:
        fleet: the streams.
        place: the network's input, from the pixels of a batch.
        gathering: when a batch is run.
        observe: is told of every batch.
        most: images that may wait.
    """

    def __init__(
        self,
        fleet: Fleet,
        place: Callable[[Tensor], Tensor],
        gathering: Gathering,
        observe: Observer,
        most: int,
    ) -> None:
        self._fleet, self._place, self._observe = fleet, place, observe
        self._gathering, self._most = gathering, most
        self._queues: dict[str, deque[_Request]] = {}
        self._due: list[tuple[float, int, str]] = []  # a heap: when, in what order, which stream
        self._order = count()
        self._changed, self._closing, self.waiting = threading.Condition(), False, 0
        self._stop, self._unclaimed = threading.Event(), deque[str]()
        self._threads = [
            threading.Thread(target=run, name=f"fata {run.__name__.strip('_')}", daemon=True)
            for run in (self._learn, self._hand_over)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, stream: str, images: Tensor) -> Future[Outcome]:
        """Queue the images of a request; raises `ServiceError` if too many wait already."""
        request = _Request(images)
        request.outcome.set_running_or_notify_cancel()  # it ends here, or by `drop`
        with self._changed:
            if self._closing:
                raise ServiceError(503, "the service is shutting down.", 5)
            if self.waiting + len(images) > self._most:
                raise ServiceError(503, "too many images wait to be predicted.", 1)
            self.waiting += len(images)
            queue = self._queues.setdefault(stream, deque())
            queue.append(request)
            if len(queue) == 1 or self._full(queue):
                self._plan(stream)
                self._changed.notify()
        return request.outcome

    def drop(self, stream: str, outcome: Future[Outcome]) -> None:
        """Forget a request, unless its turn has come; its outcome is never known."""
        with self._changed:
            queue = self._queues.get(stream, ())
            for request in [one for one in queue if one.outcome is outcome]:
                self._queues[stream].remove(request)
                self.waiting -= len(request.images)
                if self._queues[stream]:
                    self._plan(stream)
                else:
                    del self._queues[stream]
                    self._unclaimed.append(stream)
                self._changed.notify()

    def close(self) -> None:
        """Take no more requests, and run those that wait."""
        with self._changed:
            self._closing = True
            for stream in self._queues:
                self._plan(stream)
            self._changed.notify()
        self._threads[0].join()
        self._stop.set()
        self._threads[1].join()

    @property
    def alive(self) -> bool:
        """Whether the thread that runs the network does."""
        return self._threads[0].is_alive()

    # -- when: with the lock held -------------------------------------------------------------

    def _full(self, queue: deque[_Request]) -> bool:
        return sum(len(one.images) for one in queue) >= self._gathering.batch

    def _ready(self, stream: str, now: float) -> bool:
        queue = self._queues.get(stream)
        if not queue:
            return False
        waited = now - queue[0].arrived >= self._gathering.wait
        return waited or self._closing or self._full(queue)

    def _plan(self, stream: str, at: float | None = None) -> None:
        """Note when the next batch of a stream is to be run."""
        queue = self._queues[stream]
        if at is None:
            soon = self._closing or self._full(queue)
            at = queue[0].arrived + (0.0 if soon else self._gathering.wait)
        heapq.heappush(self._due, (at, next(self._order), stream))

    def _next(self) -> _Batch:
        """The next batch, of one stream or of several that learn nothing; waits for it.

        Empty: there is none, and none will come.
        """
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, stream = heapq.heappop(self._due)
                if self._ready(stream, now):  # else an older plan was first
                    taken = {stream: self._take(stream, now)}
                    return self._joined(taken, now) if self._fleet.source_only(stream) else taken
            if self._closing and not self._queues:
                return {}
            self._changed.wait(self._due[0][0] - now if self._due else None)

    def _take(self, stream: str, now: float) -> list[_Request]:
        """As many requests as fill a batch, late ones apart from others; at least one."""
        queue, taken, rows = self._queues[stream], list[_Request](), 0
        while queue and (not taken or rows + len(queue[0].images) <= self._gathering.batch):
            if taken and self._late(queue[0], now) != self._late(taken[0], now):
                break
            taken.append(queue.popleft())
            rows += len(taken[-1].images)
        if queue:
            self._plan(stream)
        else:
            del self._queues[stream]
        return taken

    def _joined(self, taken: _Batch, now: float) -> _Batch:
        """With them what waits of other streams that the source model predicts."""
        rows = sum(len(request.images) for request in chain(*taken.values()))
        for stream in [name for name in self._queues if self._fleet.source_only(name)]:
            more = sum(len(request.images) for request in self._queues[stream])
            if stream not in taken and rows + more <= self._gathering.batch:
                taken[stream] = list(self._queues.pop(stream))
                rows += more
        return taken

    def _late(self, request: _Request, now: float) -> bool:
        return now - request.arrived > self._gathering.deadline

    # -- what: without the lock ---------------------------------------------------------------

    def _learn(self) -> None:
        while True:
            with self._changed:
                batch = self._next()
            if not batch:
                return
            for stream in [name for name in batch if not self._fleet.claim(name)]:
                self._postpone(stream, batch.pop(stream))
            if len(batch) > 1:
                self._run_together(batch)
            else:
                for stream, requests in batch.items():
                    self._run(stream, requests)

    def _postpone(self, stream: str, requests: list[_Request]) -> None:
        """Another server holds the stream: try again soon, but not for ever."""
        now = time.monotonic()
        kept = [r for r in requests if now - r.arrived < self._gathering.handed]
        for request in requests[: len(requests) - len(kept)]:
            error = ServiceError(503, "another server holds this stream.", 1)
            self._finish(request, error)
        with self._changed:
            queue = self._queues.setdefault(stream, deque())
            queue.extendleft(reversed(kept))
            if queue:
                self._plan(stream, now + AGAIN)
            else:
                del self._queues[stream]
                self._fleet.unclaim(stream)

    def _run_together(self, batch: _Batch) -> None:
        """Streams that learn nothing, by one forward pass; one by one if that fails."""
        start = time.monotonic()
        images = {name: together([r.images for r in batch[name]]) for name in batch}
        try:
            if not all(map(self._fleet.source_only, batch)):  # changed since they were taken
                raise RuntimeError("a stream learns again")
            found = self._fleet.step_together({n: self._place(p) for n, p in images.items()})
        except Exception as error:
            log.debug("streams are predicted one by one: %s", error)
            for stream, requests in batch.items():
                self._run(stream, requests)
            return
        for (stream, requests), (logits, record) in zip(batch.items(), found, strict=True):
            note = "frozen" if self._fleet.settings(stream).frozen else None
            outcome = Outcome(logits.float().cpu(), record, False, note)
            self._note(stream, images[stream], outcome, (time.monotonic() - start) / len(batch))
            self._answer(requests, outcome)

    def _run(self, stream: str, requests: list[_Request]) -> None:
        start = time.monotonic()
        late = self._late(requests[0], start)
        images = together([request.images for request in requests])
        try:
            parts = [
                self._predicted(stream, part, late)
                for part in torch.split(images, self._gathering.batch)
            ]
        except StreamBusyError:  # handed over since it was claimed
            self._postpone(stream, requests)
            return
        except Exception:
            log.exception("no prediction for a batch", extra={"stream": stream})
            for request in requests:
                self._finish(request, ServiceError(500, "no prediction is possible."))
            return
        logits = torch.cat([part.logits for part in parts])
        self._answer(requests, replace(parts[-1], logits=logits))

    def _predicted(self, stream: str, images: Tensor, late: bool) -> Outcome:
        start = time.monotonic()
        placed = self._place(images)
        try:
            frozen = self._fleet.settings(stream).frozen
            logits, record = self._fleet.step(stream, placed, learn=not late)
            note = "frozen" if frozen else "deadline" if late else None
            stays = record.phase == "rest" or self._fleet.source_only(stream)
            learned = note is None and not stays
            outcome = Outcome(logits.float().cpu(), record, learned, note)
        except StreamBusyError:
            raise
        except Exception:
            log.exception("a step failed", extra={"stream": stream})
            logits = self._fleet.predict_source(placed)
            outcome = Outcome(logits.float().cpu(), None, False, "failed")
        self._note(stream, images, outcome, time.monotonic() - start)
        return outcome

    def _note(self, stream: str, images: Tensor, outcome: Outcome, seconds: float) -> None:
        try:
            self._observe(stream, images, outcome, seconds)
        except Exception:
            log.exception("a batch could not be noted", extra={"stream": stream})

    def _answer(self, requests: list[_Request], outcome: Outcome) -> None:
        """Give each request its rows."""
        rows = torch.split(outcome.logits, [len(request.images) for request in requests])
        for request, own in zip(requests, rows, strict=True):
            self._finish(request, replace(outcome, logits=own))

    def _finish(self, request: _Request, outcome: Outcome | ServiceError) -> None:
        with self._changed:
            self.waiting -= len(request.images)
        if isinstance(outcome, ServiceError):
            request.outcome.set_exception(outcome)
        else:
            request.outcome.set_result(outcome)

    def _hand_over(self) -> None:
        while not self._stop.wait(HAND_OVER):
            try:
                while self._unclaimed:  # not where it is dropped: the fleet may be at work
                    self._fleet.unclaim(self._unclaimed.popleft())
                for name in self._fleet.hand_over():
                    log.info("handed over", extra={"stream": name})
            except Exception:
                log.exception("streams could not be handed over")
