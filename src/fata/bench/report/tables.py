"""Tables like the paper's, from the records of a store."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from fata.bench import paired
from fata.bench.marks import marks
from fata.bench.paired import Flags, Gain
from fata.bench.report.names import hosts_of, labels, ordered, usual
from fata.bench.store import Record
from fata.corruptions import BY_NAME, NAMES

GROUPS = {
    "Noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "Blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "Weather": ("snow", "frost", "fog", "brightness"),
    "Digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
_SHORT = """Gauss. Shot Impul. Defoc. Glass Motion Zoom Snow Frost Fog Brit. Contr. Elast. Pixel
JPEG"""
SHORT = dict(zip(NAMES, _SHORT.split(), strict=True))


@dataclass(frozen=True)
class Value:
    """Accuracies of one domain by one method, over seeds."""

    seeds: Mapping[int, float]
    collapsed: int = 0  # number of seeds
    idle: int = 0  # number of seeds in which the method has learned too little to tell
    right: Mapping[int, tuple[Flags, ...]] = field(default_factory=dict, repr=False)  # by stream

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.seeds.values())

    @property
    def deviation(self) -> float | None:
        """Between seeds; None for a single one."""
        return statistics.stdev(self.seeds.values()) if len(self.seeds) > 1 else None

    def gain(self, host: Value) -> Gain:
        """The gain over another method on the same streams."""
        seeds = [seed for seed in self.seeds if seed in host.seeds]
        if seeds and all(seed in one.right for seed in seeds for one in (self, host)):
            each = [paired.gain(host.right[seed], self.right[seed]) for seed in seeds]
            return paired.over_seeds(each)
        means = [self.seeds[seed] - host.seeds[seed] for seed in seeds]
        mean = self.mean - host.mean
        known = paired.interval(means) if len(means) > 1 else None
        return Gain(mean, mean, mean, 0, known)


@dataclass(frozen=True)
class Line:
    """A method's row."""

    method: str
    values: Mapping[str, Value]
    average: Value | None  # None if a column is missing
    gain: Gain | None = None  # of the average over the host's

    def at(self, column: str) -> Value | None:
        """The value of a column, the average included."""
        return self.average if column == AVERAGE else self.values.get(column)


AVERAGE = "average"


@dataclass(frozen=True)
class Comparison:
    """Methods on the same model, data and scenario."""

    model: str
    data: str
    scenario: str
    severity: int | None  # None: of folders, which have none
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    records: tuple[Record, ...] = field(repr=False)

    @property
    def title(self) -> str:
        """What is compared."""
        severity = "" if self.severity is None else f", severity {self.severity}"
        return f"{self.model}, {self.data}, {self.scenario}{severity}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The settings that most rows of a method share, which the rows' names leave out."""
        kept = {
            method: ", ".join(f"{name}={value}" for name, value in fields.items() if value)
            for method, fields in usual(self.records).items()
        }
        return tuple(
            f"{m}, unless its row says otherwise: {fields}" for m, fields in kept.items() if fields
        )

    def rank(self, column: str, line: Line) -> int:
        """1 for the best of a column alone, 2 for those within noise of the best, 0 for others.

        Without the images that were right, as in older stores, equal means are within noise.
        """
        return self._ranks[column].get(line.method, 0)

    @cached_property
    def _ranks(self) -> dict[str, dict[str, int]]:
        """By column and method."""
        return {
            column: _ranks({line.method: line.at(column) for line in self.lines})
            for column in (*self.columns, AVERAGE)
        }


def _ranks(values: Mapping[str, Value | None]) -> dict[str, int]:
    """Methods that have learned too little to tell have no rank."""
    known = {name: value for name, value in values.items() if value and not value.idle}
    if len({round(value.mean, 2) for value in known.values()}) < 2:
        return {}
    best = max(known, key=lambda name: known[name].mean)
    level = [name for name in known if name != best and not _beyond(known[best], known[name])]
    return {best: 2 if level else 1, **dict.fromkeys(level, 2)}


