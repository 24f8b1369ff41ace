"""The adapter: a model that adapts itself while it predicts."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fata import export
from fata.distributed.ranks import Ranks
from fata.engine.arguments import check_model, check_seed, images_of
from fata.engine.build import SPEEDS, build
from fata.engine.finite import run
from fata.engine.fisher import FisherData
from fata.engine.ownership import Settings
from fata.engine.record import Callback, record
from fata.guard.events import Health
from fata.guard.policy import Guard, Watch
from fata.methods import describe, parse, spec_of
from fata.methods.base import Method
from fata.methods.fata import Fata
from fata.methods.source import Norm
from fata.network.norms import has_running
from fata.network.parameters import Params
from fata.stateful import Stateful

RECOMMENDED = "eata+fata"
BALANCED = {"balance": True, "fata_balance": True, "weight": 0.5}
log = logging.getLogger("fata")


class Adapter(Stateful):
    """Predicts like the model it holds, and learns from every batch.

    The model is changed in place: its chosen parameters move, and BatchNorm uses the statistics of
    the batch, or with `blend=True` of the stream. `reset` undoes this, and `unwrap` takes all hooks
    off. Threads that share an adapter wait for each other. A forked process has a copy of it;
    `reset` that copy if another thread was in a step.

    Args:
        model: maps images to logits, or to an object with `.logits`.
        method: what to learn, such as `fata.Eata()`.
        plus: `fata.Fata(...)`, or None.
        lr: learning rate; `paper` (the default) or `release` take those of the FATA paper or of
            its code for the kind of network and the batch size.
        params: what adapts: `norm` (all normalisation layers), `norm-truncated` (without those of
            the last stage or the last three blocks), `every` (every parameter), names of
            parameters or modules, or None: the method's choice.
        fisher_data: batches of clean images for EATA's penalty, one squared gradient a batch; or
            a Fisher computed before (`adapter.fisher`).
        guard: watches for collapse; a `fata.Guard(...)` has other settings, None is none.
        seed: of the adapter's own random numbers; the global generator is never touched.
        speed: `exact` (the model's own precision, bit-stable) or `fast` (on a GPU: bfloat16,
            captured passes; on a CPU with AMX: bfloat16). None: `fast` for a float32
            model on a GPU that has bfloat16, else `exact`.
        group: ranks of `torch.distributed` that share every batch, each with an adapter made
            alike; None: this process alone. See below.
        callbacks: their `on_step(record)` is called after every batch that is learned from; ready
            ones are in `fata.callbacks`. They wait for the device.
        reset_every: batches after which the source model is restored (RDumb); None: never.

    In a `group` each rank gives its rows of a batch, in the order of the ranks; some may have
    fewer than others, or none: `images[:0]`. All call as often as the others, frozen or not, and
    learn what one process would from the whole batch. `counts` are of all rows, `selected` and the
    logits of this rank's. The state is the same on every rank, so any of them may save it. Of
    `fisher_data` the mean over the ranks is used.

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
        callbacks: Sequence[Callback] = (),
        reset_every: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(method, Fata):  # its loss alone
            if plus is not None:
                raise TypeError("fata.Fata is given twice: as the method and as plus.")
            plus, method = method, Norm()
        if isinstance(model, Adapter):
            raise TypeError("model is an Adapter already; call unwrap() on it first.")
        check_model(model)
        for callback in callbacks:
            if not hasattr(callback, "on_step"):
                raise TypeError(f"callbacks: {callback!r} has no on_step(record).")
        given = Settings(model)
        parts = model, method, plus, given, lr, params, fisher_data, guard, seed, speed, group
        engine = build(*parts, reset_every)
        self.model = model
        self._frozen = 0  # how often, at this time
        self._shape: torch.Size | None = None  # of the last images
        self.callbacks = list(callbacks)
        self._own(engine, given)

    # -- predicting ---------------------------------------------------------------------------

    def forward(self, images: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Logits of the images, from before this batch was learned from (MEMO: after).

        A Hugging Face processor's output is taken too: `adapted(**inputs)`, its `pixel_values`.
        While a gain is not yet likely, the guard may give images the source model's prediction.

        Rows with a pixel that is not finite get the logits that the plain model gives them, are
        never learned from, and do not affect the other rows.
        """
        engine, images = self._live(), images_of(images, inputs)
        engine.network.check(images)
        # Of several GPUs another may be the current one.
        place = torch.cuda.device_of(images)  # type: ignore[no-untyped-call]
        with self._lock, place, torch.inference_mode(False), torch.enable_grad():
            images = (images.clone() if images.is_inference() else images).detach()
            if self.model.training:  # train() was called on it
                self.model.eval()
            engine.network.settle()
            self._shape = images.shape
            logits = run(engine, images, learning=not self._frozen)
            if self.callbacks and not self._frozen:
                found = record(engine, logits)
                for callback in self.callbacks:
                    callback.on_step(found)
            return logits

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        """An adapter of its own that continues from here, with the same callbacks."""
        memo[id(self.callbacks)] = self.callbacks
        return super().__deepcopy__(memo)

    @contextmanager
    def frozen(self) -> Iterator[Adapter]:
        """Predict without learning inside the context, in every thread; no state changes."""
        with self._lock:
            self._frozen += 1
        try:
            yield self
        finally:
            with self._lock:
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
        execution = type(self._live().execution)
        return next(name for name, kind in SPEEDS.items() if execution is kind)

    @property
    def compile_seconds(self) -> float:
        """How long compiling took so far; it is no part of adapting."""
        return self._live().execution.compile_seconds

    @property
    def layer(self) -> str | None:
        """Name of the layer that FATA taps."""
        return self._live().layer

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that adapt."""
        return list(self._live().theta.model_names)

    @property
    def adapted(self) -> list[str]:
        """Former name of `trainable`."""
        message = (
            "adapter.adapted is now adapter.trainable; the old name goes with the next version."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.trainable

    @property
    def guard(self) -> Watch | None:
        """The guard at work: what it did (`events`), whether it rests; None: there is none."""
        return self._live().watch

    @property
    def health(self) -> Health | None:
        """Estimated accuracy of source and adapted model; None: no guard, or no check yet."""
        return self.guard.health if self.guard else None

    @property
    def group(self) -> Ranks:
        """The ranks that share every batch."""
        return self._live().group

    @property
    def fisher(self) -> dict[str, Tensor] | None:
        """The Fisher information by parameter, as `fisher_data` takes it; None: there is none."""
        engine = self._live()
        if engine.functions.fisher is None:
            return None
        parts = engine.theta.split(engine.functions.fisher)
        return dict(zip(engine.theta.names, parts, strict=True))

    @property
    def counts(self) -> dict[str, Any]:
        """Rows seen, selected by each term, passed forward and back; steps and recoveries.

        `dropped` are steps that moved nothing: their gradient was zero or not finite. `kept` are
        rows that the guard let keep the source model's prediction, and `rows_source` forward passes
        of that model. Set-up (Fisher, the pass that prepares FATA's tap) is not counted.
        """
        with self._lock:
            return self._live().state.summary(self.method.name, self.plus is not None)

    @property
    def selected(self) -> dict[str, Tensor]:
        """Which rows of the last batch each term selected; empty if it was not learned from."""
        engine = self._live()
        if engine.selected is None:
            return {}
        terms = (self.method.name, "fata") if self.plus else (self.method.name,)
        return dict(zip(terms, engine.selected, strict=False))

    def __repr__(self) -> str:
        model, engine = type(self.model).__name__, self._engine
        if engine is None:
            return f"Adapter({model}, unwrapped)"
        what, guard = f"{sum(engine.theta.sizes):,} parameters adapt", "on" if self.guard else "off"
        names = " + ".join(type(part).__name__ for part in (self.method, self.plus) if part)
        return f"Adapter({names} on {model}, {what}, guard {guard}, {self.speed})"

    # -- state --------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> None:
        """Restore the source model, bit for bit, and start at the first batch again.

        Random numbers follow another `seed` if one is given. Captured and compiled passes stay.
        """
        engine = self._live()
        seed = engine.seed if seed is None else seed
        check_seed(seed)
        with self._lock, torch.inference_mode(False):
            engine.seed = seed
            engine.state = engine.fresh()
            engine.selected = None
            engine.network.settle()
            engine.write()

    def unwrap(self, batch_statistics: bool | None = None) -> nn.Module:
        """The plain model with the weights that predict, its modes and flags as they were given.

        Those are the adapted weights; after CoTTA the teacher's, and the source's while the guard
        falls back to the source model. The adapter cannot be used afterwards.

        Args:
            batch_statistics: for a model with BatchNorm. True: it normalises with the batch at
                hand, as the adapter does, and has no running statistics any more. False: it has the
                source's back, and predicts otherwise than the adapter. None: the blended ones with
                `blend=True`, and it predicts as the frozen adapter; else as False, with a warning.
        """
        with self._lock:
            engine, network = self._live(), self._live().network
            adapted = engine.coupled and engine.prediction_weights is not engine.source
            if adapted and batch_statistics is None and not network.blend:
                log.warning(
                    "unwrap(): BatchNorm is back at its running statistics, so the model does not "
                    "predict as the adapter did. Give batch_statistics=True to keep the batch's, "
                    "or False to mean it."
                )
            engine.theta.write(engine.prediction_weights)
            engine.shift()
            if batch_statistics is None and engine.state.watched.source_predicts:
                engine.source_model.leave_statistics(engine.state)
            elif network.blend and batch_statistics is False:
                network.blend.write({})
            self._give_back()
            if batch_statistics and network.statistics:
                network.statistics.forget_running()
            return self.model

    def export(self, path: str | os.PathLike[str], images: Tensor | None = None) -> None:
        """Write the model with the weights that predict, for programs without this library.

        It gives the logits that a frozen adapter gives, for batches of any size (of this size, and
        a warning is logged, where the model's code fixes it). BatchNorm normalises with the batch's
        statistics, unless they are blended or the source model predicts. The adapter continues.

        Args:
            path: ends with `.pt2` for a `torch.export` program, with `.onnx` for ONNX (which needs
                the packages onnx and onnxscript).
            images: a batch, for its shape; None: like the last one.
        """
        file = export.check_path(path)
        shape = export.check_shape(images.shape if images is not None else self._shape)
        with self._lock, torch.inference_mode(False):
            twin = deepcopy(self)
            engine = twin._live()
            export.check_statistics(self.name, engine.method.prior if engine.coupled else 0)
            blends = engine.network.blend or engine.state.watched.source_predicts
            plain = twin.unwrap(None if blends else engine.coupled)
            parameter = next(plain.parameters())
            export.write(file, plain, parameter.new_zeros(max(2, shape[0]), *shape[1:]))


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
    callbacks: Sequence[Callback] = (),
    reset_every: int | None = None,
    **fields: Any,
) -> Adapter:
    """Adapt a model by a method's name.

    Args:
        model: maps images to logits, or to an object with `.logits`.
        spec: `source`, `norm`, `tent`, `eata`, `sar`, `deyo`, `roid`, `zerosiam`, `nctta`, `neo`,
            `cotta`, `memo`, `fata`, or a host with it, such as `deyo+fata`. None: the recommended
            one, `eata+fata` with BatchNorm's statistics blended, or, if there are none, balanced
            over the classes with FATA at half weight; `fisher_alpha=0` without `fisher_data`.
        lr: learning rate, `paper` or `release`; this and the others as in `Adapter`.
        params: which parameters adapt.
        fisher_data: batches of clean images for EATA.
        guard: watches for collapse; on, unless it is None or False.
        seed: of the adapter's own random numbers.
        speed: `exact` or `fast`; None: what suits the device.
        group: ranks that share every batch.
        callbacks: are told of every batch.
        reset_every: batches after which the source model is restored.
        **fields: fields of the method or of `Fata`. One that both have is the method's;
            `fata_threshold=...` is the plug-in's.

    Example:
        >>> import fata, torch
        >>> adapted = fata.adapt(fata.tiny.build("vit_ln"), "deyo+fata", sigma=0.5)
        >>> adapted(torch.rand(4, 3, 16, 16)).shape
        torch.Size([4, 10])
    """
    if spec is None:
        blends = isinstance(model, nn.Module) and has_running(model)
        spec, fields = RECOMMENDED, {**({"blend": True} if blends else BALANCED), **fields}
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
        callbacks=callbacks,
        reset_every=reset_every,
    )
