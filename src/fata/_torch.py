"""Interfaces of PyTorch that are not public, in one place; each says what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A public way to the store that init_process_group was given or made.
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store as default_store

# A public base class of BatchNorm1d to 3d and SyncBatchNorm, one with InstanceNorm, and one of all
# convolutions.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.modules.conv import _ConvNd as Convolution

# A public module; extensions are told to use this one.
from torch.utils._python_dispatch import TorchDispatchMode

# A public torch.utils.pytree.
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "BatchNorm",
    "Convolution",
    "NormWithStatistics",
    "PrefixStore",
    "TorchDispatchMode",
    "copy_all",
    "default_store",
    "has_bfloat16_products",
    "tree_leaves",
    "tree_map",
    "version",
    "watches_saved_tensors",
]


def copy_all(into: Sequence[Tensor], given: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy many tensors in one launch; waits for a public `copy_` of lists of tensors."""
    torch._foreach_copy_(list(into), list(given), non_blocking=non_blocking)


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; waits for a public counter."""
    return tensor._version


def has_bfloat16_products() -> bool:
    """Whether the CPU has AMX, a unit for them; waits for a public `torch.cpu` function."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # older torch cannot tell


def watches_saved_tensors() -> bool:
    """Whether a hook has what autograd saves, as a checkpoint's; waits for a public question."""
    latest = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return latest is None or latest(False) is not None
