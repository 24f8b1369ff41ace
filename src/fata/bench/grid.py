"""A grid: models x data x domains x severities x scenarios x methods x seeds."""

from __future__ import annotations

import ast
import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fata._text import near
from fata.bench.cell import Cell
from fata.data import Dataset
from fata.data.scenarios import RESETTING, SCENARIOS
from fata.engine.build import SPEEDS
from fata.engine.rates import check_rate
from fata.methods import SPECS, parse
from fata.methods.base import CustomStep


class GridError(ValueError):
    """A grid that cannot be run."""


@dataclass(frozen=True)
class Grid:
    """What to compare.

    Args:
        models: names for `fata.zoo.load`, optionally with a protocol: `vit_base@sar`.
        data: specs for `fata.data.open`.
        methods: specs, optionally with fields: `eata+fata:sigma=0.5:lr=1e-3`; your own
            as `my_module:MyMethod`.
        scenarios: names for `fata.stream`, each with options: `label-shift:ratio=1000`.
        domains: corruptions or folders; None: the benchmark's 15, or all folders.
        severities: of the corruptions.
        seeds: the seeds; or their number, from 0 on.
        batch_size: None: each scenario's own.
        images: of each domain; None: all.
        jpeg: corruptions made on the fly are JPEG-compressed.
        fisher: data with clean images for EATA; None: those of `data`, if it has them.
        speed: `exact` or `fast`.
        guard: whether every method runs with a guard.
        window: images of a sliding window (`fata.Window`); None: each batch as it comes.
        reset_every: batches after which the source model is restored (RDumb); None: never. Methods
            that learn nothing, or restart at every image, run as they are.
    """

    models: tuple[str, ...]
    data: tuple[str, ...] = ("embedded",)
    methods: tuple[str, ...] = ("source", "norm", "tent", "tent+fata", "eata", "eata+fata")
    scenarios: tuple[str, ...] = ("normal",)
    domains: tuple[str, ...] | None = None
    severities: tuple[int, ...] = (5,)
    seeds: int | tuple[int, ...] = 1
    batch_size: int | None = None
    images: int | None = None
    jpeg: bool = False
    fisher: str | None = None
    speed: str = "exact"
    guard: bool = False
    window: int | None = None
    reset_every: int | None = None

    def cells(self, opened: Callable[[str], Dataset]) -> Iterator[Cell]:
        """Every cell; those of one model and domain follow each other, and those of one method."""
        seeds = range(self.seeds) if isinstance(self.seeds, int) else self.seeds
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise GridError(
                f"seeds={self.seeds!r}: give their number, at least 1, or a list of seeds, each "
                f"once and none below 0."
            )
        if self.window is not None and self.window < 1:
            raise GridError(f"window={self.window}: must be at least 1 image.")
        if self.reset_every is not None and self.reset_every < 1:
            raise GridError(f"reset_every={self.reset_every}: must be at least 1 batch.")
        for name in ("models", "data", "methods", "scenarios", "severities"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise GridError(f"{name}: give at least one, and each once.")
        if self.speed not in SPEEDS:
            raise GridError(f"speed={self.speed!r}: choose from {', '.join(SPEEDS)}.")
        methods = [(*_method(method), _drifts(method)) for method in self.methods]
        scenarios = [_scenario(scenario) for scenario in self.scenarios]
        for model, data, (scenario, options), severity in product(
            self.models, self.data, scenarios, self.severities
        ):
            names = tuple(d.name for d in opened(data).named(self.domains, severity))
            alone = scenario in RESETTING
            for domains in [(name,) for name in names] if alone else [names]:
                for (method, fields, learns), seed in product(methods, seeds):
                    yield Cell(
                        model, data, scenario, domains, severity, method, seed,
                        self.batch_size, self.images, fields, options, self.speed, self.guard,
                        self.window, self.reset_every if learns else None,
                    )  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """Fields of a `Grid`, from a YAML or TOML file with these keys."""
    if not path.exists():
        raise GridError(f"there is no file {str(path)!r}.")
    try:
        content = _parsed(path)
    except Exception as error:  # of whichever parser
        raise GridError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(content, Mapping):
        raise GridError(f"{str(path)!r}: expected keys such as models and methods.")
    known = {field.name: str(field.type) for field in dataclasses.fields(Grid)}
    if unknown := [name for name in content if name not in known]:
        raise GridError(
            f"{str(path)!r} has an unknown key {unknown[0]!r}: the keys are {', '.join(known)}."
            f"{near(str(unknown[0]), known)}"
        )
    return {name: _typed(path, name, known[name], value) for name, value in content.items()}


def _typed(path: Path, name: str, kind: str, value: Any) -> Any:
    """A value as the field takes it; one alone may stand for a list of one."""
    if value is None and kind.endswith("None"):
        return None
    scalar = {"int": int, "str": str, "bool": bool}[
        kind.removeprefix("tuple[").split()[0].strip(",")
    ]
    listed, several = isinstance(value, list), "tuple" in kind
    values = value if listed else [value]
    fine = all(type(one) is scalar for one in values)
    if fine and several and (listed or kind.startswith("tuple")):
        return tuple(values)
    if not fine or listed:
        many = "a list of " if several else ""
        raise GridError(f"{str(path)!r}: {name}: expected {many}{scalar.__name__}, got {value!r}.")
    return value


def _parsed(path: Path) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(path.read_text())
    if path.suffix == ".json":
        return json.loads(path.read_text())
    import yaml

    return yaml.safe_load(path.read_text())


def _method(text: str) -> tuple[str, dict[str, Any]]:
    """A spec and its fields, including `lr`; raises for fields that the method does not have.

    Your own method is `my_module:MyMethod`, followed by its fields.
    """
    module, _, rest = text.partition(":")
    own = rest and "=" not in rest.partition(":")[0] and module not in SPECS
    spec, fields = _with_fields(rest if own else text)
    spec = f"{module}:{spec}" if own else spec
    try:
        check_rate(fields.get("lr"))
        parse(spec, **{k: v for k, v in fields.items() if k not in ("lr", "params")})
    except (TypeError, ValueError) as error:
        raise GridError(f"method {text!r}: {error}") from error
    return spec, fields


def _drifts(text: str) -> bool:
    """Whether a method's state changes from batch to batch."""
    method, plus = parse(_method(text)[0])
    if isinstance(method, CustomStep):
        return not method.episodic
    return method.params is not None or plus is not None or method.gradient_free


def _scenario(text: str) -> tuple[str, dict[str, Any]]:
    name, options = _with_fields(text)
    if name not in SCENARIOS:
        raise GridError(
            f"unknown scenario {name!r}: choose from {', '.join(SCENARIOS)}.{near(name, SCENARIOS)}"
        )
    return name, options


def _with_fields(text: str) -> tuple[str, dict[str, Any]]:
    """`name:field=value:field=value` taken apart."""
    name, *parts = text.split(":")
    fields: dict[str, Any] = {}
    for part in parts:
        field, equals, value = part.partition("=")
        if not equals:
            raise GridError(f"{text!r}: expected {name}:field=value, got {part!r}.")
        try:
            fields[field] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            fields[field] = value
    return name, fields
