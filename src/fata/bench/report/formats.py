"""A comparison as Markdown, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator

from fata._text import printable
from fata.bench.report.tables import AVERAGE, GROUPS, SHORT, Comparison, Line, Value


def markdown(comparison: Comparison) -> str:
    """A table; the best is bold, a collapsed cell has a dagger."""
    columns = _columns(comparison)
    head = ["method", *(in_markdown(SHORT.get(c, c)) for c in columns), "gain"]
    lines = [
        f"### {in_markdown(comparison.title)}",
        "",
        f"| {' | '.join(head)} |",
        f"|---{'|---:' * (len(head) - 1)}|",
    ]
    for line in comparison.lines:
        cells = [
            f"**{text}**" if text and comparison.rank(column, line) == 1 else text
            for column, text in zip(columns, _texts(line, columns), strict=True)
        ]
        lines.append(f"| {' | '.join([in_markdown(line.method), *cells, _gain(line)])} |")
    notes = [line for note in comparison.notes for line in ("", in_markdown(note))]
    return "\n".join([*lines, *notes]) + "\n"


def latex(comparison: Comparison) -> str:
    """A `tabular` with the paper's groups of corruptions; needs booktabs."""
    columns = _columns(comparison)
    groups = [(name, [c for c in members if c in columns]) for name, members in GROUPS.items()]
    heads = " & ".join(
        rf"\multicolumn{{{len(members)}}}{{c}}{{{name}}}" for name, members in groups if members
    )
    names = " & ".join(["Method", *(in_latex(SHORT.get(c, c)) for c in columns), r"$\Delta$"])
    rows = []
    for line in comparison.lines:
        cells = []
        for column, text in zip(columns, _texts(line, columns), strict=True):
            mark = {1: r"\textbf", 2: r"\underline"}.get(comparison.rank(column, line))
            text = text.replace("†", r"$^\dagger$").replace("±", r"$\pm$")
            cells.append(f"{mark}{{{text}}}" if mark and text else text)
        rows.append(" & ".join([in_latex(line.method), *cells, _gain(line)]) + r" \\")
    return "\n".join(
        [
            *(f"% {printable(line)}" for line in (comparison.title, *comparison.notes)),
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


def as_csv(comparison: Comparison) -> str:
    """One row a method, column and seed, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    about = (comparison.model, comparison.data, comparison.scenario, comparison.severity)
    for line in comparison.lines:
        for column, value in line.values.items():
            for seed, accuracy in value.seeds.items():
                writer.writerow([*about, column, line.method, seed, repr(accuracy)])
    return out.getvalue()


CSV_HEADER = "model,data,scenario,severity,domain,method,seed,accuracy\n"
FORMATS: dict[str, Callable[[Comparison], str]] = {"md": markdown, "csv": as_csv, "latex": latex}


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


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def in_latex(name: str) -> str:
    """A name as LaTeX shows it."""
    return "".join(_LATEX.get(sign, sign) for sign in printable(name))


def in_markdown(name: str) -> str:
    """A name as Markdown shows it, also inside a table."""
    return re.sub(r"([\\`*\[\]<>|~])", r"\\\1", printable(name))
