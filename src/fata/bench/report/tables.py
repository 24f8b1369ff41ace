"""Tables like the paper's, from the records of a store."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
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
    collapsed: int = 0  # number of seeds

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
    average: Value | None  # None if a column is missing
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

    @property
    def notes(self) -> tuple[str, ...]:
        """The settings that most rows of a method share, which the rows' names leave out."""
        kept = {
            method: ", ".join(f"{name}={value}" for name, value in fields.items() if value)
            for method, fields in _usual(self.records).items()
        }
        return tuple(
            f"{m}, unless its row says otherwise: {fields}" for m, fields in kept.items() if fields
        )

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
    hosts = hosts_of(records, names)
    return columns, tuple(_with_gain(line, lines.get(hosts[n])) for n, line in lines.items())


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


def _with_gain(line: Line, host: Line | None) -> Line:
    if host is None or host.average is None or line.average is None:
        return line
    gain = line.average.mean - host.average.mean
    return Line(line.method, line.values, line.average, gain)


def hosts_of(records: Sequence[Record], names: Sequence[str]) -> dict[str, str]:
    """The host with the same settings, by the name with FATA; "" if there is none."""
    own: dict[str, dict[str, str]] = {}  # of hosts: method, settings, name
    for record, name in zip(records, names, strict=True):
        if not record.protocol["plus"]:
            settings = json.dumps(_host_settings(record.protocol))
            own.setdefault(record.protocol["method"], {})[settings] = name
    hosts = dict.fromkeys(names, "")
    for record, name in zip(records, names, strict=True):
        host, plus, _ = record.protocol["method"].partition("+fata")
        if plus and host in own:
            alone = list(dict.fromkeys(own[host].values()))
            only = alone[0] if len(alone) == 1 else ""
            hosts[name] = own[host].get(json.dumps(_host_settings(record.protocol)), only)
    return hosts


def settings(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a method, of FATA and of the run, by the names that `fata bench` has for them."""
    host, plus = protocol["host"], protocol["plus"] or {}
    own = {f"fata_{name}" if name in host else name: value for name, value in plus.items()}
    return {**_host_settings(protocol), **own}


def _host_settings(protocol: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **protocol["host"],
        "lr": protocol["lr"],
        "params": protocol.get("params"),
        "batch_size": protocol["batch_size"],
        "window": protocol.get("window"),
        "speed": protocol.get("speed", "exact"),
        "guard": bool(protocol.get("guard")),
        "fisher": protocol.get("fisher"),
    }


def labels(records: Sequence[Record]) -> list[str]:
    """A method's name for each record, with the fields that differ from the most common ones."""
    usual = _usual(records)
    names = []
    for record in records:
        method, here = record.protocol["method"], settings(record.protocol)
        odd = [name for name, most in usual[method].items() if str(here.get(name)) != most]
        names.append(" ".join([method, *(f"{name}={here.get(name)}" for name in odd)]))
    return names


def _usual(records: Iterable[Record]) -> dict[str, dict[str, str | None]]:
    """By method: the fields that differ, with their most common value, or None for a tie."""
    every: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        one = settings(record.protocol)
        every.setdefault(record.protocol["method"], {})[json.dumps(one)] = one
    found: dict[str, dict[str, str | None]] = {}
    for method, variants in every.items():
        found[method] = {}
        for name in dict.fromkeys(name for one in variants.values() for name in one):
            values = Counter(str(one.get(name)) for one in variants.values())
            if len(values) > 1:
                (most, times), (_, next_times) = values.most_common(2)
                found[method][name] = most if times > next_times else None
    return found


def _ordered(names: Iterable[str]) -> list[str]:
    """In the registry's order, then others; a host before host+FATA; fields by number."""
    hosts = list(dict.fromkeys(spec.partition("+")[0] for spec in SPECS))

    def place(name: str) -> tuple[int, str, bool, list[tuple[str, float, str]]]:
        spec, *fields = name.split(" ")
        host, plus, _ = spec.partition("+")
        at = hosts.index(host) if host in hosts else len(hosts)
        return at, host, bool(plus), list(map(_by_number, fields))

    return sorted(names, key=place)


def _by_number(field: str) -> tuple[str, float, str]:
    name, _, value = field.partition("=")
    try:
        return name, float(value), ""
    except ValueError:
        return name, math.inf, value
