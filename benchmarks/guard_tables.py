"""The tables of `benchmarks.guard`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from statistics import StatisticsError, correlation, mean
from typing import Any

HARM = -1.0  # percentage points against the better of source and norm


def show(found: list[dict[str, Any]], streams: Iterable[str]) -> None:
    """A line for each kind of stream, in the order of `streams`, and the errors of `health`."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        groups.setdefault(one["stream"], []).append(one)
    print("| streams | | healthy | changed by | worst | harmed | without | with | below | worst |")
    print("|---|" + "---:|" * 9)
    for name, some in (*((n, groups[n]) for n in streams if n in groups), ("together", found)):
        print(f"| {' | '.join((name, *_row(some)))} |")
    for one in sorted(found, key=_against)[:20]:
        if _against(one) < HARM:
            print(_against(one), {k: v for k, v in one.items() if not k.startswith("health")})
    below = [one for one in found if _against(one) < HARM]
    print(
        f"{len(below)} of {len(found)} streams ({len(below) / len(found):.1%}) end more than 1 pp "
        f"below the better of source and norm; the worst {min(map(_against, found)):+.2f} pp"
    )
    for model in dict.fromkeys(one["model"] for one in found):
        some = [one for one in found if one["model"] == model and one["health_source"] is not None]
        with suppress(StatisticsError):  # too few
            pairs = [(one["health_source"], one["source"]) for one in some]
            print(
                f"{model}: health.source is off by {mean(abs(a - b) for a, b in pairs):.1f} pp, "
                f"correlation {correlation(*zip(*pairs, strict=True)):.2f}"
            )


def _best(one: dict[str, Any]) -> float:
    return max(one["source"], one.get("norm", 0))


def _against(one: dict[str, Any]) -> float:
    return one["with"] - _best(one)


def _row(some: list[dict[str, Any]]) -> tuple[str, ...]:
    healthy = [one["with"] - one["without"] for one in some if one["without"] - _best(one) >= HARM]
    harmed = [one for one in some if one["without"] - _best(one) < HARM]
    return (
        str(len(some)),
        str(len(healthy)),
        f"{mean(healthy):+.2f}" if healthy else "",
        f"{min(healthy):+.2f}" if healthy else "",
        str(len(harmed)),
        f"{mean(one['without'] - _best(one) for one in harmed):+.2f}" if harmed else "",
        f"{mean(_against(one) for one in harmed):+.2f}" if harmed else "",
        str(sum(_against(one) < HARM for one in some)),
        f"{min(map(_against, some)):+.2f}",
    )
