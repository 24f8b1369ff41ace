"""What cells on Ray share: models and decoded pictures, once in the object store of each node."""

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
from fata.bench.run.pictures import wanted
from fata.bench.run.runner import Workshop
from fata.data import CLEAN, Dataset, Domain, stream
from fata.data.dataset import Files, Pictures
from fata.data.errors import Damaged
from fata.data.serve import Broken, read, whole_rows
from fata.zoo import Loaded

if TYPE_CHECKING:
    from fata.bench.run.local import Task

_BATCH = 250
Unit = tuple[Dataset, Domain]  # pictures that are decoded together


@dataclass(frozen=True, eq=False)
class Kept:
    """Pictures of another source, decoded: those that are wanted."""

    row: np.ndarray  # of each picture: where it lies in `pixels`; -1: it does not
    pixels: np.ndarray  # (N, 3, H, W), bytes; the node's own memory, for reading only
    broken: Broken  # what is wrong with some, by number
    labels: Tensor
    digest: str

    def read(self, index: int) -> Tensor:
        """One picture, (3, H, W), bytes."""
        if index in self.broken:
            raise Damaged(self.broken[index])
        return torch.from_numpy(self.pixels[self.row[index]].copy())

    def name(self, index: int) -> str:
        """Its number."""
        return f"picture {index}"


def decode(source: Pictures, numbers: Tensor, digest: str, workers: int | None) -> Kept:
    """Read some pictures of a source, and what is wrong with the others."""
    parts = torch.split(numbers, _BATCH)
    rows = ([(0, index) for index in part.tolist()] for part in parts)
    pictures = read([source], rows, len(parts), torch.device("cpu"), workers)
    row = np.full(len(source.labels), -1)
    pixels = np.empty(0, np.uint8)
    broken: Broken = {}
    end = 0
    for part, (some, wrong) in zip(parts, pictures, strict=True):
        broken.update({int(part[row]): why for row, why in wrong.items()})
        whole = part[whole_rows(wrong, len(part))]
        if not len(whole):
            continue
        if not end:
            pixels = np.empty((len(numbers), *some.shape[1:]), np.uint8)
        pixels[end : end + len(whole)] = some.numpy()
        row[whole.numpy()] = np.arange(end, end + len(whole))
        end += len(whole)
    return Kept(row, pixels[:end], broken, source.labels, digest)


class Kit(NamedTuple):
    """What a worker needs for a cell, beside the pictures."""

    model: tuple[Any]  # a reference, in a tuple: who has the model does not fetch it
    datasets: Mapping[str, tuple[int, Dataset]]  # by spec: its number, and all but its pictures
    places: Sequence[tuple[str, Domain]]  # of the pictures that come along


