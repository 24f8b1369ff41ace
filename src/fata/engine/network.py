"""A model, and the three ways to run it: `predict`, `forward` and `tapped`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fata._torch import version
from fata.distributed.ranks import SINGLE, Ranks
from fata.engine.state import Pass
from fata.methods.base import Memory, Method
from fata.methods.fata import Fata, Perturb
from fata.methods.feature import FeatureMethod
from fata.network.blend import StreamStatistics, Witness
from fata.network.head import Head
from fata.network.logits import logits_of
from fata.network.norms import BatchStatistics, batch_norms, has_running, spare_group_norms
from fata.network.tap import Tap


class Network:
    """A model with the batch statistics of its method and FATA's tap; counts the rows it is run on.

    Args:
        model: maps images to logits.
        method: says which statistics BatchNorm uses, and whether it needs the classifier.
        plus: FATA, whose layer is tapped; or None.
        count: is told the rows of every pass.
    """

    def __init__(
        self, model: nn.Module, method: Method, plus: Fata | None, count: Callable[..., None]
    ) -> None:
        self.model, self._count = model, count
        self.tap = Tap(model, plus.layer, self._call) if plus else None
        self.head = Head(model, method.head) if isinstance(method, FeatureMethod) else None
        self.coupled = bool(batch_norms(model)) and method.batch_statistics
        self.joint = self.coupled and plus is not None and plus.bn_stats == "joint"
        self.blend = StreamStatistics(model) if method.blend and has_running(model) else None
        self.statistics: BatchStatistics | None = self.blend
        if method.batch_statistics and self.blend is None:
            self.statistics = BatchStatistics(model, method.prior)
        self._witness: Witness | None = None
        self.group: Ranks = SINGLE
        self._spared = spare_group_norms(model)
        self._overwrites: bool | None = None  # whether the model changes its images; None: unknown

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        tensors = chain(self.model.parameters(), self.model.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    # -- the three ways -----------------------------------------------------------------------

    def predict(self, images: Tensor) -> Tensor:
        """Logits of the images in full precision, without a gradient."""
        with torch.no_grad():
            return self.forward(images)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images in full precision, with a gradient where it is enabled.

        A rank without images passes a stand-in, so that it meets the others.
        """
        if not len(images):
            with self.group.standing_in():
                return self.forward(stand_in(images))[:0]
        return self.featured(images).logits

    def featured(self, images: Tensor) -> Pass:
        """The same, with the penultimate feature where the method needs it."""
        self.passed(rows_forward=len(images))
        logits = logits_of(self._call(images), len(images))
        return Pass(logits, features=self._features(len(images)))

    def tapped(self, images: Tensor, perturbation: Callable[[Tensor], Perturb]) -> Pass:
        """A pass that also knows z's perturbation and, where gradients flow, the tail behind it."""
        if self.tap is None:
            return self.featured(images)
        rows = len(images)
        self.passed(rows_forward=rows)
        tail = self.joint or torch.is_grad_enabled()
        recording = self.tap.record(images) if tail else self.tap.feature(images)
        z, features = recording.z, self._features(rows)
        perturb = perturbation(z)
        if self.joint:
            self.passed(rows_tail=2 * rows)
            twice = torch.arange(rows, device=z.device).repeat(2)
            both = logits_of(recording.tail(torch.cat((z, perturb(z))), twice), 2 * rows)
            return Pass(both[:rows], lambda _: both[rows:], perturb, self._features(rows))

        def augmented(some: Tensor | None) -> Tensor:
            perturbed = perturb(z) if some is None else perturb.at(some)(z[some])
            self.passed(rows_tail=len(perturbed))
            logits = logits_of(recording.tail(perturbed, some), len(perturbed))
            self._features(rows)  # of z', which nobody asks for
            return logits

        return Pass(logits_of(recording.output, rows), augmented, perturb, features)

    def check_head(self, images: Tensor) -> None:
        """At the first batch: raise if the method's classifier is not the model's."""
        if self.head:
            self.head.check(self._call, images)

    def _features(self, rows: int) -> list[Tensor]:
        """The penultimate feature of the last pass, of its first rows."""
        return [self.head.take()[:rows]] if self.head else []

    def passed(self, **rows: int) -> None:
        """Count rows of a pass."""
        if self.group.real:
            self._count(**rows)

    @contextmanager
    def counted_apart(self) -> Iterator[dict[str, int]]:
        """The rows that are passed inside are given to the caller instead."""
        count, counts = self._count, Counter[str]()
        try:
            self._count = lambda **rows: counts.update(rows)
            yield counts
        finally:
            self._count = count

    def learn(self, images: Tensor) -> Tensor:
        """Logits of a first pass, which finds what the tap must know of the model."""
        if self.tap is None or not len(images):
            return self.predict(images)
        return logits_of(self.tap.learn(images), len(images))

    # -- what BatchNorm normalises with -------------------------------------------------------

    def running_statistics(self) -> AbstractContextManager[None]:
        """BatchNorm uses its running statistics inside the context."""
        return self.statistics.suspended() if self.statistics else nullcontext()

    def statistics_of(self, rows: Tensor | None) -> AbstractContextManager[None]:
        """BatchNorm uses the statistics of some rows; None: of all."""
        if rows is None or self.statistics is None:
            return nullcontext()
        return self.statistics.of(rows)

    def local_statistics(self) -> AbstractContextManager[None]:
        """BatchNorm uses this rank's rows alone."""
        return self.statistics.apart() if self.statistics else nullcontext()

    def observing(self, given: Memory, rows: int) -> AbstractContextManager[None]:
        """The first pass inside, of a batch of so many rows, has a part in blended statistics."""
        return self.blend.observing(given, rows) if self.blend else nullcontext()

    def observed(self, logits: Tensor) -> Memory:
        """The memory of the blended statistics with the batch that is observed."""
        return self.blend.observed(logits.detach()) if self.blend else {}

    def write(self, norm: Memory) -> None:
        """Put the blended statistics of a memory in force."""
        if self.blend:
            self.blend.write(norm)

    @property
    def reference(self) -> StreamStatistics | None:
        """The statistics of the source model beside the adapted one; None: they are the same."""
        return self.blend or self._witness

    def refer(self) -> None:
        """The source model is run beside the adapted one from now on."""
        if self.coupled and self.blend is None and has_running(self.model):
            self._witness = Witness(self.model)
            self._witness.join(self.group)

    @contextmanager
    def referring(self, statistics: AbstractContextManager[None]) -> Iterator[None]:
        """BatchNorm uses these of the reference inside the context, and none of its own."""
        own = self.running_statistics() if self._witness else nullcontext()
        with own, statistics:
            yield

    @property
    def _all_statistics(self) -> list[BatchStatistics]:
        return [one for one in (self._witness, self.statistics) if one is not None]

    def settle(self) -> None:
        """Undo what an interrupt may have left of the contexts above."""
        for one in self._all_statistics:
            one.settle()

    def join(self, group: Ranks) -> None:
        """Share every batch with other ranks."""
        self.group = group
        for one in self._all_statistics:
            one.join(group)

    def move(self, device: torch.device) -> None:
        """Follow the model to another device."""
        if self.reference:
            self.reference.move(device)

    def close(self) -> None:
        """Give the model its own statistics back, and take all hooks off."""
        for one in self._all_statistics:
            one.remove()
        for handle in self._spared:
            handle.remove()
        if self.head:
            self.head.remove()

    # -- inside -------------------------------------------------------------------------------

    def check(self, images: Tensor) -> None:
        """Raise for what is no batch of images that the model could take."""
        if not isinstance(images, Tensor):
            raise TypeError(
                f"images must be a tensor, got {type(images).__name__}: torch.as_tensor(x), or "
                f"torch.stack(x) for a list of tensors, makes one."
            )
        if not images.is_floating_point():
            raise TypeError(
                f"images are {images.dtype}: give floating-point images, preprocessed as the model "
                f"expects them (from bytes: images / 255, then mean and std)."
            )
        row, rows = math.prod(images.shape[1:]), images.shape[:1].numel()
        if images.ndim < 2 or not row or (not rows and self.group is SINGLE):
            raise ValueError(
                f"images of shape {tuple(images.shape)}: give a batch of at least one image."
            )
        if images.ndim == 3 and any(isinstance(m, nn.Conv2d) for m in self.model.modules()):
            raise ValueError(
                f"images of shape {tuple(images.shape)} are one image: give a batch, image[None]."
            )
        if images.device != self.device:
            raise ValueError(
                f"images are on {images.device} and the model on {self.device}: move one of them."
            )

    def _call(self, images: Tensor) -> Any:
        """The model's output; from a copy, where the model overwrites the images it is given."""
        if self._overwrites is None:
            copy = images.clone()
            output = self._first_output(copy)
            self._overwrites = version(copy) > 0
            return output
        return self._output(images.clone() if self._overwrites else images)

    def _output(self, images: Tensor) -> Any:
        if self.head:
            self.head.forget()
        try:
            return self.model(images)
        except BaseException:
            for one in self._all_statistics:
                one.restore()
            raise

    def _first_output(self, images: Tensor) -> Any:
        """The first output; if it fails because of another precision, say so."""
        try:
            return self._output(images)
        except RuntimeError as error:
            own = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
            if images.dtype in own or torch.is_autocast_enabled(images.device.type):
                raise
            raise TypeError(
                f"images are {images.dtype} and the model is {', '.join(map(str, own))}: give "
                f"images.to(...) of that type, or call it within torch.autocast."
            ) from error


def stand_in(images: Tensor) -> Tensor:
    """One black image."""
    return images.new_zeros(1, *images.shape[1:])
