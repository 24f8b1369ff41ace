"""For those who run it for months: threads, memory, and whatever comes in."""

import gc
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import fata
from fata import tiny
from fata.methods import SPECS

LEARNING = [spec for spec in SPECS if spec not in ("source", "norm", "memo")]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no fisher_data")
        yield


def build(net="resnet_gn"):
    torch.manual_seed(0)
    return tiny.build(net)


def test_threads_take_turns():
    """The same images from four threads at once: as if one had brought them all."""
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    alone = fata.adapt(build(), "tent", lr=0.01)
    for _ in range(20):
        alone(images)
    shared = fata.adapt(build(), "tent", lr=0.01)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(shared, [images] * 20))
    assert shared.counts == alone.counts
    before, after = alone.state_dict(), shared.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "meta")


def alive():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("spec", LEARNING)
def test_a_long_stream_keeps_no_more_than_a_short_one(spec):
    adapter = fata.adapt(build(), spec, guard=fata.Guard(every=2))
    draw = torch.Generator().manual_seed(0)

    def run(count):
        for _ in range(count):
            adapter(torch.rand(4, 3, 16, 16, generator=draw))
        return alive()

    full = run(30)  # the guard's ring of states, too
    assert run(60) <= full


@st.composite
def streams(draw):
    """A method with fields of its own, and batches of any size, layout and sanity."""
    net = draw(st.sampled_from(["resnet_bn", "resnet_gn", "vit_ln"]))
    spec = draw(st.sampled_from(LEARNING))
    fields = {
        "lr": draw(st.sampled_from([1e-4, 1e-2, 1.0, 100.0])),
        "seed": draw(st.integers(0, 9)),
    }
    if "+" in spec:
        fields["sigma"] = draw(st.floats(0, 20))
        fields["fata_threshold"] = draw(st.floats(0.01, 1))
        fields["loss"] = draw(st.sampled_from(["fata", "simple_aug", "mse", "simple_ce"]))
    if spec.startswith(("eata", "sar", "deyo")):
        fields["threshold"] = draw(st.floats(0.01, 1))
    batch = st.tuples(
        st.integers(1, 9),
        st.sampled_from(["plain", "channels last", "expanded", "strided", "transposed", "slice"]),
        st.lists(st.integers(0, 8), max_size=3),
        st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
        st.sampled_from([0.0, 1.0, 1e4]),
    )
    return net, spec, fields, draw(st.lists(batch, min_size=1, max_size=5))


def laid_out(images, layout):
    if layout == "channels last":
        return images.contiguous(memory_format=torch.channels_last)
    if layout == "expanded":
        return images[:1].expand(len(images), -1, -1, -1)
    if layout == "strided":
        return images.repeat_interleave(2, 3)[..., ::2]
    if layout == "transposed":
        return images.transpose(2, 3)
    if layout == "slice":
        return torch.cat((images, images), 1)[:, :3]
    return images


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(streams())
def test_whatever_comes_in(case):
    net, spec, fields, stream = case
    model = build(net)
    adapter = fata.adapt(model, spec, **fields)
    plain = build(net).eval()
    for number, (rows, layout, bad, value, scale) in enumerate(stream):
        images = scale * torch.rand(
            rows, 3, 16, 16, generator=torch.Generator().manual_seed(number)
        )
        images = laid_out(images, layout).clone(memory_format=torch.preserve_format)
        for row in bad:
            images[row % rows, 0, 0, 0] = value
        try:
            answers = adapter(images)
        except ValueError:
            if spec != "cotta":  # which augments pixels, and says which it can
                raise
            continue
        assert answers.shape == (rows, 10)
        if not number and net != "resnet_bn":
            with torch.no_grad():
                expected = plain(images)
            sane = expected.isfinite().all(1)
            torch.testing.assert_close(answers[sane], expected[sane], rtol=1e-3, atol=1e-4)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(
        tensor.isfinite().all() for name, tensor in adapter.state_dict().items() if "param" in name
    )
