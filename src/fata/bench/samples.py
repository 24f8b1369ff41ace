"""A few images of a stream, small, so that a report can show what the models saw."""

from __future__ import annotations

import base64
import io
from typing import Any

from torch import Tensor

from fata.data import Samples, Stream

NUMBER, SIDE = 8, 96  # images of a stream; pixels at most


def samples(stream: Stream, batch: Samples, end: int) -> dict[str, Any]:
    """The last images of a stream, whose last batch ends at row `end`, with their labels."""
    images, labels = batch.images[-NUMBER:], batch.labels[-NUMBER:].tolist()
    classes = stream.dataset.classes
    return {
        "first": end - len(images),
        "labels": [classes[label] if label < len(classes) else str(label) for label in labels],
        "images": [data_url(image) for image in images],
    }


def data_url(image: Tensor) -> str:
    """An image in [0, 1] as a data URL."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture, out = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((SIDE, SIDE))
    picture.save(out, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}"