def _beyond(best: Value, other: Value) -> bool:
    """Whether the best is better by more than noise."""
    gain = best.gain(other)
    return gain.sign > 0 if gain.images else round(gain.mean, 2) > 0


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """One table for each model, data, scenario and severity."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        about = record.protocol
        severity = about["severity"] if _has_severity(about) else None
        exact = (about["weights"]["sha256"], about["data"].get("corruptions"))  # never mixed up
        at = (about["model"], about["data"]["data"], _scenario(about), severity, exact)
        groups.setdefault(at, []).append(record)
    tables = []
    for (model, data, scenario, severity, _), group in groups.items():
        columns, lines = _lines(group)
        tables.append(Comparison(model, data, scenario, severity, columns, lines, tuple(group)))
    return tables


def domain_name(domain: str) -> str:
    """A domain without its severity; folders may have names that end in a number."""
    name, _, severity = domain.rpartition("-")
    return name if name in BY_NAME and severity.isdecimal() else domain


def _has_severity(protocol: Mapping[str, Any]) -> bool:
    return any(domain_name(domain) != domain for domain in protocol["domains"])


def _scenario(protocol: Mapping[str, Any]) -> str:
    options = {k: v for k, v in protocol["scenario"].items() if k != "name"}
    more = "".join(f" {name}={value}" for name, value in options.items())
    images = f", {protocol['images']} images" if protocol["images"] else ""
    return f"{protocol['scenario']['name']}{more}{images}"


class _Outcome(NamedTuple):
    """A domain in one run."""

    accuracy: float
    collapsed: bool
    idle: bool
    right: Flags | None  # of the whole stream


def _lines(records: Sequence[Record]) -> tuple[tuple[str, ...], tuple[Line, ...]]:
    names, idle = labels(records), marks(records)
    found: dict[str, dict[str, dict[int, _Outcome]]] = {}
    for record, name in zip(records, names, strict=True):
        result = record.result
        flags = paired.unpack(result["right"], result["rows"]) if "right" in result else None
        for domain, accuracy in result["domains"].items():
            collapsed = result["collapsed_at"] is not None
            outcome = _Outcome(accuracy, collapsed, record.key in idle, flags)
            seeds = found.setdefault(name, {}).setdefault(domain_name(domain), {})
            seeds[record.protocol["seed"]] = outcome
    met = {column for row in found.values() for column in row}
    columns = (*(n for n in NAMES if n in met), *sorted(met - set(NAMES)))
    lines = {name: _line(name, found[name], columns) for name in ordered(found)}
    hosts = hosts_of(records, names)
    return columns, tuple(_with_gain(line, lines.get(hosts[n])) for n, line in lines.items())


def _line(name: str, row: Mapping[str, Mapping[int, _Outcome]], columns: Sequence[str]) -> Line:
    values = {column: _value(dict(sorted(seeds.items()))) for column, seeds in row.items()}
    average = None
    if set(values) == set(columns) and len({tuple(v.seeds) for v in values.values()}) == 1:
        seeds = next(iter(values.values())).seeds
        means = {s: statistics.mean(v.seeds[s] for v in values.values()) for s in seeds}
        average = Value(
            means,
            sum(value.collapsed for value in values.values()),
            sum(value.idle for value in values.values()),
            _streams([row[column] for column in columns]),
        )
    flags = [id(one.right) for seeds in row.values() for one in seeds.values()]
    if len(set(flags)) < len(flags):  # domains share a stream: whose images are whose is unknown
        values = {column: replace(value, right={}) for column, value in values.items()}
    return Line(name, values, average)


def _value(seeds: Mapping[int, _Outcome]) -> Value:
    return Value(
        {seed: one.accuracy for seed, one in seeds.items()},
        sum(one.collapsed for one in seeds.values()),
        sum(one.idle for one in seeds.values()),
        _streams([seeds]),
    )


def _streams(columns: Sequence[Mapping[int, _Outcome]]) -> dict[int, tuple[Flags, ...]]:
    """By seed: the flags of every stream once, also of one that several columns share."""
    found: dict[int, dict[int, Flags]] = {}
    for column in columns:
        for seed, one in column.items():
            if one.right is not None:
                found.setdefault(seed, {})[id(one.right)] = one.right
    return {seed: tuple(streams.values()) for seed, streams in found.items()}


def _with_gain(line: Line, host: Line | None) -> Line:
    if host is None or host.average is None or line.average is None:
        return line
    return replace(line, gain=line.average.gain(host.average))
