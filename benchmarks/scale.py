"""What a fleet or a large grid is made of, measured on this machine: `python -m benchmarks.scale`.

Steps, states swapped in and out, sums over ranks, writes to the store, pictures decoded; medians,
on one thread. The simulation (`benchmarks.fleet`) and docs/lab/scale.md use its figures.
"""

from __future__ import annotations

import gzip
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image

import fata
from fata.bench.cost import state_bytes
from fata.bench.store import Store
from fata.bench.summary import Rows, summary
from fata.methods import SPECS as ALL
from fata.testing.cases import images, network
from fata.zoo.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

RUNS = Path(__file__).parent / "runs"
SPEC = "eata+fata"
SPECS = [spec for spec in ALL if spec != "norm"]
SIZES = (5_000, 25_000, 50_000, 500_000)  # floats of a flat gradient
ROWS = {"mini_resnet_gn": (1, 8, 64), "resnet50_gn": (1, 8)}  # of a batch


def median(run: Callable[[], object], rounds: int, warm: int = 2) -> float:
    """Seconds of a call."""
    taken = []
    for _ in range(rounds + warm):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[warm:])


def networks() -> Iterator[tuple[str, torch.nn.Module, int]]:
    """An embedded network, and two of the paper's sizes with weights drawn at random."""
    yield "mini_resnet_gn", fata.zoo.load("mini_resnet_gn").model, 32
    yield "resnet50_gn", timm.create_model("resnet50_gn"), 224
    yield "vit_base", timm.create_model("vit_base_patch16_224"), 224


def steps() -> None:
    """Time of a step by number of rows, half of which are selected; without the guard's looks."""
    print(f"\n{'a step of ' + SPEC + ', ms':34}{'rows':>6}{'source':>10}{'step':>10}")
    for name, model, side in networks():
        for rows in ROWS.get(name, ()):
            pictures = torch.rand(rows, 3, side, side)
            times = []
            for spec, fields in (("source", {}), (SPEC, {"fisher_alpha": 0, "redundancy": 1})):
                adapter = fata.adapt(model, spec, guard=None, **fields)
                if spec == SPEC:
                    half_selected(adapter, rows)
                times.append(median(lambda a=adapter, x=pictures: a(x), 3, 1))
                adapter.reset()
                adapter.unwrap()
            print(f"{name:34}{rows:6}{1e3 * times[0]:10.1f}{1e3 * times[1]:10.1f}")


def half_selected(adapter: fata.Adapter, rows: int) -> None:
    """Let both terms take every other row, whatever the network answers."""
    chosen = torch.arange(rows) % 2 == 0
    engine = adapter._engine
    assert engine is not None
    for term in (engine.method, engine.plus):
        select = term.select

        def half(*given: object, select: Callable[..., fata.Selection] = select) -> fata.Selection:
            return fata.Selection(chosen, select(*given).weights)

        object.__setattr__(term, "select", half)


def swaps() -> None:
    """Time to take one stream's state out and put another's in, checked and bare."""
    print(f"\n{'a state of ' + SPEC:34}{'KiB':>8}{'out, ms':>10}{'in, ms':>10}{'bare, ms':>10}")
    for name, model, side in networks():
        adapter = fata.adapt(model, SPEC, fisher_alpha=0)
        adapter(torch.rand(2, 3, side, side))
        packed = adapter.state_dict()
        out = median(adapter.state_dict, 15)
        back = median(lambda a=adapter, p=packed: a.load_state_dict(p), 15)
        engine = adapter._engine
        assert engine is not None
        kept = engine.state.theta.clone()

        def bare(engine: object = engine, kept: torch.Tensor = kept) -> None:
            engine.state.theta = kept.clone()  # type: ignore[attr-defined]
            engine.state.velocity = kept.clone()  # type: ignore[attr-defined]
            engine.theta.write(kept)  # type: ignore[attr-defined]

        line = (1e3 * out, 1e3 * back, 1e3 * median(bare, 15))
        print(f"{name:34}{state_bytes(adapter) / 1024:8.0f}" + "".join(f"{t:10.2f}" for t in line))


def sums() -> None:
    """Time of an all-reduce by gloo between two processes of this machine."""
    print(f"\n{'floats':34}" + "".join(f"{size:>10,}" for size in (3, *SIZES)))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_reduce, (folder,), 2)
        times = json.loads((Path(folder) / "times").read_text())
    print(f"{'all-reduce by gloo, 2 ranks, ms':34}" + "".join(f"{1e3 * t:10.2f}" for t in times))


