"""The benchmark that changes the weights a little."""

import sys

import pytest
import torch

import fata
from benchmarks import chance


def test_a_nudge_is_as_large_as_was_asked_for_and_always_the_same():
    def nudged(by):
        model = fata.tiny.build("resnet_gn")
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        chance.nudge(model, by)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        return (after - before)[before != 0] / before[before != 0]

    assert not nudged(0).any()
    some = nudged(1e-3)
    assert 0.9e-3 < some.std() < 1.1e-3
    torch.testing.assert_close(nudged(-1e-3), -some, rtol=0, atol=2**-22)  # float32: 2^-24 a step


def test_a_column_a_nudge_and_no_cell_twice(tmp_path, monkeypatch, capsys):
    model, domain, store = "mini_resnet_bn", "fog", tmp_path / "chance.db"
    asked = ["--model", model, "--methods", "norm", "--domains", domain, "--images", "64"]
    nudges = ["--nudges=0,-0.5", "--store", str(store)]
    tables = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["chance", *asked, *nudges])
        chance.main()
        tables.append(capsys.readouterr().out.splitlines())
    name, plain, far, average = tables[0][-1].strip("| ").split(" | ")
    assert name == "norm, fog"
    assert float(plain) > float(far)
    mean = (float(plain) + float(far)) / 2
    assert float(average) == pytest.approx(mean, abs=0.011)  # each is rounded to 0.01
    assert tables[1] == tables[0][-3:]  # what was run is not run again
