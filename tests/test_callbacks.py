"""Callbacks are told of every batch that is learned from."""

import sys
import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

import fata
from fata.testing.cases import images, network

BATCHES = images(48, seed=2).split(8)


class Kept:
    def __init__(self):
        self.records = []

    def on_step(self, record):
        self.records.append(record)


def adapted(*callbacks, **fields):
    given = {"lr": 0.05, "guard": fata.Guard(every=2, level=1.0), **fields}
    return fata.adapt(network("resnet_gn"), "sar+fata", callbacks=callbacks, **given)


def test_a_record_says_what_a_batch_came_to():
    kept = Kept()
    one = adapted(kept)
    for batch in BATCHES:
        logits = one(batch)
        latest = kept.records[-1]
        if not latest.source_predicted:
            rows = {term: int(rows.sum()) for term, rows in one.selected.items()}
            assert latest.selected == rows
        assert latest.stepped == one.counts["stepped"]
        assert latest.phase == one.guard.phase
        assert latest.health == one.health
        probabilities = logits.softmax(1)
        entropy = -(probabilities * probabilities.log()).sum(1).mean()
        torch.testing.assert_close(torch.tensor(latest.entropy), entropy)
    assert [r.batch for r in kept.records] == [1, 2, 3, 4, 5, 6]
    assert {r.rows for r in kept.records} == {8}
    assert len({r.health for r in kept.records}) > 2  # some of the batches are checked
    events = [event for record in kept.records for event in record.events]
    assert events == one.guard.events
    with one.frozen():
        one(BATCHES[0])
    assert len(kept.records) == 6


def test_a_batch_that_is_not_learned_from_has_no_events():
    """All its pixels are NaN; the event before it is not told twice."""
    kept = Kept()
    one = fata.adapt(network("resnet_bn"), "tent", callbacks=[kept])
    one(BATCHES[0])  # eight images are too few for BatchNorm's statistics
    one(BATCHES[0] * torch.nan)
    assert [[event.action for event in record.events] for record in kept.records] == [["aside"], []]


@pytest.mark.parametrize("net", ["resnet_gn", "resnet_bn"])
def test_the_loss_is_what_was_minimised(net):
    """Of TENT the mean entropy before the step; None where no step was taken."""
    kept = Kept()
    given = {"lr": 0.05, "guard": None, "callbacks": [kept]}
    one = fata.adapt(network(net), "tent", **given)
    for batch in BATCHES:
        one(batch)
        assert kept.records[-1].loss == pytest.approx(kept.records[-1].entropy, rel=1e-4)
    none = fata.adapt(network(net), "sar", threshold=1e-6, **given)
    none(BATCHES[0])
    assert kept.records[-1].loss is None or net == "resnet_bn"
    both = fata.adapt(network(net), "tent+fata", **given)
    both(BATCHES[0])
    assert both.selected["fata"].any()
    assert kept.records[-1].loss > kept.records[-1].entropy
    with both.frozen():
        both(BATCHES[1])
    assert both._live().loss is None


def test_they_change_nothing():
    ours, theirs = adapted(Kept()), adapted()
    for batch in BATCHES:
        assert torch.equal(ours(batch), theirs(batch))


def test_a_copy_has_the_same(tmp_path):
    """They may hold what cannot be copied; `export` copies the adapter too."""
    kept = Kept()
    kept.lock = threading.Lock()
    one = adapted(kept)
    one(BATCHES[0])
    deepcopy(one)(BATCHES[1])
    assert [r.batch for r in kept.records] == [1, 2]
    one.export(tmp_path / "model.pt2")


def test_without_a_guard_the_phase_is_off():
    kept = Kept()
    adapted(kept, guard=None)(BATCHES[0])
    assert kept.records[0].phase == "off"
    assert kept.records[0].health is None
    assert not [name for name in fata.callbacks.numbers(kept.records[0]) if "health" in name]


def test_weights_and_biases_and_mlflow_are_called(monkeypatch):
    """Stand-ins with the functions that they document."""
    logged = []
    for name, function in (("wandb", "log"), ("mlflow", "log_metrics")):

        def log(found, step, name=name):
            logged.append((name, step, found))

        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{function: log}))
    one = adapted(fata.callbacks.WeightsAndBiases(), fata.callbacks.MLflow())
    for batch in BATCHES[:2]:
        one(batch)
    assert [(name, step) for name, step, _ in logged] == [
        ("wandb", 1),
        ("mlflow", 1),
        ("wandb", 2),
        ("mlflow", 2),
    ]
    assert logged[0][2]["fata/phase"] == "adapting"
    assert logged[1][2]["fata/rows"] == 8
    assert all(isinstance(value, float) for value in logged[1][2].values())
    for _, _, found in logged[2:]:
        assert found["fata/health_source"] == one.health.source
        assert found["fata/health_adapted"] == one.health.adapted
        assert found["fata/health_gain"] == one.health.gain


def test_tensorboard_reads_what_is_written(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    board = fata.callbacks.TensorBoard(tmp_path)
    one = adapted(board)
    for batch in BATCHES:
        one(batch)
    board.writer.close()
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [e.step for e in found.Scalars("fata/entropy")] == [1, 2, 3, 4, 5, 6]
    assert found.Scalars("fata/stepped")[-1].value == one.counts["stepped"]


def test_prometheus_metrics_are_counted():
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    registry = client.CollectorRegistry()
    one = adapted(fata.callbacks.Prometheus("door", registry))
    for batch in BATCHES:
        one(batch)
    text = client.generate_latest(registry).decode()
    assert 'fata_images_total{stream="door"} 48.0' in text
    assert 'fata_entropy{stream="door"}' in text
    for model in ("source", "adapted"):
        found = registry.get_sample_value("fata_health", {"stream": "door", "model": model})
        assert found == getattr(one.health, model)


def test_what_cannot_be_told_of_a_batch_is_refused():
    with pytest.raises(TypeError, match=r"print.* has no on_step"):
        adapted(print)
