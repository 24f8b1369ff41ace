"""BatchNorm between the source's statistics and the stream's."""

import copy

import pytest
import torch
from torch import nn

import fata
from fata.network import blend
from fata.network.blend import StreamStatistics
from fata.testing.cases import images, network
from precision import DOUBLE


class Net(nn.Module):
    """One layer whose channels are the classes: a class is an image that is bright in one."""

    def __init__(self, classes=4):
        super().__init__()
        self.norm = nn.BatchNorm2d(classes)
        self.norm.running_mean.fill_(0.5)
        self.norm.running_var.fill_(2.0)

    def forward(self, x):
        return self.norm(x).mean((2, 3))


def stream(labels, shift=0.0, scale=1.0, seed=0, classes=4):
    """Images whose statistics are those that Net was trained with, if all classes are in view."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(len(labels), classes, 4, 4, generator=draw).double()
    x = x + 2 * nn.functional.one_hot(labels, classes)[:, :, None, None]
    return shift + scale * x


def adapted(model=None, **fields):
    return fata.adapt((model or Net()).double(), "norm", blend=True, **fields)


def memory(adapter):
    return adapter._live().state.norm


def by_hand(batches, model):
    """The rule as its equations say it, of fewer images than are kept, all of one domain."""
    mean, var, eps = model.norm.running_mean, model.norm.running_var, model.norm.eps
    deviation, labels, out = (var + eps).sqrt(), model(batches[0]).argmax(1).tolist(), []
    images, weights = [], []  # a, s and s^2 of each; what it counts
    for number, batch in enumerate(batches):
        pairs = len(labels) * (len(labels) - 1)
        same = sum(labels.count(c) * (labels.count(c) - 1) for c in set(labels)) / max(pairs, 1)
        odds = max(same - 1 / 4, 0) / max(1 - same, 1e-6)
        z = (batch - mean[:, None, None]) / deviation[:, None, None]
        a, q = z.mean((2, 3)), z.square().mean((2, 3))
        images.append(torch.stack((a, q.sqrt(), q), 1))
        now = torch.cat((*weights, torch.ones(len(batch)).double()))[:, None, None] / sum(
            map(len, images)
        )
        big_a, big_s, big_q = (now * torch.cat(images)).sum(0)
        squares = (now * torch.cat(images).square()).sum(0)[:2]
        variance = (squares[0] - big_a**2 + squares[1] - big_s**2).sum()
        distance = (big_a.square() + (big_q.sqrt() - 1).square()).sum()
        few = 1 / (sum(map(len, images)) - 1)
        w = (1 - (few + blend.CLASSES * odds) * variance / distance).clamp(0, 1)
        new_mean = mean + w * big_a * deviation
        new_var = var + deviation**2 * w * (big_q - 1 - w * big_a**2)
        scale = (new_var + eps).rsqrt()[:, None, None]
        logits = ((batch - new_mean[:, None, None]) * scale).mean((2, 3))
        here = logits.argmax(1).tolist()
        labels = [*(labels if number else []), *here]
        counted = torch.tensor([labels.count(c) ** -0.5 for c in here], dtype=torch.double)
        weights.append(len(batch) * counted / counted.sum())
        out.append(logits)
    return out


def test_it_is_what_the_equations_say():
    draw = torch.Generator().manual_seed(1)
    batches = [
        stream(torch.randint(0, 3, (rows,), generator=draw), 0.8, 1.5, seed=rows)
        for rows in (12, 5, 9)
    ]
    adapter = adapted()
    with torch.no_grad():
        expected = by_hand(batches, Net().double().eval())
    for batch, logits in zip(batches, expected, strict=True):
        torch.testing.assert_close(adapter(batch), logits, **DOUBLE)
    assert 0 < memory(adapter)["weight"].item() < 1  # neither end would show an error


def test_a_stream_of_one_class_that_has_not_shifted_keeps_the_statistics():
    adapter, source = adapted(), Net().double().eval()
    for seed in range(4):
        x = stream(torch.full((32,), 2), seed=seed)
        assert torch.equal(adapter(x), source(x))


def test_a_picture_that_stands_still_keeps_the_statistics():
    """Its content is no shift, however little its frames differ."""
    adapter, source = adapted(), Net().double().eval()
    still = stream(torch.tensor([2]))
    for seed in range(4):
        x = still + 5e-3 * stream(torch.full((32,), 2), seed=seed)
        assert torch.equal(adapter(x), source(x))


def test_a_shifted_stream_gets_its_own():
    adapter = adapted()
    for seed in range(6):
        x = stream(torch.arange(64) % 4, shift=3.0, scale=2.0, seed=seed)
        logits = adapter(x)
    assert memory(adapter)["weight"] > 0.9
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
    expected = ((x - mean[:, None, None]) / std[:, None, None]).mean((2, 3))
    assert (logits - expected).abs().max() < 0.2
    assert (Net().double().eval()(x) - expected).abs().max() > 1


def test_one_image_proves_nothing():
    x = stream(torch.tensor([1]), shift=3.0)
    assert torch.equal(adapted()(x), Net().double().eval()(x))


def test_small_batches_add_up():
    """The memory after 16 batches of two is that of one of 32, in a layer that comes first."""
    x = stream(torch.arange(32) % 4, shift=1.0)
    whole, parts = adapted(), adapted()
    whole(x)
    for batch in x.split(2):
        parts(batch)
    for name in ("shift", "square", "rms", "variance", "rows", "images"):
        torch.testing.assert_close(memory(parts)[name], memory(whole)[name], **DOUBLE)


def test_older_images_fade_out():
    """Where the stream moves too slowly for any batch to tell."""
    adapter = adapted()
    for shift in torch.linspace(1, 2, 61).tolist():
        adapter(stream(torch.arange(64) % 4, shift=shift))
    assert memory(adapter)["rows"] == memory(adapter)["images"] == blend.IMAGES
    now = adapted()
    now(stream(torch.arange(64) % 4, shift=2.0))
    torch.testing.assert_close(memory(adapter)["shift"], memory(now)["shift"], rtol=0.4, atol=0)


@pytest.mark.parametrize("rows", [64, 16])
def test_after_a_change_of_domain_older_images_do_not_count(rows):
    adapter, now = adapted(), adapted()
    for seed in range(20):
        adapter(stream(torch.arange(rows) % 4, shift=-2.0, seed=seed))
    for seed in range(2):
        batch = stream(torch.arange(rows) % 4, shift=2.0, scale=2.0, seed=seed)
        adapter(batch), now(batch)
    late, alone = memory(adapter), memory(now)
    assert late["images"] < 3 * rows
    torch.testing.assert_close(late["shift"], alone["shift"], rtol=0.4, atol=0)


def test_a_change_of_class_is_none_of_domain():
    """Of a stream sorted by class each batch is far from the others, and all count."""
    adapter = adapted()
    for seed in range(20):
        adapter(stream(torch.full((32,), seed // 3 % 4), shift=3.0, seed=seed))
    assert memory(adapter)["images"] > 500


def test_the_recommended_method_blends_and_the_papers_do_not():
    assert fata.adapt(network("resnet_bn")).method.blend
    assert not fata.adapt(network("resnet_bn"), "tent").method.blend
    assert not fata.adapt(network("resnet_gn")).method.blend
    assert not fata.adapt(network("resnet_bn"), blend=False).method.blend


@pytest.mark.parametrize("spec", ["source", "cotta", "memo"])
def test_methods_with_statistics_of_their_own_are_refused(spec):
    with pytest.raises(ValueError, match="blend=True"):
        fata.adapt(network("resnet_bn"), spec, blend=True)


def test_unwrap_predicts_what_the_frozen_adapter_does(caplog):
    source, x = network("resnet_bn"), images(16) + 1
    adapter = fata.adapt(network("resnet_bn"), "tent", blend=True, lr=0.01)
    for batch in x.split(4):
        adapter(batch)
    with adapter.frozen(), torch.no_grad():
        expected, alone = adapter(x), adapter(x[:1])
    torch.testing.assert_close(alone, expected[:1], rtol=1e-4, atol=1e-4)  # rows are independent
    twin = copy.deepcopy(adapter)
    with torch.no_grad():
        assert torch.equal(adapter.unwrap()(x), expected)
        assert not caplog.text
        given_back = twin.unwrap(batch_statistics=False)
    for name, buffer in given_back.named_buffers():
        assert torch.equal(buffer, source.get_buffer(name)), name
    assert not torch.equal(adapter.model.bn1.running_mean, source.bn1.running_mean)


def test_a_copy_goes_on_by_itself():
    x = images(24) + 1
    adapter, whole = (fata.adapt(network("resnet_bn"), "tent", blend=True) for _ in range(2))
    for batch in x.split(8):
        expected = whole(batch)
    adapter(x[:8])
    twin = copy.deepcopy(adapter)
    before = adapter.state_dict()
    twin(x[8:16])
    assert torch.equal(twin(x[16:]), expected)
    after = adapter.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "meta")
    adapter(x[8:16])
    assert torch.equal(adapter(x[16:]), expected)


def test_a_state_with_the_batchs_statistics_is_another():
    plain, blended = (fata.adapt(network("resnet_bn"), "tent", blend=b) for b in (False, True))
    with pytest.raises(fata.StateError, match="blend"):
        blended.load_state_dict(plain.state_dict())


def test_activations_that_overflow_leave_the_statistics():
    adapter = adapted()
    adapter(stream(torch.arange(16) % 4, shift=1.0))
    before = {name: tensor.clone() for name, tensor in memory(adapter).items()}
    adapter(stream(torch.arange(16) % 4) * 1e200)
    for name in ("shift", "square", "rms", "variance"):
        assert torch.equal(memory(adapter)[name], before[name])
    assert adapter(stream(torch.arange(16) % 4, shift=1.0)).isfinite().all()


def test_a_layer_without_running_statistics_has_the_batchs():
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.plain = nn.BatchNorm2d(4, track_running_stats=False)

        def forward(self, x):
            return super().forward(self.plain(x))

    x = stream(torch.arange(16) % 4, shift=5.0)
    adapter = adapted(Two())
    adapter(x)
    assert memory(adapter)["shift"].abs().max() < 1  # of what the first layer has normalised
    assert Two().double().norm.running_mean.shape == (4,)


def test_the_guard_compares_as_often_with_any_statistics():
    never = fata.Guard(level=0.0)
    blended, plain = (
        fata.adapt(network("resnet_bn"), "tent", guard=never, blend=b) for b in (True, False)
    )
    for batch in images(64).split(8):
        blended(batch), plain(batch)
    compared = blended.counts["rows_source"]  # not by the first batch: the step itself shows it
    assert 0 < 2 * compared + 8 == plain.counts["rows_source"]  # the batch's statistics, too


def test_half_precision_models_keep_their_buffers():
    model = network("resnet_bn").to(torch.bfloat16)
    adapter = fata.adapt(model, "tent", blend=True)
    for batch in images(16).to(torch.bfloat16).split(8):
        assert adapter(batch).isfinite().all()
    assert {b.dtype for n, b in model.named_buffers() if "running" in n} == {torch.bfloat16}
    assert memory(adapter)["shift"].dtype == torch.float32


def test_statistics_are_made_once_a_pass():
    """A second pass while a batch is observed, such as FATA's tail, has no part in them."""
    model = Net().double().eval()
    statistics = StreamStatistics(model)
    x = stream(torch.arange(16) % 4, shift=1.0)
    with torch.no_grad():
        start = statistics.begin(model(x))
        with statistics.observing(start, len(x)):
            first = model(x)
            model(x + 5)
            again = model(x)
            found = statistics.observed(first)
    assert torch.equal(first, again)
    assert found["rows"] == 16
    statistics.write(found)
    assert torch.equal(model(x), first)


