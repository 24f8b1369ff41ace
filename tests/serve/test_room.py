"""Room for requests in the HTTP process."""

import asyncio

import pytest

pytest.importorskip("fastapi", reason="needs fata[serve]")

from fata.serve.limits import Limits
from fata.serve.metrics import RequestMetrics
from fata.serve.middleware import Guarded
from fata.serve.room import Room


def test_bytes_are_taken_in_order():
    async def run():
        room, taken = Room(10), []

        async def take(size):
            await room.take(size)
            taken.append(size)

        waiting = [asyncio.create_task(take(size)) for size in (6, 5, 1, 4)]
        await asyncio.sleep(0.01)
        assert taken == [6]  # 1 waits behind 5
        room.give(6)
        await asyncio.gather(*waiting)
        assert taken == [6, 5, 1, 4]
        room.give(10)

    asyncio.run(run())


def test_who_waits_no_longer_holds_nobody_up():
    async def run():
        room = Room(10)
        await room.take(8)
        large, small = asyncio.create_task(room.take(9)), asyncio.create_task(room.take(2))
        await asyncio.sleep(0.01)
        large.cancel()
        await asyncio.wait_for(small, 60)
        last = asyncio.create_task(room.take(10))
        await asyncio.sleep(0.01)
        room.give(10)  # it is its turn, and it is cancelled before it knows
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        await asyncio.wait_for(room.take(10), 60)

    asyncio.run(run())


def test_a_request_that_finds_no_room_in_time_is_told_so():
    """Those that are chunked count as the largest."""
    done = []

    async def app(scope, receive, send):
        await receive()
        if scope["path"] == "/early":
            scope["state"]["held"].release()
        await asyncio.sleep(0.2)

    async def answers(paths):
        guarded = Guarded(app, Limits(body=80, seconds=0.1), RequestMetrics())

        async def receive():
            return {"type": "http.request", "body": b"x" * 80}

        async def send(message):
            done.append(message.get("status"))

        headers = [(b"transfer-encoding", b"chunked")]
        scopes = [{"type": "http", "path": path, "headers": headers} for path in paths]
        await asyncio.gather(*(guarded(scope, receive, send) for scope in scopes))

    asyncio.run(answers(["/"] * 4))
    assert done == []
    asyncio.run(answers(["/early"] * 9))
    assert done == []
    asyncio.run(answers(["/"] * 5))
    assert 503 in done
