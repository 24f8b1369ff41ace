"""Draw who imports whom: `python scripts/draw_imports.py` writes docs/imports.svg.

A row a layer, in the order of the contract in pyproject.toml; an arc from each to what it imports,
the wider the more modules do. An arc that points up is red.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
WIDTH, BOX, ROW, GAP = 760, 150, 26, 40
ABOUT = {
    "cli": "the command",
    "commands": "one file a command",
    "serve": "the HTTP service",
    "bench": "grid, cells, store; run, report, paper",
    "testing": "conformance checks",
    "training": "source models",
    "callbacks": "TensorBoard and others",
    "fleet": "many streams on one network",
    "window": "batches of the latest images",
    "results": "of a benchmark, as a table",
    "shared_network": "several methods on one network",
    "stream_settings": "names and settings of streams",
    "adapter": "Adapter and adapt",
    "export": "torch.export, ONNX",
    "stateful": "save, load, the hub",
    "engine": "the step of a batch; fast: captured, compiled",
    "guard": "watches for collapse",
    "data": "data sets and streams",
    "zoo": "models by name",
    "methods": "one file a method; selections, losses, FATA",
    "network": "any nn.Module: layers, parameters, tap",
    "distributed": "ranks that share a batch",
    "corruptions": "ImageNet-C's 19",
}


def layers() -> list[str]:
    """The contract's layers, top first; without the helpers at the bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    names = [name.strip() for layer in contract["layers"] for name in layer.split("|")]
    return [name for name in names if not name.startswith("_")]


def imports(names: list[str]) -> Counter[tuple[int, int]]:
    """How many modules of a layer import something of another."""
    graph = grimp.build_graph("fata")
    found: Counter[tuple[int, int]] = Counter()
    for module in graph.modules:
        here = module.split(".")[1] if "." in module else ""
        there = {
            m.split(".")[1] for m in graph.find_modules_directly_imported_by(module) if "." in m
        }
        if here in names:
            found.update((names.index(here), names.index(t)) for t in there - {here} if t in names)
    return found


def drawing(names: list[str], arcs: Counter[tuple[int, int]]) -> str:
    """The picture as SVG."""
    middle = [GAP + place * (ROW + 14) + ROW / 2 for place in range(len(names))]
    parts = []
    for (a, b), number in sorted(arcs.items()):
        edge, far = BOX + 300, BOX + 340 + 26 * abs(b - a)
        colour = "#b3261e" if b < a else "#1f77b4"
        parts.append(
            f'<path d="M{edge} {middle[a]} C{far} {middle[a]} {far} {middle[b]} '
            f'{edge + 6} {middle[b]}" fill="none" stroke="{colour}" stroke-opacity="0.45" '
            f'stroke-width="{min(4, 0.8 + number / 4):.1f}" marker-end="url(#end)"/>'
        )
    for name, y in zip(names, middle, strict=True):
        parts.append(
            f'<rect x="10" y="{y - ROW / 2}" width="{BOX + 290}" height="{ROW}" rx="5" '
            f'fill="#f4f5f8" stroke="#9aa3b2"/><text x="20" y="{y + 5}" font-weight="600">{name}'
            f'</text><text x="150" y="{y + 5}" fill="#5a6475">{ABOUT.get(name, "")}</text>'
        )
    marker = (
        '<marker id="end" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto" '
        'markerUnits="userSpaceOnUse"><path d="M0 0L6 3L0 6z" fill="#1f77b4"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {middle[-1] + GAP}" '
        f'font-family="system-ui, sans-serif" font-size="13"><defs>{marker}</defs>'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    order = layers()
    (ROOT / "docs/imports.svg").write_text(drawing(order, imports(order)))
