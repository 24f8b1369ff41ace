"""What a pass with gradient costs beside one without: `python -m benchmarks.passes`.

The engine learns in one pass over all rows where the share of selected rows is above 1 - 1 / ratio,
and in a second pass over the selected ones below it.
"""

from __future__ import annotations

import statistics
import time

import timm
import torch

import fata

NETWORKS = {"resnet50_gn": 128, "vit_tiny_patch16_224": 224}


def seconds(adapter: fata.Adapter, images: torch.Tensor, rounds: int = 7) -> float:
    """Median time of a call, after two that warm up and show the share of selected rows."""
    taken = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        adapter(images)
        taken.append(time.perf_counter() - start)
    adapter.unwrap()
    return statistics.median(taken[2:])


def main() -> None:
    """Print the ratio, and the share of selected rows at which both ways cost the same."""
    torch.set_num_threads(1)
    print(f"{'network':24}{'ratio':>8}{'even at':>10}")
    for name, side in NETWORKS.items():
        model, images = timm.create_model(name), torch.rand(8, 3, side, side)
        plain = seconds(fata.adapt(model, "source"), images)
        ratio = seconds(fata.adapt(model, "tent", lr=1e-9), images) / plain
        print(f"{name:24}{ratio:8.2f}{1 - 1 / ratio:10.2f}")


if __name__ == "__main__":
    main()
