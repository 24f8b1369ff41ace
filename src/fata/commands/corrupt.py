"""`fata corrupt`: a contact sheet of all corruptions of a photograph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fata.commands import console, say


def corrupt(
    image: Annotated[Path, typer.Argument(help="A photograph, in any common format.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File of the contact sheet.")
    ] = Path("sheet.png"),
    name: Annotated[
        list[str] | None, typer.Option(help="Only this corruption; may be repeated.")
    ] = None,
    size: Annotated[int, typer.Option(min=16, help="Side of the images, in pixels.")] = 224,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Draw a contact sheet of all corruptions and severities of a photograph."""
    from PIL import Image, UnidentifiedImageError

    from fata.corruptions import BY_NAME, sheet

    names = name or list(BY_NAME)
    if unknown := [one for one in names if one not in BY_NAME]:
        raise typer.BadParameter(f"{unknown[0]!r}: choose from {', '.join(BY_NAME)}")
    try:
        with Image.open(image) as opened:
            pixels = sheet.square(opened, size)
    except (OSError, UnidentifiedImageError) as error:
        raise typer.BadParameter(f"cannot read {str(image)!r}: {error}") from error
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("corrupting", total=6 * len(names))
        drawn = sheet.draw(pixels, names, seed, lambda: progress.advance(task))
    try:
        drawn.save(output)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot write {str(output)!r}: {error}") from error
    say(f"{output}: {len(names)} corruptions, {drawn.width} x {drawn.height} pixels")
