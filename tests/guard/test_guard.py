"""The guard: silent where nothing is wrong, and back in time where something is."""

import dataclasses
import math
import warnings
from itertools import pairwise

import pytest
import torch

import fata
from fata.bench.cell import Cell, key
from fata.bench.run.runner import CellRunner
from fata.guard.evidence import Evidence
from fata.methods import SPECS
from fata.zoo import tiny
from precision import DOUBLE

NETS = ("resnet_bn", "resnet_gn", "vit_ln")
NEVER = fata.Guard(level=0.0, every=1)  # compares every batch, and is content
ALWAYS = fata.Guard(level=1.0, every=1, trial=0, patience=1)
HARM, GAIN, OPEN = (5.0, -5.0), (-5.0, 5.0), (0.0, 0.0)  # log odds


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
    assert guarded.guard.events[0].action == "aside"
    assert guarded.health.gain < 0


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", ["tent", "eata+fata", "sar+fata", "deyo+fata", "neo"])
def test_no_pass_of_the_source_model_where_its_logits_are_known(net, spec, blend, monkeypatch):
    """At the first batch, which meets the source weights; all else is as with the pass."""
    runs, passed = [], []
    for knows in (True, False):
        if not knows:
            monkeypatch.setattr("fata.engine.engine.Known", lambda *_: None)
        adapter = fata.adapt(build(net).double(), spec, guard=NEVER, blend=blend, lr=0.01)
        answers = []
        for images in batches():
            answers.append(adapter(images.double()))
            passed.append(adapter.counts["rows_source"])
        runs.append((adapter, torch.stack(answers)))
    (one, found), (other, expected) = runs
    torch.testing.assert_close(found, expected, **DOUBLE)
    assert one.guard.events == other.guard.events
    for name, tensor in one.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(tensor, other.state_dict()[name], **DOUBLE)
    of_the_source = 2 if net == "resnet_bn" and not blend else 1  # also with the batch's statistics
    assert passed[6] == 8 * of_the_source
    assert passed[0] == (8 if of_the_source == 2 else 0)


@pytest.mark.parametrize("net", NETS)
def test_where_both_models_give_the_same_logits_those_are_the_source_models(net, monkeypatch):
    """Put aside at the first batch, before anything was learned."""
    adapter = fata.adapt(build(net), "tent", guard=fata.Guard(every=1), lr=0.01)
    told(monkeypatch, adapter, HARM)
    adapter(batches(1)[0])
    assert adapter._live().source_predicted
    assert adapter.selected == {}


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


@pytest.fixture
def at_rest(monkeypatch, tmp_path):
    """An adapter whose guard has given up, and the file of its state."""
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    told(monkeypatch, adapter, HARM)
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
        patch.setattr(type(adapter.guard), "_compared", broken)
        with pytest.raises(KeyboardInterrupt):
            adapter(images[1])
    assert all(torch.equal(v, tensors(adapter)[k]) for k, v in before.items())
    with torch.no_grad():
        for name, parameter in adapter.model.named_parameters():
            if f"parameter.{name}" in before:
                assert torch.equal(parameter, before[f"parameter.{name}"])


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
        ({"level": -1}, "level=-1"),
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
    plain = runner.run(free, lambda *_: None)
    assert plain["guard"] is plain["health"] is None
    result = runner.run(guarded, lambda *_: None)
    health = result["health"]
    assert health["curve"]["batch"] == result["curve"]["batch"] == [1, 2, 3, 4, 5, 6]
    assert health["curve"]["adapted"][0] == pytest.approx(health["curve"]["source"][0], abs=0.01)
    for name in ("source", "adapted", "predicted"):
        assert health[name] == pytest.approx(sum(health["curve"][name]) / 6)
        assert all(0 <= percent <= 100 for percent in health["curve"][name])
    assert health["predicted"] != health["adapted"]  # the source model took over
    assert [event["action"] for event in result["guard"]]
    assert result["counts"]["rows_source"] > 0


def told(monkeypatch, adapter, *signs, worse=0):
    """The evidence of the next checks, the last of them for ever; so many images are worse."""
    left = list(signs)

    def compared(watch, source, *others):
        harm, gain = left.pop(0) if len(left) > 1 else left[0]
        return Evidence(source, harm, gain, None, torch.arange(len(source)) < worse)

    monkeypatch.setattr(type(adapter.guard), "_compared", compared)


