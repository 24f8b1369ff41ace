"""What FATA gained in the runs behind docs/results.md: `python -m benchmarks.gains`.

Reads the runs of `benchmarks.embedded` that lie in benchmarks/runs: on the extra corruptions, at
equal settings; and in the table, by how many of the source's sure answers were right.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.embedded import HOSTS, SPECS, show_table

RUNS = Path(__file__).with_name("runs")
BINS = (0, 80, 88, 94, 100)
Run = dict[str, Any]


def read(name: str) -> list[Run]:
    """The runs of a file."""
    with gzip.open(RUNS / f"embedded-{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Each run of a host, and the one with FATA on the same stream with the same settings."""
    found: dict[tuple[str, ...], dict[str, Run]] = {}
    for run in runs:
        host = run["spec"].partition("+")[0]
        if host in HOSTS:
            at = (run["model"], host, run["domain"], str(run["seed"]), json.dumps(run["fields"]))
            found.setdefault(at, {})[run["spec"]] = run
    return [(both[host], both[f"{host}+fata"]) for (_, host, *_), both in found.items()]


def gain(some: list[tuple[Run, Run]]) -> str:
    """Mean gain in points, and how often there is one."""
    gains = [plus["accuracy"] - host["accuracy"] for host, plus in some]
    return f"{mean(gains):+.2f} ({sum(g > 0 for g in gains)} of {len(gains)})"


def collapsed(run: Run) -> bool:
    """One class has more than half of the last quarter's predictions."""
    return bool(run["top_class"] > 50)


def main() -> None:
    """Print the tables of docs/results.md."""
    tried, table = read("presets"), read("table")
    models = list(dict.fromkeys(run["model"] for run in table))[::-1]
    show_table(table, SPECS)
    print("\nat equal settings, extra corruptions: all rates, then by rate")
    for model in models:
        for host in HOSTS:
            own = [p for p in pairs(tried) if (p[0]["model"], p[0]["spec"]) == (model, host)]
            rates = sorted({p[0]["fields"]["lr"] for p in own})
            by_rate = {r: gain([p for p in own if p[0]["fields"]["lr"] == r]) for r in rates}
            print(f"{model:15} {host:5} {gain(own):22} {by_rate}")
    print("\nin the table: cells in which neither collapses; collapsed without and with FATA")
    for model in models:
        for host in HOSTS:
            own = [p for p in pairs(table) if (p[0]["model"], p[0]["spec"]) == (model, host)]
            upright = [p for p in own if not any(map(collapsed, p))]
            fallen = [sum(map(collapsed, side)) for side in zip(*own, strict=True)]
            print(f"{model:15} {host:5} {gain(upright):22} {fallen}")
    print("\nin the table, over hosts, by the share of the source's sure answers that are right, %")
    right = {(r["model"], r["domain"]): r["sure_right"] for r in table if r["spec"] == "norm"}
    for model in models:
        for low, high in pairwise(BINS):
            cells: dict[tuple[str, str], list[tuple[Run, Run]]] = {}
            for pair in pairs(table):
                at = (pair[0]["model"], pair[0]["domain"])
                if at[0] == model and low <= right[at] < high:
                    cells.setdefault((pair[0]["spec"], at[1]), []).append(pair)
            if cells:
                gains = [mean(b["accuracy"] - a["accuracy"] for a, b in c) for c in cells.values()]
                fallen = [
                    sum(any(collapsed(pair[side]) for pair in c) for c in cells.values())
                    for side in (1, 0)
                ]
                print(
                    f"{model:15} {low:2} to {high:3}: {len(cells)} cells, {mean(gains):+.2f}",
                    end="",
                )
                print(f", collapsed with FATA {fallen[0]}, without {fallen[1]}")


if __name__ == "__main__":
    main()
