"""The contents of a data set, and whether every image can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fata.data import folders, serve
from fata.data.dataset import Dataset, Domain, ImageFiles

_BATCH = 64


class DomainSize(NamedTuple):
    """Domains of one name."""

    name: str
    severities: tuple[int, ...]
    images: int  # of all severities together


def domain_sizes(dataset: Dataset) -> list[DomainSize]:
    """Number of images by the name of the domain."""
    table: dict[str, DomainSize] = {}
    for name, severity in dataset.stored:
        images = len(dataset.of(Domain(name, severity)).labels)
        before = table.get(name, DomainSize(name, (), 0))
        grades = () if severity is None else (severity,)
        table[name] = DomainSize(name, before.severities + grades, before.images + images)
    return list(table.values())


def ignored_files(dataset: Dataset) -> list[str]:
    """Files and folders among the images that are not read."""
    sources = (dataset.of(domain) for domain in dataset.stored)
    return [
        path
        for source in sources
        if isinstance(source, ImageFiles)
        for path in folders.ignored_files(source)
    ]


def read_all(dataset: Dataset, workers: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """Read every image; yields the size of each batch and its errors."""
    sources = [dataset.of(domain) for domain in dataset.stored]
    spans = [
        (place, range(first, min(first + _BATCH, len(source.labels))))
        for place, source in enumerate(sources)
        for first in range(0, len(source.labels), _BATCH)
    ]
    rows = ([(place, index) for index in span] for place, span in spans)
    decoded = serve.read(sources, rows, len(spans), torch.device("cpu"), workers)
    for (_, span), (_, broken) in zip(spans, decoded, strict=True):
        yield len(span), list(broken.values())
