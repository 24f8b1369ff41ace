"""The grid, its cells, their store, and runs that are stopped and go on."""

import dataclasses
import json
import math
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fata
from fata.bench import summary
from fata.bench.cell import Cell, key
from fata.bench.cost import passes
from fata.bench.grid import Grid, GridError, read
from fata.bench.run import torchrun
from fata.bench.run.local import missing, run
from fata.bench.run.measure import _columns
from fata.bench.run.runner import CellRunner
from fata.bench.store import Store, StoreError
from fata.commands.app import app

FACTS = {"model": "m", "scenario": {"name": "normal"}, "method": "tent"}
SMALL = {"domains": ("contrast", "fog"), "images": 24, "batch_size": 8}


def put(store, name, accuracy=50.0):
    store.put(name, FACTS, {"python": "3"}, {"accuracy": accuracy})


class Notes:
    def __init__(self, stop_after=None):
        self.ended, self.failures, self.stop_after = [], [], stop_after

    def tick(self, task, seen, accuracy):
        pass

    def done(self, task, result):
        self.ended.append(task.cell)
        if len(self.ended) == self.stop_after:
            raise KeyboardInterrupt

    def failed(self, task, why):
        self.failures.append((task.cell, why))


@pytest.fixture(scope="module")
def runner():
    return CellRunner()


def cells_of(**fields):
    grid = Grid(**{"models": ("mini_resnet_bn",), "methods": ("norm", "tent"), **SMALL, **fields})
    return list(grid.cells(fata.data.open))


def lasting(store):
    """What two runs of the same cells must agree on."""
    timed = ("seconds", "latency", "images_per_second", "peak_memory")
    return {
        record.key: {k: v for k, v in record.result.items() if k not in timed} for record in store
    }


# -- the store ----------------------------------------------------------------------------------


def test_a_stored_cell_is_found_again(tmp_path):
    store = Store(tmp_path / "r.db")
    put(store, "a", 12.5)
    again = Store(tmp_path / "r.db")
    assert "a" in again
    assert "b" not in again
    (record,) = again
    assert (record.key, record.protocol, record.result["accuracy"]) == ("a", FACTS, 12.5)


def test_a_cell_that_is_run_again_replaces_the_old_one(tmp_path):
    store = Store(tmp_path / "r.db")
    put(store, "a", 1.0)
    put(store, "a", 2.0)
    assert [record.result["accuracy"] for record in store] == [2.0]


def test_several_may_write_at_once(tmp_path):
    def write(number):
        store = Store(tmp_path / "r.db")
        for turn in range(20):
            put(store, f"{number}-{turn}")
        store.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert len(Store(tmp_path / "r.db")) == 80


def test_a_store_of_another_version_is_left_alone(tmp_path):
    path = tmp_path / "r.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE cells (x)")
        other.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another version"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be one" * 40])
def test_what_is_no_store_is_named(tmp_path, content):
    path = tmp_path / "r.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"r\.db"):
        Store(path)
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match="nowhere"):
        Store(tmp_path / "nowhere" / "r.db")
    with pytest.raises(StoreError, match="is a folder: give a file"):
        Store(tmp_path)


# -- the grid -----------------------------------------------------------------------------------


def test_domains_are_cells_where_the_model_starts_anew_at_each():
    cells = cells_of(scenarios=("normal", "continual"), seeds=2)
    assert [cell.domains for cell in cells if cell.scenario == "normal"].count(("fog",)) == 4
    assert {cell.domains for cell in cells if cell.scenario == "continual"} == {("contrast", "fog")}


