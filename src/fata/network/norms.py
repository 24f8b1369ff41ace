"""Normalisation layers: finding them, and what BatchNorm normalises with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.hooks import RemovableHandle

from fata._torch import BatchNorm
from fata.distributed.ranks import SINGLE, Ranks

# Layers of other libraries that normalise without being a subclass of torch's own.
_BY_NAME = re.compile(r"(batch|group|layer|rms)_?norm", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises and then scales (and shifts) by parameters of its own."""
    known = isinstance(module, BatchNorm | nn.GroupNorm | nn.LayerNorm)
    own = list(module.parameters(recurse=False))
    named = bool(_BY_NAME.search(type(module).__name__)) and all(p.ndim == 1 for p in own)
    return bool(own) and (known or named)


def norm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every normalisation layer that has parameters, by name, in the order of registration."""
    return ((name, module) for name, module in model.named_modules() if is_norm(module))


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """Every BatchNorm layer; while there is one, the rows of a batch see each other."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def has_running(model: nn.Module) -> bool:
    """Whether a BatchNorm layer has running statistics."""
    return any(layer.running_mean is not None for layer in batch_norms(model))


def spare_group_norms(model: nn.Module) -> list[RemovableHandle]:
    """Keep torch before 2.15 from crashing; the handles take that off again.

    On a CPU its backward pass of GroupNorm does, where the input is channels-last and needs no
    gradient, as that of the first layer that adapts.
    """
    if TorchVersion(torch.__version__) >= TorchVersion("2.15"):
        return []
    layers = (module for module in model.modules() if isinstance(module, nn.GroupNorm))
    return [layer.register_forward_pre_hook(_in_need) for layer in layers]


