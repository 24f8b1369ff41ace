"""BatchNorm between the source's statistics and the stream's.

For each layer, over the n latest images, in units of the source's standard deviation:

    a, s  =  mean and root mean square of a channel over the pixels of an image
    A, Q  =  mean of a, and of s^2, over the images
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

A batch is part of its own statistics; no gradient flows through them. All later passes, until the
next batch, use these statistics as they are, so that the layers' own buffers can hold them. E of
the first batch is by the predictions with the source's statistics, which is one more pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fata._torch import BatchNorm, copy_all
from fata.distributed.ranks import SINGLE
from fata.network.norms import BatchStatistics, input_of, override, show_buffers, widened

IMAGES = 640  # n, at most: older ones fade out
CLASSES = 4.0  # k
VECTORS = ("shift", "square", "rms")  # A, Q and the mean of s: a number for each channel
SCALARS = ("spread", "weight")  # the mean of the sum of a^2, and w: one for each layer
PACKED = (*VECTORS, "spread")  # what is averaged over the images

Memory = dict[str, Tensor]


class Source(NamedTuple):
    """What a layer had before the first batch."""

    mean: Tensor
    var: Tensor
    deviation: Tensor
    centre: Tensor  # the mean, in units of the deviation


class Layer(NamedTuple):
    """The memory of one layer."""

    packed: Tensor  # PACKED, one after the other
    weight: Tensor


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
        self._mean, self._var = self._joined("running_mean"), self._joined("running_var")
        eps = [self._mean.new_full((layer.num_features,), layer.eps) for layer in self._known]
        self._deviation = (self._var + torch.cat(eps)).sqrt()
        sizes = torch.tensor(self._sizes, device=self._mean.device)
        self._owner = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        own = torch.cat((self._owner.repeat(3), torch.arange(len(sizes), device=sizes.device)))
        self._order = own.argsort(stable=True)  # of PACKED, from one after the other to by layer,
        self._back = self._order.argsort()  # and back
        self._source = self._by_layer()
        self._rows_now = 0  # of the batch that is observed
        self._part = self._doubt = self._mean.new_zeros(())  # its part in n, and 1 / (n - 1) + k E
        self._before: list[Layer] | None = None  # in the memory; None: no batch is observed
        self._memory: Memory = {}
        self._found: dict[BatchNorm, Layer] = {}  # with the batch

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
        return {
            "shift": new(len(self._mean)),
            "square": torch.ones_like(self._mean),
            "rms": torch.ones_like(self._mean),
            **{name: new(layers) for name in SCALARS},
            "shares": new(logits.shape[1]),
            "rows": new(()),
            "imbalance": _imbalance(self._shares(logits, rows), new(()) + rows),
        }

    @contextmanager
    def observing(self, memory: Memory, rows: int) -> Iterator[None]:
        """The first pass inside is over a batch of so many rows; others use its statistics."""
        try:
            self._enter(memory)
            self._rows_now = self._ranks.rows(rows)
            count = self._kept(memory) + self._rows_now
            self._part = self._rows_now / count
            self._doubt = 1 / (count - 1) + CLASSES * memory["imbalance"]
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
        assert self._before is not None
        before, rows = self._memory, self._rows_now
        kept = self._kept(before)
        shares = self._shares(logits, rows)
        shares = torch.lerp(before["shares"], shares, rows / (kept + rows))
        layers = zip(self._known, self._before, strict=True)
        packed, weights = zip(
            *(self._found.get(layer, past) for layer, past in layers), strict=True
        )
        flat = torch.cat(packed)[self._back]
        parts = torch.split(flat, [len(self._mean)] * 3 + [len(self._known)])
        return {
            **dict(zip(PACKED, parts, strict=True)),
            "weight": torch.cat(weights),
            "shares": shares,
            "rows": kept + rows,
            "imbalance": _imbalance(shares, kept + rows),
        }

    def write(self, memory: Memory) -> None:
        """Put the statistics of a memory in force; of an empty one, the source's."""
        mean, var = self._mean, self._var
        if memory:
            weight = memory["weight"][self._owner]
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
        self._deviation, self._owner = self._deviation.to(device), self._owner.to(device)
        self._source = self._by_layer()
        self._order, self._back = self._order.to(device), self._back.to(device)

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
                past = self._before[place].packed
                self._found[layer] = self._observe(input_of(args, kwargs), own, past)
            packed, weight = self._found[layer]
            shift, square, _, _ = _unpacked(packed)
            mean, var = blended(mean, var, own.deviation, shift, square, weight)
        like = layer._buffers["running_mean"]
        dtype = mean.dtype if like is None else like.dtype
        override(layer, mean.to(dtype), var.to(dtype))

    def _observe(self, x: Tensor, own: Source, past: Tensor) -> Layer:
        """What is known of a layer, with its input of this batch.

        Kernels are few, and none writes as much as the input: there are as many layers as in the
        pass itself.
        """
        first, length, pixels = _moments(x.detach(), own.mean.dtype)
        centre, length = first / own.deviation, length / own.deviation
        shift = centre - own.centre
        moved = shift.square()
        square = torch.addcmul(moved, length, length, value=1 / pixels)
        square = torch.addcmul(square, centre, centre, value=-1).clamp(min=0)
        each = torch.cat((shift, square, square.sqrt(), moved.sum(1, keepdim=True)), 1)
        here = self._mean_row(each)
        finite = (here - here).sum() == 0  # else NaN
        found = torch.where(finite, torch.lerp(past, here, self._part), past)
        shift, square, rms, spread = _unpacked(found)
        moved = shift.square().sum()
        distance = moved + (square.sqrt() - 1).square().sum()
        inside = torch.addcmul(square, rms, rms, value=-1).sum()
        variance = (spread - moved + inside).clamp(min=0)
        weight = (1 - self._doubt * variance / distance).clamp(0, 1)
        return Layer(found, weight.nan_to_num(0))  # one image proves nothing

    def _mean_row(self, rows: Tensor) -> Tensor:
        """Mean of some rows over all ranks."""
        if self._ranks is SINGLE:
            return rows.mean(0)
        here = torch.cat((rows.sum(0), rows.new_full((1,), len(rows))))
        there = self._ranks.sum(here if self._ranks.real else torch.zeros_like(here))
        return there[:-1] / there[-1]

    def _shares(self, logits: Tensor, rows: int) -> Tensor:
        """Shares of the predicted classes."""
        classes = torch.arange(logits.shape[1], device=logits.device)
        predicted = (logits.argmax(1)[:, None] == classes).sum(0).to(self._mean.dtype)
        return self._ranks.sum(predicted * self._ranks.real) / rows

    def _kept(self, memory: Memory) -> Tensor:
        """How many images of the past count, with those of this batch."""
        return memory["rows"].clamp(max=max(IMAGES - self._rows_now, 0))

    def _by_layer(self) -> list[Source]:
        flat = self._mean, self._var, self._deviation, self._mean / self._deviation
        parts = (torch.split(one, self._sizes) for one in flat)
        return [Source(*own) for own in zip(*parts, strict=True)]

    def _enter(self, memory: Memory) -> list[Layer]:
        """Begin with this memory; returns its layers."""
        flat = torch.cat([memory[name] for name in PACKED])[self._order]
        packed = torch.split(flat, [3 * size + 1 for size in self._sizes])
        weights = torch.split(memory["weight"], 1)
        self._memory, self._found = memory, {}
        self._before = [Layer(*parts) for parts in zip(packed, weights, strict=True)]
        return self._before

    def _leave(self) -> None:
        self._before, self._memory, self._found = None, {}, {}

    def _joined(self, name: str) -> Tensor:
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
    var = torch.addcmul(var, wider, deviation.square())
    return torch.addcmul(mean, moved, deviation), var.clamp(min=0)


def _unpacked(packed: Tensor) -> Sequence[Tensor]:
    """PACKED of one layer."""
    channels = len(packed) // 3
    return torch.split(packed, [channels, channels, channels, 1])


def _moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Mean and length of each channel over the pixels of an image, in this precision; how many."""
    if x.ndim == 2:
        return x.to(dtype), x.to(dtype), 1
    pixels = tuple(range(2, x.ndim))
    length = torch.linalg.vector_norm(x, dim=pixels, dtype=dtype)
    return x.mean(pixels, dtype=dtype), length, math.prod(x.shape[2:])


def _imbalance(shares: Tensor, rows: Tensor) -> Tensor:
    """E, by the shares of the predicted classes of some images."""
    same = (rows * shares.square().sum() - 1) / (rows - 1).clamp(min=1)
    return (same - 1 / len(shares)).clamp(min=0) / (1 - same).clamp(min=1e-3)
