"""What cells on Ray share: models and decoded images, once in the object store of each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
import torch
from torch import Tensor

from fata.bench.cell import FISHER_IMAGES, Cell
from fata.bench.run.image_cache import indices_used
from fata.bench.run.runner import CellRunner
from fata.data import CLEAN, Dataset, Domain, stream
from fata.data.dataset import ImageFiles, ImageSource
from fata.data.errors import Damaged
from fata.data.serve import Broken, intact_rows, read
from fata.zoo import Loaded

if TYPE_CHECKING:
    from fata.bench.run.local import Task

_BATCH = 250
Unit = tuple[Dataset, Domain]  # images that are decoded together


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """Some images of another source, decoded."""

    on_disk = False
    row: np.ndarray  # of each image: its row in `pixels`, or -1
    pixels: np.ndarray  # (N, 3, H, W), bytes; the node's shared memory, read-only
    broken: Broken  # why an image cannot be read, by index
    labels: Tensor
    digest: str

    def read(self, index: int) -> Tensor:
        """One image, (3, H, W), bytes."""
        if index in self.broken:
            raise Damaged(self.broken[index])
        return torch.from_numpy(self.pixels[self.row[index]].copy())

    def name(self, index: int) -> str:
        """Its index, for errors."""
        return f"image {index}"


def decode(source: ImageSource, indices: Tensor, digest: str, workers: int | None) -> DecodedImages:
    """Read some images of a source; broken ones are listed."""
    parts = torch.split(indices, _BATCH)
    rows = ([(0, index) for index in part.tolist()] for part in parts)
    decoded = read([source], rows, len(parts), torch.device("cpu"), workers)
    row = np.full(len(source.labels), -1)
    pixels = np.empty(0, np.uint8)
    broken: Broken = {}
    end = 0
    for part, (some, wrong) in zip(parts, decoded, strict=True):
        broken.update({int(part[row]): why for row, why in wrong.items()})
        intact = part[intact_rows(wrong, len(part))]
        if not len(intact):
            continue
        if not end:
            pixels = np.empty((len(indices), *some.shape[1:]), np.uint8)
        pixels[end : end + len(intact)] = some.numpy()
        row[intact.numpy()] = np.arange(end, end + len(intact))
        end += len(intact)
    return DecodedImages(row, pixels[:end], broken, source.labels, digest)


class CellInputs(NamedTuple):
    """What a worker needs for a cell, apart from the images."""

    model: tuple[Any]  # a reference; in a tuple, so that Ray fetches it only if asked
    datasets: Mapping[str, tuple[int, Dataset]]  # by spec: its number, and all but its images
    domains: Sequence[tuple[str, Domain]]  # spec and domain of the images that come along


class SharedObjects:
    """Puts models and images into the object store, and releases them after their last cell.

    Args:
        tasks: all cells that will use them.
        runner: loads models and opens data, in this process.
        capacity: bytes. Images of a domain that need more are decoded by the workers themselves.
    """

    def __init__(self, tasks: Sequence[Task], runner: CellRunner, capacity: int) -> None:
        self._runner, self._capacity = runner, capacity
        self._decode = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(decode)
        self._indices: dict[Unit, list[Tensor]] = {}
        self._sizes: dict[Dataset, int] = {}
        self._needs: dict[str, tuple[dict[str, Dataset], dict[tuple[str, Domain], Unit]]] = {}
        self._uses: Counter[Any] = Counter()
        self._models: dict[str, Any] = {}
        self._images: dict[Unit, Any] = {}
        self._numbers: dict[Dataset, int] = {}
        for task in tasks:
            self._plan(task)

    def inputs(self, task: Task) -> tuple[CellInputs, list[Any]]:
        """For a cell: its inputs, and references to its images."""
        name = task.cell.model
        if name not in self._models:
            self._models[name] = ray.put(self._runner.model(name))
        datasets, units = self._needs[task.key]
        sent = {
            spec: (self._numbers.setdefault(dataset, len(self._numbers)), _without_images(dataset))
            for spec, dataset in datasets.items()
        }
        sources = [self._put(unit) for unit in units.values()]
        return CellInputs((self._models[name],), sent, list(units)), sources

    def release(self, task: Task) -> None:
        """A cell is over."""
        _, units = self._needs.pop(task.key)
        shared: tuple[tuple[dict[Any, Any], Iterable[Any]], ...] = (
            (self._models, (task.cell.model,)),
            (self._images, units.values()),
        )
        for held, names in shared:
            for name in names:
                self._uses[name] -= 1
                if not self._uses[name]:
                    held.pop(name, None)

    def renew(self, task: Task) -> None:
        """Images of a cell were lost: decode them again at the next request."""
        for unit in self._needs[task.key][1].values():
            self._images.pop(unit, None)

    def _plan(self, task: Task) -> None:
        cell, runner = task.cell, self._runner
        dataset = runner.data(cell.data, cell.model)
        datasets = {cell.data: dataset}
        units: dict[tuple[str, Domain], Unit] = {}
        streams = [(cell.data, cell.stream(dataset))]
        if (clean := runner.clean(cell)) is not None:
            spec = runner.fisher or cell.data
            datasets[spec] = clean
            streams.append((spec, stream(clean, domains=[CLEAN], images=FISHER_IMAGES)))
        for spec, order in streams:
            self._sizes[order.dataset] = runner.model(cell.model).preprocess.size
            for number, domain in enumerate(order.domains):
                at = Domain(CLEAN) if order.dataset.made else domain  # workers corrupt them
                unit = units[spec, at] = (order.dataset, at)
                self._indices.setdefault(unit, []).append(indices_used(order, number))
        self._needs[task.key] = (datasets, units)
        self._uses.update((cell.model, *units.values()))

    def _put(self, unit: Unit) -> Any:
        if unit not in self._images:
            dataset, domain = unit
            source = dataset.of(domain)
            indices = torch.from_numpy(np.unique(torch.cat(self._indices[unit]).numpy()))
            if not isinstance(source, ImageFiles):
                self._images[unit] = ray.put(decode(source, indices, source.digest, 0))
            elif len(indices) * 3 * self._sizes[dataset] ** 2 > self._capacity:
                self._images[unit] = ray.put(source)
            else:
                workers = self._runner.workers
                self._images[unit] = self._decode.remote(source, indices, source.digest, workers)
        return self._images[unit]


def _without_images(dataset: Dataset) -> Dataset:
    return replace(dataset, source=_not_sent, _opened={})


def _not_sent(domain: Domain) -> ImageSource:
    raise KeyError(f"the images of {domain} were not sent along")


@dataclass
class RayCellRunner(CellRunner):
    """Runs cells on a Ray worker: models and images come out of the object store."""

    _known: dict[int, Dataset] = field(default_factory=dict, init=False, repr=False)
    _here: dict[str, Dataset] = field(default_factory=dict, init=False, repr=False)

    def load(self, cell: Cell, inputs: CellInputs, sources: Sequence[ImageSource]) -> None:
        """Take what a cell needs, and release the images of the last one."""
        if cell.model not in self._models:
            self._models.clear()
            loaded: Loaded = ray.get(inputs.model[0])
            loaded.model.to(self.device)
            self._models[cell.model] = loaded
        self._here = {
            spec: self._known.setdefault(number, dataset)
            for spec, (number, dataset) in inputs.datasets.items()
        }
        for dataset in self._known.values():
            dataset.hold({})
        came: dict[Dataset, dict[Domain, ImageSource]] = {}
        for (spec, domain), source in zip(inputs.domains, sources, strict=True):
            dataset = self._here[spec]
            for met in dataset.domains if dataset.made else (domain,):
                came.setdefault(dataset, {})[met] = source
        for dataset, held in came.items():
            dataset.hold(held)

    def model(self, name: str) -> Loaded:
        """The model that came with the cell."""
        return self._models[name]

    def data(self, spec: str, model: str) -> Dataset:
        """The data that came with the cell."""
        return self._here[spec]
