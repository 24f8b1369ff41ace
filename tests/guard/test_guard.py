"""The guard: silent where nothing is wrong, and back in time where something is."""

import copy
import dataclasses
import sys
import warnings

import pytest
import torch

import fata
from benchmarks import mixed
from fata.bench.cell import Cell, key
from fata.bench.run.runner import CellRunner
from fata.guard.evidence import BRIEF, Evidence, batch_of_few_classes, compare
from fata.guard.policy import EARLY
from fata.methods import SPECS
from fata.zoo import tiny
from precision import DOUBLE

NETS = ("resnet_bn", "resnet_gn", "vit_ln")
NEVER = fata.Guard(narrowing=1.0, neglect=1.0, every=1)  # looks at every batch, and is content
ALWAYS = fata.Guard(narrowing=0.0, neglect=0.0, every=1, trial=0, patience=1)
HARM = Evidence("narrowing", 0.5, 0.1, 0.0)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no fisher_data")
        yield


def build(net):
    torch.manual_seed(0)
    return tiny.build(net)


def batches(count=6, rows=8):
    draw = torch.Generator().manual_seed(1)
    return [torch.rand(rows, 3, 16, 16, generator=draw) for _ in range(count)]


def tensors(adapter):
    return {k: v for k, v in adapter.state_dict().items() if k.startswith(("param", "momentum"))}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_guard_that_finds_nothing_changes_nothing(net, spec):
    states, fields = [], {"views": 2} if spec in ("cotta", "memo") else {}
    for guard in (None, NEVER):
        adapter = fata.adapt(build(net), spec, guard=guard, lr=0.01, **fields)
        answers = torch.stack([adapter(images) for images in batches()])
        states.append((answers, tensors(adapter)))
    (one, before), (other, after) = states
    assert torch.equal(one, other)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_is_on_by_default_and_can_be_left_out():
    assert fata.adapt(build("resnet_gn"), "tent").guard is not None
    assert fata.Adapter(build("resnet_gn"), fata.Tent()).guard is not None
    assert fata.adapt(build("resnet_gn"), "tent", guard=None).guard is None
    assert fata.adapt(build("resnet_gn"), "source").guard is None  # nothing can go wrong


def collapsing(guard):
    """TENT at a rate at which it falls within a few batches, on a trained network."""
    loaded = fata.zoo.load("mini_resnet_gn")
    data = fata.data.open("embedded", fit=loaded)
    adapter = fata.adapt(loaded.model, "tent", lr=0.3, guard=guard)
    right, last = 0, None
    stream = fata.stream(data, domains=["speckle_noise"], images=960)
    for batch in stream:
        last = adapter(loaded.preprocess.normalise(batch.images)).argmax(1)
        right += (last == batch.labels).sum().item()
    return adapter, 100 * right / stream.images, last


def test_a_collapse_is_taken_back():
    fallen, accuracy, last = collapsing(None)
    assert last.bincount().max() > len(last) / 2  # one class has taken over
    fallen.reset()
    with torch.no_grad():
        source = fata.adapt(fallen.unwrap(), "source")
    loaded = fata.zoo.load("mini_resnet_gn")
    stream = fata.stream(
        fata.data.open("embedded", fit=loaded), domains=["speckle_noise"], images=960
    )
    right = sum(
        (source(loaded.preprocess.normalise(b.images)).argmax(1) == b.labels).sum().item()
        for b in stream
    )
    plain = 100 * right / stream.images
    guarded, held, _ = collapsing(fata.Guard(trial=256))
    assert accuracy < plain - 20
    assert held > (accuracy + plain) / 2  # which batch shows it first may differ by processor
    assert [event.action for event in guarded.guard.events[:2]] == ["aside", "back"]


HELP = Evidence("narrowing", -0.5, 0.1, 0.0)
OPEN = Evidence("narrowing", 0.0, 0.1, 0.0)


def test_a_model_in_doubt_learns_while_its_source_answers(monkeypatch, tmp_path):
    """It answers again when it has proved its worth, as if nothing had been."""
    free = fata.adapt(build("resnet_gn"), "tent", guard=None, lr=0.01)
    guard = fata.Guard(trial=3 * 8)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=guard, lr=0.01)
    sign = {}
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda *_: sign["is"])
    source = build("resnet_gn").eval()
    aside = {2, 3, 4}
    for number, images in enumerate(batches(8)):
        sign["is"] = HARM if number in aside else HELP
        expected, found = free(images), adapter(images)
        with torch.no_grad():
            expected = source(images) if number in aside else expected
        assert torch.equal(found, expected)
        with adapter.frozen(), free.frozen():
            assert torch.equal(adapter(images), expected if number in aside else free(images))
        adapter.save(tmp_path / "s.safetensors")
        adapter = fata.adapt(build("resnet_gn"), "tent", guard=guard, lr=0.01)
        adapter.load(tmp_path / "s.safetensors")
    assert [(event.batch, event.action) for event in adapter.guard.events] == [
        (3, "aside"),
        (6, "trusted"),
    ]


