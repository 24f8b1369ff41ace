"""Streams that could break a model that adapts; `benchmarks.stress` runs them.

Each yields batches of normalised images, with labels where they count. An ordeal may look at the
adapter that meets it: the adversary does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fata
from fata.bench.cell import FISHER_IMAGES
from fata.data import CLEAN

CORRUPTION, OTHER = "gaussian_noise", "fog"
CLASS = 0  # the one class, and the one that the adversary wants to be answered
BATCH = 64
TURNS = 4  # corruptions met, by turns
SINGLES = 2000  # images that come one by one, at most
NORM = 8 / 255  # of the adversary's change to a pixel, at most
STEPS = 5  # in which it is found
SURE = 0.7  # how sure the answer shall be: entropy's slope is steep there, and 0 at 1


class Batch(NamedTuple):
    """What comes at once."""

    images: Tensor
    labels: Tensor | None  # None: accuracy is not asked for
    part: str = ""  # of the stream; each has an accuracy of its own


@dataclass(frozen=True)
class Scene:
    """A network, and what can be shown to it.

    Args:
        model: name of an embedded network.
        data: for `fata.data.open`.
        images: so many of a corruption; None: all.
        batches: of one class; a tenth as many of grey and of noise.
        device: where all of it is.
    """

    model: str
    data: str = "embedded"
    images: int | None = None
    batches: int = 2000
    device: str = "cpu"

    @cached_property
    def loaded(self) -> fata.zoo.Loaded:
        """The network, on the device."""
        loaded = fata.zoo.load(self.model)
        loaded.model.to(self.device)
        return loaded

    @cached_property
    def fisher(self) -> dict[str, Tensor] | None:
        """EATA's, of the clean images in the package."""
        clean = fata.stream(fata.data.open("embedded"), domains=[CLEAN], images=FISHER_IMAGES)
        batches = (self.normalise(batch.images) for batch in clean.serve(self.device))
        adapter = fata.adapt(self.loaded.model, "eata", fisher_data=batches)
        fisher = adapter.fisher
        adapter.unwrap()
        return fisher

    def normalise(self, pixels: Tensor) -> Tensor:
        """What the network takes."""
        return self.loaded.preprocess.normalise(pixels)

    def pixels(self, corruption: str) -> tuple[Tensor, Tensor]:
        """All images of a corruption, shuffled, in [0, 1], and their labels."""
        return _pixels(self.data, self.images, self.device, corruption)

    def shuffled(
        self, corruption: str = CORRUPTION, batch: int = BATCH, part: str = ""
    ) -> Iterator[Batch]:
        """An ordinary stream."""
        for pixels, labels in zip(
            *(some.split(batch) for some in self.pixels(corruption)), strict=True
        ):
            yield Batch(self.normalise(pixels), labels, part)


@cache
def _pixels(data: str, images: int | None, device: str, corruption: str) -> tuple[Tensor, Tensor]:
    stream = fata.stream(fata.data.open(data), domains=[corruption], images=images)
    batches = list(stream.serve(device))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def plain(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """A shuffled corruption."""
    return scene.shuffled()


def one_class(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """The corrupted images of one class again and again, then a shuffled corruption."""
    pixels, labels = scene.pixels(CORRUPTION)
    own = pixels[labels == CLASS]
    draw = torch.Generator().manual_seed(0)
    for _ in range(scene.batches):
        rows = torch.randint(len(own), (BATCH,), generator=draw).to(own.device)
        yield Batch(scene.normalise(own[rows]), torch.full_like(rows, CLASS), "one class")
    yield from scene.shuffled(part="afterwards")


def constant(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """One grey image again and again, then a shuffled corruption."""
    grey = torch.full_like(scene.pixels(CORRUPTION)[0][:BATCH], 0.5)
    return chain(_unlabelled(scene, lambda: grey), scene.shuffled(part="afterwards"))


def noise(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """Pixels that mean nothing, then a shuffled corruption."""
    draw = torch.Generator().manual_seed(0)
    side = scene.loaded.preprocess.size

    def drawn() -> Tensor:
        return torch.rand(BATCH, 3, side, side, generator=draw).to(scene.device)

    return chain(_unlabelled(scene, drawn), scene.shuffled(part="afterwards"))


def turning(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """One corruption, then another, and both again, without a new start."""
    for turn in range(TURNS):
        yield from scene.shuffled((CORRUPTION, OTHER)[turn % 2])


def single(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """Image by image."""
    for number, batch in enumerate(scene.shuffled(batch=1)):
        if number == SINGLES:
            return
        yield batch


def adversary(scene: Scene, adapter: fata.Adapter, first: int = 0) -> Iterator[Batch]:
    """Every other batch, from the `first` on, is crafted against the model as it stands."""
    chunks = zip(*(some.split(BATCH) for some in scene.pixels(CORRUPTION)), strict=True)
    for number, (pixels, labels) in enumerate(chunks):
        if number % 2 != first:
            yield Batch(scene.normalise(pixels), labels)
        elif adapter.trainable:  # one that learns nothing would not mind
            yield Batch(crafted(scene, adapter.model, pixels), None)


def adversary_late(scene: Scene, adapter: fata.Adapter) -> Iterator[Batch]:
    """The same, from the second batch on."""
    return adversary(scene, adapter, first=1)


def crafted(scene: Scene, model: nn.Module, pixels: Tensor) -> Tensor:
    """Images that the model takes for one class, surely enough to learn that there is no other."""
    low, high = (pixels - NORM).clamp(min=0), (pixels + NORM).clamp(max=1)
    wanted = torch.full(
        (len(pixels), scene.loaded.classes), (1 - SURE) / (scene.loaded.classes - 1)
    ).to(pixels)
    wanted[:, CLASS] = SURE
    for _ in range(STEPS):
        with torch.enable_grad():
            pixels = pixels.detach().requires_grad_()
            loss = F.cross_entropy(model(scene.normalise(pixels)), wanted)
            (slope,) = torch.autograd.grad(loss, pixels)
        pixels = (pixels.detach() - 2 * NORM / STEPS * slope.sign()).clamp(low, high)
    return scene.normalise(pixels)


def _unlabelled(scene: Scene, images: Callable[[], Tensor]) -> Iterator[Batch]:
    for _ in range(max(1, scene.batches // 10)):
        yield Batch(scene.normalise(images()), None)


@dataclass(frozen=True)
class Ordeal:
    """A stream, and at which rate it is met."""

    stream: Callable[[Scene, fata.Adapter], Iterator[Batch]]
    faster: float = 1.0  # than the package's own rate
    batch: int = BATCH  # that the rate is for

    def settings(self, scene: Scene, spec: str) -> dict[str, Any]:
        """Fields of a method, by which it meets this."""
        fields = scene.loaded.settings(spec, self.batch)
        if spec.startswith("eata"):
            fields["fisher_data"] = scene.fisher
        return {**fields, "lr": fields["lr"] * self.faster} if "lr" in fields else fields


ORDEALS = {
    "rate-10": Ordeal(plain, faster=10),
    "rate-100": Ordeal(plain, faster=100),
    "one-class": Ordeal(one_class),
    "constant": Ordeal(constant),
    "noise": Ordeal(noise),
    "turning": Ordeal(turning),
    "single": Ordeal(single, batch=1),
    "adversary": Ordeal(adversary),
    "adversary-late": Ordeal(adversary_late),
}
