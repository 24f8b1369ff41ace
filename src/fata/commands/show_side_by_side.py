"""The paper's numbers and ours, on the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from fata.bench.paper.side_by_side import LINES, SideBySide, head
from fata.commands import console, say


def show(made: SideBySide) -> None:
    """One line a row for few columns; otherwise three, with as many columns as fit."""
    pairs = [pair for row in made.rows.values() for pair in row.values()]
    collapsed = "; † collapsed onto one class" if any(pair.collapsed for pair in pairs) else ""
    idle = "; ° too few steps, or no changed prediction" if any(p.idle for p in pairs) else ""
    say(f"{made.title}{collapsed}{idle}")
    if len(made.columns) < 3:
        console.print(_flat(made), "")
        return
    for columns in _fitting(made):
        console.print(_stacked(made, columns), "")


def _flat(made: SideBySide) -> Table:
    """Columns without a number of the paper show ours alone."""
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


def _stacked(made: SideBySide, columns: Sequence[str]) -> Table:
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


def _fitting(made: SideBySide) -> Iterator[tuple[str, ...]]:
    """The columns, split to the width of the terminal."""
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
