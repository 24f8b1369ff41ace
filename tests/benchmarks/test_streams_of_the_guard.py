"""The benchmark of the guard: what a stream shows, what is counted, and what is written."""

import argparse
import json
import sys
from itertools import islice

import pytest
import torch

import fata
from benchmarks import evidence, guard, imagenet

MODEL = "mini_resnet_gn"


def case(stream, method="tent", rate=1, images=96):
    return guard.Case(MODEL, "embedded", stream, ("saturate",), method, rate, images)


def run(monkeypatch, *asked):
    monkeypatch.setattr(sys, "argv", ["guard", *map(str, asked)])
    guard.main()


def test_half_of_the_images_are_noise_and_do_not_count():
    plain, noisy = case("normal"), case("normal, half noise")
    for (images, labels, _), (other, same, count) in zip(
        plain.batches(), noisy.batches(), strict=True
    ):
        assert count.sum() == len(images) // 2
        assert torch.equal(images[count], other[count])
        assert not torch.isclose(images[~count], other[~count]).all(dim=(1, 2, 3)).any()
        assert torch.equal(labels, same)


def test_batches_are_those_of_the_stream_and_the_same_each_time():
    one = case("few-classes, pairs in turn", images=400)
    data = fata.data.open("embedded")
    stream = fata.stream(
        data, "few-classes", domains=["saturate"], images=400, classes=2, every=320
    )
    use = fata.zoo.load(MODEL).preprocess
    for _ in range(2):
        for batch, (images, labels, count) in zip(stream, one.batches(), strict=True):
            assert torch.equal(use.normalise(batch.images), images)
            assert torch.equal(batch.labels, labels)
            assert count.all()


def test_a_long_stream_shows_the_images_again_in_another_order(monkeypatch):
    assert guard.STREAMS["long"] == {"length": 50_000}
    monkeypatch.setitem(guard.STREAMS, "long", {"length": 250})
    images = torch.cat([images for images, _, _ in case("long", images=100).batches()])
    assert len(images) == 250
    means = images.mean((1, 2, 3))
    first, second = means[:100], means[100:200]
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def drawn(number, seed=0, **changes):
    """The first cases of a draw."""
    values = {"models": [MODEL], "data": "embedded", "images": 64, "judge": False}
    values |= {"device": "cpu", "speed": "exact", "assets": "", "streams": guard.DRAWN}
    values |= {"methods": guard.METHODS, "rates": (1, 10)}
    return list(islice(guard.cases(argparse.Namespace(**{**values, **changes}), seed), number))


def test_a_long_stream_is_drawn_only_if_it_is_asked_for():
    usual = drawn(300)
    assert {one.stream for one in usual} == set(guard.STREAMS) - {"long"}
    assert {one.rate for one in usual} == {1, 10}
    assert {(one.stream, one.rate) for one in drawn(30, streams=["long"])} == {("long", 1)}


def test_a_result_counts_what_the_adapters_predict():
    found = case("normal", "sar", rate=10).run()
    model = fata.zoo.load(MODEL).model
    right = sum((model(i).argmax(1) == labels).sum() for i, labels, _ in case("normal").batches())
    assert found["source"] == pytest.approx(100 * right.item() / 96)
    assert "norm" not in found  # no BatchNorm
    json.dumps(found)


def test_rates_of_imagenet_shrink_with_the_batch_and_eata_has_no_penalty(monkeypatch):
    given = {}
    monkeypatch.setattr(guard, "_loaded", lambda name, assets: fata.zoo.load(MODEL))
    monkeypatch.setattr(fata, "adapt", lambda model, spec, **fields: given.update(fields))
    rate = imagenet.RATES["resnet50"][0]
    for stream, batch in (("normal", 64), ("bs1", 1), ("normal, batches of 200", 200)):
        for method in ("eata", "deyo+fata", "auto"):
            one = guard.Case("resnet50", "", stream, ("fog",), method, 10, 64, assets="there")
            given.clear()
            one.adapter(guard=False)
            assert given["lr"] == pytest.approx(10 * rate * min(1, batch / 64))
            assert given.get("fisher_alpha") == (None if method == "deyo+fata" else 0)


def test_processes_write_whole_lines_and_report_what_fails(monkeypatch, tmp_path, capfd):
    file = tmp_path / "guard.jsonl"
    asked = {"models": [MODEL, "no_such_network"], "streams": ["normal"]}

    def starts(seed):  # the models of the first two cases
        return [one.model for one in drawn(2, seed, **asked)]

    bad_first = (s for s in range(100) if starts(s) == asked["models"][::-1])
    seed = next(s for s in bad_first if starts(s + 1)[0] == MODEL)
    which = ("--seed", seed, "--images", 64, "--seconds", 1, "--jobs", 2, "--file", file)
    run(monkeypatch, "--models", *asked["models"], "--streams", "normal", *which)
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert {one["model"] for one in found} == {MODEL}
    assert "no_such_network" in capfd.readouterr().err
    run(monkeypatch, "--show", file)
    shown = capfd.readouterr().out
    assert f"of {len(found)} streams (" in shown
    assert "below the better of source and norm; the worst" in shown


def test_networks_of_a_folder_are_known_by_name(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--assets", "there", "--models", MODEL)
    assert "vit_tiny" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["normal 8", "few-classes 4 in turn"])
def test_a_recording_has_the_batches_of_its_scenario(name):
    one = evidence.Recorded(MODEL, "embedded", name, ("saturate",), "tent", 1, 64)
    found = evidence.record(one, every=2)
    size = evidence.SCENARIOS[name].get("batch_size", 64)
    shown = [labels.tolist() for _, labels, _ in one.batches()][::2]
    assert [batch[0] for batch in found["batches"]] == shown
    assert {len(labels) for labels in shown} == {size}
    assert found["scenario"] == name
