"""Test-time adaptation of image classifiers, with feature augmentation (FATA)."""

from fata import data, tiny, zoo
from fata.adapter import Adapter, adapt
from fata.augment import Fata
from fata.corruptions import corrupt
from fata.data.streams import stream
from fata.method import Batch, Memory, Method
from fata.methods import Cotta, Deyo, Eata, Memo, Norm, Sar, Source, Tent
from fata.selection import Selection
from fata.state import StateError
from fata.structure import layers

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Batch",
    "Cotta",
    "Deyo",
    "Eata",
    "Fata",
    "Memo",
    "Memory",
    "Method",
    "Norm",
    "Sar",
    "Selection",
    "Source",
    "StateError",
    "Tent",
    "adapt",
    "corrupt",
    "data",
    "layers",
    "stream",
    "tiny",
    "zoo",
]
