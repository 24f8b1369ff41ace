"""The tables of class balance and of the Tiny-ImageNet networks: `python -m benchmarks.tiny200`.

Prints what docs/lab/tiny200.md and docs/balance.md show, from the kept runs: every method on the 15
corruptions, other scenarios, ablations, class balance against the hosts (on the embedded networks
and ImageNet images, too), the newer hosts, the default beside NEO, and methods at their default
rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.archive import kept
from benchmarks.balance import HARM, NEAR
from benchmarks.presets import HOSTS
from benchmarks.tables import markdown
from fata.bench.report.formats import markdown as report
from fata.bench.report.tables import comparisons
from fata.bench.store import Record

FORMS = ("", "+fata", "+fata, FATA balanced", "+fata, both balanced")
HALF = " 1/2"  # FATA at half weight
FAR = 2.0  # points
SHOWN = 5  # harmed streams of a method, at most
RECOMMENDED = ("eata+fata, both balanced 1/2", "neo", "neo+fata")  # the default, and two others
BALANCE = {  # archives; of two runs of a stream the later counts
    "Tiny-ImageNet networks": ("tiny200", "balance-tiny200"),
    "embedded networks": ("balance-mini",),
    "ImageNet images": ("imagenet", "balance-imagenet"),
}
Cells = dict[str, float]  # accuracy, by corruption
Networks = Mapping[tuple[str, str], Mapping[str, Cells]]  # by network and scenario, then by method


class Gap(NamedTuple):
    """A form of FATA on a stream, and how many points it is above others."""

    form: str
    network: str
    scenario: str
    host: str
    corruption: str
    over_host: float
    over_source: float
    over_paper: float  # the paper's FATA
    host_harmed: bool
    paper_harmed: bool
    paper_healthy: bool  # not harmed, and near its host or above


def method(host: str, form: str, half: str = HALF) -> str:
    """The name that `variant` gives to a form of a host."""
    return host + form + (half if "balanced" in form else "")


def variant(record: Record) -> str:
    """A method, and what of it is balanced."""
    host, plus = record.protocol["host"], record.protocol["plus"]
    name = host["name"] + (" (COME)" if host.get("entropy") == "come" else "")
    if plus is None:
        return f"{name}, balanced" if host.get("balance") else name
    balanced = ", both balanced" if host.get("balance") else ", FATA balanced"
    form = balanced if plus.get("balance") else ""
    half = HALF if plus.get("weight") == 0.5 else ""
    return f"{name}+fata{form}{half}"


def stream(record: Record) -> str:
    """The corruption; frost differs by the pictures it was made of."""
    names = record.protocol["domains"]
    name = names[0] if len(names) == 1 else f"{len(names)} corruptions"
    frost = any("frost" in name for name in names)
    return f"{name} ({record.protocol['data']['frost']})" if frost else name


def by_variant(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, Cells]]:
    """Accuracies of the first order: by network and scenario, method, corruption."""
    found: dict[tuple[str, str], dict[str, Cells]] = {}
    for record in records:
        p = record.protocol
        if p["seed"] == 0:
            at = found.setdefault((p["model"], p["scenario"]["name"]), {})
            at.setdefault(variant(record), {})[stream(record)] = record.result["accuracy"]
    return found


def points(accuracy: float, other: float) -> float:
    """How far one accuracy is above another; without the noise that decides at a limit."""
    return round(accuracy - other, 6)


def shared(methods: Mapping[str, Cells]) -> dict[str, Cells]:
    """The same methods, on the corruptions that all of them have."""
    names = set.intersection(*(set(cells) for cells in methods.values()))
    return {
        method: {c: accuracy for c, accuracy in cells.items() if c in names}
        for method, cells in methods.items()
    }


def forms(networks: Networks, half: str = HALF) -> list[Gap]:
    """Print the means of each host's forms; returns how they compare on each stream."""
    rows, gaps = [], []
    for (model, scenario), methods in sorted(networks.items(), key=lambda at: at[0][::-1]):
        for host in HOSTS:
            names = {form: method(host, form, half) for form in FORMS}
            if names[FORMS[-1]] not in methods:
                continue
            known = {form: methods[name] for form, name in names.items() if name in methods}
            own = shared({"source": methods["source"], **known})
            means = [f"{mean(own[f].values()):.2f}" if f in own else "" for f in ("source", *FORMS)]
            rows.append([scenario, model, host, f"{len(own['source'])}", *means])
            for form in FORMS[1:]:
                for corruption, accuracy in own.get(form, {}).items():
                    source, alone, paper = (own[f][corruption] for f in ("source", "", "+fata"))
                    gap = Gap(
                        form,
                        model,
                        scenario,
                        host,
                        corruption,
                        over_host=points(accuracy, alone),
                        over_source=points(accuracy, source),
                        over_paper=points(accuracy, paper),
                        host_harmed=points(alone, source) < -HARM,
                        paper_harmed=points(paper, source) < -HARM,
                        paper_healthy=points(paper, max(source - HARM, alone - NEAR)) >= 0,
                    )
                    gaps.append(gap)
    titles = ["scenario", "network", "host", "streams", "source", *(f or "host" for f in FORMS)]
    print(markdown(titles, rows))
    return gaps