class Larder:
    """Puts into the object store what is wanted, and lets it go after its last cell.

    Args:
        tasks: all that will ask.
        workshop: loads models and opens data, here.
        room: bytes. Pictures that need more are decoded by whoever meets them, as they come.
    """

    def __init__(self, tasks: Sequence[Task], workshop: Workshop, room: int) -> None:
        self._workshop, self._room = workshop, room
        self._decode = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(decode)
        self._numbers: dict[Unit, list[Tensor]] = {}
        self._sizes: dict[Dataset, int] = {}
        self._needs: dict[str, tuple[dict[str, Dataset], dict[tuple[str, Domain], Unit]]] = {}
        self._asking: Counter[Any] = Counter()
        self._models: dict[str, Any] = {}
        self._pictures: dict[Unit, Any] = {}
        self._known: dict[Dataset, int] = {}
        for task in tasks:
            self._plan(task)

    def serve(self, task: Task) -> tuple[Kit, list[Any]]:
        """For a cell: its kit, and references to its pictures."""
        name = task.cell.model
        if name not in self._models:
            self._models[name] = ray.put(self._workshop.model(name))
        datasets, places = self._needs[task.key]
        bare = {
            spec: (self._known.setdefault(dataset, len(self._known)), _bare(dataset))
            for spec, dataset in datasets.items()
        }
        pictures = [self._fetch(unit) for unit in places.values()]
        return Kit((self._models[name],), bare, list(places)), pictures

    def release(self, task: Task) -> None:
        """A cell is over."""
        _, places = self._needs.pop(task.key)
        shared: tuple[tuple[dict[Any, Any], Iterable[Any]], ...] = (
            (self._models, (task.cell.model,)),
            (self._pictures, places.values()),
        )
        for held, names in shared:
            for name in names:
                self._asking[name] -= 1
                if not self._asking[name]:
                    held.pop(name, None)

    def renew(self, task: Task) -> None:
        """Pictures of a cell were lost: decode them again when they are asked for."""
        for unit in self._needs[task.key][1].values():
            self._pictures.pop(unit, None)

    def _plan(self, task: Task) -> None:
        cell, workshop = task.cell, self._workshop
        dataset = workshop.data(cell.data, cell.model)
        datasets = {cell.data: dataset}
        places: dict[tuple[str, Domain], Unit] = {}
        streams = [(cell.data, cell.stream(dataset))]
        if (clean := workshop.clean(cell)) is not None:
            spec = workshop.fisher or cell.data
            datasets[spec] = clean
            streams.append((spec, stream(clean, domains=[CLEAN], images=FISHER_IMAGES)))
        for spec, order in streams:
            self._sizes[order.dataset] = workshop.model(cell.model).preprocess.size
            for number, domain in enumerate(order.domains):
                at = Domain(CLEAN) if order.dataset.made else domain  # corrupted by who meets them
                unit = places[spec, at] = (order.dataset, at)
                self._numbers.setdefault(unit, []).append(wanted(order, number))
        self._needs[task.key] = (datasets, places)
        self._asking.update((cell.model, *places.values()))

    def _fetch(self, unit: Unit) -> Any:
        if unit not in self._pictures:
            dataset, domain = unit
            source = dataset.of(domain)
            numbers = torch.from_numpy(np.unique(torch.cat(self._numbers[unit]).numpy()))
            if not isinstance(source, Files):
                self._pictures[unit] = ray.put(decode(source, numbers, source.digest, 0))
            elif len(numbers) * 3 * self._sizes[dataset] ** 2 > self._room:
                self._pictures[unit] = ray.put(source)
            else:
                workers = self._workshop.workers
                self._pictures[unit] = self._decode.remote(source, numbers, source.digest, workers)
        return self._pictures[unit]


def _bare(dataset: Dataset) -> Dataset:
    return replace(dataset, pictures=_nowhere, _opened={})


def _nowhere(domain: Domain) -> Pictures:
    raise KeyError(f"the pictures of {domain} were not sent along")


@dataclass
class Stocked(Workshop):
    """A workshop on Ray: models and pictures come out of the object store."""

    _known: dict[int, Dataset] = field(default_factory=dict, init=False, repr=False)
    _here: dict[str, Dataset] = field(default_factory=dict, init=False, repr=False)

    def stock(self, cell: Cell, kit: Kit, pictures: Sequence[Pictures]) -> None:
        """Have at hand what a cell needs; pictures of the last one are let go."""
        if cell.model not in self._models:
            self._models.clear()
            loaded: Loaded = ray.get(kit.model[0])
            loaded.model.to(self.device)
            self._models[cell.model] = loaded
        self._here = {
            spec: self._known.setdefault(number, dataset)
            for spec, (number, dataset) in kit.datasets.items()
        }
        for dataset in self._known.values():
            dataset.hold({})
        came: dict[Dataset, dict[Domain, Pictures]] = {}
        for (spec, domain), some in zip(kit.places, pictures, strict=True):
            dataset = self._here[spec]
            for met in dataset.domains if dataset.made else (domain,):
                came.setdefault(dataset, {})[met] = some
        for dataset, held in came.items():
            dataset.hold(held)

    def model(self, name: str) -> Loaded:
        """The one that the cell brought."""
        return self._models[name]

    def data(self, spec: str, model: str) -> Dataset:
        """What the cell brought."""
        return self._here[spec]
