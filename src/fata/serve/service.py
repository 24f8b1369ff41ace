"""The service without HTTP: streams, their queues, metrics and history."""

from __future__ import annotations

import base64
import io
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from fata._files import tensor_bytes
from fata.engine import checkpoint
from fata.engine.checkpoint import StateError
from fata.fleet import Fleet, StreamBusyError
from fata.serve.errors import ServiceError
from fata.serve.history import History
from fata.serve.limits import Limits, RateLimit, check_name
from fata.serve.metrics import Metrics
from fata.serve.pixels import in_unit
from fata.serve.scheduler import Gathering, Outcome, Scheduler
from fata.zoo.loaded import Loaded

log = logging.getLogger("fata.serve")

EVENTS = 50  # of the guard, the latest


class Service:
    """Streams that adapt on one network, and what is known of them.

    Args:
        loaded: the model, with its preprocessing and labels.
        fleet: the streams on it.
        gathering: when a batch is run.
        limits: what a client may ask for.
        metrics: are kept up to date.
        keep_images: keep the latest images of each stream in memory, to be shown.
    """

    def __init__(
        self,
        loaded: Loaded,
        fleet: Fleet,
        gathering: Gathering | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        keep_images: bool = False,
    ) -> None:
        self.loaded, self.fleet, self.keep_images = loaded, fleet, keep_images
        self.gathering, self.limits = gathering or Gathering(), limits or Limits()
        self.metrics, self._rate = metrics or Metrics(), RateLimit(self.limits.rate)
        self._histories: dict[str, History] = {}
        self._known, self._lock = set(fleet.names()), threading.Lock()
        self._device = next(loaded.model.parameters()).device
        self._scheduler = Scheduler(
            fleet, self._placed, self.gathering, self._observe, self.limits.queue
        )
        watch = self.metrics.watch
        watch("fata_queue_images", "Images that wait.", lambda: self._scheduler.waiting)
        watch("fata_streams", "Streams known.", lambda: len(self._known))
        watch("fata_streams_in_memory", "Streams in memory.", lambda: len(fleet._streams))
        watch("fata_swaps", "States swapped in memory.", lambda: fleet.swaps, total=True)
        watch("fata_state_reads", "States read from disk.", lambda: fleet.reads, total=True)
        watch("fata_state_writes", "States written to disk.", lambda: fleet.writes, total=True)

    # -- predicting ---------------------------------------------------------------------------

    def submit(self, name: str, pixels: Tensor) -> Future[Outcome]:
        """Queue images of a stream, made known if it is new."""
        self.admit(name)
        self._rate.check(name)
        return self._scheduler.submit(name, pixels)

    def drop(self, name: str, outcome: Future[Outcome]) -> None:
        """Forget images that were submitted, unless their turn has come: their client is gone."""
        self._scheduler.drop(name, outcome)

    def check(self, name: str) -> None:
        """Raise `ServiceError` for what is no name, and for one stream too many."""
        check_name(name)
        full = len(self._known) >= self.limits.streams
        if full and name not in self._known and name not in self.fleet:
            raise ServiceError(429, f"too many streams: at most {self.limits.streams}.", 60)

    def admit(self, name: str) -> bool:
        """Make a stream known, if it may be; returns whether it is new."""
        with self._lock:
            self.check(name)
            new = name not in self._known
            self._known.add(name)
        if new:
            log.info("new stream", extra={"stream": name})
        return new

    @contextmanager
    def _admitted(self, name: str) -> Iterator[None]:
        """A stream that is new stays unknown if what it is made by fails."""
        new = self.admit(name)
        try:
            yield
        except Exception:
            if new and name not in self.fleet:
                with self._lock:
                    self._known.discard(name)
            raise

    def _placed(self, pixels: Tensor) -> Tensor:
        return self.loaded.preprocess.normalise(in_unit(pixels.to(self._device)))

    def _observe(self, name: str, pixels: Tensor, outcome: Outcome, seconds: float) -> None:
        """Note a batch, in the thread that ran it."""
        confidences, labels = outcome.logits.softmax(1).nan_to_num(0).max(1)
        with self._lock:
            history = self._histories.setdefault(name, History())
            history.add(outcome.record, labels.tolist(), confidences.tolist())
        if self.keep_images:
            for image, label, confidence in zip(pixels, labels, confidences, strict=True):
                history.latest.append((_png(image), int(label), float(confidence)))
        self.metrics.add(name, len(pixels), outcome.record, seconds)
        if outcome.note == "deadline":
            self.metrics.late.inc(len(pixels))
        record = outcome.record
        for event in record.events if record else ():
            health = record.health.as_dict() if record and record.health else None
            log.info("guard", extra={"stream": name, "event": asdict(event), "health": health})

    # -- streams ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """All streams known here."""
        with self._lock:
            return sorted(self._known)

    def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """A line for each of some streams."""
        return [self.summary(name) for name in names]

    def summary(self, name: str) -> dict[str, Any]:
        """One line of the list of streams; what was not used since the start has only a name."""
        history = self._histories.get(name)
        return {"stream": name, **(history or History()).summary()}

    def describe(self, name: str) -> dict[str, Any]:
        """All that is known of one stream."""
        self._check_known(name)
        with _told(), self.fleet.stream(name) as adapter:
            settings = self.fleet.settings(name)
            watch = adapter.guard
            phase = watch.phase if watch else "off"
            events = [asdict(event) for event in watch.events[-EVENTS:]] if watch else []
            health = adapter.health.as_dict() if adapter.health else None
            method, counts, batches = adapter.name, adapter.counts, adapter._live().state.batches
        return {
            **self.summary(name),
            "method": method,
            "frozen": settings.frozen,
            "lr": settings.lr,
            "phase": phase,
            "health": health,
            "batches": batches,
            "counts": counts,
            "events": events,
        }

    def history(self, name: str) -> list[dict[str, Any]]:
        """The latest batches since the start, summed up in points."""
        self._check_known(name)
        with self._lock:
            history = self._histories.get(name)
            return [point.shown() for point in history.points] if history else []

    def latest_images(self, name: str) -> list[dict[str, Any]]:
        """The latest images as PNG in base64, with their labels and confidences."""
        self._check_known(name)
        if not self.keep_images:
            raise ServiceError(404, "images are not kept: the service runs without --show-images.")
        history = self._histories.get(name)
        return [
            {"png": base64.b64encode(png).decode(), "label": label, "confidence": confidence}
            for png, label, confidence in (list(history.latest) if history else [])
        ]

    def configure(self, name: str, **changes: Any) -> None:
        """Create a stream, or change whether it is frozen, its rate or its method."""
        try:
            with self._admitted(name), _told():
                before = self.fleet.settings(name).method
                restarted = self.fleet.configure(name, **changes).method != before
        except ValueError as error:
            raise ServiceError(422, str(error)) from error
        if restarted:
            self._forget_history(name)
        log.info("configured", extra={"stream": name, "changes": changes})

    def freeze(self, name: str, frozen: bool) -> None:
        """Stop or resume learning from a stream."""
        self._check_known(name)
        self.configure(name, frozen=frozen)

    def reset(self, name: str) -> None:
        """Restart a stream from the source weights; also one whose state is damaged."""
        self._check_known(name)
        with _told():
            self.fleet.restart(name)
        self._forget_history(name)
        log.info("reset", extra={"stream": name})

    def _forget_history(self, name: str) -> None:
        self._histories.pop(name, None)
        self.metrics.restart(name)

    def delete(self, name: str) -> None:
        """Forget a stream."""
        self._check_known(name)
        with _told():
            self.fleet.delete(name)
        with self._lock:
            self._known.discard(name)
        self._histories.pop(name, None)
        self._rate.forget(name)
        self.metrics.forget(name)
        log.info("deleted", extra={"stream": name})

    def download(self, name: str) -> bytes:
        """The state of a stream, as a safetensors file."""
        self._check_known(name)
        with _told(), self.fleet.stream(name) as adapter:
            return tensor_bytes(adapter.state_dict())

    def upload(self, name: str, content: bytes) -> None:
        """Continue a stream from a state; nothing changes if it does not belong here."""
        with self._admitted(name), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            path.write_bytes(content)
            try:
                packed = checkpoint.load(path)
                if not all(t.isfinite().all() for n, t in packed.items() if _finite(n)):
                    raise StateError("the state has numbers that are not finite")
                self.fleet.replace(name, packed)
            except StreamBusyError as error:
                raise ServiceError(503, "another server holds this stream.", 1) from error
            except StateError as error:
                raise ServiceError(422, _without_path(error, path)) from error
            except Exception as error:  # a state that was made up
                raise ServiceError(422, "the state is damaged.") from error
        log.info("state uploaded", extra={"stream": name})

    # -- life ---------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether predictions are possible."""
        return self._scheduler.alive

    def metrics_text(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return self.metrics.text()

    def close(self) -> None:
        """Run what waits, save all streams, release them."""
        start = time.monotonic()
        self._scheduler.close()
        self.fleet.close()
        log.info("closed", extra={"seconds": round(time.monotonic() - start, 3)})

    def _check_known(self, name: str) -> None:
        if name not in self._known and name not in self.fleet:
            raise ServiceError(404, "there is no such stream.")


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the fleet inside the context become those that a client is told of."""
    try:
        yield
    except StreamBusyError as error:
        raise ServiceError(503, "another server holds this stream.", 1) from error
    except StateError as error:
        raise ServiceError(409, "the saved state cannot be used: reset the stream.") from error


def _finite(name: str) -> bool:
    """Whether a part of a state must be; SAR's memory is not before it selects a row."""
    return name != "meta" and ".host." not in f".{name}"


def _without_path(error: Exception, path: os.PathLike[str]) -> str:
    return str(error).replace(repr(os.fspath(path)), "the file")


def _png(image: Tensor) -> bytes:
    pixels = (in_unit(image).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
