"""Augmented views of images for CoTTA, ROID and MEMO, on tensors, from a generator of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fata.methods.pixels import Rng

try:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as T
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the views of CoTTA, ROID and MEMO need torchvision: pip install fata[zoo], or give "
        "augment=... of your own",
        name=error.name,
    ) from error


def cotta_view(pixels: Tensor, rng: Rng) -> Tensor:
    """CoTTA's augmentation of a batch in [0, 1]: the same random parameters for the whole batch."""
    height, width = pixels.shape[-2:]
    x = _moved(_jitter(pixels, rng), rng, "edge")
    x = T.gaussian_blur(x, [5, 5], [rng.uniform(0.001, 0.5)])
    x = T.center_crop(x, [height, width])
    x = T.horizontal_flip(x) if rng.coin() else x
    return torch.clamp(x + 0.005 * rng.normal(x), 0, 1)


def roid_view(pixels: Tensor, rng: Rng) -> Tensor:
    """ROID's: CoTTA's without blur and noise, and with reflected borders."""
    height, width = pixels.shape[-2:]
    x: Tensor = _moved(_jitter(pixels, rng), rng, "reflect")
    x = T.center_crop(x, [height, width])
    x = T.horizontal_flip(x) if rng.coin() else x
    return x.clamp(0, 1)


def _moved(x: Tensor, rng: Rng, border: str) -> Tensor:
    """Padded by half of the side, then turned, shifted and scaled a little."""
    height, width = x.shape[-2:]
    x = T.pad(x, [width // 2, height // 2], padding_mode=border)
    shift = [rng.uniform(-1 / 16, 1 / 16) * side for side in (x.shape[-1], x.shape[-2])]
    moved: Tensor = T.affine(
        x,
        angle=rng.uniform(-15, 15),
        translate=[round(s) for s in shift],
        scale=rng.uniform(0.9, 1.1),
        shear=[0.0, 0.0],
        interpolation=InterpolationMode.BILINEAR,
    )
    return moved


def _jitter(x: Tensor, rng: Rng) -> Tensor:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: T.adjust_brightness(x, rng.uniform(0.6, 1.4)),
        lambda x: T.adjust_contrast(x, rng.uniform(0.7, 1.3)),
        lambda x: T.adjust_saturation(x, rng.uniform(0.5, 1.5)),
        lambda x: T.adjust_hue(x, rng.uniform(-0.06, 0.06)),
        lambda x: T.adjust_gamma(x.clamp(1e-8, 1), rng.uniform(0.7, 1.3)),
    ]
    for index in rng.order(len(changes)):
        x = changes[index](x)
    return x


def augmix_view(pixels: Tensor, rng: Rng) -> Tensor:
    """MEMO's view of one image (1, 3, H, W) in [0, 1]: a random crop, mixed with three chains."""
    crop = _random_crop(pixels, rng)
    crop = T.horizontal_flip(crop) if rng.coin() else crop
    shares = torch.tensor([rng.uniform(1e-9, 1) for _ in range(3)]).log().neg()
    shares = shares / shares.sum()  # Dirichlet(1, 1, 1)
    mixed = torch.zeros_like(crop)
    for share in shares.tolist():
        chain = crop
        for _ in range(rng.integer(1, 3)):
            chain = _OPERATIONS[rng.integer(0, len(_OPERATIONS) - 1)](chain, rng)
        mixed = mixed + share * chain
    kept = rng.uniform(0, 1)  # Beta(1, 1)
    return kept * crop + (1 - kept) * mixed


def _random_crop(x: Tensor, rng: Rng) -> Tensor:
    """A crop of 8 to 100 % of the area, sides 3:4 to 4:3, back at the image's size."""
    height, width = x.shape[-2:]
    area = rng.uniform(0.08, 1.0) * height * width
    ratio = 2 ** rng.uniform(-0.415, 0.415)  # log2(4/3) = 0.415
    w = max(1, min(width, round((area * ratio) ** 0.5)))
    h = max(1, min(height, round((area / ratio) ** 0.5)))
    top, left = rng.integer(0, height - h), rng.integer(0, width - w)
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


def _level(rng: Rng, most: float) -> float:
    """AugMix's strength at severity 1: up to a tenth of the most."""
    return rng.uniform(0.1, 1.0) / 10 * most


def _signed(rng: Rng, most: float) -> float:
    return _level(rng, most) * (1 if rng.coin() else -1)


_SHEAR = 16.7  # degrees of a shear by 0.3
_OPERATIONS: list[Callable[[Tensor, Rng], Tensor]] = [
    lambda x, rng: T.autocontrast(x),
    lambda x, rng: T.equalize(x),
    lambda x, rng: _affine(x, angle=_signed(rng, 30)),
    lambda x, rng: T.solarize(x, 1 - _level(rng, 1)),
    lambda x, rng: _affine(x, shear=(_signed(rng, _SHEAR), 0)),
    lambda x, rng: _affine(x, shear=(0, _signed(rng, _SHEAR))),
    lambda x, rng: _affine(x, shift=(_signed(rng, x.shape[-1] / 3), 0)),
    lambda x, rng: _affine(x, shift=(0, _signed(rng, x.shape[-2] / 3))),
    lambda x, rng: T.posterize(x, 4),
]
