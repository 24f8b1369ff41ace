"""A store as flat rows for other programs: one for each cell and domain, with every column."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fata.bench.marks import marks
from fata.bench.report.names import labels, settings
from fata.bench.report.tables import Comparison, domain_name
from fata.bench.store import Record

COLUMNS = (
    *("model", "data", "scenario", "severity", "domain", "method", "seed", "accuracy", "mark"),
    *("lr", "lr_origin", "batch_size", "window", "reset_every", "guard", "speed", "fisher"),
    *("fata", "spec"),
    *("settings", "images", "calibration_error", "seconds", "images_per_second", "selected"),
    *("selected_fata", "stepped", "recovered", "collapsed_at", "estimated_accuracy"),
    *("estimated_source", "estimated_adapted", "peak_memory", "weights", "torch"),
    *("device", "finished", "key"),
)


def rows(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Every cell by domain, in the order of the tables.

    `accuracy` is of the domain, all else of the cell: a stream of several domains is one cell.
    The estimated accuracies are the guard's, without labels: of what was predicted, of the source
    model and of the adapted one. `mark` is `collapsed`, `few steps` or `unchanged` (see
    `fata.bench.marks`), or empty.
    """
    return [row for table in comparisons for row in _of_table(table)]


def _of_table(table: Comparison) -> list[dict[str, Any]]:
    idle, names = marks(table.records), labels(table.records)
    place = {line.method: number for number, line in enumerate(table.lines)}
    made = []
    for record, name in zip(table.records, names, strict=True):
        shared = _row(table, record, name, idle.get(record.key, ""))
        for domain, accuracy in record.result["domains"].items():
            made.append({**shared, "domain": domain_name(domain), "accuracy": accuracy})
    made.sort(key=lambda row: (place[row["method"]], row["domain"], row["seed"]))
    return [{column: row[column] for column in COLUMNS} for row in made]


def _row(table: Comparison, record: Record, name: str, mark: str) -> dict[str, Any]:
    protocol, result, here = record.protocol, record.result, record.circumstances
    counts = result.get("counts", {})
    selected, health = counts.get("selected", {}), result.get("health") or {}
    return {
        "model": table.model,
        "data": table.data,
        "scenario": table.scenario,
        "severity": table.severity,
        "method": name,
        "seed": protocol["seed"],
        "mark": "collapsed" if result["collapsed_at"] is not None else mark,
        "lr": result.get("lr", protocol["lr"]),
        "lr_origin": result.get("lr_origin"),
        "batch_size": protocol["batch_size"],
        "window": protocol.get("window"),
        "reset_every": protocol.get("reset_every"),
        "guard": bool(protocol.get("guard")),
        "speed": protocol.get("speed", "exact"),
        "fisher": protocol.get("fisher"),
        "fata": protocol.get("fata"),
        "spec": protocol["method"],
        "settings": json.dumps(_fields(protocol), sort_keys=True),
        "images": result["rows"],
        "calibration_error": result.get("calibration_error"),
        "seconds": result["seconds"],
        "images_per_second": result.get("images_per_second"),
        "selected": selected.get(protocol["host"]["name"]),
        "selected_fata": selected.get("fata"),
        "stepped": counts.get("stepped"),
        "recovered": counts.get("recovered"),
        "collapsed_at": result["collapsed_at"],
        "estimated_accuracy": health.get("predicted"),
        "estimated_source": health.get("source"),
        "estimated_adapted": health.get("adapted"),
        "peak_memory": result.get("peak_memory"),
        "weights": protocol["weights"]["sha256"],
        "torch": here.get("torch"),
        "device": here.get("device"),
        "finished": record.finished,
        "key": record.key,
    }


def _fields(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Of the method and of FATA; those of the run have columns of their own."""
    return {k: v for k, v in settings(protocol).items() if k not in (*COLUMNS, "name")}