def summary(gaps: Iterable[Gap], networks: bool = True) -> None:
    """Print how the forms compare with the host, the source and the paper's FATA."""
    groups: dict[tuple[str, str], list[Gap]] = {}
    for gap in gaps:
        own = (gap.network, f"{gap.network}, {gap.scenario}") if networks else ()
        joined = ("mixed and continual",) if gap.scenario in ("mixed", "continual") else ()
        for where in ("all", gap.scenario, *joined, *own):
            groups.setdefault((where, gap.form), []).append(gap)
    rows = []
    for (where, form), group in sorted(groups.items()):
        below = [gap for gap in group if gap.over_host < -NEAR]
        harmed = [gap for gap in group if gap.over_source < -HARM]
        healthy = [gap.over_paper for gap in group if gap.paper_healthy]
        facts = {
            "streams": f"{len(group)}",
            "over the host": f"{mean(gap.over_host for gap in group):+.2f}",
            f"at most {NEAR} below": f"{100 * (1 - len(below) / len(group)):.1f} %",
            "worst": f"{min(gap.over_host for gap in group):+.2f}",
            f"over {NEAR} below: host harmed": f"{sum(g.host_harmed for g in below)}/{len(below)}",
            f"over {FAR:g} below": f"{sum(gap.over_host < -FAR for gap in group)}",
            f"{HARM:g} below source": f"{len(harmed)}",
            "of these the host": f"{sum(gap.host_harmed for gap in harmed)}",
            "the paper's FATA": f"{sum(gap.paper_harmed for gap in group)}",
            "over that where it is healthy": f"{mean(healthy):+.2f} ({len(healthy)})"
            if healthy
            else "",
        }
        rows.append([where, form, *facts.values()])
    print("\n" + markdown(["where", "form", *facts], rows))


def below_host(records: Iterable[Record], gaps: Iterable[Gap]) -> None:
    """Print what host and FATA learned from, where a balanced form is below its host."""
    found = {
        (r.protocol["model"], r.protocol["scenario"]["name"], variant(r), stream(r)): r.result
        for r in records
        if r.protocol["seed"] == 0
    }

    def learned(result: Mapping[str, Any], term: str) -> str:
        right = result["pseudo_labels"][term]
        return f"{result['counts']['selected'][term]} ({0 if right is None else right:.0f} %)"

    rows = []
    for gap in sorted(gaps, key=lambda gap: gap.over_host):
        if gap.over_host < -NEAR and gap.form in FORMS[2:]:
            alone, with_fata = (
                found[gap.network, gap.scenario, method(gap.host, form), gap.corruption]
                for form in ("", gap.form)
            )
            place = (gap.form, gap.scenario, gap.network, gap.host, gap.corruption)
            over = [f"{gap.over_host:+.2f}", f"{gap.over_source:+.2f}"]
            rows.append([*place, *over, learned(alone, gap.host), learned(with_fata, "fata")])
    titles = ["form", "scenario", "network", "host", "corruption", "over the host", "over source"]
    print(markdown([*titles, "rows of the host alone (right)", "rows of FATA (right)"], rows))


def averages(networks: Networks) -> None:
    """Mean of each method a network; its worst stream and those harmed, against the source."""
    every = {model: shared(methods) for (model, _), methods in networks.items()}
    rows = []
    for name in next(iter(every.values())):
        gaps = {
            (model, corruption): points(accuracy, methods["source"][corruption])
            for model, methods in every.items()
            for corruption, accuracy in methods[name].items()
        }
        means = [mean(methods[name].values()) for methods in every.values()]
        harmed = sorted((gap, *at) for at, gap in gaps.items() if gap < -HARM)
        shown = [f"{gap:+.2f} {model} {corruption}" for gap, model, corruption in harmed[:SHOWN]]
        each = ", ".join(str(sum(at == model for _, at, _ in harmed)) for model in every)
        count = f"{len(harmed)} of {len(gaps)} ({each})"
        facts = [f"{min(gaps.values()):+.2f}", count, ", ".join(shown)]
        rows.append([name, *(f"{m:.2f}" for m in [*means, mean(means)]), *facts])
    titles = [f"{model} ({len(methods['source'])})" for model, methods in every.items()]
    harm = ["worst against source", f"{HARM:g} below (by network)", "these are"]
    print(markdown(["method", *titles, "mean", *harm], rows))


