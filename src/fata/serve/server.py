"""`fata serve`: the network in this process, HTTP in another one."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fata.serve.access import Token
from fata.serve.exported import Exported
from fata.serve.service import Service

log = logging.getLogger("fata.serve")

FREE = 2.0  # seconds to wait for a port: a server that was killed leaves it a moment later


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets of a host's addresses, on which nothing listens yet; raises `OSError`."""
    until = time.monotonic() + FREE
    known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in known)
    found = [_bound(family, address, until) for family, address in addresses]
    if not any(found):
        raise OSError(errno.EADDRNOTAVAIL, "this machine has no such address")
    return [one for one in found if one]


def _bound(family: int, address: Any, until: float) -> socket.socket | None:
    """A socket of one address; None: the machine does not have it."""
    try:
        one = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # no IPv6 here
        return None
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    while True:
        try:
            one.bind(address)
            return one
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                one.close()
                if error.errno == errno.EADDRNOTAVAIL:
                    return None
                raise
            time.sleep(0.1)


def run(service: Service, tokens: Sequence[Token], listening: Sequence[socket.socket]) -> int:
    """Serve until SIGTERM or SIGINT; then requests that were begun are finished, streams saved.

    Returns the exit status: 1 if the HTTP process ended by itself. A second signal changes nothing.
    """
    stopping: list[int] = []
    fronts: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: Any) -> None:
        stopping.append(number)
        for one in fronts:
            one.terminate()

    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, stop))
        stack.callback(service.close)
        ours, theirs = socket.socketpair()
        with theirs:
            front = _start(theirs, listening)
        stack.callback(front.wait)
        stack.callback(front.terminate)
        fronts.append(front)
        stack.callback(Exported(service, tokens, ours).close)
        if not stopping:
            code = front.wait()
    if stopping:
        return 0
    log.error("the HTTP process ended", extra={"status": code})
    return 1


def _start(link: socket.socket, listening: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    level = logging.getLevelName(logging.getLogger("fata").getEffectiveLevel()).lower()
    numbers = [one.fileno() for one in (link, *listening)]
    # -P: no module is imported from the folder that the server happens to be started in.
    command = [sys.executable, "-P", *(f"-W{warning}" for warning in sys.warnoptions)]
    command += ["-m", "fata.serve.front", level, *map(str, numbers)]
    front = subprocess.Popen(command, pass_fds=numbers, start_new_session=True)
    for one in listening:
        one.close()
    return front
