"""The `fata` command."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

import fata
from fata import check as battery
from fata import tiny
from fata.augment import Fata
from fata.commands.bench import bench
from fata.commands.report import report
from fata.method import Method, OwnStep
from fata.structure import listed

if TYPE_CHECKING:
    from fata.training import Epoch
    from fata.zoo import Loaded

app = typer.Typer(
    help="Test-time adaptation of image classifiers, with feature augmentation (FATA).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()
app.command()(bench)
app.command()(report)


def _version(show: bool) -> None:
    if show:
        console.print(f"fata {fata.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Test-time adaptation of image classifiers, with feature augmentation (FATA)."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each network.")] = 200,
    images: Annotated[int, typer.Option(min=1, help="Pictures of each shift.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the pictures and the weights.")] = 0,
) -> None:
    """Train tiny networks on generated pictures, shift the pictures, adapt: a table by method.

    MEMO is left out: 64 views of every picture take minutes.
    """
    from fata.demo import run

    console.print("training three tiny networks, then adapting each by every method but MEMO ...")
    run(console, steps, images, seed)


@app.command()
def corrupt(
    picture: Annotated[Path, typer.Argument(help="A photograph, in any common format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the sheet goes.")] = Path(
        "sheet.png"
    ),
    name: Annotated[
        list[str] | None, typer.Option(help="Only this corruption; may be given again.")
    ] = None,
    size: Annotated[int, typer.Option(min=16, help="Side of the images, in pixels.")] = 224,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Draw the sheet of all corruptions and severities of a photograph."""
    from PIL import Image, UnidentifiedImageError

    from fata.corruptions import BY_NAME, sheet

    names = name or list(BY_NAME)
    if unknown := [one for one in names if one not in BY_NAME]:
        raise typer.BadParameter(f"{unknown[0]!r}: choose from {', '.join(BY_NAME)}")
    try:
        with Image.open(picture) as opened:
            image = sheet.square(opened, size)
    except (OSError, UnidentifiedImageError) as error:
        raise typer.BadParameter(f"cannot read {str(picture)!r}: {error}") from error
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("corrupting", total=6 * len(names))
        drawn = sheet.draw(image, names, seed, lambda: progress.advance(task))
    try:
        drawn.save(output)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot write {str(output)!r}: {error}") from error
    console.print(f"{output}: {len(names)} corruptions, {drawn.width} x {drawn.height} pixels")


@app.command("data")
def show_data(
    spec: Annotated[str, typer.Argument(help="Such as embedded or imagenet-c:DIR.")],
    download: Annotated[
        bool, typer.Option("--download", help="Fetch CIFAR-10 where it is missing.")
    ] = False,
    read: Annotated[bool, typer.Option("--check", help="Read every picture.")] = False,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="With --check: count damaged pictures only.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="That should fit: a name that fata.zoo.load takes.")
    ] = None,
) -> None:
    """Say what is in a data set: classes, domains, images, and where corruptions come from.

    --check reads every picture and exits with 1 where one is damaged (--skip-damaged: with 0).
    """
    from fata import zoo
    from fata.data import KINDS, DataError, survey
    from fata.data import open as open_data

    if skip_damaged and not read:
        raise typer.BadParameter("--skip-damaged goes with --check")
    try:
        fit = zoo.load(model) if model else None
        dataset = open_data(spec, fit=fit, download=download)
        hidden = not console.is_terminal
        domains = track(survey.on_disk(dataset), "listing", None, console=console, disable=hidden)
        fingerprint, found = dataset.fingerprint(domains), survey.found(dataset)
    except (DataError, zoo.ZooError) as error:
        raise typer.BadParameter(str(error)) from error
    table = Table("domain", "severities", "images")
    for one in found:
        table.add_row(one.name, ", ".join(map(str, one.severities)), f"{one.images:,}")
    images = sum(one.images for one in found)
    _say(f"{spec}: {KINDS[spec.partition(':')[0]]}")
    _say(f"{len(dataset.classes):,} classes: {listed(dataset.classes, 10)}")
    console.print(table)
    if dataset.made:
        made, facts = {d.name for d in dataset.domains if d.severity}, dataset.provenance
        _say(f"and {len(made)} corruptions, {facts['corruptions']}; frost: {facts['frost']}")
    _say(f"fingerprint of the images: {fingerprint}")
    if fit is not None:
        _say(f"fits {fit}")
    if read:
        _read_all(survey.read_all(dataset), images, skip_damaged)


def _read_all(pictures: Iterator[tuple[int, list[str]]], total: int, skip_damaged: bool) -> None:
    """Read pictures under a bar; name the damaged ones, or only count them."""
    damaged = 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        for count, broken in pictures:
            progress.advance(task, count)
            damaged += len(broken)
            for one in () if skip_damaged else broken:
                _say(f"damaged: {one}")
    _say(f"read {total:,} images, {damaged:,} damaged")
    if damaged and not skip_damaged:
        raise typer.Exit(1)


