"""What each method's paper says, by hand, and the identities between methods."""

import math

import pytest
import torch
from torch import nn

import fata
from fata.methods.base import Batch
from fata.methods.pixels import Pixels, Rng
from fata.methods.views import _OPERATIONS, augmix_view, cotta_view
from fata.testing.cases import Case, images, network
from precision import DOUBLE

INF = math.inf


def batch_of(probs, look=None, pictures=None):
    return Batch(pictures, torch.tensor(probs).log(), look, 0)


def run(adapter, net, rows=16, dtype=torch.float32):
    return torch.cat([adapter(x) for x in Case(None, None, net, rows, dtype).stream()])


def in_double(net):
    return network(net).double()


def assert_same(one, other, net, rows=16):
    """Two adapters of networks in float64 give the same logits and end at the same weights."""
    found, expected = (run(adapter, net, rows, torch.float64) for adapter in (one, other))
    torch.testing.assert_close(found, expected, **DOUBLE)
    torch.testing.assert_close(ends(one), ends(other), **DOUBLE)


def ends(adapter):
    return adapter._live().state.theta


# -- EATA


def test_eata_selects_reliable_rows_that_are_not_redundant():
    method = fata.Eata(threshold=0.5, redundancy=0.8)
    seen = batch_of([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    assert method.select(seen, {}).rows.tolist() == [True, True, False]
    memory = {"mean_probs": torch.tensor([0.9, 0.1]), "begun": torch.tensor(True)}
    selection = method.select(seen, memory)
    assert selection.rows.tolist() == [False, True, False]
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    expected = math.exp(0.5 * math.log(2) - entropy)
    assert selection.weights[1].item() == pytest.approx(expected, rel=1e-5)


def test_eata_averages_its_own_selection_and_waits_for_the_first():
    method = fata.Eata(threshold=0.5, redundancy=2.0)
    unsure, sure = batch_of([[0.5, 0.5]]), batch_of([[0.9, 0.1], [0.5, 0.5]])
    memory = method.observe(unsure, method.select(unsure, {}), {})
    assert not memory["begun"]
    memory = method.observe(sure, method.select(sure, memory), memory)
    assert memory["mean_probs"].tolist() == pytest.approx([0.9, 0.1])
    other = batch_of([[0.1, 0.9]])
    memory = method.observe(other, method.select(other, memory), memory)
    assert memory["mean_probs"].tolist() == pytest.approx([0.82, 0.18])
    kept = method.observe(unsure, method.select(unsure, memory), memory)
    assert torch.equal(kept["mean_probs"], memory["mean_probs"])


def test_eata_without_fisher_data_says_that_it_is_eta():
    with pytest.warns(UserWarning, match="is ETA"):
        fata.adapt(network("resnet_gn"), "eata")


def test_fisher_pulls_towards_the_source():
    """A strong penalty keeps the parameters nearer to the source; none is ETA."""
    fields = {"redundancy": 2.0, "lr": 1e-3}
    distance = {}
    for alpha in (1e-9, 5000.0):
        data = images(32, seed=1).split(16)
        adapter = fata.adapt(
            network("resnet_gn"), "eata", fisher_data=data, fisher_alpha=alpha, **fields
        )
        run(adapter, "resnet_gn")
        distance[alpha] = (ends(adapter) - adapter._live().source).norm().item()
    assert 0 < distance[5000.0] < distance[1e-9]


def test_fisher_is_the_mean_of_squared_gradients_of_batches():
    model, data = in_double("resnet_gn"), [images(4, seed=s).double() for s in (1, 2)]
    adapter = fata.adapt(model, "eata", fisher_data=[(x, None) for x in data])
    expected = torch.zeros(8, dtype=torch.float64)
    for x in data:
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
        expected += torch.autograd.grad(loss, model.bn1.weight)[0].square() / 2
    torch.testing.assert_close(adapter.fisher["bn1.weight"], expected, **DOUBLE)
    again = fata.adapt(in_double("resnet_gn"), "eata", fisher_data=adapter.fisher)
    assert torch.equal(again._live().functions.fisher, adapter._live().functions.fisher)
    assert adapter.counts["rows_forward"] == 0  # the set-up is not the stream


# -- SAR


def test_sar_recovers_weights_momentum_and_average_together():
    """A recovery constant above any entropy: each step goes straight back to the source."""
    adapter = fata.adapt(network("resnet_gn"), "sar", recovery=100.0)
    source = ends(adapter).clone()
    run(adapter, "resnet_gn")
    state = adapter._live().state
    assert adapter.counts["recovered"] == adapter.counts["stepped"] == 3
    assert torch.equal(state.theta, source)
    assert not state.velocity.any()
    assert state.host == {}
    assert torch.equal(adapter.model.bn1.weight, network("resnet_gn").bn1.weight)


def test_sar_averages_the_entropy_of_its_own_rows():
    method = fata.Sar(threshold=INF)
    first, second = batch_of([[0.5, 0.5]]), batch_of([[1 - 1e-9, 1e-9]])
    memory = method.observe(first, method.select(first, {}), {})
    assert memory["entropy"].item() == pytest.approx(math.log(2))
    memory = method.observe(second, method.select(second, memory), memory)
    assert memory["entropy"].item() == pytest.approx(0.9 * math.log(2), rel=1e-4)
    assert not method.recover(memory)
    assert method.recover({"entropy": torch.tensor(0.19)})


def test_recovery_is_not_fed_by_fata():
    """The average is the host's own entropy: FATA's loss in it would keep it from ever falling."""
    adapter = fata.adapt(network("vit_ln"), "sar+fata", recovery=0.0)
    run(adapter, "vit_ln")
    assert adapter._live().state.host["entropy"] < 0.4 * math.log(10)


@pytest.mark.parametrize("rows", [16, 1])
@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_sar_without_rho_and_threshold_is_tent(net, rows):
    sar = fata.adapt(in_double(net), "sar", rho=0.0, threshold=INF, recovery=0.0, lr=1e-3)
    assert_same(sar, fata.adapt(in_double(net), "tent", lr=1e-3), net, rows)


def test_sam_without_reliable_rows_still_learns_fatas():
    """SAR selects nothing, FATA does: a plain step on FATA's loss, as with FATA alone."""
    both = fata.adapt(in_double("resnet_gn"), "sar+fata", threshold=1e-9, lr=1e-3)
    assert_same(both, fata.adapt(in_double("resnet_gn"), "fata", lr=1e-3), "resnet_gn")
    assert both.counts["selected"]["sar"] == 0 < both.counts["stepped"]


# -- DeYO


def test_deyo_learns_where_the_shape_matters():
    """Of two sure rows, the one that stays sure when its patches are shuffled is left out."""
    logits = {0: [0.9, 0.1], 1: [0.5, 0.5]}
    looked = []

    def look(shuffled):
        looked.append(len(shuffled))
        return torch.tensor([logits[0], logits[1]]).log()

    seen = batch_of([[0.9, 0.1], [0.95, 0.05], [0.5, 0.5]], look, torch.rand(3, 3, 8, 8))
    selection = fata.Deyo().select(seen, {})
    assert looked == [2]  # the unsure row is not looked at again
    assert selection.rows.tolist() == [False, True, False]
    entropy = -0.95 * math.log(0.95) - 0.05 * math.log(0.05)
    expected = math.exp(0.4 * math.log(2) - entropy) + math.exp(0.45)
    assert selection.weights[1].item() == pytest.approx(expected, rel=1e-5)


def test_deyo_shuffles_each_image_by_its_own_order():
    pictures = torch.arange(2 * 3 * 64.0).reshape(2, 3, 8, 8)
    given = []

    def look(shuffled):
        given.append(shuffled)
        return torch.zeros(2, 2)

    seen = batch_of([[0.99, 0.01], [0.99, 0.01]], look, pictures)
    fata.Deyo(patches=2).select(seen, {})
    for one, shuffled in zip(pictures, given[0], strict=True):
        assert sorted(one.flatten().tolist()) == sorted(shuffled.flatten().tolist())
    assert not torch.equal(given[0], pictures)


# -- CoTTA and MEMO


def test_cotta_teacher_that_never_moves_answers_like_the_source():
    adapter = fata.adapt(network("resnet_gn"), "cotta", decay=1.0, threshold=0.0)
    plain = fata.adapt(network("resnet_gn"), "source")
    assert torch.equal(run(adapter, "resnet_gn"), run(plain, "resnet_gn"))
    assert not torch.equal(ends(adapter), adapter._live().source)


def test_cotta_averages_views_only_where_the_source_is_unsure():
    seen = []
    for threshold in (0.0, 1.0):
        adapter = fata.adapt(
            network("resnet_gn"), "cotta", threshold=threshold, views=3, augment=lambda x: 0.5 * x
        )
        adapter(images(4))
        seen.append(adapter.counts["rows_forward"])
    assert seen == [3 * 4, 5 * 4]  # anchor, teacher or three views, student


def test_cotta_restores_each_weight_by_chance():
    adapter = fata.adapt(network("resnet_gn"), "cotta", restore=1.0)
    run(adapter, "resnet_gn")
    assert torch.equal(ends(adapter), adapter._live().source)
    some = fata.adapt(network("resnet_gn"), "cotta", restore=0.3)
    some(images(8))
    share = (ends(some) == some._live().source).float().mean()
    assert 0.25 < share < 0.45  # restored, or without a gradient


@pytest.mark.parametrize("net", fata.tiny.NAMES)
def test_memo_with_one_identity_view_is_tent_with_a_reset_at_each_image(net):
    fields = {"views": 1, "augment": lambda image, n: image[None], "prior": 0.0, "optimizer": "sgd"}
    memo = fata.adapt(in_double(net), "memo", lr=1e-2, **fields)
    tent = fata.adapt(in_double(net), "tent", guard=None, params="every", lr=1e-2)
    stream = images(6).double()
    expected = []
    for image in stream:
        tent.reset()
        tent(image[None])
        with tent.frozen():
            expected.append(tent(image[None]))
    torch.testing.assert_close(memo(stream), torch.cat(expected), **DOUBLE)
    assert torch.equal(ends(memo), memo._live().source)


def test_memo_mixes_running_and_batch_statistics():
    """Prior 0 is the batch's statistics, a huge prior the running ones."""
    stream = images(1).double()
    fields = {"views": 1, "augment": lambda image, n: image[None], "lr": 1e-15}
    plain = {name: fata.adapt(in_double("resnet_bn"), name)(stream) for name in ("norm", "source")}
    for prior, name in ((0.0, "norm"), (1e30, "source")):
        memo = fata.adapt(in_double("resnet_bn"), "memo", prior=prior, **fields)
        torch.testing.assert_close(memo(stream), plain[name], **DOUBLE)
    assert not torch.allclose(plain["norm"], plain["source"])


def test_memo_steps_by_adamw_on_transformers():
    adapter = fata.adapt(in_double("vit_ln"), "memo", views=2, lr=0.5)
    engine = adapter._live()
    gradient = torch.tensor([1e-3, -5.0, 0.0]).double().repeat(len(engine.source) // 3 + 1)
    moved = adapter.method._descend(engine, gradient[: len(engine.source)])
    parameter = torch.nn.Parameter(engine.source.clone())
    parameter.grad = gradient[: len(engine.source)]
    torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.01).step()
    torch.testing.assert_close(moved, parameter.detach(), **DOUBLE)


@pytest.mark.parametrize("spec", ["cotta", "memo"])
def test_a_class_that_is_masked_out_does_not_stop_learning(spec):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network("resnet_gn")

        def forward(self, x):
            return self.inner(x).index_fill(1, torch.tensor([3]), -torch.inf)

    adapter = fata.adapt(Masked(), spec, lr=0.05, views=2)
    plain = Masked().eval()
    answers = [adapter(images(4, seed=seed)) for seed in (0, 1)]
    with torch.no_grad():
        assert not torch.allclose(answers[1], plain(images(4, seed=1)))
    assert all((answer.argmax(1) != 3).all() for answer in answers)
    assert adapter.counts["dropped"] == 0


def test_operations_of_augmix_do_what_they_are_called():
    draw = Rng(torch.Generator().manual_seed(0))
    ramp = torch.linspace(0.2, 0.996, 3 * 64 * 64).view(1, 3, 64, 64)
    contrast, _, _, solarize, *moves, posterize = [one(ramp, draw) for one in _OPERATIONS]
    assert (contrast.amin(), contrast.amax()) == (0, 1)
    dark = ramp < 0.9
    assert torch.equal(solarize[dark], ramp[dark])  # the brightest alone are turned round
    assert solarize.flatten()[-1].item() == pytest.approx(1 - 0.996, abs=1e-5)
    assert all((moved - ramp).abs().mean() < 0.1 for moved in moves)
    assert sum((moved == 0).any() for moved in moves) >= 2  # others by less than a pixel
    assert len(posterize.unique()) <= 16


def test_memo_draws_views_for_each_row():
    adapter = fata.adapt(network("resnet_gn"), "memo", views=2, lr=1e-2)
    twice = images(1).repeat(2, 1, 1, 1)
    (one, two), (third, fourth) = adapter(twice), adapter(twice)
    for left, right in ((one, two), (one, third), (two, fourth)):
        assert not torch.allclose(left, right)


def test_views_stay_pixels_and_follow_their_generator():
    pixels = images(3)
    for view, x in ((cotta_view, pixels), (augmix_view, pixels[:1])):
        one, two, other = (view(x, Rng(torch.Generator().manual_seed(s))) for s in (0, 0, 1))
        assert one.shape == x.shape
        assert one.min() >= -1e-6
        assert one.max() <= 1 + 1e-6
        assert torch.equal(one, two)
        assert not torch.allclose(one, other)


def test_views_of_some_rows_are_those_rows_of_the_views_of_all():
    pixels = images(5).double()
    here = slice(2, 4)
    place = (5, here)
    whole = cotta_view(pixels, Rng(torch.Generator().manual_seed(0)))
    some = cotta_view(pixels[here], Rng(torch.Generator().manual_seed(0), place))
    torch.testing.assert_close(some, whole[here], **DOUBLE)


def test_normalised_images_need_mean_and_std_for_views():
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.2, 0.25)
    pixels, wide = images(4), images(4).double()
    space = Pixels(mean, std)
    torch.testing.assert_close(space.of(space.back(wide)), wide, **DOUBLE)
    adapter = fata.adapt(network("resnet_gn"), "cotta", threshold=1.0, views=1)
    with pytest.raises(ValueError, match="mean and std that they were normalised with"):
        adapter(space.back(pixels))
    fine = fata.adapt(network("resnet_gn"), "cotta", threshold=1.0, views=1, mean=mean, std=std)
    assert fine(space.back(pixels)).isfinite().all()


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5,) * 3, None),
        ((0.5,) * 3, (0.2, 0.2, 0.0)),
        ((0.5,) * 3, (0.2, -0.2, 0.2)),
        ((0.5,) * 2, (0.2,) * 3),
        (0.5, 0.2),
    ],
)
@pytest.mark.parametrize("spec", ["cotta", "memo"])
def test_means_and_deviations_that_nothing_can_have(spec, mean, std):
    with pytest.raises((TypeError, ValueError), match="mean"):
        fata.adapt(network("resnet_gn"), spec, mean=mean, std=std)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (images(4).mul(255).byte(), r"uint8: give pixels in \[0, 1\]"),
        (images(4)[:, :1], r"of 3 channels: give \(rows, 3, height, width\)"),
    ],
)
def test_images_that_cannot_be_normalised(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Pixels((0.5,) * 3, (0.2,) * 3).back(wrong)


def replica(model, images, theta):
    """Logits of a model at other weights, as a function of them."""
    return torch.func.functional_call(model, theta, (images,))


def soft(p_logits, q_logits):
    return -(p_logits.softmax(1) * q_logits.log_softmax(1)).sum(1)


def test_two_steps_of_cotta_written_out():
    """Anchor, mean of views, symmetric loss, Nesterov, teacher after the step, no restore."""
    net, lr, decay = in_double("vit_ln"), 0.05, 0.7
    views = iter([0.9, 0.8, 1.1, 0.7])

    def augment(x):
        return x * next(views)

    adapter = fata.adapt(
        in_double("vit_ln"), "cotta", lr=lr, decay=decay, restore=0.0, threshold=1.0, views=2,
        augment=augment, guard=None,
    )  # fmt: skip
    names = adapter.trainable
    fixed = {n: p.detach() for n, p in net.named_parameters()}
    student = {n: fixed[n].clone() for n in names}
    teacher, velocity = dict(student), {n: torch.zeros_like(student[n]) for n in names}
    for seed, factors in ((7, (0.9, 0.8)), (9, (1.1, 0.7))):
        x = images(6, seed).double()
        with torch.no_grad():
            target = torch.stack([replica(net, x * f, fixed | teacher) for f in factors]).mean(0)
        torch.testing.assert_close(adapter(x), target, **DOUBLE)
        leaves = {n: student[n].clone().requires_grad_() for n in names}
        logits = replica(net, x, fixed | leaves)
        loss = (soft(target, logits) + soft(logits, target)).mean() / 2
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for n, g in zip(names, gradients, strict=True):
            velocity[n] = 0.9 * velocity[n] + g
            student[n] = student[n] - lr * (g + 0.9 * velocity[n])
            teacher[n] = decay * teacher[n] + (1 - decay) * student[n]
    found = dict(adapter.model.named_parameters())
    for n in names:
        torch.testing.assert_close(found[n].detach(), student[n], **DOUBLE)


def test_cotta_asks_the_source_whether_it_is_sure():
    """A student that has gone unsure does not bring on the views: the anchor decides."""
    adapter = fata.adapt(network("resnet_gn"), "cotta", threshold=0.3, views=2)
    with torch.no_grad():
        sure = adapter.model(images(8)).softmax(1).amax(1).mean()
    assert sure > 0.3
    state = adapter._live().state
    state.theta = state.theta * 0.0  # a student, and model, without an opinion
    adapter._live().theta.write(state.theta)
    adapter(images(8))
    assert adapter.counts["rows_forward"] == 3 * 8


def test_frozen_and_unwrapped_cotta_answer_by_the_teacher():
    adapter = fata.adapt(in_double("resnet_gn"), "cotta", decay=1.0, threshold=0.0)
    stream = images(4).double()
    run(adapter, "resnet_gn", dtype=torch.float64)
    plain = in_double("resnet_gn")(stream).detach()
    with adapter.frozen():
        torch.testing.assert_close(adapter(stream), plain, **DOUBLE)
    torch.testing.assert_close(adapter.unwrap()(stream).detach(), plain, **DOUBLE)


def test_a_step_of_memo_written_out():
    """Entropy of the mean of two views' predictions, a plain step, and the answer after it."""
    net, lr = in_double("resnet_gn"), 0.05
    halves = {"views": 2, "augment": lambda x, n: torch.stack((x, 0.5 * x))}
    memo = fata.adapt(in_double("resnet_gn"), "memo", lr=lr, **halves)
    x = images(1).double()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    mean = replica(net, torch.cat((x, 0.5 * x)), leaves).softmax(1).mean(0)
    gradients = torch.autograd.grad(-(mean * mean.log()).sum(), list(leaves.values()))
    moved = {n: p.detach() - lr * g for (n, p), g in zip(leaves.items(), gradients, strict=True)}
    torch.testing.assert_close(memo(x), replica(net, x, moved).detach(), **DOUBLE)


# -- FATA beside a host


def test_a_recovery_keeps_fatas_average():
    adapter = fata.adapt(network("resnet_gn"), "sar+fata", recovery=100.0)
    run(adapter, "resnet_gn")
    assert adapter.counts["recovered"] > 0
    assert "delta" in adapter._live().state.plus


def test_the_average_moves_where_fata_selects_nothing():
    adapter = fata.adapt(network("resnet_gn"), "tent+fata", fata_threshold=1e-9)
    adapter(images(8))
    first = adapter._live().state.plus["delta"]
    adapter(images(8, seed=2))
    assert adapter.counts["selected"]["fata"] == 0
    assert not torch.equal(adapter._live().state.plus["delta"], first)


def test_the_penalty_is_part_of_a_step_that_only_fata_takes():
    ends = []
    for alpha in (1e-9, 1e3):
        adapter = fata.adapt(
            network("resnet_gn"), "eata+fata", threshold=1e-9, fisher_alpha=alpha, lr=1e-3,
            fisher_data=[images(16, seed=1)],
        )  # fmt: skip
        run(adapter, "resnet_gn")
        assert adapter.counts["selected"]["eata"] == 0 < adapter.counts["stepped"]
        ends.append((adapter._live().state.theta - adapter._live().source).norm())
    assert ends[1] < ends[0]


def test_fata_alone_selects_for_itself_and_tent_with_it_takes_all():
    alone, both = (fata.adapt(network("vit_ln"), spec) for spec in ("fata", "tent+fata"))
    run(alone, "vit_ln"), run(both, "vit_ln")
    assert alone.counts["selected"]["norm"] == 0 < alone.counts["selected"]["fata"]
    assert both.counts["selected"]["tent"] == 48
    assert alone.name == "fata"


def test_the_step_is_the_sum_of_the_hosts_and_fatas():
    """The first step of tent+fata moves by TENT's step plus FATA's own."""
    stream = images(16).double()
    moved = {}
    for spec in ("tent", "fata", "tent+fata"):
        adapter = fata.adapt(in_double("resnet_gn"), spec, lr=1e-2)
        adapter(stream)
        moved[spec] = ends(adapter) - adapter._live().source
    torch.testing.assert_close(moved["tent+fata"], moved["tent"] + moved["fata"], **DOUBLE)


def test_layers_left_out_collect_no_gradient():
    adapter = fata.adapt(network("resnet_gn"), "deyo+fata")
    trained = {n for n, p in adapter.model.named_parameters() if p.requires_grad}
    assert trained == set(adapter.trainable)
    assert not any(name.startswith(("layer4", "conv", "fc")) for name in trained)
    run(adapter, "resnet_gn")
    assert all(p.grad is None for p in adapter.model.parameters())


def test_a_restarted_stream_begins_with_one_pass_again():
    adapter = fata.adapt(
        network("resnet_gn"), "eata", threshold=0.2, redundancy=2.0, fisher_alpha=0, reset_every=1
    )
    run(adapter, "resnet_gn")
    assert adapter.counts["reset"] == 2
    assert adapter.counts["rows_forward"] == adapter.counts["rows_backward"] == 48


def test_the_engine_learns_on_few_rows_where_few_are_selected():
    fields = {"threshold": 0.2, "redundancy": 2.0, "fisher_alpha": 0}
    few = fata.adapt(network("resnet_gn"), "eata", **fields)
    many = fata.adapt(network("resnet_gn"), "tent")
    run(few, "resnet_gn"), run(many, "resnet_gn")
    assert few._live().state.share < 0.5 < many._live().state.share
    # One pass serves both: of TENT's batches all, of EATA's the first, which does not know it yet.
    first = fata.adapt(network("resnet_gn"), "eata", **fields)
    first(Case(None, None, "resnet_gn", 16).stream()[0])
    later = few.counts["selected"]["eata"] - first.counts["selected"]["eata"]
    assert many.counts["rows_forward"] == many.counts["rows_backward"] == 48
    assert few.counts["rows_forward"] == 48 + later
    assert few.counts["rows_backward"] == 16 + later < 32
