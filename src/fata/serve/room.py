"""How many bytes of requests are in memory at a time; others wait before their body is read."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque

LARGEST = 4  # requests of the largest size that there is room for
SMALL = 8  # of them make a largest one: smaller requests wait for each other alone


class Room:
    """Bytes that are taken in the order in which they are asked for.

    Args:
        free: bytes.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._waiting: deque[tuple[int, Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait until so many bytes are free; they are taken then."""
        turn: Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self.give(0)
        try:
            await turn
        except asyncio.CancelledError:
            self.give(0 if turn.cancelled() else size)
            raise

    def give(self, size: int) -> None:
        """So many bytes are free again."""
        self._free += size
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self._free:
                    return
                self._free -= size
                turn.set_result(None)
            self._waiting.popleft()


class Rooms:
    """Room for large and for small requests.

    Args:
        body: bytes of the largest request.
    """

    def __init__(self, body: int) -> None:
        self._small, self._large, self._from = Room(body), Room(LARGEST * body), body // SMALL

    def held(self, size: int) -> Held:
        """Room for a request of so many bytes, not taken yet."""
        return Held(self._large if size > self._from else self._small, size)


class Held:
    """The room of one request."""

    def __init__(self, room: Room, size: int) -> None:
        self._room, self._size, self._taken = room, size, False

    async def take(self) -> None:
        """Wait for it."""
        await self._room.take(self._size)
        self._taken = True

    def release(self) -> None:
        """The bytes are in memory no longer."""
        if self._taken:
            self._taken = False
            self._room.give(self._size)
