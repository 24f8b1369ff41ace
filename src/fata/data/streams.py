"""A stream: the order of images and domains, which can be saved, replayed and served."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fata._files import digest, save_tensors
from fata._text import listed, near
from fata.data import serve
from fata.data.dataset import Dataset, Domain
from fata.data.errors import DataError
from fata.data.scenarios import SCENARIOS, DomainSampler, default_batch
from fata.data.serve import Samples

FORMAT = "stream 1"


@dataclass(frozen=True, eq=False)
class Stream:
    """Made by `fata.stream`; depends on (seed, data, scenario) alone.

    Iterating serves batches of images in [0, 1] on the CPU; `serve` has more options.
    """

    dataset: Dataset = field(repr=False)
    scenario: str
    seed: int
    batch_size: int
    domains: tuple[Domain, ...]
    domain: Tensor = field(repr=False)  # which of `domains` each image is of
    index: Tensor = field(repr=False)  # which image of it
    starts: tuple[int, ...] = field(repr=False)  # where segments start
    resets: tuple[bool, ...] = field(repr=False)  # whether the model is reset there

    @property
    def images(self) -> int:
        """Number of images."""
        return len(self.index)

    @cached_property
    def labels(self) -> Tensor:
        """The class of each image."""
        labels = torch.empty_like(self.index)
        for number, domain in enumerate(self.domains):
            rows = self.domain == number
            labels[rows] = self.dataset.of(domain).labels[self.index[rows]]
        return labels

    @cached_property
    def spans(self) -> list[tuple[int, int, bool]]:
        """Start and end of each batch, and whether the model is reset before it."""
        ends = (*self.starts[1:], self.images)
        return [
            (first, min(first + self.batch_size, end), reset and first == start)
            for start, end, reset in zip(self.starts, ends, self.resets, strict=True)
            for first in range(start, end, self.batch_size)
        ]

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Samples]:
        return self.serve()

    def serve(
        self,
        device: torch.device | str = "cpu",
        *,
        workers: int | None = None,
        skip_damaged: bool = False,
    ) -> Iterator[Samples]:
        """Batches, decoded ahead by `workers` processes (None: a few for files).

        A damaged image raises `DataError`; with `skip_damaged` it is left out and listed in the
        batch's `damaged`.
        """
        if workers is not None and workers < 0:
            raise DataError(f"workers={workers}: must be at least 0 (0: decode in this process).")
        place = torch.device(device)
        return serve.batches(self, serve.live(self, place, workers), place, skip_damaged)

    @property
    def provenance(self) -> dict[str, str]:
        """What to store with a result."""
        return {
            **self.dataset.provenance,
            "images": self.dataset.fingerprint(self.domains),
            "scenario": self.scenario,
            "seed": str(self.seed),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the order (not the images) to one file, for `fata.data.replay`."""
        parts = {
            "domain": self.domain,
            "index": self.index,
            "starts": torch.tensor(self.starts),
            "resets": torch.tensor(self.resets),
        }
        meta = {
            "format": FORMAT,
            "scenario": self.scenario,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "domains": [list(domain) for domain in self.domains],
            "pictures": [self.dataset.of(domain).digest for domain in self.domains],
            "order": digest(parts),
        }
        save_tensors(path, {**parts, "meta": meta})


