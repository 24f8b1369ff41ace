"""Tables like the paper's, from the records of a store."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fata.bench.store import Record
from fata.corruptions import BY_NAME, NAMES
from fata.methods import SPECS

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
    collapsed: int = 0  # of them

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.seeds.values())

    @property
    def deviation(self) -> float | None:
        """Between seeds; None for a single one."""
        return statistics.stdev(self.seeds.values()) if len(self.seeds) > 1 else None


@dataclass(frozen=True)
class Line:
    """A method's row."""

    method: str
    values: Mapping[str, Value]
    average: Value | None  # where every column is there
    gain: float | None = None  # of the average over the host's

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

    def rank(self, column: str, line: Line) -> int:
        """1 for the best mean of a column, 2 for the second best, 0 for the others."""
        value = line.at(column)
        if value is None:
            return 0
        means = [round(v.mean, 2) for one in self.lines if (v := one.at(column))]
        better = sum(mean > round(value.mean, 2) for mean in means)
        return better + 1 if better < 2 and len(set(means)) > 1 else 0


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


def _lines(records: Sequence[Record]) -> tuple[tuple[str, ...], tuple[Line, ...]]:
    names = labels(records)
    found: dict[str, dict[str, dict[int, tuple[float, bool]]]] = {}
    for record, name in zip(records, names, strict=True):
        for domain, accuracy in record.result["domains"].items():
            column = domain_name(domain)
            cell = (accuracy, record.result["collapsed_at"] is not None)
            seeds = found.setdefault(name, {}).setdefault(column, {})
            seeds[record.protocol["seed"]] = cell
    met = {column for row in found.values() for column in row}
    columns = (*(n for n in NAMES if n in met), *sorted(met - set(NAMES)))
    lines = {name: _line(name, found[name], columns) for name in _ordered(found)}
    return columns, tuple(_with_gain(line, lines) for line in lines.values())


def _line(
    name: str, row: Mapping[str, Mapping[int, tuple[float, bool]]], columns: Sequence[str]
) -> Line:
    values = {
        column: Value(
            {seed: accuracy for seed, (accuracy, _) in sorted(cells.items())},
            sum(fallen for _, fallen in cells.values()),
        )
        for column, cells in row.items()
    }
    average = None
    if set(values) == set(columns) and len({tuple(v.seeds) for v in values.values()}) == 1:
        seeds = next(iter(values.values())).seeds
        means = {s: statistics.mean(v.seeds[s] for v in values.values()) for s in seeds}
        average = Value(means, sum(value.collapsed for value in values.values()))
    return Line(name, values, average)


def _with_gain(line: Line, lines: Mapping[str, Line]) -> Line:
    host = lines.get(line.method.replace("+fata", "", 1)) if "+fata" in line.method else None
    if host is None or host.average is None or line.average is None:
        return line
    gain = line.average.mean - host.average.mean
    return Line(line.method, line.values, line.average, gain)


def labels(records: Sequence[Record]) -> list[str]:
    """A method's name for each record, with the fields in which records of that name differ."""
    facts = [
        {
            **{f"host.{k}": v for k, v in record.protocol["host"].items()},
            **{f"fata.{k}": v for k, v in (record.protocol["plus"] or {}).items()},
            "lr": record.protocol["lr"],
            "batch_size": record.protocol["batch_size"],
            "speed": record.protocol.get("speed", "exact"),
        }
        for record in records
    ]
    names = []
    for record, fact in zip(records, facts, strict=True):
        method = record.protocol["method"]
        same = [f for r, f in zip(records, facts, strict=True) if r.protocol["method"] == method]
        differ = [name for name in fact if len({str(other.get(name)) for other in same}) > 1]
        more = "".join(f" {name.rpartition('.')[2]}={fact[name]}" for name in differ)
        names.append(method + more)
    return names


def _ordered(names: Iterable[str]) -> list[str]:
    """As the registry has them, a host before host+FATA."""
    hosts = list(dict.fromkeys(spec.partition("+")[0] for spec in SPECS))

    def place(name: str) -> tuple[int, bool, str]:
        spec = name.partition(" ")[0]
        return hosts.index(spec.partition("+")[0]), "+" in spec, name

    return sorted(names, key=place)
