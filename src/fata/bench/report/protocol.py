"""The protocol of a table in words: what every number below it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fata.bench.report.names import labels
from fata.bench.report.tables import Comparison
from fata.bench.store import Record

_ORIGINS = {
    "given": "given",
    "tuned": "tuned for this model",
    "method": "the method's own",
    "paper": "the paper's",
    "release": "the released code's",
}
UNTUNED = ("paper", "release")


def in_words(comparison: Comparison) -> tuple[str, ...]:
    """Model and data, stream and settings, learning rates, penalty, versions: a sentence each."""
    records = comparison.records
    said = [_model_and_data(records), _stream(records), _rates(records), _fisher(records)]
    return tuple(filter(None, [*said, *comparison.notes, _versions(records)]))


def _model_and_data(records: Iterable[Record]) -> str:
    def weights(record: Record) -> str:
        about = record.protocol["weights"]
        return f"{about.get('tag', record.protocol['model'])} ({about['sha256'][:8]})"

    def data(record: Record) -> str:
        about = record.protocol["data"]
        made = f", corruptions {about['corruptions']}" if "corruptions" in about else ""
        return f"{about['data']}{made}"

    return f"Weights {_each(records, weights)}; data {_each(records, data)}."


def _stream(records: Iterable[Record]) -> str:
    def batch(record: Record) -> str:
        window = record.protocol.get("window")
        return f"{record.protocol['batch_size']}{f' (window of {window})' if window else ''}"

    seeds = _each(records, lambda r: r.protocol["seed"])
    guard = _each(records, lambda r: "on" if r.protocol.get("guard") else "off")
    resets = {r.protocol["reset_every"] for r in records if r.protocol.get("reset_every")}
    reset = f"; reset after every {', '.join(map(str, sorted(resets)))} batches" if resets else ""
    return (
        f"{_each(records, lambda r: format(r.result['rows'], ','))} images a stream, batches of "
        f"{_each(records, batch)}, seed {seeds}; guard {guard}{reset}; speed "
        f"{_each(records, lambda r: r.protocol.get('speed', 'exact'))}."
    )


def _rates(records: tuple[Record, ...]) -> str:
    """By the names of the rows; a method that does not learn has none."""
    found: dict[str, dict[str, None]] = {}
    for record, name in zip(records, labels(records), strict=True):
        found.setdefault(name, {})[rate(record)] = None
    by_rate: dict[str, list[str]] = {}
    for name, rates in found.items():
        if text := " or ".join(filter(None, rates)):
            by_rate.setdefault(text, []).append(name)
    parts = [f"{text} for {', '.join(names)}" for text, names in by_rate.items()]
    return f"Learning rate {'; '.join(parts)}." if parts else ""


def rate(record: Record) -> str:
    """The learning rate and where it comes from; of an older store as it was given."""
    if "lr" not in record.result:
        return str(record.protocol["lr"])
    if record.result["lr"] is None:
        return ""
    return f"{record.result['lr']:g} ({_ORIGINS[record.result['lr_origin']]})"


def _fisher(records: Iterable[Record]) -> str:
    wanting = [r for r in records if r.protocol["host"].get("fisher_alpha")]
    if not wanting:
        return ""

    def clean(record: Record) -> str:
        return f"Fisher information of {record.protocol.get('fisher') or 'no clean images: none'}"

    return f"EATA's penalty: {_each(wanting, clean)}."


def _versions(records: Iterable[Record]) -> str:
    def here(record: Record) -> str:
        about = record.circumstances
        libraries = ", ".join(f"{n} {about[n]}" for n in ("torch", "torchvision") if n in about)
        version = record.protocol.get("fata", "of unknown version")
        return ", ".join(filter(None, [f"fata {version}", libraries, about.get("device", "")]))

    return f"{_each(records, here)}."


def _each(records: Iterable[Record], what: Callable[[Record], Any]) -> str:
    """The distinct values, in the order of the records."""
    return " or ".join(dict.fromkeys(str(what(record)) for record in records))
