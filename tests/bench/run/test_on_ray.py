"""Cells on a Ray cluster of two nodes: what one machine gives, whoever is lost on the way."""

import dataclasses
import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import ray
import torch
import yaml
from PIL import Image
from ray.cluster_utils import Cluster
from typer.main import get_command
from typer.testing import CliRunner

import fata
from fata.bench.grid import Grid
from fata.bench.run import on_ray
from fata.bench.run.local import missing, run
from fata.bench.run.on_ray import ClusterError, Worker, WorkerResources
from fata.bench.run.ray_objects import DecodedImages, RayCellRunner, SharedObjects, decode
from fata.bench.run.runner import CellRunner
from fata.bench.store import Store
from fata.commands import Terminal
from fata.commands.app import app
from fata.commands.progress import ProgressDisplay

TIMED = ("seconds", "latency", "images_per_second", "peak_memory")
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


class Notes:
    """Remembers what it is told, and may do something about it."""

    def __init__(self, once=None, on_workers_changed=None):
        self.ended, self.failures, self.missed, self.names = [], [], [], set()
        self.workers, self.most = {}, 0
        self.once, self.on_workers_changed = once, on_workers_changed

    def tick(self, task, seen, accuracy):
        assert 0 < seen <= task.protocol["length"]
        assert 0 <= accuracy <= 1
        self._in_the_middle()

    def _in_the_middle(self):
        if self.once and any(self.workers.values()):
            act, self.once = self.once, None
            act(next(name for name, task in self.workers.items() if task))

    def done(self, task, result):
        self.ended.append(task.key)

    def failed(self, task, why):
        self.failures.append((task.key, why))

    def workers_changed(self, workers):
        self.workers = dict(workers)
        self.most = max(self.most, len(workers))
        self.names |= set(workers)
        if len(self.ended) == 2:  # where cells are too short to tick
            self._in_the_middle()
        if self.on_workers_changed:
            self.on_workers_changed(workers)

    def lost(self, worker):
        self.missed.append(worker)


def kill(worker):
    os.kill(int(worker.rpartition(":")[2]), signal.SIGKILL)


def lasting(store):
    """What is the same wherever a cell is run."""
    return {
        record.key: (
            record.protocol,
            {k: v for k, v in record.result.items() if k not in TIMED},
        )
        for record in store
    }


def pictures(folder, broken=()):
    draw = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        for number in range(4):
            path = folder / str(label) / f"{number}.png"
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            if (label, number) in broken:
                path.write_bytes(b"none")
    return folder


