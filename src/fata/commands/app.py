"""All commands as one application."""

from __future__ import annotations

from typing import Annotated

import typer

import fata
from fata.commands import say
from fata.commands.bench import bench
from fata.commands.check import check
from fata.commands.corrupt import corrupt
from fata.commands.cost import cost
from fata.commands.data import data
from fata.commands.demo import demo
from fata.commands.report import report
from fata.commands.reproduce import reproduce
from fata.commands.serve import serve
from fata.commands.train_source import train_source
from fata.commands.tune import tune

app = typer.Typer(
    help="Test-time adaptation of image classifiers, with feature augmentation (FATA).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
COMMANDS = (demo, bench, report, tune, reproduce, serve, cost, data, corrupt, train_source, check)
for command in COMMANDS:
    app.command()(command)


def _version(show: bool) -> None:
    if show:
        say(f"fata {fata.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Test-time adaptation of image classifiers, with feature augmentation (FATA)."""
