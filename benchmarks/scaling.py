"""How time and memory grow: `python -m benchmarks.scaling --json FILE --svg FILE`.

A ResNet with GroupNorm, and one size varied at a time: images in a batch, classes, blocks in a
stage, pixels a side. A step of EATA+FATA with 40 % of the rows selected, each point in a process of
its own. Printed with the growth since the point before: 1.0 is linear in the number of images,
classes, blocks or pixels, less is cheaper.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fata
from benchmarks import share as shares
from benchmarks.race import WARM, allocated, seconds
from benchmarks.share import Share
from benchmarks.speed import conditions, markdown

AXES = {
    "batch": (1, 4, 16, 64, 256, 1024),
    "classes": (10, 100, 1000, 5000, 21000),
    "blocks": (1, 2, 4, 8, 16),
    "side": (16, 32, 64, 128),
}
BASE = {"batch": 64, "classes": 10, "blocks": 1, "side": 32}
Point = dict[str, Any]


def measure(sizes: dict[str, int], args: argparse.Namespace) -> Point:
    """Seconds of a step, and what it, the network and the images need of memory at the peak."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    on_gpu = args.device.startswith("cuda")
    before = allocated() if on_gpu else resident("VmRSS")
    depths = [sizes["blocks"]] * 4
    model = fata.tiny.ResNet("gn", sizes["classes"], args.widths, depths).to(args.device)
    images = torch.randn(sizes["batch"], 3, sizes["side"], sizes["side"]).to(args.device)
    shares.spread(model, images)
    fields = shares.settings(model, args.method, images, Share.of_all(args.share))
    adapter = fata.adapt(model, args.method, guard=None, speed=args.speed, **fields)
    for _ in range(WARM):
        adapter(images)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
    taken = median(seconds(adapter, images) for _ in range(args.rounds))
    return {**sizes, "seconds": taken, "bytes": peak - before}


def resident(what: str) -> int:
    """Memory of this process: now (VmRSS), or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return 1024 * int(status[what].split()[0])


def growth(axis: str, points: list[Point], what: str) -> list[str]:
    """By which power each point grew since the one before."""
    power = 2 if axis == "side" else 1  # pixels
    found = (
        math.log(b[what] / a[what]) / math.log(b[axis] / a[axis]) / power
        for a, b in pairwise(points)
    )
    return ["", *(f"{exponent:.2f}" for exponent in found)]


def table(axis: str, points: list[Point]) -> str:
    """The points of one size, as a table of Markdown."""
    columns = (
        [f"{point[axis]:,}" for point in points],
        [f"{1e3 * point['seconds']:,.1f}" for point in points],
        growth(axis, points, "seconds"),
        [f"{point['bytes'] / 2**20:,.1f}" for point in points],
        growth(axis, points, "bytes"),
    )
    rows = [list(row) for row in zip(*columns, strict=True)]
    return markdown([axis, "ms", "growth", "MiB", "growth"], rows)


def svg(found: dict[str, list[Point]]) -> str:
    """A panel a size, both scales logarithmic: time, and memory dashed, over the first point's."""
    panels = (panel(axis, points, 45 + 230 * i) for i, (axis, points) in enumerate(found.items()))
    style = "rect{fill:none;stroke:#888}text{font:11px sans-serif;fill:#888}polyline{fill:none}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {230 * len(found) + 15} 190">'
    return "\n".join([f"{head}<style>{style}</style>", *panels, "</svg>", ""])


def panel(axis: str, points: list[Point], left: int) -> str:
    """One size: a frame of 180 x 150 pixels, its lines, its ends."""
    over = {
        what: [math.log(point[what] / points[0][what]) for point in points]
        for what in ("seconds", "bytes")
    }
    low, high = (pick(map(pick, over.values())) for pick in (min, max))
    far = math.log(points[-1][axis] / points[0][axis])
    parts = [f'<rect x="{left}" y="10" width="180" height="150"/>']
    for what, dash in (("seconds", "none"), ("bytes", "5 3")):
        places = (
            f"{left + 180 * math.log(point[axis] / points[0][axis]) / far:.1f},"
            f"{10 + 150 * (high - value) / (high - low):.1f}"
            for point, value in zip(points, over[what], strict=True)
        )
        drawn = f'stroke="#36c" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{" ".join(places)}" {drawn}/>')
    for x, y, anchor, text in (
        (left, 175, "start", f"{points[0][axis]:,}"),
        (left + 90, 175, "middle", axis),
        (left + 180, 175, "end", f"{points[-1][axis]:,}"),
        (left - 4, 20, "end", f"x {math.exp(high):.3g}"),
        (left - 4, 160, "end", f"x {math.exp(low):.2g}"),
    ):
        parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>')
    return "\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--method", default="eata+fata")
    parser.add_argument("--widths", nargs=4, type=int, default=[8, 16, 24, 32])
    parser.add_argument("--speed", default="exact", choices=["exact", "fast"])
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    found = {}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for axis in args.axes:
            sizes = [{**BASE, axis: size} for size in AXES[axis]]
            found[axis] = [pool.apply(measure, (size, args)) for size in sizes]
            print(f"{table(axis, found[axis])}\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions(args), **found}, indent=2) + "\n")
    if args.svg:
        args.svg.write_text(svg(found))


if __name__ == "__main__":
    main()
