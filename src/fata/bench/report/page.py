"""The report: one HTML page that needs no network.

The templates escape every name by themselves: a folder may be called anything.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fata.bench.report.figures import ENTROPIES, Figure, colours, domains, figures
from fata.bench.report.formats import text
from fata.bench.report.overview import overview
from fata.bench.report.protocol import in_words
from fata.bench.report.remarks import cautions, remarks
from fata.bench.report.tables import AVERAGE, GROUPS, SHORT, Comparison, Line

_TEMPLATES = Path(__file__).with_name("templates")
_MOST, _FEW = 12, 8  # lines drawn at first: all up to _MOST, otherwise _FEW


def page(
    comparisons: Sequence[Comparison],
    title: str = "Test-time adaptation",
    story: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
) -> str:
    """Tables like the paper's, curves and histograms, with filters.

    Above them is the demo's `story`; or `top`, which is an overview of the first table by default.
    """
    specs = dict.fromkeys(_spec(line) for c in comparisons for line in c.lines)
    made: str = (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            story=story,
            filters={
                "model": dict.fromkeys(c.model for c in comparisons),
                "scenario": dict.fromkeys(c.scenario for c in comparisons),
                "method": specs,
            },
            sections=[_section(number, c) for number, c in enumerate(comparisons)],
            style=_asset("page.css"),
            script=_asset("page.js"),
            overview=None if story else _overview(comparisons, top),
            plotly=_plotly(),
        )
    )
    return made


def _overview(
    comparisons: Sequence[Comparison], top: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """What is given, or that of the first table that compares something."""
    made = top or next(filter(None, map(overview, comparisons)), None)
    return None if made is None else {**made, "figure": drawing("overview", "", made["figure"])}


@cache
def _plotly() -> str:
    """The drawing library, a third of its size: the page unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode())).decode()


def drawing(at: str, title: str, figure: Figure) -> dict[str, Any]:
    """A figure as the templates take it; `at` is its id on the page."""
    return {"id": at, "title": title, "content": figure._asdict(), "one": title == ENTROPIES}


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return made


def _asset(name: str) -> Markup:
    """A file of our own, which goes into the page as it is."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _section(number: int, comparison: Comparison) -> dict[str, Any]:
    columns = (AVERAGE, *comparison.columns)
    return {
        "comparison": comparison,
        "groups": list(_groups(columns)),
        "columns": [(name, SHORT.get(name, name)) for name in columns],
        "rows": [_row(comparison, line, columns) for line in comparison.lines],
        "protocol": in_words(comparison),
        "remarks": (*cautions(comparison.records), *remarks(comparison)),
        "legend": _legend(comparison),
        "domains": domains(comparison.records),
        "methods": [line.method for line in comparison.lines],
        "figures": [
            drawing(f"figure-{number}-{place}", title, figure)
            for place, (title, figure) in enumerate(figures(comparison).items())
        ],
    }


def _legend(comparison: Comparison) -> list[dict[str, Any]]:
    """A box a method, for all figures of a section; of many, the plain and the best are drawn."""

    def place(line: Line) -> tuple[bool, float]:
        return " " in line.method, -line.average.mean if line.average else 0.0

    lines = sorted(comparison.lines, key=place)
    drawn = {line.method for line in (lines if len(lines) <= _MOST else lines[:_FEW])}
    return [
        {
            "spec": name.partition(" ")[0],
            "method": name,
            "colour": colour,
            "drawn": name in drawn,
        }
        for name, colour in colours(comparison).items()
    ]


def _groups(columns: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The heads above the columns after the gain, each with how many it spans; then the rest."""
    left = len(columns) - 1  # but the average
    for name, members in GROUPS.items():
        if width := sum(member in columns for member in members):
            yield name, width
            left -= width
    if left:
        yield "", left


def _row(comparison: Comparison, line: Line, columns: Sequence[str]) -> dict[str, Any]:
    cells = []
    for column in columns:
        value = line.at(column)
        marks = [("", "best", "level")[comparison.rank(column, line)]]
        if value is not None:
            marks += ["collapsed"] * bool(value.collapsed) + ["idle"] * bool(value.idle)
        shown = text(value, deviation=column == AVERAGE)
        cells.append({"marks": " ".join(filter(None, marks)), "text": shown})
    return {
        "spec": _spec(line),
        "method": line.method,
        "plus": "+" in line.method,
        "cells": cells,
        "gain": line.gain.texts if line.gain else {},
        "way": ("noise", "up", "down")[line.gain.sign if line.gain else 0],
    }


def _spec(line: Line) -> str:
    return line.method.partition(" ")[0]
