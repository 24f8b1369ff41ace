"""An engine from what a user gives."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fata.distributed.group import RankGroup
from fata.engine import arguments
from fata.engine.checkpoint import described, fingerprint
from fata.engine.direct import Direct
from fata.engine.engine import Engine
from fata.engine.fast.execution import Fast
from fata.engine.fisher import FisherData, fisher
from fata.engine.ownership import Settings
from fata.engine.rates import check_rate, is_transformer_like, rate
from fata.guard.policy import Guard
from fata.methods.base import Method
from fata.methods.fata import Fata
from fata.methods.feature import FeatureMethod
from fata.network.head import Head
from fata.network.parameters import Params, Theta, choose

SPEEDS = {"exact": Direct, "fast": Fast}


def build(
    model: nn.Module,
    method: Method,
    plus: Fata | None,
    settings: Settings,
    lr: float | str | None,
    params: Params | None,
    fisher_data: FisherData | None,
    guard: Guard | bool | None,
    seed: int,
    speed: str | None,
    group: ProcessGroup | None,
    reset_every: int | None = None,
) -> Engine:
    """The engine of an adapter; `settings` restores the model if something is wrong."""
    arguments.check_method(method, plus, fisher_data)
    check_rate(lr)
    arguments.check_seed(seed)
    arguments.check_reset(reset_every, method)
    speed = arguments.default_speed(model, group) if speed is None else speed
    if speed not in SPEEDS:
        raise ValueError(f"speed={speed!r}: choose from {', '.join(SPEEDS)}.")
    arguments.check_group(group, speed)
    params = method.params if params is None else arguments.renamed(params)
    params = "norm-truncated" if params is None and plus else params
    vit, watch = is_transformer_like(model), arguments.guard_of(guard)
    named = choose(model, params) if params is not None else {}
    theta = Theta(named, _modules(model, method), method.modules_rate(vit))

    def learning_rate(rows: int) -> float:
        if lr is None or isinstance(lr, str):
            return rate(lr or "paper", method, vit, rows)
        return float(lr)

    with torch.inference_mode(False):
        parts = model, method, plus, theta, learning_rate, vit, seed, watch, SPEEDS[speed]
        engine = Engine(*parts, reset_every)
        try:
            model.eval()  # dropout and stochastic depth off
            model.requires_grad_(False)
            for parameter in theta.parameters:
                parameter.requires_grad_(True)
            if fisher_data is not None:
                engine.functions.fisher = fisher(engine, fisher_data)
                engine.state = engine.fresh()
            ranks = RankGroup.of(group)
            if isinstance(ranks, RankGroup):
                given = {"lr": f"{lr}", "reset_every": f"{reset_every}"}
                ranks.agree(model=fingerprint(engine), **given, **described(engine))
                engine.join(ranks)
        except BaseException:
            settings.restore(engine)
            raise
    return engine


def _modules(model: nn.Module, method: Method) -> dict[str, nn.Parameter]:
    """What a method learns beside the network."""
    if not isinstance(method, FeatureMethod):
        return {}
    head = Head(model, method.head)
    weight = head.weight
    head.remove()
    modules = method.modules(weight.shape[1])
    return {name: nn.Parameter(tensor.to(weight)) for name, tensor in modules.items()}