def stream(
    dataset: Dataset,
    scenario: str = "normal",
    *,
    domains: Sequence[str] | None = None,
    severity: int = 5,
    batch_size: int | None = None,
    seed: int = 0,
    images: int | None = None,
    **options: Any,
) -> Stream:
    """A stream of images for a model.

    Args:
        dataset: from `fata.data.open`.
        scenario: `normal` (shuffled, reset at each domain), `bs1` (the same, batches of 1),
            `label-shift`, `mixed`, `continual`, `gradual`, `recurring`, `correlated`, `long`,
            `few-classes` or `skewed`.
        domains: names of corruptions or folders, in order; None: the benchmark's 15, or all.
        severity: of the corruptions; for `gradual` the highest.
        batch_size: None: 64, and 1 for `bs1`.
        seed: of the order.
        images: number of each domain; None: all.
        **options: `ratio` and `length` of `label-shift`, `rounds` of `recurring`, `concentration`
            of `correlated`.

    Example:
        >>> import fata
        >>> data = fata.data.open("embedded")
        >>> for batch in fata.stream(data, "normal", domains=["fog"], images=100):
        ...     print(batch.domain, len(batch.images), batch.reset)
        fog-5 64 True
        fog-5 36 False
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"fata.stream takes what fata.data.open returns, not {dataset!r}.")
    if scenario not in SCENARIOS:
        raise DataError(
            f"unknown scenario {scenario!r}: choose one of {', '.join(SCENARIOS)}."
            f"{near(scenario, SCENARIOS)}"
        )
    if batch_size is None:
        batch_size = default_batch(scenario)
    given = {"severity": severity, "seed": seed, "batch_size": batch_size, "images": images}
    for name, value in given.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (name == "images" and value is None)):
            raise DataError(f"{name}={value!r}: must be a whole number.")
    if batch_size < 1 or (scenario == "bs1" and batch_size != 1):
        raise DataError(
            f"batch_size={batch_size}: {'bs1 is 1' if batch_size > 0 else 'at least 1'}."
        )
    if images is not None and images < 1:
        raise DataError(f"images={images}: must be at least 1, or None for all.")
    _, *known = inspect.signature(SCENARIOS[scenario]).parameters  # after the sampler
    if unknown := [name for name in options if name not in known]:
        raise DataError(
            f"{scenario} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}."
        )
    if isinstance(domains, str):
        domains = [domains]
    sampler = DomainSampler(dataset, domains, severity, seed, images)
    segments = list(SCENARIOS[scenario](sampler, **options))
    met = list(dict.fromkeys(domain for segment in segments for domain in segment.domains))
    place = {domain: number for number, domain in enumerate(met)}
    numbers = [np.array([place[domain] for domain in segment.domains]) for segment in segments]
    lengths = [len(segment.index) for segment in segments]
    return Stream(
        dataset,
        scenario,
        seed,
        batch_size,
        tuple(met),
        torch.from_numpy(
            np.concatenate([n[segment.place] for n, segment in zip(numbers, segments, strict=True)])
        ),
        torch.from_numpy(np.concatenate([segment.index for segment in segments])),
        tuple(np.cumsum([0, *lengths[:-1]]).tolist()),
        tuple(segment.reset for segment in segments),
    )


def replay(path: str | os.PathLike[str], dataset: Dataset) -> Stream:
    """A saved stream, over the same data."""
    meta, parts = _read(path)
    domains = tuple(Domain(*domain) for domain in meta["domains"])
    changed = [
        domain
        for domain, pictures in zip(domains, meta["pictures"], strict=True)
        if dataset.of(domain).digest != pictures
    ]
    if changed:
        raise DataError(
            f"{str(path)!r} was made for other data: {listed(map(str, changed), 4)} of "
            f"{dataset.spec} has other images than it had then."
        )
    return Stream(
        dataset,
        meta["scenario"],
        meta["seed"],
        meta["batch_size"],
        domains,
        parts["domain"],
        parts["index"],
        tuple(parts["starts"].tolist()),
        tuple(parts["resets"].tolist()),
    )


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and verify what `save` wrote."""
    if Path(path).is_dir():
        raise DataError(f"{str(path)!r} is a folder, not a stream.")
    try:
        with safe_open(Path(path), framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("meta", "{}"))
            parts = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise DataError(f"cannot read the stream {str(path)!r}: {error}") from error
    if meta.get("format") != FORMAT:
        raise DataError(f"{str(path)!r} is no stream that this version of fata wrote.")
    if meta.get("order") != digest(parts):
        raise DataError(f"the stream {str(path)!r} is damaged: it is not what was saved.")
    return meta, parts
