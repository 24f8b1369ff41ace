"""What two models' predictions show of harm and gain."""

import pytest
import torch

from fata.guard.evidence import compare
from fata.guard.health import Health, noted

ROWS, BET, REAL = 448, 0.3, 0.3


def predicted(classes, confidence=3.0, of=10):
    """Logits of rows with these classes; `confidence`: one for all, or one a row."""
    sure = torch.as_tensor(confidence).expand(len(classes))
    return torch.nn.functional.one_hot(torch.tensor(classes), of) * sure[:, None]


def shown(*pairs, of=10):
    """The averages and the evidence after checks of (source, adapted) logits."""
    memory, found = {}, None
    for source, logits in pairs:
        memory, found = compare(memory, source, logits, ROWS, BET, REAL)
    return memory, found


EVEN = list(range(10)) * 6


def test_models_that_agree_show_nothing():
    logits = predicted(EVEN)
    _, found = shown((logits, logits), (logits, logits))
    assert found.harm == found.gain == found.moved == 0


def test_few_images_decide_nothing():
    _, found = shown((predicted([0, 1, 2, 3]), predicted([0, 0, 0, 0])))
    assert 0 < found.harm < 1


def test_images_that_move_to_a_frequent_class_are_harm():
    own, fallen = predicted(EVEN), predicted([0 if n % 2 else c for n, c in enumerate(EVEN)])
    _, found = shown((own, fallen), (own, fallen))
    assert found.harm > 2
    assert found.gain < 0
    assert found.moved == pytest.approx(0.5, abs=0.1)


def test_images_that_leave_a_class_that_is_predicted_too_often_are_gain():
    """The source is not surer of that class than of others."""
    own, spread = predicted([0 if n % 2 else c for n, c in enumerate(EVEN)]), predicted(EVEN)
    _, found = shown((own, spread), (own, spread))
    assert found.gain > 2
    assert found.harm < 0


# A stream of class 0 alone, which the source recognises in two thirds of the images, and surely.
ONE = [0, 0, 0, 0, *range(1, 3)] * 10
SURE = [6.0, 5.0, 6.0, 5.0, 1.0, 1.0] * 10


def test_in_a_stream_of_few_classes_images_belong_to_them():
    own, adapted = predicted(ONE, SURE), predicted([0] * len(ONE), 4.0)
    _, found = shown((own, adapted), (own, adapted))
    assert found.gain > 2
    assert found.harm < 0


def test_in_a_stream_of_few_classes_to_leave_them_is_harm():
    adapted = predicted([5 if c == 0 and n % 3 == 0 else c for n, c in enumerate(ONE)])
    own = predicted(ONE, SURE)
    _, found = shown((own, adapted), (own, adapted))
    assert found.harm > 2


def test_to_move_what_the_source_is_sure_of_is_harm():
    """Of two frequent classes one takes over."""
    both = [0, 0, 1, 1, *range(2, 4)] * 10
    own = predicted(both, SURE)
    adapted = predicted([0 if c == 1 else c for c in both])
    _, found = shown((own, adapted), (own, adapted))
    assert found.harm > 2


def test_a_prediction_that_is_no_number_is_harm():
    """At once, and only where the source has one."""
    own, broken = predicted(EVEN), predicted(EVEN)
    broken[:20] = torch.nan
    _, found = shown((own, broken))
    assert found.harm > 2
    _, found = shown((broken, broken))
    assert found.harm == 0


def test_what_is_no_number_is_not_counted():
    """As the first class, which `argmax` makes of it."""
    own, broken = predicted([1] * 20), predicted([1] * 20)
    broken[:] = torch.nan
    memory, _ = shown((own, broken))
    assert memory["N"].sum() == 0
    assert memory["images"] == 0


def test_a_class_that_is_masked_out_hides_nothing():
    own, fallen = predicted(EVEN), predicted([0 if n % 2 else c for n, c in enumerate(EVEN)])
    own[:, 9] = fallen[:, 9] = -torch.inf
    _, found = shown((own, fallen), (own, fallen))
    assert found.harm > 2


def test_older_images_fade_out():
    old, new = predicted([1] * 300), predicted([2] * 300)
    memory, _ = shown(*[(old, old)] * 2, *[(new, new)] * 8)
    assert memory["N"][1] < 1
    assert memory["N"].sum() == pytest.approx(ROWS, rel=0.05)
    assert memory["images"] == pytest.approx(ROWS, rel=0.05)


def test_the_evidence_is_the_same_whatever_the_order_of_the_classes():
    torch.manual_seed(0)
    own = torch.randn(3, 64, 10)
    adapted = own + torch.randn(3, 64, 10)
    order = torch.randperm(10)
    _, one = shown(*zip(own, adapted, strict=True))
    _, other = shown(*zip(own[..., order], adapted[..., order], strict=True))
    torch.testing.assert_close(one.harm, other.harm)
    torch.testing.assert_close(one.moved, other.moved)


def test_health_is_the_sources_confidence_less_what_is_lost():
    own, fallen = predicted(EVEN), predicted([0 if n % 2 else c for n, c in enumerate(EVEN)])
    memory, found = shown((own, fallen), (own, fallen))
    memory = noted({}, memory, found.moved)
    health = Health.of({f"shown.{name}": tensor for name, tensor in memory.items()})
    assert health.source == pytest.approx(own.softmax(1).amax(1).mean().item(), rel=1e-5)
    assert health.gain == pytest.approx(-found.moved.item(), rel=1e-5)
    assert Health.of({}) is None


def test_health_is_read_from_the_device_once_after_each_check():
    memory = {"shown.p": torch.tensor(0.5), "shown.moved": torch.tensor(-0.25)}
    health = Health.of(memory)
    assert health.as_dict() == {"source": 0.5, "adapted": 0.75, "gain": 0.25}
    assert Health.of(dict(memory)) is health
    checked = {"shown.p": torch.tensor(0.5), "shown.moved": torch.tensor(0.75)}
    assert Health.of(checked).as_dict() == {"source": 0.5, "adapted": 0.0, "gain": -0.5}
    assert Health.of(memory) is health
