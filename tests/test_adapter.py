"""Any input that the model takes; and for what it cannot take, a message that helps."""

import copy
import inspect
import math
import os
import pickle
import signal
import threading
import warnings

import pytest
import torch
from torch import nn

import fata
from fata.testing.cases import Case, images, network
from precision import DOUBLE, SINGLE


def adapter(net="resnet_gn", spec="tent+fata", **fields):
    return fata.adapt(network(net), spec, **fields)


# -- inputs that work


@pytest.mark.parametrize("spec", ["eata", "sar+fata", "deyo+fata", "cotta", "memo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kind_of_step_in_half_precision_at_odd_sizes(spec, dtype):
    fields = {"fisher_alpha": 0} if spec == "eata" else {}
    fields |= {"views": 2, "augment": None} if spec in ("cotta", "memo") else {}
    fields |= {"threshold": 1.0} if spec == "deyo+fata" else {}
    adapted = fata.adapt(network("resnet_bn").to(dtype), spec, **fields)
    x = torch.rand(5, 3, 19, 22, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert adapted(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_models_of_other_precision(net, dtype):
    """Steps too small for half precision still add up: theta is kept in full."""
    model = network(net).to(dtype)
    adapted = fata.adapt(model, "tent+fata", lr=1e-4, guard=None)
    for x in Case(None, None, net, 16).stream():
        logits = adapted(x.to(dtype))
    assert logits.isfinite().all()
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    moved = adapted._live().state.theta - adapted._live().source
    assert moved.abs().max() > 0
    assert next(model.parameters()).dtype == dtype
    adapted.reset()
    expected = network(net).to(dtype).state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("spec", ["deyo+fata", "sar+fata", "cotta"])
def test_channels_last(spec):
    plain, last = adapter(spec=spec).double(), adapter(spec=spec).double()
    last.model.to(memory_format=torch.channels_last)
    for x in Case(None, None, "resnet_gn", 16, torch.float64).stream():
        found = last(x.contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(found, plain(x), **DOUBLE)


def test_images_with_strides_of_their_own():
    x = images(8)
    expected = adapter()(x)
    assert torch.equal(adapter()(x.flip(3).contiguous().flip(3)), expected)
    assert torch.equal(adapter()(x[:1].expand(4, -1, -1, -1)), adapter()(x[[0, 0, 0, 0]]))


@pytest.mark.parametrize("classes", [2, 3, 1000])
def test_any_number_of_classes(classes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = fata.tiny.build("resnet_gn", classes)
    adapted = fata.adapt(model, "deyo+fata", threshold=1.0, fata_threshold=1.0)
    assert adapted(images(8)).shape == (8, classes)


class Dropping(nn.Module):
    """Half of the features dropped in train mode."""

    def __init__(self):
        super().__init__()
        self.net, self.drop = network("resnet_gn"), nn.Dropout(0.5)

    def forward(self, x):
        return self.net(self.drop(x))


def test_dropout_stays_off_in_either_mode():
    x = images(8)
    expected = fata.adapt(Dropping().eval(), "sar+fata")(x)
    trained = fata.adapt(Dropping().train(), "sar+fata")
    trained.train()
    assert torch.equal(trained(x), expected)
    model = trained.unwrap()
    assert model.training
    assert model.drop.training


@pytest.mark.parametrize("spec", ["source", "tent"])
def test_the_models_own_train_changes_nothing(spec):
    """Neither answers nor running statistics."""
    model = nn.Sequential(network("resnet_bn"), nn.Dropout(0.5))
    running = model[0].bn1.running_mean.clone()
    adapted = fata.adapt(model, spec, guard=None)
    with adapted.frozen():
        before = adapted(images(8))
        model.train()
        assert torch.equal(adapted(images(8)), before)
    model.train()
    adapted(images(8))
    assert torch.equal(model[0].bn1.running_mean, running)


def test_outputs_with_logits():
    class Model(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.net, self.wrap = network("resnet_gn"), wrap

        def forward(self, x):
            return self.wrap(self.net(x))

    x = images(8)
    expected = adapter()(x)
    for wrap in (lambda o: {"logits": o}, lambda o: (o, "other"), type("Out", (), {})):
        if isinstance(wrap, type):
            kind = wrap

            def wrap(o, kind=kind):
                found = kind()
                found.logits = o
                return found

        assert torch.equal(fata.adapt(Model(wrap), "tent+fata")(x), expected)


def test_learning_rates_are_the_papers():
    rates = {
        ("resnet_gn", 64): 5e-4, ("resnet_gn", 128): 5e-4, ("resnet_gn", 16): 1.25e-4,
        ("resnet_gn", 1): 2.5e-4, ("vit_ln", 64): 1e-3, ("vit_ln", 1): 1.6e-5,
    }  # fmt: skip
    for (net, rows), expected in rates.items():
        assert adapter(net)._live().rate(rows) == pytest.approx(expected)
    assert adapter(lr=0.3)._live().rate(1) == 0.3
    release = {("resnet_gn", "tent", 64): 2.5e-4, ("resnet_gn", "tent", 1): 2 * 2.5e-4 / 64,
               ("resnet_gn", "sar", 1): 4 * 2.5e-4 / 64, ("vit_ln", "deyo+fata", 1): 2e-3 / 64,
               ("vit_ln", "tent", 32): 5e-4}  # fmt: skip
    for (net, spec, rows), expected in release.items():
        assert adapter(net, spec, lr="release")._live().rate(rows) == pytest.approx(expected)
    assert adapter(spec="cotta")._live().rate(64) == 0.01


def test_a_method_that_is_not_named_is_the_recommended_one():
    """EATA with half of FATA, balanced; without clean images no penalty, which it does not miss."""
    adapted = fata.adapt(network("resnet_gn"))
    assert adapted.name == "eata+fata"
    assert adapted.method == fata.Eata(fisher_alpha=0, balance=True)
    assert adapted.plus == fata.Fata(balance=True, weight=0.5)
    assert adapted(images(4)).isfinite().all()
    anchored = fata.adapt(network("resnet_gn"), fisher_data=[images(4)], redundancy=0.4)
    assert anchored.method == fata.Eata(redundancy=0.4, balance=True)
    assert anchored.fisher is not None
    with pytest.warns(UserWarning, match="is ETA"):
        fata.adapt(network("resnet_gn"), fisher_alpha=1.0)


def test_both_ways_to_make_an_adapter_have_the_same_defaults():
    named, spelled = (
        {name: field.default for name, field in inspect.signature(made).parameters.items()}
        for made in (fata.adapt, fata.Adapter)
    )
    shared = named.keys() & spelled.keys() - {"model"}
    assert shared >= {"lr", "params", "fisher_data", "guard", "seed", "speed", "group"}
    assert {name: named[name] for name in shared} == {name: spelled[name] for name in shared}


def test_named_parameters():
    only = fata.Adapter(network("resnet_gn"), fata.Tent(), params=["layer2.0.norm1", "fc.bias"])
    assert only.trainable == ["layer2.0.norm1.weight", "layer2.0.norm1.bias", "fc.bias"]
    only(images(8))
    moved = dict(only.model.named_parameters())
    source = dict(network("resnet_gn").named_parameters())
    assert {n for n in moved if not torch.equal(moved[n], source[n])} == set(only.trainable)


def test_two_seeds_draw_differently():
    one, same, other = (adapter(seed=s, lr=0.1) for s in (1, 1, 2))
    ends = []
    for each in (one, same, other):
        for x in Case(None, None, "resnet_gn", 16).stream():
            each(x)
        ends.append(each._live().state.theta)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_gradient_that_is_not_finite_moves_nothing():
    class Spoiled(fata.Tent):
        def loss(self, logits):
            return super().loss(logits) * math.nan

    adapted = fata.Adapter(network("resnet_gn"), Spoiled(), lr=1.0)
    adapted(images(8))
    assert torch.equal(adapted._live().state.theta, adapted._live().source)
    assert (adapted.counts["stepped"], adapted.counts["dropped"]) == (0, 1)


def test_moving_the_adapter_moves_its_state():
    adapted = adapter(spec="eata+fata", fisher_alpha=0, redundancy=2.0)
    adapted(images(8))
    moved = adapted.to("meta")
    state = moved._live().state
    held = [state.theta, state.velocity, *state.host.values(), *state.plus.values()]
    assert {tensor.device.type for tensor in held} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_a_gpu_adapts_like_the_cpu(net):
    def noise(rows, channels):
        draws = torch.Generator().manual_seed(0)
        return tuple(1 + torch.randn(2, rows, channels, generator=draws))

    here = adapter(net, "sar+fata", noise=noise).double()
    there = adapter(net, "sar+fata", noise=noise).double().cuda()
    for x in Case(None, None, net, 16, torch.float64).stream():
        torch.testing.assert_close(there(x.cuda()).cpu(), here(x), **SINGLE)


class Around(nn.Module):
    """A small network with something done to its images and logits."""

    def __init__(self, before=None, after=None, net="resnet_gn"):
        super().__init__()
        self.net, self.before, self.after = network(net), before, after

    def forward(self, x):
        x = self.before(x) if self.before else x
        x = self.net(x)
        return self.after(x) if self.after else x


@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_bad_rows_get_the_logits_of_the_plain_model(net):
    """A model that cleans its input has finite logits even for them: by the running statistics."""
    bad = images(6).double()
    bad[1, 0, 0, 0] = math.nan
    model = Around(torch.nan_to_num, net=net).double().eval()
    plain = model(bad).detach()[1]
    assert plain.isfinite().all()
    adapted = fata.adapt(model, "tent+fata")
    torch.testing.assert_close(adapted(bad)[1], plain, **DOUBLE)
    with adapted.frozen():
        assert adapted(bad).isfinite().all()


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("spec", ["tent+fata", "eata+fata", "sar+fata"])
def test_a_row_that_overflows_is_left_out_and_learning_goes_on(spec, share):
    fields = {"redundancy": 2.0, "fisher_alpha": 0} if "eata" in spec else {}
    adapted = adapter(spec=spec, **fields)
    flood = images(8)
    flood[3] = 3e38  # finite, but not for long
    for x in (images(8), flood, images(8, seed=2)):
        adapted._live().state.share = share
        logits = adapted(x)
    state = adapted._live().state
    assert logits.isfinite().all()
    assert adapted.counts["stepped"] == 3
    assert adapted.counts["dropped"] == 0
    assert all(tensor.isfinite().all() for tensor in {**state.host, **state.plus}.values())


def test_classes_that_are_masked_out_have_no_part_in_the_entropy():
    def mask(logits):
        return torch.cat((logits, torch.full_like(logits[:, :2], -math.inf)), 1)

    adapted = fata.adapt(Around(after=mask), "tent+fata")
    adapted(images(8))
    assert adapted.counts["selected"]["tent"] == 8
    assert adapted.counts["stepped"] == 1


@pytest.mark.parametrize("spec", ["tent", "sar+fata", "deyo+fata", "cotta"])
def test_a_model_that_changes_its_images_in_place(spec):
    def normalise(x):
        return x.sub_(0.4).div_(0.3)

    def normalised(x):
        return (x - 0.4) / 0.3

    stream = Case(None, None, "resnet_gn", 16, torch.float64).stream()
    ends = []
    for before in (normalise, normalised):
        adapted = fata.adapt(Around(before).double(), spec)
        kept = [x.clone() for x in stream]
        ends.append(torch.cat([adapted(x) for x in kept]))
        assert all(torch.equal(a, b) for a, b in zip(kept, stream, strict=True))
    torch.testing.assert_close(*ends, **DOUBLE)


@pytest.mark.parametrize("spec", ["cotta", "memo", "tent"])
def test_autocast_does_not_answer_from_old_weights(spec):
    """Casts are cached while the context lasts; weights that move in it must not be."""
    fields = {"views": 2} if spec in ("cotta", "memo") else {}
    ends = []
    for cache in (True, False):
        adapted = adapter("vit_ln", spec, lr=1e-2, **fields)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            ends.append(torch.cat([adapted(images(4, seed=s)) for s in range(3)]))
    assert torch.equal(*ends)


def test_made_loaded_and_reset_inside_inference_mode():
    model = network("resnet_gn")
    with torch.inference_mode():
        inside = fata.adapt(model, "sar+fata")
        inside(images(8))
        inside.load_state_dict(inside.state_dict())
        inside(images(8))
        inside.reset()
    first = inside(images(8))
    assert torch.equal(first, adapter(spec="sar+fata")(images(8)))


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ("fata", {"layer": "layer9"}),
        ("tent", {"params": ["nothing"]}),
        ("eata", {"fisher_data": []}),
        ("eata", {"fisher_data": [torch.ones(2, 3, 16, 16, dtype=torch.uint8)]}),
    ],
)
def test_an_adapter_that_cannot_be_made_leaves_the_model_alone(spec, fields):
    model = network("resnet_bn").train()
    with pytest.raises((ValueError, TypeError)):
        fata.adapt(model, spec, **fields)
    assert all(p.requires_grad for p in model.parameters())
    for module in model.modules():
        assert module.training
        assert not module._forward_pre_hooks
        assert getattr(module, "track_running_stats", True)
    fata.adapt(model, "tent")  # and it can still be adapted


def test_a_step_that_fails_changes_nothing():
    class Failing(fata.Eata):
        def observe(self, batch, selection, memory):
            raise KeyboardInterrupt

    adapted = fata.Adapter(
        network("resnet_gn"), Failing(redundancy=2.0, fisher_alpha=0), fata.Fata()
    )
    before = adapted.state_dict()
    with pytest.raises(KeyboardInterrupt):
        adapted(images(16))
    after = adapted.state_dict()
    assert after.pop("meta") == before.pop("meta")
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert torch.equal(adapted._live().theta.read(), adapted._live().source)


def test_a_method_may_recover_without_a_step():
    class Giving(fata.Tent):
        def recover(self, memory):
            return memory.get("tired")

        def observe(self, batch, selection, memory):
            return {"tired": torch.tensor(not selection.rows.any())}

        def select(self, batch, memory):
            rows = super().select(batch, memory)
            return fata.Selection(rows.rows & (batch.images.mean() > 0), rows.weights)

    adapted = fata.Adapter(network("resnet_gn"), Giving(), lr=1e-2)
    adapted(images(8))
    assert not torch.equal(adapted._live().theta.read(), adapted._live().source)
    adapted(-images(8))
    assert torch.equal(adapted._live().theta.read(), adapted._live().source)
    assert adapted.counts["recovered"] == 1


def test_reset_takes_the_seeds_that_an_adapter_takes():
    adapted = fata.adapt(network("resnet_gn"), "tent+fata")
    before = adapted.state_dict()["meta"]["seed"]
    for seed in (1.5, "a", True):
        with pytest.raises(TypeError, match="must be a whole number"):
            adapted.reset(seed)
    adapted.reset()
    assert adapted.state_dict()["meta"]["seed"] == before


@pytest.mark.parametrize("speed", ["exact", "fast"])
def test_another_precision_in_the_middle(speed):
    adapted = fata.adapt(network("resnet_gn"), "tent+fata", speed=speed, lr=0.01, guard=None)
    adapted(images(8))
    moved = copy.deepcopy(adapted).unwrap().double()
    adapted.double()
    with torch.no_grad():
        expected = moved(images(8).double())
        source = network("resnet_gn").double()(images(8).double())
    torch.testing.assert_close(adapted(images(8).double()), expected, **DOUBLE)
    assert not torch.allclose(expected, source)  # it goes on from where it was


def test_tied_and_whole_number_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
            self.again = nn.LayerNorm(4)
            self.again.weight, self.again.bias = self.norm.weight, self.norm.bias
            self.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

        def forward(self, x):
            return self.head(self.again(self.first(self.norm(x))))

    for params in ("norm", "every"):
        adapted = fata.Adapter(Tied(), fata.Tent(), params=params, lr=0.1)
        assert "steps" not in adapted.trainable
        assert [n for n in adapted.trainable if "norm" in n or "again" in n] == [
            "norm.weight",
            "norm.bias",
        ]
        adapted(torch.rand(4, 4))
        other = fata.Adapter(adapted.unwrap(), fata.Tent(), params=params)
        assert torch.equal(other.model.again.weight, other.model.norm.weight)


def test_batchnorm_called_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(input=x))

    for spec in ("tent", "memo"):
        fields = {"augment": lambda x, n: x.expand(n, -1)} if spec == "memo" else {}
        assert fata.adapt(Keyword(), spec, **fields)(torch.rand(5, 4)).isfinite().all()


# -- errors


def test_one_adapter_a_model():
    adapted = adapter()
    with pytest.raises(ValueError, match=r"another adapter has this model.*: call unwrap\(\)"):
        fata.adapt(adapted.model, "tent")
    model = adapted.unwrap()
    around = fata.adapt(nn.Sequential(model), "tent")
    for other in (model, nn.Sequential(nn.Identity(), model)):
        with pytest.raises(ValueError, match="or a part of it"):
            fata.adapt(other, "tent")
    around.unwrap()
    fata.adapt(model, "tent")


def test_one_adapter_a_parameter():
    """Modules of two models may hold the same one: each adapter would move the other's weights."""
    one, other = network("resnet_gn"), network("resnet_gn")
    other.bn1.weight = one.bn1.weight
    adapted = fata.adapt(one, "tent")
    with pytest.raises(ValueError, match="a parameter that both share"):
        fata.adapt(other, "tent")
    tied = nn.Sequential(network("resnet_gn"), nn.Linear(10, 10))
    tied[1].weight = one.fc.weight  # not even one that adapts
    with pytest.raises(ValueError, match="a parameter that both share"):
        fata.adapt(tied, "tent")
    adapted.unwrap()
    fata.adapt(other, "tent")


def test_former_names_go_on_with_a_warning():
    adapted = adapter(params="norm-truncated")
    with pytest.warns(DeprecationWarning, match="is now adapter.trainable") as said:
        assert adapted.adapted == adapted.trainable
    assert said[0].filename == __file__
    for old, new in (("truncated", "norm-truncated"), ("all", "norm")):
        with pytest.warns(DeprecationWarning, match=f"params='{old}' is now '{new}'") as said:
            assert adapter(params=old).trainable == adapter(params=new).trainable
        assert said[0].filename == __file__
    assert set(adapter(params="norm").trainable) < set(adapter(params="every").trainable)


def test_unwrapped_batchnorm_predicts_as_the_adapter_or_says_that_it_does_not(caplog):
    stream, models = images(32).double().split(8), {}
    for statistics in (True, False, None):
        adapted = fata.adapt(network("resnet_bn").double(), "tent", lr=0.01, guard=None)
        for x in stream:
            adapted(x)
        with adapted.frozen():
            expected = adapted(stream[0])
        models[statistics] = adapted.unwrap(statistics).eval()
        assert ("running statistics" in caplog.text) == (statistics is None)
    torch.testing.assert_close(models[True](stream[0]), expected, **DOUBLE)
    assert models[True].bn1.running_mean is None
    assert not torch.allclose(models[False](stream[0]), expected)
    assert torch.equal(models[None](stream[0]), models[False](stream[0]))
    source = network("resnet_bn").double().bn1.running_mean
    assert torch.equal(models[False].bn1.running_mean, source)


def test_unwrapping_says_nothing_where_nothing_differs(caplog):
    for net, spec in (("resnet_gn", "tent"), ("resnet_bn", "source")):
        adapted = adapter(net, spec)
        adapted(images(8))
        adapted.unwrap()
    adapted = adapter("resnet_bn", "tent")
    adapted(images(8))
    adapted.reset()
    adapted.unwrap()
    assert not caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have():
    adapted, held, over = adapter(), threading.Event(), threading.Event()

    def hold():
        with adapted._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # ends a process that hangs
        try:
            torch.set_num_threads(1)  # as a DataLoader's workers do
            with adapted.frozen():
                adapted(images(2))
            os._exit(adapted.counts["seen"])
        finally:
            os._exit(1)
    over.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert adapted(images(2)).isfinite().all()


@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn"])
def test_a_copy_goes_on_by_itself(net):
    """Bit for bit, and it gives its own model back, not the first one's."""
    model = network(net).train()
    first = fata.adapt(model, "deyo+fata", guard=fata.Guard())
    first(images(16, seed=1))
    twin = copy.deepcopy(first)
    assert twin.group is first.group  # by which BatchNorm goes its own way
    for seed in (2, 3):
        assert torch.equal(first(images(16, seed=seed)), twin(images(16, seed=seed)))
    with pytest.raises(ValueError, match="another adapter has this model"):
        fata.adapt(twin.model, "tent")
    plain = twin.unwrap()
    assert plain.training
    assert not any(m._forward_pre_hooks for m in plain.modules())
    assert all(p.requires_grad for p in plain.parameters())
    assert fata.adapt(plain, "tent")(images(4)).isfinite().all()
    before = first.counts["seen"]
    first(images(16, seed=4))
    assert first.counts["seen"] == before + 16


def test_an_adapter_is_saved_and_not_pickled():
    with pytest.raises(TypeError, match=r"save\(path\) writes its state"):
        pickle.dumps(adapter())


def test_fata_belongs_beside_a_host_and_once():
    with pytest.raises(ValueError, match="'cotta' has a step of its own"):
        fata.Adapter(network("resnet_gn"), fata.Cotta(), fata.Fata())
    with pytest.raises(TypeError, match="given twice"):
        fata.Adapter(network("resnet_gn"), fata.Fata(), fata.Fata())


def test_images_too_small_to_shuffle():
    adapted = adapter(spec="deyo", patches=20, threshold=1.0)
    with pytest.raises(ValueError, match="cannot be cut into 20 x 20 patches"):
        adapted(images(4))


def test_parameters_that_no_gradient_reaches():
    adapted = fata.Adapter(Around(torch.no_grad()(lambda x: x)), fata.Tent())
    adapted(images(4))
    model = Around(after=lambda logits: logits.detach())
    with pytest.raises(ValueError, match="no gradient reaches the parameters that adapt"):
        fata.adapt(model, "tent")(images(4))


class Rounded(nn.Module):
    def forward(self, x):
        return x.round()


def quantised(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it moves to another package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def layered(*more):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), *more, nn.Linear(8, 5))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("speed", ["exact", "fast"])
@pytest.mark.parametrize("spec", ["tent", "sar+fata", "cotta", "memo"])
def test_a_quantised_model_says_that_it_does_not_adapt(spec, speed):
    fields = {"layer": "2"} if "fata" in spec else {}
    fields |= {"threshold": 1.0} if spec != "tent" and spec != "memo" else {}
    fields |= {"augment": lambda x, n: x.expand(n, -1, -1, -1)} if spec == "memo" else {}
    fields |= {"augment": lambda x: x, "restore": 0.0} if spec == "cotta" else {}
    adapted = fata.adapt(quantised(layered()), spec, lr=1.0, speed=speed, **fields)
    with pytest.warns(RuntimeWarning, match="will never move: no gradient .*quantise what"):
        adapted(torch.rand(8, 3, 2, 2))
    adapted(torch.rand(8, 3, 2, 2))  # says it once
    assert torch.equal(adapted._live().theta.read(), adapted._live().source)
    counts = adapted.counts
    assert counts["stepped"] == 0
    assert counts["dropped"] == (16 if spec == "memo" else 2)


@pytest.mark.parametrize("speed", ["exact", "fast"])
def test_a_gradient_of_zero_is_no_step(speed):
    """A step function has one everywhere."""
    adapted = fata.adapt(layered(Rounded()), "tent", lr=1.0, speed=speed)
    for _ in range(3):
        adapted(torch.rand(8, 3, 2, 2))
    with pytest.warns(RuntimeWarning, match="first 4 steps moved nothing.* zero") as said:
        adapted(torch.rand(8, 3, 2, 2))
    assert said[0].filename == __file__
    adapted(torch.rand(8, 3, 2, 2))  # says it once
    assert (adapted.counts["stepped"], adapted.counts["dropped"]) == (0, 5)


def test_momentum_moves_where_the_gradient_is_zero():
    class Weightless(fata.Tent):
        def select(self, batch, memory):
            chosen = super().select(batch, memory)
            return fata.Selection(chosen.rows, chosen.weights * (batch.images.mean() > 0))

    adapted = fata.Adapter(network("resnet_gn"), Weightless(), lr=0.01)
    adapted(images(8))
    before = adapted._live().theta.read()
    adapted(-images(8))
    assert not torch.equal(adapted._live().theta.read(), before)
    assert (adapted.counts["stepped"], adapted.counts["dropped"]) == (2, 0)
    adapted.reset()
    adapted(-images(8))
    assert (adapted.counts["stepped"], adapted.counts["dropped"]) == (0, 1)


def test_parameters_that_do_not_reach_the_logits_are_named():
    model = layered()
    model.unused = nn.LayerNorm(3)
    model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)
    adapted = fata.adapt(model, "tent", params="norm", lr=1.0)
    with pytest.warns(RuntimeWarning, match="2 of 4 parameters .*'unused.weight'"):
        adapted(torch.rand(8, 3, 2, 2))
    adapted(torch.rand(8, 3, 2, 2))
    assert adapted.counts["stepped"] == 2


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        ("deyo+fato", {}, r"unknown method 'deyo\+fato': choose .* Did you mean 'deyo\+fata'"),
        (
            "cotta+fata",
            {},
            r"a host from tent, eata, sar, deyo, roid, zerosiam, nctta, neo followed by '\+fata'",
        ),
        (
            "eata",
            {"treshold": 1},
            r"'eata' has no field 'treshold'. Did you mean 'threshold'.*Known",
        ),
        ("tent", {"sigma": 1}, r"'tent' has no field 'sigma'. Known: balance, blend, entropy"),
        ("tent", {"lr": 0.0}, r"lr=0.0: must be a positive number"),
        ("tent", {"lr": -1e-3}, r"lr=-0.001: must be a positive number"),
        ("tent", {"lr": "papers"}, r"lr='papers'"),
        ("eata", {"threshold": 2.76}, r"units of ln C"),
        ("sar", {"threshold": 0}, r"units of ln C"),
        ("sar", {"rho": -1}, r"Sar\(rho=-1\): must be a number at least 0"),
        ("deyo", {"plpd_threshold": 1.0}, r"nothing would be selected"),
        ("fata", {"ema": 1.5}, r"Fata\(ema=1.5\): must be a number in \[0, 1\]"),
        ("fata", {"sigma": -0.1}, r"Fata\(sigma=-0.1\)"),
        ("fata", {"loss": "ce"}, r"choose one of 'fata', 'simple_aug', 'mse', 'simple_ce'"),
        ("fata", {"spread": "var"}, r"choose one of 'std', 'variance'"),
        ("fata", {"bn_stats": "both"}, r"choose one of 'separate', 'joint'"),
        ("fata", {"layer": "layer5"}, r"no such module in ResNet. Did you mean 'layer"),
        ("memo", {"optimizer": "adam"}, r"choose 'auto', 'sgd' or 'adamw'"),
        ("tent", {"params": "some"}, r"params='some': choose one of 'norm', 'norm-truncated'"),
        ("tent", {"params": ["layer9"]}, r"'layer9' is no parameter and no module.*Known"),
        ("tent", {"params": []}, r"name at least one"),
        ("tent", {"fisher_data": []}, r"Tent\(.*\) has no Fisher penalty"),
        ("eata", {"fisher_data": []}, r"fisher_data gave no batch"),
        ("eata", {"fisher_data": 5}, r"must give batches of images, such as \[images\]; got 5"),
        ("eata", {"fisher_data": {"a": torch.ones(1)}}, r"a Fisher of other parameters \('a'\)"),
        (
            "eata",
            {"fisher_data": torch.ones(2, 3, 16, 16)},
            r"one tensor of shape \(2, 3, 16, 16\)",
        ),
        ("eata", {"fisher_data": [torch.full((2, 3, 16, 16), math.nan)]}, r"not finite"),
        ("eata", {"threshold": math.inf}, r"units of ln C: above 0 and at most 1"),
        ("fata", {"scale": math.inf}, r"units of ln C: above 0 and at most 1"),
        ("deyo", {"patches": 2.5}, r"must be a whole number at least 1"),
        ("deyo", {"plpd_threshold": "x"}, r"must be a number"),
        ("deyo", {"threshold": True}, r"units of ln C"),
        ("fata", {"sigma": math.inf}, r"Fata\(sigma=inf\)"),
        ("fata", {"layer": 3}, r"give the name of a module, or 'auto'"),
        ("tent", {"params": 3}, r"params=3: give one of 'norm'"),
        ("tent", {"seed": "a"}, r"seed='a': must be a whole number"),
        ("memo", {"mean": 0.5, "std": 0.2}, r"a number a channel"),
        ("DeYO+FATA", {}, r"Did you mean 'deyo\+fata'"),
        (fata.Deyo(), {}, r"a method's name is expected.*fata.Adapter\(model, fata.Deyo"),
        ("cotta", {"mean": (0.5, 0.5, 0.5)}, r"give both, or neither"),
    ],
)
def test_wrong_arguments(spec, fields, message):
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        adapter(spec=spec, **fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "resnet50", r"must be an nn.Module, got str"),
        (lambda: adapter(), r"is an Adapter already"),
        (lambda: nn.Linear(3, 4), r"Linear has no normalisation layer"),
        (lambda: torch.jit.script(nn.BatchNorm1d(4)), r"TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_wrong_models(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fata.adapt(make(), "tent")


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = fata.tiny.build("resnet_gn")
    with pytest.raises(ValueError, match="make it outside"):
        fata.adapt(model, "tent")


def test_a_method_by_name_where_an_object_is_meant():
    with pytest.raises(TypeError, match=r"fata.adapt\(model, 'tent'\) takes names"):
        fata.Adapter(network("resnet_gn"), "tent")
    with pytest.raises(TypeError, match=r"plus must be a fata.Fata"):
        fata.Adapter(network("resnet_gn"), fata.Tent(), fata.Sar())


@pytest.mark.parametrize("spec", [None, "tent"])
def test_what_the_zoo_loads_is_not_the_model_itself(spec):
    loaded = fata.zoo.load("mini_resnet_gn")
    with pytest.raises(TypeError, match=r"got Loaded: give loaded\.model"):
        fata.adapt(loaded, spec)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), r"images are torch.uint8.*images / 255"),
        (torch.zeros(0, 3, 16, 16), r"give a batch of at least one image"),
        (torch.zeros(16), r"give a batch of at least one image"),
        (torch.zeros(3, 16, 16), r"are one image: give a batch, image\[None\]"),
        (torch.zeros(2, 3, 16, 16, device="meta"), r"images are on meta and the model on cpu"),
        ([1, 2], r"must be a tensor, got list: .*torch.stack"),
    ],
)
def test_wrong_images(batch, message):
    with pytest.raises((ValueError, TypeError), match=message):
        adapter()(batch)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda o: o[:, :1], r"1 class a row; .* at least two"),
        (lambda o: o[:, :, None], r"it gave Tensor of shape \(8, 10, 1\)"),
        (lambda o: o[:4], r"must map 8 images to logits of shape \(8, classes\)"),
        (lambda o: {"scores": o}, r"it gave dict"),
        (lambda o: [o], r"it gave list"),
    ],
)
def test_wrong_outputs(output, message):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network("resnet_gn")

        def forward(self, x):
            return output(self.net(x))

    with pytest.raises(ValueError, match=message):
        fata.adapt(Model(), "tent")(images(8))


