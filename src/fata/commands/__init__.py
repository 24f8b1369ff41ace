"""The commands of `fata`, one file each."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()


def say(text: str) -> None:
    """Print a line as it is: nothing coloured, nothing broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def look_here() -> None:
    """Let modules of this folder be named, as for `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def chosen_device(name: str | None) -> str:
    """A device that is there; by default a GPU where there is one."""
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
    str | None, typer.Option(help="Such as cuda:1; by default cuda where there is one.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Cells at a time, each in a process.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that decode pictures.")]
