"""The adapter: a model that adapts itself while it predicts."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import UninitializedParameter

from fata._files import save_tensors
from fata.distributed.ranks import Alone, Group
from fata.engine import checkpoint as states
from fata.engine.fast.engine import FastEngine
from fata.engine.fisher import FisherData, fisher
from fata.engine.rates import check_rate, is_transformer_like, rate
from fata.engine.step import Engine, NotFiniteError
from fata.guard.policy import Guard, Watch
from fata.methods import describe, parse, spec_of
from fata.methods.base import Method, OwnStep
from fata.methods.fata import Fata
from fata.methods.source import Norm
from fata.network.parameters import Params, Theta, choose

RECOMMENDED = "eata+fata"
SPEEDS = {"exact": Engine, "fast": FastEngine}
_HELD: set[int] = set()  # ids of the models and parameters that an adapter has now


class _Turns:
    """One caller at a time; a copy has turns of its own, and so has a forked process."""

    all: ClassVar[WeakSet[_Turns]] = WeakSet()

    def __init__(self) -> None:
        self.renew()
        self.all.add(self)

    def renew(self) -> None:
        """Free, whoever had a turn: a forked process has none of the other threads."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: object) -> _Turns:
        return _Turns()


def _renew() -> None:
    for turns in _Turns.all:
        turns.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Adapter(nn.Module):
    """Predicts like the model it holds, and learns from every batch.

    The model itself is changed: its chosen parameters move, and BatchNorm uses the statistics of
    the batch. `reset` undoes the first, `unwrap` the second. Threads that share an adapter take
    turns. A forked process has a copy of it; `reset` that copy if another thread was in a step.

    Args:
        model: maps images to logits, or to an object with `.logits`.
        method: what to learn, such as `fata.Eata()`.
        plus: `fata.Fata(...)`, or None.
        lr: learning rate; `paper` (the default) or `release` take those of the FATA paper or of
            its code for the kind of network and the batch size.
        params: `all`, `truncated`, names of parameters or modules, or None: the method's choice.
        fisher_data: batches of clean images for EATA's penalty, one squared gradient a batch; or
            a Fisher computed before (`adapter.fisher`).
        guard: watches for a collapse and rolls the model back: True, or a `fata.Guard(...)` with
            other settings; None or False: no guard.
        seed: of the adapter's own draws; the global generator is never touched.
        speed: `exact` (the model's own precision, bit-stable) or `fast` (on a GPU: bfloat16 and
            recorded, compiled passes; on a CPU with AMX: bfloat16). None: `fast` for a float32
            model on a GPU that has bfloat16, else `exact`.
        group: ranks of `torch.distributed` that share every batch, each with an adapter made
            alike; None: this process alone. See below.

    In a `group` each rank gives its rows of a batch, in the order of the ranks; some may have
    fewer than others, or none: `images[:0]`. All call as often as the others, frozen or not, and
    learn what one process would from the whole batch. `counts` are of all rows, `selected` and the
    logits of this rank's. The state is the same on every rank: any of them may save it, to a path
    of its own or to that of another. Of `fisher_data` the mean over the ranks counts.

    Example:
        >>> import fata, torch
        >>> adapted = fata.Adapter(fata.tiny.build("resnet_gn"), fata.Sar(), fata.Fata())
        >>> adapted(torch.rand(4, 3, 16, 16)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method | Fata,
        plus: Fata | None = None,
        *,
        lr: float | str | None = None,
        params: Params | None = None,
        fisher_data: FisherData | None = None,
        guard: Guard | bool | None = True,
        seed: int = 0,
        speed: str | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if isinstance(method, Fata):  # its loss alone
            if plus is not None:
                raise TypeError("fata.Fata is given twice: as the method and as plus.")
            plus, method = method, Norm()
        _check_model(model)
        _check_arguments(method, plus, fisher_data)
        check_rate(lr)
        _check_seed(seed)
        speed = default_speed(model, group) if speed is None else speed
        if speed not in SPEEDS:
            raise ValueError(f"speed={speed!r}: choose from {', '.join(SPEEDS)}.")
        check_group(group, speed)
        sets = params if params is not None else method.params or ("truncated" if plus else None)
        theta = Theta(choose(model, sets) if sets is not None else {})
        vit = is_transformer_like(model)

        def learning_rate(rows: int) -> float:
            if lr is None or isinstance(lr, str):
                return rate(lr or "paper", method, vit, rows)
            return float(lr)

        self._modes = [(module, module.training) for module in model.modules()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._engine: Engine | None = None
        self._frozen = 0  # how often, at this time
        self._turns = _Turns()
        self._fingerprint: str | None = None
        self.model = model
        with torch.inference_mode(False):
            engine = SPEEDS[speed](
                model, method, plus, theta, learning_rate, vit, seed, _guard(guard)
            )
            try:
                model.eval()  # dropout and stochastic depth off
                model.requires_grad_(False)
                for parameter in theta.parameters:
                    parameter.requires_grad_(True)
                if fisher_data is not None:
                    engine.fisher = fisher(engine, fisher_data)
                    engine.state = engine.fresh()
                self._join(engine, group, f"{lr}")
            except BaseException:
                _release(engine, self._modes, self._flags)
                raise
        self._engine = engine
        self._hold(engine)

    # -- predicting ---------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images, from before this batch was learned from (MEMO: after).

        Rows with a pixel that is not finite get the logits that the plain model gives them, are
        never learned from, and do not touch the other rows.
        """
        engine = self._live()
        engine.check(images)
        # Of several GPUs another may be the current one.
        place = torch.cuda.device_of(images)  # type: ignore[no-untyped-call]
        with self._turns, place, torch.inference_mode(False), torch.enable_grad():
            if images.is_inference():
                images = images.clone()
            images = images.detach()
            if self.model.training:  # somebody has called its train()
                self.model.eval()
            if engine.statistics:
                engine.statistics.settle()
            learning = not self._frozen
            engine.selected = None
            answer = engine.step if learning else engine.answer
            if learning and len(images) and engine.checks_pixels:
                with suppress(NotFiniteError):  # what follows would wait for the device
                    return answer(images).detach()
            finite = images.flatten(1).isfinite().all(1)
            whole = bool(finite.all())
            here = len(images) if whole else int(finite.sum())
            usable, others = engine.group.meet(here, len(images) - here, engine.state, learning)
            if whole and usable:
                logits = answer(images).detach()
            else:
                with engine.statistics.suspended() if engine.statistics else nullcontext():
                    bad = engine.answer(images[~finite])
                logits = bad.new_empty(len(images), bad.shape[1])
                logits[~finite] = bad
                if usable:
                    logits[finite] = answer(images[finite]).detach()
                    engine.selected = _spread(engine.selected, finite)
            if others and learning:
                engine.state.count(seen=others, not_finite=others)
            return logits

    @contextmanager
    def frozen(self) -> Iterator[Adapter]:
        """Predict without learning inside the context, in every thread; no state changes."""
        with self._turns:
            self._frozen += 1
        try:
            yield self
        finally:
            with self._turns:
                self._frozen -= 1

    def train(self, mode: bool = True) -> Adapter:
        """Leave the model's modes alone: adapting needs neither dropout nor running statistics."""
        self.training = mode
        return self

    # -- what it is ---------------------------------------------------------------------------

    @property
    def method(self) -> Method:
        """The host method."""
        return self._live().method

    @property
    def plus(self) -> Fata | None:
        """The plug-in."""
        return self._live().plus

    @property
    def name(self) -> str:
        """Name of the method, such as `eata+fata`."""
        return spec_of(describe(self.method), describe(self.plus) if self.plus else None)

    @property
    def speed(self) -> str:
        """How its passes are run: `exact` or `fast`."""
        return next(name for name, kind in SPEEDS.items() if type(self._live()) is kind)

    @property
    def compile_seconds(self) -> float:
        """How long compiling took so far; it is no part of adapting."""
        return self._live().compile_seconds

    @property
    def layer(self) -> str | None:
        """Name of the layer that FATA taps."""
        tap = self._live().tap
        return tap.layer if tap else None

    @property
    def adapted(self) -> list[str]:
        """Names of the parameters that adapt."""
        return list(self._live().theta.names)

    @property
    def guard(self) -> Watch | None:
        """The guard at work: what it did (`events`), whether it rests; None: there is none."""
        return self._live().watch

    @property
    def group(self) -> Alone:
        """The ranks that share every batch; of one process, itself."""
        return self._live().group

    @property
    def fisher(self) -> dict[str, Tensor] | None:
        """The Fisher information by parameter, as `fisher_data` takes it; None: there is none."""
        engine = self._live()
        if engine.fisher is None:
            return None
        return dict(zip(engine.theta.names, engine.theta.split(engine.fisher), strict=True))

    @property
    def counts(self) -> dict[str, Any]:
        """Rows seen, selected by each term, passed forward and back; steps and recoveries.

        `dropped` are steps that moved nothing: their gradient was zero or not finite. Set-up
        (Fisher, the one pass in which FATA's tap finds its way) is not counted.
        """
        with self._turns:
            counts = {name: int(number) for name, number in self._live().state.counts.items()}
        names = ("seen", "not_finite", "stepped", "dropped", "recovered")
        rows = ("rows_forward", "rows_tail", "rows_backward", "rows_witness")
        selected = {self.method.name: counts.get("host", 0)}
        if self.plus is not None:
            selected["fata"] = counts.get("plus", 0)
        return {
            **{name: counts.get(name, 0) for name in names},
            "selected": selected,
            **{name: counts.get(name, 0) for name in rows},
        }

    @property
    def selected(self) -> dict[str, Tensor]:
        """Which rows of the last batch each term selected; empty where it was not learned from."""
        engine = self._live()
        if engine.selected is None:
            return {}
        terms = (self.method.name, "fata") if self.plus else (self.method.name,)
        return dict(zip(terms, engine.selected, strict=False))

    def extra_repr(self) -> str:
        """Method, plug-in and what adapts."""
        if self._engine is None:
            return "unwrapped"
        theta = self._engine.theta
        what = f"{len(theta.names)} tensors, {sum(theta.sizes):,} parameters adapt"
        return ", ".join([f"{self.method}", *([f"{self.plus}"] if self.plus else []), what])

    # -- state --------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> None:
        """Back to the source model, bit for bit, and to the first batch; draws by another `seed`.

        What was recorded and compiled stays.
        """
        engine = self._live()
        seed = engine.seed if seed is None else seed
        _check_seed(seed)
        with self._turns, torch.inference_mode(False):
            engine.seed = seed
            engine.state = engine.fresh()
            engine.selected = None
            engine.theta.write(engine.source)
            if engine.statistics:
                engine.statistics.settle()
            if engine.watch:
                engine.watch.forget()

    def unwrap(self) -> nn.Module:
        """The plain model with the weights that answer, its modes and flags as they were given.

        Those are the adapted ones; after CoTTA the teacher's, and the source's where the guard lets
        it answer. The adapter is of no use afterwards. A BatchNorm model is back at its running
        statistics.
        """
        with self._turns:
            engine = self._live()
            engine.theta.write(engine.answering)
            self._release()
            self._engine = None
            return self.model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one safetensors file; an older file there is replaced whole."""
        save_tensors(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a saved state; one that does not belong here is refused.

        The rate and the guard are this adapter's own, the draws go on by the state's seed.
        """
        self.load_state_dict(states.load(path))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What moved and what is remembered, by name; `meta` says whose state it is.

        A larger module that an adapter is a part of asks with arguments, and gets the weights.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        with self._turns, torch.inference_mode(False):
            return states.pack(self._live(), self._source())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Go on from a `state_dict`. One that does not belong here is refused."""
        engine = self._live()
        with self._turns, torch.inference_mode(False):
            engine.state = states.unpack(engine, self._source(), state_dict)
            engine.theta.write(engine.state.theta)
            if engine.watch:
                engine.watch.forget()

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        """Refuse weights that come by a larger module: the next step would undo them."""
        raise states.StateError(
            "weights cannot be loaded into an adapter as a part of a larger module: load them "
            "before fata.adapt(...), or a state by the adapter's own load(path)"
        )

    def _join(self, engine: Engine, ranks: ProcessGroup | None, rate: str) -> None:
        """Share every batch with the other ranks, once they are sure to be alike."""
        group = Group.of(ranks)
        if not isinstance(group, Group):
            return
        self._fingerprint = states.fingerprint(engine)
        described = describe(engine.plus) if engine.plus else None
        watch = engine.watch.guard if engine.watch else None
        group.agree(
            model=self._fingerprint,
            method=f"{describe(engine.method)} {described}",
            params=f"{engine.theta.names}",
            fisher_data=f"{engine.fisher is not None}",
            seed=f"{engine.seed}",
            lr=rate,
            guard=f"{watch}",
        )
        engine.join(group)

    def _source(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = states.fingerprint(self._live())
        return self._fingerprint

    # -- inside -------------------------------------------------------------------------------

    def _hold(self, engine: Engine) -> None:
        """The model is this adapter's; forgotten without unwrap(), it must not keep it for ever."""
        _HELD.update(_parts(engine.model, self._flags))
        self._release = weakref.finalize(self, _release, engine, self._modes, self._flags)
        self._release.atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        """An adapter of its own, with a copy of the model, that goes on from here."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        with self._turns:
            own = {name: part for name, part in self.__dict__.items() if name != "_release"}
            twin.__dict__.update(deepcopy(own, memo))
        if twin._engine is not None:
            twin._hold(twin._engine)
        return twin

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise TypeError(
            "an adapter cannot be pickled: save(path) writes its state, and load(path) goes on "
            "from it in an adapter made alike."
        )

    def _live(self) -> Engine:
        if self._engine is None:
            raise states.StateError("this adapter was unwrapped; make a new one with fata.adapt")
        return self._engine

    def _apply(self, fn: Any, recurse: bool = True) -> Adapter:
        """Move the state along with the model: `.to`, `.cuda`, `.cpu`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._engine is not None:
            self._engine.move()
        return self


