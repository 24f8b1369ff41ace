"""Data sets of the Hugging Face hub, or of a local folder in its layouts, as timm reads them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from fata.data.dataset import MADE, Dataset, View
from fata.data.errors import DataError
from fata.data.own import OwnImages

SPLIT = "validation"


class HubImages:
    """Items `(image, label)`; labels and names of the classes without decoding a picture."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.targets = list(reader.dataset[reader.label_key])
        self.classes = sorted(reader.class_to_idx, key=reader.class_to_idx.get)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        file, label = self._reader[index]
        with file:
            return Image.open(file).convert("RGB"), label


def hub(spec: str, view: View, jpeg: bool) -> Dataset:
    """`hf:NAME`, or `hf:NAME@SPLIT`; corrupted on the fly."""
    missing = [name for name in ("timm", "datasets") if find_spec(name) is None]
    if missing:
        raise DataError(f"{spec} needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    from timm.data.dataset_factory import create_dataset

    name, _, split = spec.removeprefix("hf:").partition("@")
    if not name:
        raise DataError(f"{spec!r}: give hf:NAME or hf:NAME@SPLIT.")
    try:
        items = HubImages(create_dataset(f"hfds/{name}", split=split or SPLIT).reader)
    except Exception as error:  # of the network, of the files, of the names in them
        raise DataError(f"{spec}: {str(error).rstrip('.')}.") from error
    source = OwnImages(spec, items, view)
    return Dataset(spec, tuple(items.classes), MADE, lambda _: source, made=True, jpeg=jpeg)
