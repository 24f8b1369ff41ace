"""Serving a stream: pictures are decoded in worker processes, ahead of the model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fata.data.dataset import Arrays, Domain
from fata.data.errors import DataError

if TYPE_CHECKING:
    from fata.data.streams import Stream

Span = tuple[int, int, bool]
Broken = dict[int, str]  # what is wrong with a row's picture


@dataclass(frozen=True)
class Samples:
    """One batch of a stream."""

    images: Tensor  # (B, 3, H, W) in [0, 1], on the device
    labels: Tensor  # likewise on the device; for scoring alone
    domains: tuple[Domain, ...]  # one an image
    index: Tensor  # which image of its domain each one is
    reset: bool  # start from the source model before this batch
    damaged: tuple[str, ...]  # pictures left out since the batch before, and why

    @property
    def domain(self) -> str:
        """The domain that all images are of, or `mixed`."""
        return str(self.domains[0]) if len(set(self.domains)) == 1 else "mixed"


def batches(
    stream: Stream, device: torch.device, workers: int | None, skip_damaged: bool
) -> Iterator[Samples]:
    """Every batch of a stream; one without a whole picture is left out."""
    reset = False
    damaged: list[str] = []
    for (first, last, starts), pictures, broken in _decoded(stream, device, workers):
        if broken and not skip_damaged:
            raise DataError(
                f"damaged picture {next(iter(broken.values()))}. skip_damaged=True "
                f"(--skip-damaged) counts such pictures and goes on."
            )
        reset |= starts
        damaged += broken.values()
        whole = torch.tensor([row not in broken for row in range(last - first)])
        if not whole.any():
            continue
        place, index = (part[first:last][whole] for part in (stream.domain, stream.index))
        domains = tuple(stream.domains[i] for i in place.tolist())
        labels = torch.empty_like(index)
        images = pictures.to(device, non_blocking=True).float().div_(255)
        for number in sorted(set(place.tolist())):
            rows, domain = torch.nonzero(place == number)[:, 0], stream.domains[number]
            labels[rows] = stream.dataset.of(domain).labels[index[rows]]
            finished = stream.dataset.finish(images[rows.to(device)], domain, index[rows].tolist())
            images[rows.to(device)] = finished
        yield Samples(
            images, labels.to(device, non_blocking=True), domains, index, reset, tuple(damaged)
        )
        reset, damaged = False, []


def _decoded(
    stream: Stream, device: torch.device, workers: int | None
) -> Iterator[tuple[Span, Tensor, Broken]]:
    """Span, bytes of the whole pictures, and what is wrong with the others."""
    if all(isinstance(stream.dataset.of(domain), Arrays) for domain in stream.domains):
        yield from (_from_memory(stream, span) for span in stream.spans)
        return
    count = min(8, os.cpu_count() or 1) if workers is None else workers
    loader = DataLoader(
        _Pictures(stream),
        batch_size=None,
        num_workers=count,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if count else None,
        worker_init_fn=_quiet,
    )
    for span, (pictures, broken) in zip(stream.spans, loader, strict=True):
        yield span, pictures, broken


def _from_memory(stream: Stream, span: Span) -> tuple[Span, Tensor, Broken]:
    first, last, _ = span
    index = stream.index[first:last]
    sources = [stream.dataset.of(stream.domains[i]) for i in stream.domain[first:last].tolist()]
    if isinstance(sources[0], Arrays) and all(source is sources[0] for source in sources):
        return span, sources[0].images[index], {}
    rows = [source.read(i) for source, i in zip(sources, index.tolist(), strict=True)]
    return span, torch.stack(rows), {}


class _Pictures(TorchDataset[tuple[Tensor, Broken]]):
    """Batches of a stream by number, for worker processes."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.spans = stream, stream.spans

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: int) -> tuple[Tensor, Broken]:
        first, last, _ = self.spans[number]
        pictures: list[Tensor] = []
        broken: Broken = {}
        for row, position in enumerate(range(first, last)):
            domain = self.stream.domains[int(self.stream.domain[position])]
            source, index = self.stream.dataset.of(domain), int(self.stream.index[position])
            try:
                pictures.append(source.read(index))
            except (OSError, ValueError, SyntaxError) as error:  # as Pillow does for bad files
                broken[row] = f"{source.name(index)} ({type(error).__name__}: {error})"
        return torch.stack(pictures) if pictures else torch.empty(0), broken


def _quiet(worker: int) -> None:
    """Ctrl-C is for the process that serves, which ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
