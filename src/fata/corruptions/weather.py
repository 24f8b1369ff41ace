"""Snow, frost, fog and spatter."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fata.corruptions import filters
from fata.corruptions.draws import Draws


def fog(x: Tensor, constants: tuple[float, float], draws: Draws) -> Tensor:
    """A cloud of light over the image."""
    amount, decay = constants
    height, width = x.shape[-2:]
    size = 1 << (max(height, width) - 1).bit_length()
    cloud = _plasma(size, decay, draws)[:, None, :height, :width]
    most = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * cloud) * most / (most + amount)


def _plasma(size: int, decay: float, draws: Draws) -> Tensor:
    """A fractal cloud in [0, 1] by the diamond-square algorithm on a torus, (B, size, size)."""
    grid = torch.zeros(len(draws.keys), 1, 1, device=draws.keys.device)
    wibble, step = 100.0, size
    while step >= 2:
        n = size // step

        def jitter(total: Tensor, n: int = n, wibble: float = wibble) -> Tensor:
            return total / 4 + draws.uniform(-(wibble**2), wibble**2, n, n)

        right, below = grid.roll(-1, 2), grid.roll(-1, 1)
        centre = jitter(grid + right + below + right.roll(-1, 1))
        on_rows = jitter(grid + right + centre + centre.roll(1, 1))
        on_columns = jitter(grid + below + centre + centre.roll(1, 2))
        rows = torch.stack((grid, on_rows), 3).flatten(2)
        between = torch.stack((on_columns, centre), 3).flatten(2)
        grid = torch.stack((rows, between), 2).flatten(1, 2)
        step //= 2
        wibble /= decay
    grid = grid - grid.amin((1, 2), keepdim=True)
    return grid / grid.amax((1, 2), keepdim=True)


def snow(x: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Flakes that fall, and the pale light of a snowy day."""
    mean, deviation, zoom, threshold, radius, sigma, kept = constants
    height, width = x.shape[-2:]
    layer = mean + deviation * draws.normal(1, height, width)
    layer = filters.zoomed(layer, zoom)
    layer = torch.where(layer < threshold, 0.0, layer).clamp(0, 1)
    layer = filters.motion_blur(layer, int(radius), sigma, draws.uniform(-135, -45))
    layer = (layer * 255).round() / 255
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]
    grey = (x * weights).sum(1, keepdim=True)
    x = kept * x + (1 - kept) * torch.maximum(x, 1.5 * grey + 0.5)
    return x + layer + layer.flip((2, 3))


def frost(x: Tensor, constants: tuple[float, float], draws: Draws) -> Tensor:
    """Ice on the lens: a piece of a picture of frost laid over the image."""
    kept, laid = constants
    height, width = x.shape[-2:]
    pictures = frost_pictures(height, width, str(x.device))
    which = draws.integer(0, len(pictures)).tolist()
    places = draws.uniform(0, 1, 2).tolist()
    pieces = []
    for index, (down, right) in zip(which, places, strict=True):
        picture = pictures[index]
        top = int(down * (picture.shape[1] - height))
        left = int(right * (picture.shape[2] - width))
        pieces.append(picture[:, top : top + height, left : left + width])
    return kept * x + laid * torch.stack(pieces)


def frost_source() -> str:
    """Where the pictures of frost come from: the package that carries them, or `procedural`."""
    return "procedural" if _frost_folder() is None else "imagecorruptions-imaug"


@cache
def _frost_folder() -> Path | None:
    spec = find_spec("imagecorruptions")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "frost"
    return folder if folder.is_dir() else None


@cache
def frost_pictures(height: int, width: int, device: str) -> list[Tensor]:
    """Pictures of frost, (3, H, W) in [0, 1], a little larger than the images.

    The published sets shrink them to 0.2 for 32 pixels and to 0.3 for 64, and use five of the six.
    """
    folder, side = _frost_folder(), max(height, width)
    scale = 0.2 if side <= 45 else 0.3 if side <= 120 else 1.0
    if folder is None:
        seeds = Draws.of(0, range(5), "frost", 0, torch.device("cpu"))
        return list(_grown_frost(1 << (2 * side - 1).bit_length(), seeds).to(device))
    files = sorted(folder.glob("frost[1-5].*"))
    pictures = [_read(file) for file in files]
    return [_at_least(picture, scale, height + 1, width + 1).to(device) for picture in pictures]