def test_what_comes_again_and_again_is_no_shift():
    """Of each batch, 15 in 16 images are of one class; the memory hardly leans to it."""
    labels = torch.where(torch.arange(64) % 16 == 0, torch.arange(64) // 16, 2)
    even, odd = adapted(), adapted()
    for seed in range(4):
        even(stream(torch.arange(64) % 4, shift=3.0, scale=2.0, seed=seed))
        odd(stream(labels, shift=3.0, scale=2.0, seed=seed))
    plain = stream(labels, shift=3.0, scale=2.0).mean((0, 2, 3))
    source = Net().double().eval().norm
    unit = (source.running_var + source.eps).sqrt()
    leaning = (plain - source.running_mean) / unit - memory(even)["shift"]
    left = memory(odd)["shift"] - memory(even)["shift"]
    assert left.norm() < 0.8 * leaning.norm()


def test_a_layer_whose_rows_are_parts_of_images_gets_its_own():
    class Parts(Net):
        def forward(self, x):
            return (
                super()
                .forward(x.unfold(2, 2, 2).permute(0, 2, 1, 4, 3).flatten(0, 1))
                .view(len(x), 2, -1)
                .mean(1)
            )

    adapter = adapted(Parts())
    for seed in range(4):
        adapter(stream(torch.arange(64) % 4, shift=3.0, scale=2.0, seed=seed))
    assert memory(adapter)["weight"] > 0.9


@pytest.mark.parametrize("rows", [64, 16, 2])
def test_an_image_that_nobody_scaled_spoils_no_statistics(rows):
    """Neither those of the other images of its batch nor those of the batches after it."""
    labels = torch.arange(rows * (8 + 128 // rows)).view(-1, rows) % 4
    shown = [stream(some, 1.0, 2.0, seed) for seed, some in enumerate(labels)]
    plain, met = adapted(), adapted()
    differ = []
    for number, x in enumerate(shown):
        other = x.clone()
        if number == len(shown) - 6:
            other[-1] *= 255
        rest = slice(0, -1 if number == len(shown) - 6 else None)
        differ += (plain(x) - met(other))[rest].abs().amax(1).tolist()
    assert 0 < max(differ) < 0.3
