"""A loaded model: the network, its preprocessing and the origin of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fata._files import digest
from fata.methods import parse
from fata.zoo.preprocess import Preprocess


class ZooError(RuntimeError):
    """A model that cannot be loaded: unknown name, unreachable weights, or a wrong file."""


@dataclass(frozen=True)
class Weights:
    """Which weights a model has.

    Args:
        tag: their full name, such as `timm:resnet50_gn.a1h_in1k`.
        origin: their file, URL or id on the hub.
        sha256: of the tensors, its first 32 digits; the same for equal weights in any file.
    """

    tag: str
    origin: str
    sha256: str

    @classmethod
    def of(cls, model: nn.Module, tag: str, origin: str) -> Weights:
        """The weights that a model has now; hashed at once, as a model may be adapted later."""
        tensors = model.state_dict()
        kept = {n: t for n, t in tensors.items() if not n.endswith("num_batches_tracked")}
        return cls(tag, origin, digest(kept))


@dataclass(frozen=True)
class Loaded:
    """What `fata.zoo.load` returns.

    Args:
        name: as given to `load`.
        model: in eval mode and float32; it takes images from `preprocess`.
        preprocess: resize, crop, mean and std.
        classes: number of classes.
        weights: tag, origin and hash.
        presets: fields that suit the model, by host (`eata`) or by whole spec (`eata+fata`).
        labels: names of the classes, if known.
        recipe: how the model was trained, if by `fata train-source`.
    """

    name: str
    model: nn.Module = field(repr=False)
    preprocess: Preprocess
    classes: int
    weights: Weights
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    labels: tuple[str, ...] = field(default=(), repr=False)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, spec: str, batch: int = 64) -> dict[str, Any]:
        """Fields for `fata.adapt(loaded.model, spec, **loaded.settings(spec))`.

        Methods that augment images get the mean and std. Presets of the whole spec override those
        of the host. Their learning rate is for batches of 64 and scaled down for smaller ones, as
        in the paper.
        """
        method, _ = parse(spec)
        pixels = {"mean": self.preprocess.mean, "std": self.preprocess.std}
        views = pixels if hasattr(method, "mean") else {}
        host = spec.partition("+")[0]
        own = {**self.presets.get(host, {}), **self.presets.get(spec, {})}
        if "lr" in own:
            own["lr"] *= min(1.0, batch / 64)
        return {**views, **own}

    def __str__(self) -> str:
        use, weights = self.preprocess, self.weights
        return (
            f"{self.name}: weights {weights.tag} ({weights.sha256[:8]}), {self.classes} classes, "
            f"{use.size} x {use.size} after {'squash' if use.squash else 'resize'} to {use.resize} "
            f"({use.interpolation}), mean {use.mean}, std {use.std}"
        )
