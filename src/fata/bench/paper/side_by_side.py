"""The paper's numbers and ours side by side, as text."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fata.bench.report.formats import in_markdown
from fata.bench.report.tables import AVERAGE, SHORT

GAIN = "difference"  # the paper's column: of FATA to its host
LINES = ("paper", "ours", "diff.")  # of a row
PERCENT, PLAIN = "{:.2f}", "{:.5g}"
_HEADS = {**SHORT, AVERAGE: "Avg.", GAIN: "Gain", "gmacs": "GMACs"}
_DOMAINS = {"Art": "Ar", "Clipart": "Cl", "Product": "Pr", "Real World": "Rw"}


class Pair(NamedTuple):
    """A number of the paper and ours; None if unknown."""

    paper: float | None
    ours: float | None
    collapsed: bool = False  # ours, in some cell
    form: str = PERCENT
    idle: bool = False  # the method has learned too little to tell, in some cell

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.paper is None or self.ours is None else self.ours - self.paper

    @property
    def texts(self) -> tuple[str, str, str]:
        """The paper's, ours and the difference; † collapsed, ° learned too little to tell."""
        signed = self.form.replace(":", ":+")
        signs = ("†" if self.collapsed else "") + ("°" if self.idle else "")
        return (
            _text(self.paper, self.form),
            _text(self.ours, self.form) + (signs if self.ours is not None else ""),
            _text(self.difference, signed),
        )


@dataclass(frozen=True)
class SideBySide:
    """A table of pairs.

    Args:
        title: what it shows.
        columns: their names.
        rows: pairs by row and column.
        notes: what a reader must know to compare.
    """

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Pair]]
    notes: tuple[str, ...] = ()


def head(column: str) -> str:
    """A column's name, short."""
    if " to " in column:
        return "→".join(_DOMAINS.get(end, end) for end in column.split(" to "))
    return _HEADS.get(column, column)


def markdown(table: SideBySide) -> str:
    """Three lines a row."""
    lines = [
        f"### {in_markdown(table.title)}",
        "",
        f"| | | {' | '.join(in_markdown(head(column)) for column in table.columns)} |",
        f"|---|---|{'---:|' * len(table.columns)}",
    ]
    for name, pairs in table.rows.items():
        texts = zip(*(pairs[column].texts for column in table.columns), strict=True)
        for kind, numbers in zip(LINES, texts, strict=True):
            first = in_markdown(name) if kind == LINES[0] else ""
            lines.append(f"| {first} | {kind} | {' | '.join(numbers)} |")
    return "\n".join([*lines, "", *(f"- {in_markdown(note)}" for note in table.notes), ""])


def as_csv(table: SideBySide) -> str:
    """One line a number, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "column", "paper", "ours", "difference", "collapsed", "idle"])
    for name, pairs in table.rows.items():
        for column in table.columns:
            pair = pairs[column]
            numbers = (pair.paper, pair.ours, pair.difference)
            writer.writerow([name, column, *numbers, pair.collapsed, pair.idle])
    return out.getvalue()


FORMATS: dict[str, Callable[[SideBySide], str]] = {"md": markdown, "csv": as_csv}


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
