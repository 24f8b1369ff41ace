"""The architectures of the embedded networks: four stages or twelve blocks, for 32 x 32 images."""

from __future__ import annotations

from torch import nn

from fata.zoo.tiny import ResNet, ViT

NAMES = ("mini_resnet_bn", "mini_resnet_gn", "mini_vit")


def build(name: str, classes: int = 10) -> nn.Module:
    """An untrained network for 32 x 32 images: `mini_resnet_bn`, `mini_resnet_gn`, `mini_vit`."""
    if name not in NAMES:
        raise ValueError(f"unknown embedded network {name!r}: choose one of {', '.join(NAMES)}")
    if name == "mini_vit":
        return ViT(classes, size=32, dim=160, heads=5)
    norm = name.removeprefix("mini_resnet_")
    return ResNet(norm, classes, widths=(24, 48, 96, 192), depths=(1, 2, 2, 2), groups=8)
