"""`fata report`: the tables and plots of one or more stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fata._files import write_whole
from fata.commands import say

if TYPE_CHECKING:
    from fata.bench.store import Record


def report(
    stores: Annotated[list[Path], typer.Argument(help="Files of results, such as results.db.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Default: report.html; other formats are printed.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format", help="html, md, csv, json or latex. Default: the suffix of --output."
        ),
    ] = None,
) -> None:
    """Write tables like the paper's, curves and histograms to one self-contained page."""
    from fata.bench.report.formats import FORMATS
    from fata.bench.report.tables import comparisons
    from fata.bench.store import Store, StoreError

    suffix = output.suffix.removeprefix(".") if output else ""
    kind = kind or {"tex": "latex", "markdown": "md", "htm": "html", "": "html"}.get(suffix, suffix)
    if kind not in ("html", *FORMATS):
        raise typer.BadParameter(f"format {kind!r}: choose from html, {', '.join(FORMATS)}.")
    records: dict[str, Record] = {}
    for path in stores:
        try:
            found = {record.key: record for record in Store(path, read_only=True)}
            for record in found.values():
                record.check()
        except StoreError as error:
            raise typer.BadParameter(str(error)) from error
        records |= found
    if not records:
        raise typer.BadParameter(f"{stores[0]} has no results yet: fata bench makes some.")
    tables = comparisons(records.values())
    if kind == "html":
        from fata.bench.report.page import page

        content, output = page(tables), output or Path("report.html")
    else:
        content = FORMATS[kind](tables)
    if output is None:
        print(content, end="")
        return
    try:
        write_whole(output, content)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(output)!r}: {error}") from error
    tables_made = "one table" if len(tables) == 1 else f"{len(tables)} tables"
    say(f"{output}: {tables_made} of {len(records)} cells")
