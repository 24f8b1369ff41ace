"""Where cells run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import typer

from fata.commands import chosen_device
from fata.commands.cells import RunTasks, in_processes


class Backend(NamedTuple):
    """Where cells are run."""

    device: str  # of this process
    run_tasks: RunTasks


@contextmanager
def backend(
    on: str | None,
    address: str | None,
    gpus_per_cell: float | None,
    device: str | None,
    jobs: int,
    dry_run: bool,
) -> Iterator[Backend]:
    """This machine, or a Ray cluster while we are connected to it."""
    if on not in (None, "ray"):
        raise typer.BadParameter(f"--on {on}: give ray, or leave it out.")
    if on is None and (address, gpus_per_cell) != (None, None):
        raise typer.BadParameter("--address and --gpus-per-cell are for --on ray.")
    if on is None or dry_run:
        yield Backend(chosen_device(device), in_processes(jobs))
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
            resources = on_ray.worker_resources(gpus, jobs)
            yield Backend("cpu", partial(on_ray.run, resources=resources))
    except on_ray.ClusterError as error:
        raise typer.BadParameter(str(error)) from error


def _gpus(device: str | None, gpus: float | None) -> float | None:
    """GPUs for a cell on Ray, consistent with --device."""
    if device is None:
        return gpus
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}: on Ray give cpu or cuda.")
    if gpus is not None and (device == "cuda") != (gpus > 0):
        raise typer.BadParameter(f"--device {device} with --gpus-per-cell {gpus:g}: give one.")
    return gpus if gpus is not None else float(device == "cuda")
