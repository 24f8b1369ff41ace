"""Scenarios: the order of domains and images, and when the model is reset.

A scenario yields segments; a batch never crosses from one into the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fata.data.dataset import Dataset, Domain
from fata.data.errors import DataError
from fata.data.label_shift import label_shift


def default_batch(scenario: str) -> int:
    """The batch size if none is given."""
    return 1 if scenario == "bs1" else 64


@dataclass(frozen=True, eq=False)
class Segment:
    """Some images of some domains, in order."""

    domains: tuple[Domain, ...]
    place: np.ndarray  # which of the domains each image is from
    index: np.ndarray  # which image of it
    reset: bool  # start from the source model

    @classmethod
    def of(cls, domain: Domain, index: np.ndarray, reset: bool) -> Segment:
        """Images of one domain."""
        return cls((domain,), np.zeros(len(index), dtype=np.int64), index, reset)


@dataclass(frozen=True)
class DomainSampler:
    """The domains of a stream, and random draws that depend on (seed, data, key) alone."""

    dataset: Dataset
    names: Sequence[str] | None
    severity: int
    seed: int
    images: int | None  # of each domain; None: all

    @cached_property
    def domains(self) -> list[Domain]:
        """The domains at the given severity."""
        return self.dataset.named(self.names, self.severity)

    def members(self, domain: Domain) -> np.ndarray:
        """Indices of a domain's images; a subset is the same for every seed."""
        labels = self.dataset.of(domain).labels
        if self.images is None:
            return np.arange(len(labels))
        chosen = _generator(labels, "subset").permutation(len(labels))[: self.images]
        return np.sort(chosen)

    def labels(self, domain: Domain) -> np.ndarray:
        """Labels of the members, renumbered 0, 1, ... over the classes that occur."""
        labels = self.dataset.of(domain).labels.numpy()[self.members(domain)]
        return np.unique(labels, return_inverse=True)[1]

    def generator(self, domain: Domain, key: str) -> np.random.RandomState:
        """For the random draws of one domain."""
        return _generator(self.dataset.of(domain).labels, f"{self.seed}/{domain}/{key}")

    def shuffled(self, domain: Domain, key: str = "") -> np.ndarray:
        """Indices of a domain's images in random order."""
        return self.generator(domain, key).permutation(self.members(domain))


def normal(sampler: DomainSampler) -> Iterator[Segment]:
    """One domain after another, shuffled; the model is reset at each."""
    for domain in sampler.domains:
        yield Segment.of(domain, sampler.shuffled(domain), reset=True)


def label_shifted(
    sampler: DomainSampler, *, ratio: float = 500_000, length: int | None = None
) -> Iterator[Segment]:
    """As normal, but one class after another dominates (SAR's online label shift)."""
    labels, order = np.empty(0), torch.empty(0)
    for domain in sampler.domains:
        last, labels = labels, sampler.labels(domain)
        if not np.array_equal(labels, last):  # corruptions of the same images have one order
            try:
                order = label_shift(torch.from_numpy(labels), ratio, length, sampler.seed)
            except ValueError as error:
                raise DataError(f"label-shift: {error}") from error
        yield Segment.of(domain, sampler.members(domain)[order.numpy()], reset=True)


def mixed(sampler: DomainSampler) -> Iterator[Segment]:
    """All domains in one shuffled stream."""
    parts = [sampler.members(domain) for domain in sampler.domains]
    place = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    key = "mixed " + " ".join(map(str, sampler.domains))
    order = sampler.generator(sampler.domains[0], key).permutation(len(place))
    yield Segment(tuple(sampler.domains), place[order], np.concatenate(parts)[order], reset=True)


def continual(sampler: DomainSampler) -> Iterator[Segment]:
    """One domain after another without a reset."""
    for number, segment in enumerate(normal(sampler)):
        yield replace(segment, reset=number == 0)


def gradual(sampler: DomainSampler) -> Iterator[Segment]:
    """Without a reset, severities go 1, 2, ... up to the given one and down to 1 again."""
    for place, domain in enumerate(sampler.domains):
        if domain.severity is None:
            raise DataError(
                f"gradual: {domain.name!r} of {sampler.dataset.spec} has no severities."
            )
        up = range(1, domain.severity + 1)
        for step, severity in enumerate([*up, *reversed(up[:-1])]):
            (one,) = sampler.dataset.named([domain.name], severity)
            index = sampler.shuffled(one, f"gradual {step}")
            yield Segment.of(one, index, reset=place == step == 0)


def recurring(sampler: DomainSampler, *, rounds: int = 10) -> Iterator[Segment]:
    """The sequence several times without a reset, each time in another order."""
    _whole("recurring", "rounds", rounds)
    for turn in range(rounds):
        for place, domain in enumerate(sampler.domains):
            index = sampler.shuffled(domain, f"round {turn}")
            yield Segment.of(domain, index, reset=turn == place == 0)


