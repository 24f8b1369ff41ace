"""Architectures of timm, torchvision and our own, and their pretrained weights.

Resolving a name needs no internet: tag, preprocessing and URL are in the libraries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from fata._text import near
from fata.zoo import mini
from fata.zoo.download import check_hub, check_url, downloading, hub_instructions, url_instructions
from fata.zoo.loaded import Loaded, Weights, ZooError
from fata.zoo.own import Own, is_own
from fata.zoo.preprocess import Preprocess

PAPER = {
    "resnet50_bn": "torchvision:resnet50.IMAGENET1K_V1",
    "resnet50_gn": "timm:resnet50_gn.a1h_in1k",
    "vit_base": "timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
}


class Architecture(Protocol):
    """A network that can be built untrained."""

    tag: str

    @property
    def preprocess(self) -> Preprocess:
        """What it was trained with."""

    def build(self, classes: int) -> nn.Module:
        """The network, untrained."""


def architecture(name: str) -> Architecture:
    """The network named after the colon of a file's name."""
    name = PAPER.get(name, name)
    library, _, rest = name.rpartition(":")
    if library == "torchvision":
        return Torchvision(rest, weights=False)
    if name in mini.NAMES:
        return Mini(name)
    if library == "timm" or (not library and _library("timm").is_model(rest.partition(".")[0])):
        return Timm(rest, weights=False)
    if is_own(name):
        return Own(name)
    names = (*PAPER, *mini.NAMES)
    known = names if library else (*names, *_library("timm").list_models())
    raise ZooError(
        f"unknown architecture {name!r}: choose one of {', '.join(names)}, or give timm:NAME, "
        f"torchvision:NAME or your own my_module:build.{near(name, known)}"
    )


class Timm:
    """A network of timm, as `NAME.TAG`; or `NAME` alone, if it is unambiguous.

    Args:
        name: with the tag, or without.
        weights: whether timm's weights are wanted; without them, all tags of the name need only
            agree on mean and std.
    """

    def __init__(self, name: str, weights: bool = True) -> None:
        timm = _library("timm")
        arch = name.partition(".")[0]
        if not timm.is_model(arch):
            raise ZooError(f"timm has no {arch!r}.{near(arch, timm.list_models())}")
        known = timm.list_pretrained(f"{arch}.*")
        name = _pick("timm", name, {one: _timm_preprocess(one) for one in known}, weights)
        cfg: Any = timm.get_pretrained_cfg(name)
        if weights and not cfg.num_classes:
            raise ZooError(f"timm:{name} has no classifier, so it cannot be adapted.")
        self.name, self.tag, self.classes = name, f"timm:{name}", cfg.num_classes
        self.preprocess = _timm_preprocess(name)
        self.hub, self.origin = cfg.hf_hub_id, cfg.hf_hub_id or cfg.url

    def build(self, classes: int) -> nn.Module:
        """The network, untrained."""
        model: nn.Module = _library("timm").create_model(self.name, num_classes=classes)
        return model

    def pretrained(self) -> nn.Module:
        """The network with its weights, downloaded if they are not cached."""
        by_hand = hub_instructions if self.hub else url_instructions
        with downloading(self.tag, by_hand(self.origin, self.tag)):
            (check_hub if self.hub else check_url)(self.origin)
            model: nn.Module = _library("timm").create_model(self.name, pretrained=True)
        return model


class Torchvision:
    """A network of torchvision, as `NAME.WEIGHTS`; or `NAME` alone, as with `Timm`."""

    def __init__(self, name: str, weights: bool = True) -> None:
        models = _library("torchvision.models")
        arch = name.partition(".")[0]
        known = models.list_models(module=models)
        if arch not in known:
            raise ZooError(f"torchvision has no {arch!r} that classifies.{near(arch, known)}")
        every = {f"{arch}.{one.name}": one for one in models.get_model_weights(arch)}
        uses = {one: _torchvision_preprocess(enum) for one, enum in every.items()}
        name = _pick("torchvision", name, uses, weights)
        first = next(iter(every))
        enum = every.get(name, every[first])
        if weights and not enum.meta["categories"]:
            raise ZooError(f"torchvision:{name} has no classifier, so it cannot be adapted.")
        self.arch, self.weights, self.tag = arch, enum, f"torchvision:{name}"
        self.preprocess = uses.get(name, uses[first])
        self.classes, self.origin = len(enum.meta["categories"] or ()), enum.url

    def build(self, classes: int) -> nn.Module:
        """The network, untrained."""
        models = _library("torchvision.models")
        # With weights, these two undo ImageNet's normalisation: so must a network for a file.
        own = {"transform_input": True} if self.arch in ("inception_v3", "googlenet") else {}
        model: nn.Module = models.get_model(self.arch, weights=None, num_classes=classes, **own)
        return model

    def pretrained(self) -> nn.Module:
        """The network with its weights, downloaded if they are not cached."""
        models = _library("torchvision.models")
        with downloading(self.tag, url_instructions(self.origin, self.tag)):
            check_url(self.origin)
            model: nn.Module = models.get_model(self.arch, weights=self.weights)
        return model