def test_after_a_neglect_it_goes_back_to_the_source(monkeypatch):
    """Whatever the sign is when the trial ends."""
    wide, neglect = Evidence("narrowing", -0.3, 0.0, 0.0), Evidence("neglect", 0.5, 0.1, 0.0)
    seen = iter((wide, wide, neglect, HARM))
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(trial=8), lr=0.01)
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda *_: next(seen))
    for images in batches(5):
        adapter(images)
    assert [(event.action, event.to) for event in adapter.guard.events] == [
        ("aside", 0),
        ("back", 0),
    ]


def test_the_latest_events_are_kept(monkeypatch):
    monkeypatch.setattr("fata.guard.policy.LATEST", 3)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(every=2, term=1), lr=0.01)
    sign_is(monkeypatch, adapter)
    for images in batches(12):
        adapter(images)
    found = [event.batch for event in adapter.guard.events]
    assert len(found) == 3
    assert found[-1] >= 11


def test_what_is_learned_from_is_not_told_as_what_is_answered(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(), lr=0.01)
    sign_is(monkeypatch, adapter, adapted=HARM)
    told = []
    for images in batches(3):
        adapter(images)
        told.append(bool(adapter.selected))
    assert told == [True, False, False]
    assert adapter.counts["stepped"] == 3


def test_a_trial_ends(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(trial=3 * 8), lr=0.01)
    sign_is(monkeypatch, adapter, adapted=HARM)
    for images in batches(6):
        adapter(images)
    assert [(event.batch, event.action) for event in adapter.guard.events] == [
        (2, "aside"),
        (5, "back"),
    ]


def followed(monkeypatch, signs, trial, term=10**9):
    """A sign after each batch of 8: what the guard does, which batches the source answers."""
    guard = fata.Guard(trial=trial * 8, term=term)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=guard, lr=0.01)
    seen = iter(signs)
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda *_: next(seen))
    source, answered = build("resnet_gn").eval(), []
    for number, images in enumerate(batches(len(signs) + 1)):
        with torch.no_grad():
            still = torch.equal(adapter(images), source(images))
        if still and number:
            answered.append(number)
    return [(event.batch - 1, event.action) for event in adapter.guard.events], answered


def test_a_model_that_was_taken_back_answers_when_it_has_proved_better(monkeypatch):
    signs = [HARM, HARM, HARM, OPEN, OPEN, HELP, HELP, HELP]
    events, answered = followed(monkeypatch, signs, trial=2)
    assert events == [(1, "aside"), (3, "back"), (6, "trusted")]
    assert answered == [1, 2, 3, 4, 5]


def test_a_model_of_which_nothing_is_known_stays_on_trial(monkeypatch):
    """It is taken back only while the sign means harm."""
    signs = [HARM, OPEN, OPEN, OPEN, OPEN, HELP, HELP]
    events, answered = followed(monkeypatch, signs, trial=2)
    assert events == [(1, "aside"), (6, "trusted")]
    assert answered == [1, 2, 3, 4, 5]


def test_a_trial_without_end_begins_anew(monkeypatch):
    events, _ = followed(monkeypatch, [HARM, *[OPEN] * 6], trial=2, term=5 * 8)
    assert events == [(1, "aside"), (4, "restart")]


def test_an_old_model_has_its_trial_too(monkeypatch):
    """Its term has long been over, since it did well."""
    events, _ = followed(monkeypatch, [*[HELP] * 5, HARM, OPEN, HELP, HELP], trial=3, term=2 * 8)
    assert events == [(6, "aside"), (9, "trusted")]


EVEN = Evidence("narrowing", 0.0, 0.1, 0.0, lacking=0.0)


def test_a_source_whose_answers_are_even_answers_until_the_model_has_proved_better(monkeypatch):
    better = Evidence("narrowing", -0.5, 0.1, 0.0, lacking=0.0)
    events, answered = followed(monkeypatch, [OPEN, EVEN, EVEN, better, EVEN, OPEN, OPEN], trial=2)
    assert events == [(2, "even"), (4, "uneven"), (5, "even"), (6, "uneven")]
    assert answered == [2, 3, 5]


def test_an_even_source_answers_every_batch_between_two_looks_too(monkeypatch):
    events, answered = followed(monkeypatch, [EVEN] * 12, trial=2)
    assert events == [(1, "even")]
    assert answered == [*range(1, 13)]


def test_an_even_source_answers_when_a_model_begins_anew(monkeypatch):
    events, answered = followed(monkeypatch, [EVEN] * 8, trial=2, term=5 * 8)
    assert events == [(1, "even"), (4, "restart")]
    assert answered == [*range(1, 9)]


def test_what_was_seen_of_the_source_is_known_when_a_model_begins_anew(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(term=3 * 8), lr=0.01)
    monkeypatch.setattr("fata.guard.evidence.over_half", lambda *_: torch.tensor(False))
    known = []
    for images in batches(5):
        adapter(images)
        known.append(int(adapter._engine.state.guard.get("adapted.long.rows", 0)))
    assert [(event.batch, event.action) for event in adapter.guard.events] == [(3, "restart")]
    assert known == [0, 8, 16, 16, 24]


