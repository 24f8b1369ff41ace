"""`fata reproduce`: a table or figure of the paper, its numbers and ours side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from fata.bench.beside import FORMATS, LINES, Sheet, head
from fata.bench.grid import GridError
from fata.bench.readings import gather, hyperparameters, sheet
from fata.bench.reproduce import Given, experiment, experiments, plan
from fata.bench.run import missing
from fata.bench.store import Record, Store, StoreError
from fata.bench.tables import comparisons
from fata.bench.workshop import Workshop
from fata.commands import chosen_device, console, say
from fata.commands.bench import announce, carry_out, preview
from fata.data import DataError
from fata.zoo import ZooError

LIST = tuple(f"{name}: {one.numbers.caption}" for name, one in experiments().items())


def reproduce(
    name: Annotated[str | None, typer.Argument(help="\n\n".join(LIST), show_default=False)] = None,
    imagenet_c: Annotated[
        Path | None, typer.Option("--imagenet-c", help="ImageNet-C, as released.")
    ] = None,
    imagenet: Annotated[
        Path | None,
        typer.Option(
            help="ImageNet's validation pictures: for EATA's penalty; corrupted here if alone."
        ),
    ] = None,
    office_home: Annotated[
        Path | None, typer.Option("--office-home", help="Office-Home, for table4 and tableA.")
    ] = None,
    sources: Annotated[
        Path, typer.Option(help="What fata train-source made of Office-Home's domains.")
    ] = Path(),
    data: Annotated[
        str | None,
        typer.Option(help="For networks in the package: embedded, cifar10:DIR, cifar10-c:DIR."),
    ] = None,
    subset: Annotated[
        int | None, typer.Option(min=1, help="Images of each corruption; all, if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of orders of the images.")] = 1,
    store: Annotated[Path, typer.Option("--store", help="The file of results.")] = Path(
        "results.db"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A page .html, or the numbers .md or .csv."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells, and about how long they will take.")
    ] = False,
) -> None:
    """Run what is behind a table or figure of the paper; print its numbers, ours, the difference.

    Works at once with --data embedded: networks and images in the package stand in for the paper's.
    Cells are kept in the store, as those of fata bench are: the same command again runs what is
    missing.
    """
    if name is None:
        for line in LIST:
            say(line)
        return
    try:
        one = experiment(name)
        if not one.methods:
            kind = _kind(output, FORMATS)
            _show_and_write(name, hyperparameters(), [], output, kind)
            return
        kind = _kind(output, ("html", *FORMATS))
        todo = plan(one, Given(data, imagenet_c, imagenet, office_home, sources), seeds, subset)
        workshop = Workshop(chosen_device(device), todo.jpeg, todo.fisher)
        cells = [slot.cell for slot in todo.slots]
        results = Store(store)
        tasks = missing(cells, results, workshop, again=False)
    except (GridError, DataError, ZooError, StoreError) as error:
        raise typer.BadParameter(str(error)) from error
    remedy = ": give --imagenet DIR too" if imagenet_c else ""
    announce(cells, tasks, results, workshop, remedy)
    if dry_run:
        preview(tasks, results, workshop, jobs)
        return
    watcher = carry_out(tasks, results, workshop, jobs)
    found = gather(todo, results, workshop)
    records = [record for parts in found.values() for some in parts.values() for record in some]
    if records:
        if one.figure and output is None:
            output, kind = Path(f"{name}.html"), "html"
        made = sheet(one, todo, found, workshop)
        _show_and_write(name, made, records, output, kind)
    watcher.close()


def _kind(output: Path | None, accepted: Iterable[str]) -> str:
    """What is to be written: by the end of the file's name."""
    kind = output.suffix.removeprefix(".") if output else ""
    if output and kind not in accepted:
        raise GridError(
            f"--output {output}: give a name that ends in {' or '.join(f'.{k}' for k in accepted)}."
        )
    return kind


def _show_and_write(
    name: str, made: Sheet, records: Sequence[Record], output: Path | None, kind: str
) -> None:
    show(made)
    for note in made.notes:
        say(f"- {note}")
    if output is None:
        return
    if kind == "html":
        from fata.bench.page import page

        content = page(comparisons(records), f"fata reproduce {name}")
    else:
        content = FORMATS[kind](made)
    try:
        output.write_text(content, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(output)!r}: {error}") from error
    say(f"{'report' if kind == 'html' else 'numbers'}: {output}")


def show(made: Sheet) -> None:
    """One line a row where there are few columns; else three, of as many columns as fit."""
    say(f"{made.title}; † one class took over" if _fallen(made) else made.title)
    if len(made.columns) < 3:
        console.print(_flat(made), "")
        return
    for columns in _fitting(made):
        console.print(_stacked(made, columns), "")


def _flat(made: Sheet) -> Table:
    """What the paper has no number of is ours alone."""
    table = _table()
    kept: list[tuple[str, int]] = []
    for column in made.columns:
        known = any(pairs[column].paper is not None for pairs in made.rows.values())
        prefix = f"{head(column)}: " if len(made.columns) > 1 else ""
        for place, line in enumerate(LINES):
            if known or line == "ours":
                table.add_column(prefix + line, justify="right")
                kept.append((column, place))
    for name, pairs in made.rows.items():
        table.add_row(name, *(pairs[column].texts[place] for column, place in kept))
    return table


def _stacked(made: Sheet, columns: Sequence[str]) -> Table:
    table = _table()
    table.add_column()
    for column in columns:
        table.add_column(head(column), justify="right", no_wrap=True)
    for name, pairs in made.rows.items():
        texts = zip(*(pairs[column].texts for column in columns), strict=True)
        for start, line, numbers in zip(_broken(name), LINES, texts, strict=True):
            table.add_row(start, line, *numbers, end_section=line == LINES[-1])
    return table


def _broken(name: str) -> tuple[str, str, str]:
    """A row's name over its three lines: the method, then its fields."""
    first, second, *third = [*re.split("[: ]", name), "", ""]
    return first, second, " ".join(third).strip()


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(no_wrap=True)
    return table


def _fitting(made: Sheet) -> Iterator[tuple[str, ...]]:
    """The columns in portions that the terminal is wide enough for."""
    starts = (start for name in made.rows for start in _broken(name))
    first = max(map(len, starts)) + max(map(len, LINES)) + 1
    some: list[str] = []
    left = console.width - first
    for column in made.columns:
        texts = (text for pairs in made.rows.values() for text in pairs[column].texts)
        wide = max(len(head(column)), *map(len, texts)) + 1
        if some and wide > left:
            yield tuple(some)
            some, left = [], console.width - first
        some.append(column)
        left -= wide
    yield tuple(some)


def _fallen(made: Sheet) -> bool:
    return any(pair.collapsed for pairs in made.rows.values() for pair in pairs.values())
