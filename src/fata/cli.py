"""The `fata` command."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Annotated

import typer

import fata
from fata.commands import LogHandler, say
from fata.commands.bench import bench
from fata.commands.check import check
from fata.commands.corrupt import corrupt
from fata.commands.cost import cost
from fata.commands.data import data
from fata.commands.demo import demo
from fata.commands.report import report
from fata.commands.reproduce import reproduce
from fata.commands.train_source import train_source

app = typer.Typer(
    help="Test-time adaptation of image classifiers, with feature augmentation (FATA).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (demo, bench, report, reproduce, cost, data, corrupt, train_source, check):
    app.command()(command)


def run() -> None:
    """The program: SIGTERM, as `timeout` and batch systems send it, ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    log = logging.getLogger("fata")
    log.setLevel(logging.INFO)
    log.addHandler(LogHandler())
    app(prog_name="fata")


def _as_ctrl_c(_: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # a job in the background ignores Ctrl-C, but not this
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)


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
