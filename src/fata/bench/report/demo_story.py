"""The demo: which cells it runs, and what it concludes from them.

Each network is tested on the two corruptions that cost it the most accuracy: unadapted, and with
EATA and the guard. EATA gained most on average over 15 corruptions (docs/results.md). FATA is
compared on the BatchNorm network, where no host collapses, on the corruption that is hardest with
the batch's statistics. The guard is shown on a stream on which a host collapses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fata.bench.cell import Cell
from fata.bench.grid import Grid
from fata.bench.paired import Flags, Gain, gain, unpack
from fata.bench.report.figures import Figure
from fata.bench.report.overview import fate
from fata.bench.report.tables import domain_name
from fata.bench.samples import data_url
from fata.bench.store import Record
from fata.data import Dataset
from fata.data import open as open_data

NETWORKS = {"mini_resnet_bn": "BatchNorm", "mini_resnet_gn": "GroupNorm"}
BN, GN = NETWORKS
HARDEST = {
    BN: ("contrast", "pixelate"),
    GN: ("gaussian_noise", "pixelate"),
}
HOSTS = ("tent", "eata", "sar", "deyo")
COMPARED = "glass_blur"
COLLAPSING, COLLAPSE = "deyo", "gaussian_noise"
NO_FISHER = ":fisher_alpha=0"  # computing EATA's penalty would take as long as the demo
ADAPTED = f"eata{NO_FISHER}"
WINDOW, FIRST = 256, 64  # images: of a point of a curve; those before which none is drawn
SHOWN = 8  # of each corruption
_GREY, _BLUE, _ORANGE, _RED = "#9aa3b2", "#7fb0dc", "#e6550d", "#b3261e"


def cells(images: int) -> list[Cell]:
    """All cells of the demo, each once, with `images` of each corruption."""
    fata = [f"{host}{plus}" for host in HOSTS for plus in ("", "+fata")]
    compared = tuple(m + NO_FISHER if m.startswith("eata") else m for m in fata)
    asked: list[tuple[str, tuple[str, ...], tuple[str, ...], bool]] = [
        (BN, ("source", "norm"), HARDEST[BN], False),
        (BN, (ADAPTED,), HARDEST[BN], True),
        (BN, compared, (COMPARED,), False),
        (GN, ("source",), HARDEST[GN], False),
        (GN, (ADAPTED,), HARDEST[GN], True),
        *((GN, (COLLAPSING,), (COLLAPSE,), guard) for guard in (False, True)),
    ]
    every = [
        cell
        for model, methods, domains, guard in asked
        for cell in Grid(
            (model,), methods=methods, domains=domains, images=images, guard=guard
        ).cells(open_data)
    ]
    return list({str(cell): cell for cell in every}.values())


@dataclass(frozen=True)
class Effect:
    """Adaptation on one corruption: accuracies in %, and images whose outcome changes."""

    network: str
    corruption: str
    before: float
    norm: float | None  # batch statistics alone, without learning
    after: float
    became_right: int
    became_wrong: int
    images: int


@dataclass(frozen=True)
class Addition:
    """The gain of FATA over a host alone."""

    host: str
    alone: float
    together: float
    gain: Gain


@dataclass(frozen=True)
class Guarded:
    """A stream on which adaptation collapses: accuracy over the last images, by curve."""

    curves: dict[str, list[float]]
    accuracy: dict[str, float]


@dataclass(frozen=True)
class Story:
    """The results of the demo, in the order of the page."""

    effects: tuple[Effect, ...]
    additions: tuple[Addition, ...]
    guarded: Guarded

    def mean(self, network: str, what: str) -> float:
        """Mean over a network's corruptions."""
        return float(np.mean([getattr(e, what) for e in self.effects if e.network == network]))

    @property
    def sentences(self) -> tuple[str, str, str]:
        """The conclusions in three sentences."""
        return self._adapting(), self._adding(), self._guarding()

    def _adapting(self) -> str:
        parts = []
        for network, name in NETWORKS.items():
            own = [effect for effect in self.effects if effect.network == network]
            best = max(own, key=lambda effect: effect.after - effect.before)
            before, after = (self.mean(network, what) for what in ("before", "after"))
            parts.append(
                f"{name} network {before:.0f} % -> {after:.0f} % on average, "
                f"{best.before:.0f} % -> {best.after:.0f} % on {readable(best.corruption)}"
            )
        before, norm, after = (self.mean(BN, what) for what in ("before", "norm", "after"))
        return (
            f"Adaptation without labels: {'; '.join(parts)}. (Of the BatchNorm network's gain, "
            f"{norm - before:+.1f} are the batch's statistics and {after - norm:+.1f} learning.)"
        )

    def _adding(self) -> str:
        clear = ", ".join(f"{a.host} {a.gain}" for a in self.additions if a.gain.sign)
        noise = ", ".join(f"{a.host} {a.gain.mean:+.2f}" for a in self.additions if not a.gain.sign)
        parts = [clear] if clear else []
        parts += (
            [f"within noise ({self.additions[0].gain.images:,} images): {noise}"] if noise else []
        )
        return (
            f"FATA's gain over its hosts on {readable(COMPARED)}, in percentage points with the "
            f"95 % interval: {'; '.join(parts)}. All 15 corruptions: docs/results.md."
        )

    def _guarding(self) -> str:
        source, alone, watched = self.guarded.accuracy.values()
        return (
            f"The guard, on by default: on {readable(COLLAPSE)} DeYO alone collapses, "
            f"mean accuracy {source:.1f} % unadapted -> {alone:.1f} %; with the guard "
            f"{watched:.1f} %."
        )


