"""A comparison as Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator

from fata.bench.tables import AVERAGE, GROUPS, SHORT, Comparison, Line, Value


def markdown(comparison: Comparison) -> str:
    """A table; the best is bold, a collapsed cell has a dagger."""
    columns = _columns(comparison)
    head = ["method", *(SHORT.get(c, c) for c in columns), "gain"]
    lines = [
        f"### {comparison.title}",
        "",
        f"| {' | '.join(head)} |",
        f"|---{'|---:' * (len(head) - 1)}|",
    ]
    for line in comparison.lines:
        cells = [
            f"**{text}**" if text and comparison.rank(column, line) == 1 else text
            for column, text in zip(columns, _texts(line, columns), strict=True)
        ]
        lines.append(f"| {' | '.join([line.method, *cells, _gain(line)])} |")
    notes = [line for note in comparison.notes for line in ("", note)]
    return "\n".join([*lines, *notes]) + "\n"


def latex(comparison: Comparison) -> str:
    """A `tabular` with the paper's groups of corruptions; needs booktabs."""
    columns = _columns(comparison)
    groups = [(name, [c for c in members if c in columns]) for name, members in GROUPS.items()]
    heads = " & ".join(
        rf"\multicolumn{{{len(members)}}}{{c}}{{{name}}}" for name, members in groups if members
    )
    names = " & ".join(["Method", *(_escaped(SHORT.get(c, c)) for c in columns), r"$\Delta$"])
    rows = []
    for line in comparison.lines:
        cells = []
        for column, text in zip(columns, _texts(line, columns), strict=True):
            mark = {1: r"\textbf", 2: r"\underline"}.get(comparison.rank(column, line))
            text = text.replace("†", r"$^\dagger$").replace("±", r"$\pm$")
            cells.append(f"{mark}{{{text}}}" if mark and text else text)
        rows.append(" & ".join([_escaped(line.method), *cells, _gain(line)]) + r" \\")
    return "\n".join(
        [
            *(f"% {line}" for line in (comparison.title, *comparison.notes)),
            rf"\begin{{tabular}}{{l{'r' * (len(columns) + 1)}}}",
            r"\toprule",
            *([rf" & {heads} \\"] if heads else []),
            rf"{names} \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def comma(comparison: Comparison) -> str:
    """One row a method, column and seed, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    about = (comparison.model, comparison.data, comparison.scenario, comparison.severity)
    for line in comparison.lines:
        for column, value in line.values.items():
            for seed, accuracy in value.seeds.items():
                writer.writerow([*about, column, line.method, seed, repr(accuracy)])
    return out.getvalue()


COMMA_HEAD = "model,data,scenario,severity,domain,method,seed,accuracy\n"
FORMATS: dict[str, Callable[[Comparison], str]] = {"md": markdown, "csv": comma, "latex": latex}


def _columns(comparison: Comparison) -> tuple[str, ...]:
    return (*comparison.columns, AVERAGE)


def _texts(line: Line, columns: tuple[str, ...]) -> Iterator[str]:
    for column in columns:
        yield text(line.at(column), deviation=column == AVERAGE)


def text(value: Value | None, *, deviation: bool = False) -> str:
    """A value for a table; a dagger where a seed collapsed."""
    if value is None:
        return ""
    spread = f" ± {value.deviation:.2f}" if deviation and value.deviation is not None else ""
    return f"{value.mean:.2f}{spread}{'†' if value.collapsed else ''}"


def _gain(line: Line) -> str:
    return "" if line.gain is None else f"{line.gain:+.2f}"


def _escaped(name: str) -> str:
    return name.replace("_", r"\_")
