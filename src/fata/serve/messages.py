"""Messages between the two processes of the service: JSON, and bytes behind it."""

from __future__ import annotations

import json
import socket
import struct
from asyncio import StreamReader
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fata._view import View
from fata.serve.access import Token
from fata.serve.limits import Limits

HEAD = struct.Struct("!IQ")  # bytes of the JSON, and bytes behind it

Message = dict[str, Any]


def pack(message: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A message as it is sent."""
    return head(message, len(data)) + data


def head(message: Mapping[str, Any], size: int) -> bytes:
    """A message without the bytes behind it, which are so many."""
    text = json.dumps(message).encode()
    return HEAD.pack(len(text), size) + text


def receive(link: socket.socket) -> tuple[Message, bytearray]:
    """Wait for a message; raises `EOFError` if the other process is gone."""
    text, data = HEAD.unpack(_exactly(link, HEAD.size))
    return json.loads(_exactly(link, text)), _exactly(link, data)


async def read(reader: StreamReader) -> tuple[Message, bytes]:
    """The same in an event loop."""
    text, data = HEAD.unpack(await reader.readexactly(HEAD.size))
    return json.loads(await reader.readexactly(text)), await reader.readexactly(data)


def _exactly(link: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        count = link.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return found


@dataclass(frozen=True)
class Setup:
    """What the HTTP process must know of the service: the first message to it.

    Args:
        view: of an image of a request.
        labels: names of the classes; none: they have only numbers.
        limits: what a client may ask for.
        tokens: those that are accepted; none: anybody is let in.
    """

    view: View
    labels: tuple[str, ...]
    limits: Limits
    tokens: tuple[Token, ...] = ()

    def pack(self) -> bytes:
        """As it is sent."""
        return pack(asdict(self))

    @classmethod
    def receive(cls, link: socket.socket) -> Setup:
        """Wait for it."""
        given, _ = receive(link)
        return cls(
            View(**given["view"]),
            tuple(given["labels"]),
            Limits(**given["limits"]),
            tuple(Token(one["secret"], tuple(one["streams"])) for one in given["tokens"]),
        )
