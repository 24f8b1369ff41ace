"""Images of a request: files that are decoded, or tensors that are checked. Nothing is unpickled.

Either way they become pixels (B, 3, size, size): bytes, or float32 in [0, 1].
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from fata._view import View
from fata.serve.errors import ServiceError
from fata.serve.limits import Limits

Array = NDArray[Any]

FORMATS = ("JPEG", "PNG", "WEBP")
HEADER = 4096  # most bytes of the header of a .npy file
TENSORS = ("application/x-npy", "application/x-safetensors")


def decode_files(files: Sequence[bytes], view: View, limits: Limits) -> Array:
    """Pixels of image files, resized and cropped as the model expects."""
    _count(len(files), limits)
    decoded = [_decoded(file, n, view, limits) for n, file in enumerate(files, 1)]
    return np.stack(decoded).transpose(0, 3, 1, 2)


def decode_tensor(kind: str, body: bytearray, view: View, limits: Limits) -> Array:
    """Pixels that were sent as a tensor."""
    tensor = _npy(body) if kind == "application/x-npy" else _safetensors(body)
    size = view.size
    if tensor.ndim != 4 or tensor.shape[1:] != (3, size, size):
        raise ServiceError(
            422, f"a tensor of shape {tensor.shape}: give (images, 3, {size}, {size})."
        )
    _count(len(tensor), limits)
    if tensor.dtype == np.uint8:
        return tensor
    if tensor.dtype != np.float32:
        raise ServiceError(422, f"a tensor of {tensor.dtype}: give uint8, or float32 in [0, 1].")
    if not (tensor.min() >= 0 and tensor.max() <= 1):  # nor NaN
        raise ServiceError(422, "pixels of float32 must be in [0, 1], before mean and std.")
    return tensor


def _count(images: int, limits: Limits) -> None:
    if not images:
        raise ServiceError(422, "no image: give at least one.")
    if images > limits.images:
        raise ServiceError(413, f"{images} images in one request: at most {limits.images}.")


def _decoded(file: bytes, number: int, view: View, limits: Limits) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata; bombs are checked here
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                if image.width * image.height > limits.pixels:
                    raise ServiceError(
                        413,
                        f"image {number} has {image.width} x {image.height} pixels: at most "
                        f"{limits.pixels:,}.",
                    )
                image.load()
                return np.asarray(view(image))
    except ServiceError:
        raise
    except Exception as error:  # of damage, Pillow raises many kinds
        raise ServiceError(
            422, f"image {number} is damaged, or neither JPEG, PNG nor WebP."
        ) from error


def _npy(body: bytearray) -> Array:
    """A view of the body: nothing is allocated by what the header says."""
    file, read = io.BytesIO(body[: HEADER + 12]), np.lib.format
    try:
        version = read.read_magic(file)
        header = {(1, 0): read.read_array_header_1_0, (2, 0): read.read_array_header_2_0}[version]
        shape, by_column, dtype = header(file, max_header_size=HEADER)
        if dtype.hasobject or by_column:
            raise ValueError
        return np.frombuffer(body, dtype, offset=file.tell()).reshape(shape)
    except Exception as error:
        raise ServiceError(422, "the body is no .npy file of numbers, row by row.") from error


def _safetensors(body: bytearray) -> Array:
    try:
        tensors = load_safetensors(bytes(body))
    except (SafetensorError, ValueError, KeyError) as error:
        raise ServiceError(422, "the body is no safetensors file.") from error
    if list(tensors) != ["images"]:
        raise ServiceError(422, "the safetensors file must hold one tensor, 'images'.")
    return tensors["images"]
