"""The processes that adapt one model together, each with its rows of every batch.

What the rows of a batch have in common (counts, means, deviations, the gradient) is all-reduced
over the ranks, so that all take the same step and hold the same bits. `SingleRank` is one process
with the whole batch; `group.py` has several. Every rank calls the adapter as often as the others
do. One without rows passes a stand-in, a black image that counts nothing, so that all ranks meet at
the same reductions; and whatever decides whether there is one is itself reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Shared(Protocol):
    """What all ranks must hold alike."""

    theta: Tensor
    velocity: Tensor
    batches: int
    host: dict[str, Tensor]
    plus: dict[str, Tensor]
    guard: dict[str, Tensor]
    norm: dict[str, Tensor]


class Ranks(ABC):
    """The ranks that share a batch, as one of them sees it."""

    rank, size, sums = 0, 1, 0  # sums: reductions that this rank took part in
    real = True  # what is passed counts; false for a stand-in

    def __deepcopy__(self, memo: object) -> Ranks:
        """A copy of an adapter shares its batches with the same ranks."""
        return self

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks; no gradient flows through it."""

    @abstractmethod
    def numbers(self, *masks: Tensor) -> list[int]:
        """How many rows are true in each of some masks, over all ranks; waits for the device."""

    @abstractmethod
    def rows(self, here: int) -> int:
        """Rows of the batch over all ranks, of which there are so many here."""

    @abstractmethod
    def place(self, here: int) -> tuple[int, slice]:
        """Some rows of all ranks, so many of them here: how many there are, and which are here."""

    @abstractmethod
    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows of the batch."""

    @abstractmethod
    def extremes(self, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Least and largest value of the batch, of those where `rows` is true."""

    @abstractmethod
    def moments(self, x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Variance and mean over axes along which all ranks have values, and how many they are.

        The gradient flows back to the values of all ranks.
        """

    @abstractmethod
    def pooled(self, var: Tensor, mean: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, from those of this rank's values."""

    @abstractmethod
    def deviation(self, rows: Tensor, squared: bool = False) -> Tensor:
        """The unbiased standard deviation (squared: variance) of each column over all rows."""

    @abstractmethod
    def share(self, rows: int) -> slice:
        """This rank's of some rows, split evenly; the first ranks have those left over."""

    @abstractmethod
    def whole(self, column: Tensor, index: Tensor, rows: int) -> Tensor:
        """A column on the CPU of which each rank has the rows `index`."""

    @abstractmethod
    def standing_in(self) -> AbstractContextManager[None]:
        """What is passed inside counts nothing."""

    @abstractmethod
    def taking(self, index: Tensor) -> AbstractContextManager[Tensor]:
        """Rows to pass; where there are none here, a stand-in."""

    @abstractmethod
    def meet(self, rows: int, others: int, state: Shared, learning: bool) -> tuple[int, int]:
        """Rows of the next batch over all ranks: those to learn from, and others.

        If a rank is at another batch than the first one, or holds other bits: an error on all.
        """

    @abstractmethod
    def tally(self, counts: dict[str, int | Tensor], before: Mapping[str, int | Tensor]) -> None:
        """Make what was counted since `before` the count over all ranks."""

    @abstractmethod
    def tell(self, error: BaseException) -> None:
        """Tell the others why this rank does not come."""


class SingleRank(Ranks):
    """One process, which has all rows of a batch."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def numbers(self, *masks: Tensor) -> list[int]:
        """How many rows are true in each of some masks; waits for the device."""
        return [int(mask.sum()) for mask in masks]

    def rows(self, here: int) -> int:
        """All of them."""
        return here

    def place(self, here: int) -> tuple[int, slice]:
        """All of them."""
        return here, slice(None)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows."""
        return values.mean(0)

    def extremes(self, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Least and largest value of some rows."""
        return least_and_largest(values, rows)

    def moments(self, x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Variance and mean over some axes, and of how many values they are."""
        var, mean = torch.var_mean(x, axes, correction=0)
        return var, mean, mean.new_full((), x.numel() // mean.numel())

    def pooled(self, var: Tensor, mean: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As they are."""
        return var, mean, values

    def deviation(self, rows: Tensor, squared: bool = False) -> Tensor:
        """The unbiased standard deviation of each column."""
        return rows.var(0) if squared else rows.std(0)

    def share(self, rows: int) -> slice:
        """All of them."""
        return slice(None)

    def whole(self, column: Tensor, index: Tensor, rows: int) -> Tensor:
        """The column itself."""
        return column

    def standing_in(self) -> AbstractContextManager[None]:
        """Nobody else has rows to wait for."""
        raise ValueError("a batch without rows")

    def taking(self, index: Tensor) -> AbstractContextManager[Tensor]:
        """The rows themselves."""
        return nullcontext(index)

    def meet(self, rows: int, others: int, state: Shared, learning: bool) -> tuple[int, int]:
        """The rows that are here."""
        return rows, others

    def tally(self, counts: dict[str, int | Tensor], before: Mapping[str, int | Tensor]) -> None:
        """Nothing to add."""

    def tell(self, error: BaseException) -> None:
        """Nobody to tell."""


def least_and_largest(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of the values where `rows` is true; infinite if there are none."""
    low, high = (torch.where(rows, values, end) for end in (torch.inf, -torch.inf))
    return low.amin(), high.amax()


SINGLE = SingleRank()
