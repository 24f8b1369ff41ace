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

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from fata._torch import BatchNorm, copy_all
from fata.network.norms import BatchStatistics, input_of, override, show_buffers, widened

IMAGES = 640  # n, at most: older ones fade out
CLASSES = 4.0  # k
VECTORS = ("shift", "rms", "square")  # A, S and Q: a number for each channel
SCALARS = ("variance", "images", "weight")  # V, n and w: one for each layer

Memory = dict[str, Tensor]


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
        ends = list(accumulate(self._sizes))
        self._slices = [slice(end - size, end) for end, size in zip(ends, self._sizes, strict=True)]
        self._mean, self._var = self._joined("running_mean"), self._joined("running_var")
        eps = [self._mean.new_full((layer.num_features,), layer.eps) for layer in self._known]
        self._deviation = (self._var + torch.cat(eps)).sqrt()
        sizes = torch.tensor(self._sizes, device=self._mean.device)
        self._owner = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        self._rows_now = 0  # of the batch that is observed
        self._kept = self._likely = self._mean.new_zeros(0)  # n before it, and what D' may be of V
        self._before: Memory | None = None  # the memory before it; None: no batch is observed
        self._found: dict[BatchNorm, list[Tensor]] = {}  # VECTORS and SCALARS of that one

    def source(self, layer: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Mean and variance that a layer had before the first batch; None: it has none."""
        if layer not in self._places:
            return None
        here = self._slices[self._places[layer]]
        return self._mean[here], self._var[here]

    def widen(self, memory: Memory) -> Memory:
        """A memory in the precision of these statistics, from one that was kept in half."""
        return {name: tensor.to(self._mean) for name, tensor in memory.items()}

    def begin(self, logits: Tensor) -> Memory:
        """The memory before the first batch, by its logits with the source's statistics."""
        new, layers = self._mean.new_zeros, len(self._known)
        rows = self._ranks.rows(len(logits))
        same = _same(self._shares(logits, rows), new(()) + rows)
        return {
            "shift": new(len(self._mean)),
            "square": torch.ones_like(self._mean),
            "rms": torch.ones_like(self._mean),
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
            self._before, self._rows_now, self._found = memory, self._ranks.rows(rows), {}
            self._kept = self._counted(memory["images"])
            chance = 1 / max(self._rows_now - 1, 1) + 1 / self._kept
            self._likely = CLASSES * (chance + _odds(memory["alike"], memory["shares"]))
            yield
        finally:
            self._before, self._found = None, {}

    @contextmanager
    def recalling(self, memory: Memory) -> Iterator[None]:
        """The statistics of a memory inside the context, as they are."""
        try:
            self._before = memory
            self._found = {
                layer: self._of(memory, place) for place, layer in enumerate(self._known)
            }
            yield
        finally:
            self._before, self._found = None, {}

    def observed(self, logits: Tensor) -> Memory:
        """The memory with the batch that was passed, while still observing."""
        assert self._before is not None
        before, rows = self._before, self._rows_now
        kept = self._counted(before["rows"])
        here, part = self._shares(logits, rows), rows / (kept + rows)
        shares = torch.lerp(before["shares"], here, part)
        alike = torch.lerp(before["alike"], _same(here, kept.new_zeros(()) + rows), part)
        parts = [
            self._found.get(layer) or self._of(before, place)
            for place, layer in enumerate(self._known)
        ]
        found = (torch.cat(part) for part in zip(*parts, strict=True))
        return {
            **dict(zip((*VECTORS, *SCALARS), found, strict=True)),
            "shares": shares,
            "rows": kept + rows,
            "imbalance": _odds(_same(shares, kept + rows), shares),
            "alike": alike,
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

    def settle(self) -> None:
        """Back to how it was made: an interrupt may keep a context from being left."""
        self._before, self._found = None, {}
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
        here = self._slices[place]
        mean, var, deviation = self._mean[here], self._var[here], self._deviation[here]
        if self.active:
            if layer not in self._found:
                x = input_of(args, kwargs).detach()
                self._found[layer] = self._observe(x, mean, deviation, place)
            shift, _, square, *_, weight = self._found[layer]
            mean, var = blended(mean, var, deviation, shift, square, weight)
        like = layer._buffers["running_mean"]
        dtype = mean.dtype if like is None else like.dtype
        override(layer, mean.to(dtype), var.to(dtype))

    def _observe(self, x: Tensor, mean: Tensor, deviation: Tensor, place: int) -> list[Tensor]:
        """VECTORS and SCALARS of a layer, with its input of this batch.

        Kernels are few, and none writes as much as the input: there are as many layers as in the
        pass itself.
        """
        assert self._before is not None
        first, second = _moments(x, mean.dtype)
        shift = (first - mean) / deviation
        square = (second - (2 * first - mean) * mean).clamp(min=0) / deviation.square()
        each = torch.cat((shift, square.sqrt(), square), 1).sum(0)
        here = torch.cat((each, shift.square().sum()[None], each.new_full((1,), len(x))))
        there = self._ranks.sum(here if self._ranks.real else torch.zeros_like(here))
        finite, means = there.isfinite().all(), there[:-1] / there[-1]

        *vectors, before, _, _ = self._of(self._before, place)
        old = torch.cat(vectors)
        new = torch.where(finite, means[:-1], old)
        shift, rms, square = new.view(len(VECTORS), -1)
        within = means[-1:] + (square - shift.square() - rms.square()).sum()
        within = torch.where(finite, within.clamp(min=0), before)
        moved = (new - old)[: -len(mean)].square().sum()  # D'

        rows, kept = self._rows_now, self._kept[place : place + 1]
        likely = self._likely[place] * torch.lerp(before, within, rows / (kept + rows))
        images = kept * (likely / moved).nan_to_num(1).clamp(max=1) + rows
        part = rows / images
        found = torch.lerp(old, new, part)
        variance = torch.lerp(before, within, part) + part * (1 - part) * moved

        shift, rms, square = found.view(len(VECTORS), -1)
        distance = shift.square().sum() + (square.sqrt() - 1).square().sum()
        doubt = 1 / (images - 1) + CLASSES * self._before["imbalance"]
        weight = (1 - doubt * variance / distance).clamp(0, 1)
        return [shift, rms, square, variance, images, weight.nan_to_num(0)]

    def _shares(self, logits: Tensor, rows: int) -> Tensor:
        """Shares of the predicted classes."""
        classes = torch.arange(logits.shape[1], device=logits.device)
        predicted = (logits.argmax(1)[:, None] == classes).sum(0).to(self._mean.dtype)
        return self._ranks.sum(predicted * self._ranks.real) / rows

    def _counted(self, images: Tensor) -> Tensor:
        """How many images of the past count, with those of this batch."""
        return images.clamp(max=max(IMAGES - self._rows_now, 0))

    def _of(self, memory: Memory, place: int) -> list[Tensor]:
        """A layer's part of a memory."""
        vectors = [memory[name][self._slices[place]] for name in VECTORS]
        return [*vectors, *(memory[name][place : place + 1] for name in SCALARS)]

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
    wider = weight * (square - 1 - moved * shift)
    return mean + moved * deviation, (var + wider * deviation.square()).clamp(min=0)


def _moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and mean square of each channel over the pixels of an image, in this precision."""
    if x.ndim == 2:
        return x.to(dtype), x.to(dtype).square()
    pixels = tuple(range(2, x.ndim))
    length = torch.linalg.vector_norm(x, dim=pixels, dtype=dtype)
    return x.mean(pixels, dtype=dtype), length.square() / x[0, 0].numel()


def _same(shares: Tensor, rows: Tensor) -> Tensor:
    """P, by the shares of the predicted classes of some images."""
    return (rows * shares.square().sum() - 1) / (rows - 1).clamp(min=1)


def _odds(same: Tensor, classes: Tensor) -> Tensor:
    """E."""
    return (same - 1 / classes.shape[-1]).clamp(min=0) / (1 - same).clamp(min=1e-3)
