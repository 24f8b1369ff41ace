"""BatchNorm between the source's statistics and the stream's; the equations: `shrinkage.py`.

A batch is part of its own statistics, whose gradient is that of `renormalisation.py`. An image that
is far stronger than others, such as one that nobody scaled, counts no more than 10 times what is
typical:

    u  =  min(1, 10 exp(mean(l) - l))      l: log(1 + sum of s^2) of each image, in the first layer;
                                           the mean is also over the memory, by its Q

Once a batch is predicted, the memory also counts each of its images 1 / sqrt(N), N: images with its
predicted class among the latest, so that what comes again and again is not taken for a shift. All
later passes, until the next batch, use the memory as it is, so that the layers' own buffers can
hold its statistics. E of the first batch is by the predictions with the source's statistics, which
is one more pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fata._torch import BatchNorm, copy_all
from fata.distributed.ranks import SINGLE
from fata.network.norms import BatchStatistics, input_of, override, show_own, widened
from fata.network.renormalisation import batch_moments, renormalise
from fata.network.shrinkage import (
    SCALARS,
    VECTORS,
    AllChannels,
    Channels,
    Known,
    Memory,
    Past,
    Source,
    blended,
    joined,
    known,
    moments,
    odds,
    same,
)

IMAGES = 640  # n, at most: older ones fade out
CLASSES = 4.0  # k
FAR = 10.0  # times what is typical; pictures differ by up to 4.4


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
        self._eps = [layer.eps for layer in self._known for _ in range(layer.num_features)]
        self._all = AllChannels(self._sizes)
        self._take_source()
        self._rows_now = 0  # of the batch that is observed
        self._past: Past | None = None  # None: no batch is observed
        self._pasts: list[Past] = []  # of each layer
        self._before: list[Known] | None = None  # likewise, in the memory; None: it has no part
        self._memory: Memory = {}
        self._found: dict[BatchNorm, Known] = {}  # with the batch
        self._images: dict[BatchNorm, Tensor] = {}  # a, s, s^2 and a^2 of each of its images
        self._parts: Tensor | None = None  # u of each, of a sum of 1

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
        alike = same(self._shares(self._predicted(logits), rows), new(()) + rows)
        return {
            "shift": new(len(self._mean)),
            "rms": torch.ones_like(self._mean),
            "square": torch.ones_like(self._mean),
            **{name: new(layers) for name in SCALARS},
            "shares": new(logits.shape[1]),
            "rows": new(()),
            "imbalance": odds(alike, logits),
            "alike": alike,
        }

    @contextmanager
    def observing(self, memory: Memory, rows: int) -> Iterator[None]:
        """The first pass inside is over a batch of so many rows; others use its statistics."""
        try:
            self._enter(memory)
            self._rows_now = rows = self._ranks.rows(rows)
            kept = self._kept(memory["images"])
            chance = 1 / kept + odds(memory["alike"], memory["shares"]) + 1 / max(rows - 1, 1)
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
        joint = self._weighed((predicted * shares).sum(1).sqrt().reciprocal())
        self._found = dict(zip(self._known, self._by_layer(joint), strict=True))
        return {
            **dict(zip((*VECTORS, *SCALARS), (*joint.vectors, *joint[1:]), strict=True)),
            "shares": shares,
            "rows": kept + rows,
            "imbalance": odds(same(shares, kept + rows), shares),
            "alike": torch.lerp(before["alike"], same(here, torch.zeros_like(kept) + rows), part),
        }

    def write(self, memory: Memory) -> None:
        """Put the statistics of a memory in force; of an empty one, the source's."""
        mean, var = self._mean, self._var
        if memory:
            weight = self._all.spread(memory["weight"])
            mean, var = blended(self._whole, memory["shift"], memory["square"], weight)
        buffers = [layer._buffers for layer in self._known]
        with torch.no_grad():
            for name, flat in (("running_mean", mean), ("running_var", var)):
                own = [part for buffer in buffers if (part := buffer[name]) is not None]
                copy_all(own, torch.split(flat, self._sizes))

    def move(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self._mean, self._var = self._mean.to(device), self._var.to(device)
        self._take_source()

    def settle(self) -> None:
        """Back to how it was made: an interrupt may keep a context from being left."""
        self._leave()
        super().settle()

    # -- inside -------------------------------------------------------------------------------

    def _choose(self, layer: BatchNorm, args: Any, kwargs: Any) -> Any:
        show_own(layer)
        place = self._places.get(layer)
        layer.training = place is None
        if place is None:
            return None
        own, x, images = self._source[place], input_of(args, kwargs), None
        learns = self._learns(layer, x)
        observes = self.active and self._before is not None and layer not in self._found
        if observes or (learns and not self._shared):
            images = self._each(x.detach(), own)
            if observes:
                self._observe(layer, place, images)
        mean, var = self._statistics(layer, own)
        if not learns:
            override(layer, mean, var)
            return None
        given = super()._choose(layer, args, kwargs)  # it normalises with the batch
        batch = self._moments if images is None or self._shared else batch_moments(images, own)
        renormalise(layer, mean, var, *batch)
        return given

    def _observe(self, layer: BatchNorm, place: int, images: Tensor) -> None:
        """What a layer has of the batch joins its memory."""
        assert self._before is not None
        before = self._before[place], self._pasts[place]
        if self._parts is None:
            self._parts = self._bounded(images, *before)
        found = joined(self._mean_row(images), *before, Channels())
        self._images[layer], self._found[layer] = images, found

    def _statistics(self, layer: BatchNorm, own: Source) -> tuple[Tensor, Tensor]:
        """Mean and variance that normalise a layer's input now."""
        mean, var = layer.running_mean, layer.running_var
        assert mean is not None
        assert var is not None
        if not self.active:
            return own.mean.to(mean), own.var.to(var)
        if layer in self._found:
            (shift, _, square), *_, weight = self._found[layer]
            blend = blended(own, shift, square, weight)
            return blend[0].to(mean), blend[1].to(var)
        return mean, var

    def _learns(self, layer: BatchNorm, x: Tensor) -> bool:
        """Whether the gradient of a layer's input goes through the batch's statistics."""
        learns = self.active and torch.is_grad_enabled() and x.requires_grad
        several = self._shared or x[:, 0].numel() > 1
        # A weight that is computed cannot be overridden, and torch needs an eps for a batch.
        return learns and several and "weight" in layer._parameters and layer.eps > 0

    def _each(self, x: Tensor, own: Source) -> Tensor:
        """a, s, s^2 and a^2 of each image, by a layer's input.

        Kernels are few here and in `joined`, and none writes as much as the input: there are as
        many layers as in the pass itself.
        """
        first, length, pixels = moments(x, own.mean.dtype)
        shift, length = torch.addcmul(own.offset, first, own.scale), length * own.scale
        square = torch.addcmul(own.level, length, length, value=1 / pixels)
        square = torch.addcmul(square, shift, own.offset, value=2).clamp(min=0)
        return torch.stack((shift, square.sqrt(), square, shift * shift), 1)

    def _bounded(self, images: Tensor, before: Known, past: Past) -> Tensor:
        """What part of the batch each image is, by those of the first layer."""
        strength = images[:, 2].sum(1).log1p()
        typical = before.vectors[2].sum().log1p().lerp(self._mean_row(strength), past.part)
        parts = (FAR * (typical - strength).exp()).clamp(max=1)
        return parts / self._over_ranks(parts.sum())

    def _weighed(self, weights: Tensor) -> Known:
        """The memory with the batch, each of whose images weighs so much."""
        assert self._past is not None
        if self._parts is not None and len(self._parts) == len(weights):
            weights = weights * self._parts
        weights = weights / self._over_ranks(weights.sum())
        found = []
        for layer, size in zip(self._known, self._sizes, strict=True):
            images = self._images.get(layer, weights.new_zeros(0, 4, size))
            by_image = len(images) == len(weights)
            each = images * weights[:, None, None] if by_image else images * weights.sum()
            found.append(each.sum(0) if by_image else each.mean(0))  # NaN, if it was not called
        here = self._over_ranks(torch.cat(found, 1))
        return joined(here, known(self._memory), self._past, self._all)

    def _mean_row(self, rows: Tensor) -> Tensor:
        """Mean over the images of all ranks, or over the rows of a layer that sees others."""
        if self._parts is not None and len(self._parts) == len(rows):
            return self._over_ranks((rows * self._parts[:, None, None]).sum(0))
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

    def _take_source(self) -> None:
        """Of all layers, and of each."""
        self._whole = Source.of(self._mean, self._var, self._mean.new_tensor(self._eps))
        parts = (torch.split(one, self._sizes) for one in self._whole)
        self._source = [Source(*own) for own in zip(*parts, strict=True)]

    def _enter(self, memory: Memory) -> list[Known]:
        """Begin with this memory; returns that of each layer."""
        self._memory, self._found, self._images, self._parts = memory, {}, {}, None
        self._before = self._by_layer(known(memory))
        return self._before

    def _by_layer(self, memory: Known) -> list[Known]:
        vectors = torch.split(memory.vectors, self._sizes, 1)
        scalars = (torch.split(one, 1) for one in memory[1:])
        return [Known(*own) for own in zip(vectors, *scalars, strict=True)]

    def _leave(self) -> None:
        self._before = self._past = self._parts = None
        self._memory, self._found, self._images = {}, {}, {}

    def _flat(self, name: str) -> Tensor:
        return torch.cat([widened(getattr(layer, name)).clone() for layer in self._known])


class Witness(StreamStatistics):
    """The same beside other statistics: in force only while it is observing or recalling."""

    def _choose(self, layer: BatchNorm, args: Any, kwargs: Any) -> Any:
        return None if self._before is None else super()._choose(layer, args, kwargs)
