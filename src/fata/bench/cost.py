"""What a method costs: multiply-accumulates (MACs) an image, and the size of its state.

The rule is the paper's: a multiply-accumulate of a convolution, of a linear layer or inside
attention is 1, an element that a normalisation layer passes is 2, the rest is free. The paper
counts forward passes alone, as if every row were selected.

Ours are the forward and backward passes of the engine. A gradient of a layer's input or of its
weights costs as much as the layer's forward pass. Frozen weights need none, nor do layers before
the first adapted parameter. So a backward pass costs about F if normalisation layers adapt, and 2 F
if all weights do. Not counted: the optimizer, views and noise, Fisher information, products with
the classifier alone, and the pass in which FATA's tap learns the order of the modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fata.adapter import Adapter, adapt
from fata.engine.step import DENSE
from fata.methods import Cotta, Deyo, Memo, Tent, Zerosiam, parse
from fata.network.logits import logits_of
from fata.network.norms import batch_norms, norm_layers
from fata.network.tap import Tap

# Passes over the network and over the tail that the paper's table counts, or would.
PAPER: dict[str, tuple[int, int]] = {
    "source": (1, 0),
    "norm": (1, 0),
    "tent": (1, 0),
    "eata": (1, 0),
    "sar": (2, 0),
    "deyo": (2, 0),
    "roid": (2, 0),
    "zerosiam": (1, 0),
    "nctta": (1, 0),
    "neo": (1, 0),
    "cotta": (35, 0),
    "memo": (64, 0),
    "fata": (1, 1),
    "tent+fata": (1, 1),
    "eata+fata": (1, 1),
    "sar+fata": (3, 3),
    "deyo+fata": (2, 1),
    "roid+fata": (2, 1),
    "zerosiam+fata": (1, 1),
    "nctta+fata": (1, 1),
    "neo+fata": (1, 1),
}


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates of a forward pass, and of the backward pass to what adapts."""

    forward: float
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Cost:
    """What a method costs.

    Args:
        spec: the method.
        whole: F, a pass over the network, an image.
        tail: T, a pass over the tail behind FATA's layer; 0 without FATA.
        paper: what the paper counts, an image; None for a method of your own.
        ours: what the engine computes, an image, at a share of selected rows.
        state: bytes of the adapter's state after a batch, without a guard's.
    """

    spec: str
    whole: Macs
    tail: Macs
    paper: float | None
    ours: Macs
    state: int


def cost(model: nn.Module, spec: str, images: Tensor, share: float) -> Cost:
    """What a method costs on a model, which has its source weights again afterwards.

    Args:
        model: any that `fata.adapt` takes; its weights do not matter.
        spec: such as `eata+fata`.
        images: two or more, in [0, 1]: with one row FATA has no statistics to store.
        share: of the rows that are selected, in [0, 1].
    """
    method, _ = parse(spec)
    fields: dict[str, Any] = {"views": 1} if hasattr(method, "views") else {}  # the state is alike
    if method.wants_fisher and hasattr(method, "fisher_alpha"):
        fields["fisher_alpha"] = 0.0
    adapter = adapt(model, spec, guard=None, **fields)
    try:
        whole, tail = passes(adapter, images[:1])
        ours = effective(rows(spec, share, bool(batch_norms(model))), whole, tail)
        adapter(images)
        state = state_bytes(adapter)
    finally:
        adapter.reset()
        adapter.unwrap()
    counted = paper(spec, whole, tail) if spec in PAPER else None
    return Cost(spec, whole, tail, counted, ours, state)


def paper(spec: str, whole: Macs, tail: Macs) -> float:
    """MACs an image by the paper's rule: forward passes, every row in every branch."""
    parse(spec)  # raises for unknown ones
    if spec not in PAPER:
        raise ValueError(f"{spec!r}: only methods of this package are counted.")
    passes, tails = PAPER[spec]
    return passes * whole.forward + tails * tail.forward


