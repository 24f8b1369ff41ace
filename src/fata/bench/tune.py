"""Learning rates for any method and network, found on corruptions that the benchmark never sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fata.bench import paired
from fata.bench.cell import Cell
from fata.bench.grid import Grid
from fata.bench.report.figures import DASHED, LEAST, Figure, spec_colour
from fata.bench.store import Record
from fata.corruptions import EXTRA
from fata.data import open as open_data

RATES = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Tuned:
    """A method on a network at several rates: its records by rate, in order."""

    method: str
    runs: Mapping[float, Sequence[Record]]

    @property
    def rate(self) -> float:
        """The one with the highest accuracy."""
        return max(self.runs, key=lambda rate: accuracy(self.runs[rate]))

    @property
    def level(self) -> list[float]:
        """Rates within noise of the best."""
        best = self.runs[self.rate]
        return [r for r, some in self.runs.items() if some is best or gain(some, best).sign <= 0]

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond those that were tried may be better."""
        return len(self.runs) > 1 and self.rate in (min(self.runs), max(self.runs))

    @property
    def spec(self) -> str:
        """For `fata bench --methods`."""
        return spelled(self.method, {"lr": self.rate})


def spelled(method: str, fields: Mapping[str, Any]) -> str:
    """A method with fields, as `fata bench` takes it."""
    return ":".join([method, *(f"{name}={value}" for name, value in fields.items())])


def cells(model: str, method: str, **grid: Any) -> list[Cell]:
    """A method's cells on the extra corruptions; the other fields are those of a `Grid`."""
    return list(Grid((model,), methods=(method,), domains=EXTRA, **grid).cells(open_data))


def accuracy(records: Sequence[Record]) -> float:
    """The mean over the corruptions and seeds."""
    return fmean(record.result["accuracy"] for record in records)


def gain(before: Sequence[Record], after: Sequence[Record]) -> paired.Gain:
    """Of one rate over another: records of the same streams in the same order."""
    flags: dict[int, tuple[list[paired.Flags], list[paired.Flags]]] = {}
    for pair in zip(before, after, strict=True):
        both = flags.setdefault(pair[0].protocol["seed"], ([], []))
        for some, record in zip(both, pair, strict=True):
            some.append(paired.unpack(record.result["right"], record.result["rows"]))
    return paired.over_seeds([paired.gain(*both) for both in flags.values()])


def drawn(found: Sequence[Tuned], source: Sequence[Record]) -> Figure:
    """Accuracy against the rate, a line a method; the network without adaptation is dashed."""
    rates = sorted({rate for one in found for rate in one.runs})
    axes = {"type": "log", "title": {"text": "learning rate"}, "tickvals": rates}
    y = {"title": {"text": "accuracy, %"}, "least": LEAST}
    figure = Figure([], {"xaxis": axes, "yaxis": y, "showlegend": True}, rates)
    for number, one in enumerate(found):
        levels = [accuracy(one.runs[rate]) for rate in one.runs]
        look = {"mode": "lines+markers", "line": {"color": spec_colour(one.method, number)}}
        figure.data.append({"x": list(one.runs), "y": levels, "name": one.method, **look})
    if source:
        flat = [accuracy(source)] * len(rates)
        figure.data.append({"y": flat, "name": "source", "mode": "lines", "line": DASHED})
    return figure