def _release(
    engine: Engine, modes: list[tuple[nn.Module, bool]], flags: list[tuple[nn.Parameter, bool]]
) -> None:
    """Give the model back: its own statistics, modes and flags; the weights stay as they are."""
    engine.leave()
    for module, training in modes:
        module.training = training
    for parameter, requires_grad in flags:
        parameter.requires_grad_(requires_grad)
    _HELD.difference_update(_parts(engine.model, flags))


def _parts(model: nn.Module, flags: list[tuple[nn.Parameter, bool]]) -> set[int]:
    """Ids of the model and its parameters, which live as long as their adapter has them."""
    return {id(model), *(id(parameter) for parameter, _ in flags)}


def _spread(selected: tuple[Tensor, Tensor] | None, finite: Tensor) -> tuple[Tensor, Tensor] | None:
    """The selection of the finite rows, as one of the whole batch."""
    if selected is None:
        return None
    host, plus = (torch.zeros_like(finite).masked_scatter(finite, rows) for rows in selected)
    return host, plus


def adapt(
    model: nn.Module,
    spec: str | None = None,
    *,
    lr: float | str | None = None,
    params: Params | None = None,
    fisher_data: FisherData | None = None,
    guard: Guard | bool | None = True,
    seed: int = 0,
    speed: str | None = None,
    group: ProcessGroup | None = None,
    **fields: Any,
) -> Adapter:
    """Adapt a model by a method's name.

    Args:
        model: maps images to logits, or to an object with `.logits`.
        spec: `source`, `norm`, `tent`, `eata`, `sar`, `deyo`, `cotta`, `memo`, `fata`, or a host
            with it, such as `deyo+fata`. None: the recommended one, `eata+fata`, and without
            `fisher_data` with `fisher_alpha=0`.
        lr: learning rate, `paper` or `release`; see `Adapter`.
        params: which parameters adapt; see `Adapter`.
        fisher_data: batches of clean images for EATA; see `Adapter`.
        guard: watches for a collapse; see `Adapter`. On, unless it is None or False.
        seed: of the adapter's own draws.
        speed: `exact` or `fast`; None: what suits the device; see `Adapter`.
        group: ranks that share every batch, such as `torch.distributed.group.WORLD`; see `Adapter`.
        **fields: fields of the method or of `Fata`. One that both have is the method's;
            `fata_threshold=...` is the plug-in's.

    Example:
        >>> import fata, torch
        >>> adapted = fata.adapt(fata.tiny.build("vit_ln"), "deyo+fata", sigma=0.5)
        >>> adapted(torch.rand(4, 3, 16, 16)).shape
        torch.Size([4, 10])
    """
    if spec is None:
        spec = RECOMMENDED
        if fisher_data is None:
            fields = {"fisher_alpha": 0, **fields}
    method, plus = parse(spec, **fields)
    return Adapter(
        model,
        method,
        plus,
        lr=lr,
        params=params,
        fisher_data=fisher_data,
        guard=guard,
        seed=seed,
        speed=speed,
        group=group,
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if isinstance(model, Adapter):
        raise TypeError("model is an Adapter already; call unwrap() on it first.")
    if not _HELD.isdisjoint({id(model), *map(id, model.parameters())}):
        raise ValueError(
            "another adapter has this model, or a part of it (a module or a parameter that both "
            "share): call unwrap() on that one first (reset() before, for the source weights), or "
            "give a copy of the model."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be adapted; give the nn.Module it came from.")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("the model has lazy layers: run a batch through it first.")
    if any(tensor.is_inference() for tensor in model.parameters()):
        raise ValueError(
            "the model was made inside torch.inference_mode(), so its parameters can never learn; "
            "make it outside (predicting inside is fine)."
        )


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: must be a whole number.")


def _check_arguments(method: Method, plus: Fata | None, fisher_data: FisherData | None) -> None:
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be one such as fata.Tent(), got {method!r}; "
            f"fata.adapt(model, 'tent') takes names."
        )
    if plus is not None and not isinstance(plus, Fata):
        raise TypeError(f"plus must be a fata.Fata(...) or None, got {plus!r}.")
    if plus is not None and isinstance(method, OwnStep):
        raise ValueError(f"{method.name!r} has a step of its own, to which FATA cannot be added.")
    if fisher_data is not None and not method.wants_fisher:
        raise ValueError(f"fisher_data: {method!r} has no Fisher penalty (fisher_alpha above 0).")
    if fisher_data is None and method.wants_fisher:
        warnings.warn(
            "no fisher_data: EATA without its penalty is ETA. Give batches of clean images as "
            "fisher_data, or say fisher_alpha=0 to mean it.",
            stacklevel=4,
        )


def check_group(group: ProcessGroup | None, speed: str) -> None:
    """Refuse what ranks cannot share."""
    if group is not None and speed == "fast":
        raise ValueError(
            "speed='fast' records passes, and what ranks tell each other cannot be recorded: give "
            "speed='exact' with a group."
        )


def default_speed(model: nn.Module, group: ProcessGroup | None = None) -> str:
    """`fast` where it is meant for: a float32 model on a GPU that has bfloat16, on its own."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    devices = {p.device.type for p in model.parameters()}
    suits = floats == {torch.float32} and devices == {"cuda"} and group is None
    return "fast" if suits and torch.cuda.is_bf16_supported(including_emulation=False) else "exact"


def _guard(guard: Guard | bool | None) -> Guard | None:
    if isinstance(guard, Guard):
        return guard
    if guard is not None and not isinstance(guard, bool):
        raise TypeError(f"guard={guard!r}: give True, False, None or a fata.Guard(...).")
    return Guard() if guard else None
