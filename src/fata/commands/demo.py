"""`fata demo`: adaptation, FATA and the guard, on networks and images in the package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fata._files import write_whole
from fata.commands import chosen_device, console, say
from fata.commands.cells import in_processes, run_cells

if TYPE_CHECKING:
    from fata.bench.cell import Cell
    from fata.bench.report.demo_story import Story
    from fata.bench.run.runner import CellRunner
    from fata.bench.store import Record

MOST = 4  # processes: more would take longer to start than they save


def demo(
    images: Annotated[int, typer.Option(min=2, max=2000, help="Images of each corruption.")] = 1600,
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the results and the report.")
    ] = Path("fata-demo"),
) -> None:
    """Show what adaptation, FATA and the guard do for two trained networks on corrupted images.

    Takes about two minutes on two cores. Results are stored: the same command again shows them at
    once, or continues after an interruption.
    """
    from fata.bench.cell import key
    from fata.bench.report import demo_story as show
    from fata.bench.report.page import page
    from fata.bench.report.tables import comparisons
    from fata.bench.run.local import missing
    from fata.bench.run.runner import CellRunner
    from fata.bench.store import Store, StoreError

    device = chosen_device(None)
    runner = CellRunner(device)
    cells = show.cells(images)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = Store(folder / "results.db")
    except (OSError, StoreError) as error:
        raise typer.BadParameter(f"cannot write to {str(folder)!r}: {error}") from error
    tasks = missing(cells, store, runner, again=False)
    say(
        f"Two networks trained on CIFAR-10, tested on corrupted images: {len(tasks)} streams to run"
    )
    jobs = 1 if device.startswith("cuda") else min(MOST, os.cpu_count() or 1)
    run_cells(tasks, store, runner, in_processes(jobs)).close()
    wanted = {key(runner.protocol(cell)) for cell in cells}
    records = [record for record in store if record.key in wanted]
    story = show.story_of(records)
    _print(story)
    report = folder / "report.html"
    content = page(comparisons(records), "fata demo", _on_page(story, cells, records, runner))
    try:
        write_whole(report, content)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(report)!r}: {error}") from error
    say(f"Images, curves and tables: {report}")


def _on_page(
    story: Story, cells: Sequence[Cell], records: Sequence[Record], runner: CellRunner
) -> dict[str, object]:
    """The first part of the page."""
    from fata.bench.report import demo_story as show
    from fata.bench.report.page import drawing

    adapted = [
        (cell, runner.data(cell.data, cell.model))
        for cell in cells
        if cell.method == "eata" and cell.guard
    ]
    labels = runner.model(cells[0].model).labels
    return {
        "sentences": story.sentences,
        "additions": story.additions,
        "bars": drawing("story-bars", "Accuracy before and after adaptation", show.bars(story)),
        "curves": drawing(
            "story-curves", "A collapse, with and without the guard", show.curves(story)
        ),
        "strips": list(show.strips(records, adapted, labels)),
        "compared": show.readable(show.COMPARED),
        "collapse": show.readable(show.COLLAPSE),
    }


def _print(story: Story) -> None:
    from fata.bench.report.demo_story import COMPARED, NETWORKS, readable

    effect = Table("network", "corruption", title="1. Adaptation: accuracy in %, higher is better")
    for head in ("unadapted", "norm", "EATA"):
        effect.add_column(head, justify="right")
    for one in story.effects:
        norm = "" if one.norm is None else f"{one.norm:.1f}"
        after = Text(f"{one.after:.1f}", "green" if one.after > one.before else "red")
        names = (NETWORKS[one.network], readable(one.corruption))
        effect.add_row(*names, f"{one.before:.1f}", norm, after)
    added = Table("host", title=f"2. Gain of FATA: BatchNorm, {readable(COMPARED)}")
    for head in ("alone", "with FATA", "gain and 95 % interval"):
        added.add_column(head, justify="right")
    added.add_column("")
    for more in story.additions:
        colour = ("", "green", "red")[more.gain.sign]
        verdict = "" if more.gain.sign else "within noise"
        numbers = (f"{more.alone:.2f}", f"{more.together:.2f}", Text(str(more.gain), colour))
        added.add_row(more.host, *numbers, verdict)
    guarded = Table("GroupNorm, gaussian noise", title="3. The guard")
    guarded.add_column("accuracy in %", justify="right")
    for name, accuracy in story.guarded.accuracy.items():
        guarded.add_row(name, f"{accuracy:.1f}")
    about = "norm: BatchNorm with the batch's statistics, without learning; EATA learns as well"
    for table, note in ((effect, about), (added, ""), (guarded, "")):
        table.title_justify, table.title_style = "left", "bold"
        console.print(table)
        if note:
            say(note)
    for number, sentence in enumerate(story.sentences, 1):
        say(f"{number}. {sentence}")