def test_harm_that_is_not_answered_is_looked_for_no_more_often(monkeypatch):
    """Every batch is looked at while the source answers evenly; chance would find it in one."""
    harm = Evidence("narrowing", 0.5, 0.1, 0.0, lacking=0.0)
    monkeypatch.setattr("fata.guard.evidence.BRIEF", 8)
    events, answered = followed(monkeypatch, [*[EVEN] * 8, *[harm] * 9], trial=100)
    assert events == [(1, "even"), (16, "aside")]
    assert answered == [*range(1, 18)]


def test_harm_counts_where_answers_are_even(monkeypatch):
    """A trial follows, and what it ends with."""
    harm = Evidence("narrowing", 0.5, 0.1, 0.0, lacking=0.0)
    events, answered = followed(monkeypatch, [EVEN, harm, harm, HELP, HELP, OPEN], trial=3)
    assert events == [(1, "even"), (2, "aside"), (5, "trusted")]
    assert answered == [1, 2, 3, 4]


def test_an_even_source_has_its_place_behind_a_file(monkeypatch, tmp_path):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(), lr=0.01)
    sign_is(monkeypatch, adapter, adapted=EVEN)
    images = batches(4)
    answers = [adapter(some) for some in images]
    adapter.save(tmp_path / "s.safetensors")
    other = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(), lr=0.01)
    other.load(tmp_path / "s.safetensors")
    with other.frozen():
        assert torch.equal(other(images[-1]), answers[-1])
    with torch.no_grad():
        assert torch.equal(other.unwrap()(images[-1]), answers[-1])


@pytest.mark.parametrize(
    ("network", "even", "actions"),
    [("resnet_gn", 0.5, ["even"]), ("resnet_gn", 0, []), ("resnet_bn", 0.5, [])],
)
def test_even_answers_count_where_they_are_to(monkeypatch, network, even, actions):
    """With BatchNorm they mean nothing."""
    for name in ("over_half", "batch_of_few_classes"):
        monkeypatch.setattr(f"fata.guard.evidence.{name}", lambda *_: torch.tensor(False))
    monkeypatch.setattr("fata.guard.evidence._lacking", lambda *_: torch.tensor(0.0))
    guard = fata.Guard(even=even, narrowing=1)
    adapter = fata.adapt(build(network), "tent", guard=guard, lr=1e-9)
    for images in batches(4):
        adapter(images)
    assert [event.action for event in adapter.guard.events] == actions


def test_what_is_unwrapped_is_what_answered(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(), lr=0.01)
    sign_is(monkeypatch, adapter, adapted=HARM)
    images = batches(3)
    answers = [adapter(some) for some in images]
    assert adapter.counts["stepped"] == 3
    with torch.no_grad():
        assert torch.equal(adapter.unwrap()(images[-1]), answers[-1])


def test_trust_that_was_lost_takes_longer_to_win_again(monkeypatch):
    monkeypatch.setattr("fata.guard.evidence.LEAST", 2 * 8)
    signs = [HARM, *[HELP] * 3, HARM, *[HELP] * 5, HARM, *[HELP] * 9]
    events, _ = followed(monkeypatch, signs, trial=100)
    assert events == [
        (1, "aside"), (3, "trusted"), (5, "aside"), (9, "trusted"), (12, "aside"), (20, "trusted"),
    ]  # fmt: skip


def test_a_stream_of_one_class_is_none_of_its_business():
    """The source sees that class, too."""
    model = build("resnet_gn")
    with torch.no_grad():
        model.fc.bias[2] += 1000
    adapter = fata.adapt(model, "tent", guard=ALWAYS)
    with pytest.warns(RuntimeWarning, match="moved nothing"):  # so confident has no gradient
        answers = torch.cat([adapter(images).argmax(1) for images in batches()])
    assert (answers == 2).all()
    assert adapter.guard.events == []


def test_it_goes_back_slower_and_rests_in_the_end(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda *_: HARM)
    answers = [adapter(images) for images in batches(8)]
    assert [event.action for event in adapter.guard.events] == ["back", "rest"]
    assert [event.rate for event in adapter.guard.events] == pytest.approx([0.1, 0.01])
    assert adapter.guard.resting
    source = build("resnet_gn").eval()
    with torch.no_grad():
        assert torch.equal(answers[-1], source(batches(8)[-1]))
    adapter.reset()
    assert not adapter.guard.resting
    assert adapter.guard.events == []


@pytest.mark.parametrize("speed", ["exact", "fast"])
@pytest.mark.parametrize(
    ("spec", "fields"),
    [("tent", {}), ("sar+fata", {"threshold": 1.0, "fata_threshold": 1.0}), ("cotta", {})],
)
def test_a_lower_rate_takes_shorter_steps(spec, fields, speed):
    moved = []
    for scale in (1.0, 0.1):
        model = build("resnet_gn").double()
        adapter = fata.adapt(model, spec, lr=0.01, speed=speed, **fields)
        state = adapter._live().state
        state.watched.scale, start = scale, state.theta
        adapter(batches(1)[0].double())
        moved.append(adapter._live().state.theta - start)
    assert moved[0].any()
    torch.testing.assert_close(moved[1], 0.1 * moved[0], **DOUBLE)


