"""What the cells of one process share: the model, the data, EATA's Fisher information."""

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

from fata import zoo
from fata.adapter import Adapter
from fata.bench.cell import FISHER_IMAGES, Cell
from fata.bench.cost import Macs, passes
from fata.bench.run.measure import Tick, measure
from fata.bench.run.pictures import Shelf, free_memory
from fata.data import CLEAN, DataError, Dataset, Domain, Stream, open, serve, stream
from fata.data.dataset import Files
from fata.data.serve import Decoded
from fata.guard.policy import log
from fata.zoo import Loaded

_WITH_PROTOCOL = re.compile(r"(?P<name>.+)@(?P<protocol>\w+)")


@dataclass
class Workshop:
    """Loads each thing once, and runs cells one after another.

    Args:
        device: where the models are.
        jpeg: corruptions made on the fly go through JPEG.
        fisher: data with clean images for EATA; None: the cell's own, where they are there.
        workers: processes that decode pictures; None: a few.
        skip_damaged: leave damaged pictures out, and count them.
        share: of the device's free memory, for pictures that several cells meet.
        group: ranks that have a share of every batch each; every one has a workshop and runs the
            same cells.
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
    _fishers: dict[tuple[str, ...], dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    _macs: dict[tuple[Any, ...], tuple[Macs, Macs]] = field(
        default_factory=dict, init=False, repr=False
    )
    _shelf: Shelf | None = field(default=None, init=False, repr=False)
    _ahead: tuple[Cell, Future[Decoded]] | None = field(default=None, init=False, repr=False)
    _last: tuple[tuple[Any, ...], Adapter] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """On a GPU matrix products are in TF32, as convolutions are by default."""
        if self.device.startswith("cuda"):
            torch.set_float32_matmul_precision("high")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, what is set for a process is set there too."""
        self.__dict__.update(state)
        self.__post_init__()

    def model(self, name: str) -> Loaded:
        """A model, on the device; one at a time. `vit_base@sar`: by that protocol."""
        if name not in self._models:
            self._leave()
            self._models.clear()
            loaded = self._load(name)
            loaded.model.to(self.device)
            self._models[name] = loaded
        return self._models[name]

    def _load(self, name: str) -> Loaded:
        asked = _WITH_PROTOCOL.fullmatch(name)
        return zoo.load(asked["name"], protocol=asked["protocol"]) if asked else zoo.load(name)

    def data(self, spec: str, model: str) -> Dataset:
        """A data set, with the pictures that a model takes; models alike share it."""
        loaded = self.model(model)
        at = (spec, loaded.preprocess, loaded.classes)
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
        """Measure a cell; the model is its source again afterwards.

        The pictures of the `following` one are decoded meanwhile, where they are files.
        """
        loaded = self.model(cell.model)
        stream = cell.stream(self.data(cell.data, cell.model))
        if self._ahead is not None and self._ahead[0] == cell:
            decoded = self._ahead[1].result()
        else:
            decoded = self._begin(cell, stream)()
        self._ahead = None
        if following is not None and following.model == cell.model:
            self._look_ahead(following)
        device = torch.device(self.device)
        adapter = self._adapter(cell, loaded)
        macs = self.macs(cell.model, adapter)
        level = log.level
        log.setLevel(logging.ERROR)  # what the guard did is in the results
        try:
            batches = serve.batches(stream, decoded, device, self.skip_damaged)
            return measure(adapter, loaded, stream, batches, device, macs, tick)
        finally:
            log.setLevel(level)
            adapter.reset()
            if cell.speed == "exact":
                self._leave()

    def macs(self, model: str, adapter: Adapter) -> tuple[Macs, Macs]:
        """What a pass over a model takes, and over the tail behind an adapter's layer; once."""
        learned = frozenset(n for n, p in adapter.model.named_parameters() if p.requires_grad)
        at = (model, adapter.layer, learned)
        if at not in self._macs:
            size = self.model(model).preprocess.size
            self._macs[at] = passes(adapter, torch.rand(1, 3, size, size, device=self.device))
        return self._macs[at]

    def _adapter(self, cell: Cell, loaded: Loaded) -> Adapter:
        """A new one; of a fast cell the last one's, if it was alike: it has recorded its passes."""
        settings = repr(sorted(cell.settings(loaded).items()))
        clean = self.clean(cell)
        at = (cell.model, cell.method, settings, cell.guard, clean and clean.spec)
        if self._last is None or self._last[0] != at or cell.speed == "exact":
            self._leave()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # no Fisher: that is in the protocol
                made = cell.adapter(loaded, self._information(cell), self.group)
            self._last = (at, made)
        adapter = self._last[1]
        adapter.reset(cell.seed)
        return adapter

    def _leave(self) -> None:
        """The model without an adapter."""
        if self._last is not None:
            self._last[1].unwrap()
            self._last = None

    def _begin(self, cell: Cell, stream: Stream, ahead: bool = False) -> Callable[[], Decoded]:
        if self._shelf is None:
            self._shelf = Shelf(int(self.share * free_memory(torch.device(self.device))))
        size = self.model(cell.model).preprocess.size
        return self._shelf.begin(stream, size, torch.device(self.device), self.workers, ahead)

    def _look_ahead(self, cell: Cell) -> None:
        """Decode what a cell will meet, while another one runs that meets other pictures."""
        stream = cell.stream(self.data(cell.data, cell.model))
        if self._shelf is not None and self._shelf.coming(stream):
            return
        if any(isinstance(stream.dataset.of(domain), Files) for domain in stream.domains):
            self._ahead = (cell, _aside(self._begin(cell, stream, ahead=True)))

    def lacks_fisher(self, cell: Cell) -> bool:
        """Whether the method has a penalty, but nothing to compute it from."""
        return cell.wants_fisher(self.model(cell.model)) and self.clean(cell) is None

    def clean(self, cell: Cell) -> Dataset | None:
        """Where clean images for EATA's penalty are, if anywhere."""
        if not cell.wants_fisher(self.model(cell.model)):
            return None
        dataset = self.data(self.fisher or cell.data, cell.model)
        if Domain(CLEAN) in dataset.domains:
            return dataset
        if self.fisher is not None:
            raise DataError(f"{self.fisher} has no clean images for EATA's Fisher information.")
        return None

    def _information(self, cell: Cell) -> dict[str, Tensor] | None:
        """EATA's Fisher information of what adapts of a model, computed once."""
        clean = self.clean(cell)
        if clean is None:
            return None
        loaded = self.model(cell.model)
        at = (cell.model, clean.spec, repr(cell.settings(loaded).get("params")))
        if at not in self._fishers:
            some = stream(clean, domains=[CLEAN], images=FISHER_IMAGES)
            batches = (loaded.preprocess.normalise(b.images) for b in some.serve(self.device))
            adapter = cell.adapter(loaded, batches)
            self._fishers[at] = adapter.fisher or {}
            adapter.unwrap()
        return self._fishers[at]


def _aside(work: Callable[[], Decoded]) -> Future[Decoded]:
    """In a thread of its own that, unlike a pool's, does not hold up the end of the process."""
    outcome: Future[Decoded] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome
