"""Several processes that share every batch, through `torch.distributed`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fata.distributed.heartbeat import Heartbeat
from fata.distributed.ranks import SINGLE, Ranks, Shared, least_and_largest

EVERY = 16  # batches between two checks that all ranks hold the same bits
_ROWS = ("seen", "kept", "rows_forward", "rows_tail", "rows_backward", "rows_source")  # of each


class GroupError(RuntimeError):
    """A rank is gone, or is not where the others are; nothing of this batch was learned."""


class RankGroup(Ranks):
    """One of several ranks.

    Args:
        group: of `torch.distributed`; with another backend than gloo, what is asked on the host
            goes through a gloo group of its own and waits for no device.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = self._host = group
        if dist.get_backend(group) != "gloo":
            ranks = dist.get_process_group_ranks(group)
            host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            assert isinstance(host, dist.ProcessGroup)  # this rank is one of them
            self._host = host
        self._rows = 0
        self._heartbeat = Heartbeat(group.group_name, self.rank, self.size)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """The one for these ranks, made once; a single process needs none."""
        if group is None:
            return SINGLE
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group={group!r}: give a group of torch.distributed, such as "
                f"torch.distributed.group.WORLD after init_process_group(...)."
            )
        if group not in _GROUPS:
            _GROUPS[group] = cls(group) if dist.get_world_size(group) > 1 else SINGLE
        return _GROUPS[group]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks; no gradient flows through it."""
        return self._reduced(tensor.detach().clone(), self._device)

    def gather(self, tensor: Tensor) -> Tensor:
        """What all ranks have, (ranks, ...), in their order."""
        return self._gathered(tensor, self._device)

    def numbers(self, *masks: Tensor) -> list[int]:
        """How many rows are true in each of some masks, over all ranks; waits for the device."""
        here = torch.stack([mask.sum() for mask in masks]).cpu()
        numbers: list[int] = self._reduced(here, self._host).tolist()
        return numbers

    def rows(self, here: int) -> int:
        """Rows of the batch over all ranks."""
        return self._rows

    def place(self, here: int) -> tuple[int, slice]:
        """Some rows of all ranks, so many of them here: how many there are, and which are here."""
        counts = self._gathered(torch.tensor(here * self.real), self._host).tolist()
        first = sum(counts[: self.rank]) if self.real else 0
        return sum(counts), slice(first, first + here)

    def share(self, rows: int) -> slice:
        """This rank's of some rows, split evenly; the first ranks have those left over."""
        first, end = (-(-rows * rank // self.size) for rank in (self.rank, self.rank + 1))
        return slice(first, end)

    def whole(self, column: Tensor, index: Tensor, rows: int) -> Tensor:
        """A column on the host of which each rank has the rows `index`."""
        wide = torch.uint8 if column.dtype == torch.bool else column.dtype
        there = torch.zeros(rows, dtype=wide).index_copy_(0, index, column.to(wide))
        return self._reduced(there, self._host).to(column.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows of the batch."""
        return self.sum(values.sum(0)) / self._rows

    def extremes(self, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Least and largest value of some rows of all ranks."""
        there = self.gather(torch.stack(least_and_largest(values, rows)))
        return there[:, 0].amin(), there[:, 1].amax()

    def moments(self, x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Variance and mean over axes along which all ranks have values, and how many they are.

        The gradient flows back to the values of all ranks.
        """
        var, mean = torch.var_mean(x, axes, correction=0)
        values = x.numel() // mean.numel()
        return self.pooled(var, mean, mean.new_full((), values))

    def pooled(self, var: Tensor, mean: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, from those of this rank's values."""
        here = torch.cat((mean, var, values.reshape(1) * self.real))
        there: Tensor = _Gather.apply(here, self)
        means, variances, counts = torch.split(there, [len(mean), len(var), 1], 1)
        share = counts / counts.sum()
        mean = (share * means).sum(0)
        return (share * (variances + (means - mean).square())).sum(0), mean, counts.sum()

    def deviation(self, rows: Tensor, squared: bool = False) -> Tensor:
        """The unbiased deviation of each column over the rows of all ranks."""
        var, _, count = self.moments(rows, [0])
        var = var * count / (count - 1)
        return var if squared else var.sqrt()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """What is passed inside counts nothing."""
        before, self.real = self.real, False
        try:
            yield
        finally:
            self.real = before

    @contextmanager
    def taking(self, index: Tensor) -> Iterator[Tensor]:
        """Rows to pass; where there are none here, a stand-in."""
        if len(index):
            yield index
            return
        with self.standing_in():
            yield index.new_zeros(1)

    def agree(self, **what: str) -> None:
        """Raise if a rank was given something else than the first."""
        for name, text in what.items():
            digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
            here = torch.tensor(int.from_bytes(digest, "little"))
            self._compare(self._gathered(here, self._host), f"was given another {name} than")

    def meet(self, rows: int, others: int, state: Shared, learning: bool) -> tuple[int, int]:
        """Rows of the batch that comes, over all ranks: those to learn from, and others.

        Where a rank is at another batch than the first one, or holds other bits: an error on all.
        """
        bits = _bits(state) if learning and not state.batches % EVERY else 0
        self._heartbeat.go_on()
        here = torch.tensor([rows, others, state.batches, learning, bits])
        there = self._gathered(here, self._host)
        self._compare(there[:, 2], "has seen another number of batches than")
        self._compare(there[:, 3], "is frozen, or learns, unlike")
        self._compare(there[:, 4], f"holds other bits after {state.batches} batches than")
        self._rows = int(there[:, 0].sum())
        if not self._rows + there[:, 1].sum():
            raise ValueError("no rank has an image: give a batch of at least one to some of them.")
        return self._rows, int(there[:, 1].sum())

    def tally(self, counts: dict[str, int | Tensor], before: Mapping[str, int | Tensor]) -> None:
        """Make what was counted since `before` the count over all ranks."""
        here = torch.tensor([int(counts.get(name, 0) - before.get(name, 0)) for name in _ROWS])
        for name, rows in zip(_ROWS, self._reduced(here, self._host).tolist(), strict=True):
            counts[name] = before.get(name, 0) + rows

    def tell(self, error: BaseException) -> None:
        """Tell the others why this rank does not come."""
        if not isinstance(error, GroupError):
            self._heartbeat.tell(f"rank {self.rank} failed ({type(error).__name__}: {error})")

    def _compare(self, values: Tensor, how: str) -> None:
        first, *others = values.tolist()
        odd = [str(rank) for rank, value in enumerate(others, 1) if value != first]
        if odd:
            raise GroupError(
                f"rank {', '.join(odd)} {how} rank 0. All ranks must make and call their "
                f"adapters alike; load one state on all of them to go on."
            )

    def _gathered(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A sum with zeros: what every backend does, on every device.
        there = tensor.new_zeros((self.size, *tensor.shape))
        there[self.rank] = tensor.detach()
        return self._reduced(there, group)

    def _reduced(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        self.sums = self._heartbeat.sums = self.sums + 1
        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            raise GroupError(self._heartbeat.why(error)) from error
        return tensor


_GROUPS: dict[dist.ProcessGroup, Ranks] = {}


class _Gather(torch.autograd.Function):
    """`RankGroup.gather` with a gradient: that of this rank's part, from all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return group.gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient)[ctx.group.rank], None


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _bits(state: Shared) -> int:
    """A number that differs, but for an accident, where anything differs that must not."""
    total = torch.zeros((), dtype=torch.int64, device=state.theta.device)
    memories = (state.host, state.plus, state.guard, state.norm)
    remembered = (memory[name] for memory in memories for name in sorted(memory))
    for tensor in (state.theta, state.velocity, *remembered):
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view(_WHOLE[flat.itemsize])
        place = 2 * torch.arange(len(bits), device=bits.device) + 1
        total = 31 * total + (place * bits).sum()
    return int(total)
