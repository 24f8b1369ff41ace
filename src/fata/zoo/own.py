"""Models of your own: `my_module:build`, a function that returns a network."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn

from fata._imports import imported, is_own
from fata.network.logits import logits_of
from fata.zoo.loaded import Loaded, Weights, ZooError
from fata.zoo.preprocess import Preprocess

__all__ = ["Own", "is_own", "load"]


class Own:
    """A network that a function builds.

    It returns `(model, fata.zoo.Preprocess(...))`, or what `fata.zoo.load` returns. If it takes an
    argument, that is the number of classes; by default it must have one.
    """

    def __init__(self, name: str) -> None:
        try:
            self.function = imported(name)
        except ValueError as error:
            raise ZooError(f"{error}.") from error
        self.tag = name

    @property
    def preprocess(self) -> Preprocess:
        """What the function says."""
        return self.made()[1]

    def build(self, classes: int) -> nn.Module:
        """The network with so many classes, if the function takes their number."""
        return self.made(classes)[0]

    def loaded(self) -> Loaded:
        """The network as it is, with its weights."""
        given = self._call()
        if isinstance(given, Loaded):
            return dataclasses.replace(given, name=self.tag)
        model, use = self._checked(given)
        with torch.no_grad():
            outputs = model.eval()(torch.zeros(2, 3, use.size, use.size))
        classes = logits_of(outputs, 2).shape[1]
        return Loaded(self.tag, model, use, classes, Weights.of(model, self.tag, self.tag))

    def made(self, classes: int | None = None) -> tuple[nn.Module, Preprocess]:
        """The network and its preprocessing."""
        takes = len(inspect.signature(self.function).parameters) > 0
        given = self._call(*([classes] if classes is not None and takes else []))
        if isinstance(given, Loaded):
            return given.model, given.preprocess
        return self._checked(given)

    def _call(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        except Exception as error:  # whatever the function does
            raise ZooError(f"{self.tag}: {type(error).__name__}: {error}") from error

    def _checked(self, given: Any) -> tuple[nn.Module, Preprocess]:
        match given:
            case (nn.Module() as model, Preprocess() as use):
                return model, use
        raise ZooError(
            f"{self.tag} returns {type(given).__name__}: return (model, fata.zoo.Preprocess("
            f"resize, size, interpolation, mean, std)), as wrong preprocessing goes unnoticed."
        )


def load(name: str) -> Loaded:
    """The model that a function of your own returns."""
    return Own(name).loaded()
