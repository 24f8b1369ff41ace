"""What FATA gained in the runs behind docs/results.md: `python -m benchmarks.gains`.

Reads what lies in benchmarks/runs (`benchmarks.archive`) and prints the tables of that page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.archive import kept, lines
from benchmarks.presets import HOSTS
from fata.bench.report.formats import markdown
from fata.bench.report.names import labels
from fata.bench.report.tables import Comparison, comparisons, domain_name
from fata.bench.store import Record

SHARES = (0, 80, 88, 94, 100)  # of the source's sure answers, in %
Pair = tuple[Record, Record]  # a host, and host+FATA on the same stream with the same settings


def collapsed(record: Record) -> bool:
    """One class has taken over."""
    return record.result["collapsed_at"] is not None


def pairs(records: Iterable[Record]) -> list[Pair]:
    """Each cell of a host, and that with FATA."""
    found: dict[str, dict[bool, Record]] = {}
    for record in records:
        p = record.protocol
        at = (p["model"], p["scenario"], p["domains"], p["seed"], p["images"], p["host"], p["lr"])
        if p["plus"] is None or (p["plus"]["sigma"] == 1 and p["plus"]["threshold"] == 0.5):
            found.setdefault(str(at), {})[p["plus"] is not None] = record
    return [(both[False], both[True]) for both in found.values() if len(both) == 2]


def gain(values: Iterable[float]) -> str:
    """Mean in points, and how often it is one."""
    gains = list(values)
    return f"{mean(gains):+.2f} ({sum(g > 0 for g in gains)} of {len(gains)})" if gains else "-"


def gain_of(some: Iterable[Pair]) -> str:
    """Of host+FATA over the host."""
    return gain(plus.result["accuracy"] - host.result["accuracy"] for host, plus in some)


def equal_settings() -> None:
    """On the extra corruptions, from the search for presets: all rates, then by rate."""
    runs: dict[tuple[Any, ...], dict[str, float]] = {}
    for run in lines("presets"):
        host, _, plus = run["spec"].partition("+")
        at = (run["model"], host, run["fields"]["lr"], run["domain"], str(run["fields"]))
        runs.setdefault(at, {})[plus] = run["accuracy"]
    print("\nextra corruptions, at equal settings: all rates, then by rate")
    for model, host in dict.fromkeys(at[:2] for at in runs):
        own = {at: both["fata"] - both[""] for at, both in runs.items() if at[:2] == (model, host)}
        rates = sorted({at[2] for at in own})
        by_rate = {rate: gain(g for at, g in own.items() if at[2] == rate) for rate in rates}
        print(f"{model:15} {host:5} {gain(own.values()):22} {by_rate}")


def upright(records: list[Record]) -> None:
    """Gains where neither collapses, and how many do."""
    print("\ncells in which neither collapses; collapsed without and with FATA")
    for model in dict.fromkeys(record.protocol["model"] for record in records):
        for host in HOSTS:
            own = [p for p in pairs(records) if _is(p, model, host)]
            fine = [pair for pair in own if not any(map(collapsed, pair))]
            fallen = [sum(map(collapsed, side)) for side in zip(*own, strict=True)]
            print(f"{model:15} {host:5} all {gain_of(own)}, neither {gain_of(fine)}, {fallen}")


def by_right_answers(records: list[Record]) -> None:
    """Over hosts, by the share of the source's sure answers that are right."""
    print("\nby the share of the source's answers with H < 0.5 ln C that are right, %")
    right = {_place(r): _sure_right(r) for r in records if r.protocol["method"] == "source"}
    for model in dict.fromkeys(record.protocol["model"] for record in records):
        for low, high in pairwise(SHARES):
            some = [
                pair
                for pair in pairs(records)
                if pair[0].protocol["model"] == model and low <= right[_place(pair[0])] < high
            ]
            if some:
                fallen = [sum(map(collapsed, side)) for side in zip(*some, strict=True)]
                print(f"{model:15} {low:2} to {high:3}: {gain_of(some)}, collapsed {fallen}")


def classes(records: list[Record]) -> None:
    """How evenly the rows of each term are spread over the predicted classes."""
    print("\nentropy of the selected rows' classes, % of its maximum, where neither collapses:")
    print("the host's alone, the host's with FATA, FATA's; and the share of rows, %")
    for model in dict.fromkeys(record.protocol["model"] for record in records):
        for host in HOSTS:
            fine = [
                pair
                for pair in pairs(records)
                if _is(pair, model, host) and not any(map(collapsed, pair))
            ]
            terms = [(0, host), (1, host), (1, "fata")]
            even = [mean(_evenness(pair[i], term) for pair in fine) for i, term in terms]
            share = [
                mean(100 * p[i].result["counts"]["selected"][t] / p[i].result["rows"] for p in fine)
                for i, t in terms
            ]
            print(
                f"{model:15} {host:5}",
                *(f"{e:.1f} ({s:.0f})" for e, s in zip(even, share, strict=True)),
            )


