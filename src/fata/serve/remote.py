"""The service as the HTTP process sees it: calls over a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import Future, IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import numpy as np

from fata.serve.decode import Array
from fata.serve.errors import ServiceError
from fata.serve.messages import Setup, head, read

log = logging.getLogger("fata.serve")

Reply = tuple[Any, bytes]  # the result, and bytes behind it


class Remote:
    """Calls of a `fata.serve.exported.Exported` in another process.

    Args:
        link: to that process.
        lost: is called when that process is gone.
    """

    def __init__(self, link: socket.socket, lost: Callable[[], None] | None = None) -> None:
        self.setup = Setup.receive(link)
        self._link, self._lost = link, lost
        self._writer: StreamWriter | None = None
        self._replies: dict[int, Future[Reply]] = {}
        self._numbers, self._sending = count(), asyncio.Lock()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Calls are possible inside the context."""
        reader, writer = await asyncio.open_connection(sock=self._link)
        self._writer = writer
        receiving = asyncio.create_task(self._receive(reader))
        try:
            yield
        finally:
            self._writer = None
            receiving.cancel()
            writer.close()

    async def submit(self, stream: str, pixels: Array) -> tuple[Array, dict[str, Any]]:
        """Probabilities for the images of a stream, one row each, and what became of them."""
        given = stream, pixels.dtype.name, pixels.shape
        (shape, outcome), found = await self._exchange("submit", given, {}, pixels.tobytes())
        return np.frombuffer(found, np.float32).reshape(shape), outcome

    async def call(self, name: str, *given: Any, data: bytes = b"", **named: Any) -> Any:
        """The result of a method of the service; raises `ServiceError` where it does."""
        result, content = await self._exchange(name, given, named, data)
        return content or result

    async def _exchange(self, name: str, given: Any, named: dict[str, Any], data: bytes) -> Reply:
        if self._writer is None:
            raise ServiceError(503, "the service is not ready.", 1)
        number = next(self._numbers)
        reply: Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            message = {"id": number, "call": name, "given": given, "named": named}
            await self._send(head(message, len(data)), data)
            return await reply
        finally:
            del self._replies[number]

    async def _send(self, *parts: bytes) -> None:
        """One message at a time, so that no more than one lies in the buffer of the socket."""
        async with self._sending:
            if self._writer:
                for part in parts:  # all of them, even if the request is cancelled meanwhile
                    self._writer.write(part)
                with suppress(ConnectionError):  # `_receive` notices
                    await self._writer.drain()

    async def _receive(self, reader: StreamReader) -> None:
        try:
            while True:
                message, data = await read(reader)
                reply = self._replies.get(message["id"])
                if reply is None or reply.done():  # the client is gone
                    continue
                if "error" in message:
                    reply.set_exception(ServiceError(*message["error"]))
                else:
                    reply.set_result((message["result"], data))
        except (IncompleteReadError, ConnectionError):
            pass
        except Exception:
            log.exception("no reply can be read any more")
        self._writer = None
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ServiceError(503, "the service has stopped.", 1))
        if self._lost:
            self._lost()
