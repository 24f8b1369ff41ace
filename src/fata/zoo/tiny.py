"""Networks of a few thousand parameters, structured like their full-size relatives.

For tests, `fata check` and golden traces: four stages for a ResNet and twelve blocks for a vision
transformer, so that "after stage 3" and "the last three blocks" mean what they mean there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("resnet_bn", "resnet_gn", "vit_ln")


def build(name: str, classes: int = 10) -> nn.Module:
    """An untrained network for 16 x 16 images: `resnet_bn`, `resnet_gn` or `vit_ln`."""
    if name not in NAMES:
        raise ValueError(f"unknown tiny network {name!r}: choose one of {', '.join(NAMES)}")
    if name == "vit_ln":
        return ViT(classes)
    return ResNet(name.removeprefix("resnet_"), classes)


class Residual(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, norm: str, groups: int, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, groups, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, groups, outside)
        same = inside == outside and stride == 1
        self.down = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inside, H, W) to (B, outside, H / stride, W / stride)."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.down(x))


class ResNet(nn.Module):
    """Stem, four stages, linear head; BatchNorm (`bn`) or GroupNorm (`gn`)."""

    def __init__(
        self,
        norm: str,
        classes: int,
        widths: Sequence[int] = (8, 16, 24, 32),
        depths: Sequence[int] = (1, 1, 1, 1),
        strides: Sequence[int] = (1, 2, 2, 2),
        groups: int = 4,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = _norm(norm, groups, widths[0])
        sides = pairwise((widths[0], *widths))
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                Residual(norm, groups, inside, outside, stride),
                *(Residual(norm, groups, outside, outside, 1) for _ in range(depth - 1)),
            )
            for (inside, outside), depth, stride in zip(sides, depths, strides, strict=True)
        )
        self.fc = nn.Linear(widths[3], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 3, H, W) images."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention of some heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches of 4 x 4 pixels and a class token, twelve blocks."""

    def __init__(self, classes: int, size: int = 16, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // 4) ** 2, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(12)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of (B, 3, size, size) images."""
        patches = self.patch_embed(x).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(x), 1, -1), patches], 1)
        tokens = self.norm(self.blocks(tokens + self.pos_embed))
        return self.head(tokens[:, 0])  # type: ignore[no-any-return]


def _norm(kind: str, groups: int, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "bn" else nn.GroupNorm(groups, channels)