def correlated(sampler: DomainSampler, *, concentration: float = 0.1) -> Iterator[Segment]:
    """As normal, but classes come in bursts, of sizes drawn from a Dirichlet distribution.

    Time has as many slots as there are classes. Each class spreads its images over the slots by
    Dirichlet(concentration); a slot shows its classes one after another.
    """
    if not 0.01 <= concentration < float("inf"):  # below, all draws of a class may underflow to 0
        raise DataError(f"correlated(concentration={concentration!r}): must be at least 0.01.")
    for domain in sampler.domains:
        rng = sampler.generator(domain, "correlated")
        shuffle = rng.permutation(len(sampler.members(domain)))
        label = sampler.labels(domain)[shuffle]
        sizes = np.bincount(label)
        slots = []
        for size in sizes:
            shares = rng.dirichlet(np.full(len(sizes), concentration))
            ends = (shares.cumsum() * size).round()
            slots.append(np.searchsorted(ends[:-1], np.arange(size), side="right"))
        slot = np.empty_like(label)
        slot[label.argsort(kind="stable")] = np.concatenate(slots)
        bursts, burst = np.unique(slot * len(sizes) + label, return_inverse=True)
        turn = rng.random_sample(len(bursts))[burst]
        index = sampler.members(domain)[shuffle][np.lexsort((turn, slot))]
        yield Segment.of(domain, index, reset=True)


def long(sampler: DomainSampler, *, length: int = 50_000) -> Iterator[Segment]:
    """As normal, but the images come again, each time in another order, up to a length."""
    _whole("long", "length", length)
    for domain in sampler.domains:
        rng = sampler.generator(domain, "long")
        yield Segment.of(domain, _again(rng, sampler.members(domain), length), reset=True)


def few_classes(
    sampler: DomainSampler, *, classes: int = 4, every: int | None = None
) -> Iterator[Segment]:
    """As normal, but of some classes alone; others come in their place `every` so many images."""
    _whole("few-classes", "classes", classes)
    for domain in sampler.domains:
        labels, rng = sampler.labels(domain), sampler.generator(domain, "few-classes")
        if classes > labels.max() + 1:
            raise DataError(f"few-classes(classes={classes}): there are {labels.max() + 1}.")
        every = _whole("few-classes", "every", len(labels) if every is None else every)
        parts = []
        for start in range(0, len(labels), every):
            shown = rng.permutation(labels.max() + 1)[:classes]
            pool = sampler.members(domain)[np.isin(labels, shown)]
            parts.append(_again(rng, pool, min(every, len(labels) - start)))
        yield Segment.of(domain, np.concatenate(parts), reset=True)


def skewed(sampler: DomainSampler, *, share: float = 0.5) -> Iterator[Segment]:
    """As normal, but one class has a share of the images, and the others the rest."""
    if not 0 < share <= 1:
        raise DataError(f"skewed(share={share!r}): must be above 0 and at most 1.")
    for domain in sampler.domains:
        labels, rng = sampler.labels(domain), sampler.generator(domain, "skewed")
        often = labels == rng.permutation(labels.max() + 1)[0]
        count, members = round(share * len(labels)), sampler.members(domain)
        parts = (
            _again(rng, members[often], count),
            _again(rng, members[~often], len(labels) - count),
        )
        yield Segment.of(domain, rng.permutation(np.concatenate(parts)), reset=True)


def _again(rng: np.random.RandomState, pool: np.ndarray, length: int) -> np.ndarray:
    """Images of a pool in random order, all of them before the first comes again."""
    if not len(pool):
        return pool[:0]
    rounds = [rng.permutation(pool) for _ in range(-(-length // len(pool)))]
    return np.concatenate([pool[:0], *rounds])[:length]


def _whole(scenario: str, name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise DataError(f"{scenario}({name}={value!r}): must be a whole number, at least 1.")
    return value


SCENARIOS: dict[str, Callable[..., Iterator[Segment]]] = {
    "normal": normal,
    "bs1": normal,
    "label-shift": label_shifted,
    "mixed": mixed,
    "continual": continual,
    "gradual": gradual,
    "recurring": recurring,
    "correlated": correlated,
    "long": long,
    "few-classes": few_classes,
    "skewed": skewed,
}
RESETTING = ("normal", "bs1", "label-shift", "correlated", "long", "few-classes", "skewed")


def _generator(labels: Tensor, key: str) -> np.random.RandomState:
    """The legacy generator: its numbers are the same in every version of NumPy."""
    content = hashlib.sha256(f"{key}/".encode() + labels.numpy().tobytes())
    return np.random.RandomState(np.frombuffer(content.digest(), dtype=np.uint32))
