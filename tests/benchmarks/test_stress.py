"""What the stress test shows a network, and how it judges; how well the guard does, nobody asks."""

import sys

import pytest
import torch
from benchmarks.ordeals import BATCH, CLASS, NORM, ORDEALS, Scene
from benchmarks.stress import Line, Outcome, Run

import fata
from benchmarks import endurance, ordeals, stress

NET = "mini_resnet_gn"


@pytest.fixture(scope="module")
def scene():
    return Scene(NET, images=2 * BATCH, batches=20)


@pytest.fixture
def still(scene):
    adapter = fata.adapt(scene.loaded.model, "source")
    yield adapter
    adapter.unwrap()


def pixels(scene, images):
    """In [0, 1] again."""
    mean, std = (
        torch.tensor(values).view(3, 1, 1)
        for values in (scene.loaded.preprocess.mean, scene.loaded.preprocess.std)
    )
    return images * std + mean


def parts(scene, adapter, name):
    found = {}
    for batch in ORDEALS[name].stream(scene, adapter):
        found.setdefault(batch.part, []).append(batch)
    return found


def same(batches, others):
    return all(torch.equal(a.images, b.images) for a, b in zip(batches, others, strict=True))


def test_one_class_comes_alone_and_then_all(scene, still):
    found = parts(scene, still, "one-class")
    alone, after = found["one class"], found["afterwards"]
    assert len(alone) == 20
    assert all((batch.labels == CLASS).all() and len(batch.images) == BATCH for batch in alone)
    every, labels = scene.pixels(ordeals.CORRUPTION)
    own = scene.normalise(every[labels == CLASS])
    shown = torch.cat([batch.images for batch in alone]).unique(dim=0)
    assert len(shown) == len(own)  # all of the class were shown, and nothing else
    assert torch.equal(shown, own.unique(dim=0))
    assert torch.cat([batch.labels for batch in after]).unique().tolist() == list(range(10))


def test_grey_is_one_image(scene, still):
    found = parts(scene, still, "constant")
    grey = torch.cat([batch.images for batch in found[""]])
    torch.testing.assert_close(pixels(scene, grey), torch.full_like(grey, 0.5))
    assert len(grey) == 2 * BATCH
    assert all(batch.labels is None for batch in found[""])
    assert same(found["afterwards"], scene.shuffled())


def test_noise_says_nothing_and_never_twice_the_same(scene, still):
    found = parts(scene, still, "noise")
    images = pixels(scene, torch.cat([batch.images for batch in found[""]]))
    assert images.min() > -1e-5
    assert images.max() < 1 + 1e-5
    neighbours = torch.stack((images[..., 1:].flatten(), images[..., :-1].flatten()))
    assert neighbours.corrcoef()[0, 1].abs() < 0.02
    assert len(images.unique(dim=0)) == len(images)
    assert same(found["afterwards"], scene.shuffled())


def test_corruptions_take_lock(scene, still):
    (found,) = parts(scene, still, "turning").values()
    one, other = (list(scene.shuffled(name)) for name in (ordeals.CORRUPTION, ordeals.OTHER))
    assert same(found, [*one, *other] * 2)
    assert not same(one, other)


def test_images_come_one_by_one(scene, still, monkeypatch):
    monkeypatch.setattr(ordeals, "SINGLES", 5)
    (found,) = parts(scene, still, "single").values()
    (whole, *_) = scene.shuffled()
    assert [len(batch.images) for batch in found] == [1] * 5
    assert torch.equal(torch.cat([batch.images for batch in found]), whole.images[:5])


@pytest.mark.parametrize("spec", ["tent", "deyo+fata"])
def test_rates_are_the_packages_times_so_much(scene, spec):
    own = scene.loaded.settings(spec)
    assert ORDEALS["turning"].settings(scene, spec) == own
    for name, factor in (("rate-10", 10), ("rate-100", 100), ("single", 1 / 64)):
        lr = ORDEALS[name].settings(scene, spec)["lr"]
        assert lr == pytest.approx(factor * own["lr"])


def test_the_adversary_changes_little_and_gets_its_class(scene):
    few = scene.pixels(ordeals.CORRUPTION)[0][:16]
    model = scene.loaded.model
    images = ordeals.crafted(scene, model, few)
    change = pixels(scene, images) - few
    assert change.abs().max() <= NORM + 1e-5
    assert pixels(scene, images).min() > -1e-5
    assert pixels(scene, images).max() < 1 + 1e-5
    with torch.no_grad():
        before, after = (
            model(some).softmax(1)[:, CLASS] for some in (scene.normalise(few), images)
        )
    assert (after >= before).all()
    assert after.mean() > 0.5 > before.mean()  # most become its class


