"""`fata reproduce`: every table and figure is run, and its numbers stand beside the paper's."""

import csv
import dataclasses
import re
from statistics import mean

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fata
from fata.bench.cell import Cell, key
from fata.bench.cost import cost
from fata.bench.grid import GridError
from fata.bench.paper import plan as experiments_of
from fata.bench.paper.experiments import experiments
from fata.bench.paper.numbers import table
from fata.bench.paper.plan import DataPaths, experiment, plan
from fata.bench.paper.results import hyperparameters, side_by_side
from fata.bench.paper.side_by_side import Pair, SideBySide
from fata.bench.report.tables import SHORT
from fata.bench.run.local import Estimate
from fata.bench.run.runner import CellRunner
from fata.bench.store import Record, Store
from fata.commands import console
from fata.commands.app import app
from fata.commands.show_side_by_side import show
from fata.corruptions import NAMES as CORRUPTIONS
from fata.data.domains import OFFICE_HOME
from fata.training.outputs import file_name
from fata.zoo import ZooError, mini, sources

TABLES = [f"table{number}" for number in ("1a", "1b", "1c", "2a", "2b", *range(3, 8))]
FIGURES = ["fig1", "fig4", "fig5", "figA"]
NAMES = [*TABLES, *FIGURES, "tableA", "tableB", "tableC", "hyperparameters"]
RUN = [name for name in NAMES if name != "hyperparameters"]
EMBEDDED = ("--data", "embedded")


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    """Two corruptions, and results in a folder of the test's own."""
    monkeypatch.setattr(experiments_of, "CORRUPTIONS", ("fog", "contrast"))
    monkeypatch.chdir(tmp_path)