def _evenness(record: Record, term: str) -> float:
    counts = record.result["classes"]["selected"][term]
    shares = [count / sum(counts) for count in counts if count]
    return -100 * sum(share * math.log(share) for share in shares) / math.log(len(counts))


def settings(name: str) -> None:
    """Means over the corruptions of every setting; without the noises and glass blur, too."""
    hard = ("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur")
    print(f"\n{name}: mean of the 15, mean of the 11 but noises and glass blur, collapsed of 15;")
    print("rows that FATA learns from and how many of their pseudo-labels are right, %")
    for comparison in comparisons(kept(name)):
        for line in comparison.lines:
            if line.average is None:
                continue
            rest = [v.mean for column, v in line.values.items() if column not in hard]
            facts = f"{line.average.mean:.2f} {mean(rest):.2f} {line.average.collapsed}"
            print(
                f"{comparison.model:15} {line.method:40} {facts} {_rows(comparison, line.method)}"
            )


def speeds() -> None:
    """How far `fast` is from `exact`, where neither collapses; which cells are over a point."""
    exact = {_cell(r): r for name in ("normal", "imagenet") for r in kept(name)}
    both = [(record, exact[_cell(record)]) for record in kept("fast-now")]
    for model in dict.fromkeys(record.protocol["model"] for record, _ in both):
        own = [pair for pair in both if pair[0].protocol["model"] == model]
        fine = [pair for pair in own if not any(map(collapsed, pair))]
        apart = [fast.result["accuracy"] - plain.result["accuracy"] for fast, plain in fine]
        print(
            f"\nfast - exact, {model}: {len(fine)} of {len(own)} cells, {mean(apart):+.2f},",
            f"{min(apart):+.2f} to {max(apart):+.2f}, over a point apart:",
        )
        for (fast, plain), change in zip(fine, apart, strict=True):
            if abs(change) > 1:
                print(*_cell(fast), fast.result["accuracy"], plain.result["accuracy"])


def averages(name: str) -> None:
    """Mean of each method, a line a model and scenario; how many of the cells collapsed."""
    print(f"\n{name}: mean accuracy (collapsed of the cells)")
    found: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in kept(name):
        p = record.protocol
        methods = found.setdefault((p["model"], p["scenario"]["name"]), {})
        methods.setdefault(p["method"], []).append(record)
    for at, methods in sorted(found.items()):
        cells = [
            f"{method} {mean(r.result['accuracy'] for r in own):.2f} ({sum(map(collapsed, own))})"
            for method, own in methods.items()
        ]
        print(*at, "|", ", ".join(cells))


def one_by_one() -> None:
    """MEMO, beside not adapting on the same images."""
    print("\nmemo: corruptions, source, memo")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for record in kept("own"):
        p = record.protocol
        if p["images"] == 500:
            at = found.setdefault(p["model"], {}).setdefault(p["domains"][0], {})
            at[p["method"]] = record.result["accuracy"]
    for model, domains in found.items():
        both = [at for at in domains.values() if len(at) == 2]
        means = (f"{mean(at[method] for at in both):.2f}" for method in ("source", "memo"))
        print(model, len(both), *means)


def reference() -> None:
    """The ImageNet networks on the corruptions that the reference figures are of."""
    eight = (
        "gaussian_noise impulse_noise defocus_blur motion_blur snow fog contrast jpeg_compression"
    )
    print("\nImageNet, mean of the reference's eight corruptions; of those in which nobody falls")
    records = [
        r for r in kept("imagenet") if domain_name(r.protocol["domains"][0]) in eight.split()
    ]
    for model in dict.fromkeys(record.protocol["model"] for record in records):
        own = [record for record in records if record.protocol["model"] == model]
        fallen = {record.protocol["domains"][0] for record in own if collapsed(record)}
        for method in dict.fromkeys(record.protocol["method"] for record in own):
            cells = {
                r.protocol["domains"][0]: r.result["accuracy"]
                for r in own
                if r.protocol["method"] == method
            }
            fine = [accuracy for domain, accuracy in cells.items() if domain not in fallen]
            print(f"{model:10} {method:10} {mean(cells.values()):.2f} {mean(fine):.2f}")


