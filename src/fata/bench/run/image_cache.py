"""Images that several cells use: decoded and corrupted once, then served from the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fata.data import Dataset, Domain, Stream
from fata.data.serve import Broken, Decoded, intact_rows, live, read

_BATCH = 250
Key = tuple[Dataset, Domain]
Corrupt = Callable[[Tensor, Sequence[int]], Tensor]  # takes images and their indices


@dataclass
class CachedImages:
    """Images of one domain."""

    row: Tensor  # of each image: its row in `pixels`, or -1
    pixels: Tensor  # (N, 3, H, W) in [0, 1], on the device
    broken: Broken  # why an image cannot be read, by index

    @classmethod
    def empty(cls, images: int, device: torch.device) -> CachedImages:
        """Nothing cached yet, for a domain with so many images."""
        return cls(torch.full((images,), -1), torch.empty(0, device=device), {})

    @property
    def bytes(self) -> int:
        """Memory of the pixels."""
        return self.pixels.nbytes

    def assign_rows(self, indices: Tensor, broken: Broken, end: int) -> Tensor:
        """Give intact images the rows from `end` on; returns their indices."""
        self.broken.update({int(indices[row]): why for row, why in broken.items()})
        intact = indices[intact_rows(broken, len(indices))]
        self.row[intact] = torch.arange(end, end + len(intact))
        return intact

    def add(self, parts: Sequence[Tensor], decoded: Decoded, corrupt: Corrupt) -> None:
        """Append images with the indices of `parts`, once all of them are decoded."""
        pieces = [self.pixels] if len(self.pixels) else []
        found: list[Broken] = []
        for part, (pixels, broken) in zip(parts, decoded, strict=True):
            found.append(broken)
            intact = part[intact_rows(broken, len(part))]
            if len(intact):
                pieces.append(corrupt(pixels.float().div_(255), intact.tolist()))
        end = len(self.pixels)
        if pieces:
            self.pixels = torch.cat(pieces)
        for part, broken in zip(parts, found, strict=True):
            end += len(self.assign_rows(part, broken, end))


@dataclass
class ImageCache:
    """Decoded images on the device; the least recently used domains are evicted.

    Args:
        capacity: bytes. A stream that needs more is decoded as it comes.
    """

    capacity: int
    _entries: dict[Key, CachedImages] = field(default_factory=dict, repr=False)
    _filling: Key | None = field(default=None, repr=False)  # cached while a stream is served

    def begin(
        self,
        stream: Stream,
        size: int,
        device: torch.device,
        workers: int | None,
        prefetch: bool = False,
    ) -> Callable[[], Decoded]:
        """Start to decode a stream; calling the result waits for it, in any thread.

        It gives what `serve.live` gives, from the cache if it fits. Uncorrupted images that are
        not cached yet are decoded live and cached as they are served, so that the model need not
        wait for all of them; with `prefetch` all are decoded first.
        """
        needed = [indices_used(stream, number) for number in range(len(stream.domains))]
        if sum(map(len, needed)) * 3 * size * size * 4 > self.capacity:
            decoded = live(stream, device, workers)
            return lambda: decoded
        key = (stream.dataset, stream.domains[0])
        once = len(needed) == 1 and len(needed[0]) == stream.images
        if once and not prefetch and not stream.dataset.made and key not in self._entries:
            images = len(stream.dataset.of(key[1]).labels)
            self._entries[key] = CachedImages.empty(
                images, device
            )  # keeps its age among the others
            self._filling, decoded = key, live(stream, device, workers)
            return lambda: self._fill(CachedImages.empty(images, device), key, stream, decoded)
        waiting = [
            self._begin(stream.dataset, domain, some, device, workers)
            for domain, some in zip(stream.domains, needed, strict=True)
        ]
        return lambda: _batches(stream, [wait() for wait in waiting], device)

    def _begin(
        self,
        dataset: Dataset,
        domain: Domain,
        wanted: Tensor,
        device: torch.device,
        workers: int | None,
    ) -> Callable[[], CachedImages]:
        """Start to decode the images of a domain that are not cached yet."""
        key = (dataset, domain)
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = CachedImages.empty(len(dataset.of(domain).labels), device)
        self._entries[key] = entry
        known = torch.tensor(list(entry.broken), dtype=torch.int64)
        new = wanted[(entry.row[wanted] < 0) & ~torch.isin(wanted, known)]
        if not len(new):
            return lambda: entry
        parts = torch.split(new, _BATCH)
        rows = ([(0, index) for index in part.tolist()] for part in parts)
        decoded = read([dataset.of(domain)], rows, len(parts), device, workers)

        def wait() -> CachedImages:
            entry.add(parts, decoded, lambda some, ids: dataset.finish(some, domain, ids))
            self._evict()
            return entry

        return wait

    def is_filling(self, stream: Stream) -> bool:
        """Whether the stream's images are being cached while another stream is served."""
        return [self._filling] == [(stream.dataset, domain) for domain in stream.domains]

    def _fill(self, entry: CachedImages, key: Key, stream: Stream, decoded: Decoded) -> Decoded:
        """Serve a stream live; once it is complete, its images are in the cache."""
        end = 0
        try:
            with closing(decoded):
                for (first, last, _), (images, broken) in zip(stream.spans, decoded, strict=True):
                    intact = entry.assign_rows(stream.index[first:last], broken, end)
                    if len(intact):
                        if not end:
                            entry.pixels = images.new_empty(stream.images, *images.shape[1:])
                        entry.pixels[end : end + len(intact)] = images
                    end += len(intact)
                    yield images, broken
        finally:
            self._filling = None
        entry.pixels = entry.pixels[:end]
        self._entries[key] = entry
        self._evict()

    def _evict(self) -> None:
        for oldest in list(self._entries)[:-1]:  # a copy: another thread may add entries meanwhile
            if sum(entry.bytes for entry in list(self._entries.values())) > self.capacity:
                self._entries.pop(oldest, None)


def _batches(stream: Stream, entries: list[CachedImages], device: torch.device) -> Decoded:
    for first, last, _ in stream.spans:
        place, index = stream.domain[first:last], stream.index[first:last]
        met = sorted(set(place.tolist()))
        broken: Broken = {}
        order: list[Tensor] = []
        pieces: list[Tensor] = []
        for number in met:
            entry, rows = entries[number], (place == number).nonzero()[:, 0]
            found = entry.row[index[rows]]
            for row in rows[found < 0].tolist():
                broken[row] = entry.broken[int(index[row])]
            order.append(rows[found >= 0])
            pieces.append(entry.pixels[found[found >= 0].to(device, non_blocking=True)])
        broken = dict(sorted(broken.items()))
        if len(met) == 1:
            yield pieces[0], broken
        else:
            back = torch.cat(order).argsort().to(device, non_blocking=True)
            yield torch.cat(pieces)[back], broken


def indices_used(stream: Stream, number: int) -> Tensor:
    """Indices of a domain's images that occur in a stream, sorted."""
    return torch.from_numpy(np.unique(stream.index[stream.domain == number].numpy()))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # unknown on this system
        return 4 * 2**30
