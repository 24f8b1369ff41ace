"""Finding normalisation layers, and what BatchNorm normalises with."""

import copy
import itertools
import sys

import pytest
import timm.layers
import torch
from torch import nn

import fata
import fata.network.blend
import fata.network.norms
from fata.network.norms import BatchStatistics, is_norm
from fata.testing.cases import images, network
from precision import DOUBLE


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        timm.layers.BatchNormAct2d(4),
        timm.layers.GroupNormAct(4, num_groups=2),
        timm.layers.GroupNorm1(4),
        timm.layers.LayerNorm2d(4),
        timm.layers.RmsNorm(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_is_a_norm_layer(layer):
    assert is_norm(layer)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 4),
        nn.BatchNorm2d(4, affine=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.Sequential(nn.LayerNorm(4)),
        timm.models.vision_transformer.LayerScale(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_is_none(layer):
    assert not is_norm(layer)


@pytest.mark.parametrize("act", [nn.BatchNorm2d, timm.layers.BatchNormAct2d])
def test_batch_statistics_normalise_the_batch_at_hand(act):
    layer = act(3).double().eval()
    layer.running_mean.fill_(5.0)
    model = nn.Sequential(layer)
    x = 7 + 3 * torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    source = model(x)
    statistics = BatchStatistics(model)
    out = model(x)
    mean, std = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0).add(layer.eps).sqrt()
    expected = (x - mean[:, None, None]) / std[:, None, None]
    expected = expected.relu() if act is timm.layers.BatchNormAct2d else expected
    torch.testing.assert_close(out, expected, **DOUBLE)
    assert layer.running_mean.tolist() == [5.0] * 3
    assert layer.num_batches_tracked == 0
    with statistics.suspended():
        assert torch.equal(model(x), source)
    statistics.remove()
    assert torch.equal(model(x), source)
    assert not layer.training


def test_one_value_a_channel_falls_back_to_the_running_statistics():
    """A single image on a 1x1 map has no variance: its batch statistics would erase it."""
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean.uniform_(), layer.running_var.uniform_(1, 2)
    x = torch.randn(1, 3, 1, 1)
    source = layer(x)
    BatchStatistics(nn.Sequential(layer))
    assert torch.equal(layer(x), source)
    assert not torch.allclose(layer(torch.randn(2, 3, 1, 1)), source)


def test_prior_mixes_running_and_batch_statistics():
    layer = nn.BatchNorm2d(2, eps=1e-12).double().eval()
    layer.running_mean.fill_(1.0), layer.running_var.fill_(4.0)
    x = torch.tensor([[[[0.0, 2.0]], [[4.0, 4.0]]]]).double()  # means 1 and 4, variances 1 and 0
    statistics = BatchStatistics(nn.Sequential(layer), prior=3.0)
    mean, var = torch.tensor([[1.0, 1.75], [3.25, 3.0]]).double()
    expected = (x - mean[:, None, None]) / var.sqrt()[:, None, None]
    torch.testing.assert_close(layer(x), expected, **DOUBLE)
    assert layer.running_mean.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError):  # the layer fails: its statistics come back all the same
        layer(torch.zeros(1, 5, 1, 1).double())
    assert layer.running_mean.tolist() == [1.0, 1.0]
    statistics.remove()
    assert not layer._forward_hooks


def test_batchnorm_without_running_statistics_still_works():
    model = network("resnet_bn")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    for spec in ("source", "tent+fata", "memo"):
        adapter = fata.adapt(model, spec, **({"views": 2} if spec == "memo" else {}))
        assert adapter(images(4)).isfinite().all()
        adapter.unwrap()


def test_norm_is_source_without_batchnorm_and_not_with_it():
    for net, same in (("resnet_bn", False), ("resnet_gn", True), ("vit_ln", True)):
        norm, source = (fata.adapt(network(net), s)(images(8)) for s in ("norm", "source"))
        assert torch.equal(norm, source) == same


@pytest.mark.parametrize(
    ("spec", "speed", "fields"),
    [
        ("memo", "exact", {"views": 2}),
        ("sar", "fast", {"threshold": 1}),
        ("tent", "exact", {"blend": True}),
    ],
)
def test_an_interrupt_inside_a_layer_leaves_its_running_statistics(
    spec, speed, fields, monkeypatch
):
    """Both ways put other ones in their place for the time of a layer's call."""
    model = network("resnet_bn")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = fata.adapt(model, spec, speed=speed, **fields)
    adapter._engine.execution._captures = True  # as on a GPU
    layer = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    forward, own = layer.forward, layer.running_mean

    def interrupted(x):
        if layer.running_mean is not own:
            raise KeyboardInterrupt
        return forward(x)

    monkeypatch.setattr(layer, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adapter(torch.rand(4, 3, 16, 16))
    monkeypatch.undo()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    adapter(torch.rand(4, 3, 16, 16))
    adapter.reset()
    adapter.unwrap()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        nn.init.uniform_(self.norm.running_mean), nn.init.uniform_(self.norm.running_var, 1, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is run of norms.py or blend.py."""

    files = (fata.network.norms.__file__, fata.network.blend.__file__)

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        self.left -= event == "line"
        if event == "line" and not self.left:
            raise KeyboardInterrupt
        return self


@pytest.mark.parametrize(
    ("spec", "speed", "fields"),
    [
        ("memo", "exact", {"augment": lambda image, _: torch.stack((image, image.flip(-1)))}),
        ("sar", "fast", {"threshold": 1}),
        ("sar", "exact", {"threshold": 1, "blend": True}),
        ("norm", "fast", {"blend": True}),
    ],
)
def test_an_interrupt_at_any_line_leaves_the_running_statistics(spec, speed, fields):
    torch.manual_seed(0)
    model, x = Small().eval(), torch.rand(2, 3, 8, 8)
    layer, tracing = model.norm, sys.gettrace()
    own, before = (layer.running_mean, layer.running_var), copy.deepcopy(model.state_dict())
    adapter = fata.adapt(model, spec, speed=speed, guard=False, **fields)
    adapter._engine.execution._captures = True  # as on a GPU
    expected = adapter(x)
    for line in itertools.count(1):
        adapter.reset()
        interrupt = Interrupt(line)
        try:
            sys.settrace(interrupt)
            adapter(x)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        assert layer.running_mean is own[0], line
        assert layer.running_var is own[1], line
        if interrupt.left <= 0:  # the step was undone
            state = model.state_dict()
            assert all(torch.equal(state[name], before[name]) for name in before), line
        adapter.reset()
        state = model.state_dict()
        assert all(torch.equal(state[name], before[name]) for name in before), line
        assert torch.equal(adapter(x), expected), line
        if interrupt.left > 0:  # there was no such line
            break
    assert line > 40
    assert adapter.unwrap()(x).equal(model.eval()(x))
    assert layer.running_mean is own[0]
