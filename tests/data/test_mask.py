"""Class masks: a model of 1,000 classes on data with 200 of them."""

import copy
import math

import pytest
import torch
from tests.data.test_data import call, classes

import fata
from fata import tiny
from fata.bench.cell import Cell, key
from fata.bench.run.runner import CellRunner
from fata.network.logits import restrict
from fata.zoo.loaded import Loaded, Weights
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

KEPT = (1, 3, 8)


@pytest.mark.parametrize("output", [lambda x: x, lambda x: (x, 0), lambda x: {"logits": x}])
def test_a_restricted_model_gives_some_logits(output):
    class Model(torch.nn.Module):
        def forward(self, x):
            return output(x)

    net, logits = Model(), torch.arange(20.0).view(2, 10)
    handle = restrict(net, (8, 1))
    assert net(logits).tolist() == [[8, 1], [18, 11]]
    assert copy.deepcopy(net)(logits).tolist() == [[8, 1], [18, 11]]
    handle.remove()
    assert str(net(logits)) == str(output(logits))


@pytest.mark.parametrize("spec", ["tent", "eata", "sar+fata", "deyo+fata"])
@pytest.mark.parametrize("net", ["resnet_bn", "vit_ln"])
def test_a_method_sees_the_kept_classes_alone(net, spec):
    """It adapts as a network whose head has these rows alone: entropy, ln C and thresholds."""
    masked = tiny.build(net).double()
    small = copy.deepcopy(masked)
    head = [m for m in small.modules() if isinstance(m, torch.nn.Linear)][-1]
    head.weight = torch.nn.Parameter(head.weight[list(KEPT)].detach())
    head.bias = torch.nn.Parameter(head.bias[list(KEPT)].detach())
    restrict(masked, KEPT)
    fields = {"fisher_alpha": 0} if spec == "eata" else {}
    ours, theirs = (fata.adapt(m, spec, lr=0.01, **fields) for m in (masked, small))
    for seed in range(3):
        images = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).double()
        logits = ours(images)
        assert logits.shape == (16, len(KEPT))
        assert torch.allclose(logits, theirs(images), rtol=0, atol=1e-9)
    assert ours.counts == theirs.counts
    assert ours.layer == theirs.layer  # modules keep their names
    assert ours.trainable == theirs.trainable


def test_it_may_be_called_in_inference_mode_first():
    net = tiny.build("resnet_gn")
    restrict(net, KEPT)
    with torch.inference_mode():
        net(torch.rand(2, 3, 16, 16))
    adapted = fata.adapt(net, "tent")
    adapted(torch.rand(4, 3, 16, 16))
    assert adapted.counts["stepped"] == 1


# --- in a benchmark ------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """Three of ten classes, by lists; the same images by folders."""
    names = [f"class_{n}" for n in range(10)]
    classes(tmp_path / "real", *names, images=4)
    lines = [f"real/class_{c}/{i}.png {k}" for k, c in enumerate(KEPT) for i in range(4)]
    (tmp_path / "real_list.txt").write_text("\n".join(lines))
    return f"domainnet:{tmp_path}"


@pytest.fixture
def runner(monkeypatch):
    net = tiny.build("resnet_gn").eval()
    use = Preprocess(32, 32, "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    loaded = Loaded("net", net, use, 10, Weights("none", "here", "0" * 32))
    monkeypatch.setattr(CellRunner, "_load", lambda self, name: loaded)
    return CellRunner(workers=0)


def test_a_masked_cell_is_scored_among_its_classes(runner, data):
    cell = Cell("net", data, "normal", ("real",), 5, "tent+fata", 0, 4, fields={"lr": 1e-3})
    result = runner.run(cell, lambda *_: None)
    assert len(result["classes"]["images"]) == len(KEPT)
    assert result["classes"]["images"] == [4, 4, 4]
    net = runner.model("net").model
    assert net(torch.rand(1, 3, 32, 32)).shape == (1, 10)  # the mask is gone
    dataset = runner.data(data, "net")
    dataset.restrict(net)
    adapter = fata.adapt(net, "tent+fata", lr=1e-3, guard=None)
    right = 0
    for batch in cell.stream(dataset):
        logits = adapter(runner.model("net").preprocess(batch.images))
        right += (logits.argmax(1) == batch.labels).sum().item()
    assert result["accuracy"] == pytest.approx(100 * right / 12)
    assert result["counts"] == adapter.counts
    assert max(result["curve"]["entropy"]) <= math.log(3)


def test_cells_with_and_without_a_mask_share_a_model(runner, data, tmp_path):
    folders = f"folder:{tmp_path}"
    accuracies = {}
    for spec in (data, folders, data):
        cell = Cell("net", spec, "normal", ("real",), 5, "source", 0)
        result = runner.run(cell, lambda *_: None)
        again = accuracies.setdefault(spec, result["accuracy"])
        assert result["accuracy"] == again
        assert len(result["classes"]["images"]) == (3 if spec == data else 10)


def test_each_mask_has_its_own_fisher(runner, data, tmp_path, monkeypatch):
    """The clean images have all classes; the logits are those of the cell."""
    monkeypatch.setattr("fata.bench.run.runner.FISHER_IMAGES", 8)
    runner.fisher = f"folder:{tmp_path / 'real'}"
    for spec in (data, f"folder:{tmp_path}", data):
        runner.run(Cell("net", spec, "normal", ("real",), 5, "eata", 0), lambda *_: None)
    masked, plain = runner._fishers.values()
    assert masked.keys() == plain.keys()
    assert not any(torch.equal(masked[name], plain[name]) for name in masked)


def test_the_mask_is_a_part_of_the_protocol(runner, data, tmp_path):
    cell = Cell("net", data, "normal", ("real",), 5, "source", 0)
    protocol = runner.protocol(cell)
    assert protocol["classes"] == 3
    assert protocol["data"]["mask"].startswith("3 of 10 classes, ")
    lists = tmp_path / "real_list.txt"
    lists.write_text(lists.read_text().replace("class_8", "class_9"))
    assert key(CellRunner(workers=0).protocol(cell)) != key(protocol)
    plain = runner.protocol(Cell("net", f"folder:{tmp_path}", "normal", ("real",), 5, "source", 0))
    assert plain["classes"] == 10
    assert set(plain["data"]) == {"data", "images"}  # as before there were masks


def test_the_command_shows_the_mask(data):
    assert "mask: a model of 10 classes is restricted to the logits of these" in call(data)[1]


def test_data_without_a_mask_restricts_nothing():
    data = fata.data.open("embedded")
    assert data.mask is None
    assert data.restrict(tiny.build("resnet_gn")) is None
