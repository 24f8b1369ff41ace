"""bfloat16: what of a model is held in it, and where that pays.

Convolutions and linear layers multiply by weights that do not adapt: those are held in bfloat16.
What adapts stays as it is. Normalisation and the layers that give logits are computed in float32,
for entropies of logits in bfloat16 select other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fata._torch import Convolution, has_bfloat16_products, watches_saved_tensors
from fata.engine.fast.captured import channels_last
from fata.network.tap import Forward, replaced_forwards

WIDE = 100_000  # parameters from which on a network gains from it on a CPU

HalfWeight = tuple[nn.Module, str, nn.Parameter]  # a layer, its parameter, that in bfloat16


def pays_on_cpu(model: nn.Module, device: torch.device) -> bool:
    """Whether it is faster on this CPU, for a network in plain float32."""
    weights = list(model.parameters())
    wide = sum(w.numel() for w in weights) >= WIDE
    plain = all(w.dtype == torch.float32 for w in weights)
    return device.type == "cpu" and wide and plain and has_bfloat16_products()


def logit_layers(model: nn.Module, logits: Callable[[], Tensor]) -> list[nn.Module]:
    """Layers that give logits: as many values as there are, or the last in the pass that is made.

    Those alone whose weights are in full.
    """
    called: list[tuple[nn.Module, int]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        called.append((module, output.numel() if isinstance(output, Tensor) else 0))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | Convolution)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        size = logits().numel()
    finally:
        for hook in hooks:
            hook.remove()
    heads = [m for m, values in called if values == size] + [m for m, _ in called[-1:]]
    return [m for m in dict.fromkeys(heads) if m.weight.dtype == torch.float32]


def half_weights(model: nn.Module, adapted: Sequence[Tensor], large: bool) -> Iterator[HalfWeight]:
    """Copies in bfloat16 of what convolutions and linear layers multiply by and does not adapt."""
    moving = {id(parameter) for parameter in adapted}
    for module in model.modules():
        if isinstance(module, nn.Linear | Convolution):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in moving:
                    half = parameter.detach().bfloat16()
                    half = channels_last(half) if large else half
                    yield module, name, nn.Parameter(half, requires_grad=False)


@contextmanager
def in_half(
    weights: Sequence[HalfWeight],
    norms: Sequence[nn.Module],
    heads: Sequence[nn.Module],
    device: torch.device,
) -> Iterator[None]:
    """A model computes in bfloat16 inside the context."""
    full = {head: _full(head) for head in heads}
    forwards = replaced_forwards({norm: _narrow(norm) for norm in norms} | full)
    half = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)  # it may be outlived
    attention = PlainAttention() if device.type == "cpu" else nullcontext()
    with _swapped(weights), forwards, half, attention:
        yield


def _narrow(norm: nn.Module) -> Forward:
    """Normalise in full precision, return the input's."""
    forward = norm.forward

    def replaced(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(x, *args, **kwargs)
        return output.to(x.dtype) if isinstance(output, Tensor) else output

    return replaced


def _full(head: nn.Module) -> Forward:
    """Compute in full precision."""
    forward = head.forward

    def replaced(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return forward(x.float(), *args, **kwargs)

    return replaced


class PlainAttention(TorchFunctionMode):
    """Attention as two products: torch's own backward pass is slow on a CPU in bfloat16.

    A mode is off within `torch.autograd.grad`, where a checkpointed block is passed again. So it
    leaves attention to torch where something watches what is saved for the backward pass.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function; attention that is masked, or without a gradient, is torch's."""
        options = kwargs or {}
        if func is F.scaled_dot_product_attention and len(args) == 3 and torch.is_grad_enabled():
            scale, special = options.get("scale"), {**options, "scale": None}.values()
            given = any(isinstance(option, Tensor) or option for option in special)
            if not (given or args[0].is_nested or watches_saved_tensors()):
                query, key, value = args
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                return (query * scale @ key.mT).softmax(-1) @ value
        return func(*args, **options)


@contextmanager
def _swapped(weights: Sequence[HalfWeight]) -> Iterator[None]:
    """The model with these parameters inside the context."""
    before = [(module, name, getattr(module, name)) for module, name, _ in weights]
    try:
        for module, name, half in weights:
            setattr(module, name, half)
        yield
    finally:
        for module, name, parameter in before:
            setattr(module, name, parameter)
