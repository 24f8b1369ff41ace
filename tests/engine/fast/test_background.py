"""What is called often is compiled beside the stream, and changes nothing of it."""

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch

import fata
from fata.engine.fast import background, captured, captures
from fata.engine.fast import execution as fast
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
LONG = 60.0  # seconds, after which a test fails rather than waits


def forget_but_capture(execution, forget=fast.Fast.forget):
    """As on a GPU, for a network that is worth compiling."""
    forget(execution)
    execution._captures = execution._large = True


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fast.Fast, "forget", forget_but_capture)
    monkeypatch.setattr(fast, "half_weights", lambda *_: ())
    monkeypatch.setattr(captures, "OFTEN", 4)
    monkeypatch.setattr(captures.Cached, "__init__", _often(captures.Cached.__init__))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no fisher_data")
        yield
    background.COMPILER.stop()
    background.COMPILER.renew()


def _often(init):
    def made(self, function):
        init(self, function, due=captures.OFTEN)

    return made


class Slow:
    """Stands for a compiler: gives the traced function as it is, once it is told to."""

    def __init__(self):
        self.may_end, self.begun, self.threads = threading.Event(), threading.Event(), set()
        self.error = None

    def __call__(self, function, given):
        self.begun.set()
        self.threads.add(threading.current_thread())
        assert self.may_end.wait(LONG)
        if self.error:
            raise self.error
        function(*given)
        return function


@pytest.fixture
def compiler(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(captured, "compiled", slow)
    yield slow
    slow.may_end.set()


def build(net, device="cpu"):
    torch.manual_seed(0)
    model = tiny.build(net)
    with torch.no_grad():
        [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1].weight *= 4
    return model.double().to(device)


CASES = [
    ("resnet_gn", "eata+fata", {"redundancy": 2.0}),
    ("vit_ln", "sar+fata", {}),
    ("resnet_bn", "eata+fata", {"blend": True, "redundancy": 2.0}),
    ("resnet_bn", "tent", {}),
    ("resnet_gn", "deyo+fata", {"plpd_threshold": -1.0}),
]


def adapted(net, spec, device="cpu", speed="fast", **fields):
    fields = {"guard": None, "lr": 1e-2, **fields}
    return fata.adapt(build(net, device), spec, speed=speed, **fields)


def stream(number, device="cpu"):
    draw = torch.Generator().manual_seed(3)
    some = [torch.rand(ROWS, 3, 16, 16, generator=draw).double() for _ in range(number)]
    return [images.to(device) for images in some]


def finish(adapter, compiler):
    """All that was asked for is compiled; the next batch takes it up."""
    compiler.may_end.set()
    for _ in range(50):
        adapter._engine.execution._pending.wait(LONG)
        adapter._engine.execution._pending.poll()
        if not adapter._engine.execution._pending._jobs:
            return
    raise AssertionError("there is always more to compile")


def compiled(adapter):
    return [one.function.name for one in _functions(adapter) if one.function.compiled]


def _functions(adapter):
    return adapter._engine.execution._cache.values()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("net", "spec", "fields"), CASES)
def test_a_stream_goes_on_while_it_is_compiled_and_gives_the_same(
    net, spec, fields, device, compiler
):
    exact, quick = (adapted(net, spec, device, speed, **fields) for speed in ("exact", "fast"))
    batches = stream(18, device)
    for images in batches[:9]:
        torch.testing.assert_close(quick(images), exact(images), **DOUBLE)
    assert compiler.begun.wait(LONG)
    assert not compiled(quick)  # and yet the stream went on
    assert threading.main_thread() not in compiler.threads
    finish(quick, compiler)
    assert compiled(quick)
    assert quick.compile_seconds > 0
    for images in batches[9:]:
        torch.testing.assert_close(quick(images), exact(images), **DOUBLE)
    for name, tensor in exact.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            torch.testing.assert_close(quick.state_dict()[name], tensor, **DOUBLE)
    assert quick.counts["selected"] == exact.counts["selected"]
    if device == "cuda":
        assert all(
            one.function._graph is not None for one in _functions(quick) if one.function.compiled
        )


@pytest.mark.parametrize("device", DEVICES[1:])
def test_it_is_really_compiled_beside_the_stream_and_gives_the_same(device):
    """By the compiler itself, which has a thread and a GPU to share with the stream."""
    exact, quick = (adapted("resnet_gn", "tent", device, speed) for speed in ("exact", "fast"))
    during = 0
    for images in stream(600, device):
        torch.testing.assert_close(quick(images), exact(images), **DOUBLE)
        during += bool(quick._engine.execution._pending._jobs)
    for images in stream(8, device):
        quick._engine.execution._pending.wait(LONG)
        torch.testing.assert_close(quick(images), exact(images), **DOUBLE)
    assert during > 0
    assert compiled(quick)
    assert all(
        one.function._graph is not None for one in _functions(quick) if one.function.compiled
    )
    for images in stream(8, device):
        torch.testing.assert_close(quick(images), exact(images), **DOUBLE)


def test_what_is_compiled_has_as_many_rows_as_are_selected(compiler):
    """Of sixteen parts of a batch: here three rows of sixteen, where a capture has eight."""
    adapter = adapted("resnet_gn", "eata", redundancy=2.0)
    engine, chosen = adapter._engine, 3

    def some(seen):
        rows = torch.zeros(2, ROWS, dtype=torch.bool)
        rows[0, :chosen] = True
        return rows, True, False, True

    engine._rows = some
    for images in stream(6):
        adapter(images)
    before = adapter.counts["rows_backward"]
    finish(adapter, compiler)
    assert "descend, 3 rows" in compiled(adapter)
    adapter(stream(1)[0])
    assert adapter.counts["rows_backward"] == before + 3
    chosen = 5
    adapter(stream(1)[0])
    assert adapter.counts["rows_backward"] == before + 3 + 8


