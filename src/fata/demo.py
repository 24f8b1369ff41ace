"""`fata demo`: train three tiny networks on generated pictures, shift the pictures, adapt.

Until the package ships trained networks and real images, this shows every method at work in about
a minute on two cores, without any download.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from fata import tiny
from fata.adapter import adapt
from fata.methods import SPECS

CLASSES = 10
BATCH = 64
RATE = 5e-3  # ten times the paper's, for networks and streams a thousandth of its size
# Ten classes need a wider redundancy margin than EATA's 0.05 for a thousand.
FIELDS: dict[str, dict[str, Any]] = {
    "eata": {"redundancy": 0.4, "fisher_alpha": 0},
    "deyo": {"plpd_threshold": 0.1},
}
LEFT_OUT = ("memo",)  # 64 views of every image: minutes

Shift = Callable[[Tensor, torch.Generator], Tensor]
SHIFTS: dict[str, Shift] = {
    "noise": lambda x, g: (x + 0.3 * torch.randn(x.shape, generator=g)).clamp(0, 1),
    "contrast": lambda x, g: 0.5 + 0.3 * (x - x.mean((1, 2, 3), keepdim=True)),
    "blur": lambda x, g: F.avg_pool2d(F.pad(x, (1, 1, 2, 2), mode="reflect"), (5, 3), 1),
}


def pictures(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Coloured stripes, (n, 3, 16, 16) in [0, 1]; a class is one of five angles and two widths."""
    label = torch.randint(CLASSES, (n,), generator=generator)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=generator)

    angle = (label % 5 + uniform(-0.2, 0.2)) * math.pi / 5
    frequency = torch.where(label < 5, 0.9, 1.6) * uniform(0.9, 1.1)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    wave = (frequency[:, None, None] * along + uniform(0, 2 * math.pi, 1, 1)).sin()
    colours = uniform(0.2, 0.5, 3, 1, 1) * wave[:, None] + uniform(0.4, 0.6, 3, 1, 1)
    noise = 0.05 * torch.randn(colours.shape, generator=generator)
    return (colours + noise).clamp(0, 1), label


def train(
    model: nn.Module, steps: int, generator: torch.Generator, tick: Callable[[], None]
) -> None:
    """A short supervised training on clean pictures."""
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        images, labels = pictures(BATCH, generator)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        tick()
    model.eval()


def accuracy(model: nn.Module, spec: str, images: Tensor, labels: Tensor) -> float:
    """Share of the stream that an adapter gets right, from the source weights and back to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = adapt(model, spec, lr=RATE, **FIELDS.get(spec.partition("+")[0], {}))
    batches = zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True)
    right = [(adapter(batch).argmax(1) == truth).sum().item() for batch, truth in batches]
    adapter.reset()
    adapter.unwrap()
    return float(100 * sum(right) / len(images))


def run(console: Console, steps: int, n: int, seed: int) -> dict[str, list[float]]:
    """Train, shift, adapt; prints the table and returns the mean accuracies by method."""
    generator = torch.Generator().manual_seed(seed)
    specs = [spec for spec in SPECS if spec not in LEFT_OUT]
    models: dict[str, nn.Module] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        training = progress.add_task("training", total=steps * len(tiny.NAMES))
        for name in tiny.NAMES:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                models[name] = tiny.build(name, CLASSES)
            train(models[name], steps, generator, lambda: progress.advance(training))
        images, labels = pictures(n, generator)
        shifted = {name: shift(images, generator) for name, shift in SHIFTS.items()}
        clean = {name: accuracy(model, "source", images, labels) for name, model in models.items()}
        adapting = progress.add_task("adapting", total=len(specs) * len(models))
        means: dict[str, list[float]] = {}
        for spec in specs:
            means[spec] = []
            for model in models.values():
                values = [accuracy(model, spec, x, labels) for x in shifted.values()]
                means[spec].append(sum(values) / len(values))
                progress.advance(adapting)
    _show(console, means, clean, n)
    return means


def _show(console: Console, means: dict[str, list[float]], clean: dict[str, float], n: int) -> None:
    table = Table(
        title="accuracy in %",
        caption=f"mean over {', '.join(SHIFTS)}, {n:,} generated pictures each; tiny networks, "
        f"lr {RATE:g}: a look at the methods, not a comparison",
    )
    table.add_column("method")
    for name in clean:
        table.add_column(name, justify="right")
    table.add_row("clean pictures, source", *(f"{value:.1f}" for value in clean.values()))
    table.add_section()
    best = [max(row[i] for row in means.values()) for i in range(len(clean))]
    for spec, row in means.items():
        cells = [
            f"[bold green]{value:.1f}[/]" if value == top else f"{value:.1f}"
            for value, top in zip(row, best, strict=True)
        ]
        table.add_row(spec, *cells)
    console.print(table)
