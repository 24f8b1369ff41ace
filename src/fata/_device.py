"""Numbers of the device's that are read later, so that it has work meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor


class Deferred:
    """One number; reading it waits for what was launched before it, not for what follows."""

    def __init__(self, number: Tensor) -> None:
        self._number, self._there = number, None
        if number.is_cuda:
            self._number = number.to("cpu", non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(number.device))

    def read(self) -> float:
        """The number."""
        if self._there is not None:
            self._there.synchronize()
        return self._number.item()
