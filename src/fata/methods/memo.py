"""MEMO: test-time robustness via adaptation and augmentation (Zhang et al., NeurIPS 2022).

    L(x)  =  H( mean_n p(view_n(x)) ),     one step from the source weights, then predict x

One image at a time, every parameter; the next image starts at the source again. BatchNorm mixes its
running statistics with those of the pass, 16 : 1. Convolutional networks step by SGD without
momentum (2.5e-4), transformers by AdamW (1e-5, decay 0.01), as in the paper. The views are made in
[0, 1]: images that were normalised need `mean` and `std`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fata.methods.base import CustomStep, Engine, in_range
from fata.methods.losses import marginal_entropy
from fata.methods.pixels import Pixels, Rng

SMALL = 3 * 64 * 64  # values of an image up to which a GPU is slower at making views of it


@dataclass(frozen=True)
class Memo(CustomStep):
    """Makes the mean prediction over views of one image sharper, then predicts it.

    Args:
        views: number of views.
        prior: weight of BatchNorm's running statistics against those of the pass.
        optimizer: `sgd`, `adamw`, or `auto` by the kind of network.
        mean: what the images were normalised with; None: they are in [0, 1].
        std: likewise.
        augment: `augment(image, views)` gives the views, (views, 3, H, W), instead of AugMix.
    """

    views: int = 64
    prior: float = 16.0
    optimizer: str = "auto"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    augment: Callable[[Tensor, int], Tensor] | None = None

    name: ClassVar[str] = "memo"
    params: ClassVar[str | None] = "every"
    episodic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise for fields out of range."""
        in_range(self, "views", 1, whole=True)
        Pixels(self.mean, self.std)  # refuses one without the other
        in_range(self, "prior", 0)
        if self.optimizer not in ("auto", "sgd", "adamw"):
            raise ValueError(
                f"Memo(optimizer={self.optimizer!r}): choose 'auto', 'sgd' or 'adamw'."
            )

    def fixed_rate(self, vit: bool) -> float:
        """The paper's rate for the kind of network."""
        return 1e-5 if vit else 2.5e-4

    def step(self, engine: Engine, images: Tensor) -> Tensor:
        """Each image by itself, from the source and back to it: no rank needs another."""
        rows, here = engine.group.place(len(images))
        stepped = torch.zeros((), dtype=torch.int64, device=engine.device)
        logits = []
        with engine.local_statistics():
            for row, image in zip(range(rows)[here], images, strict=True):
                prediction, moves = self._one(engine, image[None], row)
                logits.append(prediction)
                stepped += moves
            whole = torch.cat(logits) if logits else engine.predict(images)
        stepped = engine.group.sum(stepped)
        engine.state.count(host=rows, stepped=stepped, dropped=rows - stepped)
        return whole

    def _one(self, engine: Engine, image: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """The prediction of an image, and whether its gradient moved anything."""
        rng = Rng(engine.generator(f"views of row {row}", "cpu"))
        views = self._views(image, rng)
        with torch.enable_grad():
            gradient = engine.theta.gradient(marginal_entropy(engine.forward(views)))
        engine.state.count(rows_backward=len(views))
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
        with engine.theta.at(self._descend(engine, gradient), back=engine.source):
            return engine.predict(image), gradient.any()

    def _views(self, image: Tensor, rng: Rng) -> Tensor:
        if self.augment is not None:
            return self.augment(image[0], self.views)
        from fata.methods.views import augmix_view  # torchvision takes seconds to import

        space = Pixels(self.mean, self.std)
        pixels = space.of(image if image.numel() > SMALL else image.cpu())
        views = torch.cat([augmix_view(pixels, rng) for _ in range(self.views)])
        return space.back(views.to(image.device))

    def _descend(self, engine: Engine, gradient: Tensor) -> Tensor:
        """The first step of SGD or AdamW: no momentum has gathered yet."""
        lr, source = engine.rate(1), engine.source
        if self.optimizer == "adamw" or (self.optimizer == "auto" and engine.vit):
            return source - lr * (0.01 * source + gradient / (gradient.abs() + 1e-8))
        return source - lr * gradient
