"""The HTTP process: takes requests, decodes images and writes JSON.

`fata serve` starts it, with the numbers of the socket to the process of the network and of those
that it listens on. So HTTP takes no time from the network's Python, and this process needs no
PyTorch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fata.serve.app import create_app
from fata.serve.logs import log_as_json
from fata.serve.metrics import RequestMetrics
from fata.serve.middleware import Guarded
from fata.serve.remote import Remote

log = logging.getLogger("fata.serve")


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes a connection on which the next request's headers are not whole after some time.

    uvicorn alone waits for ever once a header has begun.
    """

    seconds = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client connected."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request arrived."""
        super().data_received(data)
        if not self._between_requests:
            self._unwatch()

    def on_response_complete(self) -> None:
        """The next request may come."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        if self._timer is None and self._between_requests:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


class Server(uvicorn.Server):
    """Says where it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for one in sockets or ():
            host, port = one.getsockname()[:2]
            log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


def http_server(
    link: socket.socket, lost: Callable[[], None] | None = None, **options: Any
) -> Server:
    """The server in front of the service at the other end of a socket.

    Args:
        link: to the process of the network.
        lost: is called when that process is gone.
        options: of uvicorn.
    """
    remote = Remote(link, lost)
    limits, metrics = remote.setup.limits, RequestMetrics()
    config = uvicorn.Config(
        Guarded(create_app(remote, metrics), limits, metrics),
        http=type("Protocol", (TimedProtocol,), {"seconds": limits.seconds}),
        log_config=None,
        access_log=False,
        server_header=False,
        **options,
    )
    return Server(config)


def main(level: str, link: str, *listening: str) -> None:
    """Serve until SIGTERM; then requests that were begun are finished."""
    log_as_json(level)
    sockets = [socket.socket(fileno=int(number)) for number in listening]
    try:
        for one in sockets:
            one.listen()
    except OSError as error:  # another server began to listen since the port was found free
        log.error("cannot listen: %s", error.strerror)
        raise SystemExit(1) from None
    http_server(socket.socket(fileno=int(link)), _end).run(sockets)


def _end() -> None:
    """The process of the network is gone, and with it what waits for predictions."""
    log.error("the process of the network ended")
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
