"""Class balance: equal parts for all predicted classes, and what that does to a stream."""

import pytest
import torch

import fata
from fata.methods.balance import mean_prediction, rarity
from fata.methods.base import Batch
from fata.methods.losses import weighted_mean
from fata.methods.selection import Selection


def sure_of(*labels, classes=4, logit=60.0):
    """A batch that is predicted to be of these classes, without doubt."""
    logits = logit * torch.nn.functional.one_hot(torch.tensor(labels), classes).float()
    return Batch(torch.zeros(len(labels), 3, 4, 4), logits, None, 0)


def balanced_mean(batch, values, memory=None):
    every = Selection(torch.ones(len(values), dtype=torch.bool), torch.ones(()))
    return weighted_mean(
        values, every, rarity=rarity(batch, mean_prediction(batch, memory or {}))
    ).item()


def test_classes_have_equal_parts():
    """The balanced mean over rows is the mean over classes of their means."""
    batch = sure_of(0, 0, 0, 0, 0, 1, 1, 2)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 100.0])
    assert balanced_mean(batch, values) == pytest.approx((3 + 15 + 100) / 3)


@pytest.mark.parametrize("labels", [[1, 1, 1, 1], [0, 1, 2, 3]])
def test_one_class_and_equally_many_of_each_are_the_plain_mean(labels):
    values = torch.tensor([1.0, 2.0, 6.0, 7.0])
    assert balanced_mean(sure_of(*labels), values) == pytest.approx(4)


def test_a_class_that_was_common_before_weighs_less_now():
    memory = {"mean_probs": torch.tensor([0.7, 0.1, 0.1, 0.1])}
    values = torch.tensor([0.0, 1.0])
    assert balanced_mean(sure_of(0, 1), values, memory) > 0.8
    assert balanced_mean(sure_of(2, 1), values, memory) == pytest.approx(0.5)


def test_two_half_batches_move_the_mean_prediction_as_far_as_a_whole_one():
    start = {"mean_probs": torch.full((4,), 0.25)}
    whole = mean_prediction(sure_of(*[1] * 64), start)
    half = mean_prediction(sure_of(*[1] * 32), start)
    twice = mean_prediction(sure_of(*[1] * 32), {"mean_probs": half})
    torch.testing.assert_close(whole, torch.tensor([0.225, 0.325, 0.225, 0.225]))
    torch.testing.assert_close(twice, whole)


def test_rows_that_are_not_finite_have_no_part_in_the_mean_prediction():
    batch = sure_of(0, 1, 1)
    broken = Batch(batch.images, batch.logits.index_fill(0, torch.tensor([0]), torch.nan), None, 0)
    assert mean_prediction(broken, {}).argmax() == 1
    before = {"mean_probs": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    nothing = Batch(batch.images, torch.full_like(batch.logits, torch.nan), None, 0)
    torch.testing.assert_close(mean_prediction(nothing, before), before["mean_probs"])


def test_the_recommended_method_is_balanced_without_batch_norm_and_the_papers_are_not():
    for net, balanced in (("resnet_gn", True), ("vit_ln", True), ("resnet_bn", False)):
        recommended = fata.adapt(fata.tiny.build(net))
        assert recommended.method.balance is balanced
        assert recommended.plus.balance is balanced
        assert recommended.plus.weight == (0.5 if balanced else 1.0)
    paper = fata.adapt(fata.tiny.build("resnet_gn"), "eata+fata", fisher_alpha=0)
    assert not paper.method.balance
    assert not paper.plus.balance


@pytest.mark.parametrize("spec", ["source", "norm", "cotta", "memo"])
def test_what_has_no_mean_over_rows_cannot_be_balanced(spec):
    with pytest.raises(ValueError, match=f"balance=True: '{spec}' has no mean over rows"):
        fata.adapt(fata.tiny.build("resnet_gn"), spec, balance=True)


@pytest.mark.slow
def test_a_stream_in_which_classes_take_over_keeps_them():
    """DeYO loses to the unadapted model on noise; balanced, it gains."""
    loaded = fata.zoo.load("mini_resnet_gn")
    data = fata.data.open("embedded", fit=loaded)
    stream = list(fata.stream(data, "normal", domains=["speckle_noise"], images=1280))
    right = {}
    for spec, fields in (("source", {}), ("deyo", {}), ("deyo", {"balance": True})):
        model, settings = fata.zoo.load("mini_resnet_gn").model, loaded.settings(spec)
        adapted = fata.adapt(model, spec, guard=None, speed="exact", **settings, **fields)
        right[spec, *fields] = sum(
            (adapted(loaded.preprocess(batch.images)).argmax(1) == batch.labels).sum().item()
            for batch in stream
        )
    assert right["deyo",] < right["source",] < right["deyo", "balance"]
