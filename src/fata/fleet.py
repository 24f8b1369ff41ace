"""Many streams on one network: a state a stream, swapped in and out."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fata._files import STREAM, save_tensors
from fata.adapter import Adapter
from fata.distributed.ranks import SINGLE
from fata.engine import checkpoint, swap
from fata.engine.record import StepRecord, record
from fata.shared_network import Make, Member, SharedNetwork, Stream
from fata.stream_settings import StreamSettings, check_name

if TYPE_CHECKING:
    from fata._lease import Leases

log = logging.getLogger("fata.fleet")

STATE, SETTINGS = ".safetensors", ".json"  # of a stream's files
POLL = 0.01  # seconds between two tries to get a stream that another process holds


class StreamBusyError(RuntimeError):
    """Another process that shares the folder holds the stream."""


class Fleet:
    """One network adapts to many streams, each as if it had the network to itself.

    Weights, momentum, the method's memory, the guard, counts and random numbers belong to a stream.
    A call swaps its state in, which costs a copy of the parameters that adapt. Streams used least
    recently are moved to disk. Threads that share a fleet wait for each other.

    Args:
        adapter: from `fata.adapt`; the fleet has it to itself until `close`.
        folder: of the states, one safetensors file a stream; made if it is not there. Processes
            may share it: a stream belongs to one of them at a time. None: all stay in memory.
        in_memory: most streams that are held in memory, if there is a folder.
        save_every: batches of a stream after which its state is saved; None: when it leaves the
            memory, on `save` and on `close`.
        make: an adapter from a model and a method's name, for streams of another method; None:
            `fata.adapt` with the guard, seed and speed of `adapter`.

    Example:
        >>> import fata, torch
        >>> fleet = fata.Fleet(fata.adapt(fata.tiny.build("resnet_gn"), "tent"))
        >>> fleet("camera-7", torch.rand(4, 3, 16, 16)).shape
        torch.Size([4, 10])
        >>> fleet("camera-8", torch.rand(2, 3, 16, 16)).shape
        torch.Size([2, 10])
        >>> with fleet.stream("camera-7") as adapter:
        ...     adapter.counts["seen"]
        4
    """

    def __init__(
        self,
        adapter: Adapter,
        folder: str | os.PathLike[str] | None = None,
        *,
        in_memory: int = 1000,
        save_every: int | None = None,
        make: Make | None = None,
    ) -> None:
        for name, value in (("in_memory", in_memory), ("save_every", save_every)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not (whole or (name == "save_every" and value is None)):
                raise ValueError(f"Fleet({name}={value!r}): must be a whole number, at least 1.")
        if not isinstance(adapter, Adapter):
            raise TypeError("Fleet(adapter): give an adapter, such as fata.adapt(model).")
        if adapter.group is not SINGLE:
            raise ValueError("Fleet(adapter): an adapter of a group of ranks is not supported.")
        self.adapter, self.in_memory, self.save_every = adapter, in_memory, save_every
        self.folder = None if folder is None else Path(folder)
        self._leases: Leases | None = None
        if self.folder is not None:
            from fata._lease import Leases  # not on Windows

            self.folder.mkdir(parents=True, exist_ok=True)
            self._leases = Leases(self.folder)
        self._lock = threading.RLock()
        self._network = SharedNetwork(adapter, make)
        self._streams: OrderedDict[str, Stream] = OrderedDict()  # the latest used is last
        self.swaps = self.reads = self.writes = 0  # in memory, from disk and to it

    def __call__(self, name: str, images: Tensor) -> Tensor:
        """Logits of a stream's images, from before this batch was learned from (MEMO: after)."""
        return self.step(name, images)[0]

    def step(self, name: str, images: Tensor, learn: bool = True) -> tuple[Tensor, StepRecord]:
        """Logits of a stream's images, and what the batch came to.

        A frozen stream learns nothing, nor does any stream if `learn` is False.
        """
        with self.stream(name) as adapter:
            stream = self._streams[name]
            learn = learn and not stream.settings.frozen
            with nullcontext() if learn else adapter.frozen():
                logits: Tensor = adapter(images)
            found = record(adapter._live(), logits)
            stream.unsaved += learn
        if self.save_every and stream.unsaved >= self.save_every:
            with _logged():
                self.save(name)
        return logits, found

    def predict_source(self, images: Tensor) -> Tensor:
        """Logits of the source model, with BatchNorm's running statistics; no stream changes."""
        engine = self.adapter._live()
        with (
            self._lock,
            self.adapter._lock,
            torch.inference_mode(False),
            engine.counted_apart(),
            engine.theta.at(engine.source, engine.state.theta),
        ):
            return engine.predict(images, running=True).detach()

    def source_only(self, name: str) -> bool:
        """Whether the source model predicts a stream in memory, as it learns nothing."""
        stream = self._streams.get(name)
        return stream is not None and stream.source_only

    def step_together(self, images: Mapping[str, Tensor]) -> list[tuple[Tensor, StepRecord]]:
        """What `step` returns for several streams that are `source_only`, by one forward pass."""
        logits = self.predict_source(torch.cat(list(images.values())))
        found = []
        parts = torch.split(logits, [len(rows) for rows in images.values()])
        for name, part in zip(images, parts, strict=True):
            with self.stream(name) as adapter:
                engine = adapter._live()
                engine.learned, engine.selected, engine.source_predicted = False, None, True
                found.append((part, record(engine, part)))
        return found

    @contextmanager
    def stream(self, name: str, wait: float = 0.0) -> Iterator[Adapter]:
        """The adapter in the state of one stream; no other thread uses it meanwhile.

        Args:
            name: of the stream; one that is not known starts at the source weights.
            wait: seconds to wait for another process to hand the stream over. If it does not,
                `StreamBusyError` is raised.
        """
        with self._owned(name, wait):
            stream = self._streams.get(name) or self._read(name)
            adapter = stream.member.adapter
            with adapter._lock:
                self._swap_in(name, stream)
                before = stream.mark
                try:
                    yield adapter
                finally:
                    stream.held = swap.take(adapter._live())
                    stream.changed |= stream.mark != before
                    self._evict()

    # -- which streams there are --------------------------------------------------------------

    def names(self) -> list[str]:
        """All streams, in memory and in the folder."""
        with self._lock:
            known = set(self._streams)
        if self.folder is not None:
            for suffix in (STATE, SETTINGS):
                found = (path.name.removesuffix(suffix) for path in self.folder.glob(f"*{suffix}"))
                known |= {name for name in found if STREAM.fullmatch(name)}
        return sorted(known)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not STREAM.fullmatch(name):
            return False
        return name in self._streams or any(
            path.exists() for path in (self._path(name, STATE), self._path(name, SETTINGS)) if path
        )

    def held(self) -> list[str]:
        """Streams in memory, the latest used last."""
        with self._lock:
            return list(self._streams)

    def delete(self, name: str) -> None:
        """Forget a stream, in memory and in the folder."""
        with self._owned(name):
            self._streams.pop(name, None)
            self._inactive(name)
            for suffix in (STATE, SETTINGS):
                if path := self._path(name, suffix):
                    path.unlink(missing_ok=True)
            self._release(name)

    def restart(self, name: str) -> None:
        """Start a stream again at the source weights, whatever its saved state is."""
        member = self._network.member(self.settings(name).method)
        self._put(name, member, member.fresh())

    def replace(self, name: str, packed: Mapping[str, Any]) -> None:
        """Continue a stream from a `state_dict`; raises `StateError` if it does not belong here."""
        member = self._network.member(self.settings(name).method)
        self._put(name, member, member.unpack(packed))

    # -- settings of a stream -----------------------------------------------------------------

    def settings(self, name: str) -> StreamSettings:
        """Whether a stream is frozen, its learning rate and its method."""
        check_name(name)
        with self._lock:
            if name in self._streams:
                return self._streams[name].settings
            path = self._path(name, SETTINGS)
            return StreamSettings.read(path) if path else StreamSettings()

    def configure(self, name: str, **changes: bool | float | str | None) -> StreamSettings:
        """Change `frozen`, `lr` or `method` of a stream; kept in the folder.

        A stream restarts from the source weights if its method becomes another one.
        """
        with self._owned(name):
            settings = replace(self.settings(name), **changes)  # type: ignore[arg-type]
            member = self._network.member(settings.method)
            if member is self._network.member(self.settings(name).method):
                stream = self._streams.get(name) or self._read(name)
            else:
                stream = Stream(member.fresh(), settings, member)
                if path := self._path(name, STATE):
                    path.unlink(missing_ok=True)
            if path := self._path(name, SETTINGS):
                settings.write(path)
            self._streams[name], stream.settings = stream, settings
            self._inactive(name)  # the next call sets the rate
            self._evict()
            return settings

    # -- disk ---------------------------------------------------------------------------------

    def save(self, name: str | None = None) -> None:
        """Write what changed to the folder; of one stream, or of all."""
        if self.folder is None:
            raise ValueError("this fleet has no folder: give Fleet(adapter, folder=...).")
        for one in [name] if name else self.held():
            with self._lock:
                if one in self._streams:
                    self._save(one)

    def claim(self, name: str) -> bool:
        """Whether the stream is this process's now; if not, its holder is told to hand it over."""
        check_name(name)
        with self._lock:
            return self._leases is None or self._leases.acquire(name)

    def unclaim(self, name: str) -> None:
        """Wait for a stream of another process no longer."""
        with self._lock:
            if self._leases:
                self._leases.give_up(name)

    def hand_over(self) -> list[str]:
        """Save and release the streams that other processes wait for; returns their names."""
        with self._lock:
            names = self._leases.wanted() if self._leases else []
            for name in names:
                with _logged():
                    self._drop(name)
        return names

    def close(self) -> None:
        """Save all streams and release them; the adapter is as it was before.

        If a state cannot be saved, the others are; then the error is raised, and `close` may be
        called again.
        """
        with self._lock:
            failed: list[OSError] = []
            for name in self.held():
                try:
                    self._drop(name)
                except OSError as error:
                    failed.append(error)
            if failed:
                raise failed[0]
            if self._leases:
                self._leases.close()
                self._leases = None
            for member in self._network:
                member.restore()

    # -- inside -------------------------------------------------------------------------------

    def _path(self, name: str, suffix: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{name}{suffix}"

    @contextmanager
    def _owned(self, name: str, wait: float = 0.0) -> Iterator[None]:
        """No other process or thread uses the stream inside the context."""
        until = time.monotonic() + wait
        while True:
            with self._lock:
                if self.claim(name):
                    yield
                    return
                if time.monotonic() >= until:
                    self.unclaim(name)
                    raise StreamBusyError(f"another process holds the stream {name!r}.")
            time.sleep(POLL)

    def _release(self, name: str) -> None:
        if self._leases:
            self._leases.release(name)

    def _inactive(self, name: str) -> None:
        """The next call of a stream swaps its state in."""
        for member in self._network:
            member.active = None if member.active == name else member.active

    def _swap_in(self, name: str, stream: Stream) -> None:
        """The stream in the adapter of its method."""
        member, rate = stream.member, stream.settings.lr
        engine = member.adapter._live()
        self._streams[name] = stream
        self._streams.move_to_end(name)
        if member.active != name:
            member.active = None  # until the swap is whole
            engine.rate = member.rate if rate is None else _constant(rate)
            with torch.inference_mode(False):
                swap.put(engine, stream.held)
            member.active = name
            self.swaps += 1

    def _read(self, name: str) -> Stream:
        """A stream from disk, or at the source weights."""
        settings, path = self.settings(name), self._path(name, STATE)
        member = self._network.member(settings.method)
        if path is None or not path.exists():
            return Stream(member.fresh(), settings, member)
        self.reads += 1
        return Stream(member.unpack(checkpoint.load(path)), settings, member)

    def _put(self, name: str, member: Member, held: swap.Held) -> None:
        with self._owned(name):
            self._streams[name] = Stream(held, self.settings(name), member, changed=True)
            self._inactive(name)
            with _logged():
                self._save(name)
            self._evict()

    def _save(self, name: str) -> None:
        stream, path = self._streams[name], self._path(name, STATE)
        if path is None or not stream.changed:
            return
        save_tensors(path, stream.member.pack(stream.held))
        self.writes += 1
        stream.changed, stream.unsaved = False, 0

    def _drop(self, name: str) -> None:
        """Out of memory, saved before."""
        if name in self._streams:
            self._save(name)
            del self._streams[name]
        self._inactive(name)
        self._release(name)

    def _evict(self) -> None:
        """Move the streams used least recently to disk; of a full disk they stay in memory."""
        while self.folder is not None and len(self._streams) > self.in_memory:
            with _logged():
                self._drop(next(iter(self._streams)))
                continue
            return


@contextmanager
def _logged() -> Iterator[None]:
    """A state that cannot be saved now is tried again later: a prediction does not fail by it."""
    try:
        yield
    except OSError as error:
        log.warning("%s", error)


def _constant(rate: float) -> Callable[[int], float]:
    return lambda rows: rate
