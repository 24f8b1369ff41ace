"""Pictures that several cells meet: decoded and corrupted once, then taken off the shelf."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fata.data import Dataset, Domain, Stream
from fata.data.serve import Broken, Decoded, live, read, whole_rows

_BATCH = 250
Place = tuple[Dataset, Domain]
Finish = Callable[[Tensor, Sequence[int]], Tensor]  # corrupts pictures of these numbers


@dataclass
class Lot:
    """Pictures of one domain."""

    row: Tensor  # of each picture: where it lies in `pixels`; -1: it does not
    pixels: Tensor  # (N, 3, H, W) in [0, 1], on the device
    broken: Broken  # what is wrong with some, by number

    @classmethod
    def empty(cls, pictures: int, device: torch.device) -> Lot:
        """For so many pictures."""
        return cls(torch.full((pictures,), -1), torch.empty(0, device=device), {})

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.pixels.nbytes

    def note(self, numbers: Tensor, broken: Broken, end: int) -> Tensor:
        """The whole ones of some pictures, which will lie behind the first `end`."""
        self.broken.update({int(numbers[row]): why for row, why in broken.items()})
        whole = numbers[whole_rows(broken, len(numbers))]
        self.row[whole] = torch.arange(end, end + len(whole))
        return whole

    def add(
        self, parts: Sequence[Tensor], pictures: Decoded, finish: Finish, device: torch.device
    ) -> None:
        """Lay more pictures in: those of `parts`, once all are decoded."""
        pieces = [self.pixels] if len(self.pixels) else []
        found: list[Broken] = []
        for part, (pixels, broken) in zip(parts, pictures, strict=True):
            found.append(broken)
            whole = part[whole_rows(broken, len(part))]
            if len(whole):
                images = pixels.float().div_(255)
                pieces.append(finish(images, whole.tolist()))
        end = len(self.pixels)
        if pieces:
            self.pixels = torch.cat(pieces)
        for part, broken in zip(parts, found, strict=True):
            end += len(self.note(part, broken, end))


@dataclass
class Shelf:
    """Pictures on the device, as many as there is room for.

    Args:
        room: bytes. A stream that needs more is decoded as it comes.
    """

    room: int
    _lots: dict[Place, Lot] = field(default_factory=dict, repr=False)
    _coming: Place | None = field(default=None, repr=False)  # laid in as a stream passes

    def begin(
        self,
        stream: Stream,
        size: int,
        device: torch.device,
        workers: int | None,
        ahead: bool = False,
    ) -> Callable[[], Decoded]:
        """Start to decode; the call of what is returned waits for it, in any thread.

        It gives what `serve.live` does, from the shelf where it fits there. What is on the disk
        as it is, and new here, comes live and is laid in as it passes: the model need not wait
        for all of it. `ahead` of the model there is time to decode all.
        """
        needed = [wanted(stream, number) for number in range(len(stream.domains))]
        if sum(map(len, needed)) * 3 * size * size * 4 > self.room:
            decoded = live(stream, device, workers)
            return lambda: decoded
        at = (stream.dataset, stream.domains[0])
        once = len(needed) == 1 and len(needed[0]) == stream.images
        if once and not ahead and not stream.dataset.made and at not in self._lots:
            pictures = len(stream.dataset.of(at[1]).labels)
            self._lots[at] = Lot.empty(pictures, device)  # keeps its place among the others
            self._coming, decoded = at, live(stream, device, workers)
            return lambda: self._laid_in(Lot.empty(pictures, device), at, stream, decoded)
        waiting = [
            self._begin(stream.dataset, domain, some, device, workers)
            for domain, some in zip(stream.domains, needed, strict=True)
        ]
        return lambda: _taken(stream, [wait() for wait in waiting], device)

    def _begin(
        self,
        dataset: Dataset,
        domain: Domain,
        wanted: Tensor,
        device: torch.device,
        workers: int | None,
    ) -> Callable[[], Lot]:
        """The pictures wanted and those there already; lots used long ago make room."""
        at = (dataset, domain)
        lot = self._lots.pop(at, None)
        if lot is None:
            lot = Lot.empty(len(dataset.of(domain).labels), device)
        self._lots[at] = lot
        known = torch.tensor(list(lot.broken), dtype=torch.int64)
        new = wanted[(lot.row[wanted] < 0) & ~torch.isin(wanted, known)]
        if not len(new):
            return lambda: lot
        parts = torch.split(new, _BATCH)
        rows = ([(0, index) for index in part.tolist()] for part in parts)
        pictures = read([dataset.of(domain)], rows, len(parts), device, workers)

        def wait() -> Lot:
            lot.add(parts, pictures, lambda some, ids: dataset.finish(some, domain, ids), device)
            self._make_room()
            return lot

        return wait

    def coming(self, stream: Stream) -> bool:
        """Whether its pictures are laid in by another stream that passes."""
        return [self._coming] == [(stream.dataset, domain) for domain in stream.domains]

    def _laid_in(self, lot: Lot, at: Place, stream: Stream, decoded: Decoded) -> Decoded:
        """What comes live; once all of it has passed, it is on the shelf."""
        end = 0
        try:
            with closing(decoded):
                for (first, last, _), (images, broken) in zip(stream.spans, decoded, strict=True):
                    whole = lot.note(stream.index[first:last], broken, end)
                    if len(whole):
                        if not end:
                            lot.pixels = images.new_empty(stream.images, *images.shape[1:])
                        lot.pixels[end : end + len(whole)] = images
                    end += len(whole)
                    yield images, broken
        finally:
            self._coming = None
        lot.pixels = lot.pixels[:end]
        self._lots[at] = lot
        self._make_room()

    def _make_room(self) -> None:
        for oldest in list(self._lots)[:-1]:  # listed at once: pictures are laid in ahead meanwhile
            if sum(lot.bytes for lot in list(self._lots.values())) > self.room:
                self._lots.pop(oldest, None)


def _taken(stream: Stream, lots: list[Lot], device: torch.device) -> Decoded:
    for first, last, _ in stream.spans:
        place, index = stream.domain[first:last], stream.index[first:last]
        met = sorted(set(place.tolist()))
        broken: Broken = {}
        order: list[Tensor] = []
        pieces: list[Tensor] = []
        for number in met:
            lot, rows = lots[number], (place == number).nonzero()[:, 0]
            found = lot.row[index[rows]]
            for row in rows[found < 0].tolist():
                broken[row] = lot.broken[int(index[row])]
            order.append(rows[found >= 0])
            pieces.append(lot.pixels[found[found >= 0].to(device, non_blocking=True)])
        broken = dict(sorted(broken.items()))
        if len(met) == 1:
            yield pieces[0], broken
        else:
            back = torch.cat(order).argsort().to(device, non_blocking=True)
            yield torch.cat(pieces)[back], broken


def wanted(stream: Stream, number: int) -> Tensor:
    """Which pictures of a domain come."""
    return torch.from_numpy(np.unique(stream.index[stream.domain == number].numpy()))


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not told on this system
        return 4 * 2**30
