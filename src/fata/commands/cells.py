"""Cells of a grid: what is announced, estimated and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import typer

from fata.commands import say
from fata.commands.progress import ProgressDisplay

if TYPE_CHECKING:
    from fata.bench.cell import Cell
    from fata.bench.run.local import Task
    from fata.bench.run.runner import CellRunner
    from fata.bench.store import Store

RunTasks = Callable[["Sequence[Task]", "Store", "CellRunner", ProgressDisplay], None]


def announce(
    cells: Sequence[Cell], tasks: Sequence[Task], store: Store, runner: CellRunner, remedy: str
) -> None:
    """Print the number of cells to run, and what they lack."""
    from fata.bench.report.remarks import small_batches

    cells_made = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    known = sum(task.key in store for task in tasks)  # to be run again
    over = f", {known} of which are run again" if known else ""
    say(f"{cells_made}, {len(cells) - len(tasks) + known} of them in {store.path}{over}")
    if any(runner.lacks_fisher(task.cell) for task in tasks):
        say(f"EATA has no clean images for its Fisher penalty and runs without it{remedy}")
    for model, size in _small_batches(tasks):
        if runner.has_batch_norm(model):
            say(small_batches(model, size))
    if runner.device.startswith("cuda") and any(task.cell.speed == "fast" for task in tasks):
        say("fast: every method warms up first; a large network takes minutes the first time")
    if any(_has_procedural_frost(task) for task in tasks):
        say("frost is procedural: for the published textures, pip install imagecorruptions-imaug")


def _small_batches(tasks: Sequence[Task]) -> list[tuple[str, int]]:
    """Models that adapt, with batches of which BatchNorm's statistics would be unreliable."""
    from fata.bench.report.remarks import SMALL

    met = dict.fromkeys(
        (task.cell.model, max(task.protocol["batch_size"], task.cell.window or 1))
        for task in tasks
        if task.cell.method != "source"
    )
    return [(model, size) for model, size in met if size < SMALL]


def _has_procedural_frost(task: Task) -> bool:
    met = any(name.startswith("frost") for name in task.protocol["domains"])
    return met and task.protocol["data"].get("frost") == "procedural"


def preview(tasks: Sequence[Task], store: Store, runner: CellRunner, jobs: int) -> None:
    """Print the cells to run, and an estimate of their time."""
    from fata.bench.run.local import estimate

    for task in tasks:
        say(f"  {task.cell}")
    if tasks:
        took, memory = estimate(tasks, store, runner)
        say(
            f"about {timedelta(seconds=round(took / jobs))} with {jobs} at a time, and "
            f"{memory * jobs / 2**30:.1f} GiB"
        )


def run_cells(
    tasks: Sequence[Task], store: Store, runner: CellRunner, run_tasks: RunTasks
) -> ProgressDisplay:
    """Run cells and show their progress; Ctrl-C keeps the finished ones."""
    from fata.bench.store import StoreError

    watcher, restart = ProgressDisplay(len(tasks)), any(task.key in store for task in tasks)
    try:
        with watcher:
            run_tasks(tasks, store, runner, watcher)
    except KeyboardInterrupt:
        say(
            f"stopped: {watcher.finished} of {len(tasks)} cells done and kept in {store.path}; the "
            f"same command {'starts over' if restart else 'continues from there'}"
        )
        raise typer.Exit(130) from None
    except StoreError as error:  # such as a full disk
        say(f"stopped, {watcher.finished} of {len(tasks)} cells are kept: {error}")
        raise typer.Exit(1) from None
    return watcher


def in_processes(jobs: int) -> RunTasks:
    """Runs cells in processes of this machine."""
    from fata.bench.run.local import run

    return partial(run, jobs=jobs)