def test_a_class_that_is_masked_out_hides_no_collapse():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build("resnet_gn")

        def forward(self, images):
            return self.inner(images).index_fill(1, torch.tensor([3]), -torch.inf)

    def largest_class(guard):
        """Share of the predictions at the end of the stream."""
        adapter = fata.adapt(Masked(), "tent", lr=0.5, guard=guard)
        found = torch.cat([adapter(images).argmax(1) for images in batches(60, rows=16)][-20:])
        return adapter, found.bincount().max().item() / len(found)

    (guarded, held), (_, free) = largest_class(fata.Guard()), largest_class(None)
    assert guarded.guard.events
    assert held < free


def test_it_goes_back_to_the_widest_answers(monkeypatch):
    seen = iter(Evidence("narrowing", value, 0.0, 0.0) for value in (-0.1, -0.3, -0.2, 0.5))
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda *_: next(seen))
    states = []
    for images in batches(5):
        adapter(images)
        states.append(tensors(adapter))
    (event,) = adapter.guard.events
    assert (event.batch, event.to) == (5, 3)
    assert all(
        torch.equal(states[4][name], states[2][name]) for name in states[2] if "param" in name
    )


def answers(*classes, of=10):
    """Logits of rows with these answers."""
    return torch.nn.functional.one_hot(torch.tensor(classes), of).float()


def signs(witness, logits, before=None):
    _, (majority, now, doubt, *_) = compare(before or {}, witness, logits, 448)
    return bool(majority), now.item(), doubt.item()


def test_a_class_that_takes_over_is_a_narrowing():
    mixed = answers(*range(10), *range(10))
    taken = answers(*[3] * 8, *range(10), 8, 9)
    majority, now, doubt = signs(mixed, taken)
    assert not majority
    assert now > doubt > 0
    _, now, _ = signs(taken, mixed)  # the other way round a model has learned
    assert now < 0
    assert signs(mixed, mixed) == (False, 0, 0)


def test_where_a_stream_has_one_class_to_cling_to_another_is_harm():
    cat = answers(*[3] * 40, *range(10))
    more, dog = answers(*[3] * 50), answers(*[5] * 45, *[3] * 5)
    majority, now, _ = signs(cat, more)
    assert majority
    assert now < 0
    majority, now, doubt = signs(cat, dog)
    assert majority
    assert now > doubt


@pytest.mark.parametrize(
    ("agree", "harm"),
    [(1.0, False), (0.7, False), (0.4, True)],  # the witness is sure of 60 %
)
def test_a_model_that_agrees_on_less_than_the_witness_is_sure_of_is_estranged(agree, harm):
    witness, others = surely(0.6, 0), round((1 - agree) * 64)
    adapted = torch.cat((witness[:others].roll(1, 1), witness[others:]))  # as even as it was
    _, (*_, now, doubt, over_time, less, _, _) = compare({}, witness, adapted, 448)
    assert now == pytest.approx(0.6 - (64 - others) / 64, abs=1e-5)
    assert (now > doubt) == harm
    assert (over_time > less) == harm


@pytest.mark.parametrize(("net", "signs"), [("resnet_bn", ["estrangement"]), ("resnet_gn", [])])
def test_estrangement_counts_with_batchnorm_alone(monkeypatch, net, signs):
    """A shift leaves other sources surer than they are right."""
    found = torch.tensor([0, *[0, 0.1] * 2, *[0.5, 0.1] * 2, 0, 1])
    monkeypatch.setattr("fata.guard.evidence.compare", lambda *_: ({}, found))
    adapter = fata.adapt(build(net), "tent", lr=1e-6)
    for images in batches(3):
        adapter(images)
    assert [event.sign for event in adapter.guard.events] == signs


def test_estrangement_accuses_and_hides_no_gain(monkeypatch):
    found = torch.tensor([0, *[-0.06, 0.01] * 2, *[-0.02, 0.03] * 2, 0, 1])
    monkeypatch.setattr("fata.guard.evidence.compare", lambda *_: ({}, found))
    adapter = fata.adapt(build("resnet_bn"), "tent", lr=1e-6)
    for images in batches(3):
        adapter(images)
    assert len(adapter.guard.states) == 2
    assert not adapter.guard.events


@pytest.mark.slow
def test_a_rate_far_too_high():
    """With BatchNorm a model unlearns without narrowing."""
    loaded = fata.zoo.load("mini_resnet_bn")
    data = fata.data.open("embedded", fit=loaded)
    stream = fata.stream(data, domains=["spatter"], images=14 * 64)
    shown = [(loaded.preprocess.normalise(b.images), b.labels) for b in stream]

    def right(spec, **fields):
        adapter = fata.adapt(loaded.model, spec, **fields)
        found = sum((adapter(images).argmax(1) == labels).sum().item() for images, labels in shown)
        events = adapter.guard.events if adapter.guard else []
        adapter.reset()
        adapter.unwrap()
        return found / len(stream.labels), [event.sign for event in events]

    fields = loaded.settings("tent+fata", 64)
    fields["lr"] *= 100
    held, signs = right("tent+fata", **fields)
    free, _ = right("tent+fata", guard=None, **fields)
    still, _ = right("norm")
    assert signs[0] == "estrangement"
    assert free < still - 0.1
    assert held > (free + still) / 2  # how soon it shows differs from machine to machine


