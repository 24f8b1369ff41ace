"""After warm_up a stream is what it would have been without, and meets no new captures."""

import pytest
import torch

import fata
from fata.engine.fast import captured as functions
from fata.engine.fast import execution as fast
from fata.methods import SPECS
from fata.testing.cases import images, network

NETS = ("resnet_bn", "resnet_gn", "vit_ln")
QUICK = {"cotta": {"views": 2}, "memo": {"views": 2}}


@pytest.fixture
def captured(monkeypatch):
    """On a CPU too the functions of a step go where captures go."""

    def forget(execution, forget=fast.Fast.forget):
        forget(execution)
        execution._captures = True

    monkeypatch.setattr(fast.Fast, "forget", forget)


def made(net, spec, **fields):
    host, _, plus = spec.partition("+")
    fields = {**QUICK.get(host, {}), **fields}
    if host == "eata":
        fields["fisher_alpha"] = 0
    if plus:
        fields["fata_threshold"] = 0.95
    return fata.adapt(network(net), spec, lr=2e-3, **fields)


def batches(count):
    return [images(16, seed=10 + n) for n in range(count)]


def everything(adapter):
    """State, counts, the guard's events, the model with its buffers, facts of the last batch."""
    model = {f"model.{name}": tensor for name, tensor in adapter.model.state_dict().items()}
    facts = adapter.counts, adapter.selected, adapter.guard and adapter.guard.events
    own = adapter._live()
    return {**adapter.state_dict(), **model}, facts, (own.loss, own.source_predicted)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, other[name]) if tensor else value == other[name], name


def assert_same(one, other):
    tensors, (counts, selected, events), (loss, source) = everything(one)
    others, (other_counts, other_selected, other_events), (other_loss, other_source) = everything(
        other
    )
    assert_equal(tensors, others)
    assert_equal(selected, other_selected)
    assert (counts, events, source) == (other_counts, other_events, other_source)
    assert (loss is None) == (other_loss is None)
    assert loss is None or torch.equal(loss, other_loss)


@pytest.mark.parametrize("spec", sorted({*SPECS} - {"source"}))
@pytest.mark.parametrize("net", NETS)
def test_a_stream_is_what_it_would_have_been(net, spec):
    one, other = made(net, spec), made(net, spec)
    numbers = torch.random.get_rng_state()
    assert one.warm_up(16, 16) > 0
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert_same(one, other)
    for x in batches(3):
        assert torch.equal(one(x), other(x))
        assert_same(one, other)


@pytest.mark.parametrize("spec", ["tent", "eata+fata", "sar+fata", "deyo+fata", "neo"])
@pytest.mark.parametrize("net", NETS)
def test_so_is_a_fast_one(net, spec, captured):
    one, other = (made(net, spec, speed="fast") for _ in "ab")
    one.warm_up(16, 16)
    assert_same(one, other)
    for x in batches(4):
        assert torch.equal(one(x), other(x))
        assert_same(one, other)


@pytest.mark.parametrize("speed", ["exact", "fast"])
def test_in_the_midst_of_a_stream(speed, captured):
    one, other = (made("resnet_bn", "eata+fata", speed=speed, blend=True) for _ in "ab")
    for x in batches(2):
        one(x)
        other(x)
    one.warm_up(16, (16, 16))
    assert_same(one, other)
    for x in batches(3):
        assert torch.equal(one(x), other(x))
        assert_same(one, other)


def test_it_goes_on_with_a_guard_and_its_memory():
    one, other = (made("resnet_bn", "tent", guard=fata.Guard(every=1)) for _ in "ab")
    one.warm_up(16, 16)
    for x in batches(6):
        assert torch.equal(one(x), other(x))
    assert other.counts["rows_source"] > 0
    assert_same(one, other)


@pytest.mark.parametrize("spec", ["tent", "eata+fata", "sar+fata", "deyo+fata"])
@pytest.mark.parametrize("net", NETS)
def test_no_later_batch_brings_a_new_capture(net, spec, captured):
    """Whatever number of rows is selected; captures of the guard's passes included."""
    adapter = made(net, spec, speed="fast", guard=fata.Guard(every=1))
    adapter.warm_up(16, 16)
    cache = adapter._live().execution._cache
    known = set(cache)
    assert known
    assert all(one.function._calls >= 2 for one in cache.values())  # the second captures
    for x in batches(6):
        adapter(x)
    with adapter.frozen():
        adapter(x)
    assert set(cache) == known


@pytest.mark.parametrize("net", NETS)
def test_only_warm_up_compiles(net, captured, monkeypatch):
    """A stream never waits for the compiler, and meets what was compiled for it."""
    compiled = []
    monkeypatch.setattr(functions, "compiled", lambda f, given: compiled.append(1) or f)
    one, other = (made(net, "eata+fata", speed="fast") for _ in "ab")
    for adapter in (one, other):
        adapter._live().execution._large = True
    for x in batches(3):
        other(x)
    assert not compiled
    assert other.compile_seconds == 0
    one.warm_up(16, 16)
    ready = len(compiled)
    assert ready >= 1
    assert one.compile_seconds > 0
    other.reset()
    for x in batches(3):
        assert torch.equal(one(x), other(x))
    one.warm_up(16, 16)
    assert len(compiled) == ready


def test_what_cannot_be_compiled_is_tried_once_and_counted_once(captured, monkeypatch):
    tries = []

    def fails(function, given):
        tries.append(1)
        function(*given)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(functions, "compiled", fails)
    one, other = (made("resnet_gn", "eata+fata", speed="fast") for _ in "ab")
    execution = one._live().execution
    execution._large = True
    with pytest.warns(UserWarning, match="cannot be compiled"):
        one.warm_up(16, 16)
    assert len(tries) == sum(cached.function._tried for cached in execution._cache.values())
    for x in batches(3):
        assert torch.equal(one(x), other(x))
    assert one.counts == other.counts


def test_callbacks_are_not_told():
    class Told:
        batches = 0

        def on_step(self, record):
            self.batches += 1

    told = Told()
    made("resnet_gn", "tent", callbacks=[told]).warm_up(4, 16)
    assert not told.batches


def test_a_model_in_double_and_one_that_takes_grey_images():
    adapter = fata.adapt(network("resnet_gn").double(), "tent")
    adapter.warm_up(4, 16)
    assert adapter(images(4).double()).dtype == torch.float64
    grey = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Flatten(),
        torch.nn.Linear(784, 3),
    )
    assert fata.adapt(grey, "tent").warm_up(2, (16, 16)) > 0


def test_the_state_stays_if_it_fails():
    one, other = made("resnet_gn", "tent"), made("resnet_gn", "tent")
    with pytest.raises(RuntimeError):
        one.warm_up(4, (5, 16, 16))  # five channels
    assert_same(one, other)
    assert torch.equal(one(images(8)), other(images(8)))


@pytest.mark.parametrize("given", [(0, 16), (4, 0), (4, (16,)), (4, (3, 16, 16, 1)), (4.0, 16)])
def test_what_is_no_batch(given):
    with pytest.raises(ValueError, match=r"give the images of a batch, and a side"):
        made("resnet_gn", "tent").warm_up(*given)
