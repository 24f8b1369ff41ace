"""The report's figures: curves over the stream, and the paper's analyses."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fata.bench.paired import Z
from fata.bench.report.names import hosts_of, labels, settings
from fata.bench.report.tables import Comparison, domain_name
from fata.bench.store import Record
from fata.bench.summary import BINS

# By the method: a host is pale, and with FATA strong; further variants have hues of their own.
_PALE = {"tent": "#9ecae1", "eata": "#fdae6b", "sar": "#a1d99b", "deyo": "#fc9272"}
_STRONG = {"tent": "#1f77b4", "eata": "#e6550d", "sar": "#238b45", "deyo": "#cb181d"}
_OTHERS = ("#7f7f7f", "#111111", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
_RIGHT, _WRONG, _DASH = "#238b45", "#cb181d", {"dash": "dash", "width": 1}
DASHED = {"color": "#7f7f7f", "dash": "dash"}
MEAN = "mean of all"
LEAST = 10  # percentage points on an axis
ENTROPIES = "Entropy of right and wrong predictions"  # of one method at a time
Runs = dict[str, list[Record]]  # by the name of the method
Colours = dict[str, str]


class Figure(NamedTuple):
    """A figure for plotly.js as plain dicts: validating plotly's own objects takes seconds."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    x: Sequence[float] = ()  # of lines that have none of their own


def _axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """Axes with titles; one of percentages shows ten points at least, not noise in full height."""
    least = {"least": LEAST} if y.endswith("%") else {}
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **least}, **more}


def domains(records: Iterable[Record]) -> list[str]:
    """The choices for the curves: the mean of several domains, then each domain."""
    each = list(dict.fromkeys(map(_domain, records)))
    return each if len(each) == 1 else [MEAN, *each]


def colours(comparison: Comparison) -> Colours:
    """A colour for each method; of several with the same spec, the first has the spec's."""
    taken, found, others = set[str](), {}, 0
    for line in comparison.lines:
        spec = line.method.partition(" ")[0]
        known = _of_spec(spec)
        if not known or spec in taken:
            known = _other_colour(others)
            others += 1
        found[line.method] = known
        taken.add(spec)
    return found


def spec_colour(method: str, number: int) -> str:
    """The colour of a method with fields; of an unknown one by its number."""
    return _of_spec(method.partition(":")[0]) or _other_colour(number)


def _of_spec(spec: str) -> str | None:
    host, _, plus = spec.partition("+")
    return (_STRONG if plus else _PALE).get(host)


def _other_colour(number: int) -> str:
    hue = f"hsl({137 * number % 360}, 65%, 45%)"  # neighbours far apart
    return _OTHERS[number] if number < len(_OTHERS) else hue


def runs(comparison: Comparison) -> Runs:
    """The records of each row of a table."""
    by_name: Runs = {line.method: [] for line in comparison.lines}
    for record, name in zip(comparison.records, labels(comparison.records), strict=True):
        by_name[name].append(record)
    return by_name


def figures(comparison: Comparison) -> dict[str, Figure]:
    """Every figure that the records have data for, by title."""
    by_name, shades = runs(comparison), colours(comparison)
    selecting = {
        name: records
        for name, records in by_name.items()
        if any(sum(_selected(r)) for r in records)
    }
    made = {
        "Accuracy over the stream": accuracy_over_time(by_name, shades),
        "Entropy over the stream": _over_time(by_name, shades, "entropy", "mean entropy, nats"),
    }
    estimated = {
        name: some
        for name, records in by_name.items()
        if (some := [r for r in records if r.result.get("health")])
    }
    if estimated:
        made["Estimated accuracy over the stream"] = _estimates(estimated, shades)
    if len(by_name) > 1:
        made["Accuracy against speed"] = _speed(by_name, shades)
    if selecting:
        made |= {
            "Selected rows over the stream": _shares(selecting, shades, "selected", "selected, %"),
            "Right pseudo-labels over the stream": _shares(
                selecting, shades, "pseudo_labels", "right among the selected, %"
            ),
            "Classes by number of selected samples": _histogram(selecting, shades),
            "Accuracy of a class against its selected samples": _classes(selecting, shades),
        }
    made[ENTROPIES] = _entropies(by_name)
    for field, title, kind in (("sigma", "sigma_n", "log"), ("threshold", "E0 / ln C", "linear")):
        swept = _sensitivity(by_name, shades, field, title, kind)
        if swept.data:
            made[f"Sensitivity to {title.partition(' ')[0]}"] = swept
    return made


def accuracy_over_time(by_name: Runs, colours: Colours) -> Figure:
    """Accuracy so far, with a band of its 95 % interval over images."""
    figure = _over_time(by_name, colours, "online", "accuracy so far, %")
    for line in figure.data:
        if line["mode"] == "lines":
            some = [r for r in by_name[line["name"]] if line["meta"] in (MEAN, _domain(r))]
            line["band"] = _band(some, line["y"])
    return figure


