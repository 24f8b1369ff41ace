"""The service on a port: uvicorn, with a time-out for requests that never begin."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fata.serve.access import Access
from fata.serve.app import create_app
from fata.serve.middleware import Guarded
from fata.serve.service import Service

log = logging.getLogger("fata.serve")


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


def run(service: Service, access: Access, host: str, port: int, **options: Any) -> None:
    """Serve until SIGTERM or SIGINT; then requests that were begun are finished, streams saved.

    Further `options` are uvicorn's.
    """
    limits = service.limits
    app = Guarded(create_app(service, access), limits, service.metrics)
    http = type("Protocol", (TimedProtocol,), {"seconds": limits.seconds})
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=http,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(limits.seconds),
        **options,
    )
    uvicorn.Server(config).run()
