"""The parameters that adapt: which ones, and all of them as one flat vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fata._text import listed, near
from fata._torch import copy_all
from fata.network.norms import norm_layers
from fata.network.structure import truncated

Params = str | Sequence[str]
SETS = ("norm", "norm-truncated", "every", "weights")


def choose(model: nn.Module, params: Params) -> dict[str, nn.Parameter]:
    """The parameters of a set, by name.

    Args:
        model: the model that adapts.
        params: `norm`: all normalisation layers; `norm-truncated`: without those of the last
            stage or the last three blocks and what follows; `every`: every parameter; `weights`:
            every weight and bias (CoTTA's); or names of parameters or of modules.
    """
    every_name = model.named_parameters(remove_duplicate=False)  # tied ones have several
    named = {name: p for name, p in every_name if p.is_floating_point()}
    if isinstance(params, str):
        if params not in SETS:
            raise ValueError(
                f"params={params!r}: choose one of {', '.join(map(repr, SETS))}, or give a list "
                f"of names of parameters or modules."
            )
        if params == "every":
            return _once(named)
        if params == "weights":
            ends = ("weight", "bias")
            return _once({n: p for n, p in named.items() if n.rpartition(".")[2] in ends})
        every = [name for name, _ in norm_layers(model)]
        if not every:
            raise ValueError(
                f"{type(model).__name__} has no normalisation layer with parameters to adapt "
                f"(BatchNorm, GroupNorm, LayerNorm, RMSNorm). Name the parameters that should "
                f"adapt: params=[...]."
            )
        params = every if params == "norm" else truncated(model)
    if not isinstance(params, Sequence) or not all(isinstance(name, str) for name in params):
        raise TypeError(f"params={params!r}: give one of {', '.join(map(repr, SETS))} or names.")
    return _named(model, named, params)


def _named(
    model: nn.Module, named: dict[str, nn.Parameter], names: Sequence[str]
) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    for name in names:
        inside = {n: p for n, p in named.items() if n == name or n.startswith(f"{name}.")}
        if not inside:
            raise ValueError(
                f"params: {name!r} is no parameter and no module with parameters of "
                f"{type(model).__name__}.{near(name, named)} Known: {listed(named)}."
            )
        found |= inside
    if not found:
        raise ValueError("params=[]: name at least one parameter or module to adapt.")
    return _once(found)


def _once(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Each parameter under its first name."""
    seen: set[int] = set()
    return {n: p for n, p in named.items() if not (id(p) in seen or seen.add(id(p)))}  # type: ignore[func-returns-value]


class Theta:
    """Parameters of a model as one flat vector of full precision, and their places in the model.

    The vector is the truth and the model a copy of it: a half-precision model would lose small
    steps, SAM comes back from its climb bit for bit, and a snapshot is one tensor.

    Args:
        named: the model's parameters that adapt.
        beside: others that are learned with them and are no part of the model.
        beside_rate: their learning rate, in units of that of the model's.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        beside: Mapping[str, nn.Parameter] | None = None,
        beside_rate: float = 1.0,
    ) -> None:
        self.beside, self._beside_rate = dict(beside or {}), beside_rate
        self.model_names = list(named)
        # No module's name has a colon.
        self.names = [*named, *(f"beside:{name}" for name in self.beside)]
        self.parameters: list[Tensor] = [*named.values(), *self.beside.values()]
        self.sizes = [p.numel() for p in self.parameters]
        wide = any(p.dtype == torch.float64 for p in self.parameters)
        self.dtype = torch.float64 if wide else torch.float32
        self.unused: list[str] | None = None  # not reached by the first gradient; None: none yet

    def rates(self, lr: Tensor) -> Tensor:
        """The learning rate of each number of the vector, or of all, where they have one."""
        if not self.beside:
            return lr
        inside = sum(self.sizes[: len(self.model_names)])
        factors = lr.new_ones(sum(self.sizes))
        factors[inside:] = self._beside_rate
        return lr * factors

    def move(self, device: torch.device) -> None:
        """Follow the model to another device."""
        for parameter in self.beside.values():
            parameter.data = parameter.data.to(device)

    def read(self) -> Tensor:
        """The vector that the model holds now."""
        return self.join(p.detach() for p in self.parameters)

    def write(self, theta: Tensor) -> None:
        """Give the model these values."""
        if not self.parameters:
            return
        with torch.no_grad():
            copy_all(self.parameters, self.split(theta))
        torch.clear_autocast_cache()  # holds casts of the old values

    @contextmanager
    def at(self, there: Tensor, back: Tensor) -> Iterator[None]:
        """The model at `there` inside the context, at `back` after it."""
        try:
            self.write(there)
            yield
        finally:
            self.write(back)

    def gradient(self, loss: Tensor) -> Tensor:
        """Gradient of a loss; zero for parameters that had no part in it."""
        if not loss.requires_grad:
            raise ValueError(
                f"no gradient reaches the parameters that adapt ({listed(self.names, 4)}): are "
                f"they used, and does the model run without torch.no_grad() of its own?"
            )
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        if self.unused is None:
            self.unused = [n for n, g in zip(self.names, found, strict=True) if g is None]
        pairs = zip(found, self.parameters, strict=True)
        return self.join(torch.zeros_like(p) if g is None else g for g, p in pairs)

    def join(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
        """One flat vector of tensors that have the parameters' shapes."""
        parts = [tensor.reshape(-1).to(self.dtype) for tensor in tensors]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype)

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat vector, in the parameters' shapes."""
        pairs = zip(torch.split(flat, self.sizes), self.parameters, strict=True)
        return [part.view(p.shape) for part, p in pairs]
