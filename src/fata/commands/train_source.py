"""`fata train-source`: train a source model on one domain."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from fata.commands import Device, Workers, chosen_device, console, import_from_here, say

if TYPE_CHECKING:
    from fata.training import Epoch
    from fata.zoo import Loaded


def train_source(
    data: Annotated[
        str, typer.Option(help="Images: office-home:DIR, folder:DIR, or my_module:loader.")
    ],
    model: Annotated[
        str, typer.Option(help="Pretrained model: a name for fata.zoo.load, or my_module:build.")
    ],
    domain: Annotated[
        str | None, typer.Option(help="Domain to train on; all: one model for each.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", "--output", "-o", help="A .safetensors file, or a folder."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs. Default: 30.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Batch size. Default: 64.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate; 10 x for the head. Default: 0.01, transformers 3e-5."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, the order and the crops.")] = 0,
    device: Device = None,
    workers: Workers = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out images that cannot be read.")
    ] = False,
) -> None:
    """Fine-tune a network on one domain: a source model to adapt to other domains.

    The file is written after every epoch: Ctrl-C keeps the last one. See docs/train-source.md.
    """
    import torch

    from fata import training, zoo
    from fata.data import DataError
    from fata.data import open as open_data

    where = chosen_device(device)
    import_from_here(data, model)
    try:
        dataset = open_data(data)
        output_files = training.output_files(dataset, domain, model, output)
        loaded = zoo.load(model)
        recipe = training.Recipe.suiting(
            loaded.model, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed
        )
        for name, place in output_files.items():
            say(
                f"{name}: {loaded.name} on {where}, {recipe.optimizer} at {recipe.lr:g}, batches "
                f"of {recipe.batch_size}"
            )
            train = partial(training.train_source, loaded, dataset, name, place, recipe)
            options = {"device": where, "workers": workers, "skip_damaged": skip_damaged}
            _watched(partial(train, **options), place, recipe.epochs)
    except torch.cuda.OutOfMemoryError as error:
        raise typer.BadParameter(f"{error}; give a smaller --batch-size") from error
    except (DataError, zoo.ZooError, training.TrainingError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _watched(train: Callable[..., Loaded], place: Path, epochs: int) -> None:
    """Train with a progress bar and a line for each epoch; Ctrl-C stops after the batch."""
    finished, stopped, started = 0, False, perf_counter()

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one stops at once

    def on_batch(done: float, loss: float) -> None:
        text = f"epoch {finished + 1}/{epochs}, loss {loss:.3f}"
        progress.update(task, completed=done, description=text)
        if stopped:
            raise KeyboardInterrupt

    def on_epoch(epoch: Epoch) -> None:
        nonlocal finished
        finished = epoch.number
        say(
            f"epoch {finished}/{epochs}: loss {epoch.loss:.3f}, {epoch.accuracy:.1f} % of the "
            f"held-out images, {perf_counter() - started:.0f} s"
        )
        if stopped:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)  # during a batch, workers would print errors
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("reading images", total=1.0)
            recipe = train(on_batch=on_batch, on_epoch=on_epoch).recipe
    except KeyboardInterrupt:
        kept = f"{place} has the last one" if finished else "nothing was written"
        say(f"stopped after {finished} of {epochs} epochs; {kept}")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)
    damaged = f", {recipe['damaged']} damaged ones left out" if recipe["damaged"] else ""
    say(
        f"{place}: learned from {recipe['learned_from']} images, {recipe['accuracy']:.1f} % of "
        f"{recipe['tested_on']} others{damaged}"
    )
