"""The state of an adapter: what moved and what is remembered, never the whole model.

Parameters, momentum, the method's memory, FATA's moving average, the counters, what the guard
keeps. Random numbers depend on (seed, batch number), so these two numbers are the generator. `meta`
says whose state it is. Its digest covers all that is loaded. A file is one safetensors file that is
whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from fata._files import digest
from fata._text import listed
from fata._torch import NormWithStatistics
from fata.engine.engine import Engine
from fata.engine.state import State
from fata.engine.swap import Held
from fata.guard.events import Watched
from fata.methods import describe, spec_of
from fata.methods.base import CustomStep

FORMAT = 7
MOVING = ("parameter.", "momentum.")


class StateError(RuntimeError):
    """A state that does not belong here or cannot be read; nothing was changed."""


def pack(engine: Engine, source: str, held: Held | None = None) -> dict[str, Any]:
    """The state as tensors by name, and `meta`; `source` is the model's fingerprint.

    With `held`, that stream's instead.
    """
    state, theta = held.state if held else engine.state, engine.theta
    groups = {"host": state.host, "plus": state.plus, "guard": state.guard}
    groups |= {"classes": state.classes, "norm": state.norm}
    if not _episodic(engine):
        groups["parameter"] = dict(zip(theta.names, theta.split(state.theta), strict=True))
        groups["momentum"] = dict(zip(theta.names, theta.split(state.velocity), strict=True))
    tensors = {
        f"{group}.{name}": tensor.detach().clone()
        for group, members in groups.items()
        for name, tensor in members.items()
    }
    meta = _described(engine, state, source)
    return {**tensors, "meta": {**meta, "digest": _sealed(tensors, meta)}}


def _described(engine: Engine, state: State, source: str) -> dict[str, Any]:
    """Whose state it is, and what of it is not a tensor."""
    return {
        "format": FORMAT,
        "method": describe(engine.method),
        "plus": describe(engine.plus) if engine.plus else None,
        "layer": engine.layer,
        "fisher": engine.functions.fisher is not None,
        "source": source,
        "seed": state.seed,
        "batches": state.batches,
        "share": state.share,
        "counts": {name: int(number) for name, number in state.counts.items()},
        "watched": asdict(state.watched),
    }


class IncompatibleKeys(NamedTuple):
    """What a state lacks, and what it has that is of no use here."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def unpack(
    engine: Engine, source: str, packed: Mapping[str, Any], strict: bool = True
) -> tuple[State, IncompatibleKeys]:
    """The state that `pack` made, checked to be whole and, if strict, this engine's."""
    if not isinstance(packed, Mapping):
        raise StateError(f"this is not the state of an adapter, but {type(packed).__name__}")
    mine, theta = _described(engine, engine.fresh(), source), engine.theta
    tensors = {name: tensor for name, tensor in packed.items() if name != "meta"}
    meta = _whole(packed.get("meta"), tensors, {*mine, "digest"})
    try:
        _check_same(mine, meta)
        alike = True
    except StateError:
        alike = False
        if strict:
            raise
    moving = zip(MOVING, (engine.state.theta, engine.state.velocity), strict=True)
    ours = {
        prefix + name: part
        for prefix, flat in moving
        for name, part in zip(theta.names, theta.split(flat), strict=True)
        if not _episodic(engine)
    }
    theirs = {name: tensor for name, tensor in tensors.items() if name.startswith(MOVING)}
    fits = {n: t for n, t in theirs.items() if n in ours and t.shape == ours[n].shape}
    missing, unexpected = sorted(ours.keys() - fits), sorted(theirs.keys() - fits)
    if strict and (missing or unexpected):
        named = sorted(n.removeprefix("parameter.") for n in theirs if n.startswith("parameter."))
        raise StateError(
            f"the state adapts other parameters ({listed(named, 4)}) than this adapter "
            f"({listed(engine.theta.names, 4)})"
        )
    start = engine.fresh()
    ours |= fits  # what does not fit stays as it is here

    def vector(prefix: str, otherwise: Tensor) -> Tensor:
        if _episodic(engine):
            return otherwise
        return engine.theta.join(
            [ours[prefix + name].to(engine.device, copy=True) for name in engine.theta.names]
        )

    moved, velocity = vector("parameter.", start.theta), vector("momentum.", start.velocity)
    moved = start.theta if torch.equal(moved, start.theta) else moved
    if not alike:
        unexpected += sorted(name for name in tensors if not name.startswith(MOVING))
        return replace(start, theta=moved, velocity=velocity), IncompatibleKeys(missing, unexpected)

    def memory(prefix: str) -> dict[str, Tensor]:
        found = {n: t for n, t in tensors.items() if n.startswith(prefix)}
        return {n.removeprefix(prefix): t.to(engine.device, copy=True) for n, t in found.items()}

    state = State(
        moved,
        velocity,
        meta["seed"],
        memory("host."),
        memory("plus."),
        memory("classes."),
        meta["batches"],
        meta["share"],
        dict(meta["counts"]),
        memory("guard.") if engine.watch else {},
        Watched.unpack(meta["watched"]) if engine.watch else Watched(),
        memory("norm."),
    )
    return state, IncompatibleKeys(missing, unexpected)


