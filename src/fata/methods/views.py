"""Augmented views of images for CoTTA and MEMO, on tensors and from a generator of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

from fata.methods.pixels import Draw


def cotta_view(pixels: Tensor, draw: Draw) -> Tensor:
    """CoTTA's augmentation of a batch in [0, 1]: one draw of the parameters for the batch."""
    x: Tensor = _jitter(pixels, draw)
    height, width = x.shape[-2:]
    x = T.pad(x, [width // 2, height // 2], padding_mode="edge")
    shift = [draw.uniform(-1 / 16, 1 / 16) * side for side in (x.shape[-1], x.shape[-2])]
    x = T.affine(
        x,
        angle=draw.uniform(-15, 15),
        translate=[round(s) for s in shift],
        scale=draw.uniform(0.9, 1.1),
        shear=[0.0, 0.0],
        interpolation=InterpolationMode.BILINEAR,
    )
    x = T.gaussian_blur(x, [5, 5], [draw.uniform(0.001, 0.5)])
    x = T.center_crop(x, [height, width])
    x = T.horizontal_flip(x) if draw.coin() else x
    return torch.clamp(x + 0.005 * draw.normal(x), 0, 1)


def _jitter(x: Tensor, draw: Draw) -> Tensor:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: T.adjust_brightness(x, draw.uniform(0.6, 1.4)),
        lambda x: T.adjust_contrast(x, draw.uniform(0.7, 1.3)),
        lambda x: T.adjust_saturation(x, draw.uniform(0.5, 1.5)),
        lambda x: T.adjust_hue(x, draw.uniform(-0.06, 0.06)),
        lambda x: T.adjust_gamma(x.clamp(1e-8, 1), draw.uniform(0.7, 1.3)),
    ]
    for index in draw.order(len(changes)):
        x = changes[index](x)
    return x


def augmix_view(pixels: Tensor, draw: Draw) -> Tensor:
    """MEMO's view of one image (1, 3, H, W) in [0, 1]: a random crop, mixed with three chains."""
    crop = _random_crop(pixels, draw)
    crop = T.horizontal_flip(crop) if draw.coin() else crop
    shares = torch.tensor([draw.uniform(1e-9, 1) for _ in range(3)]).log().neg()
    shares = shares / shares.sum()  # Dirichlet(1, 1, 1)
    mixed = torch.zeros_like(crop)
    for share in shares.tolist():
        chain = crop
        for _ in range(draw.integer(1, 3)):
            chain = _OPERATIONS[draw.integer(0, len(_OPERATIONS) - 1)](chain, draw)
        mixed = mixed + share * chain
    kept = draw.uniform(0, 1)  # Beta(1, 1)
    return kept * crop + (1 - kept) * mixed


def _random_crop(x: Tensor, draw: Draw) -> Tensor:
    """A crop of 8 to 100 % of the area, sides 3:4 to 4:3, back at the image's size."""
    height, width = x.shape[-2:]
    area = draw.uniform(0.08, 1.0) * height * width
    ratio = 2 ** draw.uniform(-0.415, 0.415)  # log2(4/3) = 0.415
    w = max(1, min(width, round((area * ratio) ** 0.5)))
    h = max(1, min(height, round((area / ratio) ** 0.5)))
    top, left = draw.integer(0, height - h), draw.integer(0, width - w)
    crop: Tensor = T.resized_crop(x, top, left, h, w, [height, width], antialias=True)
    return crop


def _affine(
    x: Tensor,
    angle: float = 0.0,
    shift: tuple[float, float] = (0.0, 0.0),
    shear: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    moved: Tensor = T.affine(
        x, angle, [round(s) for s in shift], 1.0, list(shear), InterpolationMode.BILINEAR
    )
    return moved


def _level(draw: Draw, most: float) -> float:
    """AugMix's strength at severity 1: up to a tenth of the most."""
    return draw.uniform(0.1, 1.0) / 10 * most


def _signed(draw: Draw, most: float) -> float:
    return _level(draw, most) * (1 if draw.coin() else -1)


_SHEAR = 16.7  # degrees of a shear by 0.3
_OPERATIONS: list[Callable[[Tensor, Draw], Tensor]] = [
    lambda x, draw: T.autocontrast(x),
    lambda x, draw: T.equalize(x),
    lambda x, draw: _affine(x, angle=_signed(draw, 30)),
    lambda x, draw: T.solarize(x, 1 - _level(draw, 1)),
    lambda x, draw: _affine(x, shear=(_signed(draw, _SHEAR), 0)),
    lambda x, draw: _affine(x, shear=(0, _signed(draw, _SHEAR))),
    lambda x, draw: _affine(x, shift=(_signed(draw, x.shape[-1] / 3), 0)),
    lambda x, draw: _affine(x, shift=(0, _signed(draw, x.shape[-2] / 3))),
    lambda x, draw: T.posterize(x, 4),
]
