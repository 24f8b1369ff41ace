"""TENT: fully test-time adaptation by entropy minimisation (Wang et al., ICLR 2021).

min_theta  mean_B H(x)

The parameters are the truncated set, as in the tables of the FATA paper; TENT's own code takes all
normalisation layers (``params="norm"``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fata.methods.base import Batch, Memory
from fata.methods.come import EntropyMethod
from fata.methods.selection import Selection


@dataclass(frozen=True)
class Tent(EntropyMethod):
    """Minimises the entropy of every row."""

    name: ClassVar[str] = "tent"

    def select(self, batch: Batch, memory: Memory) -> Selection:
        """Every row, with weight 1."""
        return Selection(
            torch.ones_like(batch.entropy, dtype=torch.bool), batch.entropy.new_ones(())
        )