def test_a_layer_that_is_never_called_or_called_twice():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.idle, self.act = network("resnet_gn"), nn.Linear(2, 2), nn.ReLU()

        def forward(self, x):
            return self.net(self.act(self.act(x)))

    for layer, times in (("idle", "never called"), ("act", "called 2 times")):
        with pytest.raises(ValueError, match=f"the layer is {times} in one pass of Model"):
            fata.adapt(Model(), "tent+fata", layer=layer)(images(2))


def test_a_layer_without_a_row_an_image():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.first = network("resnet_gn"), nn.Flatten(0, 1)

        def forward(self, x):
            self.first(x)
            return self.net(x)

    with pytest.raises(ValueError, match=r"must give a floating tensor of 2 rows.*\(6, 16, 16\)"):
        fata.adapt(Tokens(), "tent+fata", layer="first")(images(2))


def test_an_unwrapped_adapter_says_so():
    adapted = adapter()
    adapted.unwrap()
    with pytest.raises(fata.StateError, match="was unwrapped"):
        adapted(images(2))
    assert "unwrapped" in repr(adapted)


def test_nothing_is_selected_of_a_batch_that_is_not_learned_from():
    adapted = adapter()
    adapted(images(8))
    assert {len(rows) for rows in adapted.selected.values()} == {8}
    with adapted.frozen():
        adapted(images(3))
    assert adapted.selected == {}


