"""Images of a request: files that are decoded, or tensors that are checked. Nothing is unpickled.

Either way they become pixels (B, 3, size, size): bytes, or float32 in [0, 1].
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from fata.serve.errors import ServiceError
from fata.serve.limits import Limits
from fata.zoo.preprocess import Preprocess

FORMATS = ("JPEG", "PNG", "WEBP")
TENSORS = ("application/x-npy", "application/x-safetensors")


def decode_files(files: Sequence[bytes], preprocess: Preprocess, limits: Limits) -> Tensor:
    """Pixels of image files, resized and cropped as the model expects."""
    _count(len(files), limits)
    decoded = [_decoded(file, n, preprocess, limits) for n, file in enumerate(files, 1)]
    return torch.stack(decoded)


def decode_tensor(kind: str, body: bytes, preprocess: Preprocess, limits: Limits) -> Tensor:
    """Pixels that were sent as a tensor."""
    tensor = _npy(body) if kind == "application/x-npy" else _safetensors(body)
    size = preprocess.size
    if tensor.ndim != 4 or tuple(tensor.shape[1:]) != (3, size, size):
        raise ServiceError(
            422, f"a tensor of shape {tuple(tensor.shape)}: give (images, 3, {size}, {size})."
        )
    _count(len(tensor), limits)
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype != torch.float32:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ServiceError(422, f"a tensor of {kind}: give uint8, or float32 in [0, 1].")
    if not bool(((tensor >= 0) & (tensor <= 1)).all()):
        raise ServiceError(422, "pixels of float32 must be in [0, 1], before mean and std.")
    return tensor


def in_unit(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1], from bytes or from such pixels."""
    return pixels.float().div(255) if pixels.dtype == torch.uint8 else pixels


def together(parts: Sequence[Tensor]) -> Tensor:
    """Pixels of several requests; of both kinds they become float32."""
    same = len({part.dtype for part in parts}) == 1
    return torch.cat([part if same else in_unit(part) for part in parts])


def _count(images: int, limits: Limits) -> None:
    if not images:
        raise ServiceError(422, "no image: give at least one.")
    if images > limits.images:
        raise ServiceError(413, f"{images} images in one request: at most {limits.images}.")


def _decoded(file: bytes, number: int, preprocess: Preprocess, limits: Limits) -> Tensor:
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
                return torch.from_numpy(np.array(preprocess.view(image))).permute(2, 0, 1)
    except ServiceError:
        raise
    except Exception as error:  # of damage, Pillow raises many kinds
        raise ServiceError(
            422, f"image {number} is damaged, or neither JPEG, PNG nor WebP."
        ) from error


def _npy(body: bytes) -> Tensor:
    """A view of the body: nothing is allocated by what the header says."""
    file, read = io.BytesIO(body), np.lib.format
    try:
        version = read.read_magic(file)
        header = {(1, 0): read.read_array_header_1_0, (2, 0): read.read_array_header_2_0}[version]
        shape, by_column, dtype = header(file, max_header_size=4096)
        if dtype.hasobject or by_column:
            raise ValueError
        array = np.frombuffer(body, dtype, offset=file.tell()).reshape(shape)
        return torch.from_numpy(array.copy())
    except Exception as error:
        raise ServiceError(422, "the body is no .npy file of numbers, row by row.") from error


def _safetensors(body: bytes) -> Tensor:
    try:
        tensors = load_safetensors(body)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ServiceError(422, "the body is no safetensors file.") from error
    if list(tensors) != ["images"]:
        raise ServiceError(422, "the safetensors file must hold one tensor, 'images'.")
    return tensors["images"]
