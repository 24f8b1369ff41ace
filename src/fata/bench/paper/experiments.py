"""The paper's experiments: its tables and figures, and the methods that are run for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fata.bench.paper.numbers import PaperTable, table

UNMOVED = "sar:lr=1e-30"  # selects the rows with H < 0.4 ln C, and no weight ever changes
SIGMAS, THRESHOLDS = (0.1, 0.3, 3.0, 10.0), (0.3, 0.4, 0.6, 0.7)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Args:
        name: as `fata reproduce` takes it.
        numbers: the paper's; model, data and scenario are those that are run.
        methods: to be run, as `fata bench` takes them; each is a row.
        corruptions: None: all 15.
        figure: whether it is one, so that a page is made.
    """

    name: str
    numbers: PaperTable
    methods: tuple[str, ...]
    corruptions: tuple[str, ...] | None = None
    figure: bool = False


@cache
def experiments() -> Mapping[str, Experiment]:
    """Every experiment by name, in the paper's order."""
    main = (f"table{number}" for number in ("1a", "1b", "1c", "2a", "2b", *range(3, 8)))
    every = [*map(_of_table, main), *_figures(), *map(_of_table, ("tableA", "tableB", "tableC"))]
    every.append(Experiment("hyperparameters", table("tableD"), ()))
    return {one.name: one for one in every}


def _of_table(name: str) -> Experiment:
    numbers = table(name)
    both = ("source",) if name == "table1a" else ()  # the paper's No Adapt is `norm`
    return Experiment(name, numbers, (*both, *numbers.rows))


def _figures() -> list[Experiment]:
    one, gn = table("figure1"), table("table1b")
    few = one.rows["classes selected 5 times or fewer"]["share"]
    host = {row: {"average": gn.rows[row]["average"]} for row in ("deyo", "deyo+fata")}
    swept = [f"deyo+fata:sigma={sigma}" for sigma in SIGMAS]
    swept += [f"deyo+fata:fata_threshold={threshold}" for threshold in THRESHOLDS]
    four = replace(
        gn,
        caption="Sensitivity to sigma_n and E0: ResNet50 with GroupNorm, mean of the 15 "
        "corruptions",
        columns=("average",),
        rows=host,
        hidden=(),
        slips={},
        notes=(
            "The text has the ends of sigma_n, 0.1 and 10, and that every value is above DeYO; the "
            "values between, and those of E0, are ours. deyo+fata has sigma_n 1 and E0 0.5.",
        ),
    )
    five = replace(
        one,
        caption="Classes by number of selected samples, with and without FATA: ResNet50 with "
        "BatchNorm, gaussian noise of severity 5",
        rows={UNMOVED: {"fewest": few}},
        notes=(
            "The paper does not give network and corruption of Fig. 5: these are those of Fig. 1.",
            f"{UNMOVED} is the model without adaptation. Selected is what has H < 0.4 ln C.",
        ),
    )
    supplement = replace(
        gn,
        caption="Right pseudo-labels over time, mean of the 15 corruptions: ResNet50 with "
        "GroupNorm, DeYO+FATA",
        rows={},
        hidden=(),
        slips={},
        notes=("The text: they are more often right than the outputs, and improve over time.",),
    )
    noise = ("gaussian_noise",)
    return [
        Experiment("fig1", one, (UNMOVED,), noise, figure=True),
        Experiment("fig4", four, (*host, *swept), figure=True),
        Experiment("fig5", five, (UNMOVED, "sar", "sar+fata"), noise, figure=True),
        Experiment("figA", supplement, ("deyo+fata",), figure=True),
    ]
