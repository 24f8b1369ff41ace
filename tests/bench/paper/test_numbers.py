"""The paper's numbers agree with each other, but where a slip is noted, and with our cost."""

from statistics import mean

import pytest

from fata.bench.cost import Macs, paper
from fata.bench.grid import Grid
from fata.bench.paper.numbers import names, table
from fata.corruptions import NAMES
from fata.data import open as open_data

TABLES = [table(name) for name in names()]
GRIDS = [one for one in TABLES if one.name not in ("tableD", "figure1")]
BY_PART = [one for one in TABLES if len(one.columns) > 3]
WITH_DIFFERENCE = [one for one in TABLES if "difference" in one.columns]


def ids(one):
    return one.name


def close(found, printed):
    return abs(found - printed) < 0.01 + 1e-9


def holds(one, row, column, found):
    """A printed number is what others give, or is noted as a slip, and then not."""
    printed, slip = one.rows[row][column], one.slips.get(row, {}).get(column)
    if slip is None:
        return close(found, printed)
    return close(found, slip) and not close(found, printed)


def test_all_tables_are_there():
    numbered = {*["1a", "1b", "1c", "2a", "2b", "3", "4", "5", "6", "7", "A", "B", "C", "D"]}
    assert set(names()) == {f"table{number}" for number in numbered} | {"figure1"}


@pytest.mark.parametrize("one", TABLES, ids=ids)
def test_only_a_difference_may_be_missing(one):
    for row, values in one.rows.items():
        missing = {column for column, value in values.items() if value is None}
        assert tuple(values) == one.columns
        assert missing <= ({"difference"} if "+fata" not in row else set())
    assert set(one.hidden) | set(one.slips) <= set(one.rows)


@pytest.mark.parametrize("one", BY_PART, ids=ids)
def test_averages_are_those_of_their_rows(one):
    parts = one.columns[: one.columns.index("average")]
    assert parts == NAMES or (one.name == "tableA" and len(parts) == 12)
    for row, values in one.rows.items():
        assert holds(one, row, "average", mean(values[part] for part in parts)), row


@pytest.mark.parametrize("one", WITH_DIFFERENCE, ids=ids)
def test_differences_are_those_of_the_averages(one):
    for row, values in one.rows.items():
        if values["difference"] is not None:
            host = one.rows[row.removesuffix("+fata")]
            gain = values["average"] - host["average"]
            assert holds(one, row, "difference", gain), row


def test_the_four_wrong_differences_are_noted():
    slips = {
        (one.name, row): slip["difference"]
        for one in WITH_DIFFERENCE
        for row, slip in one.slips.items()
    }
    assert slips == {
        ("table1a", "sar+fata"): 3.37,
        ("table1b", "deyo+fata"): 3.94,
        ("table2b", "eata+fata"): 3.26,
        ("table2b", "sar+fata"): 6.49,
    }
    assert all(any("difference" in note for note in table(name).notes) for name, _ in slips)


@pytest.mark.parametrize(
    ("short", "column", "full"),
    [
        ("table4", "accuracy", "tableA"),
        ("table5", "average", "tableB"),
        ("table7", "average", "tableC"),
    ],
)
def test_the_supplement_has_the_same_averages(short, column, full):
    short, full = table(short), table(full)
    printed = [row for row in full.rows if row not in full.hidden]
    assert len(printed) >= 6
    for row in printed:
        assert short.rows[row][column] == full.rows[row]["average"], row


def test_default_fata_is_one_number_throughout():
    found = {table(name).rows["deyo+fata"]["average"] for name in ("table1b", "table5", "table6")}
    assert found == {45.61}


@pytest.mark.parametrize("one", GRIDS, ids=ids)
def test_rows_are_methods_that_bench_takes(one):
    methods = tuple(one.rows)
    grid = Grid(("mini_resnet_gn",), methods=methods, domains=("fog",))
    assert len(list(grid.cells(open_data))) == len(methods)


def test_hidden_rows_are_those_commented_out():
    hidden = {(one.name, row) for one in TABLES for row in one.hidden}
    tent = {(f"table1{part}", "tent+fata") for part in "abc"}
    assert hidden == tent | {("tableC", "deyo+fata:loss=simple_ce")}


def test_macs_are_those_of_our_formulas():
    whole, tail = Macs(4.1095), Macs(0.8106)  # ResNet50-GN, 65 classes: tests/bench/test_cost.py
    one = table("table4")
    for row in one.rows:
        assert holds(one, row, "gmacs", paper(row, whole, tail)), row


def test_rates_are_our_preset():
    from fata.engine.rates import rate
    from fata.methods import Tent

    rows = table("tableD").rows
    for network, vit in (("resnet50", False), ("vit_base", True)):
        assert rate("paper", Tent(), vit, 64) == rows["rate at 64"][network]
        assert rate("paper", Tent(), vit, 1) == rows["rate at 1"][network]


def test_an_unknown_table_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"no 'table1d': choose from table1a,.*Did you mean"):
        table("table1d")
