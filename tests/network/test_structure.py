"""Stages, blocks and candidates for the layer, in networks of one's own."""

import pytest
import torch
from torch import nn

import fata
from fata.network.structure import auto_layer, truncated, trunk
from fata.network.tap import Tap


def small():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


class Wrapped(nn.Module):
    """A network inside another one, as normalising wrappers have it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.norm = nn.LayerNorm(10)

    def forward(self, x):
        return self.norm(self.inner(x))


def test_a_users_own_small_network_adapts():
    adapter = fata.adapt(small(), "tent+fata", fata_threshold=1.0)
    assert adapter(torch.rand(4, 3, 12, 12)).shape == (4, 5)
    assert adapter.layer == "1"  # before the last stride, of what has parameters
    assert adapter.trainable == ["1.weight", "1.bias"]
    assert adapter.counts["stepped"] == 1


def test_auto_layer_of_the_tiny_networks():
    assert [auto_layer(fata.tiny.build(n)) for n in fata.tiny.NAMES] == [
        "layer3",
        "layer3",
        "blocks.10",
    ]


@pytest.mark.parametrize("name", fata.tiny.NAMES)
def test_a_wrapper_or_a_sequence_around_it_changes_nothing(name):
    plain = truncated(fata.tiny.build(name))
    wrapped = Wrapped(fata.tiny.build(name))
    assert truncated(wrapped) == [f"inner.{n}" for n in plain]  # not the wrapper's own last norm
    assert auto_layer(wrapped) == f"inner.{auto_layer(fata.tiny.build(name))}"
    sequence = nn.Sequential(fata.tiny.build(name), nn.Linear(10, 4))
    assert truncated(sequence) == [f"0.{n}" for n in plain]


def test_only_the_tail_is_computed_again():
    """Modules before the layer run once a pass; their answers serve the tail."""
    model = fata.tiny.build("resnet_gn")
    ran = []
    for name, module in model.named_modules():
        if name in ("conv1", "layer2.0.conv1", "layer3.0.conv1", "layer4.0.conv1", "fc"):
            forward = module.forward

            def counted(x, name=name, forward=forward):
                ran.append(name)
                return forward(x)

            module.forward = counted
    tap = Tap(model, "layer3")
    recording = tap.record(torch.rand(2, 3, 16, 16))
    ran.clear()
    recording.tail(recording.z)
    assert ran == ["layer4.0.conv1", "fc"]
    ran.clear()
    tap.feature(torch.rand(2, 3, 16, 16))
    assert len(ran) == 5  # one pass, no more


def test_few_equal_blocks_keep_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in "ab"
            )
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    assert truncated(Two()) == ["blocks.0.0"]
    assert trunk(Two()).tap == "blocks.0"
    assert fata.adapt(Two(), "tent+fata")(torch.rand(2, 4)).shape == (2, 3)


def test_truncated_falls_back_to_all_where_nothing_would_be_left():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, stride=2), nn.BatchNorm2d(4))
    assert truncated(model) == ["2"]


def test_layers_lists_the_stem_and_the_stages():
    assert fata.layers(fata.tiny.build("resnet_gn")) == [
        "conv1", "bn1", "layer1", "layer2", "layer3", "layer4",
    ]  # fmt: skip
    names = fata.layers(fata.tiny.build("vit_ln"))
    assert names[0] == "patch_embed"
    assert names[1:] == [f"blocks.{i}" for i in range(12)]


def test_no_stages_names_candidates():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.body(x))

    with pytest.raises(ValueError, match=r"no stages and no stack of blocks.*'body', 'norm'"):
        fata.adapt(Flat(), "tent+fata")
    assert fata.adapt(Flat(), "tent+fata", layer="body")(torch.rand(3, 4)).shape == (3, 4)


class Pair(nn.Module):
    """Gives a map and its means."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        z = self.conv(x)
        return z, z.mean((2, 3))


class Skipping(nn.Module):
    """What is before the tapped layer goes past it, too."""

    def __init__(self):
        super().__init__()
        self.before, self.pair = nn.Conv2d(3, 3, 1), Pair()
        self.norm, self.fc = nn.GroupNorm(2, 4), nn.Linear(11, 10)

    def forward(self, x):
        x = self.before(x)
        z, means = self.pair(x)
        return self.fc(torch.cat((self.norm(z).mean((2, 3)), means, x.mean((2, 3))), 1))


def test_the_tail_of_some_rows_is_the_models_output_for_them():
    torch.manual_seed(0)
    model, images, rows = Skipping(), torch.rand(6, 3, 8, 8), torch.tensor([4, 1])
    recording = Tap(model, "pair").record(images)
    torch.testing.assert_close(recording.tail(recording.z[rows], rows), model(images)[rows])
    torch.testing.assert_close(recording.tail(recording.z), model(images))
