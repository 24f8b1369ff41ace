"""`fata demo`: every method at work in a minute."""

from __future__ import annotations

from typing import Annotated

import typer

from fata.commands import console


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each network.")] = 200,
    images: Annotated[int, typer.Option(min=1, help="Pictures of each shift.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the pictures and the weights.")] = 0,
) -> None:
    """Train tiny networks on generated pictures, shift the pictures, adapt: a table by method.

    MEMO is left out: 64 views of every picture take minutes.
    """
    from fata.demo import run

    console.print("training three tiny networks, then adapting each by every method but MEMO ...")
    run(console, steps, images, seed)
