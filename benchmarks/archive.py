"""The runs behind docs/results.md, kept small: `python -m benchmarks.archive results.db NAME`.

A store without its curves, counts by class and pictures, a line a cell, in
benchmarks/runs/NAME.jsonl.gz.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fata.bench.store import Record, Store

RUNS = Path(__file__).with_name("runs")
LARGE = ("curve", "classes", "samples")


def lines(name: str) -> list[Any]:
    """What was written, line by line."""
    with gzip.open(RUNS / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def kept(name: str) -> list[Record]:
    """The cells that were kept."""
    return [Record(**line) for line in lines(name)]


def keep(store: Store, name: str) -> int:
    """Write the cells of a store; how many there are."""
    cells = [asdict(record) for record in store]
    for cell in cells:
        cell["result"] = {k: v for k, v in cell["result"].items() if k not in LARGE}
    text = "".join(json.dumps(cell, sort_keys=True) + "\n" for cell in cells)
    RUNS.joinpath(f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return len(cells)


def main() -> None:
    """Keep a store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    print(f"{keep(Store(args.store), args.name)} cells in {RUNS / args.name}.jsonl.gz")


if __name__ == "__main__":
    main()
