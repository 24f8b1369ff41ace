"""BatchNorm between the source's statistics and the stream's.

For each layer, over the n latest images, in units of the source's standard deviation:

    a, s  =  mean and root mean square of a channel over the pixels of an image
    A, S, Q  =  mean of a, of s and of s^2, over the images
    D     =  sum over channels of  A^2 + (sqrt(Q) - 1)^2          the distance from the source
    V     =  sum over channels of the variances of a and s over the images
    E     =  (P - 1/C) / (1 - P)      P: that two images have one predicted class, without bias
    w     =  1 - (1 / (n - 1) + k E) V / D      in [0, 1]

    mean  =  w A        variance  =  1 + w (Q - 1 - w A^2)

Of D, V / (n - 1) is expected of n images that have not shifted, and E V of classes that are out of
balance, however many images there are, if classes are what V comes from; k makes up for the layers
where it is more. The rest is shift, and w its share: the positive part of James and Stein's
shrinkage. A stream that has not shifted keeps the source's statistics, whatever its batches and
classes are.

The past counts as far as a batch of B images agrees with it:

    D'    =  sum over channels of  (A_B - A)^2 + (S_B - S)^2
    n    <-  B + n min(1, k (1 / (B - 1) + 1 / n + E') V / D')      E': E within batches

so that after a change of domain the stream's statistics begin again, and classes that take turns
change nothing.

A batch is part of its own statistics; no gradient flows through them. Once it is predicted, the
memory counts each of its images 1 / sqrt(N), N: images with its predicted class among the latest,
so that what comes again and again is not taken for a shift. All later passes, until the next batch,
use the memory as it is, so that the layers' own buffers can hold its statistics. E of the first
batch is by the predictions with the source's statistics, which is one more pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fata._torch import BatchNorm, copy_all
from fata.distributed.ranks import SINGLE
from fata.network.norms import BatchStatistics, input_of, override, show_buffers, widened

IMAGES = 640  # n, at most: older ones fade out
CLASSES = 4.0  # k
VECTORS = ("shift", "rms", "square")  # A, S and Q: a number for each channel
SCALARS = ("variance", "images", "weight")  # V, n and w: one for each layer

Memory = dict[str, Tensor]


class Source(NamedTuple):
    """What a layer had before the first batch."""

    mean: Tensor
    var: Tensor
    deviation: Tensor
    scale: Tensor  # 1 / deviation
    offset: Tensor  # of a channel, in units of the deviation: x scale + offset is its shift


class Known(NamedTuple):
    """The memory of one layer, or of all."""

    vectors: Tensor  # VECTORS
    variance: Tensor
    images: Tensor
    weight: Tensor


class Past(NamedTuple):
    """What of that may count, in each layer."""

    images: Tensor
    part: Tensor  # of the batch, if all of it counts
    chance: Tensor  # k (1 / (B - 1) + 1 / n + E')
    uneven: Tensor  # k E
    rows: Tensor  # B


class Channels:
    """Channels of one layer."""

    def sums(self, values: Tensor) -> Tensor:
        """Sums over a layer's values, some for each channel."""
        return values.sum().reshape(1)

    def spread(self, values: Tensor) -> Tensor:
        """For each channel its layer's value."""
        return values


@dataclass
class AllChannels(Channels):
    """Channels of all layers, one after the other; by kernels that a first pass loads anyhow."""

    sizes: list[int]

    def sums(self, values: Tensor) -> Tensor:
        """Sums over a layer's values, some for each channel."""
        return torch.stack([own.sum() for own in torch.split(values, self.sizes, 1)])

    def spread(self, values: Tensor) -> Tensor:
        """For each channel its layer's value."""
        layers = zip(torch.split(values, 1), self.sizes, strict=True)
        return torch.cat([own.expand(size) for own, size in layers])


