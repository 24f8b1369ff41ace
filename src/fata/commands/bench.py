"""`fata bench`: run or resume a grid."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fata.commands import Device, Jobs, Workers, import_from_here
from fata.commands.backends import backend
from fata.commands.cells import announce, preview, run_cells

if TYPE_CHECKING:
    from fata.bench.grid import Grid


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--models",
            help="Models, comma-separated: mini_resnet_gn, timm:NAME.TAG, my_module:build, ...",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data sets, comma-separated: embedded, imagenet-c:DIR, my_module:loader, ..."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "--method",
            help="Methods, comma-separated: eata, eata+fata:lr=1e-3, my_module:MyMethod, ...",
        ),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            "--scenario",
            "--scenarios",
            help="Scenarios, comma-separated: normal, bs1, label-shift:ratio=1000, ...",
        ),
    ] = None,
    domains: Annotated[
        str | None,
        typer.Option(
            "--domains",
            "--domain",
            help="Corruptions or folders, comma-separated. Default: the 15, or all folders.",
        ),
    ] = None,
    severity: Annotated[
        str | None,
        typer.Option("--severity", "--severities", help="1 to 5, comma-separated. Default: 5."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, from 0 on. Default: 1.")
    ] = None,
    seed: Annotated[
        str | None, typer.Option(help="Seeds, comma-separated, in place of --seeds: 7, 8, ...")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size. Default: 64, and 1 for bs1.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images of each domain. Default: all.")
    ] = None,
    jpeg: Annotated[
        bool | None, typer.Option("--jpeg", help="JPEG-compress corruptions made on the fly.")
    ] = None,
    fisher: Annotated[
        str | None, typer.Option(help="Clean images for EATA's penalty, if --data has none.")
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="exact, or fast: bfloat16, CUDA graphs on a GPU. Default: exact."),
    ] = None,
    guard: Annotated[
        bool | None, typer.Option("--guard", help="Run with the guard against collapse.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sliding window: each batch is the newest part of the latest N images."
        ),
    ] = None,
    reset_every: Annotated[
        int | None,
        typer.Option(min=1, help="Restore the source model after every N batches (RDumb)."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A grid in YAML or TOML; options override it.")
    ] = None,
    store: Annotated[Path, typer.Option("--store", "-o", help="SQLite file of results.")] = Path(
        "results.db"
    ),
    jobs: Jobs = 1,
    device: Device = None,
    on: Annotated[
        str | None,
        typer.Option(help="ray: on a Ray cluster. Default: processes of this machine."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster, such as auto. Default: a new one on this machine."
        ),
    ] = None,
    gpus_per_cell: Annotated[
        float | None,
        typer.Option(
            min=0, help="GPUs for a cell on Ray, such as 0.25. Default: 1 if there are GPUs."
        ),
    ] = None,
    workers: Workers = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out damaged images, and count them.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Run cells again that are in the store.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only list the cells, and estimate their time."),
    ] = False,
) -> None:
    """Compare methods: a grid of models, data, scenarios, methods and seeds.

    Each cell is stored as soon as it is done. The same command again runs only what is missing:
    after Ctrl-C, after a crash, or with more methods or seeds.
    """
    from fata.bench.cell import key
    from fata.bench.grid import GridError
    from fata.bench.report.tables import comparisons
    from fata.bench.run import torchrun as ranks
    from fata.bench.run.local import missing
    from fata.bench.run.runner import CellRunner
    from fata.bench.store import Store, StoreError
    from fata.commands.show_comparison import show
    from fata.data import DataError
    from fata.data import open as open_data
    from fata.zoo import ZooError

    flags = {
        "models": _split(model),
        "data": _split(data),
        "methods": _split(methods),
        "scenarios": _split(scenario),
        "domains": _split(domains),
        "severities": tuple(map(_severity, _split(severity) or ())) or None,
        "seeds": _seeds(seeds, seed),
        "batch_size": batch_size,
        "images": images,
        "jpeg": jpeg,
        "fisher": fisher,
        "speed": speed,
        "guard": guard,
        "window": window,
        "reset_every": reset_every,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    with backend(on, address, gpus_per_cell, device, jobs, dry_run) as (own_device, run_tasks):
        group, own_device = ranks.join(own_device)
        if group is not None and (on or jobs > 1 or dry_run):
            raise typer.BadParameter("--on, --jobs and --dry-run are not supported under torchrun.")
        try:
            grid = _grid(config, given)
            import_from_here(*grid.models, *grid.data, *grid.methods, grid.fisher)
            parts = (grid.jpeg, grid.fisher, workers, skip_damaged)
            runner = CellRunner(own_device, *parts, group=group)
            if ranks.follows(group):
                ranks.follow(runner)
                return
            cells = list(grid.cells(open_data))
            ranks.check(group, cells)
            results = Store(store)
            tasks = missing(cells, results, runner, again)
        except (GridError, DataError, ZooError, StoreError) as error:
            raise typer.BadParameter(str(error)) from error
        remedy = ": give --fisher SPEC, or fisher_alpha=0"
        announce(cells, tasks, results, runner, remedy)
        if dry_run:
            try:
                preview(tasks, results, runner, jobs)
            except ValueError as error:  # of fields that do not fit the network
                raise typer.BadParameter(str(error)) from error
            return
        ranks.lead(group, tasks)
        watcher = run_cells(tasks, results, runner, run_tasks)
    wanted = {key(runner.protocol(cell)) for cell in cells}
    show(comparisons(record for record in results if record.key in wanted))
    watcher.close()


def _grid(config: Path | None, flags: dict[str, Any]) -> Grid:
    from fata.bench.grid import Grid, GridError, read

    fields = {**(read(config) if config else {}), **flags}
    if "models" not in fields:
        raise GridError("give --model, such as --model mini_resnet_gn, or models in --config.")
    return Grid(**fields)


def _split(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _seeds(number: int | None, listed: str | None) -> int | tuple[int, ...] | None:
    """The number of seeds, or the seeds themselves."""
    if listed is None:
        return number
    if number is not None:
        raise typer.BadParameter("--seeds is their number, --seed are the seeds: give one of them.")
    parts = _split(listed) or ()
    if not parts or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--seed {listed}: give whole numbers, such as 7 or 7,8.")
    return tuple(map(int, parts))


def _severity(text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise typer.BadParameter(f"severity {text!r}: choose from 1, 2, 3, 4, 5.")
    return int(text)