def events(adapter):
    return [(event.batch, event.action) for event in adapter.guard.events]


@pytest.mark.parametrize("net", NETS)
def test_a_model_in_doubt_learns_while_its_source_answers(monkeypatch, tmp_path, net):
    """It predicts again when it has proved its worth, as if nothing had been."""
    free = fata.adapt(build(net), "tent", guard=None, lr=0.01)
    adapter = fata.adapt(build(net), "tent", guard=fata.Guard(every=1), lr=0.01)
    aside = {2, 3, 4, 5, 6, 7}  # one batch alone does not prove a gain
    for number, images in enumerate(batches(10, rows=32)):
        told(monkeypatch, adapter, HARM if number in (2, 3) else GAIN)
        expected, found = free(images), adapter(images)
        assert torch.equal(found, expected) == (number not in aside)
        with adapter.frozen(), free.frozen():
            again = adapter(images)
            assert torch.equal(again, free(images)) == (number not in aside)
        if number in aside:
            torch.testing.assert_close(again, found, rtol=0.01, atol=0.01)  # kept in half precision
        adapter.save(tmp_path / "s.safetensors")
        adapter = fata.adapt(build(net), "tent", guard=fata.Guard(every=1), lr=0.01)
        adapter.load(tmp_path / "s.safetensors")
    assert events(adapter) == [(3, "aside"), (9, "trusted")]
    assert adapter.counts["stepped"] == 10


def test_what_moves_to_a_frequent_class_is_answered_by_the_source_until_a_gain_is_likely(
    monkeypatch,
):
    """It is learned from as ever."""
    free = fata.adapt(build("resnet_gn"), "tent", guard=None, lr=0.01)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(every=1), lr=0.01)
    told(monkeypatch, adapter, GAIN, worse=3)
    source = build("resnet_gn").eval()
    for number, images in enumerate(batches(8), 1):
        expected, found = free(images), adapter(images)
        assert torch.equal(found[3:], expected[3:])
        with torch.no_grad():
            assert torch.equal(found[:3], source(images)[:3]) == (number <= 4)
        assert torch.equal(found[:3], expected[:3]) == (number == 1 or number > 4)
    assert events(adapter) == []
    assert adapter.counts["kept"] == 4 * 3
    before, after = tensors(free), tensors(adapter)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("net", "rows", "fields", "phase"),
    [
        ("resnet_bn", 31, {}, "aside"),
        ("resnet_bn", 32, {}, "adapting"),
        ("resnet_bn", 31, {"blend": True}, "adapting"),
        ("resnet_gn", 31, {}, "adapting"),
    ],
)
def test_statistics_of_few_images_are_not_trusted_at_first(monkeypatch, net, rows, fields, phase):
    adapter = fata.adapt(build(net), "tent", lr=0.01, **fields)
    told(monkeypatch, adapter, OPEN)
    full, few = batches(2, rows=rows)
    adapter(full)
    assert adapter.guard.phase == phase
    adapter(few[:3])  # a short batch later on changes nothing
    assert adapter.guard.phase == phase


def test_a_model_that_restarts_is_judged_by_what_it_does(monkeypatch):
    """Few images are mistrusted once; then harm that has ended is no failure."""
    adapter = fata.adapt(build("resnet_bn"), "tent", guard=fata.Guard(trial=3 * 8), lr=0.01)
    told(monkeypatch, adapter, *[HARM] * 4, OPEN)
    for images in batches(12):
        adapter(images)
    assert events(adapter) == [(1, "aside"), (4, "back")]
    assert adapter.guard.phase == "aside"


def test_without_batchnorm_the_source_predicts_as_it_did(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    told(monkeypatch, adapter, HARM)
    images = batches(3)
    found = [adapter(some) for some in images]
    with torch.no_grad():
        assert torch.equal(found[-1], build("resnet_gn").eval()(images[-1]))


def test_what_is_learned_from_is_not_told_as_what_is_predicted(monkeypatch):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(every=1), lr=0.01)
    told(monkeypatch, adapter, OPEN, HARM)
    selected = []
    for images in batches(3):
        adapter(images)
        selected.append(bool(adapter.selected))
    assert selected == [True, False, False]
    assert adapter.counts["stepped"] == 3


