"""`fata reproduce`: a table or figure of the paper, its numbers and ours side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fata._files import write_whole
from fata.commands import Device, Jobs, chosen_device, import_from_here, say
from fata.commands.cells import announce, in_processes, preview, run_cells

if TYPE_CHECKING:
    from fata.bench.paper.side_by_side import SideBySide
    from fata.bench.store import Record

NAMES = (
    "table1a, table1b, table1c, table2a, table2b, table3, table4, table5, table6, table7, fig1, "
    "fig4, fig5, figA, tableA, tableB, tableC, hyperparameters"
)


def reproduce(
    name: Annotated[str | None, typer.Argument(help=f"{NAMES}. Without a name: list them.")] = None,
    imagenet_c: Annotated[
        Path | None, typer.Option("--imagenet-c", help="Folder of ImageNet-C, as released.")
    ] = None,
    imagenet: Annotated[
        Path | None,
        typer.Option(
            help="ImageNet's validation images: for EATA's penalty, or corrupted on the fly."
        ),
    ] = None,
    office_home: Annotated[
        Path | None,
        typer.Option("--office-home", help="Folder of Office-Home, for table4 and tableA."),
    ] = None,
    sources: Annotated[
        Path,
        typer.Option(help="Folder of the models that fata train-source trained on Office-Home."),
    ] = Path(),
    data: Annotated[
        str | None,
        typer.Option(
            help="Data for the networks in the package (embedded, cifar10:DIR, cifar10-c:DIR), or "
            "for --model."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Another model, on --data: a name for fata.zoo.load, or my_module:build."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Further rows, comma-separated: my_module:MyMethod, eata:lr=1e-3, ..."),
    ] = None,
    subset: Annotated[
        int | None, typer.Option(min=1, help="Images of each corruption. Default: all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 1,
    store: Annotated[Path, typer.Option("--store", help="SQLite file of results.")] = Path(
        "results.db"
    ),
    jobs: Jobs = 1,
    device: Device = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A page (.html), or the numbers (.md, .csv)."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only list the cells, and estimate their time."),
    ] = False,
) -> None:
    """Run a table or figure of the paper; print its numbers, ours and the difference.

    With --data embedded, networks and images in the package replace the paper's. Cells are stored
    as by fata bench: the same command again runs only what is missing.
    """
    from fata.bench.paper.experiments import experiments

    if name is None:
        for known in experiments().values():
            say(f"{known.name}: {known.numbers.caption}")
        return

    from fata.bench.grid import GridError
    from fata.bench.paper.plan import DataPaths, experiment, plan, with_methods
    from fata.bench.paper.results import gather, hyperparameters, side_by_side
    from fata.bench.paper.side_by_side import FORMATS
    from fata.bench.run.local import missing
    from fata.bench.run.runner import CellRunner
    from fata.bench.store import Store, StoreError
    from fata.data import DataError
    from fata.zoo import ZooError

    try:
        one = experiment(name)
        if not one.methods:
            kind = _kind(output, FORMATS)
            _show_and_write(name, hyperparameters(), [], output, kind)
            return
        kind = _kind(output, ("html", *FORMATS))
        more = tuple(part.strip() for part in (methods or "").split(",") if part.strip())
        import_from_here(data, model, *more)
        one = with_methods(one, more)
        given = DataPaths(data, imagenet_c, imagenet, office_home, sources, model)
        planned = plan(one, given, seeds, subset)
        runner = CellRunner(chosen_device(device), planned.jpeg, planned.fisher)
        cells = [one.cell for one in planned.cells]
        results = Store(store)
        tasks = missing(cells, results, runner, again=False)
    except (GridError, DataError, ZooError, StoreError) as error:
        raise typer.BadParameter(str(error)) from error
    remedy = ": give --imagenet DIR too" if imagenet_c else ""
    announce(cells, tasks, results, runner, remedy)
    if dry_run:
        preview(tasks, results, runner, jobs)
        return
    watcher = run_cells(tasks, results, runner, in_processes(jobs))
    found = gather(planned, results, runner)
    records = [record for parts in found.values() for some in parts.values() for record in some]
    if records:
        if one.figure and output is None:
            output, kind = Path(f"{name}.html"), "html"
        made = side_by_side(one, planned, found, runner)
        _show_and_write(name, made, records, output, kind)
    watcher.close()


def _kind(output: Path | None, accepted: Iterable[str]) -> str:
    """The format to write, from the file's suffix."""
    from fata.bench.grid import GridError

    kind = output.suffix.removeprefix(".") if output else ""
    if output and kind not in accepted:
        raise GridError(
            f"--output {output}: give a name that ends in {' or '.join(f'.{k}' for k in accepted)}."
        )
    if output and not output.parent.is_dir():  # fail before hours of runs, not after
        raise GridError(f"cannot write {str(output)!r}: there is no folder {str(output.parent)!r}.")
    return kind


def _show_and_write(
    name: str, made: SideBySide, records: Sequence[Record], output: Path | None, kind: str
) -> None:
    from fata.bench.paper.side_by_side import FORMATS
    from fata.bench.report.remarks import remarks
    from fata.bench.report.tables import comparisons
    from fata.commands.show_side_by_side import show

    show(made)
    for note in made.notes:
        say(f"- {note}")
    tables = comparisons(records)
    for line in dict.fromkeys(line for table in tables for line in remarks(table)):
        say(f"- {line}")
    if output is None:
        return
    if kind == "html":
        from fata.bench.report.page import page

        content = page(tables, f"fata reproduce {name}")
    else:
        content = FORMATS[kind](made)
    try:
        write_whole(output, content)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(output)!r}: {error}") from error
    say(f"{'report' if kind == 'html' else 'numbers'}: {output}")
