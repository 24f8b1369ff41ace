"""What a reader of a table must know before trusting it, and what to change: a line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean

from fata.bench.marks import FEW, UNADAPTED, marks, steps
from fata.bench.report.names import labels
from fata.bench.report.protocol import UNTUNED
from fata.bench.report.tables import Comparison
from fata.bench.store import Record
from fata.methods import METHODS

SMALL = 16  # images, of which BatchNorm's statistics are unreliable
_RARE = 0.02  # of the rows
_SELECT_NONE = {*UNADAPTED, *(name for name, method in METHODS.items() if method.gradient_free)}
Named = list[tuple[str, Record]]  # by the name of the row


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """From the results: methods that learned too little, from few rows, or at an untuned rate."""
    named = list(zip(labels(comparison.records), comparison.records, strict=True))
    idle = marks(comparison.records)
    marked = [(name, record) for name, record in named if record.key in idle]
    same = [(name, record) for name, record in marked if (steps(record) or 0) >= FEW]
    few = [one for one in marked if one not in same]
    short = [(n, r) for n, r in few if r.result["rows"] <= FEW * r.protocol["batch_size"]]
    picky = [one for one in few if one not in short]
    made = (
        _short(short),
        _picky(picky),
        _unchanged(same),
        *_rare(named),
        _untuned(named),
        _estimates(comparison.records),
        _without_source(comparison.records),
    )
    return tuple(filter(None, made))


def cautions(records: Iterable[Record]) -> tuple[str, ...]:
    """From the settings: known before the first batch."""
    small = {
        (r.protocol["model"], max(r.protocol["batch_size"], r.protocol.get("window") or 1))
        for r in records
        if r.result.get("batch_norm") and r.protocol["host"]["name"] != "source"
    }
    return tuple(small_batches(model, size) for model, size in sorted(small) if size < SMALL)


def small_batches(model: str, size: int) -> str:
    """The caution for a BatchNorm network."""
    return (
        f"{model} has BatchNorm, whose statistics of {size} image{'s' if size > 1 else ''} are "
        f"unreliable: use --batch-size {SMALL} or more, --window 64, or a network with GroupNorm "
        f"or LayerNorm"
    )


def _short(cells: Named) -> str:
    if not cells:
        return ""
    wanted = max((FEW + 1) * record.protocol["batch_size"] for _, record in cells)
    has = max(record.result["rows"] for _, record in cells)
    return (
        f"° {_names(cells)}: fewer than {FEW} steps before the last batch, so the numbers say "
        f"nothing about these methods: give {wanted:,} images a stream or more (now {has:,}), or "
        f"smaller batches"
    )


def _picky(cells: Named) -> str:
    if not cells:
        return ""
    return (
        f"° {_names(cells)}: fewer than {FEW} steps, as most batches had no row to learn from: "
        f"raise the method's threshold, or give more images"
    )


def _unchanged(cells: Named) -> str:
    if not cells:
        return ""
    return (
        f"° {_names(cells)}: every prediction is the unadapted model's: raise the learning rate "
        f"(fata tune finds one), or give more images"
    )


def _without_source(records: Iterable[Record]) -> str:
    if any(record.protocol["method"] in UNADAPTED for record in records):
        return ""
    return (
        "add source to --methods: without it, predictions that learning left as they were go unseen"
    )


def _rare(named: Named) -> Iterator[str]:
    """Methods that select hardly any row, of those that step."""
    counts: dict[str, tuple[int, int, Record]] = {}
    for name, record in named:
        selected = record.result.get("counts", {}).get("selected", {})
        host = record.protocol["host"]["name"]
        if host in selected and host not in _SELECT_NONE and steps(record):
            before = counts.get(name, (0, 0, record))
            total = before[1] + record.result["rows"]
            counts[name] = (before[0] + selected[host], total, record)
    for name, (selected, rows, record) in counts.items():
        if selected < _RARE * rows:
            fields = record.protocol["host"]
            knobs = [f"{k} (now {fields[k]:g})" for k in ("redundancy", "threshold") if k in fields]
            raised = f": raise {' or '.join(knobs)}" if knobs else ""
            yield f"{name} learned from {selected:,} of {rows:,} rows{raised}"


def _untuned(named: Named) -> str:
    """Rates of the paper's table beside rates that were tuned for the model."""
    tuned = any(record.result.get("lr_origin") == "tuned" for _, record in named)
    cells = [(n, r) for n, r in named if r.result.get("lr_origin") in UNTUNED]
    if not tuned or not cells:
        return ""
    rates = " or ".join(dict.fromkeys(f"{record.result['lr']:g}" for _, record in cells))
    model = cells[0][1].protocol["model"]
    return (
        f"{_names(cells)}: the learning rate {rates} is not tuned for {model}, those of the others "
        f"are: fata tune finds one"
    )


def _estimates(records: Iterable[Record]) -> str:
    """How far the guard's estimates are from what was measured."""
    known = [r.result for r in records if r.result.get("health")]
    if not known:
        return ""
    errors = [abs(one["health"]["predicted"] - one["accuracy"]) for one in known]
    streams = "1 stream" if len(known) == 1 else f"{len(known):,} streams"
    return (
        f"the guard's estimates of accuracy, made without labels, are off by {fmean(errors):.1f} "
        f"pp on average ({streams} with a guard, at most {max(errors):.1f} pp)"
    )


def _names(cells: Named) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in cells))
