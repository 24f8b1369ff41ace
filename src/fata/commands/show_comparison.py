"""A comparison on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fata._text import printable
from fata.bench.report.formats import text
from fata.bench.report.tables import AVERAGE, SHORT, Comparison, Line
from fata.commands import console, say

_GAIN = "gain"


def show(comparison: Comparison) -> None:
    """The best of a column is green, a gain of FATA green or red, a collapse marked."""
    say(f"{comparison.title}: accuracy in %; † collapsed onto one class")
    for columns in _fitting(comparison):
        console.print(_table(comparison, columns))
    for note in comparison.notes:
        say(note)


def _table(comparison: Comparison, columns: Sequence[str]) -> Table:
    table = Table()
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(_head(column), justify="right", no_wrap=True)
    for line in comparison.lines:
        cells = [_coloured(comparison, line, column) for column in columns]
        table.add_row(line.method, *cells, end_section="+" in line.method)
    return table


def _coloured(comparison: Comparison, line: Line, column: str) -> Text:
    content = _plain(line, column)
    if column == _GAIN:
        return Text(content, {"+": "green", "-": "red"}.get(content[:1], ""))
    return Text(content, "bold green" if comparison.rank(column, line) == 1 else "")


def _head(column: str) -> str:
    return printable(SHORT.get(column, column))


def _plain(line: Line, column: str) -> str:
    if column == _GAIN:
        return "" if line.gain is None else f"{line.gain:+.2f}"
    return text(line.at(column))


def _fitting(comparison: Comparison) -> Iterator[list[str]]:
    """The columns, split to the width of the terminal."""
    border, names = 3, [len(line.method) for line in comparison.lines]
    room = console.width - max(names) - border - 1
    some: list[str] = []
    left = room
    for column in (*comparison.columns, AVERAGE, _GAIN):
        contents = [len(_plain(line, column)) for line in comparison.lines]
        wide = max(len(_head(column)), *contents) + border
        if some and wide > left:
            yield some
            some, left = [], room
        some.append(column)
        left -= wide
    yield some