def _band(records: Sequence[Record], points: Sequence[float | None]) -> list[float]:
    """Half the width of the interval at each point; seeds are the same images once more."""
    seeds = len({record.protocol["seed"] for record in records})
    halves = []
    for at, point in enumerate(points):
        variance = 0.0
        for record in records:
            curve, size = record.result["curve"], record.protocol["batch_size"]
            place = min(at, len(curve["batch"]) - 1)
            images = min(record.result["rows"], curve["batch"][place] * size)
            share = (point or 0) / 100
            variance += share * (1 - share) / images
        halves.append(_short(100 * Z * math.sqrt(variance * seeds) / len(records)))
    return halves


def _over_time(by_name: Runs, colours: Colours, what: str, unit: str) -> Figure:
    """One line a method, for each domain and their mean; crosses mark the guard's actions."""
    figure = _by_domain(by_name, colours, lambda result: result["curve"][what], unit)
    for name, records in by_name.items():
        for record in records:
            if record.result.get("guard"):
                figure.data.append(_crosses(record, what, name, colours[name]))
    return figure


def _crosses(record: Record, what: str, name: str, colour: str) -> dict[str, Any]:
    """The guard's actions in one run, on its curve."""
    curve, events = record.result["curve"], record.result["guard"]
    last = len(curve["batch"]) - 1
    places = [min(last, bisect_left(curve["batch"], event["batch"])) for event in events]
    texts = {
        "aside": "source predictions are returned",
        "trusted": "adapted predictions are returned again",
        "back": "restarts from the source weights, at {rate:.2g} of the learning rate",
        "rest": "adaptation ends at the source weights",
    }
    return {
        "x": [event["batch"] for event in events],
        "y": [curve[what][place] for place in places],
        "text": [texts.get(e["action"], e["action"]).format(**e) for e in events],
        "name": name,
        "meta": _domain(record),
        "mode": "markers",
        "marker": {"symbol": "x", "size": 9, "color": colour},
    }


def _estimates(by_name: Runs, colours: Colours) -> Figure:
    """The guard's estimates, made without labels; what was measured is dashed."""
    unit = "estimated (dashed: measured), %"
    curves = [
        _by_domain(by_name, colours, points, unit)
        for points in (
            lambda result: result["health"]["curve"]["predicted"],
            lambda result: result["curve"]["accuracy"],
        )
    ]
    for line in curves[1].data:
        line["line"] = {**line["line"], **_DASH}
    return curves[0]._replace(data=[line for curve in curves for line in curve.data])


def _shares(by_name: Runs, colours: Colours, what: str, unit: str) -> Figure:
    """As above, of the rows that FATA selects, or the host without FATA."""
    return _by_domain(by_name, colours, lambda result: _term(result["curve"][what]), unit)


def _by_domain(
    by_name: Runs,
    colours: Colours,
    points: Callable[[Mapping[str, Any]], Sequence[float | None]],
    unit: str,
) -> Figure:
    lengths = (record.result["curve"]["batch"] for some in by_name.values() for record in some)
    figure = Figure([], _axes("batch", unit), max(lengths, key=len))
    shown = domains(record for some in by_name.values() for record in some)
    for name, records in by_name.items():
        for domain in shown:
            some = [r for r in records if domain in (MEAN, _domain(r))]
            if not some:
                continue
            batches = max((r.result["curve"]["batch"] for r in some), key=len)
            line = {
                "y": _mean([points(r.result) for r in some]),
                "name": name,
                "meta": domain,  # the page shows one at a time
                "mode": "lines",
                "line": {"color": colours[name]},
            }
            figure.data.append(line if batches == figure.x else {**line, "x": batches})
    return figure