def _read(file: Path) -> Tensor:
    """A picture as (3, H, W) in [0, 1]."""
    with Image.open(file) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB")))
    return pixels.permute(2, 0, 1).float() / 255


def _at_least(picture: Tensor, scale: float, height: int, width: int) -> Tensor:
    """The picture at a scale, or larger where it would not cover an image."""
    scale = max(scale, height / picture.shape[1], width / picture.shape[2])
    size = [math.ceil(scale * side) for side in picture.shape[1:]]
    return F.interpolate(picture[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)


def _grown_frost(size: int, draws: Draws) -> Tensor:
    """Frost without a picture: needles along a cloud's slopes, bluish white on grey."""
    cloud = _plasma(size, 1.7, draws)[:, None]
    needles = draws.normal(1, size, size)
    for angle in (20.0, 80.0, 140.0):
        turned = torch.full((len(cloud),), angle)
        needles = torch.maximum(needles, 3 * filters.motion_blur(needles, 12, 8.0, turned))
    bright = (0.25 + 0.5 * cloud + 0.12 * needles).clamp(0, 1)
    tint = torch.tensor([0.92, 0.97, 1.0])[:, None, None]
    return bright * tint


def spatter(x: Tensor, constants: tuple[float, ...], draws: Draws) -> Tensor:
    """Drops of water or splashes of mud on the lens."""
    mean, deviation, sigma, threshold, strength, mud = constants
    layer = mean + deviation * draws.normal(1, *x.shape[-2:])
    layer = filters.gaussian_blur(layer, sigma)
    layer = torch.where(layer < threshold, 0.0, layer)
    if mud:
        mask = filters.gaussian_blur((layer > threshold).float(), strength)
        mask = torch.where(mask < 0.8, 0.0, mask)
        brown = torch.tensor([63.0, 42.0, 20.0], device=x.device)[:, None, None] / 255
        return x * (1 - mask) + brown * mask
    drops = (layer * 255).floor() * _relief(layer)
    drops = drops / drops.amax((1, 2, 3), keepdim=True).clamp(min=1e-9) * strength
    turquoise = torch.tensor([175.0, 238.0, 238.0], device=x.device)[:, None, None] / 255
    return x + drops * turquoise


def _relief(layer: Tensor) -> Tensor:
    """Light on the rims of drops: distance to the nearest rim, equalised, embossed and softened."""
    wet = (layer > 0).float()
    rim = F.max_pool2d(wet, 3, 1, 1) - wet  # just outside every drop
    distance = torch.full_like(layer, 20.0)
    reached = rim
    for steps in range(20):
        distance = torch.where((reached > 0) & (distance == 20), float(steps), distance)
        reached = F.max_pool2d(reached, 3, 1, 1) if steps % 2 else _cross(reached)
    distance = F.avg_pool2d(filters.pad(distance, (1, 1), "reflect"), 3, 1).floor()
    rank = torch.stack([(distance <= level).float().mean((1, 2, 3)) for level in range(21)], 1)
    lowest = rank[:, :1]
    equalised = 255 * ((rank - lowest) / (1 - lowest).clamp(min=1e-9)).clamp(0, 1)
    place = distance.flatten(1).long()
    level = equalised.gather(1, place).view_as(distance).round()
    emboss = torch.tensor(
        [[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], device=layer.device
    )
    embossed = F.conv2d(filters.pad(level, (1, 1), "reflect"), emboss[None, None]).clamp(0, 255)
    return F.avg_pool2d(filters.pad(embossed, (1, 1), "reflect"), 3, 1)


def _cross(x: Tensor) -> Tensor:
    """The larger of each value and its four neighbours."""
    return torch.maximum(F.max_pool2d(x, (3, 1), 1, (1, 0)), F.max_pool2d(x, (1, 3), 1, (0, 1)))
