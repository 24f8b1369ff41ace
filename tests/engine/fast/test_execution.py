"""The fast way gives what the exact one gives."""

import copy
import functools
import gc
import math
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fata
from fata.engine.arguments import default_speed
from fata.engine.engine import Engine
from fata.engine.fast import bfloat16 as half
from fata.engine.fast import captured, decompositions, trees
from fata.engine.fast import execution as fast
from fata.engine.state import Moving, Terms
from fata.guard.events import Phase, Watched
from fata.methods import SPECS
from fata.methods.fata import Perturb
from fata.methods.losses import entropy
from fata.methods.selection import Selection
from fata.zoo import tiny
from precision import DOUBLE, assert_rounded_alike, in_bfloat16, rms

NETS = ("resnet_bn", "resnet_gn", "vit_ln")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="needs a GPU; this machine has none"
        ),
    ),
]
SIZES = (16, 16, 16, 5, 16, 16)  # three times: run, record, replay


def build(net):
    """A network that is surer of some rows than of others."""
    torch.manual_seed(0)
    model = tiny.build(net)
    with torch.no_grad():
        [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1].weight *= 4
    return model


def half_of_the_rows(net, spec):
    """Thresholds that some rows pass and others do not; FATA's are not the host's."""
    logits = fata.adapt(build(net).double(), "norm")(batches("cpu", torch.float64)[0])
    rows = entropy(logits).sort().values / math.log(10)
    host, plus = (rows[n : n + 2].mean().item() for n in (6, 9))  # between two rows, not at one
    fields = {"threshold": host}
    if "+fata" in spec:
        fields["fata_threshold"] = plus
    if "deyo" in spec:
        fields["plpd_threshold"] = -1e-6  # a ViT that ignores places has 0, but for rounding
    if "eata" in spec:
        fields["redundancy"] = 1.0
    return fields


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no fisher_data")
        yield


@pytest.fixture
def full_precision(monkeypatch):
    """Programs as they are recorded, but not in bfloat16, in which a row may miss a threshold."""
    monkeypatch.setattr(fast, "half_weights", lambda *_: ())


def forget_but_capture(execution, forget=fast.Fast.forget):
    forget(execution)
    execution._captures = True


def forget_but_stay_large(execution):
    forget_but_capture(execution)
    execution._large = True


