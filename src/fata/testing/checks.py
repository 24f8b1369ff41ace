"""What every method must hold to, on small networks of each kind of normalisation.

`fata check my_module:MyMethod` runs this on a method of your own; the project's tests run it on
ours. A check is a function of a `Case` that raises `CheckError`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fata.adapter import Adapter
from fata.methods import describe
from fata.methods.base import Batch, Memory, Method
from fata.methods.fata import Fata
from fata.methods.selection import Selection
from fata.testing.cases import CLASSES, Case, images

HALF = 2**-26  # of the bits of float64: rounding is amplified by far less, an error is far more


class CheckError(AssertionError):
    """A method does not do what every method must."""


# -- the checks ---------------------------------------------------------------------------------


def predictions_are_finite(case: Case) -> None:
    """Logits of every row, finite, without a graph; also for a short last batch."""
    adapter = case.adapter()
    for batch in [*case.stream(), images(5), images(1)]:
        logits = adapter(batch)
        _ensure(logits.shape == (len(batch), CLASSES), f"logits of shape {tuple(logits.shape)}")
        _ensure(bool(logits.isfinite().all()), "logits that are not finite")
        _ensure(not logits.requires_grad, "logits that carry a graph")


def learns_something(case: Case) -> None:
    """A method with parameters selects rows and moves (MEMO moves and comes back)."""
    if not case.learns:
        return
    adapter = case.adapter()
    predictions = _run(adapter, case.stream())
    plain = _run(case.plain(), case.stream())
    _ensure(adapter.counts["stepped"] > 0, "no step in the whole stream: does it select any row?")
    _ensure(
        not torch.equal(predictions, plain),
        "the predictions are those of a model that never learned",
    )


def only_named_parameters_move(case: Case) -> None:
    """All else stays as it was, bit for bit, but for statistics of BatchNorm that are blended."""
    adapter = case.adapter()
    _run(adapter, case.stream())
    before = case.network().state_dict()
    blended = ("running_mean", "running_var") if case.method.blend else ()
    for name, tensor in adapter.model.state_dict().items():
        if name not in adapter.trainable and not name.endswith(blended):
            _ensure(torch.equal(tensor, before[name]), f"{name} has moved")


def first_prediction_is_the_plain_models(case: Case) -> None:
    """The first batch is predicted before anything was learned, whatever rows are augmented.

    Not by a method that corrects its predictions by those of the batch.
    """
    corrects = {type(case.method).answer, type(case.method).shift} - {Method.answer, Method.shift}
    if not case.common or corrects:
        return
    case = case.in_double()
    batch = case.stream()[0]
    _ensure_close(
        case.adapter()(batch), case.plain()(batch), "the first prediction is not the plain model's"
    )


def reset_is_bit_equal(case: Case) -> None:
    """A reset gives the source model, and the same stream the same predictions."""
    adapter, source = case.adapter(), case.network().state_dict()
    first = _run(adapter, case.stream())
    adapter.reset()
    for name, tensor in adapter.model.state_dict().items():
        _ensure(torch.equal(tensor, source[name]), f"{name} is not the source's after a reset")
    _ensure_equal(_run(adapter, case.stream()), first, "predictions after a reset")


def saved_state_goes_on(case: Case) -> None:
    """Stopping, saving, loading into a new model and going on equals never stopping."""
    stream = case.stream()
    half = len(stream) // 2
    whole, stopped, resumed = case.adapter(), case.adapter(), case.adapter(seed=99)
    expected = _run(whole, stream)
    _run(stopped, stream[:half])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        stopped.save(path)
        resumed.load(path)
    predictions = _run(resumed, stream[half:])
    _ensure_equal(predictions, expected[-len(predictions) :], "predictions after a stop")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    _ensure(all(torch.equal(a, b) for a, b in pairs), "other parameters after a stop")
    _ensure(whole.counts == resumed.counts, "other counts after a stop")


def nothing_selected_moves_nothing(case: Case) -> None:
    """Where no term has a row there is no step: not even momentum moves the weights."""
    if not (case.learns and case.common):
        return
    adapter = case.adapter()
    _run(adapter, case.stream())
    engine, before = adapter._live(), adapter.state_dict()
    functions = engine.functions
    functions.method = _idle(case.method)
    functions.plus = dataclasses.replace(case.plus, weight=0.0) if case.plus else None
    adapter(case.stream()[0])
    after = adapter.state_dict()
    for name in before:
        if name.startswith(("parameter.", "momentum.")):
            _ensure(torch.equal(before[name], after[name]), f"{name} moved without a row")


def selected_rows_are_enough(case: Case) -> None:
    """Learning on the selected rows gives the update of learning on all with the others masked."""
    if not (case.learns and case.common):
        return
    case, ends = case.in_double(), []
    for share in (0.0, 1.0):
        adapter = case.adapter()
        for batch in case.stream():
            adapter._live().state.share = share
            adapter(batch)
        ends.append(adapter._live().state.theta)
    _ensure_close(ends[0], ends[1], "other parameters from the selected rows alone")


def selection_is_pure(case: Case) -> None:
    """`select` gives the same rows again and leaves memory and batch alone."""
    if not case.common:
        return
    adapter = case.adapter()
    _run(adapter, case.stream())
    engine = adapter._live()
    batch = images(16, seed=8)
    with torch.no_grad():
        here = engine.network.featured(batch)
    seen = engine._batch(batch, here.logits, here.features)
    memory = {name: tensor.clone() for name, tensor in engine.state.host.items()}
    logits = seen.logits.clone()
    first, second = (case.method.select(seen, engine.state.host) for _ in range(2))
    _ensure_equal(first.rows, second.rows, "rows selected the second time")
    _ensure_equal(seen.logits, logits, "logits after select")
    for name, tensor in engine.state.host.items():
        _ensure_equal(tensor, memory[name], f"memory {name!r} after select")


def host_is_itself_beside_fata(case: Case) -> None:
    """A host with FATA's loss times 0 equals the host, and its memory never sees FATA's rows."""
    if not (case.common and case.method.params):
        return
    alone, zero = case.adapter(plus=None), case.adapter(plus=Fata(weight=0.0))
    _ensure_equal(
        _run(zero, case.stream()), _run(alone, case.stream()), "predictions beside 0 x FATA"
    )
    _ensure_equal(zero._live().state.theta, alone._live().state.theta, "theta beside 0 x FATA")
    if case.method.sam_rho is None:  # SAM's second pass is at other weights with another loss
        alone, beside = case.adapter(plus=None), case.adapter(plus=Fata())
        alone(case.stream()[0]), beside(case.stream()[0])
        for name, tensor in alone._live().state.host.items():
            _ensure_equal(beside._live().state.host[name], tensor, f"memory {name!r} beside FATA")


def order_of_rows_does_not_matter(case: Case) -> None:
    """Permuted images give permuted predictions."""
    if not case.common:
        return
    case = case.in_double()
    batch = case.stream()[0]
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    predictions = case.adapter()(batch)[order]
    _ensure_close(case.adapter()(batch[order]), predictions, "predictions of permuted images")


def gradient_modes_do_not_matter(case: Case) -> None:
    """The same bits inside `torch.no_grad` and inside `torch.inference_mode`."""
    expected = _run(case.adapter(), case.stream())
    with torch.no_grad():
        _ensure_equal(_run(case.adapter(), case.stream()), expected, "predictions in no_grad")
    adapter = case.adapter()
    with torch.inference_mode():
        _ensure_equal(_run(adapter, case.stream()), expected, "predictions in inference_mode")


def fast_gives_the_same(case: Case) -> None:
    """Captured functions over padded rows predict, and learn, as the exact step does."""
    case = case.in_double()
    exact, fast = case.adapter(speed="exact"), case.adapter(speed="fast")
    _ensure_close(
        _run(fast, case.stream()), _run(exact, case.stream()), "predictions of speed='fast'"
    )
    counts = [{name: a.counts[name] for name in ("stepped", "selected")} for a in (exact, fast)]
    _ensure(counts[0] == counts[1], f"speed='fast' counts {counts[1]}, and 'exact' {counts[0]}")


def frozen_changes_nothing(case: Case) -> None:
    """Inside `frozen` the adapter predicts, and its state stays as it is."""
    adapter = case.adapter()
    _run(adapter, case.stream()[:2])
    before = adapter.state_dict()
    with adapter.frozen():
        first, second = (_run(adapter, case.stream()) for _ in range(2))
    _ensure_equal(first, second, "predictions of a frozen adapter, the second time")
    after = adapter.state_dict()
    _ensure(before.pop("meta") == after.pop("meta"), "counts moved while frozen")
    _ensure(all(torch.equal(before[n], after[n]) for n in after), "state moved while frozen")


def unwrap_leaves_a_plain_model(case: Case) -> None:
    """No hooks, no gradients, modes and flags as given."""
    model = case.network().train()
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    data = [images(8, seed=6)] if case.method.wants_fisher else None
    adapter = Adapter(model, case.method, case.plus, fisher_data=data, guard=None)
    _run(adapter, case.stream())
    _ensure(adapter.unwrap() is model, "unwrap gave another model")
    for name, module in model.named_modules():
        _ensure(module.training, f"{name} is not in the mode it was given in")
        _ensure(not module._forward_hooks and not module._forward_pre_hooks, f"hooks on {name}")
        _ensure("forward" not in module.__dict__, f"{name} has a forward of its own")
    _ensure(all(p.grad is None for p in model.parameters()), "gradients are left on the model")
    _ensure([p.requires_grad for p in model.parameters()] == flags, "requires_grad has changed")


def global_generator_is_left_alone(case: Case) -> None:
    """The adapter has a generator of its own."""
    before = torch.random.get_rng_state()
    _run(case.adapter(), case.stream())
    _ensure_equal(torch.random.get_rng_state(), before, "torch's global generator")


def rows_that_are_not_finite_touch_nothing(case: Case) -> None:
    """Rows with bad pixels are counted, get the plain model's logits and change no other row."""
    case = case.in_double()
    clean, dirty = case.adapter(), case.adapter()
    bad = images(2, seed=3).to(case.dtype)
    bad[0, 0, 0, 0], bad[1, 2] = torch.nan, torch.inf
    plain = case.network().eval()(bad).detach()
    for index, batch in enumerate(case.stream()):
        expected = clean(batch)
        predictions = dirty(torch.cat((bad[:1], batch, bad[1:])))
        _ensure_equal(predictions[1:-1], expected, "the other rows' predictions")
        if not index:
            same = torch.allclose(predictions[[0, -1]], plain, HALF, HALF, equal_nan=True)
            _ensure(same, "rows that are not finite must get the plain model's logits")
    _ensure(dirty.counts["not_finite"] == 2 * len(case.stream()), "they are not counted")
    _ensure_equal(dirty._live().state.theta, clean._live().state.theta, "theta")


