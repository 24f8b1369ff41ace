r"""A stream from a cold start, as a user meets it first: `python -m benchmarks.cold`.

    python -m benchmarks.cold --device cuda --assets DIR
    python -m benchmarks.cold --networks mini_resnet_gn mini_resnet_bn mini_vit --images 6400
    python -m benchmarks.cold --device cuda --networks resnet50_gn --no-guard \
        --streams 1 10 100 1000

    ours     EATA+FATA as it comes: `fast` where bfloat16 pays, else `exact`
    default  `fata.adapt(model)`: with blended BatchNorm statistics, or class balance
    warm     `ours` behind `warm_up`, which is part of the time
    again    that in another process, with the compiler's caches of `warm`
    fast     `speed="fast"`
    exact    `speed="exact"`
    plain    the straightforward way, `benchmarks.plain`

With the guard unless `--no-guard`; `plain` has none. Each way has a process of its own and, but for
`again`, compiler caches that are empty; another process passes one batch before, so that no way
reads torch's libraries from the disk for the others. The clock starts when the model is on the
device, and every batch is waited for; with `--cpu-time` it counts the CPU's seconds, where others
use it too.
With `--streams` use `--no-guard`: streams that begin are checked more often than one that goes on.
`vit_tiny` and `resnet50` are those of DIR (`benchmarks.imagenet`), with its pictures, corrupted;
the others have random weights, and 40 % of the rows of noise are selected.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

import fata
from benchmarks import imagenet
from benchmarks import share as shares
from benchmarks.imagenet import RATES
from benchmarks.plain import Plain
from benchmarks.share import Share
from benchmarks.tables import markdown

SPEC, BATCH, STREAM_BATCH = "eata+fata", 64, 16
MARKS = (64, 640, 6_400, 19_200, 50_000)
WAYS = ("ours", "default", "warm", "again", "fast", "exact", "plain")
DEFAULT = ("ours", "warm", "again", "exact", "plain")
NETWORKS = {"resnet50_gn": "resnet50_gn", "vit_base": "vit_base_patch16_224"}  # timm's names
FIRST = 16  # batches in which passes are captured
PICTURES = 1_280  # that come again and again
CORRUPTION, SEVERITY, SHARE = "gaussian_noise", 3, 0.4
Line = dict[str, Any]


# -- what is adapted, and to what --------------------------------------------------------------


def pictures(assets: Path) -> Tensor:
    """Pictures of the folder as bytes, corrupted."""
    found: list[Tensor] = []
    for shard in sorted(assets.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None and len(found) < PICTURES:
                    found.append(pil_to_tensor(Image.open(io.BytesIO(file.read())).convert("RGB")))
    draws = torch.Generator().manual_seed(0)
    noisy = [
        fata.corrupt(some / 255, CORRUPTION, SEVERITY, generator=draws)
        for some in torch.stack(found).split(BATCH)
    ]
    return (255 * torch.cat(noisy)).round().byte()


def from_assets(name: str, assets: Path, cache: Path) -> tuple[nn.Module, list[Tensor], Line]:
    """A trained network, batches of pictures, and settings."""
    loaded = imagenet.network(name, assets)
    pixels = torch.load(cache / "pictures.pt")
    whole = pixels[: len(pixels) // BATCH * BATCH]  # another size would be captured apart
    batches = [loaded.preprocess.normalise(some / 255) for some in whole.split(BATCH)]
    return loaded.model, batches, {"lr": RATES[name][-1], "fisher_alpha": 0.0}


def random_network(name: str, batch: int) -> tuple[nn.Module, list[Tensor], Line]:
    """A network with random weights, noise, and settings by which a share of it is selected."""
    torch.manual_seed(0)
    model, side = shares.build(NETWORKS.get(name, name))
    images = torch.randn(4 * batch, 3, side, side)
    model = shares.spread(model, images[:batch])
    fields = shares.settings(model, SPEC, images[:batch], Share.of_all(SHARE))
    return model, list(images.split(batch)), fields


def made(way: str, model: nn.Module, fields: Line, guard: bool) -> Callable[[Tensor], Tensor]:
    """One way through a batch."""
    if way == "plain":
        return Plain(model, SPEC, **fields)
    speed = way if way in ("fast", "exact") else None
    spec = None if way == "default" else SPEC
    return fata.adapt(model, spec, speed=speed, guard=guard, **fields)


# -- one way, in a process of its own ----------------------------------------------------------


def one(args: argparse.Namespace, network: str, way: str, cache: Path) -> None:
    """Run a stream; a line of JSON at each mark and at the end."""
    batch = STREAM_BATCH if args.streams else BATCH
    if network in RATES:
        model, batches, fields = from_assets(network, args.assets, cache)
    else:
        model, batches, fields = random_network(network, batch)
    model = model.to(args.device)
    batches = [images.to(args.device) for images in batches]
    torch.cuda.synchronize() if batches[0].is_cuda else None
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.streams:
        adapter = fata.adapt(model, SPEC, guard=args.guard, **fields)
        for streams in args.streams:
            emit({"streams": streams, "rate": rate_of(adapter, batches, streams, clock)})
        return
    begun = clock()
    call = made(way, model, fields, args.guard)
    if way in ("warm", "again"):
        assert isinstance(call, fata.Adapter)
        emit({"warm_up": call.warm_up(BATCH, batches[0].shape[1:])})
    taken, seen = list[float](), 0
    for images in cycle(batches):
        start = clock()
        call(images).argmax(1).cpu()
        now = clock()
        taken.append(now - start)
        seen += len(images)
        if seen in MARKS:
            emit({"seconds": {seen: now - begun}, **tail(taken), "memory": memory()})
        if seen >= args.images or now - begun > args.seconds:
            emit({"seen": seen, "total": now - begun, **tail(taken), "memory": memory()})
            return


def tail(taken: list[float]) -> Line:
    """The longest batches, and what the latest take."""
    later = sorted(taken[3:]) or [0.0]
    return {
        "longest": max(taken),
        "longest_later": later[-1],
        "p99.9": later[min(len(later) - 1, int(0.999 * len(later)))],
        "median": median(later),
        "rate": BATCH / median(taken[-100:]),
    }


def memory() -> float:
    """GiB that the process has had: of the GPU, or else of this machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rate_of(
    adapter: fata.Adapter, batches: list[Tensor], streams: int, clock: Callable[[], float]
) -> float:
    """Images a second of so many streams that take turns on one network."""
    fleet, images = fata.Fleet(adapter, in_memory=streams), cycle(batches)
    names = [f"camera-{number}" for number in range(streams)]
    for name in [names[0]] * FIRST + names:
        fleet(name, next(images))
    turns = names * max(1, 200 // streams)
    begun = clock()
    for name in turns:
        fleet(name, next(images)).argmax(1).cpu()
    taken = clock() - begun
    fleet.close()
    adapter.reset()
    return len(turns) * STREAM_BATCH / taken


def emit(found: Line) -> None:
    """A line of JSON for the process that started this one."""
    print(json.dumps(found), flush=True)


# -- all of them -------------------------------------------------------------------------------


def lines_of(arguments: list[str], caches: Path) -> Iterator[Line]:
    """What a process says that runs one way with these caches of the compiler."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    env["TRITON_CACHE_DIR"] = f"{caches}/triton"
    command = [sys.executable, "-m", "benchmarks.cold", *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        print(f"{' '.join(arguments)}: ended with {process.returncode}", file=sys.stderr)


def run(args: argparse.Namespace, given: list[str], shared: Path) -> list[Line]:
    """Every network by every way; what is known so far is written after each line."""
    found = list[Line]()
    for network in args.networks:
        for way in ["ours"] if args.streams else args.ways:
            result: Line = {"network": network, "way": way, "seconds": {}}
            found.append(result)
            with tempfile.TemporaryDirectory() as own:
                caches = shared / network if way in ("warm", "again") else Path(own)
                inner = [*given, "--one", network, way, str(shared)]
                if way not in ("warm", "again") and not args.streams:
                    list(lines_of([*inner, "--images", "1"], Path(own)))
                for line in lines_of(inner, caches):
                    print(f"{network} {way}: {line}", file=sys.stderr)
                    seconds = {**result["seconds"], **line.pop("seconds", {})}
                    if "streams" in line:
                        result.setdefault("streams", {})[line["streams"]] = line["rate"]
                    else:
                        result |= {**line, "seconds": seconds}
                    if args.out:
                        args.out.write_text(json.dumps(found, indent=1))
    return found


def table(lines: list[Line], args: argparse.Namespace) -> str:
    """All of it, as a table of Markdown."""
    if args.streams:
        head = ["network", *(f"{streams:,} streams" for streams in args.streams)]
        rows = [
            [line["network"], *(f"{rate:,.0f}" for rate in line.get("streams", {}).values())]
            for line in lines
        ]
        return markdown(head, rows)
    marks = [mark for mark in MARKS if mark <= args.images]
    head = ["network", "way", *(f"{mark:,}" for mark in marks)]
    head += ["longest", "after three", "p99.9", "median, ms", "images/s at the end", "GiB"]
    rows = []
    for line in lines:
        seconds = [line["seconds"].get(str(mark)) for mark in marks]
        row = [line["network"], line["way"]]
        row += ["" if taken is None else f"{taken:.2f}" for taken in seconds]
        row += [f"{line.get(n, 0):.3f}" for n in ("longest", "longest_later", "p99.9")]
        row += [f"{1e3 * line.get('median', 0):.1f}", f"{line.get('rate', 0):,.0f}"]
        rows.append([*row, f"{line.get('memory', 0):.1f}"])
    return markdown(head, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--assets", type=Path, help="folder with weights, pictures and load.py")
    parser.add_argument("--networks", nargs="+", default=[*RATES, *NETWORKS])
    parser.add_argument("--ways", nargs="+", default=list(DEFAULT), choices=WAYS)
    parser.add_argument("--images", type=int, default=MARKS[-1])
    parser.add_argument("--guard", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count seconds of the CPU, where others use it too"
    )
    parser.add_argument("--seconds", type=float, default=600, help="after which a way is ended")
    parser.add_argument(
        "--streams", type=int, nargs="+", help="measure so many streams that take turns"
    )
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        network, way, shared = args.one
        one(args, network, way, Path(shared))
        return
    if args.assets is None and set(args.networks) & set(RATES):
        parser.error(f"{', '.join(RATES)} need --assets")
    with tempfile.TemporaryDirectory() as shared:
        if set(args.networks) & set(RATES):
            torch.save(pictures(args.assets), Path(shared) / "pictures.pt")
        print(table(run(args, sys.argv[1:], Path(shared)), args))


if __name__ == "__main__":
    main()
