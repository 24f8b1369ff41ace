"""A contact sheet of all corruptions at all severities, for `fata corrupt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from fata.corruptions import SEVERITIES, corrupt

_MARGIN, _LABEL, _GAP = 4, 150, 24


def square(photo: Image.Image, side: int) -> Tensor:
    """The middle of an image as (1, 3, side, side) in [0, 1]."""
    middle = ImageOps.fit(photo.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(middle)).permute(2, 0, 1)[None] / 255


def draw(
    image: Tensor, names: Sequence[str], seed: int, tick: Callable[[], None] = lambda: None
) -> Image.Image:
    """A row a corruption, a column a severity, names at the left."""
    side = image.shape[-1]
    font = ImageFont.load_default(size=14)
    width = _LABEL + (len(SEVERITIES) + 1) * (side + _MARGIN)
    sheet = Image.new("RGB", (width, _GAP + len(names) * (side + _MARGIN)), "white")
    pen = ImageDraw.Draw(sheet)
    for column, title in enumerate(("clean", *(f"severity {s}" for s in SEVERITIES))):
        pen.text((_LABEL + column * (side + _MARGIN), _MARGIN), title, "black", font)
    for row, name in enumerate(names):
        top = _GAP + row * (side + _MARGIN)
        pen.text((_MARGIN, top + side // 2 - 7), name.replace("_", " "), "black", font)
        cells = [image, *(corrupt(image, name, severity, seed=seed) for severity in SEVERITIES)]
        for column, cell in enumerate(cells):
            pixels = (cell[0] * 255).round().to(torch.uint8).permute(1, 2, 0)
            sheet.paste(Image.fromarray(pixels.numpy()), (_LABEL + column * (side + _MARGIN), top))
            tick()
    return sheet
