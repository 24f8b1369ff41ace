"""Pictures that several cells meet: decoded and corrupted once, then taken off the shelf."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fata.data import Dataset, Domain, Stream
from fata.data.serve import Broken, Decoded, live, read, whole_rows

_BATCH = 250
Finish = Callable[[Tensor, Sequence[int]], Tensor]  # corrupts pictures of these numbers


@dataclass
class Lot:
    """Pictures of one domain."""

    row: Tensor  # of each picture: where it lies in `pixels`; -1: it does not
    pixels: Tensor  # (N, 3, H, W) in [0, 1], on the device
    broken: Broken  # what is wrong with some, by number

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.pixels.nbytes

    def add(
        self, parts: Sequence[Tensor], pictures: Decoded, finish: Finish, device: torch.device
    ) -> None:
        """Lay more pictures in: those of `parts`, as they are decoded."""
        pieces = [self.pixels] if len(self.pixels) else []
        end = len(self.pixels)
        for part, (pixels, broken) in zip(parts, pictures, strict=True):
            self.broken.update({int(part[row]): why for row, why in broken.items()})
            whole = part[whole_rows(broken, len(part))]
            if len(whole):
                images = pixels.to(device, non_blocking=True).float().div_(255)
                pieces.append(finish(images, whole.tolist()))
                self.row[whole] = torch.arange(end, end + len(whole))
                end += len(whole)
        if pieces:
            self.pixels = torch.cat(pieces)


@dataclass
class Shelf:
    """Pictures on the device, as many as there is room for.

    Args:
        room: bytes. A stream that needs more is decoded as it comes.
    """

    room: int
    _lots: dict[tuple[Dataset, Domain], Lot] = field(default_factory=dict, repr=False)

    def begin(
        self, stream: Stream, size: int, device: torch.device, workers: int | None
    ) -> Callable[[], Decoded]:
        """Start to decode; the call of what is returned waits for it, in any thread.

        It gives what `serve.live` does, from the shelf where it fits there.
        """
        needed = [wanted(stream, number) for number in range(len(stream.domains))]
        if sum(map(len, needed)) * 3 * size * size * 4 > self.room:
            decoded = live(stream, device, workers)
            return lambda: decoded
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
            row = torch.full((len(dataset.of(domain).labels),), -1)
            lot = Lot(row, torch.empty(0, device=device), {})
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

    def _make_room(self) -> None:
        while sum(lot.bytes for lot in self._lots.values()) > self.room and len(self._lots) > 1:
            del self._lots[next(iter(self._lots))]


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
