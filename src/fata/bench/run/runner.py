"""Runs cells one after another; they share the model, the data and EATA's Fisher information."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from fata import zoo
from fata.adapter import Adapter
from fata.bench.cell import FISHER_IMAGES, Cell
from fata.bench.cost import Macs, passes
from fata.bench.run.image_cache import ImageCache, free_memory
from fata.bench.run.measure import Tick, measure
from fata.data import CLEAN, DataError, Dataset, Domain, Stream, open, serve, stream
from fata.data.dataset import ImageFiles
from fata.data.serve import Decoded
from fata.guard.policy import log
from fata.network.norms import batch_norms
from fata.window import Window
from fata.zoo import Loaded

_WITH_PROTOCOL = re.compile(r"(?P<name>.+)@(?P<protocol>\w+)")


@dataclass
class CellRunner:
    """Loads each thing once, and runs cells one after another.

    Args:
        device: where the models are.
        jpeg: corruptions made on the fly are JPEG-compressed.
        fisher: data with clean images for EATA; None: the cell's own, if it has them.
        workers: processes that decode images; None: a few.
        skip_damaged: leave damaged images out, and count them.
        share: of the device's free memory, for cached images.
        group: ranks that share every batch; each has its own runner and runs the same cells.
    """

    device: str = "cpu"
    jpeg: bool = False
    fisher: str | None = None
    workers: int | None = None
    skip_damaged: bool = False
    share: float = 0.25
    group: ProcessGroup | None = None
    _models: dict[str, Loaded] = field(default_factory=dict, init=False, repr=False)
    _data: dict[tuple[Any, ...], Dataset] = field(default_factory=dict, init=False, repr=False)
    _fishers: dict[tuple[Any, ...], dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    _macs: dict[tuple[Any, ...], tuple[Macs, Macs]] = field(
        default_factory=dict, init=False, repr=False
    )
    _cache: ImageCache | None = field(default=None, init=False, repr=False)
    _prefetched: tuple[Cell, Future[Decoded]] | None = field(default=None, init=False, repr=False)
    _last: tuple[tuple[Any, ...], Adapter] | None = field(default=None, init=False, repr=False)
    _restriction: RemovableHandle | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """On a GPU matrix products are in TF32, as convolutions are by default."""
        if self.device.startswith("cuda"):
            torch.set_float32_matmul_precision("high")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Settings of the process are made in the other process too."""
        self.__dict__.update(state)
        self.__post_init__()

    def model(self, name: str) -> Loaded:
        """A model on the device, one at a time; `vit_base@sar` names its protocol."""
        if name not in self._models:
            self._unwrap()
            self._models.clear()
            loaded = self._load(name)
            loaded.model.to(self.device)
            self._models[name] = loaded
        return self._models[name]

    def _load(self, name: str) -> Loaded:
        asked = _WITH_PROTOCOL.fullmatch(name)
        return zoo.load(asked["name"], protocol=asked["protocol"]) if asked else zoo.load(name)

    def data(self, spec: str, model: str) -> Dataset:
        """A data set with a model's preprocessing; models with the same one share it."""
        loaded = self.model(model)
        at = (spec, loaded.preprocess, loaded.classes, loaded.labels)
        if at not in self._data:
            jpeg = self.jpeg and open(spec).made
            self._data[at] = open(spec, fit=loaded, jpeg=jpeg)
        return self._data[at]

    def protocol(self, cell: Cell) -> dict[str, Any]:
        """All that the cell's result depends on."""
        clean = self.clean(cell)
        fisher = None
        if clean is not None:
            fisher = f"{FISHER_IMAGES} of {clean.of(Domain(CLEAN)).digest}, batches of 64"
        return cell.protocol(self.model(cell.model), self.data(cell.data, cell.model), fisher)

    def run(self, cell: Cell, tick: Tick, following: Cell | None = None) -> dict[str, Any]:
        """Measure a cell; afterwards the model has its source weights again.

        Image files of the `following` cell are decoded meanwhile.
        """
        loaded = self.model(cell.model)
        stream = cell.stream(self.data(cell.data, cell.model))
        if self._prefetched is not None and self._prefetched[0] == cell:
            decoded = self._prefetched[1].result()
        else:
            decoded = self._begin(cell, stream)()
        self._prefetched = None
        if following is not None and following.model == cell.model:
            self._prefetch(following)
        device = torch.device(self.device)
        adapter = self._adapter(cell, loaded)
        macs = self.macs(cell.model, adapter)
        level = log.level
        log.setLevel(logging.ERROR)  # what the guard did is in the results
        try:
            batches = serve.batches(stream, decoded, device, self.skip_damaged)
            window = Window(adapter, cell.window) if cell.window else None
            result = measure(adapter, loaded, stream, batches, device, macs, tick, window)
            return {**result, **self._settings(cell, loaded)}
        finally:
            log.setLevel(level)
            adapter.reset()
            if cell.speed == "exact":
                self._unwrap()

    def _settings(self, cell: Cell, loaded: Loaded) -> dict[str, Any]:
        """What a table tells of a cell besides its protocol."""
        rate = cell.rate(loaded)
        return {
            "lr": rate.value,
            "lr_origin": rate.origin,
            "given": sorted(cell.fields),
            "batch_norm": self.has_batch_norm(cell.model),
        }

    def macs(self, model: str, adapter: Adapter) -> tuple[Macs, Macs]:
        """MACs of a pass over a model, and over the tail behind an adapter's layer; once."""
        learned = frozenset(n for n, p in adapter.model.named_parameters() if p.requires_grad)
        at = (model, adapter.layer, learned)
        if at not in self._macs:
            size = self.model(model).preprocess.size
            self._macs[at] = passes(adapter, torch.rand(1, 3, size, size, device=self.device))
        return self._macs[at]

    def _adapter(self, cell: Cell, loaded: Loaded) -> Adapter:
        """A new one; a fast cell takes the last one if it has the same settings: it is captured."""
        settings = repr(sorted(cell.settings(loaded).items()))
        clean, data = self.clean(cell), self.data(cell.data, cell.model)
        at = (
            cell.model,
            cell.method,
            settings,
            cell.guard,
            cell.reset_every,
            clean.spec if clean is not None else None,
            data.mask,
        )
        if self._last is None or self._last[0] != at or cell.speed == "exact":
            self._unwrap()
            self._restriction = data.restrict(loaded.model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # no Fisher: that is in the protocol
                made = cell.adapter(loaded, self._information(cell), self.group)
            self._last = (at, made)
        adapter = self._last[1]
        adapter.reset(cell.seed)
        return adapter

    def _unwrap(self) -> None:
        """Remove the adapter and the mask from the model."""
        if self._last is not None:
            self._last[1].unwrap()
            self._last = None
        if self._restriction is not None:
            self._restriction.remove()
            self._restriction = None

    def _begin(self, cell: Cell, stream: Stream, prefetch: bool = False) -> Callable[[], Decoded]:
        if self._cache is None:
            self._cache = ImageCache(int(self.share * free_memory(torch.device(self.device))))
        size = self.model(cell.model).preprocess.size
        return self._cache.begin(stream, size, torch.device(self.device), self.workers, prefetch)

    def _prefetch(self, cell: Cell) -> None:
        """Decode the images of a cell while another cell with other images runs."""
        stream = cell.stream(self.data(cell.data, cell.model))
        if self._cache is not None and self._cache.is_filling(stream):
            return
        if any(isinstance(stream.dataset.of(domain), ImageFiles) for domain in stream.domains):
            self._prefetched = (cell, _in_thread(self._begin(cell, stream, prefetch=True)))

    def has_batch_norm(self, model: str) -> bool:
        """Whether a model's rows share statistics."""
        return bool(batch_norms(self.model(model).model))

    def lacks_fisher(self, cell: Cell) -> bool:
        """Whether the method has a Fisher penalty, but no clean images to compute it from."""
        return cell.wants_fisher(self.model(cell.model)) and self.clean(cell) is None

    def clean(self, cell: Cell) -> Dataset | None:
        """The data with clean images for EATA's penalty, if there is any."""
        if not cell.wants_fisher(self.model(cell.model)):
            return None
        dataset = self.data(self.fisher or cell.data, cell.model)
        if Domain(CLEAN) in dataset.domains:
            return dataset
        if self.fisher is not None:
            raise DataError(f"{self.fisher} has no clean images for EATA's Fisher information.")
        return None

    def _information(self, cell: Cell) -> dict[str, Tensor] | None:
        """EATA's Fisher information of the adapted parameters, computed once for each mask."""
        clean = self.clean(cell)
        if clean is None:
            return None
        loaded = self.model(cell.model)
        mask = self.data(cell.data, cell.model).mask
        at = (cell.model, clean.spec, repr(cell.settings(loaded).get("params")), mask)
        if at not in self._fishers:
            some = stream(clean, domains=[CLEAN], images=FISHER_IMAGES)
            batches = (loaded.preprocess.normalise(b.images) for b in some.serve(self.device))
            adapter = cell.adapter(loaded, batches)
            self._fishers[at] = adapter.fisher or {}
            adapter.unwrap()
        return self._fishers[at]


def _in_thread(work: Callable[[], Decoded]) -> Future[Decoded]:
    """In a daemon thread, which unlike a pool's does not delay the end of the process."""
    outcome: Future[Decoded] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome
