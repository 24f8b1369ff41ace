"""The report's figures: curves over the stream, and the paper's analyses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import plotly.graph_objects as go

from fata.bench.store import Record
from fata.bench.summary import BINS
from fata.bench.tables import Comparison, domain_name, labels

# By the method: a host is pale, and with FATA strong.
_PALE = {"tent": "#9ecae1", "eata": "#fdae6b", "sar": "#a1d99b", "deyo": "#fc9272"}
_STRONG = {"tent": "#1f77b4", "eata": "#e6550d", "sar": "#238b45", "deyo": "#cb181d"}
_OTHERS = ("#7f7f7f", "#111111", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
MEAN = "mean of all"
Runs = dict[str, list[Record]]  # by the name of the method
Colours = dict[str, str]


def domains(comparison: Comparison) -> list[str]:
    """What the curves can be shown for."""
    return list(dict.fromkeys(map(_domain, comparison.records)))


def figures(comparison: Comparison) -> dict[str, go.Figure]:
    """Every figure that the records have something for, by its title."""
    by_name: Runs = {line.method: [] for line in comparison.lines}
    for record, name in zip(comparison.records, labels(comparison.records), strict=True):
        by_name[name].append(record)
    colours = _colours(by_name)
    selecting = {
        name: records
        for name, records in by_name.items()
        if any(sum(_selected(r)) for r in records)
    }
    made = {
        "Accuracy over the stream": _over_time(by_name, colours, "online", "accuracy so far, %"),
        "Entropy over the stream": _over_time(by_name, colours, "entropy", "mean entropy, nats"),
        "Accuracy against speed": _speed(by_name, colours),
    }
    if selecting:
        made |= {
            "Selected rows over the stream": _shares(selecting, colours, "selected", "selected, %"),
            "Right pseudo-labels over the stream": _shares(
                selecting, colours, "pseudo_labels", "right among the selected, %"
            ),
            "Classes by number of selected samples": _histogram(selecting, colours),
            "Accuracy of a class against its selected samples": _classes(selecting, colours),
        }
    made["Entropy of right and wrong predictions"] = _entropies(by_name, colours)
    if swept := _sensitivity(comparison):
        made["Sensitivity"] = swept
    return made


def _over_time(by_name: Runs, colours: Colours, what: str, unit: str) -> go.Figure:
    """One line a method, for each domain and for their mean."""
    return _by_domain(by_name, colours, lambda result: result["curve"][what], unit)


def _shares(by_name: Runs, colours: Colours, what: str, unit: str) -> go.Figure:
    """As above, of FATA's selection where it is there, else the host's."""
    return _by_domain(by_name, colours, lambda result: _term(result["curve"][what]), unit)


def _by_domain(
    by_name: Runs,
    colours: Colours,
    points: Callable[[Mapping[str, Any]], Sequence[float | None]],
    unit: str,
) -> go.Figure:
    figure = go.Figure()
    for name, records in by_name.items():
        for domain in dict.fromkeys((MEAN, *map(_domain, records))):
            some = [r for r in records if domain in (MEAN, _domain(r))]
            figure.add_scatter(
                x=max((r.result["curve"]["batch"] for r in some), key=len),
                y=_mean([points(r.result) for r in some]),
                name=name,
                meta=domain,  # the page shows one at a time
                line_color=colours[name],
            )
    figure.update_layout(xaxis_title="batch", yaxis_title=unit, xaxis_tickformat="d")
    return figure


def _histogram(by_name: Runs, colours: Colours) -> go.Figure:
    """How many classes have how many selected samples: few have many (the paper's Fig. 1a, 5)."""
    figure = go.Figure()
    for name, records in by_name.items():
        counts = [count for r in records for count in _selected(r)]
        figure.add_histogram(
            x=counts, name=name, opacity=0.6, nbinsx=40, marker_color=colours[name]
        )
    figure.update_layout(
        barmode="overlay", xaxis_title="selected samples of a class", yaxis_title="classes"
    )
    return figure


def _classes(by_name: Runs, colours: Colours) -> go.Figure:
    """The paper's Fig. 1b: a point a class."""
    figure = go.Figure()
    for name, records in by_name.items():
        xs: list[float] = []
        ys: list[float] = []
        for record in records:
            classes = record.result["classes"]
            selected = _selected(record)
            for number, right, all_ in zip(
                selected, classes["right"], classes["images"], strict=True
            ):
                if all_:
                    xs.append(number)
                    ys.append(100 * right / all_)
        figure.add_scatter(
            x=xs, y=ys, name=name, mode="markers", marker={"color": colours[name], "size": 5}
        )
    figure.update_layout(
        xaxis_title="selected samples of a class", yaxis_title="accuracy of the class, %"
    )
    return figure


def _entropies(by_name: Runs, colours: Colours) -> go.Figure:
    """The paper's Fig. 1c: how far the thresholds let wrong predictions in."""
    figure = go.Figure()
    centres = [(bin_ + 0.5) / BINS for bin_ in range(BINS)]
    for name, records in by_name.items():
        for kind, dash in (("right", "solid"), ("wrong", "dot")):
            total: Counter[int] = Counter()
            for record in records:
                total.update(dict(enumerate(record.result["entropies"][kind])))
            figure.add_scatter(
                x=centres,
                y=[total[bin_] for bin_ in range(BINS)],
                name=f"{name}, {kind}",
                line={"color": colours[name], "dash": dash},
                visible=True if name == next(iter(by_name)) else "legendonly",
            )
    for threshold, side in ((0.4, "top left"), (0.5, "top right")):
        figure.add_vline(
            threshold, line_dash="dash", annotation={"text": threshold}, annotation_position=side
        )
    figure.update_layout(xaxis_title="entropy / ln C", yaxis_title="predictions")
    return figure


def _speed(by_name: Runs, colours: Colours) -> go.Figure:
    """Where a method stands between accuracy and cost."""
    figure = go.Figure()
    for name, records in by_name.items():
        rows = sum(r.result["rows"] for r in records)
        figure.add_scatter(
            x=[rows / sum(r.result["seconds"] for r in records)],
            y=[sum(r.result["accuracy"] for r in records) / len(records)],
            name=name,
            mode="markers+text",
            text=[name],
            textposition="top center",
            marker={"color": colours[name], "size": 10},
        )
    figure.update_layout(xaxis_title="images a second", yaxis_title="accuracy, %", showlegend=False)
    return figure


def _sensitivity(comparison: Comparison) -> go.Figure | None:
    """The paper's Fig. 4: accuracy against the plug-in's deviation or threshold."""
    figure = go.Figure()
    for field, title in (("sigma", "sigma_n"), ("threshold", "E0 / ln C")):
        found: dict[str, dict[float, list[float]]] = {}
        for record in comparison.records:
            if record.protocol["plus"]:
                rows = found.setdefault(record.protocol["method"], {})
                at = record.protocol["plus"][field]
                rows.setdefault(at, []).append(record.result["accuracy"])
        for method, rows in found.items():
            if len(rows) > 1:
                xs = sorted(rows)
                ys = [sum(rows[x]) / len(rows[x]) for x in xs]
                figure.add_scatter(x=xs, y=ys, name=f"{method}, {title}", mode="lines+markers")
    if not figure.data:
        return None
    figure.update_layout(xaxis_title="value", yaxis_title="accuracy, %")
    return figure


def _selected(record: Record) -> Sequence[int]:
    """Selected samples by predicted class."""
    selected: Sequence[int] = _term(record.result["classes"]["selected"])
    return selected


def _term(by_term: Mapping[str, Any]) -> Any:
    """What belongs to FATA where it is there, else to the host."""
    return by_term["fata"] if "fata" in by_term else next(iter(by_term.values()))


def _domain(record: Record) -> str:
    domains = record.protocol["domains"]
    return domain_name(domains[0]) if len(domains) == 1 else "all domains"


def _mean(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Point by point over curves, as far as any of them goes."""
    means: list[float | None] = []
    for at in range(max(len(curve) for curve in curves)):
        here = [c[at] for c in curves if at < len(c)]
        known = [value for value in here if value is not None and math.isfinite(value)]
        means.append(sum(known) / len(known) if known else None)
    return means


def _colours(names: Iterable[str]) -> Colours:
    """A colour for each method; of several with the same spec, the first has the spec's."""
    others, taken, found = cycle(_OTHERS), set[str](), {}
    for name in names:
        spec = name.partition(" ")[0]
        host, _, plus = spec.partition("+")
        colour = (_STRONG if plus else _PALE).get(host)
        found[name] = colour if colour and spec not in taken else next(others)
        taken.add(spec)
    return found