def test_fields_and_options_are_read_off_the_names():
    (cell,) = cells_of(
        methods=("eata+fata:sigma=0.5:lr=1e-3",),
        scenarios=("label-shift:ratio=1000",),
        domains=("fog",),
    )
    assert cell.fields == {"sigma": 0.5, "lr": 1e-3}
    assert cell.options == {"ratio": 1000}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"methods": ("tnt",)}, "Did you mean 'tent'"),
        ({"methods": ("tent:sigma=1",)}, "no field 'sigma'"),
        ({"methods": ("tent:lr",)}, "expected tent:field=value"),
        ({"scenarios": ("normla",)}, "Did you mean 'normal'"),
        ({"methods": ("tent:lr=-1",)}, "positive number"),
        ({"seeds": 0}, "at least 1"),
        ({"window": 0}, "window=0: must be at least 1"),
        ({"reset_every": 0}, "reset_every=0: must be at least 1"),
        ({"methods": ()}, "methods: give at least one"),
        ({"methods": ("tent", "tent")}, "methods: .* each once"),
        ({"methods": ("nowhere:Mine:lr=1",)}, "No module named 'nowhere'"),
        ({"domains": ("fgo",)}, "Did you mean 'fog'"),
    ],
)
def test_a_wrong_grid_says_what_is_wrong(fields, why):
    with pytest.raises(ValueError, match=why):
        cells_of(**fields)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grid.yaml", "models: [mini_vit]\nmethods: [tent, 'eata:lr=0.1']\nseverities: [1, 5]\n"),
        pytest.param(
            "grid.toml",
            'models = ["mini_vit"]\nmethods = ["tent", "eata:lr=0.1"]\nseverities = [1, 5]',
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib"),
        ),
    ],
)
def test_a_grid_comes_from_a_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    expected = Grid(("mini_vit",), methods=("tent", "eata:lr=0.1"), severities=(1, 5))
    assert Grid(**read(tmp_path / name)) == expected


def test_one_alone_is_a_list_of_one(tmp_path):
    (tmp_path / "grid.yaml").write_text("models: mini_vit\nseverities: 3\nimages: null\n")
    found = {"models": ("mini_vit",), "severities": (3,), "images": None}
    assert read(tmp_path / "grid.yaml") == found


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("[7, 8]", [7, 8]), ("[7]", [7])])
def test_seeds_are_a_number_or_a_list(tmp_path, text, seeds):
    (tmp_path / "grid.yaml").write_text(f"models: mini_vit\nmethods: tent\nseeds: {text}\n")
    grid = Grid(**read(tmp_path / "grid.yaml"), domains=("fog",))
    assert [cell.seed for cell in grid.cells(fata.data.open)] == seeds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models: [a]\nmethdos: [b]", "Did you mean 'methods'"),
        ("seeds: [0, one]", "seeds: expected a list of int"),
        ("images: '8'", "images: expected int"),
        ("methods: [{tent: 1}]", "methods: expected a list of str"),
        ("models: [", "cannot read"),
        ("- a\n- b", "expected keys"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, why):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(GridError, match=why):
        read(tmp_path / "grid.yaml")


# -- cells --------------------------------------------------------------------------------------


def test_a_cells_key_is_its_protocols(runner):
    cell = Cell("mini_resnet_bn", "embedded", "normal", ("fog",), 5, "tent", 0, images=24)
    others = [
        dataclasses.replace(cell, **change)
        for change in (
            {"seed": 1},
            {"severity": 4},
            {"domains": ("snow",)},
            {"images": 25},
            {"batch_size": 32},
            {"scenario": "bs1"},
            {"fields": {"lr": 0.1}},
            {"method": "tent+fata"},
            {"window": 8},
            {"reset_every": 2},
        )
    ]
    keys = [key(runner.protocol(one)) for one in (cell, *others)]
    assert len(set(keys)) == len(keys)
    assert key(CellRunner().protocol(cell)) == keys[0]
    assert not {"window", "reset_every"} & set(runner.protocol(cell))  # keys of older cells stay


def test_a_protocol_names_the_settings_that_the_model_brings(runner):
    cell = Cell("mini_resnet_bn", "embedded", "normal", ("fog",), 5, "tent+fata", 0)
    protocol = runner.protocol(cell)
    assert protocol["lr"] == fata.zoo.load("mini_resnet_bn").settings("tent+fata")["lr"]
    assert protocol["plus"]["sigma"] == 1.0
    json.dumps(protocol)


def test_small_batches_take_the_models_rate_in_proportion(runner):
    """Unless the cell says a rate of its own."""
    cell = Cell("mini_resnet_bn", "embedded", "bs1", ("fog",), 5, "tent+fata", 0)
    rate = fata.zoo.load("mini_resnet_bn").settings("tent+fata")["lr"]
    assert runner.protocol(cell)["lr"] == rate / 64
    for size, share in ((32, 0.5), (64, 1), (256, 1)):
        sized = dataclasses.replace(cell, scenario="normal", batch_size=size)
        assert runner.protocol(sized)["lr"] == rate * share
    own = dataclasses.replace(cell, fields={"lr": 0.25})
    assert runner.protocol(own)["lr"] == 0.25


