"""Heartbeats, by which ranks tell who of them is gone and who is late.

`torch.distributed` alone says that a reduction timed out, not whose fault it was.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from fata._torch import PrefixStore, default_store

_BEAT = 0.25  # seconds between two heartbeats
_DEAD = 2.0  # seconds without one


class Heartbeat:
    """Tells the other ranks that this one is alive, and this one who of them is gone or late.

    Heartbeats lie in the store through which the processes found each other. A background thread
    writes them, as a rank that waits for another cannot, and reads what the others found out.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._store = PrefixStore(f"fata {name}", default_store())
        self._rank, self._size = rank, size
        self.sums = 0  # that this rank came to
        self._heard, self._told = "", False
        self._beat()
        threading.Thread(target=self._live, daemon=True).start()

    def go_on(self) -> None:
        """What this rank told is no longer so."""
        if self._told:
            self._store.delete_key("why")
            self._told = False

    def tell(self, why: str) -> str:
        """Tell the others what went wrong; the first to tell is right."""
        try:
            told = self._store.compare_set("why", "", why).decode()
        except RuntimeError:  # no rank is left to tell
            return why
        self._told = told == why
        return told

    def why(self, error: RuntimeError) -> str:
        """What went wrong, as far as the signs tell."""
        detail = str(error).partition("\n")[0]
        try:
            if self._store.check(["why"]):
                return self._store.get("why").decode()
            before = self._signs()
            time.sleep(_DEAD)
            after = self._signs()
        except RuntimeError:
            return self._heard or f"rank 0, or the launcher, is gone with the store: {detail}"
        gone = [rank for rank in range(self._size) if before[rank] == after[rank]]
        sums = [int(sign.split()[1]) for sign in after]
        late = [rank for rank in range(self._size) if sums[rank] < max(sums)]
        if gone:
            return self._leave(gone, "is gone: its process gives no sign of life")
        if late:
            return self._leave(late, f"is alive, but did not come in time: {detail}")
        return f"the ranks lost each other: {detail}"

    def _leave(self, ranks: list[int], how: str) -> str:
        """Tell it, and stay until the others have heard."""
        told = self.tell(f"rank {', '.join(map(str, ranks))} {how}.")
        time.sleep(3 * _BEAT)
        return told

    def _signs(self) -> list[str]:
        signs = self._store.multi_get([str(rank) for rank in range(self._size)])
        return [sign.decode() for sign in signs]

    def _beat(self) -> None:
        self._store.set(str(self._rank), f"{time.monotonic()} {self.sums}")
        self._heard = self._store.get("why").decode() if self._store.check(["why"]) else ""

    def _live(self) -> None:
        try:
            while dist.is_initialized():
                self._beat()
                time.sleep(_BEAT)
        except RuntimeError:  # the store is gone; who asks will find that out
            return
