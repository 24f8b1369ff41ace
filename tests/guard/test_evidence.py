"""What two models' predictions show of harm and gain."""

import pytest
import torch

from fata.distributed.ranks import SINGLE
from fata.guard.evidence import compare, predictions

ROWS, BET, REAL = 448, 0.3, 0.3


def predicted(classes, confidence=3.0, of=10):
    """Logits of rows with these classes; `confidence`: one for all, or one a row."""
    sure = torch.as_tensor(confidence).expand(len(classes))
    return torch.nn.functional.one_hot(torch.tensor(classes), of) * sure[:, None]


def shown(*pairs, beside=None):
    """The evidence of the last of some checks of (source, adapted) logits."""
    found = None
    for source, logits in pairs:
        now = predictions(source, logits, beside, SINGLE)
        found = compare(found and found.latest, now, source.shape[1], ROWS, BET, REAL)
    return found


EVEN = list(range(10)) * 6


def test_models_that_agree_show_nothing():
    logits = predicted(EVEN)
    found = shown((logits, logits), (logits, logits))
    assert found.harm < 0  # not even a point is lost
    assert found.gain == found.health.gain == 0


def test_few_images_decide_nothing():
    found = shown((predicted([0, 1, 2, 3]), predicted([0, 0, 0, 0])))
    assert 0 < found.harm < 1


def test_images_that_move_to_a_frequent_class_are_harm():
    own, fallen = predicted(EVEN), predicted([0 if n % 2 else c for n, c in enumerate(EVEN)])
    found = shown((own, fallen), (own, fallen))
    assert found.harm > 2
    assert found.gain < 0


def test_images_that_moved_to_a_frequent_class_are_worse():
    """And those of which the adapted model says nothing; not those that left such a class."""
    own, moved = predicted(EVEN), predicted([0, 0, 0, *EVEN[3:10], 9, *EVEN[11:]])
    moved[5] = own[7] = torch.nan
    worse = shown((own, moved)).worse
    assert worse.nonzero().flatten().tolist() == [1, 2, 5]


def test_images_that_leave_a_class_that_is_predicted_too_often_are_gain():
    """The source is not surer of that class than of others."""
    own, spread = predicted([0 if n % 2 else c for n, c in enumerate(EVEN)]), predicted(EVEN)
    found = shown((own, spread), (own, spread))
    assert found.gain > 2
    assert found.harm < 0


def test_a_batch_of_one_class_is_judged_by_itself():
    """The checks before it were shuffled; the adapted model spreads it over all classes."""
    draw = torch.Generator().manual_seed(0)
    shuffled = [predicted(EVEN, 6 * torch.rand(60, generator=draw)) for _ in range(6)]
    one = predicted([7] * 54 + [0, 1, 2, 3, 4, 5], [4.0] * 54 + [1.0] * 6)
    found = shown(*zip(shuffled, shuffled, strict=True), (one, predicted(EVEN)))
    assert found.harm > 2
    assert found.gain < 0


# A stream of class 0 alone, which the source recognises in two thirds of the images, and surely.
ONE = [0, 0, 0, 0, *range(1, 3)] * 10
SURE = [6.0, 5.0, 6.0, 5.0, 1.0, 1.0] * 10


def test_in_a_stream_of_few_classes_images_belong_to_them():
    own, adapted = predicted(ONE, SURE), predicted([0] * len(ONE), 4.0)
    found = shown((own, adapted), (own, adapted))
    assert found.gain > 2
    assert found.harm < 0


def test_in_a_stream_of_few_classes_to_leave_them_is_harm():
    adapted = predicted([5 if c == 0 and n % 3 == 0 else c for n, c in enumerate(ONE)])
    own = predicted(ONE, SURE)
    found = shown((own, adapted), (own, adapted))
    assert found.harm > 2


def test_to_move_what_the_source_is_sure_of_is_harm():
    """Of two frequent classes one takes over."""
    both = [0, 0, 1, 1, *range(2, 4)] * 10
    own = predicted(both, SURE)
    adapted = predicted([0 if c == 1 else c for c in both])
    found = shown((own, adapted), (own, adapted))
    assert found.harm > 2


