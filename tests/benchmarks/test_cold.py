"""The benchmark of a cold start runs every way, and counts what it says."""

import json
import sys

import pytest

from benchmarks import cold


def test_each_way_runs_in_a_process_of_its_own(monkeypatch, capsys, tmp_path):
    out = tmp_path / "cold.json"
    ways = ["warm", "plain"]
    asked = ["--networks", "resnet_gn", "--ways", *ways, "--images", "640"]
    monkeypatch.setattr(sys, "argv", ["cold", *asked, "--out", str(out)])
    cold.main()
    shown, said = capsys.readouterr()
    found = json.loads(out.read_text())
    assert [line["way"] for line in found] == ways
    for line in found:
        assert line["seen"] == 640
        assert 0 < line["seconds"]["64"] < line["seconds"]["640"]
        assert line["median"] <= line["p99.9"] <= line["longest_later"] <= line["longest"]
        assert f"| {line['network']} | {line['way']} |" in shown
        assert f"{line['network']} {line['way']}" in said
    (warm,) = (line for line in found if "warm_up" in line)
    assert warm["way"] == "warm"
    assert 0 < warm["warm_up"] < warm["seconds"]["64"]


def test_many_streams_on_one_network(monkeypatch, capsys):
    asked = ["--networks", "resnet_gn", "--streams", "1", "3", "--no-guard"]
    monkeypatch.setattr(sys, "argv", ["cold", *asked])
    cold.main()
    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "| network | 1 streams | 3 streams |"
    assert len(row.split("|")) == 5


def test_pictures_are_needed_for_trained_networks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cold", "--networks", "vit_tiny"])
    with pytest.raises(SystemExit):
        cold.main()
    assert "--assets" in capsys.readouterr().err
