"""Serving a stream: images are decoded in worker processes, ahead of the model."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fata.data.dataset import Dataset, Domain, ImageSource
from fata.data.errors import Damaged, DataError
from fata.data.shared_batches import SharedBatches

Row = tuple[int, int]  # which source, and which of its images
Broken = dict[int, str]  # why a row's image cannot be read
Decoded = Generator[tuple[Tensor, Broken], None, None]  # of each batch: intact images, broken ones
Sent = tuple[Tensor, int | None, int, Broken]  # by a worker: images or their slot, and how many
AHEAD = 2  # batches that each worker may be ahead of the model
MOST = 16  # images that are decoded at a time by default,
PROCESSES = 8  # in at most so many workers: forking a large process takes some 50 ms


class StreamOrder(Protocol):
    """The part of a stream that serving needs."""

    @property
    def dataset(self) -> Dataset:
        """The data set of the images."""

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The domains of the stream."""

    @property
    def domain(self) -> Tensor:
        """Which of `domains` each image is from."""

    @property
    def index(self) -> Tensor:
        """Index of each image in its domain."""

    @property
    def labels(self) -> Tensor:
        """The class of each image."""

    @property
    def spans(self) -> list[tuple[int, int, bool]]:
        """Start and end of each batch, and whether the model is reset before it."""


@dataclass(frozen=True, eq=False)
class Samples:
    """One batch of a stream."""

    images: Tensor  # (B, 3, H, W) in [0, 1], on the device
    labels: Tensor  # on the device; for scoring only
    domains: tuple[Domain, ...]  # one for each image
    index: Tensor  # of each image in its domain
    reset: bool  # start from the source model before this batch
    damaged: tuple[str, ...]  # left out since the batch before, and why

    @property
    def domain(self) -> str:
        """The domain of all images, or `mixed`."""
        return str(self.domains[0]) if len(set(self.domains)) == 1 else "mixed"


def batches(
    stream: StreamOrder, decoded: Decoded, device: torch.device, skip_damaged: bool
) -> Iterator[Samples]:
    """Every batch of a stream; one without an intact image is left out."""
    held: Samples | None = None  # until it is known whether only damaged images follow
    reset = False
    damaged: list[str] = []
    with closing(decoded):
        for (first, last, starts), (images, broken) in zip(stream.spans, decoded, strict=True):
            if not skip_damaged:
                raise_if_damaged(broken)
            reset |= starts
            damaged += broken.values()
            if len(broken) == last - first:
                continue
            if held is not None:
                yield held
            whole = intact_rows(broken, last - first)
            place, index = (part[first:last][whole] for part in (stream.domain, stream.index))
            held = Samples(
                images,
                stream.labels[first:last][whole].to(device, non_blocking=True),
                tuple(stream.domains[number] for number in place.tolist()),
                index,
                reset,
                tuple(damaged),
            )
            reset, damaged = False, []
    if held is None:
        raise DataError(f"every image of the stream is damaged, the first being {damaged[0]}.")
    yield replace(held, damaged=(*held.damaged, *damaged))


def live(stream: StreamOrder, device: torch.device, workers: int | None) -> Decoded:
    """Images in [0, 1] on the device, decoded and corrupted live; starts at once."""
    sources = [stream.dataset.of(domain) for domain in stream.domains]
    spans = stream.spans
    rows = (_rows(stream, first, last) for first, last, _ in spans)
    return _finished(stream, read(sources, rows, len(spans), device, workers))


def _finished(stream: StreamOrder, decoded: Decoded) -> Decoded:
    with closing(decoded):
        for (first, last, _), (pixels, broken) in zip(stream.spans, decoded, strict=True):
            whole = intact_rows(broken, last - first)
            place, index = (part[first:last][whole] for part in (stream.domain, stream.index))
            images = pixels.float().div_(255)
            yield _corrupted(stream.dataset, images, stream.domains, place, index), broken


