"""The report: one HTML page that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from fata.bench.figures import ENTROPIES, colours, domains, figures
from fata.bench.formats import text
from fata.bench.tables import AVERAGE, GROUPS, SHORT, Comparison, Line

_STYLE, _SCRIPT = (Path(__file__).with_name(f"page.{kind}").read_text() for kind in ("css", "js"))
_MOST, _FEW = 12, 8  # lines in a figure at first: all of so many, or else so few


def page(comparisons: Sequence[Comparison], title: str = "Test-time adaptation") -> str:
    """Tables like the paper's, curves and histograms, with filters."""
    methods = dict.fromkeys(_spec(line) for c in comparisons for line in c.lines)
    filters = "".join(
        _filter(name, values)
        for name, values in (
            ("model", dict.fromkeys(c.model for c in comparisons)),
            ("scenario", dict.fromkeys(c.scenario for c in comparisons)),
            ("method", methods),
        )
    )
    sections = "".join(_section(number, c) for number, c in enumerate(comparisons))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        "<p>Accuracy in %, mean over seeds. <b>Bold</b> is best, <u>underlined</u> second best of "
        "a column; <span class='collapsed'>&dagger;</span> marks cells in which one class took "
        "over; the gain is that of FATA over its host.</p>"
        f"<div class='filters'>{filters}</div>{sections}"
        f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script></body></html>"
    )


def _filter(name: str, values: dict[str, None]) -> str:
    boxes = "".join(
        f"<label><input type='checkbox' name='{name}' value='{html.escape(value)}' checked> "
        f"{html.escape(value)}</label> "
        for value in values
    )
    return f"<div><b>{name}</b> {boxes}</div>"


def _section(number: int, comparison: Comparison) -> str:
    plots, scripts = [], []
    for place, (name, figure) in enumerate(figures(comparison).items()):
        at = f"figure-{number}-{place}"
        content = json.dumps(figure._asdict(), separators=(",", ":")).replace("</", "<\\/")
        scripts.append(f"<script type='application/json' id='{at}'>{content}</script>")
        one = _choice(line.method for line in comparison.lines) if name == ENTROPIES else ""
        plots.append(f"<div><h3>{name} {one}</h3><div class='plot' data-from='{at}'></div></div>")
    protocols = [
        {**{k: v for k, v in r.protocol.items() if k not in ("domains", "seed")}, **r.circumstances}
        for r in comparison.records
    ]
    distinct = list(dict.fromkeys(json.dumps(p, indent=1, sort_keys=True) for p in protocols))
    shown = html.escape("\n".join(distinct[:20]))
    seeds = len({record.protocol["seed"] for record in comparison.records})
    about = (f"{seeds} seed{'s' if seeds > 1 else ''}", *comparison.notes)
    return (
        f"<section data-model='{html.escape(comparison.model)}' "
        f"data-scenario='{html.escape(comparison.scenario)}'>"
        f"<h2>{html.escape(comparison.title)}</h2>"
        f"<div class='scroll'>{table(comparison)}</div>"
        f"<p class='notes'>{'<br>'.join(map(html.escape, about))}</p>"
        f"<details {'open' if number == 0 else ''}><summary>Figures</summary>"
        f"{_legend(comparison)}"
        f"<label>curves of {_choice(domains(comparison.records))}</label>"
        f"<div class='figures'>{''.join(plots)}</div></details>"
        f"<details><summary>Protocol</summary><pre>{shown}</pre></details>"
        f"{''.join(scripts)}</section>"
    )


def _choice(values: Iterable[str]) -> str:
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values)
    return f"<select>{options}</select>"


def _legend(comparison: Comparison) -> str:
    """A box a method, for all figures of a section; of many, the plain and the best are drawn."""

    def place(line: Line) -> tuple[bool, float]:
        return " " in line.method, -line.average.mean if line.average else 0.0

    lines = sorted(comparison.lines, key=place)
    drawn = {line.method for line in (lines if len(lines) <= _MOST else lines[:_FEW])}
    boxes = "".join(
        f"<label data-method='{html.escape(name.partition(' ')[0])}'><input type='checkbox' "
        f"value='{html.escape(name)}'{' checked' if name in drawn else ''}>"
        f"<i style='background:{colour}'></i>{html.escape(name)}</label> "
        for name, colour in colours(comparison).items()
    )
    return f"<div class='legend'>{boxes}</div>"


def table(comparison: Comparison) -> str:
    """The comparison as an HTML table."""
    columns = (*comparison.columns, AVERAGE)
    groups = {name: [c for c in members if c in columns] for name, members in GROUPS.items()}
    grouped = sum(map(len, groups.values()))
    over = "".join(f"<th colspan='{len(m)}'>{name}</th>" for name, m in groups.items() if m)
    rest = f"<th colspan='{len(columns) - grouped + 1}'></th>"
    heads = "".join(f"<th title='{c}'>{html.escape(SHORT.get(c, c))}</th>" for c in columns)
    body = "".join(_row(comparison, line, columns) for line in comparison.lines)
    return (
        f"<table><thead><tr class='groups'><th></th>{over}{rest}</tr>"
        f"<tr><th>method</th>{heads}<th>gain</th></tr></thead><tbody>{body}</tbody></table>"
    )


def _row(comparison: Comparison, line: Line, columns: Sequence[str]) -> str:
    cells = []
    for column in columns:
        value = line.at(column)
        marks = [("", "best", "second")[comparison.rank(column, line)]]
        if value is not None and value.collapsed:
            marks.append("collapsed")
        kind = " ".join(filter(None, marks))
        cells.append(f"<td class='{kind}'>{text(value, deviation=column == AVERAGE)}</td>")
    gain = "" if line.gain is None else f"{line.gain:+.2f}"
    way = {"+": "up", "-": "down"}.get(gain[:1], "") if gain not in ("+0.00", "-0.00") else ""
    plus = " class='plus'" if "+" in line.method else ""
    return (
        f"<tr data-method='{html.escape(_spec(line))}'{plus}><td>{html.escape(line.method)}</td>"
        f"{''.join(cells)}<td class='{way}'>{gain}</td></tr>"
    )


def _spec(line: Line) -> str:
    return line.method.partition(" ")[0]