def _in_need(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The same input, but as if it hung on the weight."""
    if not args or args[0].device.type != "cpu" or args[0].is_contiguous():
        return None
    x, weight = args[0], layer.weight
    if x.requires_grad or not isinstance(weight, Tensor) or not weight.requires_grad:
        return None
    return (x + 0 * weight.sum().to(x.dtype), *args[1:])


class BatchStatistics:
    """Makes every BatchNorm of a model normalise with the batch at hand; `remove` undoes it.

    The running statistics are neither used nor changed. A layer that gets one value a channel (a
    single image on a 1x1 map) has no batch statistics and uses the running ones.

    With a `prior` of N the statistics are the running ones and the batch's, mixed N : 1 (MEMO's
    reading of a single image: N = 16).

    Other statistics for a pass hide a layer's buffers (`override`) and never replace them: an
    interrupt cannot lose the running ones.
    """

    def __init__(self, model: nn.Module, prior: float = 0.0) -> None:
        self._share = prior / (prior + 1)
        self._rows: Tensor | None = None  # that the statistics are of; None: all
        self.active = True
        self._group: Ranks = SINGLE
        self._alone = False  # whether this rank's part of a batch is taken for all of it
        self._moments: tuple[Tensor, ...] = ()  # the latest mean and variance that are shared
        self._layers = [
            (layer, layer.training, layer.track_running_stats) for layer in batch_norms(model)
        ]
        self._handles: list[RemovableHandle] = []
        for layer, _, _ in self._layers:
            layer.track_running_stats = False  # in train mode: the batch's, running ones untouched
            hook = self._mix if prior else self._choose
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(show_own, always_call=True))

    def join(self, group: Ranks) -> None:
        """From now on a batch is what all ranks of a group have of it."""
        self._group = group

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The running statistics inside the context."""
        try:
            self.active = False
            yield
        finally:
            self.active = True

    @contextmanager
    def of(self, rows: Tensor) -> Iterator[None]:
        """Statistics of these rows alone inside the context; all are normalised with them."""
        try:
            self._rows = rows
            yield
        finally:
            self._rows = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A batch is what this rank alone has of it, inside the context."""
        try:
            self._alone = True
            yield
        finally:
            self._alone = False

    def restore(self) -> None:
        """After a pass that failed: torch calls no hook of a layer that is interrupted."""
        for layer, _, _ in self._layers:
            show_own(layer)

    def settle(self) -> None:
        """Back to how it was made: an interrupt may keep a context from being left."""
        self.active, self._rows, self._alone = True, None, False
        self.restore()

    def remove(self) -> None:
        """Take the hooks off and set every flag as it was."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        for layer, training, track in self._layers:
            layer.training, layer.track_running_stats = training, track

    def forget_running(self) -> None:
        """After `remove`: the layers normalise with the batch at hand, without any hook."""
        for layer, _, _ in self._layers:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None

    @property
    def _ranks(self) -> Ranks:
        """Who has the batch."""
        return SINGLE if self._alone else self._group

    @property
    def _shared(self) -> bool:
        """Whether the statistics are not simply of all that is passed here."""
        return self._rows is not None or self._ranks is not SINGLE

    def _choose(self, layer: BatchNorm, args: Any, kwargs: Any) -> Any:
        show_own(layer)
        if self._shared:
            return self._normalised(layer, args, kwargs)
        x = input_of(args, kwargs)
        values = x.numel() // x.shape[1]
        layer.training = (self.active and values > 1) or layer.running_mean is None
        return None

    def _normalised(self, layer: BatchNorm, args: Any, kwargs: Any) -> Any:
        """The layer's input, normalised over some rows or all ranks; the layer then only scales."""
        mean, var = layer.running_mean, layer.running_var
        layer.training = mean is None and not self.active
        if not self.active:
            return None
        x = input_of(args, kwargs)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        wide = widened(x)
        batch_var, batch_mean, values = (
            self._ranks.moments(wide, axes)
            if self._rows is None
            else self._ranks.pooled(*_moments(wide, axes, self._rows))
        )
        if mean is not None and var is not None:
            batch_mean = torch.where(values > 1, batch_mean, mean)
            batch_var = torch.where(values > 1, batch_var, var)
        like = batch_mean.detach() if mean is None else mean
        override(layer, torch.zeros_like(like), torch.full_like(like, 1 - layer.eps))
        self._moments = batch_mean.detach(), batch_var.detach()
        shape = [1, -1] + [1] * (x.ndim - 2)
        scale = (batch_var + layer.eps).rsqrt().view(shape)
        normal = ((wide - batch_mean.view(shape)) * scale).to(x.dtype)
        return ((normal, *args[1:]), kwargs) if args else ((normal,), {})

    def _mix(self, layer: BatchNorm, args: Any, kwargs: Any) -> None:
        show_own(layer)
        mean, var = layer.running_mean, layer.running_var
        if mean is None or var is None:
            layer.training = True
            return
        layer.training = False
        if not self.active:
            return
        x = input_of(args, kwargs).detach()
        axes = [axis for axis in range(x.ndim) if axis != 1]
        batch_var, batch_mean, _ = self._ranks.moments(widened(x), axes)
        mixed_mean = torch.lerp(batch_mean.to(mean.dtype), mean, self._share)
        override(layer, mixed_mean, torch.lerp(batch_var.to(var.dtype), var, self._share))


def override(layer: BatchNorm, mean: Tensor, var: Tensor) -> None:
    """Other statistics to normalise with: attributes, which hide the buffers of their names."""
    layer.__dict__.update(running_mean=mean, running_var=var)


def override_affine(layer: BatchNorm, weight: Tensor, bias: Tensor) -> None:
    """Other parameters, likewise."""
    layer.__dict__.update(weight=weight, bias=bias)


def show_own(layer: BatchNorm, *_: Any) -> None:
    """Show buffers and parameters again; safe to call at any time."""
    for name in ("running_mean", "running_var", "weight", "bias"):
        layer.__dict__.pop(name, None)


def _moments(x: Tensor, axes: list[int], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Variance and mean of some rows, and of how many values they are."""
    rows = rows.repeat(len(x) // len(rows))  # clean and augmented ones share a pass
    weight = rows.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
    values = weight.sum() * x[0, 0].numel()
    some = values.clamp(min=1)  # a rank may have none
    mean = (weight * x).sum(axes, keepdim=True) / some
    var = (weight * (x - mean).square()).sum(axes) / some
    return var, mean.flatten(), values


def input_of(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    """What a layer is given."""
    return args[0] if args else next(iter(kwargs.values()))


def widened(x: Tensor) -> Tensor:
    """In full precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
