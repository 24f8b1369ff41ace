"""How much of a network FATA runs again: `python -m benchmarks.flops`.

Counts floating-point operations, so the figures are the same on every machine: a forward pass, the
tail behind FATA's layer, and a whole step of TENT+FATA over one of TENT (forward and backward).
"""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fata
from fata.network.tap import Tap

NETWORKS = ("resnet50_gn", "vit_base_patch16_224")


def flops(work: Callable[[], object]) -> int:
    """Floating-point operations of a function, forward and backward."""
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def step(model: nn.Module, spec: str, images: torch.Tensor) -> int:
    """Operations of one step in which every row is learned from, in one pass over all."""
    adapter = fata.adapt(model, spec, **({"fata_threshold": 1.0} if "+" in spec else {}))
    adapter(images)  # the tap has learned its layer, the engine the share of rows
    total = flops(lambda: adapter(images))
    adapter.unwrap()
    return total


def main() -> None:
    """Print one line a network."""
    print(f"{'network':24}{'layer':12}{'GFLOP':>8}{'tail':>8}{'FATA / TENT step':>18}")
    images = torch.rand(2, 3, 224, 224)
    for name in NETWORKS:
        model = timm.create_model(name).eval()
        tap = Tap(model, "auto")
        with torch.no_grad():
            forward = flops(lambda model=model: model(images))
            recording = tap.record(images)
            tail = flops(lambda recording=recording: recording.tail(recording.z))
        ratio = step(model, "tent+fata", images) / step(model, "tent", images)
        share = tail / forward
        print(f"{name:24}{tap.layer:12}{forward / 2e9:8.2f}{share:8.3f}{ratio:18.2f}")


if __name__ == "__main__":
    main()