@app.command()
def train_source(
    data: Annotated[str, typer.Option(help="Pictures in folders: office-home:DIR, or folder:DIR.")],
    model: Annotated[str, typer.Option(help="Where to start: a name that fata.zoo.load takes.")],
    domain: Annotated[
        str | None, typer.Option(help="To train on; all: one model for each.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .safetensors file, or a folder for the usual names."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's 30.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=2, help="Instead of the recipe's 64.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Instead of 0.01 (transformers: 3e-5); the head's is 10 x.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split, the order and the crops.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Such as cuda:1; by default cuda where there is one.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that decode pictures.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out pictures that cannot be read.")
    ] = False,
) -> None:
    """Fine-tune a network on one domain: a source model to adapt to the others.

    Written after every epoch, so Ctrl-C keeps the last one. The recipe: docs/train-source.md.
    """
    from fata import training, zoo
    from fata.data import DataError
    from fata.data import open as open_data

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=where)
    except (AssertionError, RuntimeError) as error:
        raise typer.BadParameter(f"no device {where!r}: {error}") from error
    try:
        dataset = open_data(data)
        places = training.places(dataset, domain, model, output)
        loaded = zoo.load(model)
        recipe = training.Recipe.suiting(
            loaded.model, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed
        )
        for name, place in places.items():
            _say(
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
    """Train: a bar on a terminal, a line an epoch everywhere; Ctrl-C stops after the batch."""
    finished, stopped, started = 0, False, perf_counter()

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second time: at once

    def on_batch(done: float, loss: float) -> None:
        text = f"epoch {finished + 1}/{epochs}, loss {loss:.3f}"
        progress.update(task, completed=done, description=text)
        if stopped:
            raise KeyboardInterrupt

    def on_epoch(epoch: Epoch) -> None:
        nonlocal finished
        finished = epoch.number
        _say(
            f"epoch {finished}/{epochs}: loss {epoch.loss:.3f}, {epoch.accuracy:.1f} % of the "
            f"held-out pictures, {perf_counter() - started:.0f} s"
        )
        if stopped:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)  # in the midst of a batch workers would complain
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("reading pictures", total=1.0)
            recipe = train(on_batch=on_batch, on_epoch=on_epoch).recipe
    except KeyboardInterrupt:
        kept = f"{place} has the last of them" if finished else "nothing was written"
        _say(f"stopped after {finished} of {epochs} epochs; {kept}")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)
    damaged = f", {recipe['damaged']} damaged ones left out" if recipe["damaged"] else ""
    _say(
        f"{place}: learned from {recipe['learned_from']} pictures, {recipe['accuracy']:.1f} % of "
        f"{recipe['tested_on']} others{damaged}"
    )


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command()
def check(
    method: Annotated[str, typer.Argument(help="Your method, as my_module:MyMethod.")],
    net: Annotated[
        list[str] | None,
        typer.Option(help="Only this network (resnet_bn, resnet_gn, vit_ln); may be given again."),
    ] = None,
) -> None:
    """Run the battery of checks on a method of your own, alone and with FATA.

    The method is made without arguments, and adapts small networks with BatchNorm, GroupNorm and
    LayerNorm in batches of 16 and of 1. Exits with 1 where a check fails.
    """
    mine, nets = _load(method), net or list(tiny.NAMES)
    if unknown := [name for name in nets if name not in tiny.NAMES]:
        raise typer.BadParameter(f"{unknown[0]!r}: choose from {', '.join(tiny.NAMES)}")
    torch.set_num_threads(1)  # fastest for networks this small
    variants: list[Fata | None] = [None] if isinstance(mine, OwnStep) else [None, Fata()]
    failures: dict[str, dict[str, list[str]]] = {}
    todo = [(c, p) for c in battery.CHECKS for p in variants]
    for one, plus in track(todo, "checking", console=console, transient=True):
        for case in (c for c in battery.cases(mine, plus) if c.net in nets):
            try:
                one(case)
            except Exception as error:
                where = f"{case.net}, batches of {case.rows}{', with FATA' if plus else ''}"
                problem = f"{type(error).__name__}: {error}"
                failures.setdefault(one.__name__, {}).setdefault(problem, []).append(where)
    table = Table("check", "", "what it holds to", title=f"{mine!r}")
    for one in battery.CHECKS:
        mark = "[red]fails[/]" if one.__name__ in failures else "[green]holds[/]"
        table.add_row(one.__name__.replace("_", " "), mark, (one.__doc__ or "").splitlines()[0])
    console.print(table)
    for name, problems in failures.items():
        console.print(f"[red]{name.replace('_', ' ')}[/]")
        for problem, cases in problems.items():
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            console.print(f"  {problem} ({cases[0]}{more})", highlight=False, markup=False)
    if failures:
        raise typer.Exit(1)


def _load(target: str) -> Method:
    module, _, name = target.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"{target!r}: give a module and a class, as my_module:MyMethod")
    sys.path.insert(0, str(Path.cwd()))
    try:
        kind = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"{target!r}: {error}, looked for in this folder too") from error
    except AttributeError as error:
        raise typer.BadParameter(f"{target!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise typer.BadParameter(f"{target!r} is no subclass of fata.Method")
    try:
        return kind()
    except TypeError as error:
        raise typer.BadParameter(f"{target!r}: needs a default for each field: {error}") from error
