"""The results of an experiment, and the paper's numbers for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, mean

from fata.adapter import adapt
from fata.bench.cell import key
from fata.bench.cost import PAPER, paper
from fata.bench.marks import marks
from fata.bench.paper.experiments import Experiment
from fata.bench.paper.numbers import table
from fata.bench.paper.plan import Plan
from fata.bench.paper.side_by_side import GAIN, PLAIN, Pair, SideBySide
from fata.bench.report.tables import AVERAGE
from fata.bench.run.runner import CellRunner
from fata.bench.store import Record, Store
from fata.data import open as open_data
from fata.data import stream
from fata.engine.rates import PUBLISHED, rate
from fata.methods import METHODS, Tent
from fata.methods.fata import Fata
from fata.network.structure import trunk
from fata.zoo import mini

RecordsByPart = dict[str, dict[str, list[Record]]]  # by row and part; one a seed that did not fail
Rows = Mapping[str, Mapping[str, Pair]]
GMACS = "gmacs"
_OVERALL = (AVERAGE, "accuracy", GAIN, GMACS)  # columns that are of no single part
_FEW = 0.1  # of the images of a class, as 5 of 50
_BOUNDS = (-1.0, _FEW, 0.2, 0.4, float("inf"))
_QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")


def gather(plan: Plan, store: Store, runner: CellRunner) -> RecordsByPart:
    """The records of a plan's cells, by the cells' keys."""
    kept = {record.key: record for record in store}
    found: RecordsByPart = {}
    for one in plan.cells:
        records = found.setdefault(one.row, {}).setdefault(one.part, [])
        if record := kept.get(key(runner.protocol(one.cell))):
            records.append(record)
    return found


def side_by_side(
    one: Experiment, plan: Plan, found: RecordsByPart, runner: CellRunner
) -> SideBySide:
    """The results of an experiment next to the paper's numbers."""
    if one.name in _READERS:
        rows = _READERS[one.name](one, found)
    else:
        rows = _accuracies(one, found, _gmacs(one, plan, runner))
    columns = tuple(next(iter(rows.values())))
    hidden = one.numbers.hidden
    named = {f"{row} (hidden)" if row in hidden else row: pairs for row, pairs in rows.items()}
    notes = (*plan.notes, *one.numbers.notes)
    return SideBySide(f"{one.name}: {one.numbers.caption}", columns, named, notes)


def hyperparameters() -> SideBySide:
    """The paper's hyperparameters and our defaults."""
    numbers, plus = table("tableD"), Fata()
    ours: dict[str, dict[str, float | None]] = {}
    for column, network in (("resnet50", "mini_resnet_gn"), ("vit_base", "mini_vit")):
        vit, parts = column == "vit_base", trunk(mini.build(network))
        ours[column] = {
            "layer": parts.names.index(parts.tap) + 1 if parts else None,
            "threshold": plus.threshold,
            "scale": plus.scale,
            "sigma": plus.sigma,
            "ema": plus.ema,
            "batch size": stream(open_data("embedded"), domains=["fog"]).batch_size,
            "rate at 64": rate("paper", Tent(), vit, 64),
            "rate at 1": rate("paper", Tent(), vit, 1),
        }
    rows = {
        name: {c: Pair(row[c], ours[c][name], form=PLAIN) for c in numbers.columns}
        for name, row in numbers.rows.items()
    }
    notes = (*numbers.notes, *(_published(name) for name in PUBLISHED))
    return SideBySide(f"hyperparameters: {numbers.caption}", numbers.columns, rows, notes)


def _published(name: str) -> str:
    """The learning rates of a method that the paper does not have."""
    kinds = (("ResNet", False), ("ViT", True))
    rates = (
        f"{kind} {rate('paper', METHODS[name](), vit, 64):g} at 64 and "
        f"{rate('paper', METHODS[name](), vit, 1):g} at 1"
        for kind, vit in kinds
    )
    return f"{name}, not in the paper: rate {', '.join(rates)} ({PUBLISHED[name].protocol})."


def _gmacs(one: Experiment, plan: Plan, runner: CellRunner) -> dict[str, float]:
    """GMACs of each row by the paper's rule, if its table has them."""
    if GMACS not in one.numbers.columns:
        return {}
    model = plan.cells[0].cell.model
    adapter = adapt(runner.model(model).model, "fata")
    try:
        whole, tail = runner.macs(model, adapter)
    finally:
        adapter.unwrap()
    return {row: paper(row, whole, tail) / 1e9 for row in one.methods if row in PAPER}


def _accuracies(one: Experiment, found: RecordsByPart, costs: Mapping[str, float]) -> Rows:
    """Accuracy of each part, if the paper has parts, and the mean of all parts."""
    overall = [column for column in one.numbers.columns if column in _OVERALL]
    detailed = len(overall) < len(one.numbers.columns)
    averages = {row: _over(parts.values()) for row, parts in found.items()}
    marked = marks(_all(found))
    rows: dict[str, dict[str, Pair]] = {}
    for row, parts in found.items():
        known = one.numbers.rows.get(row, {})
        fallen = {part: _collapsed(records) for part, records in parts.items()}
        idle = {part: any(r.key in marked for r in records) for part, records in parts.items()}
        pairs = {
            part: Pair(known.get(part), _accuracy(records), fallen[part], idle=idle[part])
            for part, records in parts.items()
            if detailed
        }
        for column in overall:
            said = known.get(column)
            if column == GMACS:
                pairs[column] = Pair(said, costs.get(row), form=PLAIN)
            elif column == GAIN:
                host = averages.get(row.removesuffix("+fata")) if "+fata" in row else None
                pairs[column] = Pair(said, _less(averages[row], host))
            else:
                collapsed = any(fallen.values())
                pairs[column] = Pair(said, averages[row], collapsed, idle=any(idle.values()))
        rows[row] = pairs
    return rows