def test_few_images_leave_much_in_doubt():
    few, many = (signs(answers(*([1, 2] * n)), answers(*([1, 1] * n)))[2] for n in (2, 32))
    assert few == pytest.approx(4 * many)


def test_what_went_wrong_slowly_shows_over_time():
    """A small share a look, within doubt each time, is beyond it in the end."""
    mixed, worse = answers(*range(10)), answers(*range(9), 8)
    memory = {}
    seen = []
    for _ in range(200):
        memory, (_, *values) = compare(memory, mixed, worse, 448)
        seen.append([value.item() for value in values])
    assert seen[0][0] < seen[0][1]
    assert seen[-1][2] > seen[-1][3]


@pytest.mark.parametrize(
    ("classes", "of", "looks", "even"),
    [
        (range(10), 10, 20, True),
        (range(10), 10, 5, False),  # too few to tell
        ([*range(9), 8], 10, 20, False),  # one class is never answered
        ([*range(10)] * 9 + [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 10, 20, True),  # a tenth uneven
        (range(1000), 1000, 5, False),
    ],
)
def test_when_answers_are_even(classes, of, looks, even):
    memory, found = {}, None
    witness = answers(*classes, of=of)
    for _ in range(looks):
        memory, (*_, found) = compare(memory, witness, witness, 448)
    assert (found < fata.Guard().even) == even


def drawn(classes, rows, seed):
    return answers(*torch.randint(classes, (rows,), generator=torch.manual_seed(seed)), of=classes)


def test_chance_makes_even_answers_no_less_even():
    """Of 200 answers, each class as likely as the others, some always have more than others."""
    found = [compare({}, *[drawn(10, 200, seed)] * 2, 448)[1][-1].item() for seed in range(20)]
    assert sum(lacking < fata.Guard().even for lacking in found) > 15


def test_of_two_classes_none_can_tell_how_even_they_are():
    both = answers(*[0, 1] * 32, of=2)
    assert compare({}, both, both, 448)[1][-1] == 1


def test_how_even_answers_are_is_a_matter_of_many():
    """One look changes little; where one class has the majority it says nothing."""
    even, other = answers(*range(10)).repeat(10, 1), answers(*[*range(9), 8]).repeat(10, 1)
    memory = {}
    for _ in range(20):
        memory, (*_, lacking) = compare(memory, even, even, 448)
    assert lacking == 0
    assert compare(memory, other, other, 448)[1][-1] == 0
    one = answers(*[3] * 100)
    after, (*_, lacking) = compare(memory, one, one, 448)
    assert lacking == 1
    assert torch.equal(after["long.source"], memory["long.source"])


def surely(confidence, many):
    """64 answers, so sure, so many of them of one class and the others of all."""
    classes = [*[3] * many, *(n % 10 for n in range(64 - many))]
    hot = torch.nn.functional.one_hot(torch.tensor(classes), 10)
    return torch.where(hot == 1, confidence, (1 - confidence) / 9).log()


@pytest.mark.parametrize(("other", "few"), [(0.56, [False] * 6 + [True] * 2), (0.62, [False] * 8)])
def test_a_class_that_is_hard_to_recognise_is_seen_after_some_looks(other, few):
    """A third of the answers, and the running statistics a little surer; or not."""
    memory, found = {}, []
    for _ in few:
        memory, (uniform, *_) = compare(
            memory, surely(0.6, 20), surely(other, 0), 448, batch_of_few_classes
        )
        found.append(bool(uniform))
    assert found == few


@pytest.mark.parametrize(
    ("witness", "other", "few"),
    [
        ((40, 0.9), 0.5, True),  # most are one class, and the batch's statistics make it unsure
        ((40, 0.5), 0.9, False),  # the same, but what is unsure are the running ones: a shift
        ((28, 0.9), 0.5, False),  # not most; the second time it counts, though
    ],
)
def test_a_shift_is_no_batch_of_one_class(witness, other, few):
    """Both make running statistics answer one class; how sure they are tells them apart."""
    many, sure = witness
    own, batch = surely(sure, many), surely(other, 0)
    memory, (once, *_) = compare({}, own, batch, 448, batch_of_few_classes)
    _, (twice, *_) = compare(memory, own, batch, 448, batch_of_few_classes)
    assert bool(once) == few
    assert bool(twice) == (sure > other)


def sign_is(monkeypatch, adapter, **by_name):
    """Let comparisons find this, whatever is answered."""
    fine = Evidence("narrowing", 0.0, 0.1, 0.0)
    monkeypatch.setattr(
        type(adapter.guard), "_compare", lambda _, name, *__: by_name.get(name, fine)
    )


@pytest.mark.parametrize(("value", "restarts"), [(0.0, [5, 10]), (-0.2, [])])
def test_what_has_not_proved_its_worth_restarts(monkeypatch, tmp_path, value, restarts):
    """After so many answers; not where S is below 0 beyond doubt."""
    guard = fata.Guard(every=2, term=5 * 8)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=guard, lr=0.01)
    sign_is(monkeypatch, adapter, adapted=Evidence("narrowing", value, 0.1, 0.0))
    monkeypatch.setattr("fata.guard.policy.EARLY", ())
    source = tensors(adapter)
    for images in batches(14):
        adapter(images)
        adapter.save(tmp_path / "s.safetensors")  # the count goes on behind a file
        adapter.load(tmp_path / "s.safetensors")
        is_source = all(torch.equal(v, source[k]) for k, v in tensors(adapter).items())
        assert is_source == (adapter.counts["seen"] // 8 in restarts)
    assert [(e.batch, e.action, e.rate) for e in adapter.guard.events] == [
        (n, "restart", 1.0) for n in restarts
    ]


def test_batches_that_do_not_normalise_are_answered_by_the_running_statistics(
    monkeypatch, tmp_path
):
    adapter = fata.adapt(build("resnet_bn"), "tent", lr=0.01)
    sign_is(monkeypatch, adapter, statistics=HARM)
    images = batches(6)
    found = [adapter(batch) for batch in images]
    assert [event.action for event in adapter.guard.events] == ["running"]
    model = build("resnet_bn").eval()
    with torch.no_grad():
        assert torch.equal(found[-1], model(images[-1]))
        assert not torch.allclose(found[0], model(images[0]))
    with adapter.frozen():
        assert torch.equal(adapter(images[-1]), found[-1])
    adapter.save(tmp_path / "s.safetensors")
    other = fata.adapt(build("resnet_bn"), "tent", lr=0.01)
    other.load(tmp_path / "s.safetensors")
    assert torch.equal(other(images[-1]), found[-1])
    adapter.reset()
    assert torch.equal(adapter(images[0]), found[0])


@pytest.mark.parametrize(
    ("witness", "other", "expected"),
    [
        ((0, 0.6), 0.6, True),
        ((20, 0.6), 0.7, True),  # a shift: a class has a third of the answers, the others the rest
        ((40, 0.6), 0.6, False),
        ((0, 0.9), 0.5, False),  # of all classes, but too few to normalise with
    ],
)
def test_a_batch_of_many_classes(witness, other, expected):
    many, sure = witness
    _, (*_, found, _) = compare({}, surely(sure, many), surely(other, 0), 448, batch_of_few_classes)
    assert bool(found) == expected


@pytest.mark.parametrize(("scenario", "many"), [("normal", 1), ("label-shift", 0)])
def test_real_batches_of_many_classes_and_of_one(scenario, many):
    found = mixed.judged("embedded", scenario, "speckle_noise", every=5)
    mixed_batches = sum(one[2] for one in found)
    assert abs(mixed_batches - many * len(found)) <= 1  # one may lie at the limit
    right, other = (sum(one[at] for one in found) / len(found) for at in (4, 3))
    assert (right > other) == many  # the batch's statistics are better where it is mixed


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["--every", "0"], "give 1 or more"), (["--data", "nowhere"], "nowhere"),
     (["--domains", "fogg"], "fogg")],
)  # fmt: skip
def test_the_command_refuses_wrong_input(wrong, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mixed", *wrong])
    with pytest.raises(SystemExit) as end:
        mixed.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_batch_whose_statistics_narrow_the_answers_is_not_answered_with_them():
    classes = surely(0.6, 0)
    narrow = classes[[n % 3 for n in range(64)]]  # three of ten, just as sure
    assert compare({}, classes, classes, 448, batch_of_few_classes)[1][-2] == 1
    assert compare({}, classes, narrow, 448, batch_of_few_classes)[1][-2] == 0


def test_no_batch_has_more_classes_than_images():
    """64 of 1,000 are as many as there can be."""
    every = torch.eye(1000)[:64]
    assert compare({}, every, every, 448)[1][-2] == 1


def test_a_batch_of_many_classes_is_answered_with_its_own_statistics(monkeypatch):
    """At once; and some of them end the time of the running ones."""
    guard = fata.Guard(rows=3 * 8)
    adapter = fata.adapt(build("resnet_bn"), "tent", guard=guard, lr=0.01)
    one, many = HARM, Evidence("narrowing", 0.0, 0.1, 0.0, mixed=True)
    shown = [one, one, many, one, many, many, many]
    found, images = [], batches(2 + len(shown))
    for number, batch in enumerate(images):
        sign_is(monkeypatch, adapter, statistics=([one, one, *shown])[number])
        found.append(adapter(batch))
    norm, source = fata.adapt(build("resnet_bn"), "norm"), build("resnet_bn").eval()
    for answer, batch, sign in zip(found[2:], images[2:], shown, strict=True):
        with torch.no_grad():
            assert torch.equal(answer, norm(batch) if sign.mixed else source(batch))
    actions = [(event.batch, event.action) for event in adapter.guard.events]
    assert actions == [(2, "running"), (len(images), "batch")]


def test_a_camera_that_saw_nothing_for_a_while():
    """Grey images have no statistics; what comes then is answered as well as if they had not."""
    loaded = fata.zoo.load("mini_resnet_bn")
    data = fata.data.open("embedded", fit=loaded)
    stream = fata.stream(data, domains=["speckle_noise"], images=9 * 64)
    shown = [(loaded.preprocess.normalise(b.images), b.labels) for b in stream]
    adapter = fata.adapt(loaded.model, "tent", lr=1e-4)
    for _ in range(3):
        adapter(loaded.preprocess.normalise(torch.full((64, 3, 32, 32), 0.5)))
    right = sum((adapter(images).argmax(1) == labels).sum().item() for images, labels in shown)
    assert [event.action for event in adapter.guard.events] == ["running", "batch"]
    adapter.unwrap()
    still = {}
    for spec in ("source", "norm"):
        other = fata.adapt(fata.zoo.load("mini_resnet_bn").model, spec)
        still[spec] = sum((other(x).argmax(1) == y).sum().item() for x, y in shown)
    assert right > (still["source"] + still["norm"]) / 2
    assert still["source"] < still["norm"]


def test_batches_of_one_image_are_too_small_to_normalise_with():
    """Nobody says so to the guard: it finds that the answers have narrowed."""
    loaded = fata.zoo.load("mini_resnet_bn")
    data = fata.data.open("embedded", fit=loaded)
    adapter = fata.adapt(loaded.model, "norm")
    assert adapter.guard is None  # nothing learns
    adapter.unwrap()
    adapter = fata.adapt(loaded.model, "tent", lr=1e-4)
    for batch in fata.stream(data, "bs1", domains=["spatter"], images=64):
        adapter(loaded.preprocess.normalise(batch.images))
    assert [event.action for event in adapter.guard.events] == ["running"]


@pytest.mark.parametrize(("net", "long"), [("vit_ln", "SETTLED"), ("resnet_bn", "SOONER")])
def test_once_it_went_well_for_long_it_looks_half_as_often(monkeypatch, net, long):
    """Sooner with BatchNorm."""
    monkeypatch.setattr(f"fata.guard.policy.{long}", 8)
    monkeypatch.setattr("fata.guard.evidence.ALARM", 1.0)  # never
    adapter = fata.adapt(build(net), "tent", guard=fata.Guard(every=4), lr=1e-6)
    sign_is(monkeypatch, adapter)
    looked = []
    for images in batches(24, rows=BRIEF):
        before = adapter.counts["rows_source"]
        adapter(images)
        looked.append(adapter.counts["rows_source"] > before)
    assert [n for n, look in enumerate(looked) if look] == [*EARLY, 8, 16]


def test_many_answers_of_one_class_call_for_a_look(monkeypatch):
    """Between two looks, and not at every batch; where no class has many, there are no more."""
    looks = {}
    for alarm in (0.0, 1.0):
        monkeypatch.setattr("fata.guard.evidence.ALARM", alarm)  # always, never
        adapter = fata.adapt(build("vit_ln"), "tent", guard=fata.Guard(every=50), lr=1e-6)
        for images in batches(20, rows=BRIEF):
            adapter(images)
        looks[alarm] = adapter.counts["rows_source"] // BRIEF
    assert looks[1.0] == len(EARLY)
    assert len(EARLY) < looks[0.0] <= 14


@pytest.fixture
def at_rest(monkeypatch, tmp_path):
    """An adapter whose guard has given up, and the file of its state."""
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda *_: HARM)
    for images in batches(8):
        adapter(images)
    adapter.save(tmp_path / "s.safetensors")
    return adapter, tmp_path / "s.safetensors"