@pytest.mark.parametrize("net", NETS)
def test_what_is_unwrapped_is_what_predicted(monkeypatch, net):
    adapter = fata.adapt(build(net).eval(), "tent", guard=fata.Guard(every=1), lr=0.01)
    told(monkeypatch, adapter, HARM)
    images = batches(4)
    for some in images:
        adapter(some)
    with adapter.frozen():
        expected = adapter(images[-1])
    with torch.no_grad():
        torch.testing.assert_close(adapter.unwrap()(images[-1]), expected)


@pytest.mark.parametrize("size", [8, 4])
def test_harm_takes_more_odds_the_longer_a_stream_is(monkeypatch, size):
    """As many to 1 more as averages of `rows` images were seen: each is a chance of an alarm."""
    guard = fata.Guard(every=1, rows=8, trial=0, slower=1.0)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=guard, lr=0.01)
    most = int(8 * 0.1 * math.e**5) // size  # batches after which odds of e^5 are enough

    def seen(signs):
        told(monkeypatch, adapter, *signs)
        for images in batches(len(signs), size):
            adapter(images)

    seen([OPEN] * (most - 1) + [HARM])
    assert events(adapter) == [(most, "aside")]
    adapter.reset()
    seen([OPEN] * most + [HARM])
    assert events(adapter) == []
    seen([HARM])
    assert events(adapter) == [(most + 2, "aside")]
    seen([HARM] * 2)  # together they are a failure, and the stream begins again
    assert [action for _, action in events(adapter)] == ["aside", "back"]
    seen([GAIN] * 5 + [HARM])
    assert [action for _, action in events(adapter)][2:] == ["trusted", "aside"]


def test_after_a_return_images_keep_predictions_until_a_gain_is_likely_again(monkeypatch):
    guard = fata.Guard(every=1, trial=16)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=guard, lr=0.01)
    kept = []
    for signs, rows in (([HARM] + [GAIN] * 5, 1), ([GAIN] * 7, 8)):
        told(monkeypatch, adapter, *signs, worse=3)
        for images in batches(len(signs), rows):
            before = adapter.counts["kept"]
            adapter(images)
            kept.append(adapter.counts["kept"] - before)
    assert events(adapter) == [(1, "aside"), (6, "trusted")]
    assert kept[6:] == [3] * 4 + [0] * 3  # five gains of half a unit are more than log 10


def test_a_trial_lasts_some_predictions(monkeypatch):
    """Only a model that still does harm restarts; one of which nothing is known goes on."""
    for sign, expected in ((HARM, [(1, "aside"), (4, "back")]), (OPEN, [(1, "aside")])):
        adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(trial=3 * 8), lr=0.01)
        told(monkeypatch, adapter, HARM, sign)
        for images in batches(5):
            adapter(images)
        assert events(adapter) == expected


def test_it_restarts_slower_and_rests_in_the_end(monkeypatch, caplog):
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=ALWAYS, lr=0.01)
    told(monkeypatch, adapter, HARM)
    for images in batches(8):
        adapter(images)
    assert [event.action for event in adapter.guard.events] == ["aside", "back", "rest"]
    assert [event.rate for event in adapter.guard.events] == pytest.approx([1, 0.1, 0.01])
    assert adapter.guard.resting
    assert adapter.guard.phase == "rest"
    assert "nothing is learned until reset()" in caplog.text
    source = build("resnet_gn").state_dict()
    assert all(
        torch.equal(tensor, source[name.removeprefix("parameter.")])
        for name, tensor in tensors(adapter).items()
        if name.startswith("parameter.")
    )
    adapter.reset()
    assert not adapter.guard.resting
    assert adapter.guard.events == []


def test_the_latest_events_are_kept(monkeypatch):
    monkeypatch.setattr("fata.guard.policy.LATEST", 3)
    adapter = fata.adapt(build("resnet_gn"), "tent", guard=fata.Guard(level=1.0, every=1), lr=0.01)
    told(monkeypatch, adapter, *[HARM, GAIN] * 6)
    for images in batches(12):
        adapter(images)
    found = [event.batch for event in adapter.guard.events]
    assert len(found) == 3
    assert found[-1] >= 11


