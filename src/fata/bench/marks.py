"""Cells whose accuracy says nothing about their method: it has learned too little to tell."""

from __future__ import annotations

import json
from collections.abc import Iterable

from fata.bench.store import Record

FEW = 20  # steps
FEW_STEPS, UNCHANGED = "few steps", "unchanged"
UNADAPTED = ("source", "norm")  # these never learn
_STREAM = ("model", "weights", "data", "scenario", "domains", "severity", "images", "seed")


def stream_of(record: Record) -> str:
    """Equal for cells with the same model and the same images in the same order."""
    return json.dumps([record.protocol.get(name) for name in _STREAM], sort_keys=True)


def marks(records: Iterable[Record]) -> dict[str, str]:
    """By key: `few steps` were taken, or the predictions are `unchanged` by learning.

    Whether they are is known if `source` or `norm` ran on the same stream. Cells of older stores
    that did not count are not marked.
    """
    every = list(records)
    unadapted = {
        (stream_of(record), record.result["predictions"])
        for record in every
        if record.protocol["method"] in UNADAPTED and "predictions" in record.result
    }
    found = {}
    for record in every:
        taken = steps(record)
        if record.protocol["method"] in UNADAPTED:
            continue
        if (stream_of(record), record.result.get("predictions")) in unadapted:
            found[record.key] = UNCHANGED
        elif taken is not None and taken < FEW and _has_rate(record):
            found[record.key] = FEW_STEPS
    return found


def _has_rate(record: Record) -> bool:
    """Whether it steps at all; a method without a gradient, as NEO, has no learning rate."""
    return record.result.get("lr", 0) is not None


def steps(record: Record) -> int | None:
    """Updates of the weights; None: not counted, in an older store."""
    taken: int | None = record.result.get("counts", {}).get("stepped")
    return taken
