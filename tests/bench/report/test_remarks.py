"""What stands below a table: the protocol in words, remarks, and the same in every export."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

import fata
from fata.bench.report.protocol import in_words
from fata.bench.report.remarks import cautions, remarks
from fata.bench.report.rows import COLUMNS
from fata.bench.report.tables import AVERAGE, comparisons
from fata.bench.store import Store
from fata.commands.app import app


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Small batches, so that some methods take 20 steps and others cannot."""
    path = tmp_path_factory.mktemp("results") / "r.db"
    grid = ["--model", "mini_resnet_bn", "--domains", "fog", "--images", "96", "--batch-size", "4"]
    methods = "source,norm,tent,tent:lr=0.001,tent:lr=1e-30,eata:threshold=0.0001"
    assert bench(path, *grid, "--methods", methods, "--seed", "7").exit_code == 0
    few = ["--model", "mini_resnet_gn", "--domains", "fog", "--images", "64"]
    assert bench(path, *few, "--methods", "source,tent,memo:views=2").exit_code == 0
    return path


def bench(path, *arguments):
    return CliRunner().invoke(app, ["bench", *arguments, "-o", str(path)])


def report(path, kind):
    result = CliRunner().invoke(app, ["report", str(path), "--format", kind])
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def tables(path):
    return {table.model: table for table in comparisons(Store(path, read_only=True))}


def test_every_row_of_an_export_has_every_column(path):
    rows = list(csv.DictReader(io.StringIO(report(path, "csv"))))
    objects = json.loads(report(path, "json"))
    assert list(rows[0]) == list(objects[0]) == list(COLUMNS)
    assert [row["method"] for row in rows] == [one["method"] for one in objects]
    tent = next(one for one in objects if one["method"] == "tent lr=0.001875")
    assert tent["seed"] == 7
    assert (tent["lr"], tent["lr_origin"], tent["batch_size"]) == (0.03 * 4 / 64, "tuned", 4)
    assert tent["stepped"] == 24 == tent["images"] / 4
    assert tent["fata"] == fata.__version__
    needed = ("calibration_error", "seconds", "images_per_second", "peak_memory", "selected")
    assert all(one[name] is not None for one in objects for name in needed)


def test_two_rates_of_one_method_have_two_names(path):
    rows = csv.DictReader(io.StringIO(report(path, "csv")))
    rates = {row["method"]: row["lr"] for row in rows if row["spec"] == "tent"}
    assert rates["tent lr=0.001"] == "0.001"
    assert rates["tent lr=0.001875"] == "0.001875"
    assert "tent lr=1e-30" in report(path, "md")


def test_a_frame_is_the_export(path):
    pytest.importorskip("pandas")
    frame = fata.results.load(path)
    rows = json.loads(report(path, "json"))
    assert list(frame.columns) == list(COLUMNS)
    assert frame["accuracy"].tolist() == [row["accuracy"] for row in rows]


def test_a_method_that_learned_too_little_is_marked_everywhere(path, tables):
    (row,) = [r for r in json.loads(report(path, "json")) if r["method"] == "tent lr=1e-30"]
    assert row["mark"] == "unchanged"
    table = tables["mini_resnet_bn"]
    (line,) = [line for line in table.lines if line.method == "tent lr=1e-30"]
    assert line.average.idle == 1
    assert table.rank(AVERAGE, line) == 0
    assert f"{line.average.mean:.2f}°" in report(path, "md")
    assert rf"{line.average.mean:.2f}$^\circ$" in report(path, "latex")


def test_remarks_say_what_to_change(tables):
    small, few = tables["mini_resnet_bn"], tables["mini_resnet_gn"]
    said = "\n".join(remarks(small))
    assert "tent lr=1e-30: every prediction is the unadapted model's: raise the" in said
    assert "eata threshold=0.0001: fewer than 20 steps, as most batches had no row" in said
    assert "memo views=2: every prediction is the unadapted model's" in "\n".join(remarks(few))
    assert "tent: fewer than 20 steps" in "\n".join(remarks(few))
    assert "give 1,344 images a stream or more (now 64)" in "\n".join(remarks(few))
    (caution,) = cautions(small.records)
    assert "mini_resnet_bn has BatchNorm, whose statistics of 4 images are unreliable" in caution
    assert not cautions(few.records)