def test_a_saved_state_goes_on_resting(at_rest):
    adapter, file = at_rest
    other = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    other.load(file)
    assert other.guard.resting
    assert other.guard.events == adapter.guard.events


def test_nobody_rests_without_a_guard(at_rest):
    """Its state can be gone on with; what the guard had decided is forgotten."""
    free = fata.adapt(build("resnet_gn"), "tent", guard=None, lr=0.01)
    free.load(at_rest[1])
    stepped = free.counts["stepped"]
    free(batches(1)[0])
    assert free.counts["stepped"] == stepped + 1


def test_saved_and_continued_is_never_stopped(tmp_path):
    images = batches(8)
    whole = fata.adapt(build("resnet_gn"), "eata+fata", guard=NEVER, lr=0.01)
    expected = [whole(batch) for batch in images]
    first = fata.adapt(build("resnet_gn"), "eata+fata", guard=NEVER, lr=0.01)
    for batch in images[:4]:
        first(batch)
    first.save(tmp_path / "s.safetensors")
    second = fata.adapt(build("resnet_gn"), "eata+fata", guard=NEVER, lr=0.01)
    second.load(tmp_path / "s.safetensors")
    assert torch.equal(
        torch.stack([second(batch) for batch in images[4:]]), torch.stack(expected[4:])
    )
    assert all(torch.equal(v, tensors(second)[k]) for k, v in tensors(whole).items())


