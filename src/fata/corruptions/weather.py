"""Snow, frost and fog."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fata.corruptions import filters
from fata.corruptions.rng import ImageRng


def fog(x: Tensor, constants: tuple[float, float], rng: ImageRng) -> Tensor:
    """A cloud of light over the image."""
    amount, decay = constants
    height, width = x.shape[-2:]
    size = 1 << (max(height, width) - 1).bit_length()
    cloud = _plasma(size, decay, rng)[:, None, :height, :width]
    most = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * cloud).mul_(most / (most + amount))


def _plasma(size: int, decay: float, rng: ImageRng) -> Tensor:
    """A fractal cloud in [0, 1] by the diamond-square algorithm on a torus, (B, size, size)."""
    grid = torch.zeros(len(rng.keys), 1, 1, device=rng.keys.device)
    sides = [1 << level for level in range(size.bit_length() - 1)]
    noise = torch.split(rng.uniform(-1, 1, size * size - 1), [3 * n * n for n in sides], 1)
    wibble = 100.0**2
    for n, jitter in zip(sides, noise, strict=True):
        at_centre, on_row, on_column = (wibble * jitter).view(-1, 3, n, n).unbind(1)
        right, below = grid.roll(-1, 2), grid.roll(-1, 1)
        centre = (grid + right + below + right.roll(-1, 1)) / 4 + at_centre
        finer = grid.new_empty(len(grid), n, 2, n, 2)
        finer[:, :, 0, :, 0] = grid
        finer[:, :, 0, :, 1] = (grid + right + centre + centre.roll(1, 1)) / 4 + on_row
        finer[:, :, 1, :, 0] = (grid + below + centre + centre.roll(1, 2)) / 4 + on_column
        finer[:, :, 1, :, 1] = centre
        grid = finer.view(-1, 2 * n, 2 * n)
        wibble /= decay**2
    lowest, highest = (bound[:, None, None] for bound in grid.flatten(1).aminmax(dim=1))
    return (grid - lowest) / (highest - lowest)


def snow(x: Tensor, constants: tuple[float, ...], rng: ImageRng) -> Tensor:
    """Flakes that fall, and the pale light of a snowy day."""
    mean, deviation, zoom, threshold, radius, sigma, kept = constants
    height, width = x.shape[-2:]
    layer = mean + deviation * rng.normal(1, height, width)
    layer = filters.zoomed(layer, zoom)
    layer = torch.where(layer < threshold, 0.0, layer).clamp(0, 1)
    layer = filters.motion_blur(layer, int(radius), sigma, rng.uniform(-135, -45))
    layer = (layer * 255).round() / 255
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]
    grey = (x * weights).sum(1, keepdim=True)
    x = kept * x + (1 - kept) * torch.maximum(x, 1.5 * grey + 0.5)
    return x + layer + layer.flip((2, 3))


def frost(x: Tensor, constants: tuple[float, float], rng: ImageRng) -> Tensor:
    """Ice on the lens: a random crop of a frost texture is added to the image."""
    kept, laid = constants
    height, width = x.shape[-2:]
    textures = frost_textures(_frost_folder(), height, width, str(x.device))
    which = rng.integer(0, len(textures)).tolist()
    places = rng.uniform(0, 1, 2).tolist()
    pieces = []
    for index, (down, right) in zip(which, places, strict=True):
        texture = textures[index]
        top = int(down * (texture.shape[1] - height))
        left = int(right * (texture.shape[2] - width))
        pieces.append(texture[:, top : top + height, left : left + width])
    return kept * x + laid * torch.stack(pieces)


def frost_source() -> str:
    """Origin of the frost textures: the package that has them, or `procedural`."""
    return "procedural" if _frost_folder() is None else "imagecorruptions-imaug"


@cache
def _frost_folder() -> Path | None:
    spec = find_spec("imagecorruptions")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "frost"
    return folder if folder.is_dir() else None


@cache
def frost_textures(folder: Path | None, height: int, width: int, device: str) -> list[Tensor]:
    """Frost textures, (3, H, W) in [0, 1], a little larger than the images.

    Without a folder they are procedural. The published sets shrink them to 0.2 for 32 pixels and
    to 0.3 for 64, and use five of the six.
    """
    side = max(height, width)
    scale = 0.2 if side <= 45 else 0.3 if side <= 120 else 1.0
    if folder is None:
        textures = list(_procedural_frost(512))
    else:
        textures = [_read(file) for file in sorted(folder.glob("frost[1-5].*"))]
    return [_at_least(texture, scale, height + 1, width + 1).to(device) for texture in textures]


def _read(file: Path) -> Tensor:
    """An image as (3, H, W) in [0, 1]."""
    from PIL import Image

    with Image.open(file) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels.permute(2, 0, 1).float() / 255


def _at_least(texture: Tensor, scale: float, height: int, width: int) -> Tensor:
    """The texture at a scale, or larger if it would not cover an image."""
    scale = max(scale, height / texture.shape[1], width / texture.shape[2])
    size = [math.ceil(scale * side) for side in texture.shape[1:]]
    return F.interpolate(texture[None], size, mode="bilinear")[0]


# Mean brightness of each of the five photographs, and its standard deviation.
_LIGHT = (0.51, 0.08), (0.81, 0.09), (0.81, 0.09), (0.60, 0.11), (0.48, 0.17)


def _procedural_frost(size: int) -> Tensor:
    """Procedural frost textures, (5, 3, size, size): patches of needles, as bright as photographs.

    A plasma cloud gives the direction of the needles of a patch, so that they branch like ferns.
    """
    rng = ImageRng.of(0, range(len(_LIGHT)), "frost", 0, torch.device("cpu"))
    light, depth = torch.tensor(_LIGHT).view(-1, 2, 1, 1, 1).unbind(1)
    grain = filters.gaussian_blur(rng.normal(1, size, size), 0.7)
    way = (24 * _plasma(size, 1.7, rng)[:, None]).long() % 8
    needles = torch.empty_like(grain)
    for k in range(8):
        angle = torch.full((len(grain),), 45.0 * k)
        needles = torch.where(way == k, filters.motion_blur(grain, 16, 10.0, angle), needles)
    relief = _standard(_standard(needles) + 0.8 * _standard(_plasma(size, 1.7, rng)[:, None]))
    tint = torch.tensor([0.92, 1.0, 1.06])[:, None, None]
    return ((light + depth * relief) * tint).clamp(0, 1)


def _standard(x: Tensor) -> Tensor:
    """Every image at mean 0 and deviation 1."""
    deviation, mean = torch.std_mean(x, (2, 3), keepdim=True)
    return (x - mean) / deviation
