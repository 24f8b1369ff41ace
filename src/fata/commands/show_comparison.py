"""A comparison on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fata._text import printable
from fata.bench.report.formats import text
from fata.bench.report.protocol import in_words
from fata.bench.report.remarks import remarks
from fata.bench.report.tables import AVERAGE, SHORT, Comparison, Line
from fata.commands import console, say

_GAIN = ("gain", "over images", "over seeds")


def show(comparisons: Sequence[Comparison]) -> None:
    """Tables with their protocol in words; then what to know before trusting them, once each."""
    for comparison in comparisons:
        say(f"{comparison.title}: accuracy in %{_signs(comparison)}")
        for columns in _fitting(comparison):
            console.print(_table(comparison, columns))
        for sentence in in_words(comparison):
            say(sentence)
    for remark in dict.fromkeys(line for table in comparisons for line in remarks(table)):
        console.print(Text(remark, "yellow"), soft_wrap=True)


def _signs(comparison: Comparison) -> str:
    """What the signs in a table mean, of those that it has."""
    values = [line.at(column) for line in comparison.lines for column in comparison.columns]
    known = [value for value in values if value]
    signs = {
        "; † collapsed onto one class": any(value.collapsed for value in known),
        "; ° too few steps, or no changed prediction": any(value.idle for value in known),
        "; gain of FATA with its 95 % intervals, grey within noise": any(
            line.gain for line in comparison.lines
        ),
    }
    return "".join(text for text, has in signs.items() if has)


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
    if column in _GAIN:
        return Text(content, ("bright_black", "green", "red")[line.gain.sign if line.gain else 0])
    return Text(content, ("", "bold green", "underline")[comparison.rank(column, line)])


def _head(column: str) -> str:
    return printable(SHORT.get(column, column))


def _plain(line: Line, column: str) -> str:
    if column in _GAIN:
        return line.gain.texts.get(column, "") if line.gain else ""
    return text(line.at(column))


def _fitting(comparison: Comparison) -> Iterator[list[str]]:
    """The columns, split to the width of the terminal."""
    border, names = 3, [len(line.method) for line in comparison.lines]
    room = console.width - max(names) - border - 1
    some: list[str] = []
    left = room
    gains = [head for head in _GAIN if any(_plain(line, head) for line in comparison.lines)]
    for column in (*comparison.columns, AVERAGE, *gains):
        contents = [len(_plain(line, column)) for line in comparison.lines]
        wide = max(len(_head(column)), *contents) + border
        if some and wide > left:
            yield some
            some, left = [], room
        some.append(column)
        left -= wide
    yield some