def recommended(networks: Networks) -> None:
    """Print what the default and NEO gain on the better of source and norm, where all of them ran.

    `norm` was not measured on ResNet-50: a row is without it.
    """
    groups: dict[tuple[str, str], list[list[float]]] = {}
    for (model, scenario), methods in networks.items():
        if not all(name in methods for name in RECOMMENDED):
            continue
        places = [("all", ""), (scenario, data_of(model)), (scenario, model)]
        if model != "resnet50":
            places.append(("all but resnet50", ""))
        known = ("source", "norm", *RECOMMENDED)
        own = shared({name: methods[name] for name in known if name in methods})
        for corruption in own["source"]:
            best = max(own[name][corruption] for name in known[:2] if name in own)
            gains = [points(own[name][corruption], best) for name in RECOMMENDED]
            for where in places:
                groups.setdefault(where, []).append(gains)
    rows = []
    for where, group in sorted(groups.items()):
        each = list(zip(*group, strict=True))
        means = [f"{mean(gains):+.2f}" for gains in each]
        harmed = [f"{sum(gain < -HARM for gain in gains)}" for gains in each]
        rows.append([*where, f"{len(group)}", *means, *harmed, *(f"{min(g):+.2f}" for g in each)])
    titles = [f"{name}{fact}" for fact in ("", ": harmed", ": worst") for name in RECOMMENDED]
    print(markdown(["scenario", "data", "streams", *titles], rows))


def data_of(model: str) -> str:
    """What images a network is for, in a word."""
    return next((one for one in ("mini", "tiny200") if model.startswith(one)), "ImageNet")


def sources(name: str) -> dict[tuple[str, str], dict[str, Cells]]:
    """The unadapted models of kept runs."""
    return {at: {"source": methods["source"]} for at, methods in by_variant(kept(name)).items()}


def ablations(records: Iterable[Record]) -> None:
    """Mean and collapsed streams of each setting; the mean but frost, and where none collapses."""
    found: dict[str, dict[str, Record]] = {}
    usual: Mapping[str, Any] = {}
    for record in records:
        fields = record.protocol["plus"] or {}
        usual = usual or fields
        changed = [f"{name}={fields[name]}" for name in fields if fields[name] != usual[name]]
        name = ":".join([record.protocol["method"], *changed])
        found.setdefault(name, {})[stream(record)] = record
    collapsed = {
        name: {c for c, r in own.items() if r.result["collapsed_at"] is not None}
        for name, own in found.items()
    }
    calm = set.intersection(*map(set, found.values())).difference(*collapsed.values())
    rows = []
    for name, own in found.items():
        still = [c for c in own if "frost" not in c]
        means = [mean(own[c].result["accuracy"] for c in some) for some in (own, still, calm)]
        where = ", ".join(sorted(collapsed[name]))
        rows.append([name, *(f"{m:.2f}" for m in means), where, *{c for c in own if "frost" in c}])
    titles = ["method", "15", "14: all but frost", f"{len(calm)}: where no setting collapses"]
    print(markdown([*titles, "collapsed", "frost"], rows))


def main() -> None:
    """Print them all."""
    for comparison in comparisons(kept("tiny200")):
        print(report(comparison))
    records, gaps = list[Record](), list[Gap]()
    for title, archives in BALANCE.items():
        print(f"\n# Class balance on the 15, FATA at half weight: {title}")
        own = [record for name in archives for record in kept(name)]
        found = forms(by_variant(own))
        summary(found)
        records, gaps = [*records, *own], [*gaps, *found]
    print("\n# Class balance on all of these streams")
    summary(gaps, networks=False)
    print(f"\n# Streams over {NEAR} below the host")
    below_host(records, gaps)
    print("\n# Class balance on the extra corruptions")
    extra = by_variant(kept("balance-extra"))
    for half in ("", HALF):
        summary(forms(extra, half))
    print("\n# Single images")
    averages(by_variant(kept("bs1-tiny200")))
    averages(by_variant(kept("bs1-tiny200-bn")))
    print("\n# Ablations")
    ablations(kept("ablations-tiny200"))
    print("\n# The newer hosts on the 15")
    source = sources("tiny200")
    newer = by_variant(kept("newer-tiny200"))
    averages({at: {**source[at], **methods} for at, methods in newer.items()})
    others = by_variant([*kept("newer-scenarios"), *kept("newer-imagenet")])
    for family, scenario in sorted({(data_of(model), name) for model, name in others}):
        print(f"\n# The newer hosts: {family}, {scenario}")
        own = {at: m for at, m in others.items() if (data_of(at[0]), at[1]) == (family, scenario)}
        averages(own)
    print("\n# The default and NEO, above the better of source and norm")
    known = [r for r in kept("tiny200") if variant(r) in ("source", "norm")]
    default = [r for r in kept("default-rates-15") if variant(r) == RECOMMENDED[0]]
    names = ("newer-tiny200", "newer-scenarios", "newer-imagenet")
    recommended(by_variant([*known, *default, *(r for name in names for r in kept(name))]))
    print("\n# Default rates on the extra corruptions, BatchNorm blended")
    averages(by_variant(kept("default-rates")))
    print("\n# Default rates on the 15, BatchNorm blended")
    source |= sources("balance-mini")
    rates = by_variant(kept("default-rates-15"))
    averages({at: {**source[at], **methods} for at, methods in rates.items()})


if __name__ == "__main__":
    main()
