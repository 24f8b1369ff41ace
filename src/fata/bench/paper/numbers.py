"""The paper's numbers: every table of it and of its supplement, with their misprints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fata._text import near


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Args:
        name: `table1a` to `table7`, `tableA` to `tableD` of the supplement, `figure1`.
        caption: what it shows.
        model: for `fata.zoo.load`.
        data: the kind of data set, as before the colon of `fata.data.open`.
        scenario: for `fata.stream`.
        unit: of the numbers.
        columns: corruptions or shifts, then `average` and `difference` (to the row without FATA).
        rows: numbers by method, as `fata bench` takes it, and column; None: nothing is printed.
        hidden: rows that are commented out in the LaTeX.
        slips: what misprinted numbers should be, by the other numbers of the table.
        notes: what a reader must know to compare.
    """

    name: str
    caption: str
    model: str
    data: str
    scenario: str
    unit: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, float | None]] = field(repr=False)
    hidden: tuple[str, ...] = ()
    slips: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def names() -> tuple[str, ...]:
    """Every table, in the paper's order."""
    return tuple(_content())


def table(name: str) -> PaperTable:
    """A table by name.

    Example:
        >>> from fata.bench.paper.numbers import table
        >>> table("table1b").rows["eata+fata"]["fog"]
        61.8
    """
    if name not in _content():
        raise ValueError(
            f"the paper has no {name!r}: choose from {', '.join(names())}.{near(name, names())}"
        )
    content = dict(_content()[name])
    columns = tuple(content.pop("columns"))
    rows = {row: dict(zip(columns, v, strict=True)) for row, v in content.pop("rows").items()}
    content |= {part: tuple(content.get(part, ())) for part in ("hidden", "notes")}
    return PaperTable(name=name, columns=columns, rows=rows, **content)


@cache
def _content() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("numbers.json").read_text(encoding="utf-8")
    )
    return content
