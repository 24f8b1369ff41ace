"""The service as the HTTP process calls it: one thread that takes calls, and some that run them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from fata.serve.access import Token
from fata.serve.errors import ServiceError
from fata.serve.messages import Message, Setup, pack, receive
from fata.serve.scheduler import Outcome
from fata.serve.service import Service

log = logging.getLogger("fata.serve")

# Calls that wait for nothing, and those that wait until a batch is done.
QUICK = {"history", "is_ready", "latest_images", "metrics_text", "names", "summaries"}
SLOW = {"configure", "delete", "describe", "download", "freeze", "reset", "upload"}
THREADS = 8  # for each kind


class Exported:
    """Runs what comes over a socket, until that is closed.

    Args:
        service: is called.
        tokens: of those who may use it.
        link: to the HTTP process.
    """

    def __init__(self, service: Service, tokens: Sequence[Token], link: socket.socket) -> None:
        self._service, self._link = service, link
        self._sending = threading.Lock()
        self._queued: dict[int, tuple[str, Future[Outcome]]] = {}  # by the number of the call
        self._quick = ThreadPoolExecutor(THREADS, "fata quick call")
        self._slow = ThreadPoolExecutor(THREADS, "fata call")
        loaded = service.loaded
        setup = Setup(loaded.preprocess.geometry, loaded.labels, service.limits, tuple(tokens))
        link.sendall(setup.pack())
        self._thread = threading.Thread(target=self._receive, name="fata calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._quick.shutdown()
        self._slow.shutdown()
        self._link.close()

    def _receive(self) -> None:
        try:
            while True:
                message, data = receive(self._link)
                name = message["call"]
                if name == "submit":
                    self._submit(message, data)
                elif name == "drop":  # there may be a reply on its way
                    if queued := self._queued.pop(message["id"], None):
                        self._service.drop(*queued)
                elif name in QUICK:
                    self._quick.submit(self._run, message, data)
                elif name in SLOW:
                    self._slow.submit(self._run, message, data)
                else:
                    raise ValueError(f"no call {name!r}")
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("no call can be taken any more")
        finally:
            with suppress(OSError):  # the HTTP process ends, and with it the service
                self._link.shutdown(socket.SHUT_RDWR)

    def _submit(self, message: Message, data: bytearray) -> None:
        """Queue images; the reply is sent when they are predicted."""
        try:
            stream, dtype, shape = message["given"]
            pixels = torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
            future = self._service.submit(stream, pixels)
        except Exception as error:
            self._fail(message, error)
        else:
            self._queued[message["id"]] = stream, future
            future.add_done_callback(partial(self._submitted, message))

    def _submitted(self, message: Message, future: Future[Outcome]) -> None:
        self._queued.pop(message["id"], None)
        try:
            outcome = future.result()
            probabilities = outcome.logits.softmax(1).nan_to_num(0).numpy()
            result = probabilities.shape, outcome.as_reply()
            self._reply(message, result, probabilities.tobytes())
        except Exception as error:
            self._fail(message, error)

    def _run(self, message: Message, data: bytearray) -> None:
        name, given = message["call"], message["given"]
        try:
            if name == "upload":
                given = [*given, bytes(data)]
            found = getattr(self._service, name)(*given, **message["named"])
            if isinstance(found, bytes):
                self._reply(message, None, found)
            else:
                self._reply(message, found)
        except Exception as error:
            self._fail(message, error)

    def _fail(self, message: Message, error: Exception) -> None:
        if not isinstance(error, ServiceError):
            log.error("a call failed", exc_info=error, extra={"call": message["call"]})
            error = ServiceError(500, "internal error.")
        given = error.status, error.message, error.retry_after
        self._send({"id": message["id"], "error": given})

    def _reply(self, message: Message, result: Any, data: bytes = b"") -> None:
        self._send({"id": message["id"], "result": result}, data)

    def _send(self, reply: Message, data: bytes = b"") -> None:
        packed = pack(reply, data)
        with self._sending, suppress(OSError):  # the HTTP process is gone
            self._link.sendall(packed)
