"""What a client may ask for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fata._files import STREAM
from fata.serve.errors import ServiceError

NAME = "a stream's name has at most 128 letters, digits, '.', '_' and '-'."


def check_name(name: str) -> None:
    """Raise `ServiceError` for what is no stream's name."""
    if not STREAM.fullmatch(name):
        raise ServiceError(422, NAME)


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Args:
        body: bytes of a request.
        pixels: width times height of an image, before it is decoded.
        images: images of a request.
        streams: streams that there may be.
        rate: requests a second of one stream; 0: any.
        queue: images that may wait to be predicted.
        seconds: to send a request.
    """

    body: int = 32 << 20
    pixels: int = 50_000_000
    images: int = 64
    streams: int = 1000
    rate: float = 0.0
    queue: int = 4096
    seconds: float = 30.0


class RateLimit:
    """A token bucket a stream: so many requests a second, and as many at once.

    Args:
        rate: requests a second; 0: any.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._buckets: dict[str, tuple[float, float]] = {}  # requests left, when that was

    def check(self, name: str, now: float | None = None) -> None:
        """Count a request; raises `ServiceError` for one too many."""
        if not self._rate:
            return
        now = time.monotonic() if now is None else now
        most = max(1.0, self._rate)
        left, before = self._buckets.get(name, (most, now))
        left = min(most, left + (now - before) * self._rate)
        if left < 1:
            wait = (1 - left) / self._rate
            message = f"too many requests for this stream: at most {self._rate:g} a second."
            raise ServiceError(429, message, wait)
        self._buckets[name] = left - 1, now

    def forget(self, name: str) -> None:
        """The stream is gone."""
        self._buckets.pop(name, None)