def _histogram(by_name: Runs, colours: Colours) -> Figure:
    """How many classes have how few selected samples (the paper's Fig. 1a, 5), summed up."""
    images = [n for some in by_name.values() for r in some for n in r.result["classes"]["images"]]
    most = 2 * int(statistics.median(n for n in images if n))  # classes beyond have taken over
    steps = range(0, most + 1, max(1, most // 100))
    axes = _axes("selected samples of a class", "classes with at most this number, %")
    figure = Figure([], axes, list(steps))
    for name, records in by_name.items():
        counts = sorted(count for record in records for count in _selected(record))
        shares = [_short(100 * bisect_right(counts, step) / len(counts)) for step in steps]
        line = {"color": colours[name], "shape": "hv"}
        figure.data.append({"y": shares, "name": name, "mode": "lines", "line": line})
    return figure


def _classes(by_name: Runs, colours: Colours) -> Figure:
    """The paper's Fig. 1b: a point a class, mean of all streams."""
    axes = _axes("selected samples of a class, a stream", "accuracy of the class, %")
    figure = Figure([], axes)
    for name, records in by_name.items():
        classes = [record.result["classes"] for record in records]
        selected = _summed(map(_selected, records))
        right, images = (_summed(one[what] for one in classes) for what in ("right", "images"))
        points = [
            (_short(number / len(records)), _short(100 * good / all_))
            for number, good, all_ in zip(selected, right, images, strict=True)
            if all_
        ]
        xs, ys = zip(*points, strict=True)
        dots = {"mode": "markers", "marker": {"color": colours[name], "size": 6}}
        figure.data.append({"x": xs, "y": ys, "name": name, **dots})
    return figure


def _entropies(by_name: Runs) -> Figure:
    """The paper's Fig. 1c: how far the thresholds let wrong predictions in."""
    lines = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": _DASH}
        for at in (0.4, 0.5)
    ]
    axes = _axes(
        "entropy / ln C; dashed: 0.4 and 0.5", "predictions", shapes=lines, showlegend=True
    )
    figure = Figure([], axes, [_short((bin_ + 0.5) / BINS) for bin_ in range(BINS)])
    for name, records in by_name.items():
        for kind, colour in (("right", _RIGHT), ("wrong", _WRONG)):
            total = _summed(record.result["entropies"][kind] for record in records)
            look = {"mode": "lines", "line": {"color": colour}, "fill": "tozeroy"}
            figure.data.append({"y": total, "name": kind, "meta": name, **look})
    return figure


def _speed(by_name: Runs, colours: Colours) -> Figure:
    """Accuracy against speed."""
    figure = Figure([], _axes("images a second, as it ran", "accuracy, %"))
    figure.layout["xaxis"]["type"] = "log"
    for name, records in by_name.items():
        seconds = sum(record.result["seconds"] for record in records)
        rows = sum(record.result["rows"] for record in records)
        point = {"x": [_short(rows / seconds)], "y": [_short(_accuracy(records))]}
        dot = {"mode": "markers", "marker": {"color": colours[name], "size": 11}}
        figure.data.append({**point, "name": name, **dot})
    return figure


def _sensitivity(by_name: Runs, colours: Colours, field: str, title: str, kind: str) -> Figure:
    """The paper's Fig. 4: accuracy against a field of FATA, all else equal; its host is dashed."""
    figure = Figure([], _axes(title, "accuracy, %", showlegend=True))
    names = [name for name, records in by_name.items() for _ in records]
    hosts = hosts_of([r for records in by_name.values() for r in records], names)
    values: set[float] = set()
    for sweep in _sweeps(by_name, field):
        shared = set.intersection(*({_stream(r) for r in by_name[n]} for n in sweep.values()))
        if not shared:
            continue
        values |= set(sweep)
        first = next(iter(sweep.values()))
        runs = [[r for r in by_name[name] if _stream(r) in shared] for name in sweep.values()]
        about = " ".join(part for part in first.split(" ") if f"{field}=" not in part)
        line = {"color": colours.get(about, colours[first])}
        ys = [_short(_accuracy(some)) for some in runs]
        look = {"mode": "lines+markers", "line": line}
        figure.data.append({"x": list(sweep), "y": ys, "name": about, **look})
        host = [r for r in by_name.get(hosts[first], ()) if _stream(r) in shared]
        if {_stream(r) for r in host} == shared:
            level = [_short(_accuracy(host))] * len(sweep)
            look = {"mode": "lines", "line": {**line, "dash": "dash"}}
            figure.data.append({"x": list(sweep), "y": level, "name": hosts[first], **look})
    figure.layout["xaxis"] |= {"type": kind, "tickvals": sorted(values)}
    return figure


def _sweeps(by_name: Runs, field: str) -> Iterator[dict[float, str]]:
    """Methods that differ in a field of FATA alone: names by its value, in order."""
    found: dict[str, dict[float, str]] = {}
    for name, records in by_name.items():
        protocol = records[0].protocol
        if protocol["plus"]:
            rest = {**protocol, "plus": {**protocol["plus"], field: None}}
            kept = json.dumps([protocol["method"], settings(rest)])
            found.setdefault(kept, {})[protocol["plus"][field]] = name
    return (dict(sorted(sweep.items())) for sweep in found.values() if len(sweep) > 1)


def _stream(record: Record) -> tuple[str, int]:
    return str(record.protocol["domains"]), record.protocol["seed"]


def _accuracy(records: Sequence[Record]) -> float:
    return statistics.fmean(record.result["accuracy"] for record in records)


def _summed(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(some) for some in zip(*counts, strict=True)]


def _short(value: float) -> float:
    """Four digits: a page may hold a million numbers."""
    return float(f"{value:.4g}")


def _selected(record: Record) -> Sequence[int]:
    """Selected samples by predicted class."""
    selected: Sequence[int] = _term(record.result["classes"]["selected"])
    return selected


def _term(by_term: Mapping[str, Any]) -> Any:
    """The entry of FATA if there is one, otherwise of the host."""
    return by_term["fata"] if "fata" in by_term else next(iter(by_term.values()))


def _domain(record: Record) -> str:
    domains = record.protocol["domains"]
    return domain_name(domains[0]) if len(domains) == 1 else "all domains"


def _mean(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean curve, as long as the longest."""
    means: list[float | None] = []
    for at in range(max(len(curve) for curve in curves)):
        here = [c[at] for c in curves if at < len(c)]
        known = [value for value in here if value is not None and math.isfinite(value)]
        means.append(_short(sum(known) / len(known)) if known else None)
    return means
