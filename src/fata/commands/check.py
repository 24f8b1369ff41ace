"""`fata check`: the battery of checks on a method of your own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from fata.commands import console, import_from_here

if TYPE_CHECKING:
    from fata.methods.base import Method


def check(
    method: Annotated[str, typer.Argument(help="Your method, as my_module:MyMethod.")],
    net: Annotated[
        list[str] | None,
        typer.Option(help="Only this network (resnet_bn, resnet_gn, vit_ln); may be repeated."),
    ] = None,
) -> None:
    """Run the battery of checks on a method of your own, alone and with FATA.

    The method is created without arguments and adapts small networks with BatchNorm, GroupNorm and
    LayerNorm, with batches of 16 and of 1. Exits with 1 if a check fails.
    """
    import torch

    from fata.methods.base import CustomStep
    from fata.methods.fata import Fata
    from fata.testing.cases import cases
    from fata.testing.checks import CHECKS
    from fata.zoo import tiny

    mine, nets = _load(method), net or list(tiny.NAMES)
    if unknown := [name for name in nets if name not in tiny.NAMES]:
        raise typer.BadParameter(f"{unknown[0]!r}: choose from {', '.join(tiny.NAMES)}")
    logging.getLogger("fata").setLevel(logging.ERROR)  # warnings are for users of a model
    torch.set_num_threads(1)  # fastest for networks this small
    variants: list[Fata | None] = [None] if isinstance(mine, CustomStep) else [None, Fata()]
    failures: dict[str, dict[str, list[str]]] = {}
    todo = [(c, p) for c in CHECKS for p in variants]
    for one, plus in track(todo, "checking", console=console, transient=True):
        for case in (c for c in cases(mine, plus) if c.net in nets):
            try:
                one(case)
            except Exception as error:
                where = f"{case.net}, batches of {case.rows}{', with FATA' if plus else ''}"
                problem = f"{type(error).__name__}: {error}"
                failures.setdefault(one.__name__, {}).setdefault(problem, []).append(where)
    table = Table("check", "", "what it holds to", title=f"{mine!r}")
    for one in CHECKS:
        fails = one.__name__ in failures
        mark = Text("fails", "red") if fails else Text("holds", "green")
        table.add_row(one.__name__.replace("_", " "), mark, (one.__doc__ or "").splitlines()[0])
    console.print(table)
    for name, problems in failures.items():
        console.print(Text(name.replace("_", " "), "red"))
        for problem, places in problems.items():
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            console.print(f"  {problem} ({places[0]}{more})")
    if failures:
        raise typer.Exit(1)


def _load(target: str) -> Method:
    from fata.methods.external import external

    import_from_here(target)
    try:
        return external(target)()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except TypeError as error:
        raise typer.BadParameter(f"{target!r}: needs a default for each field: {error}") from error
