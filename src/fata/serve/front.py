"""The HTTP process: takes requests, decodes images and writes JSON.

`fata serve` starts it, with the numbers of the socket to the process of the network and of those
that it listens on. So HTTP takes no time from the network's Python, and this process needs no
PyTorch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fata.serve.app import create_app
from fata.serve.logs import log_as_json
from fata.serve.metrics import RequestMetrics
from fata.serve.middleware import Guarded
from fata.serve.remote import Remote


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes a connection whose headers are not whole after some time: uvicorn alone never does."""

    seconds = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client connected."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request arrived."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        if self._timer is None and self._between_requests:
            self._timer = self.loop.call_later(self.seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._between_requests:
            self.transport.close()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


def http_server(
    link: socket.socket, lost: Callable[[], None] | None = None, **options: Any
) -> uvicorn.Server:
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
        timeout_graceful_shutdown=round(limits.seconds),
        **options,
    )
    return uvicorn.Server(config)


def main(level: str, link: str, *listening: str) -> None:
    """Serve until SIGTERM or SIGINT; then requests that were begun are finished."""
    log_as_json(level)
    sockets = [socket.socket(fileno=int(number)) for number in listening]
    server = http_server(socket.socket(fileno=int(link)), partial(os._exit, 1))
    server.run(sockets)


if __name__ == "__main__":
    main(*sys.argv[1:])
