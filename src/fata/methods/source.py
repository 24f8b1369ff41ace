"""No adaptation: the source model as it is, and with BatchNorm on the statistics of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fata.methods.base import Batch, Memory, Method
from fata.methods.selection import Selection


@dataclass(frozen=True)
class Norm(Method):
    """Learns nothing; BatchNorm normalises with the batch. The same as `Source` without BatchNorm.

    Reported as "No Adapt" for ResNet50-BN in the paper's Table 1.
    """

    name: ClassVar[str] = "norm"
    params: ClassVar[str | None] = None

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """No row."""
        return Selection.none(batch.entropy)


@dataclass(frozen=True)
class Source(Norm):
    """Learns nothing; BatchNorm keeps the statistics it was trained with."""

    name: ClassVar[str] = "source"
    batch_statistics: ClassVar[bool] = False
