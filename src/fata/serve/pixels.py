"""Pixels of requests: bytes, or float32 in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_unit(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1]."""
    return pixels.float().div(255) if pixels.dtype == torch.uint8 else pixels


def together(parts: Sequence[Tensor]) -> Tensor:
    """Pixels of several requests; of both kinds they become float32."""
    same = len({part.dtype for part in parts}) == 1
    return torch.cat([part if same else in_unit(part) for part in parts])