class StreamStatistics(BatchStatistics):
    """Makes every BatchNorm normalise with a blend of the source's statistics and the stream's.

    A batch that is passed while `observing` gives a new memory (`observed`); `write` puts its
    statistics in force. `remove` leaves them in the layers' buffers. A layer without running
    statistics uses the batch's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._known = [layer for layer, _, _ in self._layers if layer.running_mean is not None]
        self._places = {layer: place for place, layer in enumerate(self._known)}
        self._sizes = [layer.num_features for layer in self._known]
        self._mean, self._var = self._flat("running_mean"), self._flat("running_var")
        eps = [self._mean.new_full((layer.num_features,), layer.eps) for layer in self._known]
        self._deviation = (self._var + torch.cat(eps)).sqrt()
        self._all = AllChannels(self._sizes)
        self._source = self._sources()
        self._rows_now = 0  # of the batch that is observed
        self._past: Past | None = None  # None: no batch is observed
        self._pasts: list[Past] = []  # of each layer
        self._before: list[Known] | None = None  # likewise, in the memory; None: it has no part
        self._memory: Memory = {}
        self._found: dict[BatchNorm, Known] = {}  # with the batch
        self._images: dict[BatchNorm, Tensor] = {}  # a, s, s^2 and a^2 of each of its images

    def source(self, layer: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Mean and variance that a layer had before the first batch; None: it has none."""
        if layer not in self._places:
            return None
        own = self._source[self._places[layer]]
        return own.mean, own.var

    def widen(self, memory: Memory) -> Memory:
        """A memory in the precision of these statistics, from one that was kept in half."""
        return {name: tensor.to(self._mean) for name, tensor in memory.items()}

    def begin(self, logits: Tensor) -> Memory:
        """The memory before the first batch, by its logits with the source's statistics."""
        new, layers = self._mean.new_zeros, len(self._known)
        rows = self._ranks.rows(len(logits))
        same = _same(self._shares(self._predicted(logits), rows), new(()) + rows)
        return {
            "shift": new(len(self._mean)),
            "rms": torch.ones_like(self._mean),
            "square": torch.ones_like(self._mean),
            **{name: new(layers) for name in SCALARS},
            "shares": new(logits.shape[1]),
            "rows": new(()),
            "imbalance": _odds(same, logits),
            "alike": same,
        }

    @contextmanager
    def observing(self, memory: Memory, rows: int) -> Iterator[None]:
        """The first pass inside is over a batch of so many rows; others use its statistics."""
        try:
            self._enter(memory)
            self._rows_now = rows = self._ranks.rows(rows)
            kept = self._kept(memory["images"])
            chance = 1 / kept + _odds(memory["alike"], memory["shares"]) + 1 / max(rows - 1, 1)
            every = (torch.ones_like(kept) * own for own in (CLASSES * memory["imbalance"], rows))
            self._past = Past(kept, rows / (kept + rows), CLASSES * chance, *every)
            parts = (torch.split(one, 1) for one in self._past)
            self._pasts = [Past(*own) for own in zip(*parts, strict=True)]
            yield
        finally:
            self._leave()

    @contextmanager
    def recalling(self, memory: Memory) -> Iterator[None]:
        """The statistics of a memory inside the context, as they are."""
        try:
            self._found = dict(zip(self._known, self._enter(memory), strict=True))
            yield
        finally:
            self._leave()

    def observed(self, logits: Tensor) -> Memory:
        """The memory with the batch that was passed, while still observing."""
        before, rows = self._memory, self._rows_now
        kept = self._kept(before["rows"])
        predicted, part = self._predicted(logits), rows / (kept + rows)
        here = self._shares(predicted, rows)
        shares = torch.lerp(before["shares"], here, part)
        known = self._weighed((predicted * shares).sum(1).sqrt().reciprocal())
        self._found = dict(zip(self._known, self._by_layer(known), strict=True))
        return {
            **dict(zip((*VECTORS, *SCALARS), (*known.vectors, *known[1:]), strict=True)),
            "shares": shares,
            "rows": kept + rows,
            "imbalance": _odds(_same(shares, kept + rows), shares),
            "alike": torch.lerp(before["alike"], _same(here, torch.zeros_like(kept) + rows), part),
        }

    def write(self, memory: Memory) -> None:
        """Put the statistics of a memory in force; of an empty one, the source's."""
        mean, var = self._mean, self._var
        if memory:
            weight = self._all.spread(memory["weight"])
            parts = mean, var, self._deviation, memory["shift"], memory["square"], weight
            mean, var = blended(*parts)
        buffers = [layer._buffers for layer in self._known]
        with torch.no_grad():
            for name, flat in (("running_mean", mean), ("running_var", var)):
                own = [part for buffer in buffers if (part := buffer[name]) is not None]
                copy_all(own, torch.split(flat, self._sizes))

    def move(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self._mean, self._var = self._mean.to(device), self._var.to(device)
        self._deviation = self._deviation.to(device)
        self._source = self._sources()

    def settle(self) -> None:
        """Back to how it was made: an interrupt may keep a context from being left."""
        self._leave()
        super().settle()

    # -- inside -------------------------------------------------------------------------------

    def _choose(self, layer: BatchNorm, args: Any, kwargs: Any) -> Any:
        show_buffers(layer)
        place = self._places.get(layer)
        layer.training = place is None
        if place is None:
            return
        if self.active and self._before is None:
            return
        own = self._source[place]
        mean, var = own.mean, own.var
        if self.active and self._before is not None:
            if layer not in self._found:
                images = self._each(input_of(args, kwargs).detach(), own)
                given = self._mean_row(images), self._before[place], self._pasts[place]
                self._images[layer], self._found[layer] = images, _joined(*given, Channels())
            (shift, _, square), *_, weight = self._found[layer]
            mean, var = blended(mean, var, own.deviation, shift, square, weight)
        like = layer._buffers["running_mean"]
        dtype = mean.dtype if like is None else like.dtype
        override(layer, mean.to(dtype), var.to(dtype))

    def _each(self, x: Tensor, own: Source) -> Tensor:
        """a, s, s^2 and a^2 of each image, by a layer's input.

        Kernels are few here and in `_joined`, and none writes as much as the input: there are as
        many layers as in the pass itself.
        """
        first, length, pixels = _moments(x, own.mean.dtype)
        shift, length = torch.addcmul(own.offset, first, own.scale), length * own.scale
        square = torch.addcmul(-own.offset * own.offset, length, length, value=1 / pixels)
        square = torch.addcmul(square, shift, own.offset, value=2).clamp(min=0)
        return torch.stack((shift, square.sqrt(), square, shift * shift), 1)

    def _weighed(self, weights: Tensor) -> Known:
        """The memory with the batch, each of whose images weighs so much."""
        assert self._past is not None
        weights = weights / self._over_ranks(weights.sum())
        found = []
        for layer, size in zip(self._known, self._sizes, strict=True):
            images = self._images.get(layer, weights.new_zeros(0, 4, size))
            by_image = len(images) == len(weights)
            each = images * weights[:, None, None] if by_image else images * weights.sum()
            found.append(each.sum(0) if by_image else each.mean(0))  # NaN, if it was not called
        here = self._over_ranks(torch.cat(found, 1))
        return _joined(here, _known(self._memory), self._past, self._all)

    def _mean_row(self, rows: Tensor) -> Tensor:
        """Mean of some rows over all ranks."""
        if self._ranks is SINGLE:
            return rows.mean(0)
        here = torch.cat((rows.sum(0).flatten(), rows.new_full((1,), len(rows))))
        there = self._over_ranks(here)
        return (there[:-1] / there[-1]).view(rows.shape[1:])

    def _over_ranks(self, here: Tensor) -> Tensor:
        """Sum over all ranks that have images."""
        return self._ranks.sum(here if self._ranks.real else torch.zeros_like(here))

    def _predicted(self, logits: Tensor) -> Tensor:
        """1 for the predicted class of each image, 0 for others."""
        classes = torch.arange(logits.shape[1], device=logits.device)
        return (logits.argmax(1)[:, None] == classes).to(self._mean.dtype)

    def _shares(self, predicted: Tensor, rows: int) -> Tensor:
        """Shares of the predicted classes."""
        return self._ranks.sum(predicted.sum(0) * self._ranks.real) / rows

    def _kept(self, images: Tensor) -> Tensor:
        """How many images of the past count, with those of this batch."""
        return images.clamp(max=max(IMAGES - self._rows_now, 0))

    def _sources(self) -> list[Source]:
        scale = 1 / self._deviation
        flat = self._mean, self._var, self._deviation, scale, -self._mean * scale
        parts = (torch.split(one, self._sizes) for one in flat)
        return [Source(*own) for own in zip(*parts, strict=True)]

    def _enter(self, memory: Memory) -> list[Known]:
        """Begin with this memory; returns that of each layer."""
        self._memory, self._found, self._images = memory, {}, {}
        self._before = self._by_layer(_known(memory))
        return self._before

    def _by_layer(self, known: Known) -> list[Known]:
        vectors = torch.split(known.vectors, self._sizes, 1)
        scalars = (torch.split(one, 1) for one in known[1:])
        return [Known(*own) for own in zip(vectors, *scalars, strict=True)]

    def _leave(self) -> None:
        self._before = self._past = None
        self._memory, self._found, self._images = {}, {}, {}

    def _flat(self, name: str) -> Tensor:
        return torch.cat([widened(getattr(layer, name)).clone() for layer in self._known])


class Witness(StreamStatistics):
    """The same beside other statistics: in force only while it is observing or recalling."""

    def _choose(self, layer: BatchNorm, args: Any, kwargs: Any) -> Any:
        if self._before is not None:
            super()._choose(layer, args, kwargs)


def blended(
    mean: Tensor, var: Tensor, deviation: Tensor, shift: Tensor, square: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance between the source's (weight 0) and the stream's (weight 1)."""
    moved = weight * shift
    wider = weight * torch.addcmul(square - 1, moved, shift, value=-1)
    var = torch.addcmul(var, wider * deviation, deviation)
    return torch.addcmul(mean, moved, deviation), var.clamp(min=0)


def _known(memory: Memory) -> Known:
    """Of all layers."""
    return Known(torch.stack([memory[n] for n in VECTORS]), *(memory[n] for n in SCALARS))


def _joined(here: Tensor, old: Known, past: Past, channels: Channels) -> Known:
    """A memory with a batch, of which A, S, Q and the mean of a^2 are `here`."""
    means, squares = here[:2], here[2:]
    within = channels.sums(squares) - channels.sums(means * means)
    finite = within < math.inf  # NaN is not
    new = torch.where(channels.spread(finite), here[:3], old.vectors)
    within = torch.where(finite, within, old.variance).clamp(min=0)
    change = (new - old.vectors)[:2]
    apart = channels.sums(change * change)  # D'

    likely = past.chance * torch.lerp(old.variance, within, past.part)
    images = torch.addcmul(past.rows, past.images, (likely / apart).nan_to_num(1).clamp(max=1))
    part = past.rows / images
    vectors = torch.lerp(old.vectors, new, channels.spread(part))
    spread = torch.addcmul(within + apart, part, apart, value=-1)
    variance = torch.lerp(old.variance, spread, part)

    shift, _, square = vectors
    away = torch.stack((shift, square.sqrt() - 1))
    distance = channels.sums(away * away)
    doubt = past.uneven + (images - 1).reciprocal()
    weight = torch.addcmul(distance, doubt, variance, value=-1) / distance
    return Known(vectors, variance, images, weight.clamp(0, 1).nan_to_num(0))


def _moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Mean and length of each channel over the pixels of an image, in this precision; how many."""
    if x.ndim == 2:
        return x.to(dtype), x.to(dtype), 1
    pixels = tuple(range(2, x.ndim))
    length = torch.linalg.vector_norm(x, dim=pixels, dtype=dtype)
    return x.mean(pixels, dtype=dtype), length, math.prod(x.shape[2:])


def _same(shares: Tensor, rows: Tensor) -> Tensor:
    """P, by the shares of the predicted classes of some images."""
    return (rows * (shares * shares).sum() - 1) / (rows - 1).clamp(min=1)


def _odds(same: Tensor, classes: Tensor) -> Tensor:
    """E."""
    return (same - 1 / classes.shape[-1]).clamp(min=0) / (1 - same).clamp(min=1e-6)
