"""Small networks of each kind of normalisation, images, and adapters on them, for the checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fata.adapter import Adapter
from fata.methods import Norm, Source
from fata.methods.base import CustomStep, Method
from fata.methods.fata import Fata
from fata.methods.losses import entropy
from fata.methods.selection import reliable
from fata.network.norms import BatchStatistics, batch_norms
from fata.zoo import tiny

ROWS = (16, 1)
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A method on a network, with batches of so many rows."""

    method: Method
    plus: Fata | None
    net: str
    rows: int
    dtype: torch.dtype = torch.float32

    def in_double(self) -> Case:
        """The same in float64, where two ways to compute the same agree on every processor."""
        return dataclasses.replace(self, dtype=torch.float64)

    def adapter(self, **changes: Any) -> Adapter:
        """A new adapter on a new copy of the network."""
        given = {"method": self.method, "plus": self.plus, "lr": 2e-3, "seed": 1, "guard": None}
        changes = {**given, **changes}
        if changes["method"].wants_fisher:
            changes["fisher_data"] = [images(8, seed=6).to(self.dtype)]
        return Adapter(self.network(), **changes)

    def network(self) -> nn.Module:
        """A new copy of the network; one whose statistics are blended was trained on the images."""
        model = network(self.net).to(self.dtype)
        return fit_statistics(model) if self.method.blend else model

    def plain(self) -> Adapter:
        """An adapter that learns nothing, with the same BatchNorm statistics."""
        norm = Norm(blend=self.method.blend)
        return self.adapter(method=norm if self.method.batch_statistics else Source(), plus=None)

    def stream(self) -> list[Tensor]:
        """Batches of images that are partly easy and partly hard for the network."""
        every = images(48 if self.rows > 1 else 10).to(self.dtype)
        return list(torch.split(every, self.rows))

    @property
    def common(self) -> bool:
        """Whether the method takes the common step."""
        return not isinstance(self.method, CustomStep)

    @property
    def learns(self) -> bool:
        """Whether the method adapts anything at all."""
        return self.method.params is not None or self.plus is not None


def cases(method: Method, plus: Fata | None = None) -> Iterator[Case]:
    """A method on every small network, with batches of 16 rows and of one."""
    return (Case(method, plus, net, rows) for net in tiny.NAMES for rows in ROWS)


def images(n: int, seed: int = 7) -> Tensor:
    """Blurred noise of varying contrast, (n, 3, 16, 16), in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    fine = torch.rand(n, 3, 16, 16, generator=generator)
    mix = torch.rand(n, 1, 1, 1, generator=generator)
    return mix * nn.functional.interpolate(coarse, 16, mode="bilinear") + (1 - mix) * fine


def network(name: str) -> nn.Module:
    """A small network that is confident on some images and not on others."""
    return deepcopy(_calibrated(name))


def fit_statistics(model: nn.Module) -> nn.Module:
    """The model with BatchNorm's running statistics as if it was trained on these images."""
    layers = batch_norms(model)
    for layer in layers:
        layer.momentum = 1.0
        layer.train()
    with torch.no_grad():
        model(images(64).to(next(model.parameters())))
    for layer in layers:
        layer.momentum = 0.1
        layer.eval()
    return model


@cache
def _calibrated(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = tiny.build(name, CLASSES).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    head = model.fc if name.startswith("resnet") else model.head
    assert isinstance(head, nn.Linear)
    statistics = BatchStatistics(model)
    with torch.no_grad():
        logits = model(images(64))
        head.bias.sub_(logits.mean(0))  # every class has its turn
        centred, scale = logits - logits.mean(0), 1.0
        for _ in range(60):  # until half of the rows are reliable
            confident = reliable(entropy(scale * centred), 0.4, CLASSES).float().mean() > 0.5
            scale *= 0.97 if confident else 1.1
        head.weight.mul_(scale)
        head.bias.mul_(scale)
    statistics.remove()
    return model
