"""The benchmark's straightforward way moves the parameters as the engine does.

In double precision: these networks are small and untrained, and rounding grows fast in them.
"""

import pytest
import torch
from benchmarks.plain import Plain

import fata
from benchmarks import share

SPECS = tuple(host + plus for host in ("tent", "eata", "sar", "deyo") for plus in ("", "+fata"))
# Where the two mean different things: with BatchNorm, FATA's rows up there have another company.
CASES = [
    (net, spec)
    for net in fata.tiny.NAMES
    for spec in SPECS
    if (net, spec) != ("resnet_bn", "sar+fata")
]


def build(net):
    torch.manual_seed(0)
    return share.spread(share.build(net)[0].double(), torch.cat(batches()))


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 16, 16, generator=draw).double() for _ in range(4)]


def fields_of(net, spec):
    """Draws that both ways share, and no penalty; the joint statistics of the public code."""
    host = spec.partition("+")[0]

    def drawn(rows, patches):
        draw = torch.Generator().manual_seed(rows)
        return torch.rand(rows, patches**2, generator=draw).argsort(1)

    def noise(rows, channels):
        draw = torch.Generator().manual_seed(rows * channels)
        return tuple(1 + torch.randn(2, rows, channels, generator=draw).double())

    fields = {
        "eata": {"redundancy": 0.6, "fisher_alpha": 0.0},
        "deyo": {"shuffle": drawn, "plpd_threshold": 0.1},
        "sar": {"recovery": 0.0},
    }.get(host, {})
    if "+" in spec:
        fields |= {"noise": noise, "bn_stats": "joint"}
    return fields


@pytest.mark.parametrize(("net", "spec"), CASES)
def test_the_same_updates(net, spec):
    fields = fields_of(net, spec)
    plain = Plain(build(net), spec, lr=0.003, **fields)
    ours = fata.adapt(build(net), spec, lr=0.003, guard=None, **fields)
    for images in batches():
        torch.testing.assert_close(plain(images), ours(images), rtol=1e-6, atol=1e-7)
    seen, some = ours.counts["seen"], ours.counts["selected"].values()
    assert ours.counts["stepped"] > 1
    if "tent" not in spec:
        assert all(0 < selected < seen for selected in some)  # else no filter was tried
    source, moved = build(net).state_dict(), plain.model.state_dict()
    for name in ours.trainable:
        step = ours.model.state_dict()[name] - source[name]
        torch.testing.assert_close(moved[name] - source[name], step, rtol=1e-6, atol=1e-7)
    assert any((moved[name] - source[name]).abs().max() > 1e-3 for name in ours.trainable)


def test_a_recovery_too():
    fields = {"recovery": 10.0}
    plain = Plain(build("resnet_gn"), "sar", lr=0.003, **fields)
    ours = fata.adapt(build("resnet_gn"), "sar", lr=0.003, guard=None, **fields)
    for images in batches():
        plain(images), ours(images)
    assert ours.counts["recovered"] == len(batches())
    source = build("resnet_gn").state_dict()
    assert all(torch.equal(value, source[name]) for name, value in plain.model.state_dict().items())