def test_a_cells_accuracy_is_that_of_the_plain_loop(runner):
    cell = Cell("mini_resnet_bn", "embedded", "normal", ("contrast",), 5, "tent+fata", 3, 16, 48)
    result = runner.run(cell, lambda seen, accuracy: None)
    loaded = fata.zoo.load("mini_resnet_bn")
    stream = fata.stream(
        fata.data.open("embedded"), domains=["contrast"], batch_size=16, images=48, seed=3
    )
    settings = loaded.settings("tent+fata", batch=16)
    adapter = fata.adapt(loaded.model, "tent+fata", guard=None, seed=3, **settings)
    right = [(adapter(loaded.preprocess.normalise(b.images)).argmax(1) == b.labels) for b in stream]
    assert result["accuracy"] == pytest.approx(100 * torch.cat(right).float().mean().item())
    assert result["counts"] == adapter.counts
    assert result["rows"] == 48


def test_a_cell_with_a_window_learns_from_the_latest_images(runner):
    cell = Cell(
        "mini_resnet_bn", "embedded", "bs1", ("fog",), 5, "tent+fata", 3, images=12, window=4
    )
    result = runner.run(cell, lambda *_: None)
    loaded = fata.zoo.load("mini_resnet_bn")
    stream = fata.stream(fata.data.open("embedded"), "bs1", domains=["fog"], images=12, seed=3)
    settings = loaded.settings("tent+fata", batch=4)
    window = fata.Window(fata.adapt(loaded.model, "tent+fata", guard=None, seed=3, **settings), 4)
    right = [(window(loaded.preprocess(b.images)).argmax(1) == b.labels) for b in stream]
    assert result["accuracy"] == pytest.approx(100 * torch.cat(right).float().mean().item())
    counts, frozen = window.adapter.counts, window.rows_frozen
    assert counts["seen"] == 12  # each image once
    assert result["counts"] == {**counts, "rows_forward": counts["rows_forward"] + frozen}
    assert result["rows"] == 12
    assert "window=4" in str(cell)


def test_a_cell_is_reset_after_every_so_many_batches(runner):
    cell = Cell(
        "mini_resnet_bn", "embedded", "normal", ("fog",), 5, "tent", 3, 8, 48, reset_every=2
    )
    result = runner.run(cell, lambda *_: None)
    assert result["counts"]["reset"] == 2  # of six batches
    never = dataclasses.replace(cell, reset_every=None)
    assert runner.run(never, lambda *_: None)["counts"]["reset"] == 0
    assert "reset_every=2" in str(cell)


def test_only_what_learns_is_reset():
    methods = ("source", "norm", "memo", "neo", "tent", "fata", "cotta")
    found = cells_of(methods=methods, domains=("fog",), reset_every=5)
    assert {cell.method: cell.reset_every for cell in found} == {
        **dict.fromkeys(("source", "norm", "memo")),
        **dict.fromkeys(("neo", "tent", "fata", "cotta"), 5),
    }


def test_ranks_cannot_share_a_window():
    (cell,) = cells_of(methods=("tent",), domains=("fog",), window=4)
    torchrun.check(None, [cell])
    with pytest.raises(GridError, match="window"):
        torchrun.check(object(), [cell])


# -- summaries ----------------------------------------------------------------------------------


def rows_of(label, prediction, **columns):
    label, prediction = torch.as_tensor(label), torch.as_tensor(prediction)
    plain = {
        "confidence": torch.ones(len(label)),
        "entropy": torch.zeros(len(label)),
        "host": torch.ones(len(label), dtype=torch.bool),
        "plus": torch.zeros(len(label), dtype=torch.bool),
    }
    return summary.Rows(label, prediction, **{**plain, **columns})


def ends(rows):
    """Of batches of 64."""
    return [*range(64, rows, 64), rows]


def test_a_collapse_is_found_where_it_begins():
    label = torch.arange(6400) % 10
    prediction = label.clone()
    prediction[3200:] = 7
    at = summary.collapsed_at(rows_of(label, prediction), ends(len(label)))
    assert 40 <= at <= 55


def test_a_stream_of_one_class_is_no_collapse():
    label = torch.full((6400,), 3)
    assert summary.collapsed_at(rows_of(label, label), ends(len(label))) is None


def test_a_collapse_is_found_where_classes_come_one_after_another():
    label = torch.arange(10_000) // 1000
    prediction = label.clone()
    assert summary.collapsed_at(rows_of(label, prediction), ends(len(label))) is None
    prediction[5000:] = 3
    assert summary.collapsed_at(rows_of(label, prediction), ends(len(label))) is not None


