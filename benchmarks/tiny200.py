"""The tables of the Tiny-ImageNet networks, from the kept runs: `python -m benchmarks.tiny200`.

Prints what docs/lab/tiny200.md and docs/balance.md show: every method on the 15 corruptions, other
scenarios, class balance against the hosts, the newer hosts, and methods at their default rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from benchmarks.archive import kept
from benchmarks.balance import HARM, NEAR
from benchmarks.presets import HOSTS
from benchmarks.tables import markdown
from fata.bench.report.formats import markdown as report
from fata.bench.report.tables import comparisons
from fata.bench.store import Record

FORMS = ("", "+fata", "+fata, FATA balanced", "+fata, both balanced")
Cells = dict[str, float]  # accuracy, by corruption


def variant(record: Record) -> str:
    """A method, and what of it is balanced."""
    host, plus = record.protocol["host"], record.protocol["plus"]
    name = host["name"] + (" (COME)" if host.get("entropy") == "come" else "")
    if plus is None:
        return f"{name}, balanced" if host.get("balance") else name
    balanced = ", both balanced" if host["balance"] else ", FATA balanced"
    form = balanced if plus["balance"] else ""
    half = " 1/2" if plus["weight"] == 0.5 else ""
    return f"{name}+fata{form}{half}"


def by_variant(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, Cells]]:
    """Accuracies of the first order: by network and scenario, method, corruption."""
    found: dict[tuple[str, str], dict[str, Cells]] = {}
    for record in records:
        p = record.protocol
        if p["seed"] == 0:
            at = found.setdefault((p["model"], p["scenario"]["name"]), {})
            at.setdefault(variant(record), {})[str(p["domains"])] = record.result["accuracy"]
    return found


def forms(cells: Mapping[tuple[str, str], Mapping[str, Cells]], half: str) -> None:
    """Means of each host's forms; then how the forms compare with the host alone."""
    rows, gaps = [], dict[tuple[str, str], list[tuple[float, float]]]()
    for (model, scenario), methods in sorted(cells.items(), key=lambda at: at[0][::-1]):
        for host in HOSTS:
            names = [host + form + (half if "balanced" in form else "") for form in FORMS]
            own = [methods[name] for name in names]
            means = [f"{mean(one.values()):.2f}" for one in (methods["source"], *own)]
            rows.append([scenario, model, host, *means])
            for form, one in zip(FORMS[1:], own[1:], strict=True):
                gaps.setdefault((form, "all"), []).extend(
                    found := [
                        (one[c] - methods[host][c], one[c] - methods["source"][c]) for c in one
                    ]
                )
                gaps.setdefault((form, scenario), []).extend(found)
                gaps.setdefault((form, model), []).extend(found)
    print(markdown(["scenario", "network", "host", "source", *(f or "host" for f in FORMS)], rows))
    summary = []
    for (form, where), both in gaps.items():
        over, unadapted = zip(*both, strict=True)
        near = f"{100 * mean(gap >= -NEAR for gap in over):.1f} %"
        harmed = sum(gap < -HARM for gap in unadapted)
        facts = [f"{mean(over):+.2f}", near, f"{min(over):+.2f}", f"{harmed}"]
        summary.append([where, form, f"{len(over)}", *facts])
    titles = ["where", "form", "streams", "over the host", f"at most {NEAR} below", "worst"]
    print("\n" + markdown([*titles, f"{HARM:g} below source"], sorted(summary)))


def averages(cells: Mapping[tuple[str, str], Mapping[str, Cells]]) -> None:
    """Mean of each method a network, and the worst stream against the source."""
    models = [model for model, _ in cells]
    rows = []
    for method in next(iter(cells.values())):
        own = [methods[method] for methods in cells.values()]
        sources = [methods["source"] for methods in cells.values() if "source" in methods]
        worst = min(
            (o[c] - s[c] for o, s in zip(own, sources, strict=False) for c in o), default=0.0
        )
        means = [mean(one.values()) for one in own]
        rows.append([method, *(f"{m:.2f}" for m in means), f"{mean(means):.2f}", f"{worst:+.2f}"])
    print(markdown(["method", *models, "mean", "worst against source"], rows))


def main() -> None:
    """Print them all."""
    for comparison in comparisons(kept("tiny200")):
        print(report(comparison))
    print("\n# Class balance on the 15, FATA at half weight")
    forms(by_variant([*kept("tiny200"), *kept("balance-tiny200")]), " 1/2")
    print("\n# Class balance on the extra corruptions")
    extra = by_variant(kept("balance-extra"))
    for half in ("", " 1/2"):
        forms(extra, half)
    print("\n# The newer hosts on the 15")
    source = {at: {"source": m["source"]} for at, m in by_variant(kept("tiny200")).items()}
    newer = by_variant(kept("newer-tiny200"))
    averages({at: {**source[at], **methods} for at, methods in newer.items()})
    print("\n# Default rates on the extra corruptions, BatchNorm blended")
    averages(by_variant(kept("default-rates")))


if __name__ == "__main__":
    main()
