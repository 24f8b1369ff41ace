"""`fata demo`: the methods at work on a network and images in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fata.commands import chosen_device, say
from fata.commands.bench import Show

# EATA without its Fisher penalty, whose computation alone would take half a minute.
METHODS = (
    *("source", "norm", "tent", "tent+fata", "eata:fisher_alpha=0", "eata+fata:fisher_alpha=0"),
    *("sar", "sar+fata", "deyo", "deyo+fata"),
)
FEW = ("impulse_noise", "frost", "fog", "pixelate")


def demo(
    model: Annotated[
        str, typer.Option(help="mini_resnet_bn, mini_resnet_gn or mini_vit.")
    ] = "mini_resnet_gn",
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="All 15 corruptions and 2,000 images, CoTTA and MEMO too: hours on a CPU.",
        ),
    ] = False,
    images: Annotated[
        int | None,
        typer.Option(min=1, help="Images of each corruption; by default 256, or all with --full."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="Where results and report go.")
    ] = Path("fata-demo"),
) -> None:
    """Adapt a trained network to corrupted images by every method, with and without FATA.

    Results are kept: the same command again shows them at once, or goes on where it was stopped.
    """
    from fata.bench.cell import key
    from fata.bench.grid import Grid
    from fata.bench.page import page
    from fata.bench.run import missing, run
    from fata.bench.store import Store, StoreError
    from fata.bench.tables import comparisons
    from fata.bench.workshop import Workshop
    from fata.commands.tables import show
    from fata.data import open as open_data
    from fata.zoo.embedded import NAMES

    if model not in NAMES:
        raise typer.BadParameter(f"model {model!r}: choose from {', '.join(NAMES)}.")
    grid = Grid(
        models=(model,),
        methods=(*METHODS, "cotta", "memo") if full else METHODS,
        domains=None if full else FEW,
        images=images or (None if full else 256),
        batch_size=64 if full else 32,
    )
    workshop = Workshop(chosen_device(None))
    cells = list(grid.cells(open_data))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = Store(folder / "results.db")
    except (OSError, StoreError) as error:
        raise typer.BadParameter(f"cannot write to {str(folder)!r}: {error}") from error
    tasks = missing(cells, store, workshop, again=False)
    say(f"{model} meets {len(cells)} streams of corrupted images, {len(tasks)} of them now ...")
    try:
        with Show(len(tasks)) as shown:
            run(tasks, store, workshop, shown)
    except KeyboardInterrupt:
        say(f"stopped: {shown.finished} of {len(tasks)} done and kept; the same command goes on")
        raise typer.Exit(130) from None
    wanted = {key(workshop.protocol(cell)) for cell in cells}
    tables = comparisons(record for record in store if record.key in wanted)
    for table in tables:
        show(table)
    report = folder / "report.html"
    report.write_text(page(tables, "fata demo"), encoding="utf-8")
    say(f"report: {report}")
