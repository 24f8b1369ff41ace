"""z and the tail of any nn.Module, without tracing or splitting it.

A recorded pass keeps the layer's output z and what the modules before the layer returned.
`tail(z')` calls the model again with those modules returning what is kept and the layer returning
z', so that only what comes after the layer is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fata._text import listed, near
from fata._torch import tree_leaves, tree_map, version
from fata.network.norms import is_norm
from fata.network.structure import auto_layer, layers

Forward = Callable[..., Any]


class Tap:
    """Records one layer of a model: z of a pass, and the tail behind it.

    `call` runs the model on images; the model itself unless something must stand between.
    """

    def __init__(
        self, model: nn.Module, layer: str, call: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.model, self.call = model, call or model
        self.layer = auto_layer(model) if layer == "auto" else layer
        modules = dict(model.named_modules())
        if self.layer not in modules or not self.layer:
            raise ValueError(
                f"Fata(layer={layer!r}): no such module in {type(model).__name__}."
                f"{near(layer, modules)} Candidates: {listed(layers(model))} "
                f"(fata.layers(model)); any module that is called once will do."
            )
        self.target = modules[self.layer]
        self._watched: list[nn.Module] | None = None  # modules that finish before the layer
        self._channels: int | None = None
        self._cloned: set[nn.Module] = set()  # whose output is changed in place later in the pass

    def channels(self, images: Tensor) -> int:
        """Number of channels of z, by a pass over two images; known from then on."""
        if self._channels is None:
            self.learn(images[:2])
        assert self._channels is not None
        return self._channels

    def channel_axis(self, z: Tensor) -> int:
        """Which axis of the layer's output holds the channels."""
        return channel_axis(z, self.target)

    def learn(self, images: Tensor) -> Any:
        """One pass that watches every module, to find those whose outputs the tail needs.

        Returns the model's output.
        """
        with torch.no_grad():
            recording = self._run(images, [m for m in self.model.modules() if m is not self.target])
        self._watched = list(recording.memory)
        self._cloned = recording.changed()
        self._channels = recording.z.shape[self.channel_axis(recording.z)]
        return recording.output

    def record(self, images: Tensor) -> Recording:
        """Run the model on the images, ready to run its tail again."""
        if self._watched is None:
            self.learn(images)
        return self._run(images, self._watched or [])

    def feature(self, images: Tensor) -> Recording:
        """Run the model on the images and keep z alone; the recording has no tail."""
        if self._watched is None:
            self.learn(images)
        return self._run(images, [])

    def _run(self, images: Tensor, watched: list[nn.Module]) -> Recording:
        recording = Recording(self, images)
        with replaced_forwards({m: recording.watch(m) for m in [*watched, self.target]}):
            recording.output = self.call(images)
        if recording.calls != 1:
            times = "never called" if not recording.calls else f"called {recording.calls} times"
            raise ValueError(
                f"Fata(layer={self.layer!r}): the layer is {times} in one pass of "
                f"{type(self.model).__name__}; it must be called exactly once. "
                f"Candidates: {listed(layers(self.model))}."
            )
        return recording


@dataclass(frozen=True)
class Call:
    """What a module returned, and the versions that its tensors had then."""

    module: nn.Module
    output: Any
    versions: list[int]