def counts_add_up(case: Case) -> None:
    """Every row is seen once, and no term selects more than it sees."""
    adapter = case.adapter()
    _run(adapter, case.stream())
    counts, rows = adapter.counts, sum(len(batch) for batch in case.stream())
    _ensure(counts["seen"] == rows, f"{counts['seen']} rows seen of {rows}")
    _ensure(all(0 <= n <= rows for n in counts["selected"].values()), f"{counts['selected']}")
    _ensure(counts["rows_forward"] >= rows, "fewer rows forward than seen")


def describes_itself(case: Case) -> None:
    """Name and fields can be written as JSON, and `repr` names the method."""
    parts: list[Method | Fata] = [case.method, *([case.plus] if case.plus else [])]
    for part in parts:
        _ensure(json.loads(json.dumps(describe(part)))["name"] == part.name, "a lossy description")
    _ensure(type(case.method).__name__ in repr(case.adapter()), "repr does not name the method")


CHECKS: tuple[Callable[[Case], None], ...] = (
    predictions_are_finite,
    learns_something,
    only_named_parameters_move,
    first_prediction_is_the_plain_models,
    reset_is_bit_equal,
    saved_state_goes_on,
    nothing_selected_moves_nothing,
    selected_rows_are_enough,
    selection_is_pure,
    host_is_itself_beside_fata,
    order_of_rows_does_not_matter,
    gradient_modes_do_not_matter,
    fast_gives_the_same,
    frozen_changes_nothing,
    unwrap_leaves_a_plain_model,
    global_generator_is_left_alone,
    rows_that_are_not_finite_touch_nothing,
    counts_add_up,
    describes_itself,
)


def _run(adapter: Adapter, stream: list[Tensor]) -> Tensor:
    return torch.cat([adapter(batch) for batch in stream])


def _idle(method: Method) -> Method:
    """The same method, selecting nothing."""

    def select(self: Method, batch: Batch, memory: Memory) -> Selection:
        return Selection.none(batch.entropy)

    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return type(type(method).__name__, (type(method),), {"select": select})(**fields)  # type: ignore[no-any-return]


def _ensure(fine: bool, problem: str) -> None:
    if not fine:
        raise CheckError(problem)


def _ensure_equal(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        worst = (found.double() - expected.double()).abs().max()
        raise CheckError(f"{what} differ by up to {worst:.1e}; they must be equal bit for bit")


def _ensure_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Both in float64."""
    if not torch.allclose(found, expected, HALF, HALF):
        raise CheckError(f"{what} (differ by up to {(found - expected).abs().max():.1e})")
