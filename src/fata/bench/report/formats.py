"""Comparisons as Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence

from fata._text import printable
from fata.bench.report.protocol import in_words
from fata.bench.report.remarks import cautions, remarks
from fata.bench.report.rows import COLUMNS, rows
from fata.bench.report.tables import AVERAGE, GROUPS, SHORT, Comparison, Line, Value


def markdown(comparison: Comparison) -> str:
    """A table with its protocol in words; the best is bold if it is so by more than noise."""
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
    below = [line for note in _below(comparison) for line in ("", in_markdown(note))]
    return "\n".join([*lines, *below]) + "\n"


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
            for sign, made in (("†", r"$^\dagger$"), ("°", r"$^\circ$"), ("±", r"$\pm$")):
                text = text.replace(sign, made)
            cells.append(f"{mark}{{{text}}}" if mark and text else text)
        rows.append(" & ".join([in_latex(line.method), *cells, _gain(line)]) + r" \\")
    return "\n".join(
        [
            *(f"% {printable(line)}" for line in (comparison.title, *_below(comparison))),
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


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """Every column of every cell and domain, for other programs."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(comparisons))
    return out.getvalue()


def as_json(comparisons: Sequence[Comparison]) -> str:
    """The same as a list of objects."""
    return json.dumps(rows(comparisons), indent=1) + "\n"


FORMATS: dict[str, Callable[[Sequence[Comparison]], str]] = {
    "md": lambda comparisons: "\n".join(map(markdown, comparisons)),
    "csv": as_csv,
    "json": as_json,
    "latex": lambda comparisons: "\n".join(map(latex, comparisons)),
}


def _below(comparison: Comparison) -> tuple[str, ...]:
    """What stands below a table."""
    within = ("Gains with their 95 % interval over images.",)
    gains = within if any(line.gain for line in comparison.lines) else ()
    said = (*in_words(comparison), *gains, *cautions(comparison.records), *remarks(comparison))
    return tuple(map(printable, said))


def _columns(comparison: Comparison) -> tuple[str, ...]:
    return (*comparison.columns, AVERAGE)


def _texts(line: Line, columns: tuple[str, ...]) -> Iterator[str]:
    for column in columns:
        yield text(line.at(column), deviation=column == AVERAGE)


def text(value: Value | None, *, deviation: bool = False) -> str:
    """A value for a table; † where a seed collapsed, ° where the method learned too little."""
    if value is None:
        return ""
    spread = f" ± {value.deviation:.2f}" if deviation and value.deviation is not None else ""
    signs = ("†" if value.collapsed else "") + ("°" if value.idle else "")
    return f"{value.mean:.2f}{spread}{signs}"


def _gain(line: Line) -> str:
    return "" if line.gain is None else str(line.gain)


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
