"""Contrast, brightness, saturation, elastic deformation, pixelation and JPEG compression."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fata.corruptions import filters
from fata.corruptions.rng import ImageRng


def contrast(x: Tensor, factor: float, rng: ImageRng) -> Tensor:
    """Draw every channel towards its mean."""
    mean = x.mean((2, 3), keepdim=True)
    return torch.lerp(mean, x, factor)


def brightness(x: Tensor, more: float, rng: ImageRng) -> Tensor:
    """Raise the value of HSV, hue and saturation kept."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, x * (raised / value.clamp(min=1e-9)), raised)


def saturate(x: Tensor, constants: tuple[float, float], rng: ImageRng) -> Tensor:
    """Scale and raise the saturation of HSV, hue and value kept."""
    factor, more = constants
    value, least = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    spread = value - least
    before = spread / value.clamp(min=1e-9)
    after = (before * factor + more).clamp(0, 1)
    depth = (value - x) / spread.clamp(min=1e-9)  # 0 at the value, 1 at the least channel
    grey = torch.tensor([0.0, 1.0, 1.0], device=x.device)[:, None, None]  # hue 0 is red
    return value * (1 - after * torch.where(spread > 0, depth, grey))


def elastic_transform(x: Tensor, constants: tuple[float, float, float], rng: ImageRng) -> Tensor:
    """A small random affine map, then every pixel moves along a smooth random field."""
    alpha, sigma, jitter = constants
    height, width = x.shape[-2:]
    x = _sample(x, _affine_map(x, jitter, rng), "reflect")
    if not alpha:
        return x
    field = alpha * rng.uniform(-1, 1, 2, height, width)
    field = filters.gaussian_blur(field, sigma, 3.0, "symmetric")
    return _sample(x, field + _grid(height, width, x.device), "symmetric")


def _grid(height: int, width: int, device: torch.device) -> Tensor:
    """Rows and columns of every pixel, (2, H, W)."""
    axes = (torch.arange(float(n), device=device) for n in (height, width))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))


def _affine_map(x: Tensor, jitter: float, rng: ImageRng) -> Tensor:
    """Source of each pixel, (B, 2, H, W), when three points of a square are moved."""
    height, width = x.shape[-2:]
    centre = torch.tensor([height // 2, width // 2], device=x.device, dtype=torch.float32)
    reach = min(height, width) // 3
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], device=x.device) * reach
    before = (centre + corners).expand(len(x), 3, 2)
    after = before + rng.uniform(-jitter, jitter, 3, 2)
    ones = torch.ones(len(x), 3, 1, device=x.device)
    back = torch.linalg.solve(torch.cat((after, ones), 2), before)  # (B, 3, 2)
    grid = _grid(height, width, x.device).flatten(1).mT
    places = torch.cat((grid, torch.ones_like(grid[:, :1])), 1) @ back
    return torch.reshape(places.mT, (-1, 2, height, width))


def _sample(x: Tensor, places: Tensor, mode: str) -> Tensor:
    """Bilinear values at places (rows, columns); beyond the border the image is mirrored."""
    aligned = mode == "reflect"  # mirrored at the centres of the border pixels, or at their edges
    sides = []
    for place, size in zip(places.unbind(1), x.shape[-2:], strict=True):
        sides.append(2 * place / (size - 1) - 1 if aligned else (2 * place + 1) / size - 1)
    grid = torch.stack(sides[::-1], -1)
    values: Tensor = F.grid_sample(x, grid, "bilinear", "reflection", align_corners=aligned)
    return values


def pixelate(x: Tensor, factor: float, rng: ImageRng) -> Tensor:
    """Fewer pixels: a mean over boxes, shown as squares."""
    shape, (height, width) = x.shape, x.shape[-2:]
    down, right = int(height * factor), int(width * factor)
    x = (x * 255).round_()  # whole bytes, here and after each side, as in an image file
    x = _box_means(x.reshape(-1, width), right)
    x = _box_means(x.view(-1, height, right), down).div_(255)
    x = _squares(x.view(-1, right), width)
    return _squares(x.view(-1, down, width), height).view(shape)


def _box_means(x: Tensor, fewer: int) -> Tensor:
    """Means of bytes along the second axis, over those whose centres lie in each of fewer boxes."""
    edge = torch.arange(fewer + 1, device=x.device)
    edge = (2 * edge * x.shape[1] + fewer) // (2 * fewer)
    upto = x.cumsum(1).index_select(1, edge[1:] - 1)
    sums = upto.clone()
    sums[:, 1:] -= upto[:, :-1]
    count = edge.diff().float().view(-1, *[1] * (x.ndim - 2))
    return sums.div_(count).add_(0.5).floor_()


def _squares(x: Tensor, size: int) -> Tensor:
    """As many values along the second axis, each that of the nearest."""
    place = (torch.arange(size, device=x.device) + 0.5) * x.shape[1] / size
    return x.index_select(1, place.long())


def jpeg_compression(x: Tensor, quality: float, rng: ImageRng) -> Tensor:
    """What a JPEG file of that quality keeps."""
    return jpeg(x, int(quality))