def read(
    sources: Sequence[ImageSource],
    batches: Iterable[list[Row]],
    count: int,
    device: torch.device,
    workers: int | None,
) -> Decoded:
    """Intact images of `count` batches on the device, as bytes, and errors of the broken ones.

    Worker processes start at once, before the first batch is requested. By default they are few
    and have threads: decoders release the GIL.
    """
    threads = 1
    if not any(source.on_disk for source in sources):
        workers = 0
    if workers is None:
        cores = min(MOST, _cores())
        workers = min(PROCESSES, cores, count)
        threads = -(-cores // max(1, workers))
    first, batches = _peek(batches)
    slots = _slots(sources, first, workers, count)
    loader = DataLoader(
        _Batches(sources, slots.pixels if slots else None, threads),
        sampler=zip(slots.free() if slots else repeat(None), batches, strict=False),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda" and slots is None,
        prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="fork" if slots else None,
        worker_init_fn=_quiet,
        generator=torch.Generator(),  # a loader draws a seed; not from the global generator
    )
    return _received(iter(loader), slots, device)


def _peek(batches: Iterable[list[Row]]) -> tuple[list[Row], Iterator[list[Row]]]:
    """The first batch, and an iterator over all batches."""
    following = iter(batches)
    first = next(following, [])
    return first, chain([first] if first else [], following)


def _slots(
    sources: Sequence[ImageSource], first: list[Row], workers: int, count: int
) -> SharedBatches | None:
    """Shared memory for the batches in flight and two more, each as large as the first."""
    if not workers or sys.platform != "linux":  # elsewhere processes are not forked
        return None
    for place, index in first:
        with suppress(Exception):  # a damaged image is found again, by a worker
            shape = sources[place].read(index).shape
            return SharedBatches(min(AHEAD * workers + 2, count), (len(first), *shape))
    return None


def _received(loader: Iterator[Sent], slots: SharedBatches | None, device: torch.device) -> Decoded:
    """Ends the worker processes when it is closed, even if a traceback still refers to them."""
    try:
        with slots.pinned(device) if slots else nullcontext():
            for pixels, slot, rows, broken in loader:
                if slots and slot is not None:
                    yield slots.copied(slot, rows, device), broken
                else:
                    yield pixels.to(device, non_blocking=True), broken
    finally:
        getattr(loader, "_shutdown_workers", bool)()  # torch waits for the last reference


def raise_if_damaged(broken: Broken) -> None:
    """Raise an error that names the first damaged image, if there is one."""
    for why in broken.values():
        raise DataError(
            f"damaged image {why}. skip_damaged=True (--skip-damaged) counts such images and "
            f"continues."
        )


def intact_rows(broken: Broken, rows: int) -> Tensor:
    """The rows of a batch whose image can be read."""
    if not broken:
        return torch.arange(rows)
    return torch.tensor([row for row in range(rows) if row not in broken], dtype=torch.int64)


class _Batches(TorchDataset[Sent]):
    """Batches of images by source and index, written into a slot if they fit."""

    def __init__(self, sources: Sequence[ImageSource], slots: Tensor | None, threads: int) -> None:
        self.sources, self.slots, self.threads = sources, slots, threads

    def __getitem__(self, task: tuple[int | None, list[Row]]) -> Sent:
        slot, rows = task
        found = list(self._map(self._read, rows))
        images = [one for one in found if isinstance(one, Tensor)]
        broken = {row: one for row, one in enumerate(found) if isinstance(one, str)}
        if not images:
            return torch.empty(0), None, 0, broken
        if self.slots is None or slot is None or not _fit(images, self.slots[slot]):
            return torch.stack(images), None, len(images), broken
        torch.stack(images, out=self.slots[slot, : len(images)])
        return torch.empty(0), slot, len(images), broken

    @cached_property
    def _map(self) -> Callable[..., Iterator[Tensor | str]]:
        """A map over threads; torch's own threads do not survive a fork."""
        if self.threads == 1:
            return map
        pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        return pool.map

    def _read(self, row: Row) -> Tensor | str:
        """An image, or why it cannot be read."""
        place, index = row
        source = self.sources[place]
        try:
            return source.read(index)
        except Damaged as error:
            return str(error)
        except Exception as error:  # Pillow's decoders raise anything for bad files
            return f"{source.name(index)} ({type(error).__name__}: {error})"


def _fit(images: list[Tensor], slot: Tensor) -> bool:
    return len(images) <= len(slot) and all(one.shape == slot.shape[1:] for one in images)


def _rows(stream: StreamOrder, first: int, last: int) -> list[Row]:
    places, indices = (part[first:last].tolist() for part in (stream.domain, stream.index))
    return list(zip(places, indices, strict=True))


def _corrupted(
    dataset: Dataset, images: Tensor, domains: Sequence[Domain], place: Tensor, index: Tensor
) -> Tensor:
    """Each row with the corruption of its domain, unless it is on the disk already."""
    if not dataset.made:
        return images
    met = sorted(set(place.tolist()))
    if len(met) == 1:
        return dataset.finish(images, domains[met[0]], index.tolist())
    for number in met:
        rows = torch.nonzero(place == number)[:, 0]
        ids, on_device = index[rows].tolist(), rows.to(images.device)
        images[on_device] = dataset.finish(images[on_device], domains[number], ids)
    return images


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quiet(worker: int) -> None:
    """A worker ignores Ctrl-C and Pillow's warnings, and runs at a lower priority.

    Its garbage collector skips the objects of before the fork: touching them would copy memory.
    """
    gc.freeze()
    if hasattr(os, "nice"):
        os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore", module="PIL")
