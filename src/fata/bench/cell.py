"""A cell of the grid: one model, one stream, one method with its fields, one seed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

import fata
from fata.adapter import Adapter, adapt
from fata.corruptions import BY_NAME
from fata.data import Dataset, Stream, stream
from fata.data.dataset import data_name
from fata.data.scenarios import default_batch
from fata.engine.fisher import FisherData
from fata.engine.rates import is_transformer_like, own_rate, rate
from fata.guard.policy import Guard
from fata.methods import describe, parse
from fata.zoo import Loaded

FISHER_IMAGES = 2000  # as in EATA


class Rate(NamedTuple):
    """The learning rate of a full batch."""

    value: float | None  # None: nothing is learned
    origin: str  # given, tuned (the model's own), paper, release, or the method's own


@dataclass(frozen=True)
class Cell:
    """What to measure, by names.

    Args:
        model: for `fata.zoo.load`, and `@sar` after it for that protocol.
        data: for `fata.data.open`.
        scenario: for `fata.stream`.
        domains: corruptions or folders, in order.
        severity: of the corruptions.
        method: a spec, such as `eata+fata`.
        fields: of the method, and `lr`; they override the model's own settings.
        seed: of the order and of the method's random draws.
        batch_size: None: the scenario's own.
        images: of each domain; None: all.
        options: of the scenario.
        speed: `exact` or `fast`.
        guard: whether the guard is on.
        window: images of a sliding window (`fata.Window`); None: each batch as it comes.
        reset_every: batches after which the source model is restored; None: never.
    """

    model: str
    data: str
    scenario: str
    domains: tuple[str, ...]
    severity: int
    method: str
    seed: int
    batch_size: int | None = None
    images: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    speed: str = "exact"
    guard: bool = False
    window: int | None = None
    reset_every: int | None = None

    def __str__(self) -> str:
        where = self.domains[0] if len(self.domains) == 1 else f"{len(self.domains)} domains"
        grade = f"-{self.severity}" if self.domains[0] in BY_NAME else ""
        more = "".join(f":{name}={value}" for name, value in self.fields.items())
        more += f" window={self.window}" if self.window else ""
        more += f" reset_every={self.reset_every}" if self.reset_every else ""
        more += " guarded" if self.guard else ""
        return f"{self.model} {self.scenario} {where}{grade} {self.method}{more} #{self.seed}"

    def settings(self, loaded: Loaded) -> dict[str, Any]:
        """Fields of the method and the learning rate: the model's own, overridden by the cell's."""
        return {**loaded.settings(self.method, self._rows), **self.fields}

    @property
    def _rows(self) -> int:
        """Images that a step sees."""
        return max(self.batch_size or default_batch(self.scenario), self.window or 1)

    def rate(self, loaded: Loaded) -> Rate:
        """The learning rate as a number, and where it comes from."""
        settings = self.settings(loaded)
        fields = {k: v for k, v in settings.items() if k not in ("lr", "params")}
        method, plus = parse(self.method, **fields)
        lr, vit = settings.get("lr", "paper"), is_transformer_like(loaded.model)
        if method.params is None and plus is None:
            return Rate(None, "")
        if not isinstance(lr, str):
            return Rate(float(lr), "given" if "lr" in self.fields else "tuned")
        own = own_rate(method, vit, self._rows) is not None
        return Rate(rate(lr, method, vit, self._rows), "method" if own else lr)

    def stream(self, dataset: Dataset) -> Stream:
        """The images, in order."""
        return stream(
            dataset,
            self.scenario,
            domains=self.domains,
            severity=self.severity,
            batch_size=self.batch_size,
            seed=self.seed,
            images=self.images,
            **self.options,
        )

    def adapter(
        self, loaded: Loaded, fisher: FisherData | None, group: ProcessGroup | None = None
    ) -> Adapter:
        """The model, ready to adapt; the ranks of a `group` share every batch."""
        settings = self.settings(loaded)
        if fisher is not None and self.wants_fisher(loaded):
            settings["fisher_data"] = fisher
        settings |= {"seed": self.seed, "speed": self.speed, "guard": self.guard}
        settings["reset_every"] = self.reset_every
        return adapt(loaded.model, self.method, group=group, **settings)

    def wants_fisher(self, loaded: Loaded) -> bool:
        """Whether the method has a penalty that needs clean images."""
        fields = {k: v for k, v in self.settings(loaded).items() if k not in ("lr", "params")}
        return parse(self.method, **fields)[0].wants_fisher

    def protocol(self, loaded: Loaded, dataset: Dataset, fisher: str | None) -> dict[str, Any]:
        """Everything that the result depends on; not when and where it is measured."""
        settings = self.settings(loaded)
        fields = {k: v for k, v in settings.items() if k not in ("lr", "params")}
        method, plus = parse(self.method, **fields)
        order = self.stream(dataset)
        return {
            "model": self.model,
            "weights": {"tag": loaded.weights.tag, "sha256": loaded.weights.sha256},
            "preprocess": dataclasses.asdict(loaded.preprocess),
            "classes": len(dataset.mask or range(loaded.classes)),
            "data": {
                **dataset.provenance,
                "data": data_name(self.data),
                "images": {str(d): dataset.of(d).digest for d in order.domains},
            },
            "scenario": {"name": self.scenario, **self.options},
            "domains": [str(domain) for domain in order.domains],
            "severity": self.severity,
            "batch_size": order.batch_size,
            **({"window": self.window} if self.window else {}),
            **({"reset_every": self.reset_every} if self.reset_every else {}),
            "length": order.images,
            "images": self.images,
            "seed": self.seed,
            "method": self.method,
            "host": describe(method),
            "plus": describe(plus) if plus else None,
            "lr": settings.get("lr", "paper"),
            "params": settings.get("params"),
            "speed": self.speed,
            "guard": dataclasses.asdict(Guard()) if self.guard else None,
            "fisher": fisher if method.wants_fisher else None,
            "fata": fata.__version__,
        }


def key(protocol: Mapping[str, Any]) -> str:
    """The cell's name in the store: equal for equal protocols."""
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:32]


def circumstances(device: torch.device) -> dict[str, str]:
    """The environment of a result: versions and device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    known = ("torch", "torchvision", "timm", "numpy")
    libraries = {name: version(name) for name in known if find_spec(name)}
    return {
        "python": platform.python_version(),
        **libraries,
        "device": f"{device.type}: {name}",
        "matrix products": torch.get_float32_matmul_precision(),
    }
