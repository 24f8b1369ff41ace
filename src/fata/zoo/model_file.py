"""Files of weights: our own, which contain their description, and those of others."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fata._files import save_tensors
from fata._text import listed
from fata.zoo.loaded import Loaded, Weights, ZooError
from fata.zoo.preprocess import Preprocess
from fata.zoo.sources import architecture

FORMAT = "model 1"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    arch: str,
    preprocess: Preprocess,
    labels: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Write a model to one safetensors file, which `fata.zoo.load(path)` takes as it is.

    Args:
        path: an existing file is replaced atomically.
        model: its weights are written in their own precision.
        arch: as after the colon of a file's name: `mini_vit`, `timm:NAME`, `torchvision:NAME`.
        preprocess: what the model was trained for.
        labels: names of the classes.
        recipe: how it was trained, as JSON.
    """
    meta = {
        "format": FORMAT,
        "arch": arch,
        "preprocess": dataclasses.asdict(preprocess),
        "labels": list(labels),
        "recipe": dict(recipe or {}),
    }
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    save_tensors(path, {**tensors, "meta": meta})


def load(path: str | os.PathLike[str], arch: str | None = None) -> Loaded:
    """A network with the weights of a file; our own files need no `arch`."""
    path = Path(path).expanduser()
    name = str(path) if arch is None else f"{path}:{arch}"
    if not path.is_file():
        raise ZooError(f"{name}: there is no file {str(path)!r}.")
    tensors, meta = _safetensors(path) if path.suffix == ".safetensors" else (_pickle(path), {})
    if arch is None and not meta:
        raise ZooError(
            f"{name}: the file does not say which network it is for; load it as "
            f"'{path}:timm:NAME' or '{path}:torchvision:NAME'."
        )
    try:
        network = architecture(arch or meta["arch"])
        preprocess = Preprocess.of(meta["preprocess"]) if meta else network.preprocess
        labels, recipe = tuple(meta.get("labels", ())), meta.get("recipe", {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ZooError(f"{name}: the file is damaged, its description is not whole.") from error
    model = network.build(1000)
    head, last = list(model.named_parameters())[-1]
    found = tensors.get(head, last)  # the file knows how many classes there are
    if found.ndim and len(found) != len(last):
        model = network.build(len(found))
    _fill(name, model, tensors)
    weights = Weights.of(model, f"{path.name}:{network.tag}", str(path))
    return Loaded(name, model.eval(), preprocess, len(found), weights, labels=labels, recipe=recipe)


def _fill(name: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a network, all of them or none."""
    own = model.state_dict()
    count = "num_batches_tracked"  # no weight; many files leave it out
    missing = [one for one in own if one not in tensors and not one.endswith(count)]
    unknown = [one for one in tensors if one not in own]
    other = [
        f"{one!r} is {tuple(tensors[one].shape)}, not {tuple(own[one].shape)}"
        for one in own
        if one in tensors and tensors[one].shape != own[one].shape
    ]
    problems = [
        *([f"it lacks {len(missing)} tensors ({listed(missing, 4)})"] if missing else []),
        *([f"{len(unknown)} have no place ({listed(unknown, 4)})"] if unknown else []),
        *([f"{len(other)} have another shape ({'; '.join(other[:2])})"] if other else []),
    ]
    if problems:
        raise ZooError(
            f"{name}: the file is for another network: {', '.join(problems)}. Name the "
            f"architecture that it was made with."
        )
    model.load_state_dict(tensors, strict=False)


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the description that our own files have."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("meta", "{}"))
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ZooError(f"{str(path)!r} is damaged or no safetensors file: {error}.") from error
    if "method" in meta:
        raise ZooError(
            f"{str(path)!r} is the state of an adapter, not a model: load it with adapter.load."
        )
    if meta and meta.get("format") != FORMAT:
        raise ZooError(
            f"{str(path)!r} has format {meta.get('format')!r}; this version of fata reads "
            f"{FORMAT!r}."
        )
    return tensors, meta


def _pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a file of torch.save; what training scripts wrap around them is taken off."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises anything
        why = str(error).strip().partition("\n")[0]
        raise ZooError(f"{str(path)!r} is damaged or holds more than tensors: {why}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not (isinstance(found, Mapping) and all(isinstance(t, Tensor) for t in found.values())):
        raise ZooError(f"{str(path)!r} holds no dict of tensors by name; save a state_dict().")
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}
