"""The progress of cells on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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

from fata.commands import console, say

if TYPE_CHECKING:
    from fata.bench.cell import Cell
    from fata.bench.run.local import Task


class ProgressDisplay:
    """Progress bars on a terminal; elsewhere a line for each finished cell."""

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
        self._workers: dict[str, str] = {}  # on Ray, by the key of their cell

    def __enter__(self) -> ProgressDisplay:
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
        """Remove the bar of a cell."""
        self.finished += 1
        self._over(task)
        if not console.is_terminal:
            collapsed = "" if result["collapsed_at"] is None else ", collapsed"
            left_out = f", {result['damaged']} damaged left out" if result["damaged"] else ""
            health = result.get("health")
            estimated = f" (estimated {health['predicted']:.2f} %)" if health else ""
            accuracy = f"{result['accuracy']:.2f} %{estimated}{collapsed}{left_out}"
            say(f"{self.finished}/{self.total} {task.cell}: {accuracy}{self._by(task)}")

    def failed(self, task: Task, why: str) -> None:
        """Keep the reason; `close` prints it."""
        self.failures.append((task.cell, why))
        self._over(task)

    def workers_changed(self, workers: Mapping[str, Task | None]) -> None:
        """Show the number of workers; remember the cell of each."""
        self._workers = {task.key: name for name, task in workers.items() if task is not None}
        count = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
        self._progress.update(self._cells, note=count)

    def lost(self, worker: str) -> None:
        """Print it; the cell's bar restarts with another worker."""
        for key in [key for key, name in self._workers.items() if name == worker]:
            if key in self._running:
                self._progress.remove_task(self._running.pop(key))
        say(f"worker {worker} was lost; its cell goes to another")

    def close(self) -> None:
        """Print the failed cells, if any, and exit with 1."""
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