def test_weights_that_come_by_a_larger_module_are_refused():
    """The next step would undo them."""
    larger = nn.Sequential(adapter())
    with pytest.raises(fata.StateError, match=r"before fata.adapt\(...\)"):
        larger.load_state_dict(larger.state_dict())


def test_selected_tells_the_rows_of_the_last_batch():
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[2] = torch.nan
    adapted = fata.adapt(fata.tiny.build("resnet_gn"), "tent+fata", fata_threshold=1.0)
    assert adapted.selected == {}
    adapted(images)
    assert adapted.selected["tent"].tolist() == [row != 2 for row in range(8)]
    assert {name: int(rows.sum()) for name, rows in adapted.selected.items()} == (
        adapted.counts["selected"]
    )
    adapted(images[:3])
    assert adapted.selected["tent"].tolist() == [True, True, False]
    adapted.reset()
    assert adapted.selected == {}


def test_a_forgotten_adapter_gives_the_model_back():
    model = fata.tiny.build("resnet_bn").train()
    fata.adapt(model, "tent")(torch.rand(4, 3, 16, 16))
    again = fata.adapt(model, "tent")
    again.unwrap()
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("ours", "theirs"), [("half", "float"), ("float", "double")])
def test_images_of_another_precision_are_named(ours, theirs):
    adapted = fata.adapt(getattr(fata.tiny.build("resnet_gn"), ours)(), "tent")
    images = getattr(torch.rand(2, 3, 16, 16), theirs)()
    with pytest.raises(TypeError, match=r"images are torch.float\d\d and the model is torch.float"):
        adapted(images)


