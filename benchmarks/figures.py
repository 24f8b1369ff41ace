"""Draw the figures of the results: `python -m benchmarks.figures [gain] [cost] [classes]`.

`docs/gain.svg` (FATA's gain against the share of confident rows and against the rate) and
`docs/cost.svg` (accuracy against cost) come from the kept runs. `docs/classes.svg` (which classes a
stream's predictions are) is measured, in about two minutes on two cores. Needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot

import fata
from benchmarks.archive import kept
from benchmarks.gains import pairs
from benchmarks.tiny200 import variant
from fata.bench.tune import RATES

ROOT = Path(__file__).parent.parent
CLASSES = {10: "#2b7bba", 200: "#d9480f", 1000: "#2f855a"}
RUNS = ("normal", "tiny200", "imagenet")
HOSTS = {"tent": "#6b7280", "eata": "#2b7bba", "sar": "#2f855a", "deyo": "#d9480f"}
MOST = 8  # points of gain that are shown
# Labels to the left of their point.
LEFT = ("eata+fata, balanced", "eata+fata", "zerosiam", "zerosiam+fata", "tent (COME)")
STREAM = ("mini_resnet_gn", "deyo+fata", "gaussian_noise", 2000)


def gain() -> None:
    """FATA's gain over its host, a point a stream; and by rate, on the extra corruptions."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for classes, colour in CLASSES.items():
        points = [
            (100 * plus.result["counts"]["selected"]["fata"] / plus.result["rows"], _gain(own))
            for name in RUNS
            for own in pairs(kept(name))
            if (plus := own[1]).protocol["classes"] == classes
        ]
        label = f"{classes:,} classes: {len(points)} streams, {mean(y for _, y in points):+.2f} pp"
        shown = [(x, max(-MOST, min(MOST, y))) for x, y in points]
        left.scatter(*zip(*shown, strict=True), s=9, alpha=0.45, color=colour, label=label, lw=0)
    left.set(xlabel="confident rows (H < 0.5 ln C), %", ylabel="gain of FATA over its host, pp")
    left.legend(fontsize=8, loc="lower left")
    found: dict[tuple[str, float], list[float]] = {}
    for own in pairs(kept("presets-tiny200")):
        at = own[0].protocol["host"]["name"], float(own[0].protocol["lr"])
        found.setdefault(at, []).append(_gain(own))
    for host, colour in HOSTS.items():
        rates = [rate for rate in RATES if (host, rate) in found]
        values = [max(-MOST, mean(found[host, rate])) for rate in rates]
        right.plot(rates, values, "o-", color=colour, label=f"{host}+fata", ms=4)
    right.set(xscale="log", xlabel="learning rate (Tiny-ImageNet networks)")
    right.legend(fontsize=8, loc="lower left")
    _save(figure, (left, right), "gain.svg")


def cost() -> None:
    """Accuracy against cost, a point a method: mean of the Tiny-ImageNet networks and the 15."""
    figure, axes = pyplot.subplots(figsize=(9, 4.6))
    found: dict[str, list[tuple[float, float]]] = {}
    for name in ("tiny200", "newer-tiny200", "balance-tiny200"):
        for record in kept(name):
            if record.protocol["scenario"]["name"] == "normal" and record.protocol["seed"] == 0:
                macs = sum(record.result["macs"].values()) / record.result["rows"]
                found.setdefault(variant(record), []).append((macs, record.result["accuracy"]))
    forward = mean(macs for macs, _ in found["source"])
    for method, cells in found.items():
        x, y = mean(macs for macs, _ in cells) / forward, mean(accuracy for _, accuracy in cells)
        plus, balanced = "+fata" in method, "balanced" in method
        colour = "#d9480f" if balanced else "#2b7bba" if plus else "#6b7280"
        axes.scatter(x, y, color=colour, s=26, alpha=0.3 if "FATA balanced" in method else 1)
        label = method.replace(" 1/2", "").replace(", both balanced", ", balanced")
        if "FATA balanced" not in method:
            side = {"ha": "right"} if label in LEFT else {}
            offset = (-5 if side else 5, 3)
            axes.annotate(label, (x, y), offset, textcoords="offset points", fontsize=8, **side)
    axes.set(xlabel="cost of an image, forward passes", ylabel="accuracy, %")
    axes.margins(x=0.12)
    _save(figure, (axes,), "cost.svg")


def classes() -> None:
    """Shares of the classes among the latest predictions, without and with class balance."""
    name, spec, corruption, images = STREAM
    forms: dict[str, dict[str, Any]] = {
        "DeYO+FATA": {},
        "DeYO+FATA, balanced": {"balance": True, "fata_balance": True, "weight": 0.5},
    }
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, (title, fields) in zip(both, forms.items(), strict=True):
        loaded = fata.zoo.load(name)
        data = fata.data.open("embedded", fit=loaded)
        adapted = fata.adapt(loaded.model, spec, guard=None, **loaded.settings(spec), **fields)
        shares, right, seen = [], 0, 0
        for batch in fata.stream(data, domains=[corruption], images=images, seed=0):
            predicted = adapted(loaded.preprocess.normalise(batch.images)).argmax(1)
            right, seen = right + int((predicted == batch.labels).sum()), seen + len(predicted)
            shares.append((100 * predicted.bincount(minlength=10) / len(predicted)).tolist())
        smooth = [
            [mean(part) for part in zip(*shares[max(0, n - 3) : n + 1], strict=True)]
            for n in range(len(shares))
        ]
        axes.stackplot(
            [64 * n for n in range(len(smooth))],
            *zip(*smooth, strict=True),
            colors=[pyplot.get_cmap("tab10")(n) for n in range(10)],
        )
        axes.set(title=f"{title}: {100 * right / seen:.1f} %", xlabel="images", ylim=(0, 100))
        print(f"{title}: {100 * right / seen:.1f} %", flush=True)
    both[0].set(ylabel="predicted classes, % (ten classes)")
    _save(figure, (), "classes.svg")


def _gain(pair: Sequence[Any]) -> float:
    host, plus = pair
    return float(plus.result["accuracy"] - host.result["accuracy"])


def _save(figure: Any, grids: Sequence[Any], name: str) -> None:
    for axes in grids:
        axes.grid(color="#e5e7eb")
        axes.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / name, metadata={"Date": None})


def main() -> None:
    """Draw what is named, or all."""
    pyplot.switch_backend("svg")
    pyplot.rcParams.update({"svg.hashsalt": "fata", "svg.fonttype": "none", "font.size": 11})
    draw = {"gain": gain, "cost": cost, "classes": classes}
    for name in sys.argv[1:] or draw:
        draw[name]()


if __name__ == "__main__":
    main()