def _whole(meta: Any, tensors: Mapping[str, Any], fields: set[str]) -> Mapping[str, Any]:
    """What is said of a state, if nothing of it is damaged."""
    if not isinstance(meta, Mapping) or "format" not in meta:
        raise StateError("this is not the state of an adapter: it has no 'meta'")
    if isinstance(meta["format"], str):  # "model 1", "stream 1"
        kind = meta["format"].partition(" ")[0]
        raise StateError(f"this is a {kind}, not the state of an adapter")
    if meta["format"] != FORMAT:
        raise StateError(
            f"the state has format {meta['format']!r}; this version of fata reads {FORMAT}"
        )
    odd = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if odd:
        raise StateError(f"the state is damaged: {listed(odd, 4)} is no tensor")
    if set(meta) != fields or meta["digest"] != _sealed(tensors, meta):
        raise StateError("the state is damaged: its contents are not those that were saved")
    return meta


def described(engine: Engine) -> dict[str, str]:
    """What ranks that share a batch must have alike, beside the model and the rate."""
    plus = describe(engine.plus) if engine.plus else None
    return {
        "method": f"{describe(engine.method)} {plus}",
        "params": f"{engine.theta.names}",
        "fisher_data": f"{engine.functions.fisher is not None}",
        "seed": f"{engine.seed}",
        "guard": f"{engine.watch.guard if engine.watch else None}",
    }


def _episodic(engine: Engine) -> bool:
    return isinstance(engine.method, CustomStep) and engine.method.episodic


def _check_same(mine: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    here, there = (spec_of(meta["method"], meta["plus"]) for meta in (mine, other))
    if here != there:
        raise StateError(f"the state is of method {there!r}; this adapter runs {here!r}")
    if mine["layer"] != other["layer"]:
        raise StateError(
            f"the state has FATA at layer {other['layer']!r}; this adapter taps {mine['layer']!r}"
        )
    for part in ("method", "plus"):
        ours, theirs = mine[part] or {}, other[part] or {}
        for field in ours:
            # a state of an older version has not all fields; those were off
            if field != "layer" and ours[field] != theirs.get(field, False):
                raise StateError(
                    f"the state was adapted with {field}={theirs.get(field)!r}; this adapter has "
                    f"{field}={ours[field]!r}"
                )
    if mine["fisher"] != other["fisher"]:
        with_, without = "with", "without"
        raise StateError(
            f"the state was adapted {with_ if other['fisher'] else without} Fisher data, and this "
            f"adapter was made {with_ if mine['fisher'] else without}"
        )
    if mine["source"] != other["source"]:
        raise StateError(
            f"the state belongs to a model with other source weights ({other['source'][:8]}...) "
            f"than this one ({mine['source'][:8]}...), or with other names for them, as they have "
            f"inside DataParallel or torch.compile"
        )


def fingerprint(engine: Engine) -> str:
    """Hash of the source weights: all parameters, those that move at their source values.

    Of buffers, the running statistics of normalisation layers; others may count or cache.
    """
    theta = engine.theta
    moved = dict(zip(map(id, theta.parameters), theta.split(engine.source), strict=True))
    tensors = {
        name: moved.get(id(parameter), parameter.detach()).to(parameter.dtype)
        for name, parameter in engine.network.model.named_parameters()
    }
    for name, module in engine.network.model.named_modules():
        if isinstance(module, NormWithStatistics):
            blend, own = engine.network.blend, (module.running_mean, module.running_var)
            mean, var = (blend.source(module) if blend else None) or own
            running = {"mean": mean, "var": var}
            tensors |= {f"{name}.{n}": t for n, t in running.items() if t is not None}
    return digest(tensors)


def _sealed(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """Digest of the tensors and of `meta`, but for the digest itself."""
    rest = {name: value for name, value in meta.items() if name != "digest"}
    try:
        text = json.dumps(rest, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is damaged: its 'meta' is not JSON: {error}") from error
    return hashlib.sha256(f"{digest(tensors)} {text}".encode()).hexdigest()[:32]


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state, or say what is wrong with the file."""
    path = Path(path)
    if not path.is_file():
        kind = "is a folder, not a state" if path.is_dir() else "is not there"
        raise FileNotFoundError(f"no state at {str(path)!r}: it {kind}")
    try:
        with safe_open(path, framework="pt") as file:
            meta = (file.metadata() or {}).get("meta")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except OSError:
        raise
    except Exception as error:  # of damage, safetensors and torch raise many kinds
        raise StateError(f"{str(path)!r} is damaged or no safetensors file: {error}") from error
    if meta is None:
        raise StateError(f"{str(path)!r} is a safetensors file, but not the state of an adapter")
    try:
        return {**tensors, "meta": json.loads(meta)}
    except (ValueError, RecursionError) as error:
        raise StateError(f"{str(path)!r} is damaged: {error}") from error
