"""Test-time adaptation of image classifiers, with feature augmentation (FATA)."""

from importlib.metadata import version

from fata import tiny
from fata.adapter import Adapter, adapt
from fata.augment import Fata
from fata.methods import Cotta, Deyo, Eata, Memo, Norm, Sar, Source, Tent
from fata.state import StateError
from fata.structure import layers

__version__ = version("fata")

__all__ = [
    "Adapter",
    "Cotta",
    "Deyo",
    "Eata",
    "Fata",
    "Memo",
    "Norm",
    "Sar",
    "Source",
    "StateError",
    "Tent",
    "adapt",
    "layers",
    "tiny",
]
