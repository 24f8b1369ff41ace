"""Files of trained models: their names, and whether they can be written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from fata._text import listed
from fata.data.dataset import Dataset, data_name
from fata.data.errors import DataError
from fata.training.images import domains, images_of


def output_files(
    dataset: Dataset, domain: str | None, model: str, out: Path | None
) -> dict[str, Path]:
    """A file for each domain to train on; raises if one cannot be read or written.

    Args:
        dataset: images in folders.
        domain: a name, `all`, or None for data that has only one.
        model: the start of the files' names, as in `resnet50_gn-office-home-Art.safetensors`.
        out: a file, or a folder for files with such names; None: this folder.
    """
    known = domains(dataset)
    if not known:
        raise DataError(f"{dataset.spec} has corruptions alone, no domain to train on.")
    if domain is None and len(known) > 1:
        raise DataError(
            f"{dataset.spec} has {len(known)} domains: name the one to train on, "
            f"{listed(known, 20)}, or all."
        )
    wanted = known if domain not in known and domain in (None, "all") else [str(domain)]
    folder = Path() if out is None else out
    if not folder.suffix:
        _make_folder(folder)
    if folder.is_dir():
        found = {one: folder / file_name(model, dataset.spec, one) for one in wanted}
    elif len(wanted) == 1:
        found = {wanted[0]: folder}
    else:
        raise OSError(f"cannot write {len(wanted)} models to {str(out)!r}: give a folder")
    for one, place in found.items():
        images_of(dataset, one)
        check_writable(place)
    return found


def file_name(model: str, data: str, domain: str) -> str:
    """Such as `resnet50_gn-office-home-Art.safetensors`."""
    start = re.sub(r"\.(safetensors|pth|pt)\b", "", Path(model).name)
    return re.sub(r"[^\w.]+", "-", f"{start}-{data_name(data)}-{domain}") + ".safetensors"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {str(folder)!r}: {error.strerror}") from error


def check_writable(out: Path) -> None:
    """Raise now, not after the first epoch."""
    if out.suffix != ".safetensors":
        raise OSError(f"cannot write {str(out)!r}: give a name that ends in .safetensors")
    if out.is_dir():
        raise IsADirectoryError(f"cannot write {str(out)!r}: it is a folder")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise OSError(f"cannot write {str(out)!r}: {error.strerror}") from error