def test_a_rare_class_that_the_source_is_sure_of_may_still_be_wrong():
    """Where one class is nearly everything, to move an image to it is no harm."""
    classes = [*[0] * 50, *range(1, 6)]
    own = predicted(classes, [6.0 - n % 2 for n in range(50)] + [1.0] * 4 + [6.0])
    adapted = predicted([0] * 54 + [5]), predicted([0] * 55)
    for one in adapted:
        found = shown((own, one), (own, one))
        assert found.harm < 0 < found.gain


def test_a_frequent_class_is_told_from_those_that_a_shift_makes():
    """All are frequent; only of the first are its images predicted with confidence."""
    classes = [0] * 20 + [1] * 15 + [2] * 15 + list(range(3, 13))
    own = predicted(classes, [6.0] * 20 + [1.0] * 30 + [3.0] * 10, of=200)
    kept, lost = (
        predicted([to if c in gone else c for c in classes], of=200)
        for gone, to in (((1, 2), 0), ((0,), 1))
    )
    kept, lost = shown((own, kept), (own, kept)), shown((own, lost), (own, lost))
    assert kept.harm < 0 < kept.gain
    assert lost.gain < 0 < lost.harm


# The source predicts class 0 for half of the images, and is less sure of it than of others.
HALF = [0 if n % 2 else c for n, c in enumerate(EVEN)]


def test_an_unsure_class_that_confidence_speaks_for_is_kept():
    """It is frequent: to leave it is harm, though images go to rarer classes."""
    own = predicted(HALF, [3.0 if c == 0 else 4.0 for c in HALF])
    spread = predicted(EVEN)
    found = shown((own, spread), (own, spread))
    assert found.harm > 2
    assert found.gain < 0


def test_an_unsure_class_that_confidence_does_not_speak_for_is_left():
    """A shift makes the source predict it."""
    own = predicted(HALF, [0.5 if c == 0 else 4.0 for c in HALF])
    spread = predicted(EVEN)
    found = shown((own, spread), (own, spread))
    assert found.gain > 2
    assert found.harm < 0


SHIFTED = [(c + 1) % 10 if n % 3 == 0 else c for n, c in enumerate(EVEN)]


@pytest.mark.parametrize(
    ("source", "batch", "harm", "gain"),
    [(3.0, 1.0, True, False), (1.0, 3.0, False, True), (3.0, 2.5, False, False)],
)
def test_what_batch_statistics_move_is_judged_by_confidence(source, batch, harm, gain):
    """Evenly over the classes, so that their frequency tells nothing. Near ones tell nothing."""
    own, moved = predicted(EVEN, source), predicted(SHIFTED, batch)
    found = shown((own, moved), (own, moved), beside=moved)
    assert (found.harm > 2, found.gain > 2) == (harm, gain)
    assert found.worse.tolist() == [n % 3 == 0 and source > batch for n in range(len(EVEN))]
    without = shown((own, moved), (own, moved))
    assert max(without.harm, without.gain) < 0.5


def test_what_was_learned_is_not_judged_by_the_statistics():
    """Where the adapted model predicts neither, they did not move the image."""
    own, beside = predicted(EVEN), predicted(SHIFTED, 1.0)
    learned = predicted([(c + 2) % 10 if n % 3 == 0 else c for n, c in enumerate(EVEN)])
    found = shown((own, learned), (own, learned), beside=beside)
    assert found.harm == shown((own, learned), (own, learned)).harm < 0.5


def test_what_the_weights_move_back_is_no_harm():
    own, moved = predicted(EVEN), predicted(SHIFTED, 1.0)
    found = shown((own, own), (own, own), beside=moved)
    assert found.harm < found.gain == 0


def test_all_may_be_bet():
    own, spread = predicted([0 if n % 2 else c for n, c in enumerate(EVEN)]), predicted(EVEN)
    now = predictions(own, spread, None, SINGLE)
    assert compare(None, now, 10, ROWS, 1.0, REAL).harm < 0
    assert compare(None, now, 10, ROWS, 0.995, REAL).harm < 0