def test_a_model_that_comes_back_has_not_collapsed():
    label = torch.arange(6400) % 10
    prediction = label.clone()
    prediction[1000:3000] = 7
    assert summary.collapsed_at(rows_of(label, prediction), ends(len(label))) is None


def test_calibration_is_the_gap_between_sure_and_right():
    label = torch.zeros(1000, dtype=torch.long)
    prediction = (torch.arange(1000) % 4 == 0).long()  # three in four are right
    rows = rows_of(label, prediction, confidence=torch.full((1000,), 0.95))
    assert summary.calibration_error(rows) == pytest.approx(20, abs=1e-4)


def test_calibration_gaps_of_either_side_do_not_cancel():
    label = torch.zeros(1000, dtype=torch.long)
    prediction = (torch.arange(1000) >= 500).long()  # the first half is right
    confidence = torch.where(prediction == 0, 0.6, 0.4)
    rows = rows_of(label, prediction, confidence=confidence)
    assert summary.calibration_error(rows) == pytest.approx(40, abs=1e-4)


def test_batches_that_are_short_in_the_midst_are_counted():
    """As where a domain ends; the guard's events have these numbers."""
    stops = sorted({*range(100, 1600, 100), *range(64, 1500, 100)})  # 64, 36, 64, 36, ...
    label = torch.arange(1500) % 10
    prediction = torch.where(torch.arange(1500) < 800, label, 7)
    rows = rows_of(label, prediction)
    assert summary.curve(rows, {}, stops)["batch"] == list(range(1, 31))
    assert summary.curve(rows, {}, stops)["accuracy"][:16] == [100] * 16
    assert 12 <= summary.collapsed_at(rows, stops) <= 18


