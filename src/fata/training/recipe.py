"""How a source model is trained: the recipe, its optimizer and its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from fata.engine.rates import is_transformer_like

MOMENTUM = 0.9
_OPTIMIZERS = ("sgd", "adamw")


class TrainingError(ValueError):
    """A recipe that cannot train, or a training that diverged."""


@dataclass(frozen=True)
class Recipe:
    """How a source model is trained; `Recipe.suiting` has the values for a network.

    Args:
        optimizer: `sgd` with momentum 0.9, or `adamw`.
        lr: peak learning rate of the network, after a linear warm-up and before a cosine decay.
        weight_decay: of matrices and convolution filters.
        head: factor of the new classifier's learning rate.
        epochs: passes over the images.
        batch_size: images a step, at most; an epoch is split into equal batches.
        warmup: share of the steps.
        smoothing: label smoothing.
        crop: smallest share of an image that a random crop keeps.
        held_out: share of each class that is not trained on.
        seed: of the split, the new classifier, the order, the crops and any dropout.
    """

    optimizer: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 1e-4
    head: float = 10.0
    epochs: int = 30
    batch_size: int = 64
    warmup: float = 0.05
    smoothing: float = 0.1
    crop: float = 0.25
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise for values that cannot train."""
        accepted = {
            "optimizer": (self.optimizer in _OPTIMIZERS, f"one of {', '.join(_OPTIMIZERS)}"),
            "lr": (0 < self.lr < math.inf, "a positive number"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "a number, at least 0"),
            "head": (0 < self.head < math.inf, "a positive number"),
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch_size": (self.batch_size >= 2, "at least 2"),
            "warmup": (0 <= self.warmup <= 1, "a share, 0 to 1"),
            "smoothing": (0 <= self.smoothing < 1, "at least 0 and below 1"),
            "crop": (0 < self.crop <= 1, "a share, above 0 and at most 1"),
            "held_out": (0 < self.held_out < 1, "a share, above 0 and below 1"),
        }
        for name, (fine, expected) in accepted.items():
            if not fine:
                raise TrainingError(f"Recipe({name}={getattr(self, name)!r}): give {expected}.")

    @classmethod
    def suiting(cls, model: nn.Module, **fields: Any) -> Recipe:
        """The recipe for a network, with the fields that are given and not None."""
        if is_transformer_like(model):
            start = cls(optimizer="adamw", lr=3e-5, weight_decay=0.05)
        else:
            start = cls()
        given = {name: value for name, value in fields.items() if value is not None}
        return replace(start, **given)

    def make_optimizer(self, model: nn.Module, head: set[str]) -> torch.optim.Optimizer:
        """Without weight decay for norms, biases, tokens and positions; the head learns faster."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            matrix = parameter.ndim > 1 and len(parameter) > 1
            decay = self.weight_decay if matrix else 0.0
            rate = self.lr * (self.head if name in head else 1)
            groups.setdefault((rate, decay), []).append(parameter)
        settings = [
            {"params": members, "lr": rate, "weight_decay": decay}
            for (rate, decay), members in groups.items()
        ]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(settings)
        return torch.optim.SGD(settings, momentum=MOMENTUM)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        """A linear warm-up, then a cosine to 0; one step a batch."""
        warm = max(1, round(self.warmup * steps))
        rise = LinearLR(optimizer, 1 / warm, total_iters=warm - 1)
        fall = CosineAnnealingLR(optimizer, max(1, steps - warm))
        return SequentialLR(optimizer, [rise, fall], [warm])
