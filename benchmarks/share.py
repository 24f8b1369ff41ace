"""Networks and settings by which a given share of the rows of a batch is selected.

Speed depends on how many rows are learned from, hardly on what they show: the images are noise, the
weights random, and thresholds are put where they select as many rows as is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean
from typing import Any

import timm
import torch
from torch import Tensor, nn

import fata
from benchmarks.archive import kept
from fata.methods.losses import entropy
from fata.methods.selection import shuffle_patches
from fata.network.norms import batch_norms
from fata.zoo import mini
from fata.zoo.sources import architecture

PATCHES = 4


@dataclass(frozen=True)
class Share:
    """Of the rows: what the host selects, what DeYO looks at again, what FATA selects."""

    host: float
    reliable: float
    plus: float

    @classmethod
    def of_all(cls, share: float) -> Share:
        """The same for all."""
        return cls(share, share, share)


def embedded(model: str, spec: str) -> Share:
    """The mean over the cells of the embedded benchmark, 15 corruptions in three orders."""
    found = []
    for record in kept("normal"):
        if (record.protocol["model"], record.protocol["method"]) == (model, spec):
            result, host = record.result, record.protocol["host"]["name"]
            rows, chosen = result["rows"], result["counts"]["selected"]
            sure = [sum(pair) for pair in zip(*result["entropies"].values(), strict=True)]
            reliable = sum(sure[: len(sure) // 2])  # a histogram of H / ln C: those below 0.5
            found.append((chosen[host] / rows, reliable / rows, chosen.get("fata", 0) / rows))
    if not found:
        raise ValueError(f"the embedded benchmark has no cell of {spec!r} with {model!r}.")
    return Share(*(mean(some) for some in zip(*found, strict=True)))


def build(name: str, classes: int | None = None) -> tuple[nn.Module, int]:
    """A network with random weights, and the side of its images."""
    if name in fata.tiny.NAMES:
        model, side = fata.tiny.build(name, classes or 10), 16
    elif name in mini.NAMES:
        model, side = mini.build(name, classes or 10), 32
    elif timm.is_model(name):
        model = timm.create_model(name, num_classes=classes or 1000)
        side = model.default_cfg["input_size"][-1]
    else:
        arch = architecture(name)
        model, side = arch.build(classes or 1000), arch.preprocess.size
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # places of patches, heads
            nn.init.normal_(parameter)
    return model, side


def spread(model: nn.Module, images: Tensor) -> nn.Module:
    """Let the network answer the images in many ways, half of them surely.

    BatchNorm's running statistics become those of the images: the guard finds nothing to mend.
    """
    if len(images) == 1:  # has no other answers to differ from
        images = torch.cat((images, torch.randn_like(images.expand(7, *images.shape[1:]))))
    norms = batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        for norm in norms:
            norm.train().momentum = 1.0
        model(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        logits = answers(model.eval(), images)
        middle, factor = logits.mean(0), 1.0
        while entropy(factor * (logits - middle)).median() > 0.45 * math.log(logits.shape[1]):
            factor *= 1.1
        head.bias -= middle
        head.bias *= factor
        head.weight *= factor
    return model


def answers(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of the images, with BatchNorm on the batch."""
    adapter = fata.adapt(model, "norm")
    logits = adapter(images)
    adapter.unwrap()
    return logits


def settings(model: nn.Module, spec: str, images: Tensor, share: Share) -> dict[str, Any]:
    """Fields of a method that make it select a share of these images, and hardly move."""
    host, _, plus = spec.partition("+")
    logits = answers(model, images)
    sure = entropy(logits) / math.log(logits.shape[1])
    fields: dict[str, Any] = {}
    if host == "eata":
        threshold = between(sure, share.host)
        fields = {"threshold": threshold, "redundancy": 2.0, "fisher_alpha": 0.0}
    elif host == "sar":
        fields = {"threshold": between(sure, share.host), "rho": 1e-9, "recovery": 0.0}
    elif host == "deyo":
        threshold = between(sure, share.reliable)
        drop = _plpd(model, images[sure < threshold], logits[sure < threshold])
        least = -between(-drop, min(1.0, share.host / share.reliable))
        fields = {"threshold": threshold, "plpd_threshold": least, "shuffle": order}
    if plus:
        fields["fata_threshold"] = between(sure, share.plus)
    return {**fields, "lr": 1e-30}


def between(values: Tensor, share: float) -> float:
    """A number that a share of the values is below, at least one of them; at most 1."""
    ordered, count = values.sort().values, max(1, round(share * len(values)))
    return ordered[count - 1 : count + 1].mean().item() if count < len(ordered) else 1.0


def order(rows: int, patches: int) -> Tensor:
    """The same order of patches each time."""
    draws = torch.rand(rows, patches**2, generator=torch.Generator().manual_seed(0))
    return draws.argsort(1)


def _plpd(model: nn.Module, images: Tensor, logits: Tensor) -> Tensor:
    """How far the probability of each row's answer falls when its patches are shuffled."""
    moved = order(len(images), PATCHES).to(images.device)
    shuffled = answers(model, shuffle_patches(images, moved, PATCHES))
    label = logits.argmax(1, keepdim=True)
    before, after = (some.softmax(1).gather(1, label)[:, 0] for some in (logits, shuffled))
    return before - after
