"""`fata tune`: learning rates for any method and network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fata._files import write_whole
from fata.commands import Device, Jobs, chosen_device, console, import_from_here, say
from fata.commands.cells import announce, in_processes, run_cells

if TYPE_CHECKING:
    from fata.bench.store import Record
    from fata.bench.tune import Tuned


def tune(
    model: Annotated[
        str, typer.Option(help="Model: mini_vit, timm:NAME.TAG, FILE, my_module:build, ...")
    ],
    methods: Annotated[
        str,
        typer.Option(
            "--methods", "--method", help="Methods, comma-separated: tent, my_module:MyMethod, ..."
        ),
    ],
    data: Annotated[
        str, typer.Option(help="Data with the four extra corruptions, or clean images.")
    ] = "embedded",
    rates: Annotated[
        str | None, typer.Option(help="Learning rates, comma-separated. Default: 1e-4 to 3e-2.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images of each corruption. Default: all.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: 64.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from 0 on.")] = 1,
    fisher: Annotated[
        str | None, typer.Option(help="Clean images for EATA's penalty, if --data has none.")
    ] = None,
    store: Annotated[Path, typer.Option("--store", help="SQLite file of results.")] = Path(
        "tune.db"
    ),
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Page with the plot and all numbers.")
    ] = Path("tune.html"),
    jobs: Jobs = 1,
    device: Device = None,
) -> None:
    """Find the learning rate of methods on a network.

    Tries every rate on the four extra corruptions, which the benchmark never sees. Cells are stored
    as by fata bench: the same command again runs only what is missing.
    """
    from fata.bench import tune as tuning
    from fata.bench.cell import key
    from fata.bench.grid import GridError
    from fata.bench.run.local import missing
    from fata.bench.run.runner import CellRunner
    from fata.bench.store import Store, StoreError
    from fata.data import DataError
    from fata.methods import parse
    from fata.zoo import ZooError

    specs = [part.strip() for part in methods.split(",") if part.strip()]
    tried = sorted(_rate(part) for part in rates.split(",")) if rates else tuning.RATES
    import_from_here(model, data, *specs, fisher)
    more = {"data": (data,), "images": images, "batch_size": batch_size, "seeds": seeds}
    try:
        plan = {
            (method, rate): tuning.cells(model, tuning.spelled(method, {"lr": rate}), **more)
            for method in specs
            for rate in tried
        }
        for method in specs:
            host, plus = parse(plan[method, tried[0]][0].method)
            if host.params is None and plus is None:
                raise GridError(f"{method!r} has no learning rate to tune")
        source = tuning.cells(model, "source", **more)
        runner = CellRunner(chosen_device(device), fisher=fisher)
        results = Store(store)
        every = [*source, *(cell for some in plan.values() for cell in some)]
        tasks = missing(every, results, runner, again=False)
    except (GridError, DataError, ZooError, StoreError) as error:
        raise typer.BadParameter(str(error)) from error
    announce(every, tasks, results, runner, ": give --fisher SPEC, or fisher_alpha=0")
    watcher = run_cells(tasks, results, runner, in_processes(jobs))
    kept = {record.key: record for record in results}
    before = [kept[name] for cell in source if (name := key(runner.protocol(cell))) in kept]
    found = []
    for method in specs:
        runs = {
            rate: [
                kept[n] for cell in plan[method, rate] if (n := key(runner.protocol(cell))) in kept
            ]
            for rate in tried
        }
        whole = {rate: some for rate, some in runs.items() if len(some) == len(source)}
        if whole:
            found.append(tuning.Tuned(method, whole))
    if found:
        _show(found, before)
        _write(output, model, found, before)
        say(
            f"fata bench --model {model} --methods {','.join(['source', *(o.spec for o in found)])}"
        )
    watcher.close()


def _show(found: Sequence[Tuned], source: Sequence[Record]) -> None:
    from fata.bench.tune import accuracy, gain

    unadapted = f"; unadapted {accuracy(source):.2f}" if source else ""
    title = f"accuracy in % on the extra corruptions{unadapted}"
    table = Table("method", title=title, title_justify="left")
    for head in ("best rate", "accuracy", "gain", "as good within noise"):
        table.add_column(head, justify="right")
    for one in found:
        best = one.runs[one.rate]
        more = str(gain(source, best)) if len(source) == len(best) else ""
        level = f"{min(one.level):g} to {max(one.level):g}" if len(one.level) > 1 else ""
        table.add_row(one.method, f"{one.rate:g}", f"{accuracy(best):.2f}", more, level)
    console.print(table)
    for one in found:
        if one.at_edge:
            end = "lowest" if one.rate == min(one.runs) else "highest"
            say(f"{one.method}: {one.rate:g} is the {end} rate tried: add others with --rates")


def _write(output: Path, model: str, found: Sequence[Tuned], source: Sequence[Record]) -> None:
    from fata.bench.report.page import page
    from fata.bench.report.tables import comparisons
    from fata.bench.tune import accuracy, drawn

    records = [*source, *(r for one in found for some in one.runs.values() for r in some)]
    top = {
        "sentences": [
            f"{one.method}: {one.rate:g} is the best rate, {accuracy(one.runs[one.rate]):.2f} %."
            for one in found
        ],
        "figure": drawn(found, source),
        "caption": "Accuracy on the four extra corruptions against the learning rate, higher is "
        "better; dashed: the network without adaptation.",
        "strips": [],
    }
    try:
        write_whole(output, page(comparisons(records), f"fata tune {model}", top=top))
    except OSError as error:
        raise typer.BadParameter(f"cannot write {str(output)!r}: {error}") from error
    say(f"plot and tables: {output}")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise typer.BadParameter(f"rate {text!r}: give positive numbers, such as 1e-4,1e-3.")
    return rate
