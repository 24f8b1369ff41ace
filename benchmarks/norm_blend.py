"""BatchNorm's statistics, nothing learned: `python -m benchmarks.norm_blend --domains clean fog`.

Accuracy of `mini_resnet_bn` with its running statistics, with the batch's, with fixed blends of
both, with moving ones, and with the library's blend (`fata.adapt(model, "norm", blend=True)`), as a
Markdown table. Streams: all classes in batches of 64, 16, 8, 4 and 2; 2 to 5 of the 10 classes; one
class after another; 35, 50 and 90 % of one class. `--ablate` varies the numbers of the blend.

The numbers were chosen on the default domains, never on the benchmark's 15 corruptions.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import fata
from fata.network import blend

CHOSEN_ON = ("clean", "speckle_noise", "gaussian_blur", "spatter", "saturate")
STREAMS = {  # name: kind, batch size, images at most
    "all classes, B 64": ("all", 64, 1280),
    "2 of 10 classes": ("few 2", 64, 400),
    "3 of 10 classes": ("few 3", 64, 600),
    "4 of 10 classes": ("few 4", 64, 800),
    "5 of 10 classes": ("few 5", 64, 1000),
    "class by class": ("sorted", 64, 2000),
    "35 % of one class": ("major 35", 64, 576),
    "50 % of one class": ("major 50", 64, 400),
    "90 % of one class": ("major 90", 64, 222),
    "all classes, B 16": ("all", 16, 640),
    "all classes, B 8": ("all", 8, 480),
    "all classes, B 4": ("all", 4, 400),
    "all classes, B 2": ("all", 2, 300),
}
Statistics = tuple[Tensor, Tensor]
Rule = Callable[[nn.BatchNorm2d, int, Statistics, dict[nn.Module, Statistics]], Statistics]


def prior(images: int) -> Rule:
    """Running statistics that weigh as much as some images, and the batch's."""

    def rule(
        layer: nn.BatchNorm2d, rows: int, batch: Statistics, _: dict[nn.Module, Statistics]
    ) -> Statistics:
        return _mixed((layer.running_mean, layer.running_var), batch, rows / (rows + images))

    return rule


def moving(share: float) -> Rule:
    """Start at the running statistics and move to the batch's, by this share for 64 images."""

    def rule(
        layer: nn.BatchNorm2d, rows: int, batch: Statistics, kept: dict[nn.Module, Statistics]
    ) -> Statistics:
        before = kept.get(layer, (layer.running_mean, layer.running_var))
        kept[layer] = _mixed(before, batch, 1 - (1 - share) ** (rows / 64))
        return kept[layer]

    return rule


RULES = {
    "prior 64": prior(64),
    "prior 256": prior(256),
    "moving 0.05": moving(0.05),
    "moving 0.1": moving(0.1),
}


def _mixed(one: Statistics, other: Statistics, share: float) -> Statistics:
    mean, var = (torch.lerp(a, b, share) for a, b in zip(one, other, strict=True))
    return mean, var


@contextmanager
def normalised_by(model: nn.Module, rule: Rule) -> Iterator[nn.Module]:
    """The model with other statistics in its BatchNorm layers."""
    kept: dict[nn.Module, Statistics] = {}

    def forward(layer: nn.BatchNorm2d) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            mean, var = rule(layer, len(x), (mean, var), kept)
            return nn.functional.batch_norm(x, mean, var, layer.weight, layer.bias, eps=layer.eps)

        return run

    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for layer in layers:
        layer.forward = forward(layer)
    yield model
    for layer in layers:
        del layer.forward


def order(labels: Tensor, kind: str, seed: int) -> Tensor:
    """Which images come, and in what order."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(labels), generator=generator)
    what, _, number = kind.partition(" ")
    if what == "sorted":
        return index[labels[index].argsort(stable=True)]
    if what == "few":
        return index[
            torch.isin(labels[index], torch.randperm(10, generator=generator)[: int(number)])
        ]
    if what == "major":
        share, one = (
            int(number) / 100,
            labels[index] == int(torch.randint(10, (), generator=generator)),
        )
        rows = min(one.sum() / share, (~one).sum() / (1 - share))
        index = torch.cat((index[one][: int(rows * share)], index[~one][: int(rows * (1 - share))]))
        return index[torch.randperm(len(index), generator=generator)]
    return index


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, rows: int) -> float:
    """Percent of the stream that is right."""
    with torch.no_grad():
        pairs = zip(images.split(rows), labels.split(rows), strict=True)
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    return 100 * right / len(labels)


def blended(name: str, images: Tensor, labels: Tensor, rows: int, **fields: bool) -> float:
    """The same, of a method of the library on a new model."""
    adapter = fata.adapt(fata.zoo.load("mini_resnet_bn").model, name, speed="exact", **fields)
    return accuracy(adapter, images, labels, rows)


def columns(ablate: bool) -> dict[str, Callable[[Tensor, Tensor, int], float]]:
    """What is measured on a stream, by name."""

    def fixed(rule: Rule) -> Callable[[Tensor, Tensor, int], float]:
        def run(images: Tensor, labels: Tensor, rows: int) -> float:
            with normalised_by(fata.zoo.load("mini_resnet_bn").model.eval(), rule) as model:
                return accuracy(model, images, labels, rows)

        return run

    def varied(**numbers: float) -> Callable[[Tensor, Tensor, int], float]:
        def run(images: Tensor, labels: Tensor, rows: int) -> float:
            before = {name: getattr(blend, name) for name in numbers}
            for name, number in numbers.items():
                setattr(blend, name, number)
            found = blended("norm", images, labels, rows, blend=True)
            for name, number in before.items():
                setattr(blend, name, number)
            return found

        return run

    if ablate:
        tried = {"CLASSES": (0, 1, 2, 8), "IMAGES": (128, 256, 1280), "FAR": (1, 3, 100, math.inf)}
        numbers = [(name, n) for name, values in tried.items() for n in values]
        return {f"{name} {n}": varied(**{name: n}) for name, n in numbers} | {"blend": varied()}
    return {
        "running": lambda *stream: blended("source", *stream),
        "batch": lambda *stream: blended("norm", *stream),
        **{name: fixed(rule) for name, rule in RULES.items()},
        "blend": varied(),
    }


def main() -> None:
    """Print the table; the last column is the blend's distance from the best of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--domains", nargs="+", default=CHOSEN_ON)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--unscaled", action="store_true", help="image 128 comes as 0 to 255")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    measured, loaded = columns(asked.ablate), fata.zoo.load("mini_resnet_bn")
    dataset = fata.data.open("embedded", fit=loaded)
    print("| | " + " | ".join(measured) + " | blend - best |")
    print("|---|" + "---|" * (len(measured) + 1))
    for domain in asked.domains:
        batches = list(fata.stream(dataset, "normal", domains=[domain], images=2000))
        plain = torch.cat([batch.images for batch in batches])
        images, unscaled = loaded.preprocess(plain), loaded.preprocess.normalise(255 * plain)
        labels = torch.cat([batch.labels for batch in batches])
        for name in asked.streams:
            kind, rows, most = STREAMS[name]
            index = order(labels, kind, asked.seed)[:most]
            shown, right = images[index], labels[index]
            if asked.unscaled:
                shown[128] = unscaled[index[128]]
            found = {name: measure(shown, right, rows) for name, measure in measured.items()}
            gap = found["blend"] - max(value for n, value in found.items() if n != "blend")
            values = " | ".join(f"{value:.1f}" for value in found.values())
            print(f"| {domain}, {name} | {values} | {gap:+.1f} |", flush=True)


if __name__ == "__main__":
    main()
