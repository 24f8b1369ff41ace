"""BatchNorm between the source's statistics and the stream's.

For each layer, over the n latest images, in units of the source's standard deviation:

    a  =  mean of a channel over an image      A  =  mean of a      Q  =  mean of squares
    U  =  P(two images have one class) - 1/C   by the predicted classes, without bias
    w  =  1 - (1 / (n - 1) + k U) V / |A|^2    in [0, 1];  V and |A|^2 are summed over channels,
                                               V is the variance of a over the images
    mean  =  w A        variance  =  1 + w (Q - 1 - w A^2)

|A|^2 is how far the stream has moved from the source. Of that, V / (n - 1) is due to the number of
images, and about k U V to uneven classes, however many the images are. The rest is shift, and w its
share: the positive part of James and Stein's shrinkage. A stream that has not shifted keeps the
source's statistics, whatever its batches and classes are.

A batch is part of its own statistics; no gradient flows through them. All later passes, until the
next batch, use these statistics as they are, so that the layers' own buffers can hold them. U of
the first batch is by the predictions with the source's statistics, which is one more pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fata._torch import BatchNorm, copy_all
from fata.network.norms import BatchStatistics, input_of, override, show_buffers, widened

IMAGES = 640  # n, at most: older ones fade out
CLASSES = 4.0  # k

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
        self._mean, self._var = self._joined("running_mean"), self._joined("running_var")
        eps = [self._mean.new_full((layer.num_features,), layer.eps) for layer in self._known]
        self._deviation = (self._var + torch.cat(eps)).sqrt()
        sizes = torch.tensor(self._sizes, device=self._mean.device)
        self._owner = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        self._rows_now = 0  # of the batch that is observed
        self._before: Memory | None = None  # the memory before it; None: no batch is observed
        self._found: dict[BatchNorm, list[Tensor]] = {}  # shift, square, spread and weight

    def source(self, layer: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Mean and variance that a layer had before the first batch; None: it has none."""
        if layer not in self._places:
            return None
        place = self._places[layer]
        return self._split(self._mean)[place], self._split(self._var)[place]

    def begin(self, logits: Tensor) -> Memory:
        """The memory before the first batch, by its logits with the source's statistics."""
        new, layers = self._mean.new_zeros, len(self._known)
        rows = self._ranks.rows(len(logits))
        return {
            "shift": new(len(self._mean)),
            "square": torch.ones_like(self._mean),
            "spread": new(layers),
            "weight": new(layers),
            "shares": new(logits.shape[1]),
            "rows": new(()),
            "uneven": _uneven(self._shares(logits, rows), new(()) + rows),
        }

    @contextmanager
    def observing(self, memory: Memory, rows: int) -> Iterator[None]:
        """The first pass inside is over a batch of so many rows; others use its statistics."""
        try:
            self._before, self._rows_now, self._found = memory, self._ranks.rows(rows), {}
            yield
        finally:
            self._before, self._found = None, {}

    def observed(self, logits: Tensor) -> Memory:
        """The memory with the batch that was passed, while still observing."""
        assert self._before is not None
        before, rows = self._before, self._rows_now
        kept = self._kept(before)
        shares = self._shares(logits, rows)
        shares = torch.lerp(before["shares"], shares, rows / (kept + rows))
        parts = [
            self._found.get(layer) or self._of(before, place)
            for place, layer in enumerate(self._known)
        ]
        shift, square, spread, weight = (torch.cat(part) for part in zip(*parts, strict=True))
        return {
            "shift": shift,
            "square": square,
            "spread": spread,
            "weight": weight,
            "shares": shares,
            "rows": kept + rows,
            "uneven": _uneven(shares, kept + rows),
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
                copy_all(own, self._split(flat))

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
        mean, var, deviation = (
            self._split(flat)[place] for flat in (self._mean, self._var, self._deviation)
        )
        if self.active and self._before is None:
            return
        if self.active:
            if layer not in self._found:
                past = self._of(self._before or {}, place)
                self._found[layer] = self._observe(input_of(args, kwargs), mean, deviation, past)
            shift, square, _, weight = self._found[layer]
            mean, var = blended(mean, var, deviation, shift, square, weight)
        like = layer._buffers["running_mean"]
        dtype = mean.dtype if like is None else like.dtype
        override(layer, mean.to(dtype), var.to(dtype))

    def _observe(
        self, x: Tensor, mean: Tensor, deviation: Tensor, past: Sequence[Tensor]
    ) -> list[Tensor]:
        """Shift, square, spread and weight of a layer, with its input of this batch."""
        assert self._before is not None
        x = widened(x.detach()).flatten(2) if x.ndim > 2 else widened(x.detach())[:, :, None]
        var, shift = torch.var_mean(x, 2, correction=0)
        shift = (shift - mean) / deviation
        square = var / deviation.square() + shift.square()
        count = shift.new_full((1,), len(x))
        here = torch.cat((shift.sum(0), square.sum(0), shift.square().sum()[None], count))
        there = self._ranks.sum(here if self._ranks.real else torch.zeros_like(here))
        *now, count = torch.split(there, [len(mean), len(mean), 1, 1])
        kept, rows = self._kept(self._before), self._rows_now
        fine = there.isfinite().all()
        found = [
            torch.where(fine, torch.lerp(old, new / count, rows / (kept + rows)), old)
            for old, new in zip(past[:3], now, strict=True)
        ]
        moved = found[0].square().sum()
        doubt = 1 / (kept + rows - 1) + CLASSES * self._before["uneven"]
        weight = (1 - doubt * (found[2] - moved).clamp(min=0) / moved).clamp(0, 1)
        return [*found, weight.nan_to_num(0)]  # one image has no variance, and proves nothing

    def _shares(self, logits: Tensor, rows: int) -> Tensor:
        """Shares of the predicted classes."""
        classes = torch.arange(logits.shape[1], device=logits.device)
        predicted = (logits.argmax(1)[:, None] == classes).sum(0).to(self._mean.dtype)
        return self._ranks.sum(predicted * self._ranks.real) / rows

    def _kept(self, memory: Memory) -> Tensor:
        """How many images of the past count, with those of this batch."""
        return memory["rows"].clamp(max=max(IMAGES - self._rows_now, 0))

    def _of(self, memory: Memory, place: int) -> list[Tensor]:
        """A layer's part of a memory."""
        shift, square = (self._split(memory[name])[place] for name in ("shift", "square"))
        return [shift, square, *(memory[n][place : place + 1] for n in ("spread", "weight"))]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, self._sizes)

    def _joined(self, name: str) -> Tensor:
        return torch.cat([widened(getattr(layer, name)).clone() for layer in self._known])


def blended(
    mean: Tensor, var: Tensor, deviation: Tensor, shift: Tensor, square: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance between the source's (weight 0) and the stream's (weight 1)."""
    moved = weight * shift
    wider = weight * (square - 1 - moved * shift)
    return mean + moved * deviation, (var + wider * deviation.square()).clamp(min=0)


def _uneven(shares: Tensor, rows: Tensor) -> Tensor:
    """U: how much likelier than by balanced classes two of these images are of one class."""
    same = (rows * shares.square().sum() - 1) / (rows - 1).clamp(min=1)
    return (same - 1 / len(shares)).clamp(min=0)