def test_a_processors_output_is_taken_as_it_is():
    images = torch.rand(4, 3, 16, 16)
    model = fata.tiny.build("resnet_gn")
    one, other = (fata.adapt(copy.deepcopy(model), "tent") for _ in range(2))
    assert torch.equal(one(images), other(**{"pixel_values": images}))
    with pytest.raises(TypeError, match="pixel_values=images alone; got pixel_values, labels"):
        one(pixel_values=images, labels=torch.zeros(4))
    with pytest.raises(TypeError, match="got nothing"):
        one()


def test_adapter_and_guard_read_as_one_line():
    adapted = fata.adapt(fata.tiny.build("resnet_gn"), "eata+fata", fisher_alpha=0)
    total = sum(dict(adapted.model.named_parameters())[n].numel() for n in adapted.trainable)
    what = f"Eata + Fata on ResNet, {total:,} parameters adapt, guard on, exact"
    assert repr(adapted) == f"Adapter({what})"
    assert repr(adapted.guard) == "Watch(adapting, 0 events)"


# -- a periodic reset


@pytest.mark.parametrize("speed", ["exact", "fast"])
@pytest.mark.parametrize("spec", ["tent+fata", "neo", "zerosiam", "roid", "cotta"])
def test_the_source_is_restored_after_every_so_many_batches(spec, speed):
    """Each part of the stream is as if it were the first, but for random draws."""
    fields = {"noise": lambda rows, channels: torch.ones(2, rows, channels)}
    fields = fields if "fata" in spec else {}
    if spec in ("roid", "cotta"):
        fields |= {"augment": lambda images: images.flip(3)}
    if spec == "cotta":
        fields |= {"restore": 0.0, "threshold": 0.0}
    fields |= {"lr": 1e-2} if spec != "neo" else {}
    stream = [images(8, seed=seed) for seed in range(5)]
    periodic = fata.adapt(network("resnet_gn"), spec, reset_every=2, speed=speed, **fields)
    found = [periodic(batch) for batch in stream]
    alone = fata.adapt(network("resnet_gn"), spec, speed=speed, **fields)
    for start in (0, 2, 4):
        alone.reset()
        for number in range(start, min(start + 2, 5)):
            assert torch.equal(found[number], alone(stream[number]))
    assert periodic.counts["reset"] == 2
    assert periodic.counts["seen"] == 40


def test_a_reset_in_time_takes_the_guards_rest_away(tmp_path):
    adapted = fata.adapt(network("resnet_gn"), "tent", lr=1e-2, reset_every=2)
    for seed in range(2):
        adapted(images(8, seed=seed))
    adapted._live().state.watched.resting = True
    adapted.save(tmp_path / "state")
    adapted(images(8))
    assert not adapted.guard.resting
    other = fata.adapt(network("resnet_gn"), "tent", lr=1e-2, reset_every=2)
    other.load(tmp_path / "state")  # the number of the batch is part of the state
    other(images(8))
    assert other.counts == adapted.counts
    assert other.counts["reset"] == 1


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_reset_that_cannot_be(value):
    with pytest.raises(ValueError, match=r"reset_every=.*at least 1, or None"):
        fata.adapt(network("resnet_gn"), "tent", reset_every=value)


def test_memo_is_reset_anyway():
    with pytest.raises(ValueError, match="'memo' restarts from the source weights at every image"):
        fata.adapt(network("resnet_gn"), "memo", reset_every=10)