def _thresholded(one: Experiment, found: RecordsByPart) -> Rows:
    """Fig. 1: how few rows are under the entropy threshold, and of how few classes."""
    records = _all(found)
    few = f"{_a_class(records) * _FEW:g}"
    known = {row: numbers["share"] for row, numbers in one.numbers.rows.items()}
    selected, rare = known
    ours: dict[str, float | None] = {
        selected: _over_records(records, _share_selected),
        rare: _over_records(records, partial(_classes_within, *_BOUNDS[:2])),
        "accuracy of these classes": _over_records(records, partial(_accuracy_of, rare=True)),
        "accuracy of the others": _over_records(records, partial(_accuracy_of, rare=False)),
    }
    return {
        row.replace("5", few) if row == rare else row: {"share": Pair(known.get(row), value)}
        for row, value in ours.items()
    }


def _grouped(one: Experiment, found: RecordsByPart) -> Rows:
    """Fig. 5: share of the classes that are selected so often."""
    size = _a_class(_all(found))
    rows = {}
    for row, parts in found.items():
        records = [record for some in parts.values() for record in some]
        known, pairs = one.numbers.rows.get(row, {}), {}
        for least, most in pairwise(_BOUNDS):
            name = f"more than {least * size:g}" if most == _BOUNDS[-1] else f"to {most * size:g}"
            said = known.get("fewest") if least < 0 else None
            share = _over_records(records, partial(_classes_within, least, most))
            pairs[name] = Pair(said, share)
        rows[row] = pairs
    return rows


def _over_time(one: Experiment, found: RecordsByPart) -> Rows:
    """The supplement's figure: accuracy of outputs and pseudo-labels over the stream."""
    curves = [record.result["curve"] for record in _all(found)]
    outputs = [curve["accuracy"] for curve in curves]
    labels = [curve["pseudo_labels"]["fata"] for curve in curves]
    return {
        name: {
            "outputs": Pair(None, _quarter(outputs, at)),
            "pseudo-labels": Pair(None, _quarter(labels, at)),
        }
        for at, name in enumerate(_QUARTERS)
    }


_READERS: dict[str, Callable[[Experiment, RecordsByPart], Rows]] = {
    "fig1": _thresholded,
    "fig5": _grouped,
    "figA": _over_time,
}


def _all(found: RecordsByPart) -> list[Record]:
    return [record for parts in found.values() for some in parts.values() for record in some]


def _accuracy(records: Sequence[Record]) -> float | None:
    return mean(record.result["accuracy"] for record in records) if records else None


def _collapsed(records: Sequence[Record]) -> bool:
    return any(record.result["collapsed_at"] is not None for record in records)


def _over(parts: Iterable[Sequence[Record]]) -> float | None:
    """The mean of the parts' accuracies, where every part is there."""
    accuracies = [_accuracy(records) for records in parts]
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    return mean(known) if len(known) == len(accuracies) else None


def _less(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _over_records(
    records: Sequence[Record], what: Callable[[Record], float | None]
) -> float | None:
    known = [value for value in map(what, records) if value is not None]
    return mean(known) if known else None


def _a_class(records: Sequence[Record]) -> float:
    """Images of a class, in the mean."""
    return fmean(r.result["rows"] / len(r.result["classes"]["images"]) for r in records)


def _selected(record: Record) -> Sequence[int]:
    """By predicted class, what the host selected."""
    selected: Sequence[int] = next(iter(record.result["classes"]["selected"].values()))
    return selected


def _share_selected(record: Record) -> float:
    return 100 * sum(_selected(record)) / float(record.result["rows"])


def _within(least: float, most: float, record: Record) -> list[bool]:
    """Of each class, whether it is selected so often; bounds are shares of a class's images."""
    size = _a_class([record])
    return [least * size < count <= most * size for count in _selected(record)]


def _classes_within(least: float, most: float, record: Record) -> float:
    flags = _within(least, most, record)
    return 100 * sum(flags) / len(flags)


def _accuracy_of(record: Record, *, rare: bool) -> float | None:
    """Accuracy of the classes that are selected rarely, or of the others."""
    classes = record.result["classes"]
    flags = [few == rare for few in _within(*_BOUNDS[:2], record)]
    right, images = (
        sum(count for count, on in zip(classes[what], flags, strict=True) if on)
        for what in ("right", "images")
    )
    return 100 * right / images if images else None


def _quarter(curves: Sequence[Sequence[float | None]], at: int) -> float | None:
    """The mean of a quarter of each curve."""
    points = [
        value
        for curve in curves
        for place, value in enumerate(curve)
        if 4 * place // len(curve) == at and value is not None
    ]
    return mean(points) if points else None