GRID = Grid(
    ("mini_resnet_bn",),
    methods=("norm", "tent+fata"),
    domains=("contrast", "fog"),
    images=48,
    batch_size=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    pictures(folder / "clean")
    pictures(folder / "damaged", {(3, 1)})
    return folder


@pytest.fixture(scope="module")
def cells(folder):
    """Four with what is in the package; one with files, and with Fisher information of others."""
    files = dataclasses.replace(
        GRID, data=(f"folder:{folder / 'damaged'}",), methods=("eata+fata",)
    )
    return [*GRID.cells(fata.data.open), *files.cells(fata.data.open)][:5]


@pytest.fixture(scope="module")
def runner(folder):
    return CellRunner(fisher=f"folder:{folder / 'clean'}", workers=0, skip_damaged=True)


@pytest.fixture(scope="module")
def local(tmp_path_factory, cells, runner):
    """The same cells without Ray; in new processes, as the tests' own kernels are others."""
    store = Store(tmp_path_factory.mktemp("local") / "r.db")
    run(missing(cells, store, runner, False), store, runner, Notes(), jobs=2)
    assert len(store) == 5
    return lasting(store)


@pytest.fixture(scope="module")
def four(local):
    """What becomes of the first four."""
    return {k: both for k, both in local.items() if both[0]["data"]["data"] == "embedded"}


def started(node, times=4):
    """A node; Ray gives up after 30 seconds, which a busy machine may need."""
    for _ in range(times - 1):
        with suppress(Exception):
            return node()
    return node()


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, on this machine both; one says that it has a GPU."""
    head = {**NODE, "num_gpus": 1, "include_dashboard": False}
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    started(lambda: cluster.add_node(**NODE))
    yield cluster
    cluster.shutdown()


@pytest.fixture
def connected(cluster):
    with on_ray.connected(cluster.address):
        yield cluster


def run_on_ray(path, cells, runner, notes, gpus=0):
    store = Store(path)
    tasks = missing(cells, store, runner, False)
    on_ray.run(tasks, store, runner, notes, on_ray.worker_resources(gpus, jobs=1))
    return store


# -- the same results ---------------------------------------------------------------------------


def test_cells_are_those_of_one_machine_bit_for_bit(tmp_path, cells, runner, local, connected):
    notes = Notes()
    store = run_on_ray(tmp_path / "r.db", cells, runner, notes)
    assert lasting(store) == local
    assert sorted(notes.ended) == sorted(local)
    assert len(notes.names) == 2  # one a node
    assert {record.result["damaged"] for record in store} == {0, 1}
    assert missing(cells, store, runner, False) == []


def test_workers_share_a_gpu_and_a_killed_one_loses_and_doubles_nothing(
    tmp_path, cells, runner, four, connected, monkeypatch
):
    monkeypatch.setattr(on_ray, "RayCellRunner", lambda _, *rest: RayCellRunner("cpu", *rest))
    notes = Notes(once=kill)
    store = run_on_ray(tmp_path / "r.db", cells[:4], runner, notes, gpus=0.5)
    assert len(notes.missed) == 1
    assert notes.most == 2
    assert sorted(notes.ended) == sorted(four)
    assert lasting(store) == four


def test_a_removed_node_loses_and_doubles_nothing(tmp_path, cells, runner, four, connected):
    (second,) = connected.worker_nodes
    notes = Notes(once=lambda _: connected.remove_node(second))
    try:
        store = run_on_ray(tmp_path / "r.db", cells[:4], runner, notes)
    finally:
        started(lambda: connected.add_node(**NODE))
    assert len(notes.missed) == 1
    assert sorted(notes.ended) == sorted(four)
    assert lasting(store) == four


def test_what_ctrl_c_leaves_is_finished_without_ray(tmp_path, four, connected):
    path = tmp_path / "r.db"
    command = [
        *(sys.executable, "-m", "fata", "bench", "--model", *GRID.models, "--store", str(path)),
        *("--methods", ",".join(GRID.methods), "--domains", ",".join(GRID.domains)),
        *("--images", str(GRID.images), "--batch-size", str(GRID.batch_size)),
    ]
    longer = ["--seeds", "6", "--on", "ray", "--address", connected.address, "--device", "cpu"]
    running = subprocess.Popen(
        [*command, *longer],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background
    )
    for line in running.stdout:
        if line.startswith("1/"):
            running.send_signal(signal.SIGINT)
            break
    rest, _ = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "the same command continues from there" in " ".join(rest.split())
    kept = {record.key: record.finished for record in Store(path)}
    assert 1 <= len(kept) < 24
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    store = Store(path)
    assert lasting(store).items() >= four.items()
    assert {record.key: record.finished for record in store}.items() >= kept.items()


# -- what goes wrong ----------------------------------------------------------------------------


def test_a_cell_that_fails_or_loses_every_worker_does_not_stop_the_others(
    tmp_path, cells, runner, connected, monkeypatch
):
    monkeypatch.setattr(on_ray, "TRIES", 2)
    store, strict = Store(tmp_path / "r.db"), dataclasses.replace(runner, skip_damaged=False)
    damaged = dataclasses.replace(cells[4], method="norm")
    tasks = missing([*cells[:2], damaged], store, strict, False)
    fine, fatal, unreadable = tasks

    def workers_changed(workers):
        for name, task in workers.items():
            if task == fatal:
                kill(name)

    notes = Notes(on_workers_changed=workers_changed)
    on_ray.run(tasks, store, strict, notes, WorkerResources(1))
    failure = dict(notes.failures)
    assert set(failure) == {fatal.key, unreadable.key}
    assert "its worker was lost 2 times" in failure[fatal.key]
    assert "damaged image" in failure[unreadable.key]
    assert "1.png" in failure[unreadable.key]
    assert [record.key for record in store] == [fine.key]


@pytest.mark.parametrize(
    ("gpus", "why"), [(2, "no node of the cluster has 2 GPU"), (1.5, "whole number")]
)
def test_a_share_that_no_node_has_is_refused(connected, gpus, why):
    with pytest.raises(ClusterError, match=why):
        on_ray.worker_resources(gpus, jobs=1)


def test_a_cell_has_a_gpu_where_there_are_some(connected):
    assert on_ray.worker_resources(None, jobs=1) == WorkerResources(1, 1)
    assert on_ray.worker_resources(0.25, jobs=1).gpus == 0.25
    assert on_ray.worker_resources(0, jobs=1) == WorkerResources(1)


def bench(*arguments):
    result = CliRunner().invoke(app, ["bench", "--model", "mini_resnet_bn", *arguments])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--on", "slurm"), "give ray, or leave it out"),
        (("--address", "auto"), "are for --on ray"),
        (("--gpus-per-cell", "0.5"), "are for --on ray"),
        (("--on", "ray", "--device", "cuda:1"), "on Ray give cpu or cuda"),
        (("--on", "ray", "--address", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
        (("--on", "ray", "--device", "cpu", "--gpus-per-cell", "0.5"), "give one"),
    ],
)
def test_wrong_options_say_what_is_wrong(arguments, why):
    code, output = bench(*arguments)
    assert code == 2
    assert why in output


def test_without_ray_the_error_says_how_to_get_it(monkeypatch):
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in ("on_ray", "ray_objects"):
        monkeypatch.delitem(sys.modules, f"fata.bench.run.{module}")
        monkeypatch.delattr(fata.bench.run, module)
    code, output = bench("--on", "ray")
    assert code == 2
    assert "pip install fata[ray]" in output


# -- progress -----------------------------------------------------------------------------------


def shown(monkeypatch, tasks, terminal):
    """A watcher, and what it writes."""
    written = io.StringIO()
    screen = Terminal(file=written, force_terminal=terminal, width=200)
    monkeypatch.setattr("fata.commands.progress.console", screen)
    monkeypatch.setattr("fata.commands.console", screen)
    return ProgressDisplay(len(tasks)), written


def test_a_terminal_shows_workers_and_their_cells(tmp_path, cells, runner, monkeypatch):
    one, two, *_ = tasks = missing(cells, Store(tmp_path / "r.db"), runner, False)
    show, written = shown(monkeypatch, tasks, terminal=True)
    show.workers_changed({"node-a:1": one, "node-b:2": two})
    show.tick(one, 8, 0.5)
    show.tick(two, 8, 0.5)
    every, first, second = show._progress.tasks
    assert every.fields["note"] == "2 workers"
    assert first.description.strip() == f"{one.cell}, by node-a:1"
    assert second.description.strip() == f"{two.cell}, by node-b:2"
    show.lost("node-a:1")
    show.workers_changed({"node-b:2": two})
    assert show._progress.tasks == [every, second]
    assert every.fields["note"] == "1 worker"
    assert "worker node-a:1 was lost" in written.getvalue()


def test_a_line_says_whose_cell_it_was(tmp_path, cells, runner, monkeypatch):
    one, *_ = tasks = missing(cells, Store(tmp_path / "r.db"), runner, False)
    show, written = shown(monkeypatch, tasks, terminal=False)
    show.workers_changed({"node-a:1": one})
    show.done(one, {"accuracy": 50.0, "collapsed_at": None, "damaged": 0})
    assert written.getvalue() == f"1/5 {one.cell}: 50.00 %, by node-a:1\n"
    health = {"source": 40.0, "adapted": 47.5, "predicted": 47.5}
    show.done(one, {"accuracy": 50.0, "collapsed_at": None, "damaged": 0, "health": health})
    assert "2/5" in written.getvalue()
    assert "50.00 % (estimated 47.50 %), by node-a:1" in written.getvalue()


# -- shares -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "node", "cells"),
    [
        (WorkerResources(2), {"CPU": 5}, 2),
        (WorkerResources(2), {"GPU": 8}, 0),
        (WorkerResources(4, 0.25), {"CPU": 1, "GPU": 2}, 8),
        (WorkerResources(4, 0.3), {"GPU": 2}, 6),
        (WorkerResources(4, 1), {"GPU": 3}, 3),
        (WorkerResources(4, 2), {"GPU": 3}, 1),
        (WorkerResources(4, 0.5), {"CPU": 64}, 0),
    ],
)
def test_so_many_cells_find_room_on_a_node(one, node, cells):
    assert one.fits(node) == cells


# -- what is shared -----------------------------------------------------------------------------


def test_decoded_images_are_those_of_the_files(tmp_path):
    folder = pictures(tmp_path / "p", {(0, 2), (9, 3)})
    data = fata.data.open(f"folder:{folder}")
    source = data.of(data.domains[0])
    kept = decode(source, torch.tensor([1, 2, 5, 30, 39]), source.digest, workers=0)
    for index in (1, 5, 30):
        assert torch.equal(kept.read(index), source.read(index))
    assert torch.equal(kept.labels, source.labels)
    assert kept.digest == source.digest
    for index, name in ((2, "0/2.png"), (39, "9/3.png")):
        with pytest.raises(fata.data.errors.Damaged, match=name):
            kept.read(index)


def test_models_and_images_are_put_once_and_go_with_their_last_cell(
    tmp_path, cells, runner, connected, monkeypatch
):
    put = []
    tasks = missing(cells, Store(tmp_path / "r.db"), runner, False)
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda thing: put.append(type(thing).__name__) or real(thing))
    shared = SharedObjects(tasks, runner, capacity=2**20)
    served = {task.key: shared.inputs(task) for task in tasks}
    assert sorted(put) == ["DecodedImages", "Loaded"]  # the data in the package are decoded already
    assert len({ref for _, refs in served.values() for ref in refs}) == 3  # two folders beside it
    assert all(
        isinstance(ray.get(ref), DecodedImages) for _, refs in served.values() for ref in refs
    )
    for task in tasks[:-1]:
        shared.release(task)
    inputs, refs = shared.inputs(tasks[-1])
    assert (inputs.model, refs) == (served[tasks[-1].key][0].model, served[tasks[-1].key][1])
    shared.release(tasks[-1])
    assert not shared._models
    assert not shared._images


def test_images_that_do_not_fit_are_left_to_who_meets_them(tmp_path, cells, runner, connected):
    tasks = missing(cells[4:], Store(tmp_path / "r.db"), runner, False)
    _, refs = SharedObjects(tasks, runner, capacity=40 * 3 * 32 * 32 - 1).inputs(tasks[0])
    assert all(isinstance(ray.get(ref), fata.data.dataset.ImageFiles) for ref in refs)


def test_a_worker_knows_how_far_it_is(tmp_path, cells, runner, connected, monkeypatch):
    tasks = missing(cells[:1], Store(tmp_path / "r.db"), runner, False)
    inputs, refs = SharedObjects(tasks, runner, capacity=2**20).inputs(tasks[0])
    clock = itertools.count()
    monkeypatch.setattr("fata.bench.run.measure.time.perf_counter", lambda: float(next(clock)))
    worker = Worker(RayCellRunner(), threads=1)
    result, why = worker.run(7, cells[0], inputs, *ray.get(refs))
    assert why == ""
    number, seen, right = worker.progress()  # of the batch before the last
    assert (number, seen) == (7, 40)
    assert result["accuracy"] / 100 * 48 - 8 <= right * 40 <= result["accuracy"] / 100 * 48


# -- Kubernetes ---------------------------------------------------------------------------------

QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?$"}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}


def fields(required=(), **known):
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


def many(item):
    return {"type": "array", "items": item, "minItems": 1}


AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}
MOUNT = fields(
    ("name", "mountPath"),
    name=NAME,
    mountPath={"type": "string", "pattern": "^/"},
    readOnly={"type": "boolean"},
)
VOLUME = fields(
    ("name",),
    name=NAME,
    persistentVolumeClaim=fields(("claimName",), claimName=NAME, readOnly={"type": "boolean"}),
    emptyDir=fields(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
CONTAINER = fields(
    ("name", "image"),
    name=NAME,
    image={"type": "string"},
    resources=fields(limits=AMOUNTS, requests=AMOUNTS),
    volumeMounts=many(MOUNT),
)
POD = fields(
    ("spec",), spec=fields(("containers",), containers=many(CONTAINER), volumes=many(VOLUME))
)
START = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
RAYJOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=NAME),
    spec=fields(
        ("entrypoint", "rayClusterSpec"),
        entrypoint={"type": "string"},
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=fields(
            ("headGroupSpec",),
            rayVersion={"type": "string"},
            headGroupSpec=fields(("template",), rayStartParams=START, template=POD),
            workerGroupSpecs=many(
                fields(
                    ("groupName", "template"),
                    groupName=NAME,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=START,
                    template=POD,
                )
            ),
        ),
    ),
)


@pytest.fixture(scope="module")
def page():
    return (Path(__file__).parents[3] / "docs" / "ray.md").read_text()


@pytest.fixture(scope="module")
def manifest(page):
    (block,) = re.findall(r"```yaml\n(.+?)```", page, re.DOTALL)
    return yaml.safe_load(block)


@pytest.fixture(scope="module")
def command(manifest):
    """What the manifest starts, as the command line reads it."""
    program, name, *arguments = shlex.split(manifest["spec"]["entrypoint"])
    assert (program, name) == ("fata", "bench")
    return get_command(app).commands[name].make_context(name, arguments).params


@pytest.fixture(scope="module")
def pods(manifest):
    """The one of the head, and those of the workers."""
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    return [group["template"]["spec"] for group in groups]


def mounts(pod):
    return {mount["mountPath"]: mount for one in pod["containers"] for mount in one["volumeMounts"]}


def test_the_manifest_has_the_fields_of_a_rayjob(manifest):
    jsonschema.validate(manifest, RAYJOB)


def test_the_manifests_command_is_one_that_fata_takes(command):
    assert (command["on"], command["address"], command["gpus_per_cell"]) == ("ray", "auto", 0.25)
    assert command["model"] in fata.zoo.NAMES
    kind, _, folder = command["data"].partition(":")
    assert kind in fata.data.KINDS
    assert folder.startswith("/data/")
    grid = Grid(
        ("mini_resnet_bn",),
        methods=tuple(command["methods"].split(",")),
        scenarios=tuple(command["scenario"].split(",")),
    )
    assert len(list(grid.cells(fata.data.open))) == 15 * 2 * 2


def test_the_manifests_pods_have_what_the_command_needs(manifest, command, pods):
    head, *workers = pods
    for pod in pods:
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert sorted(volumes) == sorted(mount["name"] for mount in mounts(pod).values())
        assert mounts(pod)["/data"]["readOnly"]
    assert str(command["store"].parent) in mounts(head)
    for pod in workers:
        (container,) = pod["containers"]
        there = container["resources"]["limits"]
        assert (
            WorkerResources(1, command["gpus_per_cell"]).fits({"GPU": int(there["nvidia.com/gpu"])})
            == 4
        )
        assert there == container["resources"]["requests"]
        assert str(command["store"].parent) not in mounts(pod)
    for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_manifests_versions_agree(manifest, pods, page):
    version = manifest["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"FROM rayproject/ray:{version}-" in page
    assert {one["image"] for pod in pods for one in pod["containers"]} == {f"fata-ray:{version}"}
