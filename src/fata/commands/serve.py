"""`fata serve`: many streams adapt on one network, behind HTTP."""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fata.commands import Device, chosen_device, say

if TYPE_CHECKING:
    from torch import nn

    from fata.adapter import Adapter
    from fata.fleet import Fleet
    from fata.zoo.loaded import Loaded


def serve(
    model: Annotated[
        str, typer.Option(help="Model, as in fata bench: mini_resnet_gn, FILE.safetensors:ARCH.")
    ],
    method: Annotated[
        str, typer.Option(help="Method, such as eata+fata. auto: the recommended one.")
    ] = "auto",
    state_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of the states. Default: none, a restart forgets all streams.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. One that other machines can reach needs --token-file."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Bearer tokens, one a line; names of streams after a token limit it to them."
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Most streams.")] = 1000,
    in_memory: Annotated[
        int, typer.Option(min=1, help="Streams held in memory, with --state-dir.")
    ] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Images of a stream that fill a batch.")] = 16,
    wait_ms: Annotated[
        float, typer.Option(min=0, help="Milliseconds that an image waits for others.")
    ] = 50,
    deadline_ms: Annotated[
        float,
        typer.Option(
            min=1, help="Milliseconds after which an image is predicted without adaptation."
        ),
    ] = 2000,
    save_every: Annotated[
        int, typer.Option(min=1, help="Batches of a stream between two saves of its state.")
    ] = 32,
    rate: Annotated[
        float, typer.Option(min=0, help="Requests a second for one stream. 0: any.")
    ] = 0,
    max_images: Annotated[int, typer.Option(min=1, help="Images in one request.")] = 64,
    max_mebibytes: Annotated[int, typer.Option(min=1, help="MiB in one request.")] = 32,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Megapixels of one image.")] = 50,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds in which a request has to arrive.")
    ] = 30,
    show_images: Annotated[
        bool, typer.Option("--show-images", help="Keep the latest images for the page at /.")
    ] = False,
    metric_streams: Annotated[
        int, typer.Option(min=0, help="Streams with Prometheus metrics of their own.")
    ] = 100,
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="Watch every stream for collapse.")
    ] = True,
    speed: Annotated[
        str | None, typer.Option(help="exact or fast. Default: fast where bfloat16 pays.")
    ] = None,
    device: Device = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model that adapts to each stream on its own.

    POST images to /v1/streams/NAME/predict. The page at / shows the streams, /docs the interface.
    SIGTERM finishes the requests that were begun and saves every stream. With fast, all passes are
    run on noise before it listens.
    """
    for name in ("fastapi", "uvicorn"):  # the HTTP process needs them, and starts late
        if find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    from fata.serve.access import read_tokens
    from fata.serve.limits import Limits
    from fata.serve.logs import log_as_json
    from fata.serve.metrics import Metrics
    from fata.serve.scheduler import Gathering
    from fata.serve.server import bound, run
    from fata.serve.service import Service

    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"--log-level {log_level}: choose debug, info, warning or error.")
    try:
        tokens = read_tokens(token_file) if token_file else []
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--token-file: {error}") from error
    if not tokens and not _this_machine(host):
        raise typer.BadParameter(f"--host {host} lets others in: give --token-file too.")
    try:
        listening = bound(host, port)
    except OSError as error:
        raise typer.BadParameter(f"--host {host} --port {port}: {error.strerror}.") from error
    loaded, adapter, fleet = _fleet(
        model, method, chosen_device(device), batch, guard, speed, state_dir, in_memory, save_every
    )
    if adapter.speed == "fast":
        say("warming up: on a GPU, a large network takes minutes the first time")
        try:
            say(f"warming up took {adapter.warm_up(batch, loaded.preprocess.size):.1f} s")
        except RuntimeError as error:  # out of memory, say: passes are captured as they come
            say(f"could not warm up, so the first batches are slower: {error}")
    limits = Limits(
        body=max_mebibytes << 20,
        pixels=max_megapixels * 1_000_000,
        images=max_images,
        streams=streams,
        rate=rate,
        seconds=timeout,
    )
    gathering = Gathering(batch, wait_ms / 1000, deadline_ms / 1000)
    log_as_json(log_level)
    service = Service(loaded, fleet, gathering, limits, Metrics(metric_streams), show_images)
    raise typer.Exit(run(service, tokens, listening))


def _fleet(
    model: str,
    method: str,
    device: str,
    batch: int,
    guard: bool,
    speed: str | None,
    state_dir: Path | None,
    in_memory: int,
    save_every: int,
) -> tuple[Loaded, Adapter, Fleet]:
    from fata.adapter import RECOMMENDED, adapt
    from fata.fleet import Fleet
    from fata.methods import parse
    from fata.zoo import ZooError, load

    def make(plain: nn.Module, spec: str | None) -> Adapter:
        fields = loaded.settings(spec or RECOMMENDED, batch)
        if parse(spec or RECOMMENDED)[0].wants_fisher:
            fields["fisher_alpha"] = 0  # there are no clean images here
        return adapt(plain, spec, guard=guard, speed=speed, **fields)

    try:
        loaded = load(model)
        loaded.model.to(device)
        adapter = make(loaded.model, None if method == "auto" else method)
        fleet = Fleet(adapter, state_dir, in_memory=in_memory, save_every=save_every, make=make)
        return loaded, adapter, fleet
    except (ZooError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