def test_numbers_of_rows_that_a_function_fits():
    assert background.fitting([3] * 9 + [16], 16, 16, 0.9) == 16
    assert background.fitting([3] * 19 + [16], 16, 16, 0.9) == 3
    assert background.fitting([25, 26, 24], 16, 64, 0.9) == 28
    assert background.fitting([64], 16, 64, 0.9) == 64
    assert background.fitting([1], 16, 1, 0.9) == 1


def test_a_network_that_is_not_large_is_not_compiled(compiler, monkeypatch):
    def forget(execution):
        forget_but_capture(execution)
        execution._large = False

    monkeypatch.setattr(fast.Fast, "forget", forget)
    adapter = adapted("resnet_gn", "tent")
    for images in stream(10):
        adapter(images)
    assert not compiler.begun.is_set()
    assert not adapter._engine.execution._pending._jobs


def test_what_cannot_be_compiled_stays_as_it_is_with_one_warning(compiler):
    adapter, exact = adapted("resnet_gn", "tent"), adapted("resnet_gn", "tent", speed="exact")
    compiler.error = RuntimeError("no such kernel")
    compiler.may_end.set()
    found = []
    for images in stream(20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(adapter(images), exact(images), **DOUBLE)
        found += [str(one.message) for one in caught]
        adapter._engine.execution._pending.wait(LONG)
    assert not compiled(adapter)
    assert [message for message in found if "compiled" in message] == [
        "the model cannot be compiled and runs without: no such kernel"
    ]


@pytest.mark.parametrize("how", ["reset", "copy", "unwrap", "drop", "weights", "load"])
def test_what_happens_to_an_adapter_meanwhile_is_harmless(how, compiler, tmp_path):
    adapter, exact = adapted("resnet_bn", "tent"), adapted("resnet_bn", "tent", speed="exact")
    for images in stream(8):
        adapter(images), exact(images)
    assert compiler.begun.wait(LONG)
    job = next(iter(adapter._engine.execution._pending._jobs))
    if how == "reset":
        adapter.reset(), exact.reset()
    elif how == "copy":
        adapter = copy.deepcopy(adapter)
    elif how == "load":
        exact.save(tmp_path / "state.safetensors")
        adapter.load(tmp_path / "state.safetensors")
    elif how == "weights":
        for one in (adapter, exact):
            one.model.conv1.weight.data = one.model.conv1.weight.data * 1.5
    elif how == "unwrap":
        adapter.unwrap(batch_statistics=True)
        compiler.may_end.set()
        assert job.done.wait(LONG)
        return
    else:
        gone = weakref.ref(adapter)
        del adapter
        gc.collect()
        assert gone() is None
        compiler.may_end.set()
        assert job.done.wait(LONG)
        return
    for number, images in enumerate(stream(12)):
        if number == 2:
            compiler.may_end.set()
            assert job.done.wait(LONG)
        torch.testing.assert_close(adapter(images), exact(images), **DOUBLE)


def test_the_shadow_has_modules_of_its_own_and_the_same_memory():
    adapter = adapted("resnet_bn", "eata+fata", blend=True)
    adapter(stream(1)[0])
    execution = adapter._engine.execution
    shadow = execution.shadow()
    model, other = execution.network.model, shadow.network.model
    assert {*model.modules()}.isdisjoint(other.modules())
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), other.buffers(), strict=True))
    seen = adapter.counts["rows_forward"]
    shadow.network.predict(stream(1)[0])
    assert adapter.counts["rows_forward"] == seen
    theta = 2 * execution.step.theta.read()
    shadow.step.theta.write(theta)
    assert torch.equal(execution.step.theta.read(), theta)


def test_python_switches_threads_more_often_only_meanwhile(compiler):
    before = sys.getswitchinterval()
    adapter = adapted("resnet_gn", "tent")
    for images in stream(8):
        adapter(images)
    assert compiler.begun.wait(LONG)
    assert sys.getswitchinterval() < before
    finish(adapter, compiler)
    for _ in range(500):
        if sys.getswitchinterval() == pytest.approx(before):
            return
        time.sleep(0.01)
    raise AssertionError("Python still switches as often")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork; this system has none")
def test_a_forked_process_goes_on_without_the_thread(compiler):
    adapter = adapted("resnet_gn", "tent")
    for images in stream(8):
        adapter(images)
    assert compiler.begun.wait(LONG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process of several threads forks
        child = os.fork()
    if not child:
        free = captured.alone().acquire(blocking=False) and not background.COMPILER._jobs
        os._exit(0 if free and background.COMPILER._thread is None else 1)
    assert os.waitpid(child, 0)[1] == 0


PROGRAM = """
import sys, threading, torch, fata
from fata.engine.fast import captured, captures, execution
forget = execution.Fast.forget
def capturing(self):
    forget(self)
    self._captures = self._large = True
execution.Fast.forget = capturing
def endless(function, given):
    begun.set()
    while True:
        function(*given)
begun = threading.Event()
captured.compiled = endless
torch.manual_seed(0)
adapter = fata.adapt(fata.tiny.build("resnet_gn"), "tent", speed="fast", guard=None)
for _ in range(captures.OFTEN + 2):
    adapter(torch.rand(2, 3, 16, 16))
assert begun.wait(60)
print("ending")
"""


@pytest.mark.slow
def test_a_process_ends_while_something_is_compiled():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ending\n", "")