@pytest.fixture(autouse=True)
def padded(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(fast.Fast, "forget", forget_but_capture)


def batches(device, dtype=torch.float32):
    draw = torch.Generator().manual_seed(3)
    return [torch.rand(size, 3, 16, 16, generator=draw).to(device, dtype) for size in SIZES]


def run(net, spec, speed, device, dtype=torch.float64, **fields):
    model = build(net).to(device, dtype)
    adapter = fata.adapt(model, spec, speed=speed, lr=0.01, **fields)
    if fields.get("threshold", 1.0) < 1:
        adapter._engine.state.share = 0.5  # known from earlier batches
    return adapter, [adapter(images) for images in batches(device, dtype)]


def same(one, other):
    """Both ran in float64 and gave the same logits and states."""
    for a, b in zip(one[1], other[1], strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, **DOUBLE)
    for name, tensor in one[0].state_dict().items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(tensor, other[0].state_dict()[name], **DOUBLE)


@pytest.mark.parametrize("device", DEVICES[1:])  # on the CPU: fata.testing.checks
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", [s for s in SPECS if s not in ("cotta", "memo")])
def test_the_same_answers_and_the_same_state(net, spec, device, full_precision):
    same(*(run(net, spec, speed, device) for speed in ("exact", "fast")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", ["eata", "eata+fata", "sar", "sar+fata", "deyo", "deyo+fata"])
def test_some_rows_are_selected(net, spec, device, full_precision):
    """Rows are padded: what is added weighs nothing."""
    fields = half_of_the_rows(net, spec)
    one, other = (run(net, spec, speed, device, **fields) for speed in ("exact", "fast"))
    same(one, other)
    counts = one[0].counts
    assert all(0 < count < counts["seen"] for count in counts["selected"].values())
    assert counts["stepped"] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", ["norm", "tent", "eata+fata", "sar+fata", "deyo+fata"])
def test_blended_statistics_are_captured(spec, device, full_precision):
    """FATA's tail, and SAM's second pass, use those of this batch, as the exact step does."""
    fields = half_of_the_rows("resnet_bn", spec) if spec not in ("norm", "tent") else {}
    exact, quick = (
        run("resnet_bn", spec, speed, device, blend=True, **fields) for speed in ("exact", "fast")
    )
    same(exact, quick)
    assert exact[0]._engine.state.norm["weight"].any()  # the stream's have a part in them
    for name, buffer in exact[0].model.named_buffers():
        torch.testing.assert_close(quick[0].model.get_buffer(name), buffer, **DOUBLE)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", ["eata+fata", "sar", "sar+fata", "deyo+fata"])
def test_without_padding_it_is_the_same(net, spec, monkeypatch):
    """As on a CPU, where nothing is recorded."""
    fields = half_of_the_rows(net, spec)
    padded = run(net, spec, "fast", "cpu", **fields)
    assert padded[0]._engine.execution._captures
    monkeypatch.undo()
    plain = run(net, spec, "fast", "cpu", **fields)
    assert not plain[0]._engine.execution._captures
    same(padded, plain)


@pytest.mark.parametrize("net", NETS)
def test_a_cpu_sees_and_learns_in_one_pass_where_most_rows_are_selected(net, monkeypatch):
    monkeypatch.undo()
    every = {"threshold": 1.0, "plpd_threshold": -1.0, "fata_threshold": 1.0}
    exact, quick = (run(net, "deyo+fata", speed, "cpu", **every)[0] for speed in ("exact", "fast"))
    assert quick.counts == exact.counts
    assert quick.counts["rows_forward"] == 2 * quick.counts["seen"]  # DeYO passes rows to select


EVERY_ROW = {  # so that rounding decides on none
    "eata+fata": {"threshold": 1.0, "redundancy": 2.0, "fisher_alpha": 0.0},
    "sar+fata": {"threshold": 1.0, "recovery": 0.0},
    "deyo+fata": {"threshold": 1.0, "plpd_threshold": -1.0},
}


def put_in_place(adapter, other):
    """Give an adapter the weights and averages of another one, of another precision."""
    state, given = adapter._engine.state, other._engine.state

    def alike(tensor):
        return tensor.to(state.theta.dtype) if tensor.is_floating_point() else tensor

    state.theta, state.velocity = alike(given.theta), alike(given.velocity)
    for name in ("host", "plus"):
        setattr(state, name, {key: alike(value) for key, value in getattr(given, name).items()})
    adapter._engine.theta.write(state.theta)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", EVERY_ROW)
def test_half_precision_is_as_exact_as_it_can_be(net, spec, device, monkeypatch):
    """Every step from the same weights: logits and updates err as rounding to bfloat16 does."""
    if device == "cpu":
        monkeypatch.undo()
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(half, "WIDE", 0)
    model = build(net).to(device)
    fields = {"lr": 0.01, "guard": None, "fata_threshold": 1.0, **EVERY_ROW[spec]}
    exact, rough = (
        fata.adapt(one, spec, speed="exact", **fields)
        for one in (copy.deepcopy(model).double(), in_bfloat16(model))
    )
    halved = fata.adapt(model, spec, speed="fast", **fields)
    answers, moves = ([], [], []), ([], [], [])
    for images in batches(device):
        put_in_place(halved, exact), put_in_place(rough, exact)
        before = exact._engine.state.theta
        for adapter, found, moved in zip((halved, rough, exact), answers, moves, strict=True):
            dtype = adapter._engine.state.theta.dtype
            found.append(adapter(images.to(dtype)))
            moved.append(adapter._engine.state.theta - before)
    assert halved._engine.execution._halves
    assert all(parameter.dtype == torch.float32 for parameter in halved.model.parameters())
    assert all((found != found.bfloat16()).any() for found in answers[0])  # the head is in full
    assert halved.counts["selected"] == exact.counts["selected"]
    assert halved.counts["stepped"] == exact.counts["stepped"] == len(SIZES)
    assert_rounded_alike(*answers)
    assert_rounded_alike(*moves)


@pytest.mark.parametrize(("unit", "wide"), [(False, 0), (True, 10**9)])
def test_half_precision_only_where_a_cpu_gains_from_it(unit, wide, monkeypatch):
    """It has a unit for it, and the network is wide enough; else all is in full precision."""
    monkeypatch.undo()
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: unit)
    monkeypatch.setattr(half, "WIDE", wide)
    adapter = fata.adapt(build("resnet_gn"), "tent", speed="fast", guard=None)
    logits = adapter(batches("cpu")[0])
    assert not adapter._engine.execution._halves
    with torch.no_grad():
        expected = build("resnet_gn").double().eval()(batches("cpu", torch.float64)[0])
    rounded = in_bfloat16(build("resnet_gn")).eval()(batches("cpu", torch.float64)[0])
    assert rms([logits - expected]) < rms([rounded - expected]) / 100  # of 65,536 times


def assert_nearer(found, new, old):
    """What the new weights predict, but for some percent in bfloat16, and not what the old did."""
    assert 4 * rms([found - new]) < rms([found - old])


class Heads(torch.nn.Module):
    """Two, each made before the layers that come before it in a pass."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 10), torch.nn.Linear(8, 10)
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 8, 3)
        )

    def forward(self, images):
        z = self.body(images).mean((2, 3))
        return (self.one(z) + self.other(z)) / 2


@pytest.mark.parametrize("device", DEVICES)
def test_whatever_gives_logits_is_in_full(device, monkeypatch):
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(half, "WIDE", 0)
    torch.manual_seed(0)
    adapter = fata.adapt(Heads().to(device), "tent", speed="fast", guard=None)
    images = batches(device)[0]
    for _ in range(3):
        logits = adapter(images)
        assert (logits != logits.bfloat16()).any()
    heads = {adapter.model.one, adapter.model.other}
    assert set(adapter._engine.execution._heads) == heads
    assert {layer for layer, _, _ in adapter._engine.execution._halves} == {
        adapter.model.body[0],
        adapter.model.body[2],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
def test_group_norm_in_a_large_network_is_passed_in_half_precision_once_it_is_compiled(
    device, net, monkeypatch
):
    """Before that the kernels of GroupNorm copy what bfloat16 saves."""
    monkeypatch.setattr(fast, "pays_on_cpu", lambda *_: True)
    monkeypatch.setattr(fast.Fast, "forget", forget_but_stay_large)
    monkeypatch.setattr(captured, "compiled", lambda function, given: function)
    adapter = fata.adapt(build(net).to(device), "tent", speed="fast", guard=None)
    layer = next(m for m in adapter.model.modules() if isinstance(m, torch.nn.Conv2d))
    seen = set()
    adapter(batches(device)[0])  # finds out where it pays
    layer.register_forward_pre_hook(lambda layer, _: seen.add(layer.weight.dtype))
    adapter(batches(device)[0])
    plain = {torch.float32} if net == "resnet_gn" else {torch.bfloat16}
    assert seen == plain
    adapter.warm_up(16, 16)
    assert torch.bfloat16 in seen


def test_the_last_layer_in_a_pass_gives_logits_even_before_they_are_averaged():
    """As of a network that ends in a convolution."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 10, 1))
    images = torch.rand(2, 3, 8, 8)
    assert half.logit_layers(model, lambda: model(images).mean((2, 3))) == [model[1]]
    assert half.logit_layers(model.half(), lambda: model(images.half()).mean((2, 3))) == []
    assert not any(layer._forward_hooks for layer in model)


class Strict(torch.nn.Module):
    """Writes its features into a tensor of another precision than bfloat16, which is an error."""

    def __init__(self):
        super().__init__()
        self.net = build("resnet_gn")

    def forward(self, images):
        if images.shape[1] != 3:
            raise RuntimeError("of no use")
        taken = torch.zeros(len(images), 8, 16, 16, device=images.device)
        taken[torch.arange(len(images))] = self.net.conv1(images)
        hidden = self.net.layer2(self.net.layer1(self.net.bn1(taken)))
        return self.net.fc(self.net.layer4(self.net.layer3(hidden)).mean((2, 3)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_fails_in_bfloat16_stays_in_full_precision(device, monkeypatch):
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(half, "WIDE", 0)
    exact = fata.adapt(Strict().to(device), "tent", speed="exact", guard=None)
    adapter = fata.adapt(Strict().to(device), "tent", guard=None)
    assert adapter.speed == "fast"
    images = batches(device)[0]
    with pytest.raises(RuntimeError, match="of no use"):
        adapter(images[:, :2])
    with pytest.warns(UserWarning, match="fails in bfloat16 and stays in float32: Index put"):
        found = adapter(images)
    torch.testing.assert_close(found, exact(images), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(adapter(images), exact(images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": None, "dropout_p": 0.0, "is_causal": False},
        {"is_causal": True},
        {"scale": 0.5},
        {"scale": 0.0},
        {"enable_gqa": True},
        {"attn_mask": torch.eye(5, dtype=torch.bool)},
    ],
)
def test_attention_as_products_is_attention(options):
    draw = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 3, 5, 4, generator=draw).double() for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, **options)
    with half.PlainAttention():
        found = attention(query, key, value, **options)
    torch.testing.assert_close(found, expected, **DOUBLE)


@pytest.mark.parametrize("spec", ["tent", "deyo+fata"])
def test_a_checkpointed_model_learns_in_half_precision_on_a_cpu(spec, monkeypatch):
    """Its blocks are passed again within `torch.autograd.grad`, and must save the same there."""
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(half, "WIDE", 0)
    checkpoint = torch.utils.checkpoint.checkpoint
    states = []
    for saves in (False, True):
        model = build("vit_ln")
        if saves:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        adapter = fata.adapt(model, spec, speed="fast", lr=0.01, guard=None)
        for images in batches("cpu"):
            adapter(images)
        assert adapter.counts["stepped"] == len(SIZES)
        states.append(adapter._engine.state.theta - adapter._engine.source)
    plain, saved = states
    assert (saved - plain).norm() < 0.05 * plain.norm()  # but for other sums in bfloat16


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_elsewhere_by_now_are_found(device, monkeypatch):
    """As after `model.half()` or `.to(memory_format=...)` on the model inside an adapter."""
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(half, "WIDE", 0)
    answers, images = [], batches(device)[0]
    for speed in ("exact", "fast"):
        adapter = fata.adapt(build("resnet_gn").to(device), "tent", speed=speed, guard=None)
        for _ in range(3):
            before = adapter(images)
        for parameter in adapter.model.parameters():
            parameter.data = (-0.5 if parameter.ndim > 1 else 0.5) * parameter.data
        with adapter.frozen():
            still = adapter(images)
        answers.append((still, adapter(images)))
    for expected, found in zip(*answers, strict=True):
        assert_nearer(found, expected, before)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_loaded_into_the_model_answer(device, monkeypatch):
    """Not old copies of them in bfloat16."""
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(half, "WIDE", 0)
    adapter = fata.adapt(build("resnet_gn").to(device), "tent", speed="fast", lr=1e-9, guard=None)
    images = batches(device)[0]
    for _ in range(3):
        before = adapter(images)
    new = {name: -0.5 * w for name, w in adapter.model.state_dict().items() if w.ndim > 1}
    adapter.model.load_state_dict(new, strict=False)
    own = adapter(images)
    plain = adapter.unwrap().eval()(images)
    assert_nearer(own, plain, before)


def test_batches_of_many_sizes_keep_few_programs():
    fields = half_of_the_rows("resnet_gn", "eata+fata")
    adapter = fata.adapt(build("resnet_gn"), "eata+fata", speed="fast", **fields)
    for size in range(1, 70):
        adapter(torch.rand(size, 3, 8, 8))
    assert len(adapter._engine.execution._cache) == fast.MOST


class Random(fata.Method):
    """Selects some rows by chance, and does not say that it draws."""

    name = "random"

    def select(self, batch, memory):
        draws = torch.rand(len(batch.logits), generator=batch.generator)
        return Selection(draws < 0.5, batch.entropy.new_ones(()))


def test_a_method_that_draws_must_say_so():
    adapter = fata.Adapter(build("resnet_gn"), Random(), speed="fast")
    with pytest.raises(RuntimeError, match="select_runs_model = True"):
        adapter(batches("cpu")[0])

    class Honest(Random):
        select_runs_model = True

    rows = []
    for speed in ("exact", "fast"):
        adapter = fata.Adapter(build("resnet_gn"), Honest(), speed=speed)
        adapter(batches("cpu")[0])
        rows.append(adapter.selected["random"])
    assert rows[0].any()
    assert torch.equal(*rows)


def test_a_method_may_look_and_climb():
    """It selects again up there, and so looks with a gradient under way."""

    class Careful(fata.Sar):
        name = "careful"
        select_runs_model = True

        def select(self, batch, memory):
            found = super().select(batch, memory)
            return found.among(batch.predict(batch.images.flip(3)).argmax(1) == batch.pseudo_label)

    runs = []
    for speed in ("exact", "fast"):
        model = build("resnet_gn").double()
        method = Careful(threshold=1.0)
        adapter = fata.Adapter(model, method, speed=speed, lr=0.01, guard=None)
        runs.append((adapter, [adapter(images) for images in batches("cpu", torch.float64)]))
    same(*runs)
    assert runs[0][0].counts["stepped"] > 0


@pytest.mark.parametrize("net", NETS)
def test_nothing_selected_moves_nothing(net):
    adapter, _ = run(net, "sar+fata", "fast", "cpu", threshold=1e-6, fata_threshold=1e-6)
    assert adapter.counts["stepped"] == 0
    fresh = build(net).double().state_dict()
    assert all(torch.equal(v, fresh[k]) for k, v in adapter.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "spec"),
    [
        ("resnet_gn", "sar+fata"),
        ("vit_ln", "eata+fata"),
        ("resnet_bn", "deyo+fata"),
        ("resnet_bn", "eata+fata blended"),
    ],
)
def test_compiled_programs_give_the_same(net, spec, monkeypatch):
    """Traced through the model, the loss and the way back; the compiler's last part left out."""
    spec, *blend = spec.split()
    fields = {**half_of_the_rows(net, spec), "blend": bool(blend)}
    expected = run(net, spec, "fast", "cpu", **fields)
    whole = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(captured.torch, "compile", whole)
    monkeypatch.setattr(fast.Fast, "compiles", True)
    compiled = []
    plain = captured.compiled
    monkeypatch.setattr(captured, "compiled", lambda *a: compiled.append(a) or plain(*a))
    monkeypatch.setattr(fast.Fast, "forget", forget_but_stay_large)
    found = run(net, spec, "fast", "cpu", **fields)
    same(expected, found)
    assert len(compiled) >= 2
    assert found[0].compile_seconds > 0
    assert expected[0].compile_seconds == 0


@pytest.mark.slow
def test_a_copy_has_programs_of_its_own(monkeypatch):
    """A recorded or compiled program knows where the weights of its own model are."""
    whole = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(captured.torch, "compile", whole)
    monkeypatch.setattr(fast.Fast, "compiles", True)
    monkeypatch.setattr(fast.Fast, "forget", forget_but_stay_large)
    model = build("resnet_bn").double()
    adapter = fata.adapt(model, "tent", speed="fast", lr=0.01, guard=None)
    images = batches("cpu", torch.float64)[:2]
    for batch in images:
        adapter(batch)
    twin = copy.deepcopy(adapter)
    found, expected = ([one(batch) for batch in images] for one in (twin, adapter))
    same((twin, found), (adapter, expected))


@pytest.mark.parametrize("how", ["unwrap", "forget"])
def test_programs_end_with_their_adapter(how):
    """Not some time later: on a GPU they hold memory."""
    adapter, _ = run("resnet_gn", "tent", "fast", "cpu")
    held = [weakref.ref(one.function) for one in adapter._engine.execution._cache.values()]
    gc.disable()
    try:
        if how == "unwrap":
            adapter.unwrap()
        else:
            del adapter
        assert [one() for one in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_recording_that_fails_at_its_end_leaves_the_one_before(monkeypatch):
    @contextmanager
    def refused(*_, **__):
        yield
        raise RuntimeError("the device refused it")

    one = captured.CapturedFunction(torch.neg, (None,), None, captured.MemoryPools(), "", False)
    one.kind.waits = ()
    one._graph, one._inputs, one._outputs = before = (object(), [torch.ones(2)], [torch.ones(2)])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refused)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with pytest.warns(UserWarning, match="cannot be captured"):
        one._capture([torch.zeros(2)])
    found = one._graph, one._inputs, one._outputs
    assert all(a is b for a, b in zip(found, before, strict=True))


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
        (lambda x: x * len(x[x > 0.5]), "index"),
        (lambda x: x * len((x > 0.5).nonzero()), "nonzero"),
        (lambda x: x * torch.tensor(2.0, device=x.device), "lift_fresh"),
        (lambda x: x.to("meta"), "_to_copy"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_what_waits_is_not_recorded(wait, what, device):
    with captured.Waits(torch.device(device)) as waits:
        wait(torch.rand(4, 4, device=device))
    assert what in waits.found[0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_wait_is(device):
    x = torch.rand(4, 4, device=device)
    with captured.Waits(torch.device(device)) as waits:
        y = x[torch.arange(2, device=device)] * torch.zeros(4, device=device)
        y[y > 1] = torch.zeros((), device=device)
    assert not waits.found
    assert not y.any()


def test_what_passes_the_network_alone_is_known_by_what_does_more():
    adapter = fata.adapt(build("resnet_gn"), "tent", speed="fast")
    execution = adapter._engine.execution
    assert execution._kind("refer") is execution._kinds["refer"]
    execution._kinds["see"].waits = ["nonzero"]  # the method may, rather than the network
    assert execution._kind("predict") is execution._kinds["predict"]
    execution._kinds["descend"].waits = []
    assert execution._kind("predict") is execution._kind("refer") is execution._kinds["descend"]
    assert execution._kind("see") is execution._kinds["see"]


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_the_first_function_of_a_kind_is_watched_once(monkeypatch):
    """Others of other sizes are known by it; nothing is watched while it is captured."""
    watched, recorded = [], []

    class Noting(captured.Waits):
        def __init__(self, device):
            super().__init__(device)
            watched.append(device)

    monkeypatch.setattr(captured, "Waits", Noting)
    monkeypatch.setattr(
        captured.CapturedFunction, "_capture", lambda one, _: recorded.append(one.kind.waits)
    )
    kinds = captured.Kind(), captured.Kind()
    for kind, function, sizes in ((kinds[0], torch.sum, (2, 3)), (kinds[1], torch.nonzero, (4,))):
        for size in sizes:
            arguments = (None,), None, captured.MemoryPools(), "", False
            one = captured.CapturedFunction(lambda x, f=function: [f(x)], *arguments, kind=kind)
            for _ in range(3):
                one([torch.ones(size).as_subclass(OnGpu)])
    assert len(watched) == 2
    assert [bool(waits) for waits in recorded] == [False, False, True]


def test_sizes_are_of_one_kind():
    fields = half_of_the_rows("resnet_gn", "eata+fata")
    adapter, _ = run("resnet_gn", "eata+fata", "fast", "cpu", **fields)
    functions = [one.function for one in adapter._engine.execution._cache.values()]
    kinds = {}
    for one in functions:
        assert kinds.setdefault(one.name.partition(",")[0], one.kind) is one.kind
    assert len({id(kind) for kind in kinds.values()}) == len(kinds) < len(functions)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_model_that_waits_adapts_without_being_recorded(device):
    """And leaves torch as it was: other models are recorded after it, chance is as before."""
    model = build("resnet_gn").to(device)
    model.register_forward_hook(lambda *given: given[2] * (given[2].max().item() < 1e6))
    adapter = fata.adapt(model, "tent", speed="fast", guard=None)
    stream, images = torch.cuda.current_stream(), batches(device)[0]
    with pytest.warns(UserWarning, match="cannot be captured.*waits"):
        [adapter(images) for _ in range(3)]
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    torch.rand(2, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, _ = run("resnet_gn", "tent", "fast", device, torch.float32, guard=None)
    assert any(one.function._graph for one in other._engine.execution._cache.values())


def test_compiling_that_was_interrupted_begins_anew(monkeypatch, caplog, capsys):
    def interrupted(function, given):
        if not tries:
            tries.append(1)
            raise KeyboardInterrupt
        return function

    tries = []
    caplog.set_level("INFO", "fata")
    monkeypatch.setattr(captured, "compiled", interrupted)
    given = [torch.ones(2)]
    one = captured.CapturedFunction(torch.neg, (None,), None, captured.MemoryPools(), "all", True)
    one(given)
    with pytest.raises(KeyboardInterrupt):
        one.compile(given)
    assert torch.equal(one(given), -given[0])
    assert one.compile(given) > 0
    assert one.compile(given) == 0  # it is already
    assert torch.equal(one(given), -given[0])
    assert caplog.messages.count("compiling a pass (all)") == 2
    assert capsys.readouterr() == ("", "")


class Caching(torch.nn.Module):
    """Keeps something for the size of the latest images alone."""

    def __init__(self):
        super().__init__()
        self.model, self.kept = build("resnet_gn"), (0, None)

    def forward(self, images):
        side = images.shape[-1]
        if self.kept[0] != side:
            self.kept = side, torch.full((3, side, side), 0.1, device=images.device)
        return self.model(images + self.kept[1])


def test_what_a_recording_reads_is_held():
    model, images = Caching(), batches("cpu")[0]
    model(images)
    model.itself = [model.kept]
    model.itself.append(model.itself)
    parts = model.kept[1], *model.parameters(), *model.buffers()
    places = {tensor.untyped_storage().data_ptr() for tensor in parts}
    found = captured.held(model)
    assert {tensor.untyped_storage().data_ptr() for tensor in found} == places


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_may_drop_what_it_kept_for_a_size(device, full_precision):
    answers = []
    for speed in ("exact", "fast"):
        model = Caching().to(device, torch.float64)
        adapter = fata.adapt(model, "tent", speed=speed, lr=0.01, guard=None)
        draw = torch.Generator().manual_seed(0)
        answers.append([])
        for side in (16, 16, 16, 24, 24, 24, 16, 16, 24):
            images = torch.rand(8, 3, side, side, generator=draw).double()
            answers[-1].append(adapter(images.to(device)))
            _ = [torch.full((3, s, s), 9.0, device=device) for s in (16, 24) for _ in range(50)]
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, **DOUBLE)


def test_a_pool_ends_with_the_last_recording_in_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    pools = captured.MemoryPools()
    one, two = pools.of(compiled=False), pools.of(compiled=True)
    assert pools.of(compiled=False) is one is not two
    before = one.handle
    del one
    assert pools.of(compiled=False).handle is not before
    assert pools.of(compiled=True) is two


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_put_once_for_all_that_read_it(device):
    kept, (first, second, _) = captured.StaticInputs(), batches(device)[:3]
    place = kept.put(first, large=True)
    assert place is kept.put(second, large=False)
    assert place in kept
    assert first not in kept
    assert place.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(place, second)
    assert kept.put(first[:3], large=False) is not place
    held = weakref.ref(place)
    del place
    assert held() is None  # no program reads it


def test_what_is_not_recorded_gives_away_nothing_that_is_kept():
    """A method may keep images, which the next batch would overwrite."""
    kept, images = captured.StaticInputs(), torch.rand(4, 3)
    place = kept.put(images, large=False)
    one = captured.CapturedFunction(
        lambda x: [x, x[:2]], (None,), None, captured.MemoryPools(), "", False, kept
    )
    given = one([place])
    kept.put(torch.zeros_like(images), large=False)
    assert torch.equal(given[0], images)
    assert torch.equal(given[1], images[:2])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_all_kinds_are_copied(device):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 4, 4, generator=draw).to(device)
    given = [
        images,
        images > 0.5,
        images.argmax(1),
        images[0, 0, 0, 0],
        images.sum(1)[:0],
        images[:, :1].expand(2, 3, 4, 4),
    ]
    into = [torch.zeros_like(one) for one in given]
    into[0] = into[0].contiguous(memory_format=torch.channels_last)
    stays = torch.ones(2, device=device)
    captured.copy([*into, stays], [*given, stays])
    for own, new in zip(into, given, strict=True):
        assert torch.equal(own, new)
    assert torch.equal(stays, torch.ones_like(stays))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 5), (6, 8, 3, 5)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("far", [1, 1000])
def test_group_norm_that_is_compiled_is_torchs_own(device, shape, groups, affine, far):
    torch.manual_seed(0)
    norm = torch.nn.GroupNorm(groups, 8, affine=affine).to(device)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, slope = ((torch.randn(shape) + by).to(device) for by in (far, 1))

    def there_and_back(x, slope, *parameters):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]
        named = dict(zip(("weight", "bias"), leaves[1:], strict=False))
        y = torch.func.functional_call(norm, named, leaves[0])
        return [y.detach(), *torch.autograd.grad((y * slope).sum(), leaves)]

    given = (x, slope, *(parameter.detach() for parameter in norm.parameters()))
    traced = make_fx(there_and_back, decompositions.TABLE)(*given)
    assert not any("native_group_norm" in str(node.target) for node in traced.graph.nodes)
    norm.double()
    exact = there_and_back(*(tensor.double() for tensor in given))
    limit = (far * 2**-24) ** 0.5  # half of the bits that float32 has for what is left of x - mean
    for ours, own in zip(traced(*given), exact, strict=True):
        torch.testing.assert_close(ours, own.float(), rtol=limit, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fields", "as_matrices"),
    [
        ({"kernel_size": 1}, True),
        ({"kernel_size": 1, "bias": False}, True),
        ({"kernel_size": 1, "stride": 2}, False),
        ({"kernel_size": 1, "padding": 1}, False),
        ({"kernel_size": 1, "groups": 2}, False),
        ({"kernel_size": 3, "padding": 1}, False),
    ],
)
@pytest.mark.parametrize("adapts", [False, True])
def test_the_way_back_through_a_convolution(device, fields, as_matrices, adapts):
    torch.manual_seed(0)
    net = torch.nn.Conv2d(4, 6, **fields).to(device).requires_grad_(adapts)
    x = torch.randn(3, 4, 5, 7).to(device, memory_format=torch.channels_last)

    def there_and_back(x):
        leaves = [x.detach().requires_grad_(), *(net.parameters() if adapts else ())]
        return torch.autograd.grad(net(leaves[0]).square().sum(), leaves)

    traced = make_fx(there_and_back, decompositions.TABLE)(x)
    targets = [str(node.target) for node in traced.graph.nodes]
    assert ("aten.convolution_backward.default" in targets) != (as_matrices and not adapts)
    for ours, own in zip(traced(x), there_and_back(x), strict=True):
        assert ours.stride() == own.stride()
    net, x = net.double(), x.double()
    traced = make_fx(there_and_back, decompositions.TABLE)(x)
    for ours, own in zip(traced(x), there_and_back(x), strict=True):
        torch.testing.assert_close(ours, own, **DOUBLE)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_all_is_recorded_again_once_it_is_compiled(device, monkeypatch):
    """Programs move to other memory, one by one, and new ones come to what the last has left."""
    monkeypatch.setattr(fast.Fast, "forget", forget_but_stay_large)
    monkeypatch.setattr(captured, "compiled", lambda function, given: function)
    adapter = fata.adapt(build("resnet_gn").to(device), "tent", speed="fast", guard=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (16, 8, 12):
            for _ in range(3):
                adapter(batches(device)[0][:size])
            adapter.warm_up(size, 16)
            adapter(batches(device)[0][:size])
    functions = [one.function for one in adapter._engine.execution._cache.values()]
    again = [one for one in functions if one._calls > 1]
    assert again
    assert all(one._graph is not None for one in again)


def test_trees_are_flattened_and_rebuilt():
    """Trees that one capture cannot serve differ in what else than tensors they are."""
    a, b, c, d, e = torch.rand(5, 2)
    perturb, some = Perturb(a, b, c, 1, True), Selection(b > 0, c)
    cases = [
        ((perturb, {"z": d, "a": e}, []), [a, b, c, d, e]),
        ((perturb, {"a": d, "z": e}, []), [a, b, c, d, e]),
        ((perturb, {"z": d}, [e]), [a, b, c, d, e]),
        ((perturb, {}, [d, e]), [a, b, c, d, e]),
        ((perturb, {}, []), [a, b, c]),
        ((replace(perturb, axis=2), {}, []), [a, b, c]),
        ((replace(perturb, delta=c.double()), {}, []), None),
        ((replace(perturb, delta=c[:1]), {}, []), None),
        (
            (Terms(trees.batch_of(a, b, [e], None), some, some, [d], [a]), Moving(a, b, c)),
            [a, b, e, some.rows, c, some.rows, c, d, a, a, b, c],
        ),
        (
            fast.Outcome(a, b, c, some, some, [d], [perturb], [e], {"rows": b}),
            [a, b, c, *[some.rows, c] * 2, d, a, b, c, e, b],
        ),
    ]
    signatures = set()
    for tree, expected in cases:
        tensors, signature = [], []
        trees.flatten(tree, tensors, signature)
        if expected is not None:
            assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in expected]
        again, same_signature = [], []
        trees.flatten(trees.rebuild(trees.structure(tree), iter(tensors)), again, same_signature)
        assert [id(tensor) for tensor in again] == [id(tensor) for tensor in tensors]
        assert same_signature == signature
        signatures.add(tuple(signature))
    assert len(signatures) == len(cases)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("net", NETS)
def test_a_gpu_that_is_not_the_current_one(net, full_precision):
    run(net, "eata+fata", "fast", "cuda:0")
    same(*(run(net, "eata+fata", speed, "cuda:1") for speed in ("exact", "fast")))


class Littering(torch.nn.Module):
    """Drops an adapter in the midst of a recording, so that only a collection ends it."""

    def __init__(self, model, adapter):
        super().__init__()
        self.model, self.dropped = model, [adapter]
        self.dropped.append(self.dropped)

    def forward(self, images):
        if torch.cuda.is_current_stream_capturing():
            self.dropped = None
            [[] for _ in range(10_000)]
        return self.model(images)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_garbage_stays_while_a_program_is_recorded(device):
    adapter, _ = run("resnet_gn", "tent+fata", "fast", device, torch.float32, guard=None)
    again = fata.adapt(Littering(build("resnet_gn").to(device), adapter), "tent", speed="fast")
    dropped = weakref.ref(adapter)
    del adapter
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so where it cannot be captured
        for images in batches(device)[:3]:
            again(images)
    gc.collect()
    assert dropped() is None


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("guard", [None, fata.Guard()])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", ["tent+fata", "eata+fata", "sar+fata", "deyo+fata"])
def test_a_step_waits_where_it_must_alone(net, spec, guard, device, monkeypatch):
    """For the rows to gather, but not TENT and EATA where rows share statistics.

    SAR's rule and DeYO's look wait once more. With a guard it is a step between two looks.
    """
    fields = half_of_the_rows(net, spec)
    if spec == "tent+fata":
        del fields["threshold"]
    adapter, _ = run(net, spec, "fast", device, torch.float32, guard=guard, **fields)
    engine, images, waits = adapter._engine, batches(device)[0], []
    for _ in range(3):
        adapter(images)
    engine.state.watched = Watched(since=130, last=130)
    assert engine.captures_steps

    def may_wait(kind, name):
        function = getattr(kind, name)

        def waiting(self, *given):
            if isinstance(self, torch.Tensor) and not self.is_cuda:
                return function(self, *given)
            torch.cuda.set_sync_debug_mode("default")
            waits.append(name)
            try:
                return function(self, *given)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        monkeypatch.setattr(kind, name, waiting)

    may_wait(Engine, "_rows")
    if spec == "sar+fata":
        may_wait(Engine, "_recover")
    if spec == "deyo+fata":
        may_wait(torch.Tensor, "nonzero")
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    looked = engine.state.counts.get("rows_source", 0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.inference_mode(False), torch.enable_grad():
            engine.step(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.state.counts.get("rows_source", 0) == looked
    rows = [] if net == "resnet_bn" and spec[:4] in ("tent", "eata") else ["_rows"]
    more = {"sar+fata": [*rows, "_recover"], "deyo+fata": ["nonzero", *rows]}
    assert waits == more.get(spec, rows)


@pytest.mark.parametrize("spec", ["eata+fata", "sar+fata", "deyo+fata"])
def test_joint_statistics(spec):
    fields = {"bn_stats": "joint", **half_of_the_rows("resnet_bn", spec)}
    same(*(run("resnet_bn", spec, speed, "cpu", **fields) for speed in ("exact", "fast")))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s[:4] in ("eata", "sar", "sar+", "deyo", "memo", "cott")]
)
def test_programs_wait_for_nothing_and_call_no_other(net, spec, monkeypatch):
    plain, inside = captured.CapturedFunction._plain, []

    def recorded(self, *given):
        assert not inside
        inside.append(self)
        try:
            with captured.Waits(given[0].device) as waits:
                return plain(self, *given)
        finally:
            assert not waits.found
            inside.pop()

    monkeypatch.setattr(captured.CapturedFunction, "_plain", recorded)
    own = {"memo": {"views": 2}, "cotta": {"views": 2}}
    fields = own[spec] if spec in own else half_of_the_rows(net, spec)
    adapter, _ = run(net, spec, "fast", "cpu", **fields)
    assert adapter._engine.execution._cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", ["tent", "eata+fata", "sar+fata", "deyo+fata"])
@pytest.mark.parametrize("pixel", [torch.nan, -torch.inf])
def test_a_row_that_is_not_finite_gets_the_plain_models_answer(
    net, spec, pixel, device, full_precision
):
    """Whether that is known before the step, or found out in it and undone."""
    images = batches(device, torch.float64)
    images[1][2, 0, 0, 0] = pixel
    images[3][:] = pixel
    runs = []
    for speed in ("exact", "fast"):
        model = build(net).to(device, torch.float64)
        adapter = fata.adapt(model, spec, speed=speed, lr=0.01, guard=None)
        answers = [adapter(batch) for batch in images]
        assert answers[1][[0, 1, 3]].isfinite().all()
        runs.append((adapter, [answer.nan_to_num() for answer in answers]))
    same(*runs)
    counts = [adapter.counts for adapter, _ in runs]
    for name in ("seen", "not_finite", "stepped", "dropped", "selected"):
        assert counts[0][name] == counts[1][name]
    assert counts[0]["not_finite"] == 1 + SIZES[3]
    for adapter, _ in runs:
        adapter(images[3])
        assert adapter.selected == {}  # as nothing of it was


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn"])
def test_rows_that_are_not_finite_are_found_where_nothing_is_learned(net, device, full_precision):
    images = batches(device, torch.float64)[0]
    images[2, 0, 0, 0] = torch.nan
    runs = []
    for speed in ("exact", "fast"):
        model = build(net).to(device, torch.float64)
        adapter = fata.adapt(model, "tent", speed=speed, guard=True)
        adapter._engine.state.watched.phase = Phase.REST
        runs.append((adapter(images)[[0, 1, 3]], adapter.counts["not_finite"]))
    torch.testing.assert_close(runs[0][0], runs[1][0], **DOUBLE)
    assert runs[0][1] == runs[1][1] == 1


@pytest.mark.parametrize("net", ["resnet_gn", "vit_ln"])
@pytest.mark.parametrize("spec", ["tent", "tent+fata", "eata+fata", "sar", "sar+fata"])
def test_a_row_that_overflows_keeps_no_other_from_being_learned_from(net, spec):
    fields = half_of_the_rows(net, spec) if "eata" in spec else {}
    if "sar" in spec:
        fields["threshold"] = 1.0  # most rows: the climb is part of the first pass
    runs = []
    for speed in ("exact", "fast"):
        model = build(net).double()
        adapter = fata.adapt(model, spec, speed=speed, lr=0.01, guard=None, **fields)
        images = batches("cpu", torch.float64)
        for batch in images:
            batch[0] *= 1e300  # finite, but its logits are not
        runs.append((adapter, [adapter(batch)[1:] for batch in images]))
    same(*runs)
    assert runs[0][0].counts["stepped"] == runs[1][0].counts["stepped"] == len(SIZES)


def test_padding_costs_a_fifth_of_the_batch_at_most(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SIZES", (64, 64))
    fields = half_of_the_rows("resnet_gn", "eata+fata")
    adapter, exact = (
        run("resnet_gn", "eata+fata", speed, "cpu", **fields)[0] for speed in ("fast", "exact")
    )
    limit = sum(SIZES) / 5
    assert adapter.counts["rows_backward"] <= exact.counts["rows_backward"] + limit


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_gpu_with_bfloat16_is_fast_by_default(device):
    assert fata.adapt(build("resnet_gn").to(device), "tent").speed == "fast"
    assert fata.adapt(build("resnet_gn").to(device).double(), "tent").speed == "exact"


def test_a_gpu_that_only_emulates_bfloat16_is_exact_by_default(monkeypatch):
    on_gpu = SimpleNamespace(
        dtype=torch.float32, device=torch.device("cuda"), is_floating_point=lambda: True
    )
    model = SimpleNamespace(parameters=lambda: iter([on_gpu]))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert default_speed(model) == "fast"
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=1: including_emulation
    )
    assert default_speed(model) == "exact"


@pytest.mark.parametrize("unit", [True, False])
def test_a_cpu_is_fast_by_default_where_the_model_gains_from_bfloat16(unit, monkeypatch):
    monkeypatch.setattr(half, "has_bfloat16_products", lambda: unit)
    monkeypatch.setattr(half, "WIDE", 1000)
    known = "fast" if unit else "exact"
    assert fata.adapt(build("resnet_gn"), "tent").speed == known
    assert fata.adapt(build("resnet_gn").double(), "tent").speed == "exact"
    assert fata.adapt(build("resnet_gn"), "tent", speed="fast").speed == "fast"
    monkeypatch.setattr(half, "WIDE", 10**9)
    assert fata.adapt(build("resnet_gn"), "tent").speed == "exact"


def test_another_speed_is_an_error():
    with pytest.raises(ValueError, match="exact, fast"):
        fata.adapt(tiny.build("resnet_gn"), "tent", speed="warp")