def test_answers_that_are_no_numbers_are_wrong():
    """And leave no NaN among the figures; a class that is masked out is no harm."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[9.0, 0, 0], [nan, 0, 0], [inf, inf, 0], [9.0, -inf, 0], [0, 9.0, 0]])
    rows = summary.Rows(*_columns(logits, torch.zeros(5, dtype=torch.int64), {}))
    assert rows.right.tolist() == [True, False, False, True, False]
    assert rows.confidence[1:3].tolist() == [0, 0]
    figures = summary.summary(rows, 3, ("tent",), [2, 5])
    assert "NaN" not in json.dumps(figures)
    assert figures["curve"]["entropy"][0] == pytest.approx(math.log(3) / 2, abs=0.01)


def test_a_curve_covers_the_stream_in_a_hundred_points():
    label = torch.zeros(64 * 250 + 5, dtype=torch.long)
    every = {"tent": torch.ones(len(label)).bool()}
    curve = summary.curve(rows_of(label, label), every, ends(len(label)))
    assert len(curve["batch"]) <= 100
    assert curve["batch"][-1] == 251
    assert curve["online"][-1] == 100


# -- runs ---------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_where_it_was(tmp_path, runner):
    cells = cells_of()
    whole, halves = Store(tmp_path / "whole.db"), Store(tmp_path / "halves.db")
    run(missing(cells, whole, runner, False), whole, runner, Notes())
    with pytest.raises(KeyboardInterrupt):
        run(missing(cells, halves, runner, False), halves, runner, Notes(stop_after=2))
    assert len(halves) == 2
    rest = Notes()
    run(missing(cells, halves, runner, False), halves, runner, rest)
    assert len(rest.ended) == len(cells) - 2
    assert lasting(halves) == lasting(whole)
    assert missing(cells, whole, runner, False) == []
    assert len(missing(cells, whole, runner, True)) == len(cells)


def test_processes_give_what_one_gives(tmp_path, runner):
    cells = cells_of()
    one, two = Store(tmp_path / "one.db"), Store(tmp_path / "two.db")
    run(missing(cells, one, runner, False), one, runner, Notes())
    notes = Notes()
    run(missing(cells, two, runner, False), two, runner, notes, jobs=2)
    assert len(notes.ended) == len(cells)
    figures = [  # the tests' own kernels are not those of a new process: no equality of bits
        {name: (r["accuracy"], r["counts"]) for name, r in lasting(store).items()}
        for store in (one, two)
    ]
    assert figures[0] == figures[1]


def test_fast_cells_alike_share_an_adapter_and_what_it_recorded(monkeypatch):
    def cell(seed, speed="fast", method="sar+fata"):
        at = ("contrast" if seed else "fog",)
        return Cell(
            "mini_resnet_gn", "embedded", "normal", at, 5, method, seed, 16, 48, speed=speed
        )

    def told(runner, cells):
        results = [runner.run(one, lambda *_: None) for one in cells]
        return [(r["accuracy"], r["counts"], r["classes"]) for r in results]

    made, real = [], Cell.adapter
    monkeypatch.setattr(Cell, "adapter", lambda *a, **k: made.append(a[0]) or real(*a, **k))
    alone = [told(CellRunner(), [one])[0] for one in (cell(0), cell(1), cell(1))]
    made.clear()
    runner = CellRunner()
    assert told(runner, [cell(0), cell(1), cell(1)]) == alone
    assert len(made) == 1
    told(runner, [cell(0, "exact"), cell(0, method="tent"), cell(0, method="tent")])
    assert len(made) == 3


def test_operations_are_counted_once_for_what_takes_as_many(monkeypatch):
    runner, counted, real = CellRunner(), [], passes
    monkeypatch.setattr("fata.bench.run.runner.passes", lambda *g: counted.append(1) or real(*g))
    times = []
    hosts = ("deyo", "tent", "deyo+fata", "sar+fata")
    for method in (*hosts, "norm", "eata:fisher_alpha=0", "source"):
        (cell,) = cells_of(methods=(method,), domains=("fog",))
        own = CellRunner().run(cell, lambda *_: None)["macs"]
        counted.clear()
        assert runner.run(cell, lambda *_: None)["macs"] == own
        times.append(len(counted))
    # three hosts learn the same layers, FATA has a tail; norm and source learn none, EATA more
    assert times == [1, 0, 1, 0, 1, 1, 0]


def test_progress_tells_how_many_were_right_so_far(runner, monkeypatch):
    """Of half a second ago, so that nobody waits for the device."""
    clock = iter(range(100))
    monkeypatch.setattr("fata.bench.run.measure.time.perf_counter", lambda: next(clock))
    (cell,) = cells_of(methods=("norm",), domains=("fog",), images=64)
    told = []
    result = runner.run(cell, lambda *now: told.append(now))
    assert [seen for seen, _ in told] == list(range(8, 64, 8))
    assert result["accuracy"] - 100 / 8 <= 100 * told[-1][1] * 56 / 64 <= result["accuracy"]


def test_a_runner_sent_to_a_process_sets_the_precision_there():
    sent = pickle.dumps(CellRunner("cuda"))
    torch.set_float32_matmul_precision("highest")
    try:
        pickle.loads(sent)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, runner, monkeypatch):
    cells = cells_of()
    store, notes, real = Store(tmp_path / "r.db"), Notes(), CellRunner.run

    def fragile(self, cell, tick, following):
        if cell.method == "tent":
            raise RuntimeError("no memory")
        return real(self, cell, tick, following)

    monkeypatch.setattr(CellRunner, "run", fragile)
    run(missing(cells, store, runner, False), store, runner, notes)
    assert {cell.method for cell in notes.ended} == {"norm"}
    assert [why for _, why in notes.failures] == ["RuntimeError: no memory"] * 2


@pytest.mark.slow
def test_a_killed_run_loses_the_running_cell_at_most(tmp_path):
    command = [
        *(sys.executable, "-m", "fata", "bench", "--model", "mini_resnet_bn"),
        *("--methods", "norm,tent,tent+fata", "--domains", "contrast,fog", "--images", "24"),
        *("--batch-size", "8", "--store", str(tmp_path / "r.db")),
    ]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        if (tmp_path / "r.db").exists() and len(Store(tmp_path / "r.db")) >= 1:
            os.kill(running.pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    running.wait()
    kept = lasting(Store(tmp_path / "r.db"))
    assert 1 <= len(kept) < 6
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = lasting(Store(tmp_path / "r.db"))
    assert len(after) == 6
    assert {name: after[name] for name in kept} == kept


def family(pid):
    """The processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def lives(pid):
    """Whether a process runs; one that has ended may wait to be asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)], ids=["SIGTERM", "kill -9"]
)
def test_workers_end_with_the_process_that_started_them(tmp_path, how, code):
    command = [
        *(sys.executable, "-m", "fata", "bench", "--model", "mini_resnet_bn", "--jobs", "2"),
        *("--methods", "tent,tent+fata", "--store", str(tmp_path / "r.db")),
    ]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert "cells" in running.stdout.readline()
        while len(workers := family(running.pid)) < 3:  # two, and one that tracks resources
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(how)
        said, _ = running.communicate(timeout=120)
        assert running.returncode == code
        assert ("the same command continues" in said) == (how == signal.SIGTERM)
        deadline = time.monotonic() + 120
        while any(map(lives, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(lives, workers))
    finally:
        running.kill()


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(self, *_):
        with self._errors():
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "put", full)
    arguments = ("--model", "mini_resnet_bn", "--methods", "source", "--domains", "fog")
    told = bench(*arguments, "--images", 8, "--store", tmp_path / "r.db")
    assert told.exit_code == 1
    assert isinstance(told.exception, SystemExit)  # no traceback
    assert "0 of 1 cells are kept" in told.output
    assert "disk is full" in told.output


def test_a_module_beside_is_never_taken_for_an_installed_one(tmp_path, monkeypatch):
    """Only where a method is named by its module is the current folder looked in, and last."""
    (tmp_path / "yaml.py").write_text("raise SystemExit('the module beside was run')")
    mine = "import fata\nclass Mine(fata.Tent): name = 'mine'\n"
    (tmp_path / "my_module_beside.py").write_text(mine)
    grid = tmp_path / "grid.yaml"
    for methods in ("source", "my_module_beside:Mine"):
        grid.write_text(f"models: mini_resnet_bn\nimages: 8\ndomains: fog\nmethods: {methods}\n")
        script = "from fata.cli import run; run()"  # as the installed command, unlike python -m
        command = [sys.executable, "-P", "-c", script, "bench", "--config", grid, "--dry-run"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"fog-5 {methods} #0" in done.stdout


# -- the command --------------------------------------------------------------------------------


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_command_runs_shows_and_resumes(tmp_path):
    arguments = (
        *("--model", "mini_resnet_bn", "--methods", "source,norm", "--domains", "contrast"),
        *("--images", 24, "--store", tmp_path / "r.db"),
    )
    first = bench(*arguments)
    assert first.exit_code == 0, first.output
    assert "2 cells, 0 of them" in first.output
    assert "norm" in first.output
    assert "2 cells, 2 of them" in bench(*arguments).output
    windowed = bench(*arguments, "--scenario", "bs1", "--window", 3, "--images", 6)
    assert "2 cells, 0 of them" in windowed.output
    assert {r.protocol.get("window") for r in Store(tmp_path / "r.db")} == {None, 3}
    dry = bench(*arguments, "--dry-run", "--seeds", 2).output
    assert dry.count("#1") == 2
    assert "about 0:00:" in dry
    assert len(Store(tmp_path / "r.db")) == 4


@pytest.mark.parametrize(
    ("domain", "pictures", "said"),
    [("frost", False, True), ("frost", True, False), ("fog", False, False)],
)
def test_procedural_frost_is_announced(tmp_path, monkeypatch, domain, pictures, said):
    """Figures with it are others than those with images."""
    if not pictures:
        monkeypatch.setattr("fata.corruptions.weather._frost_folder", lambda: None)
    arguments = ("--model", "mini_resnet_bn", "--methods", "source", "--domains", domain)
    result = bench(*arguments, "--images", 8, "--store", tmp_path / "r.db", "--dry-run")
    assert result.exit_code == 0, result.output
    assert ("frost is procedural" in result.output) == said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "give --model"),
        (("--model", "nope"), "unknown model"),
        (("--model", "mini_vit", "--methods", "tnt"), "unknown method"),
        (("--model", "mini_vit", "--data", "folder:nowhere"), "no folder"),
        (("--model", "mini_vit", "--severity", "6"), "severity"),
        (("--model", "mini_vit", "--device", "abacus"), "no device 'abacus'"),
        (("--model", "mini_vit", "--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_wrong_input_is_told_with_exit_code_2(tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    result = bench(*arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())


def test_each_set_of_parameters_has_its_own_fisher(monkeypatch):
    monkeypatch.setattr("fata.bench.run.runner.FISHER_IMAGES", 8)
    runner = CellRunner()
    for fields in ({}, {"params": "norm-truncated"}):
        cell = Cell("mini_resnet_bn", "embedded", "normal", ("fog",), 5, "eata", 0, 4, 4, fields)
        assert runner.run(cell, lambda *_: None)["counts"]["seen"] == 4