def _reduce(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    times = []
    for size in (3, *SIZES):
        flat = torch.ones(size)
        times.append(median(lambda flat=flat: dist.all_reduce(flat), 100, 10))
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times))
    dist.destroy_process_group()


def asked() -> None:
    """How often the ranks of a group ask each other for a sum, a step."""
    print(f"\n{'sums a step':34}" + "".join(f"{spec:>11}" for spec in SPECS))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_ask, (folder,), 2)
        for net, line in json.loads((Path(folder) / "sums").read_text()).items():
            print(f"{f'tiny {net}':34}" + "".join(f"{number:11}" for number in line))


def _ask(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found: dict[str, list[int]] = {}
    for net in ("resnet_gn", "resnet_bn"):
        for spec in SPECS:
            fields = {"fisher_alpha": 0, "redundancy": 1} if spec.startswith("eata") else {}
            model, given = network(net), {"group": dist.group.WORLD, "guard": None, **fields}
            adapter = fata.adapt(model, spec, lr=1e-6, **given)
            for _ in range(3):
                before = adapter.group.sums
                adapter(images(8))
            found.setdefault(net, []).append(adapter.group.sums - before)
    if rank == 0:
        (Path(folder) / "sums").write_text(json.dumps(found))
    dist.destroy_process_group()


def writes() -> None:
    """Cells that a store takes in a second, from one process and from several."""
    with gzip.open(RUNS / "normal.jsonl.gz", "rt") as file:
        record = json.loads(file.readline())
    rows = torch.randint(10, (2, 10_000))
    chosen = torch.rand(10_000) < 0.5
    whole = Rows(*rows, torch.rand(10_000), torch.rand(10_000), chosen, chosen)
    ends = [*range(64, 10_000, 64), 10_000]
    result = {**record["result"], **summary(whole, 10, ("eata", "fata"), ends)}
    given = (record["protocol"], record["circumstances"], result)
    size = sum(len(json.dumps(part)) for part in given)
    print(f"\n{f'a cell of {size / 1024:.0f} KiB into the store':34}{'a second':>10}")
    for writers in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            Store(Path(folder) / "results.db").close()
            start = time.perf_counter()
            mp.spawn(_write, (folder, given), writers)
            ends = [json.loads(p.read_text()) for p in Path(folder).glob("took-*")]
        taken = max(end for _, end in ends) - min(begin for begin, _ in ends)
        assert taken < time.perf_counter() - start
        print(f"{f'{writers} writers':34}{200 * writers / taken:10.0f}")


def _write(writer: int, folder: str, given: tuple[dict[str, object], ...]) -> None:
    store = Store(Path(folder) / "results.db")
    begin = time.time()
    for number in range(200):
        store.put(f"{writer}-{number}", *given)
    (Path(folder) / f"took-{writer}").write_text(json.dumps([begin, time.time()]))


def decoded() -> None:
    """Images of ImageNet's size that one core decodes, resizes and crops in a second."""
    coarse = torch.randint(256, (47, 63, 3), dtype=torch.uint8).numpy()
    image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92)
    preprocess = Preprocess(256, 224, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
    taken = median(lambda: preprocess.pixels(Image.open(io.BytesIO(file.getvalue()))), 50)
    kib = len(file.getvalue()) / 1024
    print(f"\n{f'a JPEG of 500 x 375, {kib:.0f} KiB':34}{1 / taken:10.0f} a second and core")


def recorded() -> None:
    """Steps on an H200 that 15 processes shared, of the runs in this repository; batches of 64."""
    print(f"\n{'H200, 15 processes, 64 rows':34}{'source':>10}{SPEC:>12}   ms, median of cells")
    found: dict[tuple[str, str], list[float]] = {}
    with gzip.open(RUNS / "normal.jsonl.gz", "rt") as file:
        for record in map(json.loads, file):
            at = (record["protocol"]["model"], record["protocol"]["method"])
            found.setdefault(at, []).append(1e3 * record["result"]["latency"]["p50"])
    for model in sorted({model for model, _ in found}):
        times = [statistics.median(found[model, method]) for method in ("source", SPEC)]
        print(f"{model:34}{times[0]:10.1f}{times[1]:12.1f}")


def main() -> None:
    """Measure and print everything."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part in (recorded, steps, swaps, sums, asked, writes, decoded):
        part()


if __name__ == "__main__":
    main()