def reproduce(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def plain(result):
    """Its output, without the frames and line breaks of a terminal."""
    return " ".join(result.output.replace("│", " ").split())


def told(result):
    assert result.exit_code == 2
    return plain(result)


def written(path):
    """Row and column to (paper, ours, difference)."""
    lines = csv.DictReader(path.read_text().splitlines())
    numbers = ("paper", "ours", "difference")
    return {
        (line["row"], line["column"]): tuple(float(line[n]) if line[n] else None for n in numbers)
        for line in lines
    }


def imagenet_c(folder):
    for corruption in ("fog", "contrast", "gaussian_noise"):
        place = folder / corruption / "5" / "n01440764"
        place.mkdir(parents=True)
        Image.new("RGB", (224, 224)).save(place / "a.png")
    return folder


@pytest.fixture
def untrained(monkeypatch):
    """The paper's networks without a download: a tiny one in their place."""
    network = fata.tiny.build("resnet_gn", 1000)
    monkeypatch.setattr(sources.Timm, "pretrained", lambda _: network)


# -- what is run --------------------------------------------------------------------------------


def test_every_name_is_there_with_a_line(tmp_path):
    assert list(experiments()) == NAMES
    lines = reproduce().output.splitlines()
    assert [line.partition(":")[0] for line in lines] == NAMES
    assert all(name in reproduce("--help").output for name in NAMES)


@pytest.mark.parametrize("name", RUN)
def test_every_row_of_the_paper_is_run_at_a_layer_that_is_there(name):
    one = experiment(name)
    made = plan(one, DataPaths("embedded"), seeds=2, images=8)
    parts = one.corruptions or ("fog", "contrast")
    expected = {(row, part, seed) for row in one.methods for part in parts for seed in (0, 1)}
    assert {(slot.row, slot.part, slot.cell.seed) for slot in made.cells} == expected
    assert len(made.cells) == len(expected)
    if name.startswith("table"):
        assert set(one.methods) >= set(one.numbers.rows)  # hidden ones too
    for row, _, cell in made.cells:
        assert cell.method == row.partition(":")[0]
        assert cell.scenario == one.numbers.scenario
        layer = cell.fields.get("layer", "auto")
        assert layer == "auto" or layer in dict(mini.build(cell.model).named_modules())


def test_fields_of_a_row_go_over_the_models_own():
    made = plan(experiment("table5"), DataPaths("embedded"), images=8)
    protocols = {slot.row: CellRunner().protocol(slot.cell) for slot in made.cells}
    assert protocols["deyo+fata:layer=maxpool"]["plus"]["layer"] == "bn1"
    own = fata.zoo.load("mini_resnet_gn").settings("deyo+fata")["lr"]
    assert {protocol["lr"] for row, protocol in protocols.items() if "deyo" in row} == {own}


def test_no_weight_moves_where_the_model_without_adaptation_is_meant(tmp_path):
    cells = [
        Cell("mini_resnet_bn", "embedded", "normal", ("contrast",), 5, method, 0, 32, 96, fields)
        for method, fields in (("norm", {}), ("sar", {"lr": 1e-30}))
    ]
    norm, unmoved = (CellRunner().run(cell, lambda *_: None) for cell in cells)
    assert unmoved["entropies"] == norm["entropies"]
    low = sum(sum(norm["entropies"][kind][:20]) for kind in ("right", "wrong"))  # H < 0.4 ln C
    assert sum(unmoved["classes"]["selected"]["sar"]) == low > 0


def test_embedded_data_has_a_stand_in_for_each_network_and_says_so():
    for name, model in (("table1a", "bn"), ("table1b", "gn"), ("table1c", "vit")):
        made = plan(experiment(name), DataPaths("embedded"))
        assert {slot.cell.model[-len(model) :] for slot in made.cells} == {model}
        assert "no test of anything" in made.notes[0]
    made = plan(experiment("table4"), DataPaths("embedded"))
    assert any("12 shifts" in note for note in made.notes)


# -- on the user's data -------------------------------------------------------------------------


def test_the_papers_vit_is_met_under_the_published_protocol(tmp_path, untrained):
    imagenet_c(tmp_path / "C")
    made = plan(experiment("table1c"), DataPaths(imagenet_c=tmp_path / "C"))
    assert {slot.cell.model for slot in made.cells} == {"vit_base@sar"}
    cell, runner = made.cells[0].cell, CellRunner()
    own = runner.protocol(dataclasses.replace(cell, model="vit_base"))
    published = runner.protocol(cell)
    assert own["preprocess"]["mean"] == (0.5, 0.5, 0.5)
    assert published["preprocess"]["mean"] == fata.zoo.IMAGENET_MEAN
    assert own["weights"] == published["weights"]
    assert key(own) != key(published)


@pytest.mark.parametrize(
    ("model", "why"),
    [("vit_base@sra", "protocol='sra': choose 'sar'"), ("mini_vit@sar", "not for 'mini_vit'")],
)
def test_a_wrong_protocol_is_refused(model, why):
    with pytest.raises(ZooError, match=re.escape(why)):
        CellRunner().model(model)


def test_clean_images_are_those_of_imagenet_where_it_is_given(tmp_path):
    imagenet_c(tmp_path / "C")
    place = tmp_path / "val" / "n01440764"
    place.mkdir(parents=True)
    Image.new("RGB", (300, 300)).save(place / "a.png")
    one = experiment("table1b")
    both = plan(one, DataPaths(imagenet_c=tmp_path / "C", imagenet=tmp_path / "val"))
    assert {slot.cell.data for slot in both.cells} == {f"imagenet-c:{tmp_path / 'C'}"}
    assert both.fisher == f"imagenet:{tmp_path / 'val'}"
    alone = plan(one, DataPaths(imagenet=tmp_path / "val"))
    assert {slot.cell.data for slot in alone.cells} == {f"imagenet:{tmp_path / 'val'}"}
    assert alone.jpeg


def office_home(folder):
    for domain in dict.fromkeys(OFFICE_HOME.values()):
        for number in range(65):
            place = folder / domain / f"class{number}"
            place.mkdir(parents=True)
            (place / "a.png").touch()
    return folder


def test_shifts_go_from_each_source_model_to_the_other_domains(tmp_path):
    data = f"office-home:{office_home(tmp_path / 'O')}"
    given = DataPaths(office_home=tmp_path / "O", sources=tmp_path)
    domains = dict.fromkeys(OFFICE_HOME.values())
    files = {domain: tmp_path / file_name("resnet50_gn", data, domain) for domain in domains}
    for file in files.values():
        with pytest.raises(GridError, match=re.escape(file.name)):
            plan(experiment("tableA"), given)
        file.touch()
    cells = plan(experiment("tableA"), given).cells
    assert {slot.part for slot in cells} == set(table("tableA").columns) - {"average", "difference"}
    for _, part, cell in cells:
        source, _, target = part.partition(" to ")
        assert (cell.model, cell.domains) == (str(files[source]), (target,))


def test_a_missing_source_model_comes_with_the_command_that_makes_it(tmp_path):
    office_home(tmp_path / "O")
    why = told(reproduce("table4", "--office-home", "O", "--sources", "S"))
    assert "--domain all --model resnet50_gn -o S makes them" in why
    (tmp_path / "S").mkdir()
    for domain in ("Art", "Clipart", "Product"):
        (tmp_path / "S" / f"resnet50_gn-office-home-{domain}.safetensors").touch()
    why = told(reproduce("table4", "--office-home", "O", "--sources", "S"))
    assert "S/resnet50_gn-office-home-Real-World.safetensors: " in why
    assert "--data office-home:O --domain 'Real World' --model resnet50_gn -o S makes it" in why


# -- what comes out -----------------------------------------------------------------------------


def test_ours_are_the_stores_and_the_difference_is_to_the_papers(tmp_path):
    arguments = ("table6", *EMBEDDED, "--subset", 16, "--seeds", 2, "--output", "t.csv")
    first = reproduce(*arguments)
    assert first.exit_code == 0, first.output
    assert "12 cells, 0 of them" in first.output
    accuracies = {}
    for one in Store("results.db"):
        plus = one.protocol["plus"]
        accuracies.setdefault((plus["spread"], plus["ema"]), []).append(one.result["accuracy"])
    kinds = [("variance", None), ("variance", 0.95), ("std", 0.95)]
    rows = dict(zip(table("table6").rows, kinds, strict=True))
    numbers = written(tmp_path / "t.csv")
    assert [row for row, _ in numbers] == list(rows)
    for (row, column), (paper, ours, difference) in numbers.items():
        assert len(accuracies[rows[row]]) == 4
        assert ours == pytest.approx(mean(accuracies[rows[row]]))
        assert paper == table("table6").rows[row][column]
        assert difference == pytest.approx(ours - paper)
        shown = rf"{re.escape(row)} +{paper:.2f} +{ours:.2f}° +\{difference:+.2f}"  # one step
        assert re.search(shown, first.output), row
    assert "12 cells, 12 of them" in reproduce(*arguments).output
    assert len(Store("results.db")) == 12


def test_cells_of_the_bench_are_not_run_again():
    methods = ",".join(table("table6").rows)
    bench = ["bench", "--model", "mini_resnet_gn", "--methods", methods]
    bench += ["--domains", "fog,contrast", "--images", "8"]
    assert CliRunner().invoke(app, bench).exit_code == 0
    assert "6 cells, 6 of them" in reproduce("table6", *EMBEDDED, "--subset", 8).output


@pytest.mark.parametrize("width", [80, 140])
def test_a_wide_table_is_cut_into_what_fits_and_nothing_is_lost(monkeypatch, width):
    monkeypatch.setattr(console, "width", width)
    fallen = dict.fromkeys(CORRUPTIONS, Pair(50.0, 12.34, collapsed=True))
    rows = {"tent": fallen, "deyo+fata:loss=simple_ce (hidden)": fallen}
    with console.capture() as captured:
        show(SideBySide("wide", CORRUPTIONS, rows))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= width
    assert all(shown.count(SHORT[name]) == 1 for name in CORRUPTIONS)
    for text in ("50.00", "12.34†", "-37.66"):
        assert shown.count(text) == 30
    assert re.search(r"^loss=simple_ce +ours.*\n\(hidden\) +diff", shown, re.MULTILINE)


def test_table4_counts_macs_by_the_papers_rule(tmp_path):
    one = experiment("table4")
    made = plan(one, DataPaths("embedded"), images=8)
    runner = CellRunner()
    found = {row: {"fog": []} for row in one.methods}
    rows = side_by_side(one, made, found, runner).rows
    network = fata.zoo.load("mini_resnet_gn").model
    for row in ("source", "sar+fata"):
        expected = cost(network, row, torch.rand(2, 3, 32, 32), 0.4).paper
        assert rows[row]["gmacs"].ours == pytest.approx(expected / 1e9)
        assert rows[row]["accuracy"] == Pair(table("table4").rows[row]["accuracy"], None)


def test_a_cell_that_failed_leaves_a_gap_and_no_average():
    one = experiment("table1b")
    found = {row: {"fog": [record(40.0)], "contrast": [record(60.0)]} for row in one.methods}
    found["eata"]["fog"] = []
    found["sar+fata"]["fog"] = [record(0.2, collapsed=True)]
    rows = side_by_side(one, plan(one, DataPaths("embedded")), found, CellRunner()).rows
    assert rows["eata"]["fog"].ours is rows["eata"]["average"].ours is None
    assert rows["eata+fata"]["difference"].ours is None
    assert rows["sar+fata"]["difference"].ours == pytest.approx((0.2 + 60) / 2 - 50)
    assert rows["sar+fata"]["difference"].paper == 7.97
    assert rows["sar+fata"]["fog"].texts == ("0.23", "0.20†", "-0.03")
    assert "tent+fata (hidden)" in rows


def record(accuracy=50.0, collapsed=False, selected=(), **result):
    classes = {"images": [50] * 4, "right": [10, 20, 30, 40], "selected": {"sar": list(selected)}}
    facts = {"accuracy": accuracy, "collapsed_at": 3 if collapsed else None, "rows": 200}
    return Record("k", {"method": "sar"}, {}, {**facts, "classes": classes, **result}, "")


def test_figure_1_counts_rows_and_classes_under_the_threshold():
    one = experiment("fig1")
    found = {one.methods[0]: {"gaussian_noise": [record(selected=(5, 0, 6, 39))]}}
    rows = side_by_side(one, plan(one, DataPaths("embedded")), found, CellRunner()).rows
    values = {name: pairs["share"][:2] for name, pairs in rows.items()}
    assert values == {
        "rows selected": (11.85, 25.0),
        "classes selected 5 times or fewer": (64.0, 50.0),
        "accuracy of these classes": (None, 30.0),
        "accuracy of the others": (None, 70.0),
    }


def test_figure_5_groups_classes():
    one = experiment("fig5")
    found = {row: {"gaussian_noise": [record(selected=(5, 10, 20, 21))]} for row in one.methods}
    made = side_by_side(one, plan(one, DataPaths("embedded")), found, CellRunner())
    assert made.columns == ("to 5", "to 10", "to 20", "more than 20")
    assert [pair.ours for pair in made.rows["sar+fata"].values()] == [25.0] * 4
    assert made.rows["sar:lr=1e-30"]["to 5"].paper == 64.0


def test_figure_a_follows_pseudo_labels_over_the_stream():
    one = experiment("figA")
    curve = {"accuracy": [*range(8)], "pseudo_labels": {"deyo": [0] * 8, "fata": [None, *range(7)]}}
    found = {"deyo+fata": {"fog": [record(curve=curve)]}}
    rows = side_by_side(one, plan(one, DataPaths("embedded")), found, CellRunner()).rows
    assert [pairs["outputs"].ours for pairs in rows.values()] == [0.5, 2.5, 4.5, 6.5]
    assert [pairs["pseudo-labels"].ours for pairs in rows.values()] == [0, 1.5, 3.5, 5.5]


@pytest.mark.parametrize("name", ["fig1", "fig5", "figA"])
def test_a_figure_is_run_and_drawn(tmp_path, name):
    result = reproduce(name, *EMBEDDED, "--subset", 64)
    assert result.exit_code == 0, result.output
    assert f"report: {name}.html" in result.output
    assert "Classes by number of selected samples" in (tmp_path / f"{name}.html").read_text()


def test_a_table_is_written_as_markdown(tmp_path):
    result = reproduce("table6", *EMBEDDED, "--subset", 8, "-o", "t.md")
    assert "numbers: t.md" in result.output
    text = (tmp_path / "t.md").read_text()
    assert "| deyo+fata | paper | 45.61 |" in text
    assert "no test of anything" in text


def test_hyperparameters_are_our_defaults():
    made = hyperparameters()
    assert all(pair.difference == 0 for pairs in made.rows.values() for pair in pairs.values())
    assert len(made.rows) == 8
    result = reproduce("hyperparameters")
    assert result.exit_code == 0
    assert re.search(r"rate at 1 +0\.00025 +0\.00025", result.output)
    said = " ".join(result.output.split())
    assert "zerosiam, not in the paper: rate ResNet 0.0025 at 64 and 0.00015625 at 1" in said
    assert "roid, not in the paper" in said
    assert "ImageNet-C in sequence, ResNet-50, Swin-B and ViT-B/16" in said


# -- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUN)
def test_every_name_works_on_a_fresh_machine(monkeypatch, name):
    monkeypatch.setattr("fata.bench.run.local.estimate", lambda *_: Estimate(60.0, 2**30))
    result = reproduce(name, *EMBEDDED, "--subset", 8, "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.output.count("#0") == len(plan(experiment(name), DataPaths("embedded")).cells)
    assert "about 0:01:00" in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("table1b",), "table1b is run on ImageNet-C: give --imagenet-c DIR, or --imagenet DIR"),
        (("table1b", "--office-home", "x"), "--data embedded works at once"),
        (("table4", "--imagenet-c", "x"), "table4 is run on Office-Home: give --office-home DIR"),
        (("tableA",), "--data embedded works at once"),
        (("tabel1b", *EMBEDDED), "nothing is called 'tabel1b': choose from table1a"),
        (("tabel1b", *EMBEDDED), "Did you mean 'table1b'"),
        (("table5", "--data", "imagenet-c:x"), "for other data there are --imagenet-c"),
        (("table5", *EMBEDDED, "--imagenet", "x"), "--data embedded is instead of other data"),
        (("table5", "--imagenet-c", "nowhere"), "there is no folder 'nowhere'"),
        (("table5", *EMBEDDED, "-o", "t.pdf"), "ends in .html or .md or .csv"),
        (("hyperparameters", "-o", "t.html"), "ends in .md or .csv"),
        (("table5", *EMBEDDED, "--store", "no/where.db"), "no/where.db: there is no folder 'no'"),
        (("table5", *EMBEDDED, "-o", "no/where.csv"), "there is no folder 'no'"),
    ],
)
def test_wrong_input_is_told_with_exit_code_2(arguments, why):
    assert why in told(reproduce(*arguments))


