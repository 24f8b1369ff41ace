"""The commands of `fata`, one file each."""

import logging
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fata._text import printable

_OWN = re.compile(r"[\w.]+:[A-Za-z_]\w*(\+fata)?(:.*)?")  # not eata:lr=1e-3


class Terminal(Console):
    """Prints text verbatim: names with markup such as `[bold]` or escape codes have no effect."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Remove control characters, which would reach the terminal."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


console = Terminal()


def say(text: str) -> None:
    """Print a line without wrapping."""
    console.print(text, soft_wrap=True)


class LogHandler(logging.Handler):
    """Prints the library's log messages, also while a progress bar is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        say(record.getMessage())


def import_from_here(*names: str | None) -> None:
    """Let models, data and methods be imported from this folder; installed modules come first."""
    here = str(Path.cwd())
    if any(_OWN.fullmatch(name) for name in names if name) and here not in sys.path:
        sys.path.append(here)


def chosen_device(name: str | None) -> str:
    """An available device; by default a GPU if there is one."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise typer.BadParameter(f"no device {name!r}: {why}") from error
    return name


# Options that several commands have.
Device = Annotated[
    str | None, typer.Option(help="Device, such as cuda:1. Default: cuda if available.")
]
Jobs = Annotated[
    int, typer.Option(min=1, help="Cells to run in parallel, each in its own process.")
]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode images. Default: a few.")
]
