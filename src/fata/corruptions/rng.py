"""A counter-based random generator for each image.

Every number is a hash of (seed, image id, corruption, severity, purpose, position). There is no
running state, so the batch of an image, its size, its order and the device do not matter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


# The constants of the SplitMix64 generator's output function.
_STEP = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


class ImageRng:
    """Numbers for a batch of images, each from its own key."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys  # (B,) int64
        self._asked = 0

    @classmethod
    def of(
        cls, seed: int, ids: Iterable[int], name: str, severity: int, device: torch.device
    ) -> ImageRng:
        """For some images and one corruption."""
        texts = (f"{seed}/{image}/{name}/{severity}".encode() for image in ids)
        digests = (hashlib.blake2b(text, digest_size=8).digest() for text in texts)
        keys = [int.from_bytes(digest, "little", signed=True) for digest in digests]
        return cls(torch.tensor(keys, dtype=torch.int64).to(device))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """(B, *shape) in [low, high)."""
        bits = (self._hash(math.prod(shape)) >> 40) & 0xFFFFFF
        return bits.float().mul_((high - low) * 2.0**-24).add_(low).view(-1, *shape)

    def normal(self, *shape: int) -> Tensor:
        """(B, *shape) of mean 0 and deviation 1, two from each hash (Box and Muller)."""
        count = math.prod(shape)
        bits = self._hash((count + 1) // 2)
        radius = ((bits >> 40) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
        radius = radius.log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFF).float().mul_(2 * math.pi / (1 << 24))
        pairs = torch.cat((radius * angle.cos(), radius * angle.sin()), 1)
        return pairs[:, :count].reshape(-1, *shape)

    def integer(self, low: int, high: int, *shape: int) -> Tensor:
        """(B, *shape) of low, ..., high - 1."""
        bits = (self._hash(math.prod(shape)) >> 33) & 0x7FFFFFFF
        return (low + bits % (high - low)).view(-1, *shape)

    def _hash(self, count: int) -> Tensor:
        """(B, count) of 64 random bits; never the same numbers twice."""
        counter = torch.arange(self._asked, self._asked + count, device=self.keys.device)
        self._asked += count
        z = (self.keys[:, None] + counter).mul_(_STEP)
        for shift, factor in zip((30, 27), _MIX, strict=True):
            z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
            z *= factor
        z ^= (z >> 31) & ((1 << 33) - 1)
        return z
