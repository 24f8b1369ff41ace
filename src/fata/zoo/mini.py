"""The architectures of the embedded networks: four stages or twelve blocks, for 32 x 32 images."""

from __future__ import annotations

from torch import nn

from fata.zoo.tiny import ResNet, ViT

CIFAR10 = ("mini_resnet_bn", "mini_resnet_gn", "mini_vit")
TINY200 = ("tiny200_resnet_bn", "tiny200_resnet_gn", "tiny200_vit")
NAMES = (*CIFAR10, *TINY200)


def build(name: str, classes: int | None = None) -> nn.Module:
    """An untrained network for 32 x 32 images.

    Args:
        name: one of `CIFAR10` (10 classes) or of `TINY200` (200 classes, three to four times as
            large).
        classes: instead of those.
    """
    if name not in NAMES:
        raise ValueError(f"unknown embedded network {name!r}: choose one of {', '.join(NAMES)}")
    large, (kind, *norm) = name in TINY200, name.split("_")[1:]
    classes = classes or (200 if large else 10)
    if kind == "vit":
        dim, heads = (192, 6) if large else (160, 5)
        return ViT(classes, size=32, dim=dim, heads=heads)
    if large:
        return ResNet(norm[0], classes, (64, 128, 192, 256), (2, 2, 3, 1), (1, 2, 2, 1), groups=16)
    return ResNet(norm[0], classes, widths=(24, 48, 96, 192), depths=(1, 2, 2, 2), groups=8)