# The example tables of the JPEG standard (ITU-T T.81, annex K), row by row.
_LUMINANCE = (
    "16 11 10 16 24 40 51 61  12 12 14 19 26 58 60 55  14 13 16 24 40 57 69 56 "
    "14 17 22 29 51 87 80 62  18 22 37 56 68 109 103 77  24 35 55 64 81 104 113 92 "
    "49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99"
)
_CHROMINANCE = (
    "17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99 "
    "47 66 99 99 99 99 99 99" + " 99" * 32
)
_TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
_TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136, -0.714136), (1.0, 1.772, 0.0))


def jpeg(x: Tensor, quality: int) -> Tensor:
    """What encoding as baseline JPEG, with the usual halved colour, and decoding leaves.

    On the CPU by libjpeg, on other devices by the same arithmetic in full precision; the two agree
    to more than 40 dB.
    """
    if x.device.type != "cpu":
        return _jpeg(x, quality)
    if find_spec("PIL") is None:
        raise ModuleNotFoundError(
            "JPEG compression on the CPU needs Pillow: pip install fata[bench]", name="PIL"
        )
    red, green, blue = (x * 255).round_().to(torch.uint8).unbind(1)
    pixels = torch.stack((red, green, blue, blue), 3)  # Pillow's own layout: nothing to convert
    files = [_encoded(image, quality) for image in pixels.numpy()]
    with ThreadPoolExecutor(torch.get_num_threads() + 1) as pool:  # only decoding lets others run
        list(pool.map(_decode, files, pixels.numpy()))
    return torch.stack(pixels.unbind(3)[:3], 1) / 255


def _encoded(pixels: np.ndarray, quality: int) -> BytesIO:
    """A JPEG file of bytes (H, W, 4), the fourth of no meaning."""
    from PIL import Image

    file = BytesIO()
    height, width = pixels.shape[:2]
    image = Image.frombuffer("RGBX", (width, height), pixels, "raw", "RGBX", 0, 1)
    image.save(file, "JPEG", quality=quality)
    return file


def _decode(file: BytesIO, pixels: np.ndarray) -> None:
    """Overwrite bytes (H, W, 4) by what the file holds."""
    from PIL import Image

    decoded = Image.open(file).tobytes("raw", "RGBX")
    pixels[...] = np.frombuffer(decoded, np.uint8).reshape(pixels.shape)


def _jpeg(x: Tensor, quality: int) -> Tensor:
    height, width = x.shape[-2:]
    x = F.pad(x, (0, -width % 16, 0, -height % 16), mode="replicate")
    bytes_ = (x * 255).round()
    to_ycc = torch.tensor(_TO_YCC, device=x.device)
    ycc = torch.einsum("ij,bjhw->bihw", to_ycc, bytes_).round()
    luma = _coded(ycc[:, :1] - 128, _table(_LUMINANCE, quality)) + 128
    chroma = _coded(F.avg_pool2d(ycc[:, 1:], 2).round(), _table(_CHROMINANCE, quality))
    chroma = _doubled(_doubled(chroma.round().clamp(-128, 127), 2), 3)
    decoded = torch.cat((luma.round().clamp(0, 255), chroma), 1)
    rgb = torch.einsum("ij,bjhw->bihw", torch.tensor(_TO_RGB, device=x.device), decoded)
    return rgb.round().clamp(0, 255)[..., :height, :width] / 255


@cache
def _table(numbers: str, quality: int) -> Tensor:
    """The quantisation of a quality, 1 to 100, as the common encoder scales it."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    table = torch.tensor([int(n) for n in numbers.split()]).view(8, 8)
    return ((table * scale + 50) // 100).clamp(1, 255).float()


@cache
def _cosines() -> Tensor:
    """The 8-point discrete cosine transform, orthonormal."""
    k, n = torch.arange(8.0)[:, None], torch.arange(8.0)
    basis = torch.cos(torch.pi * (2 * n + 1) * k / 16) / 2
    basis[0] /= 2**0.5
    return basis


def _coded(x: Tensor, table: Tensor) -> Tensor:
    """Blocks of 8 x 8 through the quantised cosine transform and back."""
    cosines, table = _cosines().to(x.device), table.to(x.device)
    rows, channels, height, width = x.shape
    blocks = x.view(rows, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    spectrum = cosines @ blocks @ cosines.mT
    kept = (spectrum / table).round() * table
    blocks = cosines.mT @ kept @ cosines
    return blocks.transpose(3, 4).reshape(rows, channels, height, width)


def _doubled(x: Tensor, axis: int) -> Tensor:
    """Twice the samples, each between its neighbours: three parts near, one part far."""
    size = x.shape[axis]
    edge = x.narrow(axis, 0, 1), x.narrow(axis, size - 1, 1)
    before = torch.cat((edge[0], x.narrow(axis, 0, size - 1)), axis)
    after = torch.cat((x.narrow(axis, 1, size - 1), edge[1]), axis)
    pair = torch.stack(((3 * x + before) / 4, (3 * x + after) / 4), axis + 1)
    return pair.flatten(axis, axis + 1)