@pytest.mark.parametrize(("rows", "most"), [(64, 8), (16, 4), (4, 2)])
def test_checks_become_rarer(monkeypatch, rows, most):
    """As long as nothing happens; batches below 32 images are checked more often."""
    adapter = fata.adapt(build("vit_ln"), "tent", guard=fata.Guard(every=8, part=0.25), lr=1e-6)
    told(monkeypatch, adapter, OPEN)
    checked = []
    for number, images in enumerate(batches(64, rows=rows), 1):
        adapter(images)
        watched = adapter._live().state.watched
        checked += [number] * (watched.last == watched.since)
    gaps = [after - before for before, after in pairwise(checked)]
    assert checked[:4] == [1, 2, 3, 4]
    assert gaps == sorted(gaps)
    assert gaps[-1] == most


def right(spec, stream, **fields):
    """Accuracy on a stream of an embedded BatchNorm network, and what the guard did."""
    loaded = fata.zoo.load("mini_resnet_bn")
    adapter = fata.adapt(loaded.model, spec, **fields)
    found = sum(
        (adapter(loaded.preprocess.normalise(b.images)).argmax(1) == b.labels).sum().item()
        for b in stream
    )
    return found / stream.images, adapter


@pytest.mark.parametrize(
    ("scenario", "options"),
    [("few-classes", {"classes": 3}), ("label-shift", {}), ("bs1", {}), ("normal", {})],
)
def test_batches_that_batchnorm_cannot_normalise_with_do_no_harm(scenario, options):
    """Of few classes or images: the source model's statistics are those of the stream."""
    loaded = fata.zoo.load("mini_resnet_bn")
    data = fata.data.open("embedded", fit=loaded)
    images = 96 if scenario == "bs1" else 640
    stream = fata.stream(data, scenario, domains=["spatter"], images=images, **options)
    source, _ = right("source", stream)
    free, _ = right("tent", stream, guard=None, lr=1e-4)
    held, adapter = right("tent", stream, lr=1e-4)
    if scenario == "normal":
        assert held == pytest.approx(free, abs=0.02)
    else:
        assert free < source - 0.1
        assert held > (source + max(free, source - 0.2)) / 2  # some images pass until it shows
        assert adapter.guard.events[0].action == "aside"


def test_a_camera_that_saw_nothing_for_a_while():
    """Grey images have no statistics; what comes then is predicted as if they had not been."""
    loaded = fata.zoo.load("mini_resnet_bn")
    data = fata.data.open("embedded", fit=loaded)
    stream = fata.stream(data, domains=["speckle_noise"], images=9 * 64)
    shown = [(loaded.preprocess.normalise(b.images), b.labels) for b in stream]
    adapter = fata.adapt(loaded.model, "tent", lr=1e-4)
    for _ in range(3):
        adapter(loaded.preprocess.normalise(torch.full((64, 3, 32, 32), 0.5)))
    found = sum((adapter(images).argmax(1) == labels).sum().item() for images, labels in shown)
    source = fata.adapt(fata.zoo.load("mini_resnet_bn").model, "source")
    still = sum((source(images).argmax(1) == labels).sum().item() for images, labels in shown)
    assert found > still


def test_a_guard_is_told_apart_by_its_state_of_another_version(tmp_path):
    adapter = fata.adapt(build("resnet_gn"), "tent")
    state = adapter.state_dict()
    state["meta"]["format"] = 4
    with pytest.raises(fata.StateError, match="this version of fata reads"):
        adapter.load_state_dict(state)


def test_the_batchs_statistics_are_judged_at_first_in_doubt_and_at_times(monkeypatch):
    """Every batch is checked, but they need a forward pass of their own."""
    guard = fata.Guard(every=2, part=0.0, rows=96, trial=128)
    adapter = fata.adapt(build("resnet_bn"), "tent", guard=guard, lr=0.01)
    model, compared, judged = adapter._live().source_model, adapter.guard._compared, []
    beside = model.beside
    monkeypatch.setattr(model, "beside", lambda *given: judged.append(number) or beside(*given))
    monkeypatch.setattr(
        adapter.guard, "_compared", lambda *given: compared(*given)._replace(harm=harm, gain=-1.0)
    )
    for number, images in enumerate(batches(20, rows=32), 1):
        harm = guard.limit() / 2 if number == 13 else -5.0
        adapter(images)
    assert judged == [1, 2, 3, 4, 8, 12, 14, 16, 20]  # three have 96 images; harm was seen at 13
    harm = guard.limit() + 1
    adapter(images), adapter(images)
    judged.clear()
    harm = -5.0
    for _ in range(3):
        adapter(images)
    assert adapter.guard.phase == "aside"
    assert len(judged) == 3  # each batch, while the source model predicts
