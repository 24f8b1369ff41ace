"""Every method by name. A new one is a file here and a line in `METHODS`; or it stays outside."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from fata._text import near
from fata.methods.base import Method
from fata.methods.cotta import Cotta
from fata.methods.deyo import Deyo
from fata.methods.eata import Eata
from fata.methods.external import external
from fata.methods.fata import Fata
from fata.methods.memo import Memo
from fata.methods.nctta import Nctta
from fata.methods.neo import Neo
from fata.methods.roid import Roid
from fata.methods.sar import Sar
from fata.methods.source import Norm, Source
from fata.methods.tent import Tent
from fata.methods.zerosiam import Zerosiam

__all__ = [
    "HOSTS",
    "METHODS",
    "SPECS",
    "Cotta",
    "Deyo",
    "Eata",
    "Memo",
    "Nctta",
    "Neo",
    "Norm",
    "Roid",
    "Sar",
    "Source",
    "Tent",
    "Zerosiam",
    "describe",
    "parse",
    "spec_of",
]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (Source, Norm, Tent, Eata, Sar, Deyo, Roid, Zerosiam, Nctta, Neo, Cotta, Memo)
}
HOSTS = (
    "tent",
    "eata",
    "sar",
    "deyo",
    "roid",
    "zerosiam",
    "nctta",
    "neo",
)  # those that FATA adds to
SPECS = (*METHODS, "fata", *(f"{host}+fata" for host in HOSTS))


def parse(spec: str, **fields: Any) -> tuple[Method, Fata | None]:
    """The method and plug-in that a spec such as `deyo+fata` names, with fields set.

    A method that is not of this package is `my_module:MyMethod`, also with `+fata`.
    A field that both have (`threshold`, `scale`) is the host's; `fata_threshold` is the plug-in's.
    """
    if not isinstance(spec, str):
        raise TypeError(
            f"a method's name is expected, such as 'deyo+fata', got {type(spec).__name__}; "
            f"fata.Adapter(model, fata.Deyo(), fata.Fata()) takes objects."
        )
    host, _, plus = spec.partition("+")
    foreign = ":" in host and spec in (host, f"{host}+fata")
    if spec not in SPECS and not foreign:
        raise ValueError(
            f"unknown method {spec!r}: choose one of {', '.join(METHODS)}, fata, or a host from "
            f"{', '.join(HOSTS)} followed by '+fata'; your own is my_module:MyMethod."
            f"{near(spec.lower(), SPECS)}"
        )
    alone = host == "fata"  # its loss alone, on BatchNorm's batch statistics
    kind = Norm if alone else external(host) if foreign else METHODS[host]
    plugin = Fata if plus or alone else None
    known = {name: (0, name) for name in _fields(kind)}
    if plugin is not None:
        known |= {f"fata_{name}": (1, name) for name in _fields(plugin)}
        known = {name: (1, name) for name in _fields(plugin)} | known
    given: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in fields.items():
        if name not in known:
            raise TypeError(
                f"{spec!r} has no field {name!r}.{near(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        owner, field = known[name]
        given[owner][field] = value
    return kind(**given[0]), plugin(**given[1]) if plugin else None


def describe(method: Method | Fata) -> dict[str, Any]:
    """Name and fields, for files and tables; a function is told by its name, a row by its list."""
    fields = dataclasses.fields(method)
    return {"name": method.name, **{f.name: _plain(getattr(method, f.name)) for f in fields}}


def _plain(value: Any) -> Any:
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [float(number) for number in value]


def spec_of(method: Mapping[str, Any], plus: Mapping[str, Any] | None) -> str:
    """The spec of a described method and plug-in: what `parse` takes."""
    if plus is None:
        return str(method["name"])
    return "fata" if method["name"] == "norm" else f"{method['name']}+fata"


def _fields(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)
