"""`fata cost`: multiply-accumulates of methods, by the paper's rule and as computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.progress import track
from rich.table import Table

from fata.commands import console, import_from_here, say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fata.bench.cost import Cost

METHODS = (
    "source, tent, eata, eata+fata, sar, sar+fata, deyo, deyo+fata, roid, zerosiam, nctta, neo, "
    "cotta, memo"
)


def cost(
    model: Annotated[
        str, typer.Option(help="Model: resnet50_gn, mini_vit, timm:NAME, my_module:build, ...")
    ],
    methods: Annotated[
        str, typer.Option(help="Methods, comma-separated; your own as my_module:MyMethod.")
    ] = METHODS,
    classes: Annotated[
        int | None,
        typer.Option(
            min=2, help="Number of classes. Default: 1000, and 10 for the networks in the package."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Side of an image in pixels. Default: the network's own."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the samples that a method selects.")
    ] = 0.4,
) -> None:
    """Count multiply-accumulates per image, by the paper's rule and as computed here.

    The paper counts forward passes, as if every sample were selected. Ours has the selected share
    of the samples, and backward passes. No weights are downloaded.
    """
    import torch

    from fata.bench.cost import cost as cost_of
    from fata.engine.step import DENSE
    from fata.methods import parse
    from fata.network.norms import batch_norms
    from fata.zoo import ZooError
    from fata.zoo.own import Own
    from fata.zoo.sources import Mini, architecture

    specs = [spec.strip() for spec in methods.split(",") if spec.strip()]
    if not specs:
        raise typer.BadParameter(f"--methods {methods!r}: give some, such as eata,eata+fata.")
    import_from_here(model, *specs)
    try:
        for spec in specs:
            parse(spec)
        arch = architecture(model)
        own = (10, 32) if isinstance(arch, Mini) else (1000, arch.preprocess.size)
        if isinstance(arch, Own):
            own = (arch.loaded().classes, arch.preprocess.size)
        classes, size = classes or own[0], size or own[1]
        network, images = arch.build(classes).eval(), torch.rand(2, 3, size, size)
        _try(model, network, images)
        hidden = not console.is_terminal
        todo = track(specs, "counting", console=console, transient=True, disable=hidden)
        costs = [cost_of(network, spec, images, share) for spec in todo]
    except (ZooError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    again = "by one pass over all" if batch_norms(network) or share >= DENSE else "passed again"
    digits = 2 if costs[0].whole.forward > 1e9 else 4
    tail = max(one.tail.forward for one in costs)
    behind = f"; T, its tail behind FATA's layer: {_giga(tail, digits)}" if tail else ""
    whole = _giga(costs[0].whole.forward, digits)
    for line in (
        f"{model}, {classes} classes, {size} x {size} pixels; ours with {share:.0%} of the rows "
        f"selected, {again}",
        f"F, a forward pass: {whole} GMACs{behind}",
    ):
        say(line)
    console.print(_table(costs, digits))


def _try(name: str, network: nn.Module, images: Tensor) -> None:
    import torch

    try:
        with torch.no_grad():
            network(images)
    except (AssertionError, RuntimeError) as error:
        size = images.shape[-1]
        raise ValueError(f"{name} does not take {size} x {size} images: {error}") from error


def _table(costs: list[Cost], digits: int) -> Table:
    frame = box.HEAVY_HEAD if console.is_terminal else None
    table = Table(title="GMACs an image", title_justify="left", box=frame)
    table.add_column("method")
    for name in ("paper", "ours: forward", "backward", "total", "state"):
        table.add_column(name, justify="right")
    for one in costs:
        macs = (one.ours.forward, one.ours.backward, one.ours.total)
        paper = "" if one.paper is None else _giga(one.paper, digits)
        table.add_row(one.spec, paper, *(_giga(m, digits) for m in macs), _bytes(one.state))
    return table


def _giga(macs: float, digits: int) -> str:
    return f"{macs / 1e9:.{digits}f}"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