def story_of(records: Sequence[Record]) -> Story:
    """The story of the demo's records, which must be complete."""
    found = {_place(record): record for record in records}

    def right(network: str, method: str, corruption: str, guard: bool = False) -> Flags:
        record = found[network, method, corruption, guard]
        return unpack(record.result["right"], record.result["rows"])

    effects = []
    for network, corruptions in HARDEST.items():
        for corruption in corruptions:
            before = right(network, "source", corruption)
            after = right(network, "eata", corruption, guard=True)
            norm = right(network, "norm", corruption) if network == BN else None
            effects.append(
                Effect(
                    network,
                    corruption,
                    _percent(before),
                    None if norm is None else _percent(norm),
                    _percent(after),
                    int((after & ~before).sum()),
                    int((before & ~after).sum()),
                    len(before),
                )
            )
    additions = []
    for host in HOSTS:
        alone, together = (right(BN, method, COMPARED) for method in (host, f"{host}+fata"))
        both = gain([alone], [together])
        additions.append(Addition(host, _percent(alone), _percent(together), both))
    streams = {
        "unadapted": right(GN, "source", COLLAPSE),
        "DeYO alone": right(GN, COLLAPSING, COLLAPSE),
        "DeYO with the guard": right(GN, COLLAPSING, COLLAPSE, guard=True),
    }
    guarded = Guarded(
        {name: _moving(flags) for name, flags in streams.items()},
        {name: _percent(flags) for name, flags in streams.items()},
    )
    return Story(tuple(effects), tuple(additions), guarded)


def bars(story: Story) -> Figure:
    """Accuracy unadapted and adapted, by network and corruption."""
    places = [
        [NETWORKS[effect.network] for effect in story.effects],
        [readable(effect.corruption) for effect in story.effects],
    ]
    shown: dict[str, tuple[list[Any], str]] = {
        "unadapted": ([e.before for e in story.effects], _GREY),
        "batch statistics alone": ([e.norm for e in story.effects], _BLUE),
        "adapted (EATA)": ([e.after for e in story.effects], _ORANGE),
    }
    data = [
        {
            "type": "bar",
            "x": places,
            "y": heights,
            "name": name,
            "text": [f"{height:.0f}" if height is not None else "" for height in heights],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": colour},
        }
        for name, (heights, colour) in shown.items()
    ]
    layout = {
        "barmode": "group",
        "bargap": 0.25,
        "showlegend": True,
        "yaxis": {"title": {"text": "accuracy, %"}, "range": [0, 105]},
    }
    return Figure(data, layout)


def curves(story: Story) -> Figure:
    """Accuracy over the stream on which adaptation collapses."""
    looks = ({"color": _GREY, "width": 7}, {"color": _RED}, {"color": _ORANGE})
    data: list[dict[str, Any]] = [
        {"y": [round(y, 2) for y in curve[FIRST:]], "name": name, "mode": "lines", "line": look}
        for (name, curve), look in zip(story.guarded.curves.items(), looks, strict=True)
    ]
    length = len(data[0]["y"])
    axes = {
        "xaxis": {"title": {"text": "images seen"}},
        "yaxis": {"title": {"text": f"accuracy of the last {WINDOW}, %"}, "rangemode": "tozero"},
    }
    return Figure(data, {**axes, "showlegend": True}, list(range(FIRST + 1, FIRST + length + 1)))


def strips(
    records: Sequence[Record], streams: Sequence[tuple[Cell, Dataset]], labels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Images from the middle of each stream in order, and how their prediction changed.

    `streams` are the adapted cells, each with its data.
    """
    found = {_place(record): record for record in records}
    for cell, dataset in streams:
        corruption = cell.domains[0]
        own = ("source", False), ("eata", True)
        results = [found[cell.model, method, corruption, guard] for method, guard in own]
        before, after = (unpack(r.result["right"], r.result["rows"]) for r in results)
        start = max(0, len(before) // 2 - SHOWN)
        shown = _images_from(cell, dataset, start)
        yield {
            "network": NETWORKS[cell.model],
            "corruption": readable(corruption),
            "became_right": int((after & ~before).sum()),
            "became_wrong": int((before & ~after).sum()),
            "images": len(before),
            "first": start + 1,
            "shown": [
                {
                    "source": data_url(image),
                    "label": labels[label],
                    "fate": fate(bool(before[at]), bool(after[at])),
                }
                for at, (image, label) in enumerate(shown, start)
            ],
        }


def readable(corruption: str) -> str:
    """Its name as plain words."""
    return corruption.replace("_", " ")


def _images_from(cell: Cell, dataset: Dataset, start: int) -> Iterator[tuple[Tensor, int]]:
    seen = 0
    for batch in cell.stream(dataset):
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
            if start <= seen < start + SHOWN:
                yield image, label
            seen += 1
        if seen >= start + SHOWN:
            return


def _place(record: Record) -> tuple[str, str, str, bool]:
    about = record.protocol
    domain = domain_name(about["domains"][0])
    return about["model"], about["method"], domain, bool(about["guard"])


def _percent(flags: Flags) -> float:
    return 100 * float(flags.mean())


def _moving(flags: Flags) -> list[float]:
    """Accuracy in % of the last images, at each."""
    total = np.concatenate([[0], np.cumsum(flags)])
    ends = np.arange(1, len(total))
    starts = np.maximum(0, ends - WINDOW)
    shares: list[float] = (100 * (total[ends] - total[starts]) / (ends - starts)).tolist()
    return shares
