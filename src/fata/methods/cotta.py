"""CoTTA: continual test-time adaptation (Wang et al., CVPR 2022), its variant for ImageNet.

    t        =  teacher(x), or the mean of 32 augmented views of it where the source model's mean
                confidence on the batch is under 0.1
    L        =  mean_B  -1/2 sum p_t log p_s  -  1/2 sum p_s log p_t
    teacher <-  0.999 teacher + 0.001 student
    student <-  source, each weight with probability 0.001

Every weight and bias trains, by SGD with Nesterov momentum at 0.01; the prediction is t. The views
are made in [0, 1]: images that were normalised need `mean` and `std`. The teacher's pass over the
plain images is left out where the views replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fata.methods.base import CustomStep, Engine, in_range
from fata.methods.losses import soft_cross_entropy
from fata.methods.pixels import Pixels, Rng


@dataclass(frozen=True)
class Cotta(CustomStep):
    """A student learns from a slow teacher that sees augmented views; weights drift back.

    Args:
        threshold: confidence of the source model under which the teacher averages views.
        views: number of views.
        decay: how much of the teacher stays at each batch.
        restore: probability of a weight to return to its source value, at each batch.
        mean: what the images were normalised with; None: they are in [0, 1].
        std: likewise.
        augment: `augment(images)` gives a view instead of CoTTA's own augmentation.
    """

    threshold: float = 0.1
    views: int = 32
    decay: float = 0.999
    restore: float = 0.001
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    augment: Callable[[Tensor], Tensor] | None = None

    name: ClassVar[str] = "cotta"
    params: ClassVar[str | None] = "weights"

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        in_range(self, "threshold", 0, 1)
        in_range(self, "views", 1, whole=True)
        Pixels(self.mean, self.std)  # refuses one without the other
        in_range(self, "decay", 0, 1)
        in_range(self, "restore", 0, 1)

    def fixed_rate(self, vit: bool) -> float:
        """0.01, whatever the network and the batch."""
        return 0.01

    def prediction_weights(self, engine: Engine) -> Tensor:
        """The teacher's weights."""
        return engine.state.host.get("teacher", engine.source)

    def step(self, engine: Engine, images: Tensor) -> Tensor:
        """Ask the teacher, learn from it, move it, restore."""
        if self.augment is None:
            Pixels(self.mean, self.std).of(images)  # not only when the first view is made
        state, source, group = engine.state, engine.source, engine.group
        rows = group.rows(len(images))
        student, teacher = state.theta, self.prediction_weights(engine)
        with engine.theta.at(source, back=student):
            confidence = engine.predict(images).softmax(1).amax(1)
            confident = group.mean(confidence) >= self.threshold
        with engine.theta.at(teacher, back=student):
            target = engine.predict(images) if confident else self._averaged(engine, images)
        with torch.enable_grad():
            logits = engine.forward(images)
            loss = soft_cross_entropy(logits, target) + soft_cross_entropy(target, logits)
            gradient = group.sum(engine.theta.gradient(loss.sum() / rows / 2))
        state.count(host=rows, rows_backward=len(images))
        engine.update(gradient, engine.rate(rows), nesterov=True)
        state.host = {"teacher": self.decay * teacher + (1 - self.decay) * state.theta}
        draws = torch.rand(
            source.shape, generator=engine.generator("restore"), device=source.device
        )
        state.theta = torch.where(draws < self.restore, source, state.theta)
        engine.theta.write(state.theta)
        return target

    def _averaged(self, engine: Engine, images: Tensor) -> Tensor:
        augment = self.augment
        if augment is None:
            from fata.methods.views import cotta_view  # torchvision takes seconds to import

            place = engine.group.place(len(images))
            rng = Rng(engine.generator("views", "cpu"), place)
            space = Pixels(self.mean, self.std)
            pixels = space.of(images)

            def augment(_: Tensor) -> Tensor:
                return space.back(cotta_view(pixels, rng))

        views = (augment(images) if len(images) else images for _ in range(self.views))
        return torch.stack([engine.predict(view) for view in views]).mean(0)