def test_a_corruption_that_is_not_there_is_named(tmp_path, untrained):
    imagenet_c(tmp_path / "C")
    (tmp_path / "C" / "fog" / "5").rename(tmp_path / "C" / "fog" / "4")
    assert "no 'fog' at severity 5" in told(reproduce("table5", "--imagenet-c", "C"))


def test_eata_without_clean_images_says_what_would_give_some(tmp_path, monkeypatch, untrained):
    monkeypatch.setattr("fata.bench.run.local.estimate", lambda *_: Estimate(60.0, 2**30))
    imagenet_c(tmp_path / "C")
    result = reproduce("table1b", "--imagenet-c", "C", "--dry-run")
    assert "runs without it: give --imagenet DIR too" in result.output


def test_a_stopped_run_says_that_it_goes_on(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CellRunner, "run", stop)
    result = reproduce("table6", *EMBEDDED, "--subset", 8)
    assert result.exit_code == 130
    assert "stopped: 0 of 6 cells done and kept in results.db" in result.output


def test_a_failure_is_told_and_the_rest_shown(monkeypatch):
    real = CellRunner.run

    def fragile(self, cell, *rest):
        if cell.fields:
            raise RuntimeError("no memory")
        return real(self, cell, *rest)

    monkeypatch.setattr(CellRunner, "run", fragile)
    result = reproduce("table6", *EMBEDDED, "--subset", 8)
    assert result.exit_code == 1
    assert plain(result).count("RuntimeError: no memory") == 4
    assert "45.61" in result.output