def test_batch_statistics_that_give_no_number_count_nothing():
    own, moved = predicted(EVEN), predicted(SHIFTED, 1.0)
    broken = torch.full_like(moved, torch.nan)
    assert shown((own, moved), beside=broken).harm == shown((own, moved)).harm


def test_a_prediction_that_is_no_number_is_harm():
    """At once, and only where the source has one."""
    own, broken = predicted(EVEN), predicted(EVEN)
    broken[:20] = torch.nan
    found = shown((own, broken))
    assert found.harm > 2
    found = shown((broken, broken))
    assert found.harm < 0


def test_what_is_no_number_is_not_counted():
    """As the first class, which `argmax` makes of it."""
    own, broken = predicted([1] * 20), predicted([1] * 20)
    broken[:] = torch.nan
    assert len(shown((own, broken)).latest) == 0


def test_a_class_that_is_masked_out_hides_nothing():
    own, fallen = predicted(EVEN), predicted([0 if n % 2 else c for n, c in enumerate(EVEN)])
    own[:, 9] = fallen[:, 9] = -torch.inf
    found = shown((own, fallen), (own, fallen))
    assert found.harm > 2


def test_only_the_latest_images_count():
    old, new = predicted([1] * 300), predicted([2] * 300)
    found = shown((old, old), (old, old), (new, new))
    assert found.latest[:, 0].tolist() == [1] * (ROWS - 300) + [2] * 300


def test_the_evidence_is_the_same_whatever_the_order_of_the_classes():
    torch.manual_seed(0)
    own = torch.randn(3, 64, 10)
    adapted = own + torch.randn(3, 64, 10)
    order = torch.randperm(10)
    one = shown(*zip(own, adapted, strict=True))
    other = shown(*zip(own[..., order], adapted[..., order], strict=True))
    assert one.harm == pytest.approx(other.harm, abs=1e-5)
    assert one.health.gain == pytest.approx(other.health.gain, abs=1e-5)


def test_health_is_the_sources_confidence_less_what_is_lost():
    own, fallen = predicted(EVEN), predicted([0 if n % 2 else c for n, c in enumerate(EVEN)])
    health = shown((own, fallen), (own, fallen)).health
    assert health.source == pytest.approx(own.softmax(1).amax(1).mean().item(), rel=1e-5)
    assert health.gain == pytest.approx(-0.5, abs=0.1)
    assert health.as_dict() == {**vars(health), "gain": health.gain}


def test_nobody_is_estimated_by_images_that_do_not_count():
    broken = torch.full((4, 10), torch.nan)
    assert shown((broken, broken)).health is None


def test_classes_that_are_rarely_predicted_do_not_make_a_stream_unequal():
    """Of a thousand classes most are in view once, others twice, a little alike in confidence."""
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(500, generator=draw)
    pairs, singles = order[:75].tolist(), order[75:375].tolist()
    noise = torch.randn(450, generator=draw)
    alike = torch.randn(75, generator=draw).repeat(2)
    confidence = 7 + noise + torch.cat((alike, torch.zeros(300)))
    own = predicted(pairs + pairs + singles, confidence, of=1000)
    moved = predicted([500 + c for c in pairs] + pairs + singles, of=1000)
    found = shown((own, moved))
    assert found.harm < 0 < found.gain


def test_the_health_of_a_collapsed_model_does_not_depend_on_one_small_batch():
    draw, latest = torch.Generator().manual_seed(0), None
    for number in range(60):
        classes = torch.randint(10, (16,), generator=draw).tolist()
        confidence = 1 + 3 * torch.rand(16, generator=draw)
        if number % 5 == 4:  # by chance half are of one class, the confident half
            classes[:9], confidence = [0] * 9, torch.tensor([4.0] * 9 + [1.0] * 7)
        now = predictions(predicted(classes, confidence), predicted([0] * 16), None, SINGLE)
        found = compare(latest, now, 10, ROWS, BET, REAL)
        latest = found.latest
        if number >= 8:
            assert found.health.gain < -0.3
