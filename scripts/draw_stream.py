"""Measure and draw the picture of the README: `python scripts/draw_stream.py`.

One network meets 2,000 images with Gaussian noise: unadapted, with a host that gains, with FATA
added to it, and with a host that collapses, without and with the guard. Writes docs/stream.svg and
which images were correct to docs/stream.json. `--redraw` draws from that file without measuring.
Takes two to three minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NETWORK, CORRUPTION, IMAGES = "mini_resnet_gn", "gaussian_noise", 2000
WINDOW, FIRST, EVERY = 256, 128, 16  # images: of a point's mean; before the first point; apart
PANELS = {
    "Adaptation gains": ("unadapted", "EATA", "EATA+FATA"),
    "DeYO collapses, the guard stops it": ("unadapted", "DeYO", "DeYO + guard"),
}
RUNS = {
    "unadapted": ("source", None),
    "EATA": ("eata", None),
    "EATA+FATA": ("eata+fata", None),
    "DeYO": ("deyo", None),
    "DeYO + guard": ("deyo", True),
}
COLOURS = {
    "unadapted": "#6b7280",
    "EATA": "#2b7bba",
    "EATA+FATA": "#d9480f",
    "DeYO": "#b3261e",
    "DeYO + guard": "#2f855a",
}
DASHED = ("DeYO + guard",)  # lies on the unadapted curve
WIDTH, HEIGHT, LEFT, TOP, GAP = 900, 330, 52, 52, 34
PANEL_WIDTH, PANEL_HEIGHT = (WIDTH - LEFT - GAP - 16) / 2, HEIGHT - TOP - 66
HIGHEST = 90  # of the accuracies shown, in %


def measure() -> dict[str, list[int]]:
    """Which images of the stream are classified correctly, by run."""
    import fata

    network = fata.zoo.load(NETWORK)
    data = fata.data.open("embedded", fit=network)
    clean = [network.preprocess.normalise(b.images) for b in fata.stream(data, domains=["clean"])]
    fisher: Any = clean  # computed once, then used again
    correct: dict[str, list[int]] = {}
    for name, (spec, guard) in RUNS.items():
        loaded = fata.zoo.load(NETWORK)
        fields: dict[str, Any] = loaded.settings(spec)
        if spec.startswith("eata"):
            fields["fisher_data"] = fisher
        adapted = fata.adapt(loaded.model, spec, guard=guard, **fields)
        fisher = adapted.fisher or fisher
        correct[name] = []
        for batch in fata.stream(data, domains=[CORRUPTION], images=IMAGES, seed=0):
            logits = adapted(loaded.preprocess.normalise(batch.images))
            correct[name] += (logits.argmax(1) == batch.labels).int().tolist()
        print(f"{name}: {100 * sum(correct[name]) / len(correct[name]):.1f} %", flush=True)
    return correct


def moving(flags: list[int]) -> list[tuple[int, float]]:
    """Images seen, and accuracy in % of the last ones."""
    totals = [0, *accumulate(flags)]
    ends = range(FIRST, len(flags) + 1, EVERY)
    return [
        (n, 100 * (totals[n] - totals[max(0, n - WINDOW)]) / (n - max(0, n - WINDOW))) for n in ends
    ]


def drawing(correct: dict[str, list[int]]) -> str:
    """The picture as SVG."""
    means = {name: 100 * sum(flags) / len(flags) for name, flags in correct.items()}
    parts = [_text(16, 20, f"{NETWORK}, {CORRUPTION} at severity 5: accuracy, %", weight="bold")]
    for number, (title, names) in enumerate(PANELS.items()):
        left = LEFT + number * (PANEL_WIDTH + GAP)
        parts += _axes(left, title, numbers=number == 0)
        for name in names:
            points = " ".join(
                f"{left + PANEL_WIDTH * n / IMAGES:.1f},{_height(y):.1f}"
                for n, y in moving(correct[name])
            )
            dash = ' stroke-dasharray="7 5"' if name in DASHED else ""
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" '
                f'stroke-width="2.2"{dash}/>'
            )
        parts += _legend(left, names, means)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="13" fill="#1f2937">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _height(accuracy: float) -> float:
    return TOP + PANEL_HEIGHT * (1 - accuracy / HIGHEST)


def _axes(left: float, title: str, numbers: bool) -> list[str]:
    parts = [_text(left, TOP - 10, title)]
    for accuracy in range(0, HIGHEST + 1, 30):
        y = _height(accuracy)
        parts.append(
            f'<line x1="{left:.1f}" x2="{left + PANEL_WIDTH:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#d1d5db"/>'
        )
        if numbers:
            parts.append(_text(left - 8, y + 4, f"{accuracy}", anchor="end"))
    for images in range(0, IMAGES + 1, 1000):
        x = left + PANEL_WIDTH * images / IMAGES
        anchor = "start" if not images else "end" if images == IMAGES else "middle"
        label = f"{images:,} images" if images == IMAGES else f"{images:,}"
        parts.append(_text(x, TOP + PANEL_HEIGHT + 18, label, anchor=anchor))
    return parts


def _legend(left: float, names: tuple[str, ...], means: dict[str, float]) -> list[str]:
    parts, x, y = [], left, TOP + PANEL_HEIGHT + 46
    for name in names:
        label = f"{name} {means[name]:.1f}"
        dash = ' stroke-dasharray="7 5"' if name in DASHED else ""
        parts.append(
            f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}" '
            f'stroke="{COLOURS[name]}" stroke-width="3"{dash}/>'
        )
        parts.append(_text(x + 28, y, label))
        x += 44 + 7 * len(label)
    return parts


def _text(x: float, y: float, content: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{content}</text>"
    )


def main() -> None:
    """Measure, unless asked to redraw, and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--redraw", action="store_true", help="from docs/stream.json")
    kept = ROOT / "docs/stream.json"
    if parser.parse_args().redraw:
        flags = json.loads(kept.read_text())["correct"]
        correct = {name: [int(flag) for flag in text] for name, text in flags.items()}
    else:
        correct = measure()
        about = {"network": NETWORK, "corruption": CORRUPTION, "severity": 5, "seed": 0}
        flags = {name: "".join(map(str, one)) for name, one in correct.items()}
        kept.write_text(json.dumps({**about, "correct": flags}, indent=1) + "\n")
    (ROOT / "docs/stream.svg").write_text(drawing(correct))


if __name__ == "__main__":
    main()
