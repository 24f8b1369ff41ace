"""The top of a report: what came out in a sentence or two, one figure, and some of the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fata.bench.marks import stream_of
from fata.bench.paired import unpack
from fata.bench.report.figures import MEAN, Figure, accuracy_over_time, colours, domains, runs
from fata.bench.report.names import hosts_of, labels
from fata.bench.report.tables import Comparison, Line, domain_name

_STRIPS = 3  # domains of which images are shown
_SOURCE = "source"


def overview(comparison: Comparison) -> dict[str, Any] | None:
    """Source, the best host and the same with FATA; None if there is nothing to compare."""
    lines = _told(comparison)
    if len(lines) < 2:
        return None
    return {
        "sentences": _sentences(comparison, lines),
        "figure": _figure(comparison, lines),
        "caption": f"Accuracy of all images so far, {domains(comparison.records)[0]}, higher is "
        f"better. Bands: 95 % intervals over images of each line alone; the intervals above are "
        f"paired and narrower.",
        "strips": _strips(comparison, lines[-1]),
    }


def _told(comparison: Comparison) -> list[Line]:
    """The lines of the story: those that have an average, source first."""
    lines = {line.method: line for line in comparison.lines if line.average}
    hosts = hosts_of(comparison.records, labels(comparison.records))
    known = [line for line in lines.values() if line.average and not line.average.idle]
    pairs = [line for line in known if hosts.get(line.method) in lines]
    others = [line for line in known if line.method not in (_SOURCE, "norm")]
    best = max(pairs or others or known, key=_mean, default=None)
    if best is None:
        return []
    names = [_SOURCE, hosts.get(best.method, ""), best.method]
    return [lines[name] for name in dict.fromkeys(names) if name in lines]


def _mean(line: Line) -> float:
    return line.average.mean if line.average else 0.0


def _sentences(comparison: Comparison, lines: Sequence[Line]) -> list[str]:
    where = f"{len(comparison.columns)} domains" if len(comparison.columns) > 1 else "one domain"
    levels = ", ".join(f"{_named(line)} {_mean(line):.2f} %" for line in lines)
    said = [f"Accuracy on {where} of {comparison.data} with {comparison.model}: {levels}."]
    first, *_, last = lines
    for host in dict.fromkeys((first.method, lines[-2].method)):
        line = next(line for line in lines if line.method == host)
        if last.average is None or line.average is None:
            continue
        gain = last.average.gain(line.average)
        verdict = ("within noise", "better", "worse")[gain.sign]
        if not gain.images and not gain.seeds:
            verdict = "of unknown certainty: an older store"
        mean, *intervals = (f"{text} {head}" for head, text in gain.texts.items())
        sure = f" (95 % interval {', '.join(intervals)})" if intervals else ""
        points = f"{mean.removesuffix(' gain')} percentage points"
        said.append(f"{last.method} against {_named(line)}: {points}{sure}, {verdict}.")
    return said


def _named(line: Line) -> str:
    return "unadapted" if line.method == _SOURCE else line.method


def _figure(comparison: Comparison, lines: Sequence[Line]) -> Figure:
    """Accuracy over the stream, in the mean of all domains."""
    every, told = runs(comparison), [line.method for line in lines]
    figure = accuracy_over_time({name: every[name] for name in told}, colours(comparison))
    shown = domains(comparison.records)[0]
    figure.layout["showlegend"] = True
    return figure._replace(data=[line for line in figure.data if line["meta"] in (MEAN, shown)])


def _strips(comparison: Comparison, line: Line) -> list[dict[str, Any]]:
    """Images that the unadapted model kept, and whether the method predicts them."""
    adapted = {
        stream_of(record): record.result
        for record in runs(comparison)[line.method]
        if "right" in record.result
    }
    strips: dict[str, dict[str, Any]] = {}  # by domain, of its first seed
    for record in runs(comparison).get(_SOURCE, ()):
        result, after = record.result, adapted.get(stream_of(record))
        domain = domain_name(record.protocol["domains"][0])
        if "samples" in result and after:
            strips.setdefault(domain, _strip(domain, result, after))
    return list(strips.values())[:_STRIPS]


def _strip(domain: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    first, shown = before["samples"]["first"], []
    flags = [unpack(one["right"], one["rows"])[first:] for one in (before, after)]
    samples = before["samples"]
    for label, image, *right in zip(samples["labels"], samples["images"], *flags, strict=True):
        shown.append({"label": label, "source": image, "fate": fate(*map(bool, right))})
    return {"domain": domain, "shown": shown}


def fate(before: bool, after: bool) -> str:
    """What adaptation did to a prediction."""
    if after:
        return "stays right" if before else "became right"
    return "became wrong" if before else "stays wrong"