def test_a_look_that_fails_leaves_all_as_it_was(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=NEVER, lr=0.01)
    images = batches(3)
    adapter(images[0])
    before = tensors(adapter)

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(adapter.guard), "_compare", broken)
        with pytest.raises(KeyboardInterrupt):
            adapter(images[1])
    assert all(torch.equal(v, tensors(adapter)[k]) for k, v in before.items())
    with torch.no_grad():
        for name, parameter in adapter.model.named_parameters():
            if f"parameter.{name}" in before:
                assert torch.equal(parameter, before[f"parameter.{name}"])


def test_an_undone_step_leaves_what_could_be_gone_back_to(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    sign_is(monkeypatch, adapter, adapted=HELP)
    *images, last = batches(4)
    for batch in images:
        adapter(batch)
    before = adapter.guard.states
    assert before
    sign_is(monkeypatch, adapter, adapted=HARM)

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(adapter._engine.group), "tally", broken)
    with pytest.raises(KeyboardInterrupt):
        adapter(last)
    assert adapter.guard.states == before


def test_an_image_that_overflows_does_not_blind_it():
    """A comparison in which one answer is no number, then one in which the majority is plain."""
    own, batch = (
        3 * answers(*[3] * 40, *range(10)),
        answers(*range(10), *[n % 10 for n in range(40)]),
    )
    broken = batch.clone()
    broken[0] = torch.nan
    memory, _ = compare({}, own, broken, 448, batch_of_few_classes)
    _, (few, *_) = compare(memory, own, batch, 448, batch_of_few_classes)
    assert few


