"""`fata bench`: run a grid, resume it, see where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fata.commands import Device, Jobs, Workers, chosen_device, console, look_here, say

if TYPE_CHECKING:
    from fata.bench.cell import Cell
    from fata.bench.grid import Grid
    from fata.bench.run.local import Task
    from fata.bench.run.runner import Workshop
    from fata.bench.store import Store


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--models",
            help="Networks, by comma: mini_resnet_gn, vit_base@sar, timm:NAME.TAG, ...",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data sets, by comma: embedded, imagenet-c:DIR, ...")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "--method",
            help="By comma, with fields: eata, eata+fata:lr=1e-3, my_module:MyMethod, ...",
        ),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            "--scenario", "--scenarios", help="By comma: normal, bs1, label-shift:ratio=1000, ..."
        ),
    ] = None,
    domains: Annotated[
        str | None,
        typer.Option(
            "--domains",
            "--domain",
            help="Corruptions or folders, by comma; by default the 15, or all folders.",
        ),
    ] = None,
    severity: Annotated[
        str | None,
        typer.Option("--severity", "--severities", help="1 to 5, by comma; by default 5."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of orders of the images; by default 1.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images a batch; by default 64, for bs1 1.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images of each domain; by default all.")
    ] = None,
    jpeg: Annotated[
        bool | None, typer.Option("--jpeg", help="Made corruptions go through JPEG.")
    ] = None,
    fisher: Annotated[
        str | None, typer.Option(help="Data with clean images for EATA, where --data has none.")
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="exact, or fast: bfloat16, on a GPU recorded passes; by default exact."),
    ] = None,
    guard: Annotated[
        bool | None, typer.Option("--guard", help="Let a guard watch for collapses.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A grid in YAML or TOML; flags go over it.")
    ] = None,
    store: Annotated[Path, typer.Option("--store", "-o", help="The file of results.")] = Path(
        "results.db"
    ),
    jobs: Jobs = 1,
    device: Device = None,
    on: Annotated[
        str | None,
        typer.Option(help="ray: on a Ray cluster; by default in this machine's own processes."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Of the Ray cluster, such as auto; by default one on this machine."),
    ] = None,
    gpus_per_cell: Annotated[
        float | None,
        typer.Option(min=0, help="On Ray: such as 0.25; by default 1 where there are GPUs."),
    ] = None,
    workers: Workers = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged pictures out, and count them.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Run the cells that are in the store too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells, and about how long they will take.")
    ] = False,
) -> None:
    """Compare methods: a grid of models, data, scenarios, methods and seeds.

    Each cell is kept in the store as soon as it is done. The same command again runs what is
    missing: after Ctrl-C, a crash, or with more methods or seeds.
    """
    from fata.bench.cell import key
    from fata.bench.grid import GridError
    from fata.bench.report.tables import comparisons
    from fata.bench.run import torchrun as ranks
    from fata.bench.run.local import missing
    from fata.bench.run.runner import Workshop
    from fata.bench.store import Store, StoreError
    from fata.commands.tables import show
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
        "seeds": seeds,
        "batch_size": batch_size,
        "images": images,
        "jpeg": jpeg,
        "fisher": fisher,
        "speed": speed,
        "guard": guard,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    with _place(on, address, gpus_per_cell, device, jobs, dry_run) as (own_device, runner):
        group, own_device = ranks.join(own_device)
        if group is not None and (on or jobs > 1 or dry_run):
            raise typer.BadParameter("--on, --jobs and --dry-run are not for use under torchrun.")
        try:
            grid = _grid(config, given)
            look_here(grid.methods)
            parts = (grid.jpeg, grid.fisher, workers, skip_damaged)
            workshop = Workshop(own_device, *parts, group=group)
            if ranks.follows(group):
                ranks.follow(workshop)
                return
            cells = list(grid.cells(open_data))
            ranks.check(group, cells)
            results = Store(store)
            tasks = missing(cells, results, workshop, again)
        except (GridError, DataError, ZooError, StoreError) as error:
            raise typer.BadParameter(str(error)) from error
        remedy = ": give --fisher SPEC, or fisher_alpha=0 to mean it"
        announce(cells, tasks, results, workshop, remedy)
        if dry_run:
            try:
                preview(tasks, results, workshop, jobs)
            except ValueError as error:  # of fields that only the network can refuse
                raise typer.BadParameter(str(error)) from error
            return
        ranks.lead(group, tasks)
        watcher = carry_out(tasks, results, workshop, runner)
    wanted = {key(workshop.protocol(cell)) for cell in cells}
    for table in comparisons(record for record in results if record.key in wanted):
        show(table)
    watcher.close()


def announce(
    cells: Sequence[Cell], tasks: Sequence[Task], store: Store, workshop: Workshop, remedy: str
) -> None:
    """How many cells there are to run, and what they lack."""
    cells_made = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    known = sum(task.key in store for task in tasks)  # to be run again
    over = f", {known} of which are run again" if known else ""
    say(f"{cells_made}, {len(cells) - len(tasks) + known} of them in {store.path}{over}")
    if any(workshop.lacks_fisher(task.cell) for task in tasks):
        say(f"EATA has no clean images for its Fisher penalty and runs without it{remedy}")
    if any(_grows_frost(task) for task in tasks):
        say("frost is grown: to compare with other figures, pip install imagecorruptions-imaug")


def _grows_frost(task: Task) -> bool:
    met = any(name.startswith("frost") for name in task.protocol["domains"])
    return met and task.protocol["data"].get("frost") == "procedural"


def preview(tasks: Sequence[Task], store: Store, workshop: Workshop, jobs: int) -> None:
    """The cells to run, and about how long they will take."""
    from fata.bench.run.local import estimate

    for task in tasks:
        say(f"  {task.cell}")
    if tasks:
        took, memory = estimate(tasks, store, workshop)
        say(
            f"about {timedelta(seconds=round(took / jobs))} with {jobs} at a time, and "
            f"{memory * jobs / 2**30:.1f} GiB"
        )


def carry_out(tasks: Sequence[Task], store: Store, workshop: Workshop, runner: Runner) -> Show:
    """Run cells and show how it goes; Ctrl-C leaves those that are done."""
    from fata.bench.store import StoreError

    watcher, anew = Show(len(tasks)), any(task.key in store for task in tasks)
    try:
        with watcher:
            runner(tasks, store, workshop, watcher)
    except KeyboardInterrupt:
        say(
            f"stopped: {watcher.finished} of {len(tasks)} cells done and kept in {store.path}; the "
            f"same command {'begins anew' if anew else 'goes on from there'}"
        )
        raise typer.Exit(130) from None
    except StoreError as error:  # such as a full disk
        say(f"stopped, {watcher.finished} of {len(tasks)} cells are kept: {error}")
        raise typer.Exit(1) from None
    return watcher


Runner = Callable[["Sequence[Task]", "Store", "Workshop", "Show"], None]


def here(jobs: int) -> Runner:
    """What runs cells in processes of this machine."""
    from fata.bench.run.local import run

    return partial(run, jobs=jobs)


class Place(NamedTuple):
    """Where cells are run."""

    device: str  # of what is done in this process
    runner: Runner


@contextmanager
def _place(
    on: str | None,
    address: str | None,
    gpus_per_cell: float | None,
    device: str | None,
    jobs: int,
    dry_run: bool,
) -> Iterator[Place]:
    """This machine, or a Ray cluster while we are connected to it."""
    if on not in (None, "ray"):
        raise typer.BadParameter(f"--on {on}: give ray, or leave it out.")
    if on is None and (address, gpus_per_cell) != (None, None):
        raise typer.BadParameter("--address and --gpus-per-cell are for --on ray.")
    if on is None or dry_run:
        yield Place(chosen_device(device), here(jobs))
        return
    try:
        from fata.bench.run import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise typer.BadParameter("--on ray needs Ray: pip install fata[ray]") from error
    gpus = _gpus(device, gpus_per_cell)
    try:
        with on_ray.connected(address):
            one = on_ray.share(gpus, jobs)
            yield Place("cpu", partial(on_ray.run, one=one))
    except on_ray.ClusterError as error:
        raise typer.BadParameter(str(error)) from error


def _gpus(device: str | None, gpus: float | None) -> float | None:
    """For a cell on Ray, where the device says it."""
    if device is None:
        return gpus
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}: on Ray it is cpu or cuda.")
    if gpus is not None and (device == "cuda") != (gpus > 0):
        raise typer.BadParameter(f"--device {device} with --gpus-per-cell {gpus:g}: give one.")
    return gpus if gpus is not None else float(device == "cuda")


class Show:
    """Progress on a terminal; a line a finished cell elsewhere."""

    def __init__(self, total: int) -> None:
        self.finished, self.total = 0, total
        self.failures: list[tuple[Cell, str]] = []
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._cells = self._progress.add_task("cells", total=total, note="")
        self._running: dict[str, TaskID] = {}
        self._workers: dict[str, str] = {}  # on Ray, by the key of the cell that each is at

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tick(self, task: Task, seen: int, accuracy: float) -> None:
        """Move the bar of a running cell."""
        if task.key not in self._running:
            length = task.protocol["length"]
            bar = self._progress.add_task(f"  {task.cell}{self._by(task)}", total=length, note="")
            self._running[task.key] = bar
        self._progress.update(self._running[task.key], completed=seen, note=f"{accuracy:.1%}")

    def done(self, task: Task, result: dict[str, Any]) -> None:
        """Take a cell's bar away."""
        self.finished += 1
        self._over(task)
        if not console.is_terminal:
            fallen = "" if result["collapsed_at"] is None else ", collapsed"
            left_out = f", {result['damaged']} damaged left out" if result["damaged"] else ""
            accuracy = f"{result['accuracy']:.2f} %{fallen}{left_out}"
            say(f"{self.finished}/{self.total} {task.cell}: {accuracy}{self._by(task)}")

    def failed(self, task: Task, why: str) -> None:
        """Remember why; it is told at the end."""
        self.failures.append((task.cell, why))
        self._over(task)

    def staffed(self, workers: Mapping[str, Task | None]) -> None:
        """How many workers there are, and which cell each is at."""
        self._workers = {task.key: name for name, task in workers.items() if task is not None}
        people = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
        self._progress.update(self._cells, note=people)

    def lost(self, worker: str) -> None:
        """Say so; the cell's bar starts anew with another worker."""
        for key in [key for key, name in self._workers.items() if name == worker]:
            if key in self._running:
                self._progress.remove_task(self._running.pop(key))
        say(f"worker {worker} was lost; its cell goes to another")

    def close(self) -> None:
        """Tell what failed, if anything did, and end with exit code 1."""
        for cell, why in self.failures:
            console.print(Text("failed", "red"), f"{cell}: {why}")
        if self.failures:
            raise typer.Exit(1)

    def _by(self, task: Task) -> str:
        return f", by {self._workers[task.key]}" if task.key in self._workers else ""

    def _over(self, task: Task) -> None:
        if task.key in self._running:
            self._progress.remove_task(self._running.pop(task.key))
        self._progress.advance(self._cells)


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


def _severity(text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise typer.BadParameter(f"severity {text!r}: choose from 1, 2, 3, 4, 5.")
    return int(text)