@dataclass
class Recording:
    """What one pass of a tapped model gave."""

    tap: Tap
    images: Tensor
    output: Any = None
    layer_output: Any = None
    calls: int = 0
    memory: dict[nn.Module, list[Any]] = field(default_factory=dict)
    _frames: list[list[Call]] = field(default_factory=lambda: [[]])
    _kept: list[Call] = field(default_factory=list)

    @property
    def z(self) -> Tensor:
        """The layer's output; where it gives several tensors, the first with a row an image."""
        return _first(self.layer_output, len(self.images), self.tap.layer)

    def tail(self, z: Tensor, rows: Tensor | None = None) -> Any:
        """The model's output if the layer had returned z, of all rows or of these."""
        images = self.images if rows is None else self.images[rows]
        forwards: dict[nn.Module, Forward] = {self.tap.target: self._layer_returning(z, rows)}
        for module, outputs in self.memory.items():
            if rows is not None:
                outputs = [_at(output, rows, len(self.images)) for output in outputs]
            forwards[module] = _from_memory(module, outputs, module in self.tap._cloned)
        with replaced_forwards(forwards):
            return self.tap.call(images)

    def watch(self, module: nn.Module) -> Forward:
        """The module's own forward, with its output kept."""
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if module is self.tap.target:
                self._begin_layer()
                output = forward(*args, **kwargs)
                self._kept.append(self._call(module, output))
                self.layer_output = self._kept[-1].output
                return output
            if self.calls:  # behind the layer: nothing to remember
                return forward(*args, **kwargs)
            self._frames.append([])
            output = forward(*args, **kwargs)
            self._frames.pop()  # this module's output stands for what ran inside
            if not self.calls:
                self._frames[-1].append(self._call(module, output))
            return output

        return watched

    def changed(self) -> set[nn.Module]:
        """Modules whose output was changed in place after they had given it."""
        return {call.module for call in self._kept if _versions(call.output) != call.versions}

    def _begin_layer(self) -> None:
        self.calls += 1
        if self.calls == 1:
            self._kept = [call for frame in self._frames for call in frame]
            for call in self._kept:
                self.memory.setdefault(call.module, []).append(call.output)

    def _call(self, module: nn.Module, output: Any) -> Call:
        output = _cloned(output) if module in self.tap._cloned else output
        return Call(module, output, _versions(output))

    def _layer_returning(self, z: Tensor, rows: Tensor | None) -> Forward:
        def other(leaf: Any) -> Any:
            if leaf is self.z:
                return z
            return leaf if rows is None else _at(leaf, rows, len(self.images))

        return lambda *args, **kwargs: tree_map(other, self.layer_output)


@contextmanager
def replaced_forwards(forwards: dict[nn.Module, Forward]) -> Iterator[None]:
    """Call the given function instead of a module's own forward, inside the context."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def channel_axis(z: Tensor, layer: nn.Module) -> int:
    """Which axis of the layer's output holds the channels.

    The one whose length is a width of the layer's own normalisation layers, or of its weights where
    it has none; where both fit, or neither, the second of a map (B, D, H, W) and the last of tokens
    (B, N, D).
    """
    norms = [p for module in layer.modules() if is_norm(module) for p in module.parameters()]
    widths = {p.shape[0] for p in norms or layer.parameters() if p.ndim}
    usual, other = (1, z.ndim - 1) if z.ndim == 4 else (z.ndim - 1, 1)
    fits = z.shape[other] in widths and z.shape[usual] not in widths
    return other if fits else usual


def _from_memory(module: nn.Module, outputs: list[Any], clone: bool) -> Forward:
    """Return the outputs one after the other, then compute (a ReLU that is used again)."""
    forward, rest = module.forward, iter(outputs)

    def returned(*args: Any, **kwargs: Any) -> Any:
        for output in rest:
            return _cloned(output) if clone else output
        return forward(*args, **kwargs)

    return returned


def _first(output: Any, rows: int, layer: str) -> Tensor:
    for leaf in tree_leaves(output):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        if leaf.ndim > 1 and len(leaf) == rows:
            return leaf
    found = [tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    raise ValueError(
        f"Fata(layer={layer!r}): the layer must give a floating tensor of {rows} rows, one an "
        f"image; it gave {type(output).__name__} with tensors of shape {found}. Tap another layer."
    )


def _cloned(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)


def _at(output: Any, rows: Tensor, count: int) -> Any:
    """Of what has a row an image, these rows."""

    def some(leaf: Any) -> Any:
        by_row = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count
        return leaf[rows] if by_row else leaf

    return tree_map(some, output)


def _versions(output: Any) -> list[int]:
    return [version(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