@pytest.mark.parametrize("theirs", [[0] * 50, [n % 10 for n in range(50)]])
def test_an_answer_that_is_no_number_is_no_answer(theirs):
    """Not one of the first class, which `argmax` makes of it."""
    own = answers(*theirs)
    majority, now, doubt = signs(own, torch.full_like(own, torch.nan))
    assert majority == (theirs[1] == 0)
    assert now > doubt > 0


@pytest.mark.parametrize("first", [0.0, 1000.0])
def test_a_model_that_answers_no_numbers_is_put_aside(first):
    """Also in a stream of the first class."""
    model = build("resnet_gn")
    with torch.no_grad():
        model.fc.bias[0] += first
    adapter = fata.adapt(model, "tent", guard=fata.Guard(every=1))
    one, two = batches(2)
    adapter(one)
    state = adapter._engine.state
    state.theta = torch.full_like(state.theta, 1e30)
    adapter._engine.theta.write(state.theta)
    assert adapter(two).isfinite().all()
    assert adapter.guard.events[0].action == "aside"


def test_at_rest_the_statistics_are_watched(monkeypatch, caplog):
    """A batch that is too uniform for BatchNorm is one for a model that learns no more, too."""
    adapter = fata.adapt(build("resnet_bn"), "tent", guard=ALWAYS, lr=0.01)
    found = {"statistics": OPEN, "adapted": HARM}
    monkeypatch.setattr(type(adapter.guard), "_compare", lambda self, name, *_: found[name])
    images = batches(8)
    for batch in images[:4]:
        adapter(batch)
    assert adapter.guard.resting
    assert "nothing is learned until reset()" in caplog.text
    found["statistics"] = HARM
    answered = [adapter(batch) for batch in images[4:]]
    assert adapter.guard.events[-1].action == "running"
    assert adapter.guard.resting
    with torch.no_grad():
        expected = build("resnet_bn").eval()(images[-1])
    assert torch.equal(answered[-1], expected)


def test_a_state_of_before_it_compared_how_sure_both_are_goes_on():
    own, batch = answers(*[3] * 50), answers(*[n % 10 for n in range(50)])
    memory, _ = compare({}, own, batch, 448, batch_of_few_classes)
    old = {name: value for name, value in memory.items() if "surer" not in name}
    compare(old, own, batch, 448, batch_of_few_classes)


def test_single_images_are_not_condemned_by_chance():
    """One answer that differs among two is no sign of anything."""
    adapter = fata.adapt(build("vit_ln"), "tent", guard=fata.Guard(every=1), lr=1e-3)
    for images in batches(12, rows=1):
        adapter(images)
    assert adapter.guard.events == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"every": 0}, "every=0"),
        ({"narrowing": -1}, "narrowing=-1"),
        ({"slower": 2}, "slower=2"),
        ({"patience": 1.5}, "patience=1.5"),
    ],
)
def test_wrong_fields(fields, why):
    with pytest.raises(ValueError, match=why):
        fata.Guard(**fields)


def test_a_guard_that_is_none():
    with pytest.raises(TypeError, match=r"fata\.Guard"):
        fata.adapt(build("resnet_gn"), "tent", guard="yes")


def test_a_guarded_cell_is_another_cell_and_tells_what_was_done():
    free = Cell("mini_resnet_gn", "embedded", "normal", ("fog",), 5, "tent", 0, 16, 96, {"lr": 3.0})
    guarded = dataclasses.replace(free, guard=True)
    runner = CellRunner()
    assert key(runner.protocol(free)) != key(runner.protocol(guarded))
    assert runner.run(free, lambda *_: None)["guard"] is None
    result = runner.run(guarded, lambda *_: None)
    assert [event["action"] for event in result["guard"]]
    assert result["counts"]["rows_source"] > 0


def test_a_copy_reads_no_number_that_is_still_on_its_way():
    adapter = fata.adapt(fata.tiny.build("resnet_gn"), "tent")
    adapter(torch.rand(4, 3, 16, 16))
    here, there = (one._engine.watch._alarm for one in (adapter, copy.deepcopy(adapter)))
    assert here._most is not None
    assert there._most is None
