"""The 19 corruptions of ImageNet-C, on batches and on any device.

The order is the benchmark's: noise, blur, weather, digital; then the four extra ones, which the
benchmark reserves for tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fata._text import near
from fata.corruptions import blur, digital, noise, spatter, weather
from fata.corruptions.constants import constants
from fata.corruptions.rng import ImageRng

_FUNCTIONS: tuple[Callable[[Tensor, Any, ImageRng], Tensor], ...] = (
    noise.gaussian_noise,
    noise.shot_noise,
    noise.impulse_noise,
    blur.defocus_blur,
    blur.glass_blur,
    blur.motion_blur,
    blur.zoom_blur,
    weather.snow,
    weather.frost,
    weather.fog,
    digital.brightness,
    digital.contrast,
    digital.elastic_transform,
    digital.pixelate,
    digital.jpeg_compression,
    noise.speckle_noise,
    blur.gaussian_blur,
    spatter.spatter,
    digital.saturate,
)
BY_NAME = {function.__name__: function for function in _FUNCTIONS}
NAMES = tuple(BY_NAME)[:15]
EXTRA = tuple(BY_NAME)[15:]
SEVERITIES = (1, 2, 3, 4, 5)
_ROUNDING = 1e-3  # a quarter of a byte's step


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    generator: torch.Generator | None = None,
    seed: int = 0,
    ids: Iterable[int] | None = None,
    jpeg: bool = False,
) -> Tensor:
    """Corrupt images as ImageNet-C does.

    The result for an image depends on (seed, id, name, severity) alone, not on its batch.

    Args:
        images: (B, 3, H, W) in [0, 1].
        name: one of the 15 in `fata.corruptions.NAMES` or the 4 in `fata.corruptions.EXTRA`.
        severity: 1 to 5. Constants are the published ones for 224, 64 or 32 pixels, whichever is
            nearest.
        generator: draws the seed instead of `seed`.
        seed: of all random draws.
        ids: a number for each image; None: its position in the batch.
        jpeg: compress the result as JPEG at quality 85, as the released files.

    Example:
        >>> import fata, torch
        >>> fata.corrupt(torch.full((1, 3, 32, 32), 0.5), "contrast", 5).unique().tolist()
        [0.5]
    """
    if name not in BY_NAME:
        raise ValueError(
            f"unknown corruption {name!r}: choose one of {', '.join(BY_NAME)}.{near(name, BY_NAME)}"
        )
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r}: must be 1, 2, 3, 4 or 5.")
    _check(images)
    _check_range(images)
    ids = range(len(images)) if ids is None else list(ids)
    if len(ids) != len(images):
        raise ValueError(f"{len(ids)} ids for {len(images)} images: give one an image.")
    if generator is not None:
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    return unchecked(images, name, severity, seed, ids, jpeg)


def unchecked(
    images: Tensor, name: str, severity: int, seed: int, ids: Iterable[int], jpeg: bool
) -> Tensor:
    """As `corrupt`, without checks of the images, which wait for the device."""
    rng = ImageRng.of(seed, ids, name, severity, images.device)
    settings = constants(name, severity, min(images.shape[-2:]))
    corrupted = torch.cat(
        [
            BY_NAME[name](part, settings, ImageRng(keys)).clamp_(0, 1)
            for part, keys in zip(*(_parts(t, name) for t in (images, rng.keys)), strict=True)
        ]
    )
    return digital.jpeg(corrupted, 85) if jpeg else corrupted


def _parts(batch: Tensor, name: str) -> tuple[Tensor, ...]:
    """A CPU is fastest on parts that fit its cache, unless a corruption works on whole batches."""
    if batch.device.type != "cpu" or name in ("glass_blur", "jpeg_compression"):
        return (batch,)
    return torch.split(batch, 8)


def _check(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.float32:
        given = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(
            f"images must be a float32 tensor in [0, 1], got {given}: bytes are images / 255."
        )
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must be (B, 3, H, W), got shape {tuple(images.shape)}.")
    if min(images.shape[-2:]) < 16:
        raise ValueError(f"images of {tuple(images.shape[-2:])} are too small: 16 pixels at least.")


def _check_range(images: Tensor) -> None:
    """Check all pixels; synchronises with a GPU once."""
    low, high = torch.stack(images.aminmax()).tolist() if len(images) else (0.0, 1.0)
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):
        raise ValueError(
            f"images must be in [0, 1], found {low:.4g} to {high:.4g}: divide bytes by 255, "
            f"corrupt before mean and std are applied, and clamp resized images."
        )