@pytest.mark.parametrize(("name", "first"), [("adversary", 0), ("adversary-late", 1)])
def test_the_adversary_aims_at_the_model_as_it_stands(scene, monkeypatch, name, first):
    """Every other batch is its own; the others are as they were, and are what counts."""
    aimed = []

    def crafted(scene, model, pixels):
        aimed.append(next(model.parameters()).sum().item())
        return -scene.normalise(pixels)

    monkeypatch.setattr(ordeals, "crafted", crafted)
    longer = Scene(NET, images=4 * BATCH)
    adapter = fata.adapt(longer.loaded.model, "tent", lr=0.1, params="norm", guard=None)
    theirs, ours = [], []
    for number, batch in enumerate(ORDEALS[name].stream(longer, adapter)):
        (theirs if number % 2 == first else ours).append(batch)
        with torch.no_grad():
            next(adapter.model.parameters()).add_(1)
    assert len(set(aimed)) == len(aimed) == 2
    assert all(batch.labels is None for batch in theirs)
    assert same(ours, list(longer.shuffled())[1 - first :: 2])
    adapter.reset()
    adapter.unwrap()


def line(**changed):
    usual = {"still": {"source": 60.0, "norm": 70.0}, "free": 20.0, "held": 69.5, "finite": True}
    return Line(
        **{"ordeal": "single", "part": "", "model": NET, "method": "tent", "events": []}
        | usual
        | changed
    )


def test_the_verdict():
    assert line().holds
    assert line(held=69.0).holds
    assert not line(held=68.9).holds  # though better than the source
    assert line(held=59.5, still={"source": 60.0}).holds
    assert not line(finite=False).holds
    text = stress.table([line(events=["back at 3", "rest at 9"]), line(held=1.0, part="after")])
    fine, bad = ([cell.strip() for cell in row.split("|")] for row in text.splitlines()[2:])
    assert fine[1:-1] == [
        *("single", NET, "tent", "60.00", "70.00", "20.00", "69.50", "-0.50"),
        *("2", "rest at 9", "holds"),
    ]
    assert bad[1] == "single: after"
    assert bad[-2] == "**does not hold**"


def test_the_worst_of_the_methods_is_told():
    own = [line(), line(method="sar", free=60.0, held=40.0), line(ordeal="noise", free=0.0)]
    rows = [[cell.strip() for cell in row.split("|")] for row in stress.worst(own).splitlines()[2:]]
    assert rows == [
        ["", "single", NET, "2", "1", "-50.00", "-30.00", ""],
        ["", "noise", NET, "1", "1", "-70.00", "-0.50", ""],
    ]


def test_an_adversary_that_does_no_harm_is_told_of():
    weak, strong = (line(ordeal="adversary", free=free) for free in (69.5, 20.0))
    assert "no harm" in stress.summary([weak])
    assert "no harm" not in stress.summary([strong, line(free=69.5)])
    assert "in 1 of 2 lines" in stress.summary([strong, line(held=0.0)])


def test_each_part_is_held_against_not_adapting_in_that_part():
    def run(spec, guard=False):
        return Run(Scene(NET), "one-class", spec, guard)

    def outcome(first, second, events=()):
        return Outcome({"one class": first, "afterwards": second}, True, list(events))

    found = stress.lines(
        {
            run("source"): outcome(80.0, 50.0),
            run("norm"): outcome(10.0, 70.0),
            run("tent"): outcome(90.0, 0.0),
            run("tent", True): outcome(80.0, 60.0, ["back at 2"]),
        }
    )
    assert [(f.part, f.free, f.held, f.margin) for f in found] == [
        ("one class", 90.0, 80.0, 0.0),
        ("afterwards", 0.0, 60.0, -10.0),
    ]
    assert [f.holds for f in found] == [True, False]


def test_the_command_counts_what_is_right(scene, monkeypatch, capsys):
    arguments = ["--models", NET, "--methods", "tent", "--only", "rate-10", "--images", "64"]
    monkeypatch.setattr(sys, "argv", ["stress", *arguments])
    stress.main()
    row = capsys.readouterr().out.splitlines()[2].split("|")
    (batch,) = Scene(NET, images=64).shuffled()
    with torch.no_grad():
        right = scene.loaded.model(batch.images).argmax(1) == batch.labels
    # The first batch is answered before anything is learned.
    assert [float(row[i]) for i in (4, 6, 7)] == [round(100 * right.float().mean().item(), 2)] * 3


@pytest.mark.parametrize("wrong", [["--batches", "0"], ["--data", "nowhere"], ["--images", "0"]])
def test_wrong_input_is_refused(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stress", *wrong])
    with pytest.raises(SystemExit) as stopped:
        stress.main()
    assert stopped.value.code == 2
    assert wrong[0].strip("-") in capsys.readouterr().err


def test_a_long_stream_is_learned_from_to_its_end():
    one = endurance.adapter("resnet_gn", "deyo+fata", 2, 8, "cpu")
    marks = list(endurance.endure(one, 40, 2, 8))
    assert [mark.batches for mark in marks] == [1, 4, 20, 40]
    assert 20 < marks[-1].stepped <= 40
    assert marks[-1].stepped > marks[-2].stepped