FREE = ("normal", "label-shift", "mixed", "bs1", "imagenet", "fast")  # without the guard


def held(*names: str) -> None:
    """What the guard gave: against not adapting, and against the same cells without it.

    Those are as fast as the guarded ones, where they were run so, or `exact`; a guard that did
    nothing is none.
    """
    free = {_cell(r): r for other in FREE for r in kept(other)}  # `fast` goes over `exact`
    still = _still(free)
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    worse: list[tuple[Any, ...]] = []
    for record in (record for name in names for record in kept(name)):
        if record.protocol["guard"] is None:
            continue
        cell = _cell(record)
        own, without = record.result["accuracy"], free[cell] if record.result["guard"] else record
        alone = without.result["accuracy"]
        plain = still[(cell[0], *cell[2:])]
        for at in ((cell[-1], cell[0]), ("together", "")):
            found.setdefault(at, []).append((plain, alone, own))
        if own < plain - 1 or (alone >= plain - 1 and own < alone - 1):
            worse.append((*cell, f"{alone - plain:+.2f} without it, {own - plain:+.2f} with it"))
    print(f"\n{', '.join(names)}: cells;")
    print("those not over a point below not adapting without it: the change;")
    print("the others: against not adapting without and with it; below by a point with it; worst")
    for at, cells in sorted(found.items()):
        fine = [held - free for still, free, held in cells if free >= still - 1]
        hurt = [(free - still, held - still) for still, free, held in cells if free < still - 1]
        before, after = (mean(side) for side in zip(*hurt, strict=True)) if hurt else (0, 0)
        apart = [held - still for still, _, held in cells]
        print(
            *at,
            f"{len(cells)}; {len(fine)}: {mean(fine) if fine else 0:+.2f};",
            f"{len(hurt)}: {before:+.2f}, {after:+.2f};",
            f"{sum(a < -1 for a in apart)}, {min(apart):+.2f}",
        )
    print("over a point below not adapting with it, or below without it where nothing was harmed:")
    for cell in sorted(worse):
        print(*cell)


def _still(free: dict[tuple[str, ...], Record]) -> dict[tuple[str, ...], float]:
    """The best of not adapting, by all of a cell but its method."""
    found: dict[tuple[str, ...], float] = {}
    for (model, method, *place), record in free.items():
        if method in ("source", "norm"):
            at = (model, *place)
            found[at] = max(found.get(at, 0), record.result["accuracy"])
    return found


def _cell(record: Record) -> tuple[str, ...]:
    p = record.protocol
    return p["model"], p["method"], p["domains"][0], p["seed"], p["scenario"]["name"]


def _rows(comparison: Comparison, method: str) -> str:
    names = labels(comparison.records)
    own = [r.result for r, name in zip(comparison.records, names, strict=True) if name == method]
    if "fata" not in own[0]["counts"]["selected"]:
        return ""
    share = mean(100 * r["counts"]["selected"]["fata"] / r["rows"] for r in own)
    right = [r["pseudo_labels"]["fata"] for r in own if r["pseudo_labels"]["fata"] is not None]
    return f"{share:.0f} {mean(right):.1f}" if right else f"{share:.0f} -"


def _is(pair: Pair, model: str, host: str) -> bool:
    return (pair[0].protocol["model"], pair[0].protocol["method"]) == (model, host)


def _place(record: Record) -> tuple[str, str]:
    return record.protocol["model"], domain_name(record.protocol["domains"][0])


def _sure_right(record: Record) -> float:
    right, wrong = (record.result["entropies"][k] for k in ("right", "wrong"))
    half = len(right) // 2  # of the histogram of H / ln C
    return 100 * sum(right[:half]) / (sum(right[:half]) + sum(wrong[:half]))


def main() -> None:
    """Print the tables of docs/results.md."""
    for name in ("normal", "label-shift"):
        records = kept(name)
        for comparison in comparisons(records):
            print(markdown(comparison))
        upright(records)
        by_right_answers(records)
        classes(records)
    equal_settings()
    settings("why")
    settings("ablations")
    speeds()
    for name in ("mixed", "bs1", "own"):
        averages(name)
    one_by_one()
    for comparison in comparisons(kept("imagenet")):
        print(markdown(comparison))
    upright(kept("imagenet"))
    reference()
    for name in ("guard", "guard-fast", "guard-aside", "guard-imagenet"):
        held(name)
    held("guard-now")


if __name__ == "__main__":
    main()
