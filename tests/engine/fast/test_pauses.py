"""A stream pauses for captures in its first batches alone, and never for a compiler."""

import math
import threading
import warnings

import pytest
import torch

import fata
from fata.engine.fast import captured
from fata.engine.fast import execution as fast
from fata.methods.losses import entropy
from fata.zoo import tiny
from precision import DOUBLE

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="needs a GPU; this machine has none"
        ),
    ),
]
ROWS = 16


def forget_but_capture(execution, forget=fast.Fast.forget):
    """As on a GPU, for a network that is worth compiling."""
    forget(execution)
    execution._captures = execution._large = True


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fast.Fast, "forget", forget_but_capture)
    monkeypatch.setattr(fast, "half_weights", lambda *_: ())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no fisher_data")
        yield


@pytest.fixture
def compiled(monkeypatch):
    """Rows of the functions that are compiled in the caller's thread, and stay as they are."""
    rows = []

    def noted(function, given):
        function(*given)
        if threading.current_thread() is threading.main_thread():
            rows.append(len(given[0]))
        return function

    monkeypatch.setattr(captured, "compiled", noted)
    return rows


def build(net, device):
    torch.manual_seed(0)
    model = tiny.build(net)
    with torch.no_grad():
        [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1].weight *= 4
    return model.double().to(device)


def adapted(net, spec, device, speed="fast", **fields):
    fields = {"guard": None, "lr": 1e-3, **fields}
    return fata.adapt(build(net, device), spec, speed=speed, **fields)


def batches(*selected, device="cpu"):
    """A batch each, of which so many rows are below the threshold that is returned too."""
    draw = torch.Generator().manual_seed(3)
    images = torch.rand(4 * ROWS, 3, 16, 16, generator=draw).double().to(device)
    found, order = entropy(fata.adapt(build("resnet_gn", device), "source")(images)).sort()
    sure, unsure = images[order[:ROWS]], images[order[-ROWS:]]
    threshold = found[ROWS : 3 * ROWS].mean().item() / math.log(10)
    return [torch.cat((sure[:n], unsure[: ROWS - n])) for n in selected], threshold


def functions(adapter):
    return adapter._engine.execution._cache.values()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", ["eata", "sar", "eata+fata"])
