"""Learning rates by `fata tune`."""

import torch
from typer.testing import CliRunner

from fata.bench.paired import pack
from fata.bench.store import Record, Store
from fata.bench.tune import Tuned, cells, spelled
from fata.commands.app import app
from fata.corruptions import EXTRA, NAMES


def record(accuracy, seed=0):
    right = torch.arange(400) < 4 * accuracy
    result = {"accuracy": accuracy, "rows": 400, "right": pack(right)}
    return Record("k", {"seed": seed}, {}, result, "")


def test_the_best_rate_and_those_as_good():
    found = Tuned("tent", {1e-4: [record(60.0)], 1e-3: [record(70.0)], 1e-2: [record(69.75)]})
    assert found.rate == 1e-3
    assert found.level == [1e-3, 1e-2]
    assert not found.at_edge
    assert found.spec == "tent:lr=0.001"
    assert Tuned("tent", {1e-4: [record(70.0)], 1e-3: [record(60.0)]}).at_edge


def test_rates_are_tried_on_corruptions_that_the_benchmark_does_not_have():
    tried = cells("mini_resnet_gn", spelled("tent", {"lr": 0.5}), images=8)
    assert [cell.domains for cell in tried] == [(name,) for name in EXTRA]
    assert not set(EXTRA) & set(NAMES)
    assert {cell.fields["lr"] for cell in tried} == {0.5}


def test_the_command_tries_chooses_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = ["tune", "--model", "mini_resnet_bn", "--methods", "tent", "--images", "16"]
    told += ["--rates", "1e-3,1e-5"]
    first = CliRunner().invoke(app, told)
    assert first.exit_code == 0, first.output
    assert "12 cells, 0 of them in tune.db" in first.output
    accuracies = {}
    for one in Store("tune.db"):
        rate = one.result["lr"]
        accuracies.setdefault(rate, []).append(one.result["accuracy"])
    best = max((1e-5, 1e-3), key=lambda rate: sum(accuracies[rate]))
    assert f"--methods source,tent:lr={best}" in first.output
    page = (tmp_path / "tune.html").read_text()
    assert "is the best rate" in page
    assert '"learning rate"' in page
    assert "12 cells, 12 of them" in CliRunner().invoke(app, told).output


def test_a_wrong_rate_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = ["tune", "--model", "mini_resnet_bn", "--methods", "tent", "--rates", "1e-3,fast"]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == 2
    assert "'fast'" in result.output


def test_a_method_without_a_rate_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = ["tune", "--model", "mini_resnet_bn", "--methods", "tent,source"]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == 2
    assert "'source' has no learning rate to tune" in " ".join(result.output.split())
    assert not (tmp_path / "tune.db").exists()
