"""What the speed benchmark sets up and writes; how fast anything is, no test asks."""

import json
import sys

import pytest
import torch
from benchmarks.plain import Plain
from benchmarks.share import Share

import fata
from benchmarks import scaling, share, speed


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    def called(module, *arguments):
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--json", str(file)])
        module.main()
        return capsys.readouterr().out, json.loads(file.read_text())

    return called


@pytest.mark.parametrize("net", fata.tiny.NAMES)
@pytest.mark.parametrize("spec", speed.SPECS)
def test_as_many_rows_as_were_asked_for(net, spec):
    torch.manual_seed(0)
    model, side = share.build(net)
    images = torch.randn(32, 3, side, side)
    share.spread(model, images)
    asked = Share(host=0.25, reliable=0.5, plus=0.75)
    adapter = fata.adapt(model, spec, **share.settings(model, spec, images, asked))
    for _ in range(3):
        adapter(images)
        rows = {term: int(chosen.sum()) for term, chosen in adapter.selected.items()}
        host = spec.partition("+")[0]
        assert rows.pop(host) == (32 if host == "tent" else 8)
        assert rows in ({}, {"fata": 24})


@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_a_single_image_is_learned_from(net):
    torch.manual_seed(0)
    model, side = share.build(net)
    image = torch.randn(1, 3, side, side)
    share.spread(model, image)
    fields = share.settings(model, "eata+fata", image, Share.of_all(0.4))
    adapter = fata.adapt(model, "eata+fata", **fields)
    assert adapter(image).isfinite().all()
    assert adapter.counts["selected"] == {"eata": 1, "fata": 1}
    assert adapter.counts["stepped"] == 1
    plain = Plain(share.build(net)[0], "eata+fata", **{**fields, "lr": 1e-3})
    before = [weight.clone() for weight in plain.theta]
    for _ in range(2):
        assert plain(image).isfinite().all()
    assert any((weight != old).any() for weight, old in zip(plain.theta, before, strict=True))


def test_the_embedded_benchmarks_own_shares():
    found = share.embedded("mini_resnet_gn", "deyo+fata")
    assert 0 < found.host < found.plus == pytest.approx(found.reliable, abs=0.01)
    assert share.embedded("mini_vit", "tent").host == 1
    with pytest.raises(ValueError, match="resnet50_gn"):
        share.embedded("resnet50_gn", "tent")


def test_a_line_a_method(call):
    printed, found = call(
        speed, "--models", "resnet_gn", "--methods", "eata", "eata+fata", "--batch", "8",
        "--share", "0.5", "--rounds", "2",
    )  # fmt: skip
    host, plus = found["lines"]
    assert (host["method"], plus["method"]) == ("eata", "eata+fata")
    assert host["selected"] == {"eata": 0.5}
    assert plus["selected"] == {"eata": 0.5, "fata": 0.5}
    assert list(plus["ways"]) == ["plain", "exact", "fast"]
    assert plus["ways"]["plain"]["over_plain"] == 1
    assert host["ways"]["exact"]["over_host"] is None
    assert plus["ways"]["exact"]["over_host"] > 0
    assert f"| {plus['ways']['exact']['over_plain']:.2f} |" in printed


@pytest.mark.parametrize(
    ("net", "rounds", "guard", "checked"),
    [
        ("resnet_gn", "3", "settled", 1 / 16),
        ("resnet_bn", "1", "settled", 2 / 16),
        ("resnet_bn", "1", "first", 47 / 256),
    ],
)
def test_whole_turns_of_the_guards_checks(call, net, rounds, guard, checked):
    turns = ["--rounds", rounds, "--batch", "64", "--speeds", "exact"]
    _, found = call(speed, "--models", net, "--methods", "eata", "--guard", guard, *turns)
    (line,) = found["lines"]
    assert line["checked"] == checked


def test_a_network_that_is_none(call, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(speed, "--models", "resnet_xx")
    assert stopped.value.code == 2
    assert "resnet_xx" in capsys.readouterr().err


def test_growth_is_a_power():
    points = [{"side": side, "seconds": side**2.0, "bytes": side**4} for side in (16, 32, 64)]
    assert scaling.growth("side", points, "seconds") == ["", "1.00", "1.00"]
    assert scaling.growth("side", points, "bytes") == ["", "2.00", "2.00"]
    drawn = scaling.svg({"side": points})
    assert drawn.count("<polyline") == 2
    assert ">x 256<" in drawn


def test_every_size_is_measured(call, monkeypatch):
    monkeypatch.setattr(scaling, "AXES", {"batch": (1, 4)})
    printed, found = call(scaling, "--axes", "batch", "--rounds", "1", "--threads", "1")
    assert [point["batch"] for point in found["batch"]] == [1, 4]
    assert all(point["seconds"] > 0 for point in found["batch"])
    assert "| batch | ms |" in printed
