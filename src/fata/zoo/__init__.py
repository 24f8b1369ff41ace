"""Models by name: the network, its preprocessing and the origin of its weights."""

from __future__ import annotations

import dataclasses
import os
import re

from fata._text import near
from fata.zoo import hugging_face, model_file, own, sources
from fata.zoo.loaded import Loaded, Weights, ZooError
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from fata.zoo.sources import PAPER

__all__ = ["NAMES", "Loaded", "Preprocess", "Weights", "ZooError", "load"]

_FILE = re.compile(r"(?!hf:)(?P<path>.+?\.(?:safetensors|pth|pt))(?::(?P<arch>.+))?")


def load(name: str | os.PathLike[str], *, protocol: str | None = None) -> Loaded:
    """A pretrained model, ready to adapt.

    Args:
        name: one of `NAMES`; `timm:NAME.TAG`, `torchvision:NAME.WEIGHTS`; `hf:ID` or `hf:./folder`;
            `FILE:ARCH` of a safetensors, pth or pt file, ARCH being timm's or ours, or
            `torchvision:NAME`; a FILE that we wrote needs no ARCH; `my_module:build`, a function of
            your own that returns `(model, fata.zoo.Preprocess(...))`.
        protocol: `sar` for the published tables of the paper's networks: ImageNet's mean and std,
            though the ViT was trained with 0.5. None: each network's own.

    Raises:
        ZooError: the model cannot be loaded; the message says why, and what to do.
    """
    name = os.fspath(name)
    file = _FILE.fullmatch(name)
    asked = file["arch"] if file else name
    if protocol not in (None, "sar"):
        raise ZooError(f"protocol={protocol!r}: choose 'sar', or None for the weights' own.")
    if protocol and asked not in (*PAPER, *PAPER.values()):
        raise ZooError(f"protocol='sar' is for {', '.join(PAPER)}, not for {name!r}.")
    loaded = model_file.load(file["path"], file["arch"]) if file else _load(name)
    if protocol:
        use = dataclasses.replace(loaded.preprocess, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        loaded = dataclasses.replace(loaded, preprocess=use)
    return loaded


def _load(name: str) -> Loaded:
    if source := sources.resolve(name):
        return sources.load(source, name)
    if name.startswith("hf:"):
        return hugging_face.load(name.removeprefix("hf:"))
    from fata.zoo import embedded

    if name in embedded.NAMES:
        return embedded.load(name)
    if own.is_own(name):
        return own.load(name)
    if full := sources.tags(name):
        raise ZooError(f"{name!r} does not say which weights: choose {', '.join(full)}.")
    names, module = (*PAPER, *embedded.NAMES), name.partition(":")[0]
    missing = f" There is no module {module!r}." if ":" in name else ""
    raise ZooError(
        f"unknown model {name!r}: choose one of {', '.join(names)}, or give timm:NAME, "
        f"torchvision:NAME, hf:ID, FILE.safetensors:ARCH or your own my_module:build."
        f"{missing}{near(name, names)}"
    )


def __getattr__(name: str) -> tuple[str, ...]:
    if name == "NAMES":
        from fata.zoo import embedded

        return (*PAPER, *embedded.NAMES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
