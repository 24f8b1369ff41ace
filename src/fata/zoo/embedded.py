"""The networks in the package, trained by `scripts/train_embedded.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from fata.zoo import model_file
from fata.zoo.loaded import Loaded
from fata.zoo.mini import NAMES

__all__ = ["NAMES", "PRESETS", "load"]

_WEIGHTS = Path(__file__).with_name("weights")
PRESETS = _WEIGHTS / "presets.json"  # written by `python -m benchmarks.presets`


def load(name: str) -> Loaded:
    """One of `NAMES`, with its preset settings."""
    loaded = model_file.load(_WEIGHTS / f"{name}.safetensors")
    weights = dataclasses.replace(loaded.weights, tag=name, origin="in the package")
    presets = json.loads(PRESETS.read_text())[name]
    return dataclasses.replace(loaded, name=name, weights=weights, presets=presets)