def test_numbers_of_rows_bring_nothing_new_after_three_batches(spec, device, compiled):
    """Half of a batch and a whole one are captured by then, and the pass over all rows."""
    stream, threshold = batches(3, 12, 5, 9, 1, 16, 7, 2, 14, 16, 16, 16, 16, 16, device=device)
    fields = {"threshold": threshold, **({"redundancy": 2.0} if "eata" in spec else {})}
    if "fata" in spec:
        fields["fata_threshold"] = threshold
    runs, known = [], []
    for speed in ("exact", "fast"):
        adapter = adapted("resnet_gn", spec, device, speed, **fields)
        logits = []
        for images in stream:
            logits.append(adapter(images))
            if speed == "fast":
                known.append(len(functions(adapter)))
        runs.append((adapter, logits))
    for one, other in zip(*(logits for _, logits in runs), strict=True):
        torch.testing.assert_close(one, other, **DOUBLE)
    assert runs[0][0].counts["selected"] == runs[1][0].counts["selected"]
    assert known[2:] == [known[2]] * (len(stream) - 2)
    assert not compiled
    if device == "cuda":
        again = [one.function for one in functions(runs[1][0]) if one.function.again]
        assert len(again) >= 4
        assert all(function._graph is not None for function in again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn", "vit_ln"])
def test_no_number_of_batches_compiles_in_the_callers_thread(net, device, compiled):
    adapter = adapted(net, "tent+fata", device)
    images = torch.rand(4, 3, 16, 16, device=device).double()
    for _ in range(66):
        adapter(images)
    assert not compiled


def test_what_is_prepared_moves_and_counts_nothing():
    """Between the second batch and the third, captures for other numbers of rows are made."""
    stream, threshold = batches(3, 3, 3, 3)
    fields = {"threshold": threshold, "redundancy": 2.0}
    exact, quick = (adapted("resnet_gn", "eata", "cpu", speed, **fields) for speed in SPEEDS)
    for images in stream:
        torch.testing.assert_close(exact(images), quick(images), **DOUBLE)
        assert torch.allclose(exact._engine.state.theta, quick._engine.theta.read(), **DOUBLE)
    seen, padded = (one.counts for one in (exact, quick))
    assert padded["rows_forward"] == seen["rows_forward"] + len(stream) * (ROWS // 2 - 3)
    assert padded["rows_backward"] == len(stream) * ROWS // 2


SPEEDS = ("exact", "fast")


def test_what_has_no_room_is_left_to_those_that_come(monkeypatch):
    """A stream of few rows a batch is not ended by a capture for all of them."""
    stream, threshold = batches(3, 3, 3, 3)
    plain = captured.CapturedFunction.plain

    def scarce(self, *given):
        if self.name in (f"descend, {ROWS} rows", f"whole, {ROWS} rows"):
            raise torch.OutOfMemoryError
        return plain(self, *given)

    monkeypatch.setattr(captured.CapturedFunction, "plain", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    fields = {"threshold": threshold, "redundancy": 2.0}
    exact, quick = (adapted("resnet_gn", "eata", "cpu", speed, **fields) for speed in SPEEDS)
    for images in stream:
        torch.testing.assert_close(exact(images), quick(images), **DOUBLE)
    assert quick.counts["stepped"] == len(stream)


def everything(adapter):
    """All of a state, and what the model has of it."""
    tensors = {name: v.clone() for name, v in adapter.model.state_dict().items()}
    state = {n: t for n, t in adapter.state_dict().items() if isinstance(t, torch.Tensor)}
    facts = adapter.counts, repr(adapter.guard), adapter._engine.state.watched, adapter.selected
    return tensors | state, facts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize(
    ("net", "spec", "fields"),
    [
        ("resnet_gn", "eata+fata", {}),
        ("resnet_gn", "deyo+fata", {}),
        ("vit_ln", "sar+fata", {}),
        ("resnet_bn", "eata+fata", {"blend": True}),
        ("resnet_bn", "tent", {}),
        ("resnet_bn", "norm", {}),
        ("resnet_gn", "cotta", {"views": 2}),
        ("resnet_gn", "memo", {"views": 2}),
        ("resnet_gn", "source", {}),
    ],
)
def test_warming_up_changes_nothing(net, spec, fields, speed, device, compiled):
    """Before the first batch, or amid a stream: it goes on as if nothing had happened."""
    draw = torch.Generator().manual_seed(3)
    stream = [torch.rand(8, 3, 16, 16, generator=draw).double().to(device) for _ in range(4)]
    one, other = (adapted(net, spec, device, speed, guard=True, **fields) for _ in range(2))
    for number, images in enumerate(stream):
        if number in (0, 2):
            before, chance = everything(other), torch.get_rng_state()
            assert other.warm_up(8, 16) >= 0
            after = everything(other)
            assert before[1] == after[1] or number == 2  # tensors of selected rows
            assert before[0].keys() == after[0].keys()
            assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
            assert torch.equal(torch.get_rng_state(), chance)
            torch.testing.assert_close(other.selected, one.selected)
        torch.testing.assert_close(one(images), other(images), **DOUBLE)
    assert one.counts["seen"] == other.counts["seen"]
    assert one.counts["selected"] == other.counts["selected"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("net", "spec", "fields"),
    [
        ("resnet_gn", "eata+fata", {"redundancy": 2.0}),
        ("resnet_gn", "sar+fata", {}),
        ("resnet_bn", "eata+fata", {"blend": True}),
    ],
)
def test_a_stream_that_was_warmed_up_for_needs_no_more(net, spec, fields, device, compiled):
    stream, threshold = batches(3, 12, 5, 16, 1, 16, 16, 16, 16, 16, 16, 9, device=device)
    fields = {"threshold": threshold, "fata_threshold": threshold, "recovery": 0.0, **fields}
    if "sar" not in spec:
        del fields["recovery"]
    adapter = adapted(net, spec, device, guard=True, **fields)
    adapter.warm_up(ROWS, (16, 16))
    ready, known = len(compiled), {id(one) for one in functions(adapter)}
    assert ready >= 2
    for images in stream:
        adapter(images)
        assert {id(one) for one in functions(adapter)} == known
    assert len(compiled) == ready
    assert all(one.function.again for one in functions(adapter) if one.function._calls)
    assert sum(one.function.compiled for one in functions(adapter)) == ready


@pytest.mark.parametrize("size", [16, (16, 16), (3, 16, 16), torch.Size((3, 16, 16)), [16, 16]])
def test_images_are_of_any_form(size, compiled):
    adapter = adapted("resnet_gn", "tent", "cpu")
    adapter.warm_up(4, size)
    assert len(functions(adapter)) > 0
    first = next(iter(adapter._engine.execution._cache))
    assert (torch.Size((4, 3, 16, 16)), torch.float64) in first


@pytest.mark.parametrize(("rows", "size"), [(0, 16), (4, 0), (4, (16,)), (4, (1, 3, 16, 16))])
def test_what_is_no_size_is_an_error(rows, size):
    with pytest.raises(ValueError, match="height, width"):
        adapted("resnet_gn", "tent", "cpu").warm_up(rows, size)


def test_on_a_cpu_there_is_nothing_to_warm_up(monkeypatch):
    monkeypatch.undo()
    for speed in SPEEDS:
        adapter = adapted("resnet_gn", "tent", "cpu", speed)
        passes = []
        adapter.model.register_forward_hook(lambda *_, into=passes: into.append(1))
        assert adapter.warm_up(16, 16) < 1
        assert not passes
