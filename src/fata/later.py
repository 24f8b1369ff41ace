"""Numbers of the device's that are asked for later, when they are there: nobody waits for them."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """One number; what was launched before it is done when it is read, what follows is not."""

    def __init__(self, number: Tensor) -> None:
        self._number, self._there = number, None
        if number.is_cuda:
            self._number = number.to("cpu", non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def read(self) -> float:
        """The number."""
        if self._there is not None:
            self._there.synchronize()
        return self._number.item()
