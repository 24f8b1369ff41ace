"""What a network is made of, read off its modules: stages, stacks of equal blocks, the trunk.

Nothing here knows the names of any one network. The *trunk* is the row of siblings that holds most
of the network's normalisation layers: `layer1`..`layer4` of a ResNet, `blocks` of a ViT, `stages`
of a ConvNeXt, `features` of a torchvision network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fata._text import listed
from fata.network.norms import is_norm, norm_layers

_STRIDED = (nn.Conv1d, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


@dataclass(frozen=True)
class Trunk:
    """The siblings that carry a network, in order, by full name."""

    names: tuple[str, ...]
    equal: bool  # one block again and again, as in a ViT; else stages
    cut: int  # where the last stage begins

    @property
    def tap(self) -> str:
        """Where FATA taps by default: after stage 3 of 4, after the last block but one."""
        return self.names[self.cut - 1] if not self.equal else self.names[-2]

    @property
    def last(self) -> tuple[str, ...]:
        """The last stage, or the last three blocks: what `norm-truncated` leaves out."""
        if self.equal:
            return self.names[-min(3, len(self.names) - 1) :]
        return self.names[self.cut :]


def trunk(model: nn.Module) -> Trunk | None:
    """The trunk of a network, or None where no module has two siblings with parameters."""
    sizes = {tuple(group): _size(model, group) for group in _sibling_groups(model)}
    if not sizes:
        return None
    best = max(sizes, key=lambda group: sizes[group])  # of equal ones the outer: it comes first
    while inner := [
        group
        for group in sizes
        if any(group[0].startswith(f"{name}.") for name in best)
        and 0 < 0.8 * sizes[best][0] <= sizes[group][0]  # Sequential(network, head) and the like
    ]:
        best = max(inner, key=lambda group: sizes[group])
    modules = [model.get_submodule(name) for name in best]
    equal = len({_signature(module) for module in modules}) == 1
    return Trunk(best, equal, _last_stage(modules))


def auto_layer(model: nn.Module) -> str:
    """The layer that FATA taps when none is named."""
    found = trunk(model)
    if found is None:
        names = listed(layers(model)) or "but it has no submodule that could be one"
        raise ValueError(
            f"Fata(layer='auto'): no stages and no stack of blocks found in "
            f"{type(model).__name__}. Name a layer: {names}."
        )
    layer = found.tap
    while isinstance(model.get_submodule(layer), nn.ModuleList):  # is never called itself
        layer += f".{len(list(model.get_submodule(layer).children())) - 1}"
    return layer


def layers(model: nn.Module) -> list[str]:
    """Candidates for `Fata(layer=...)`, in order: the trunk's parts and what comes before them."""
    found = trunk(model)
    names = [name for name, _ in model.named_modules() if name]
    if found is None:
        return names
    parents = {name.rpartition(".")[0] for name in found.names}
    outer = {""} | {p.rsplit(".", n)[0] for p in parents for n in range(p.count(".") + 1)}
    before = names[: names.index(found.names[0])]
    stem = [n for n in before if n.rpartition(".")[0] in outer and n not in outer]
    return [*stem, *found.names]


def truncated(model: nn.Module) -> list[str]:
    """Normalisation layers without those of the last stage or last three blocks, and all behind.

    Where that would leave none, all of them.
    """
    every = [name for name, _ in norm_layers(model)]
    found = trunk(model)
    if found is None:
        return every
    order = [name for name, _ in model.named_modules()]
    end = order.index(found.last[0])
    return [name for name in every if order.index(name) < end] or every


def _sibling_groups(model: nn.Module) -> Iterator[list[str]]:
    """Rows of siblings with parameters: a container's children, or `name1`, `name2`, ..."""
    for path, parent in model.named_modules():
        prefix = f"{path}." if path else ""
        groups: dict[str, list[str]] = {}
        for name, child in parent.named_children():
            if isinstance(parent, nn.Sequential | nn.ModuleList):
                stem: str | None = ""
            else:
                numbered = re.fullmatch(r"(\D*?)_?\d+[a-z]?", name)
                stem = numbered.group(1) if numbered else None
            if stem is not None and any(True for _ in child.parameters()):
                groups.setdefault(stem, []).append(prefix + name)
        yield from (group for group in groups.values() if len(group) > 1)


def _size(model: nn.Module, group: list[str]) -> tuple[int, int]:
    """Normalisation layers, then parameters, in a row of siblings."""
    modules = [model.get_submodule(name) for name in group]
    norms = sum(is_norm(inner) for module in modules for inner in module.modules())
    return norms, sum(p.numel() for module in modules for p in module.parameters())


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *(tuple(p.shape) for p in module.parameters()))


def _halves(module: nn.Module) -> bool:
    """Whether a stride makes the map smaller; attention may stride over its keys without that."""
    if isinstance(module, _STRIDED):
        return module.stride not in (1, (1, 1), (1,))
    attends = re.search("attention|attn", type(module).__name__, re.IGNORECASE)
    return not attends and any(_halves(child) for child in module.children())


def _last_stage(modules: list[nn.Module]) -> int:
    """Index of the first module of the last stage: the one that halves the map for the last time.

    Networks that show no stride (Swin) are read by width: the last parts of one width, with the
    piece that leads to them.
    """
    for index in range(len(modules) - 1, 0, -1):
        if _halves(modules[index]):
            return index
    widths, cut = [_width(module) for module in modules], len(modules) - 1
    while cut > 1 and widths[cut - 1] == widths[-1]:
        cut -= 1
    if cut > 1 and _has_blocks(modules[cut]) and not _has_blocks(modules[cut - 1]):
        cut -= 1
    return cut


def _width(module: nn.Module) -> int:
    """Channels of a module's last normalisation layer, or of its last parameter."""
    norms = [m for m in module.modules() if is_norm(m)]
    last = list((norms[-1] if norms else module).parameters())[-1]
    return last.shape[0] if last.ndim else 1


def _has_blocks(module: nn.Module) -> bool:
    """Whether a module holds modules that hold normalisation layers: a stage does."""
    inner = (m for child in module.children() for m in child.modules() if m is not child)
    return any(is_norm(m) for m in inner)
