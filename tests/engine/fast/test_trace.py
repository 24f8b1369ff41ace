"""A traced function is the function."""

import threading

import pytest
import torch
from torch import nn

from fata.engine.fast.trace import traced
from precision import DOUBLE


class Net(nn.Module):
    """Changes in place, splits, keeps a constant, and normalises."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8)
        self.head = nn.Linear(4, 5)
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x):
        x = self.norm(self.conv(x)).relu_()
        one, other = x.mean((2, 3)).split(4, 1)
        return self.head((one + 0).add_(self.shift) * other.softmax(1))


def there_and_back(net):
    def function(x, y):
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y)
        return [logits.detach(), *torch.autograd.grad(loss, list(net.norm.parameters())), x]

    return function


@pytest.fixture
def given():
    torch.manual_seed(0)
    return [torch.rand(6, 3, 4, 4).double(), torch.randint(5, (6,))]


def test_a_traced_function_gives_what_the_function_gives(given):
    net = Net().double()
    function = there_and_back(net)
    graph = traced(function, given)
    other = [torch.rand_like(given[0]), given[1].flip(0)]
    for some in (given, other):
        with torch.no_grad():
            found = graph(*some)
        for one, expected in zip(found, function(*some), strict=True):
            assert not one.requires_grad
            torch.testing.assert_close(one, expected, **DOUBLE)


def test_it_reads_the_weights_where_they_are(given):
    net = Net().double()
    function = there_and_back(net)
    graph = traced(function, given)
    with torch.no_grad():
        net.norm.weight.mul_(2)
        net.shift.add_(1)
        found = graph(*given)
    torch.testing.assert_close(found[0], function(*given)[0], **DOUBLE)


def test_what_is_made_of_other_operations_is_traced_as_those(given):
    graph = traced(there_and_back(Net().double()), given)
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any("native_group_norm" in name for name in names)
    assert "aten.relu_.default" in names
    assert any("convolution" in name for name in names)


def test_modules_of_other_threads_are_left_alone(given):
    """As `make_fx` does not: it replaces methods of all modules meanwhile."""
    own, seen = nn.Module.__call__, []

    def function(x, y):
        thread = threading.Thread(target=lambda: seen.append(nn.Module.__call__ is own))
        thread.start()
        thread.join()
        return [x + 1]

    graph = traced(function, given)
    assert seen == [True]
    assert len([node for node in graph.graph.nodes if node.op == "call_function"]) == 1