def rows(spec: str, share: float, coupled: bool = False) -> dict[str, float]:
    """Rows that the engine passes for each image, as `adapter.counts` counts them over a stream.

    Args:
        spec: the method.
        share: of the rows that each term selects, the same ones; DeYO passes these twice. TENT
            and ZeroSiam select all. CoTTA is counted with its views, as in the paper.
        coupled: the network has BatchNorm.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: the share of selected rows is in [0, 1].")
    method, plus = parse(spec)
    if isinstance(method, Cotta):
        return _rows(2 + method.views, 0, 1)
    if isinstance(method, Memo):
        return _rows(method.views + 1, 0, method.views)
    if method.params is None and plus is None:
        return _rows(1, 0, 0)
    own = share  # of FATA
    if isinstance(method, Tent | Zerosiam):
        share = 1.0
    dense = coupled or share >= DENSE
    first = math.ceil(share) if dense else share  # rows with a gradient in the first pass
    sharp = share if method.sam_rho is not None else 0.0  # and in SAM's second pass
    shuffled = share if isinstance(method, Deyo) else 0.0
    views = first if method.has_views else 0.0  # all rows that are passed with a gradient
    forward = 1 + shuffled + (0 if dense else share) + sharp + views
    tail = own if method.sam_rho is None else sharp
    if coupled and method.sam_rho is None:
        tail = first
    return _rows(forward, tail if plus else 0, first + sharp + views)


def effective(counts: Mapping[str, Any], whole: Macs, tail: Macs) -> Macs:
    """MACs that were spent on a stream, from an adapter's `counts` and its F and T.

    Every augmented row has a forward and a backward pass through the tail. With
    `bn_stats="joint"` clean rows share that pass, so this is up to a T a row too much. The guard's
    passes over the source model are included.
    """
    forward, again, back, source = (
        counts[f"rows_{part}"] for part in ("forward", "tail", "backward", "source")
    )
    return Macs(
        (forward + source) * whole.forward + again * tail.forward,
        back * whole.backward + again * tail.backward,
    )


def passes(adapter: Adapter, images: Tensor) -> tuple[Macs, Macs]:
    """F and T of an adapter's model, an image: its logits, and those of an augmented feature."""
    model, count = adapter.model, len(images)
    norms = [module for _, module in norm_layers(model)]
    learned = [p for p in model.parameters() if p.requires_grad]
    # Without any gradient attention would take a kernel that is not counted.
    images = images.clone().requires_grad_(not learned)
    whole = _spent(lambda: logits_of(model(images), count), norms, learned, count)
    if adapter.layer is None:
        return whole, Macs(0)
    recording = Tap(model, adapter.layer).record(images)
    z = recording.z.detach().requires_grad_(recording.z.requires_grad)
    behind = [norm for norm in norms if norm not in recording.memory]
    to = [z, *learned] if z.requires_grad else learned
    return whole, _spent(lambda: logits_of(recording.tail(z), count), behind, to, count)


def state_bytes(adapter: Adapter) -> int:
    """Size of what an adapter would save."""
    tensors = (value for value in adapter.state_dict().values() if isinstance(value, Tensor))
    return sum(tensor.nbytes for tensor in tensors)


def _rows(forward: float, tail: float, backward: float) -> dict[str, float]:
    return {
        "rows_forward": forward,
        "rows_tail": tail,
        "rows_backward": backward,
        "rows_source": 0,
    }


def _spent(
    run: Callable[[], Tensor], norms: Iterable[nn.Module], to: Sequence[Tensor], count: int
) -> Macs:
    """MACs an image of a function that gives logits, and of the gradient from there."""
    elements = [0, 0]

    def note(norm: nn.Module, given: Any, named: Any, output: Tensor) -> None:
        tensors = (*given, *named.values()), norm.parameters()
        gradients = sum(any(t.requires_grad for t in some) for some in tensors)
        elements[0] += output.numel()
        elements[1] += output.numel() * gradients

    formulas = {torch.ops.aten.convolution_backward: _convolution_backward}
    there = FlopCounterMode(display=False)
    back = FlopCounterMode(display=False, custom_mapping=formulas)
    handles = [norm.register_forward_hook(note, with_kwargs=True) for norm in norms]
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), there:
            logits = run()
    finally:
        for handle in handles:
            handle.remove()
    forward = (there.get_total_flops() / 2 + 2 * elements[0]) / count
    if not to:
        return Macs(forward)
    with back:
        torch.autograd.grad(logits.sum(), to, allow_unused=True)
    return Macs(forward, (back.get_total_flops() / 2 + 2 * elements[1]) / count)


def _convolution_backward(
    output: Sequence[int], given: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any
) -> int:
    """As torch counts it, but right for the weights of a convolution in groups."""
    transposed, needed = rest[4], rest[7]
    batch, _channels, *places = given if transposed else output
    return 2 * batch * math.prod(places) * math.prod(weight) * sum(map(int, needed[:2]))
