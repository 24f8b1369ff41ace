"""What surrounds every request: sizes, room, time-outs, origins, errors, and the count of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from fata.serve.errors import ServiceError
from fata.serve.limits import Limits
from fata.serve.metrics import RequestMetrics
from fata.serve.room import Held, Rooms

log = logging.getLogger("fata.serve")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def failure(error: ServiceError) -> Response:
    """An error as it is sent."""
    headers = dict(HEADERS)
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": error.message}, error.status, headers)


class Guarded:
    """An application whose requests are limited in size and time.

    A request finds its room in memory as `state.held` of its scope. Whatever it has not released
    is free again at its end.

    Args:
        app: the application.
        limits: what a client may ask for.
        metrics: count the requests.
    """

    def __init__(self, app: Application, limits: Limits, metrics: RequestMetrics) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._rooms = Rooms(limits.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: list[int] = []
        held: Held | None = None

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
                more = [(n.lower().encode(), v.encode()) for n, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        try:
            held = self._rooms.held(self._size(Headers(scope=scope)))
            scope.setdefault("state", {})["held"] = held
            await self._app(scope, self._limited(receive, held), sent)
        except ServiceError as error:
            await self._fail(error, scope, receive, send, status)
        except Exception:
            log.exception("a request failed", extra={"path": scope["path"]})
            await self._fail(ServiceError(500, "internal error."), scope, receive, send, status)
        finally:
            if held:
                held.release()
            self._metrics.requests.labels(str(status[0]) if status else "499").inc()

    async def _fail(
        self, error: ServiceError, scope: Scope, receive: Receive, send: Send, status: list[int]
    ) -> None:
        if not status:
            status.append(error.status)
            await failure(error)(scope, receive, send)

    def _size(self, headers: Headers) -> int:
        """Bytes of the body, at most."""
        most = str(self._limits.body) if "transfer-encoding" in headers else "0"
        length = headers.get("content-length", most)
        if not length.isdecimal() or int(length) > self._limits.body:
            raise self._too_large()
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise ServiceError(403, "requests of other sites' pages are not supported.")
        return int(length)

    def _too_large(self) -> ServiceError:
        return ServiceError(413, f"a request may have at most {self._limits.body:,} bytes.")

    def _limited(self, receive: Receive, held: Held) -> Receive:
        """Parts of the body once it has room, as long as they are not too many and not too slow."""
        loop = asyncio.get_running_loop()
        until, size, begun, whole = loop.time() + self._limits.seconds, 0, False, False

        async def limited() -> MutableMapping[str, Any]:
            nonlocal size, begun, whole
            if whole:  # what follows is the client going away, whenever that is
                return await receive()
            if not begun:
                try:
                    await asyncio.wait_for(held.take(), until - loop.time())
                except TimeoutError:
                    raise ServiceError(503, "too many large requests at a time.", 1) from None
                begun = True
            try:
                message = await asyncio.wait_for(receive(), until - loop.time())
            except TimeoutError:
                raise ServiceError(
                    408, f"the request took over {self._limits.seconds:g} s to arrive."
                ) from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._limits.body:
                raise self._too_large()
            return message

        return limited
