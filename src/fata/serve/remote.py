"""The service as the HTTP process sees it: calls over a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import Future, IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import numpy as np

from fata.serve.decode import Array
from fata.serve.errors import ServiceError
from fata.serve.messages import Message, Setup, head, read

log = logging.getLogger("fata.serve")

Reply = tuple[Any, bytes]  # the result, and bytes behind it

PIECE = 1 << 20  # bytes of a message that are handed to the transport at a time, which copies them


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
        self._tasks = set[asyncio.Task[None]]()

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

    def submit(
        self, stream: str, pixels: Array, sent: Callable[[], None]
    ) -> Coroutine[Any, Any, tuple[Array, dict[str, Any]]]:
        """Probabilities for the images of a stream, one row each, and what became of them.

        `sent` is called once the pixels are not needed here. If the coroutine is cancelled, images
        whose turn has not come are not predicted.
        """
        given = stream, pixels.dtype.name, pixels.shape
        data = np.ascontiguousarray(pixels).data.cast("B")
        # Not awaited here: this frame would keep the pixels.
        return _probabilities(self._exchange("submit", given, {}, data, sent))

    async def call(self, name: str, *given: Any, data: bytes = b"", **named: Any) -> Any:
        """The result of a method of the service; raises `ServiceError` where it does."""
        result, content = await self._exchange(name, given, named, data)
        return content or result

    async def _exchange(
        self,
        name: str,
        given: Any,
        named: dict[str, Any],
        data: bytes | memoryview,
        sent: Callable[[], None] | None = None,
    ) -> Reply:
        if self._writer is None:
            raise ServiceError(503, "the service is not ready.", 1)
        number = next(self._numbers)
        reply: Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        message = {"id": number, "call": name, "given": given, "named": named}
        try:
            await asyncio.shield(self._sent(message, data))
            del data
            if sent:
                sent()
            return await reply
        except asyncio.CancelledError:
            if name == "submit":
                self._sent({"id": number, "call": "drop"})
            raise
        finally:
            del self._replies[number]

    def _sent(self, message: Message, data: bytes | memoryview = b"") -> asyncio.Task[None]:
        """A task that sends a message, all of it, even if what it is for is cancelled."""
        task = asyncio.create_task(self._send(message, data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, message: Message, data: bytes | memoryview) -> None:
        """One message at a time, a piece at a time: no more lies in the buffer of the socket."""
        async with self._sending:
            parts = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
            for part in (head(message, len(data)), *parts):
                if self._writer:
                    with suppress(ConnectionError):  # `_receive` notices
                        self._writer.write(part)
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


async def _probabilities(reply: Awaitable[Reply]) -> tuple[Array, dict[str, Any]]:
    (shape, outcome), found = await reply
    return np.frombuffer(found, np.float32).reshape(shape), outcome
