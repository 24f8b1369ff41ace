"""A method's name in a table, and the settings that tell it from others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fata.bench.store import Record
from fata.methods import SPECS


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
        "reset_every": protocol.get("reset_every"),
        "speed": protocol.get("speed", "exact"),
        "guard": bool(protocol.get("guard")),
        "fisher": protocol.get("fisher"),
    }


def labels(records: Sequence[Record]) -> list[str]:
    """A method's name for each record, with the fields that tell it from the others.

    These are the ones that were given by hand, such as a rate, and those in which it differs from
    most records of its method.
    """
    most, given = usual(records), _given(records)
    names = []
    for record in records:
        method, here = record.protocol["method"], settings(record.protocol)
        by_hand = {
            name if name in here else name.removeprefix("fata_") for name in given[_variant(record)]
        }
        odd = [
            name
            for name in dict.fromkeys([*most[method], *sorted(by_hand)])
            if name in by_hand or str(here.get(name)) != most[method][name]
        ]
        if record.result.get("lr") is not None:
            here["lr"] = f"{record.result['lr']:g}"
        names.append(" ".join([method, *(f"{name}={here.get(name)}" for name in odd)]))
    return names


def _given(records: Iterable[Record]) -> dict[str, set[str]]:
    """By method and settings: the fields that were given in some of their cells."""
    found: dict[str, set[str]] = {}
    for record in records:
        found.setdefault(_variant(record), set()).update(record.result.get("given", ()))
    return found


def _variant(record: Record) -> str:
    return json.dumps([record.protocol["method"], settings(record.protocol)])


def usual(records: Iterable[Record]) -> dict[str, dict[str, str | None]]:
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


def ordered(names: Iterable[str]) -> list[str]:
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
