"""A client of the service that needs nothing but the standard library and numpy."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit
from uuid import uuid4

import numpy as np

FILE = (bytes, str, os.PathLike)  # an image as it is stored


class ClientError(RuntimeError):
    """What the service said no to.

    Args:
        status: of HTTP.
        message: the service's.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


@dataclass(frozen=True)
class Guess:
    """A class, and how probable it is."""

    label: int
    name: str | None
    probability: float


@dataclass(frozen=True)
class Health:
    """Estimated accuracies of a stream's latest images, from 0 to 1.

    Args:
        source: of the source model.
        adapted: of the adapted model.
        gain: of the adapted model over the source model.
    """

    source: float
    adapted: float
    gain: float


@dataclass(frozen=True)
class Predictions:
    """What the service predicts.

    Args:
        stream: name of the stream.
        top: for each image, the most probable classes first.
        predicted_by: `adapted`, or `source` for the source weights.
        phase: the guard's; None if the step failed.
        batch: number of the stream's batch; None if the step failed.
        learned: whether the images were learned from.
        note: why not: `frozen`, `deadline` or `failed`; or None.
        health: as of the guard's last check; None: no guard, no check yet, or the step failed.
    """

    stream: str
    top: list[list[Guess]]
    predicted_by: str
    phase: str | None
    batch: int | None
    learned: bool
    note: str | None
    health: Health | None = None

    @property
    def labels(self) -> list[int]:
        """The most probable class of each image."""
        return [guesses[0].label for guesses in self.top]


class Client:
    """Predicts with a service and manages its streams. Threads may share it.

    Args:
        url: of the service, such as `http://localhost:8000`.
        token: a bearer token, or None.
        timeout: seconds.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r}: give http://HOST:PORT or https://HOST.")
        self._parts, self._token, self._timeout = parts, token, timeout
        self._own = threading.local()

    def predict(self, stream: str, images: Any, top: int = 5) -> Predictions:
        """Predict images of a stream, which learns from them.

        Args:
            stream: its name; a new one starts at the source weights.
            images: pixels (images, 3, size, size), an array or tensor of uint8 or of float32 in
                [0, 1], or a list of images; or files: a path, the bytes of one, or a list of these.
            top: classes for each image.
        """
        kind, body = _body(images)
        path = f"{_path(stream)}/predict?{urlencode({'top': top})}"
        found = json.loads(self._request("POST", path, body, kind))
        health = found.get("health")  # which older services do not send
        return Predictions(
            found["stream"],
            [[Guess(**guess) for guess in image["top"]] for image in found["predictions"]],
            **{n: found[n] for n in ("predicted_by", "phase", "batch", "learned", "note")},
            health=Health(**health) if health else None,
        )

    def streams(self, search: str = "") -> list[dict[str, Any]]:
        """A summary of each stream whose name has `search` in it."""
        query = urlencode({"search": search, "limit": 10_000})
        found: list[dict[str, Any]] = json.loads(self._request("GET", f"/v1/streams?{query}"))[
            "streams"
        ]
        return found

    def stream(self, stream: str) -> dict[str, Any]:
        """All that is known of a stream."""
        found: dict[str, Any] = json.loads(self._request("GET", _path(stream)))
        return found

    def configure(self, stream: str, **changes: bool | float | str | None) -> dict[str, Any]:
        """Create a stream, or change its `method`, `lr` or whether it is `frozen`."""
        body = json.dumps(changes).encode()
        found: dict[str, Any] = json.loads(
            self._request("PUT", _path(stream), body, "application/json")
        )
        return found

    def delete(self, stream: str) -> None:
        """Forget a stream and its state."""
        self._request("DELETE", _path(stream))

    def reset(self, stream: str) -> None:
        """Restart a stream from the source weights."""
        self._request("POST", f"{_path(stream)}/reset")

    def freeze(self, stream: str) -> None:
        """Predict without learning from now on."""
        self._request("POST", f"{_path(stream)}/freeze")

    def unfreeze(self, stream: str) -> None:
        """Learn again."""
        self._request("POST", f"{_path(stream)}/unfreeze")

    def download(self, stream: str) -> bytes:
        """The state of a stream: a safetensors file, as `adapter.load` takes it."""
        return self._request("GET", f"{_path(stream)}/state")

    def upload(self, stream: str, state: bytes) -> None:
        """Continue a stream from a state of the same model and method."""
        self._request("PUT", f"{_path(stream)}/state", state, "application/octet-stream")

    def close(self) -> None:
        """Close this thread's connection."""
        connection: HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connection(self) -> HTTPConnection:
        if not hasattr(self._own, "connection"):
            kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
            host, port = self._parts.hostname or "", self._parts.port
            self._own.connection = kind(host, port, timeout=self._timeout)
        connection: HTTPConnection = self._own.connection
        return connection

    def _request(
        self, method: str, path: str, body: bytes | None = None, kind: str | None = None
    ) -> bytes:
        headers = {"Content-Type": kind} if kind else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = self._connection()
        if connection.sock is not None and _closed(connection):
            connection.close()  # it was idle for too long
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException):
            connection.close()
            raise
        if answer.status >= 300:
            raise ClientError(answer.status, _message(content))
        return content


def _closed(connection: HTTPConnection) -> bool:
    """Whether the server has closed an idle connection."""
    import select

    return bool(select.select([connection.sock], [], [], 0)[0])


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _path(stream: str) -> str:
    return f"/v1/streams/{quote(stream, safe='')}"


def _body(images: Any) -> tuple[str, bytes]:
    """Content type and body of a request."""
    if isinstance(images, FILE):
        images = [images]
    if isinstance(images, Sequence) and all(isinstance(one, FILE) for one in images):
        files = [one if isinstance(one, bytes) else Path(one).read_bytes() for one in images]
        limit = uuid4().hex
        head = 'Content-Disposition: form-data; name="image"; filename="image"'
        parts = [f"--{limit}\r\n{head}\r\n\r\n".encode() + file + b"\r\n" for file in files]
        body = b"".join([*parts, f"--{limit}--\r\n".encode()])
        return f"multipart/form-data; boundary={limit}", body
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(images), allow_pickle=False)
    return "application/x-npy", file.getvalue()
