"""Downloads by other libraries: a quick check first, and errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import torch

from fata.zoo.loaded import ZooError

TIMEOUT = 10.0  # seconds for the check; the libraries themselves try for a minute, or wait for ever
HUB_FILES = ("model.safetensors", "pytorch_model.bin")


@contextmanager
def downloading(tag: str, advice: str) -> Iterator[None]:
    """Turn any error inside into one that says what to do."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:  # of any of four libraries for HTTP
        why = str(error).strip().partition("\n")[0]
        raise ZooError(
            f"{tag}: cannot get the weights ({type(error).__name__}: {why}). {advice}"
        ) from error


def check_hub(repository: str, files: tuple[str, ...] = HUB_FILES) -> None:
    """Raise at once if the hub cannot be reached and none of the files is cached."""
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    if any(isinstance(hub.try_to_load_from_cache(repository, file), str) for file in files):
        return
    with suppress(EntryNotFoundError):  # it responds: the library knows more names of files
        hub.get_hf_file_metadata(hub.hf_hub_url(repository, files[0]), timeout=TIMEOUT)


def hub_instructions(repository: str, tag: str) -> str:
    """How to get a file of the hub without internet."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder, file = f"models--{repository.replace('/', '--')}", HUB_FILES[0]
    return (
        f"Without a network: get {file!r} of the hub's {repository!r} on another machine, and load "
        f"it as fata.zoo.load('/path/to/{file}:{tag}'); or copy that machine's folder {folder!r} "
        f"of the hub's cache into {HF_HUB_CACHE!r}."
    )


def check_url(url: str) -> None:
    """Raise soon if a URL cannot be reached and its file is not in torch's cache."""
    if not _place(url).exists():
        with suppress(HTTPError):  # it responds, if only with an error
            urlopen(Request(url, method="HEAD"), timeout=TIMEOUT).close()


def url_instructions(url: str, tag: str) -> str:
    """How to get the file of a URL without internet."""
    place = _place(url)
    return (
        f"Without a network: get {place.name!r} ({url}) on another machine, and put it into "
        f"{str(place.parent)!r}, or load it as fata.zoo.load('/path/to/{place.name}:{tag}')."
    )


def _place(url: str) -> Path:
    return Path(torch.hub.get_dir(), "checkpoints", os.path.basename(urlparse(url).path))