def test_a_table_without_the_unadapted_model_says_what_it_cannot_see(path, tables):
    assert not any("add source" in line for line in remarks(tables["mini_resnet_gn"]))
    store = Store(":memory:")
    for record in Store(path, read_only=True):
        if record.protocol["method"] == "tent":
            store.put(record.key, record.protocol, record.circumstances, record.result)
    assert all(any("add source" in line for line in remarks(one)) for one in comparisons(store))


def test_few_selected_rows_are_told_with_the_fields_to_raise(tables):
    records = [r for r in tables["mini_resnet_bn"].records if r.protocol["method"] == "source"]
    (base,) = records
    protocol = {
        **base.protocol,
        "method": "eata",
        "host": {"name": "eata", "redundancy": 0.05, "threshold": 0.4},
    }
    counts = {"stepped": 30, "selected": {"eata": 6}}
    store = Store(":memory:")
    store.put("e", protocol, {}, {**base.result, "rows": 576, "counts": counts})
    (table,) = comparisons(store)
    expected = "eata learned from 6 of 576 rows: raise redundancy (now 0.05) or threshold (now 0.4)"
    assert expected in remarks(table)


@pytest.mark.parametrize("host", ["norm", "neo"])
def test_a_host_that_selects_nothing_beside_fata_is_no_fault(tables, host):
    (base,) = [r for r in tables["mini_resnet_bn"].records if r.protocol["method"] == "source"]
    protocol = {**base.protocol, "method": f"{host}+fata", "host": {"name": host}}
    counts = {"stepped": 30, "selected": {host: 0, "fata": 200}}
    store = Store(":memory:")
    store.put("e", protocol, {}, {**base.result, "rows": 576, "counts": counts})
    (table,) = comparisons(store)
    assert not any("learned from" in line for line in remarks(table))


def test_an_untuned_rate_beside_tuned_ones_is_told(tables):
    said = remarks(tables["mini_resnet_gn"])
    assert any(line.startswith("memo") for line in said) is False  # it has a rate of its own
    records = list(tables["mini_resnet_gn"].records)
    tent = next(r for r in records if r.protocol["method"] == "tent")
    result = {**tent.result, "lr_origin": "paper", "lr": 0.0005}
    store = Store(":memory:")
    store.put("tent", tent.protocol, {}, tent.result)
    store.put("mine", {**tent.protocol, "method": "mine:Own"}, {}, result)
    (table,) = comparisons(store)
    assert any(
        line.startswith("mine:Own: the learning rate 0.0005 is not tuned for mini_resnet_gn")
        for line in remarks(table)
    )


def test_the_protocol_is_in_words(tables):
    said = " ".join(in_words(tables["mini_resnet_bn"]))
    assert "96 images a stream, batches of 4, seed 7; guard off; speed exact." in said
    assert "0.001875 (tuned for this model) for tent lr=0.001875" in said
    assert "1e-30 (given) for tent lr=1e-30" in said
    assert f"fata {fata.__version__}, torch" in said


def test_a_store_of_an_older_version_is_shown(path, tmp_path):
    """Without the rates, the counts, the flags and the predictions that it did not have."""
    old = Store(tmp_path / "old.db")
    newer = ("lr", "lr_origin", "given", "batch_norm", "predictions", "right", "counts")
    for record in Store(path, read_only=True):
        kept = {name: value for name, value in record.result.items() if name not in newer}
        old.put(record.key, record.protocol, record.circumstances, kept)
    old.close()
    for kind in ("md", "csv", "json", "latex"):
        assert "tent" in report(tmp_path / "old.db", kind)
