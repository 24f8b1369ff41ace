"""`fata data`: the contents of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.progress import Progress, track
from rich.table import Table

from fata.commands import console, import_from_here, say


def data(
    spec: Annotated[
        str, typer.Argument(help="embedded, KIND:DIR such as folder:DIR, or my_module:loader.")
    ],
    download: Annotated[
        bool, typer.Option("--download", help="Download CIFAR-10 or CIFAR-100 if it is missing.")
    ] = False,
    read: Annotated[bool, typer.Option("--check", help="Read every image.")] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option("--skip-damaged", help="With --check: exit with 0 despite damaged images."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Check that this model fits: a name for fata.zoo.load.")
    ] = None,
) -> None:
    """Show the classes, domains and images of a data set, and the origin of its corruptions.

    --check reads every image, names the damaged ones and exits with 1 if there are any.
    """
    from fata import zoo
    from fata._text import listed
    from fata.data import KINDS, DataError, survey
    from fata.data import open as open_data

    if skip_damaged and not read:
        raise typer.BadParameter("--skip-damaged needs --check")
    try:
        import_from_here(spec, model)
        fit = zoo.load(model) if model else None
        dataset = open_data(spec, fit=fit, download=download)
        hidden = not console.is_terminal
        domains = track(dataset.stored, "listing", None, console=console, disable=hidden)
        fingerprint, domain_sizes = dataset.fingerprint(domains), survey.domain_sizes(dataset)
        ignored_files = survey.ignored_files(dataset)
    except (DataError, zoo.ZooError) as error:
        raise typer.BadParameter(str(error)) from error
    table = Table("domain", "severities", "images")
    for one in domain_sizes:
        table.add_row(one.name, ", ".join(map(str, one.severities)), f"{one.images:,}")
    images = sum(one.images for one in domain_sizes)
    say(f"{spec}: {KINDS.get(spec.partition(':')[0], 'a data set of your own')}")
    say(f"{len(dataset.classes):,} classes: {listed(dataset.classes, 10)}")
    if dataset.mask:
        every = len(dataset.model_classes)
        say(f"mask: a model of {every:,} classes is restricted to the logits of these")
    console.print(table)
    if dataset.made:
        made, facts = {d.name for d in dataset.domains if d.severity}, dataset.provenance
        say(f"and {len(made)} corruptions, {facts['corruptions']}; frost: {facts['frost']}")
    if ignored_files:
        say(f"{len(ignored_files):,} other files or folders ignored, first {ignored_files[0]}")
    say(f"fingerprint of the images: {fingerprint}")
    if fit is not None:
        say(f"fits {fit}")
    if read:
        _read_all(survey.read_all(dataset), images, skip_damaged)


def _read_all(batches: Iterator[tuple[int, list[str]]], total: int, skip_damaged: bool) -> None:
    """Read all images with a progress bar; print the damaged ones."""
    damaged = 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        for count, broken in batches:
            progress.advance(task, count)
            damaged += len(broken)
            for one in broken:
                say(f"damaged: {one}")
    say(f"read {total:,} images, {damaged:,} damaged")
    if damaged and not skip_damaged:
        raise typer.Exit(1)
