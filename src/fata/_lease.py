"""Leases in a folder that several processes share: a name belongs to one of them at a time.

A lease is a lock of the operating system on one byte of a file; the byte is a hash of the name. So
thousands of names need one open file. The system frees the locks of a process that dies, and a
network file system those of a machine that is gone: no clock has to be compared.

A second byte a name says that another process waits for it, so that its holder can hand it over.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from pathlib import Path

HALF = 1 << 62  # bytes from here on say that somebody waits
# Locks of an open file exclude other threads' too; elsewhere than on Linux those of a process.
_SET = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
_GET = getattr(fcntl, "F_OFD_GETLK", fcntl.F_GETLK)
_FLOCK = "hhqqi4x" if struct.calcsize("q") == 8 else "hhqqi"


class Leases:
    """The names in a folder that this object holds.

    Args:
        folder: an existing folder; the file `.lease` in it is locked.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / ".lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._held: dict[int, str] = {}
        self._waiting: set[int] = set()

    def acquire(self, name: str) -> bool:
        """Whether the name is ours now; if not, its holder is told that we wait for it."""
        place = _place(name)
        if place in self._held:
            return True
        if not self._lock(place):
            if place not in self._waiting and self._lock(HALF + place):
                self._waiting.add(place)
            return False
        self._held[place] = name
        self.give_up(name)
        return True

    def give_up(self, name: str) -> None:
        """Wait for a name no longer."""
        place = _place(name)
        if place in self._waiting:
            self._waiting.discard(place)
            self._unlock(HALF + place)

    def release(self, name: str) -> None:
        """Let another process have the name."""
        if self._held.pop(_place(name), None) is not None:
            self._unlock(_place(name))

    def wanted(self) -> list[str]:
        """Names held here that other processes wait for."""
        found, start = [], HALF
        while (place := self._locked_by_others(start)) is not None:
            if (name := self._held.get(place - HALF)) is not None:
                found.append(name)
            start = place + 1
        return found

    def close(self) -> None:
        """Release all names."""
        self._held.clear()
        os.close(self._file)

    def _lock(self, place: int) -> bool:
        try:
            fcntl.fcntl(self._file, _SET, _flock(fcntl.F_WRLCK, place, 1))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, place: int) -> None:
        fcntl.fcntl(self._file, _SET, _flock(fcntl.F_UNLCK, place, 1))

    def _locked_by_others(self, start: int) -> int | None:
        """The first byte from `start` on that another process has locked."""
        answer = fcntl.fcntl(self._file, _GET, _flock(fcntl.F_WRLCK, start, 0))
        kind, _, found, *_ = struct.unpack(_FLOCK, answer)
        return None if kind == fcntl.F_UNLCK else max(found, start)


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % HALF