class Mini:
    """A network of our own."""

    def __init__(self, name: str) -> None:
        self.tag = name

    @property
    def preprocess(self) -> Preprocess:
        """Unknown: only files that we write have it."""
        raise ZooError(
            f"a file for {self.tag!r} must carry its preprocessing: write it with "
            f"fata.zoo.model_file.save."
        )

    def build(self, classes: int) -> nn.Module:
        """The network, untrained."""
        return mini.build(self.tag, classes)


def resolve(name: str) -> Timm | Torchvision | None:
    """The pretrained network of timm or torchvision that a name stands for, or None."""
    library, _, rest = PAPER.get(name, name).partition(":")
    kinds: dict[str, type[Timm] | type[Torchvision]] = {"timm": Timm, "torchvision": Torchvision}
    return kinds[library](rest) if library in kinds else None


def load(source: Timm | Torchvision, name: str) -> Loaded:
    """A network with the weights of its library."""
    model = source.pretrained().eval()
    weights = Weights.of(model, source.tag, source.origin)
    return Loaded(name, model, source.preprocess, source.classes, weights)


def tags(name: str) -> list[str]:
    """Full names, in either library, of a name without one."""
    arch = name.partition(".")[0]
    try:
        timm, models = _library("timm"), _library("torchvision.models")
    except ZooError:
        return []
    found = [f"timm:{one}" for one in timm.list_pretrained(f"{arch}.*")]
    if arch in models.list_models(module=models):
        found += [f"torchvision:{arch}.{one.name}" for one in models.get_model_weights(arch)]
    return found


def _library(name: str) -> Any:
    """A module of timm or torchvision, which are optional and take seconds to import."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        library = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ZooError(f"networks of {library} need {library}: pip install fata[zoo]") from error


def _timm_preprocess(name: str) -> Preprocess:
    cfg: Any = _library("timm").get_pretrained_cfg(name)
    channels, height, width = cfg.input_size
    if channels != 3 or height != width or cfg.crop_mode not in ("center", "squash"):
        raise ZooError(
            f"timm:{name} takes {channels} x {height} x {width} images in crop mode "
            f"{cfg.crop_mode!r}; only square RGB images, 'center' or 'squash', are supported."
        )
    resize, squash = math.floor(height / cfg.crop_pct), cfg.crop_mode == "squash"
    return Preprocess(resize, height, cfg.interpolation, tuple(cfg.mean), tuple(cfg.std), squash)


def _torchvision_preprocess(weights: Any) -> Preprocess:
    use = weights.transforms()
    mean, std = tuple(use.mean), tuple(use.std)
    return Preprocess(use.resize_size[0], use.crop_size[0], use.interpolation.value, mean, std)


def _pick(library: str, name: str, uses: Mapping[str, Preprocess], weights: bool) -> str:
    """The full name that a name stands for.

    Without the library's weights a name alone suffices, unless its tags expect different mean and
    std: a wrong mean would go unnoticed.
    """
    choice = " or ".join(f"'{library}:{one}'" for one in uses)
    if name in uses:
        return name
    if "." in name:
        raise ZooError(f"{library} has no weights {name!r}; it has {choice or 'none'}.")
    if not weights:
        if len({(use.mean, use.std) for use in uses.values()}) > 1:
            raise ZooError(
                f"'{library}:{name}' is ambiguous, its weights expect different mean and std: say "
                f"whose the file's are, {choice}."
            )
        return name
    if not uses:
        raise ZooError(
            f"{library} has no weights for {name!r}; load a file of your own as "
            f"'FILE.safetensors:{library}:{name}'."
        )
    if len(uses) > 1:
        raise ZooError(
            f"'{library}:{name}' is ambiguous, it has {len(uses)} sets of weights: choose {choice}."
        )
    return next(iter(uses))
