"""Scenarios: in which order a model meets its domains, and when it starts anew.

A scenario yields segments; a batch never crosses from one into the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fata.data.dataset import Dataset, Domain
from fata.data.errors import DataError
from fata.data.label_shift import label_shift


@dataclass(frozen=True)
class Segment:
    """Some images of some domains, in order."""

    domains: list[Domain]  # one an image
    index: np.ndarray
    reset: bool  # start from the source model


@dataclass(frozen=True)
class Deck:
    """The domains to be met, and draws that depend on (seed, data, key) alone."""

    dataset: Dataset
    names: list[str] | None
    severity: int
    seed: int
    images: int | None  # of each domain; None: all

    @property
    def domains(self) -> list[Domain]:
        """At the severity asked for."""
        return self.dataset.named(self.names, self.severity)

    def members(self, domain: Domain) -> np.ndarray:
        """Images of a domain; where only some are wanted, the same ones for every seed."""
        labels = self.dataset.of(domain).labels
        if self.images is None:
            return np.arange(len(labels))
        chosen = _generator(labels, "subset").permutation(len(labels))[: self.images]
        return np.sort(chosen)

    def generator(self, domain: Domain, key: str) -> np.random.RandomState:
        """For the draws of one domain."""
        return _generator(self.dataset.of(domain).labels, f"{self.seed}/{domain}/{key}")

    def shuffled(self, domain: Domain, key: str = "") -> np.ndarray:
        """Images of a domain in a random order."""
        return self.generator(domain, key).permutation(self.members(domain))


def normal(deck: Deck) -> Iterator[Segment]:
    """One domain after another, shuffled; the model starts anew at each."""
    for domain in deck.domains:
        yield _of(domain, deck.shuffled(domain), reset=True)


def label_shifted(
    deck: Deck, *, ratio: float = 500_000, length: int | None = None
) -> Iterator[Segment]:
    """As normal, but one class after another dominates (SAR's online label shift)."""
    for domain in deck.domains:
        members = deck.members(domain)
        labels = deck.dataset.of(domain).labels[torch.from_numpy(members)]
        order = label_shift(labels, ratio, length, deck.seed)
        yield _of(domain, members[order.numpy()], reset=True)


def mixed(deck: Deck) -> Iterator[Segment]:
    """All domains in one shuffled stream."""
    parts = [_of(domain, deck.members(domain), reset=True) for domain in deck.domains]
    domains = [domain for part in parts for domain in part.domains]
    index = np.concatenate([part.index for part in parts])
    key = "mixed " + " ".join(map(str, deck.domains))
    order = deck.generator(deck.domains[0], key).permutation(len(index))
    yield Segment([domains[i] for i in order], index[order], reset=True)


def continual(deck: Deck) -> Iterator[Segment]:
    """One domain after another without a new start."""
    for number, segment in enumerate(normal(deck)):
        yield Segment(segment.domains, segment.index, reset=number == 0)


def gradual(deck: Deck) -> Iterator[Segment]:
    """Without a new start, the severity of each corruption goes 1, 2, ..., 5, ..., 2, 1."""
    names = [domain.name for domain in deck.domains if domain.severity is not None]
    if not names:
        raise DataError(f"gradual: {deck.dataset.spec} has no corruptions with severities.")
    first = True
    for name in names:
        for step, severity in enumerate((1, 2, 3, 4, 5, 4, 3, 2, 1)):
            (domain,) = deck.dataset.named([name], severity)
            yield _of(domain, deck.shuffled(domain, f"gradual {step}"), reset=first)
            first = False


def recurring(deck: Deck, *, rounds: int = 10) -> Iterator[Segment]:
    """The sequence again and again without a new start, each time in another order."""
    _at_least("recurring", rounds=rounds)
    for turn in range(rounds):
        for place, domain in enumerate(deck.domains):
            index = deck.shuffled(domain, f"round {turn}")
            yield _of(domain, index, reset=turn == place == 0)


def correlated(deck: Deck, *, concentration: float = 0.1) -> Iterator[Segment]:
    """As normal, but classes come in bursts, of sizes drawn from a Dirichlet distribution.

    Time has as many slots as there are classes. Each class spreads its images over the slots by
    Dirichlet(concentration); a slot shows its classes one after another.
    """
    if not concentration > 0:
        raise DataError(f"correlated(concentration={concentration!r}): must be above 0.")
    for domain in deck.domains:
        rng = deck.generator(domain, "correlated")
        members = rng.permutation(deck.members(domain))
        labels = deck.dataset.of(domain).labels.numpy()[members]
        classes = np.unique(labels)
        slots: list[list[np.ndarray]] = [[] for _ in classes]
        for label in classes:
            own = members[labels == label]
            shares = rng.dirichlet(np.full(len(classes), concentration))
            cuts = (np.cumsum(shares)[:-1] * len(own)).round().astype(int)
            for slot, part in zip(slots, np.split(own, cuts), strict=True):
                slot.append(part)
        order = [slot[i] for slot in slots for i in rng.permutation(len(slot))]
        yield _of(domain, np.concatenate(order), reset=True)


SCENARIOS: dict[str, Callable[..., Iterator[Segment]]] = {
    "normal": normal,
    "bs1": normal,
    "label-shift": label_shifted,
    "mixed": mixed,
    "continual": continual,
    "gradual": gradual,
    "recurring": recurring,
    "correlated": correlated,
}


def _generator(labels: Tensor, key: str) -> np.random.RandomState:
    """Whose numbers never change from one version of NumPy to another."""
    content = hashlib.sha256(f"{key}/".encode() + labels.numpy().tobytes())
    return np.random.RandomState(np.frombuffer(content.digest(), dtype=np.uint32))


def _of(domain: Domain, index: np.ndarray, reset: bool) -> Segment:
    return Segment([domain] * len(index), index, reset)


def _at_least(scenario: str, **values: Any) -> None:
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{scenario}({name}={value!r}): must be at least 1.")
