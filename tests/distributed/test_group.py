"""Several ranks that share every batch do what one process does with the whole of it."""

import copy
import os
import signal
import subprocess
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fata
from fata.bench.store import Store
from fata.distributed.group import EVERY, GroupError
from fata.methods import SPECS
from fata.methods.losses import entropy
from fata.testing.cases import fit_statistics, images, network
from fata.zoo import tiny

NEW = ("roid", "roid+fata", "zerosiam", "nctta+fata", "neo")
OWN_STEP = ("cotta", "memo")
WITH_FATA = ("eata+fata", "sar+fata", "deyo+fata")
CASES = [
    *(("resnet_gn", spec) for spec in SPECS),
    *(("vit_ln", spec) for spec in SPECS),
    *(("resnet_bn", spec) for spec in ("norm", "tent", *NEW, *WITH_FATA, *OWN_STEP)),
    ("resnet_bn", "tent+fata joint"),
    *(("resnet_bn", f"{spec} blended") for spec in ("norm", "tent", *WITH_FATA)),
    *(("resnet_bn", f"{spec} unguarded") for spec in ("deyo+fata", "roid", "cotta")),
]
SPLITS = ((8, 8), (8, 8), (16, 0), (0, 4), (0, 1), (2, 0), (3, 5), (8, 8))


def batches(model):
    """Images that are partly easy and partly hard, some of them not finite."""
    rows = images(sum(map(sum, SPLITS))).double()
    with torch.no_grad():
        order = entropy(model(rows)).argsort()
    rows = rows[torch.cat((order[:8], order[-8:], order[8:-8].sort()[0]))]  # sure ones, unsure ones
    parts = list(rows.split([sum(split) for split in SPLITS]))
    parts[1][3] = torch.nan
    parts[5].fill_(torch.inf)  # nobody has a row to learn from
    return parts


def made(model, case, **more):
    """In double precision, in which the order of a sum does not show."""
    spec, *how = case.split()
    fields = {"bn_stats": "joint"} if "joint" in how else {}
    if "blended" in how:
        model, fields["blend"] = fit_statistics(model), True
    if spec.startswith("eata"):
        clean = images(8, seed=6).double().to(next(model.parameters()).device)
        fields |= {"fisher_data": [clean], "redundancy": 0.5}
        if "blended" in how:
            fields["fisher_alpha"] = 1.0  # at this rate more makes the weights explode
    if spec.startswith("sar"):
        fields["recovery"] = 0.6  # goes back to the source now and then
    if spec == "cotta":
        fields |= {"threshold": 0.66, "views": 2, "restore": 0.01}  # asks for views now and then
    if spec == "memo":
        fields["views"] = 3
    guard = fata.Guard(every=2, level=0.8, trial=8, patience=99)  # compares often, and soon acts
    if "unguarded" in how:  # it leaves the statistics of these batches after the second
        guard = None
    return fata.adapt(model, spec, **{"lr": 0.02, "seed": 3, "guard": guard, **fields, **more})


def run(adapter, parts, share):
    """What is seen of a stream, or of a rank's share of it; the last batches meet it frozen."""
    adapter._live().state.share = 0.5  # as of earlier batches: one pass for all counts others
    answers = []
    for part, split in zip(parts, SPLITS, strict=True):
        answers.append((adapter(share(part, split)), adapter.selected))
    with adapter.frozen():
        for split in ((6, 0), (2, 4)):
            answers.append((adapter(share(images(6, seed=9).double(), split)), {}))
    state = adapter.state_dict()
    return {
        "answers": answers,
        "meta": state.pop("meta"),
        "state": state,
        "counts": adapter.counts,
        "events": adapter.guard.events if adapter.guard else [],
    }


# -- in one of two processes ----------------------------------------------------------------------


def rank_of_two(rank, path, device):
    """Everything, in one pair of processes: to start one takes seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store, backend = dist.FileStore(f"{path}/store", 2), {"cpu": "gloo", "cuda": "nccl"}[device]
    limit = timedelta(seconds=20)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
    models, parts = torch.load(f"{path}/given", weights_only=False)

    def group(net="resnet_gn", case="tent", **more):
        model = copy.deepcopy(models[net]).to(device)
        return made(model, case, group=dist.group.WORLD, **more)

    def mine(part, split):
        return part.split(split)[rank].to(device)

    streams = {case: run(group(*case), parts, mine) for case in CASES}
    if device == "cuda":
        torch.save(streams, f"{path}/{rank}")
        return
    seen = {"streams": streams, **saved(rank, path, group), **astray(rank, group)}
    torch.save(seen, f"{path}/{rank}")
    torch.save(died(rank, group), f"{path}/{rank} at last")


def error_of(call, *args, **more):
    try:
        call(*args, **more)
    except (GroupError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def saved(rank, path, group):
    """Each rank saves to a file of its own, and both to one at the same time."""
    adapter = group(case="eata+fata")
    adapter(images(4).double())
    adapter.save(f"{path}/state-{rank}")
    adapter.save(f"{path}/state")
    before = adapter.state_dict()
    adapter(images(4).double())
    dist.barrier()
    adapter.load(f"{path}/state")
    after = adapter.state_dict()
    return {"loaded": {name: (before[name], after[name]) for name in before}}


def astray(rank, group):
    """What is said where ranks are not alike."""
    seen = {
        "other seed": error_of(group, seed=rank),
        "other method": error_of(group, case=("tent", "eata")[rank]),
        "no images": error_of(group(), images(1).double()[:0]),
    }
    adapter = group()
    adapter(images(2).double())
    if rank:
        adapter.reset()
    seen["other batch"] = error_of(adapter, images(2).double())
    adapter.reset()
    for _ in range(EVERY - 1):
        adapter(images(1).double())
    if rank:
        theta = adapter._engine.state.theta
        adapter._engine.state.theta = theta + torch.eye(len(theta), dtype=theta.dtype)[3] * 1e-12
    adapter(images(1).double())
    seen["other bits"] = error_of(adapter, images(1).double())
    return seen


def died(rank, group):
    """Rank 1 is killed in the midst of its third step."""
    adapter = group(case="sar+fata")
    for _ in range(2):
        adapter(images(4).double())
    before = adapter.state_dict()

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank:
        adapter.model.fc.register_forward_hook(die)
    error = error_of(adapter, images(4).double())
    return {"error": error, "state": (before, adapter.state_dict())}


# -- here -----------------------------------------------------------------------------------------


def two(path, device):
    """Exit codes of two ranks, and what each of them saw."""
    models = {net: network(net).double() for net in tiny.NAMES}
    torch.save((models, batches(models["resnet_gn"])), path / "given")
    spawn = mp.get_context("spawn")
    processes = [spawn.Process(target=rank_of_two, args=(rank, path, device)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seen = [torch.load(path / str(rank), weights_only=False) for rank in (0, 1)]
    return [process.exitcode for process in processes], seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    ends, both = two(path, "cpu")
    assert ends == [0, -signal.SIGKILL]
    return both, torch.load(path / "0 at last", weights_only=False), path


def same(first, second, net, case, device="cpu"):
    """Two ranks did what one process does, and are equal to each other bit for bit."""
    model, parts = network(net).double().to(device), batches(network("resnet_gn").double())
    one = run(made(model, case), parts, lambda part, _: part.to(device))
    close = {"rtol": 1e-6, "atol": 1e-8, "equal_nan": True, "check_device": False}
    for whole, *shares in zip(*(them["answers"] for them in (one, first, second)), strict=True):
        torch.testing.assert_close(torch.cat([s[0].cpu() for s in shares]), whole[0], **close)
        for term, rows in whole[1].items():
            assert torch.equal(torch.cat([s[1][term].cpu() for s in shares]), rows.cpu())
    for name, tensor in one["state"].items():
        torch.testing.assert_close(first["state"][name], tensor, **close)
    for name, tensor in first["state"].items():
        assert torch.equal(second["state"][name].cpu(), tensor.cpu())
    assert first["meta"] == second["meta"]
    assert first["counts"] == second["counts"] == one["counts"]
    for event, its in zip(first["events"], one["events"], strict=True):
        assert (event.batch, event.action) == (its.batch, its.action)


@pytest.mark.parametrize(("net", "case"), CASES)
def test_two_ranks_are_one(ranks, net, case):
    same(*(seen["streams"][net, case] for seen in ranks[0]), net, case)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs and NCCL; this machine has {torch.cuda.device_count()}",
)
def test_two_gpus_are_one(tmp_path):
    ends, both = two(tmp_path, "cuda")
    assert ends == [0, 0]
    for net, case in CASES:
        same(*(seen[net, case] for seen in both), net, case, "cuda")


def test_the_streams_hold_what_they_are_for(ranks):
    """A rank without a selected row beside one with some; recoveries; the guard at work."""
    first, second = (seen["streams"] for seen in ranks[0])
    for case in ("eata", "sar", "deyo", "deyo+fata"):
        at = ("resnet_gn", case)
        mine, other = (seen[at]["answers"][0][1] for seen in (first, second))
        assert all(rows.any() for rows in mine.values())
        assert not any(rows.any() for rows in other.values())
    for at in (("resnet_gn", "cotta"), ("vit_ln", "cotta"), ("resnet_bn", "cotta unguarded")):
        counts = first[at]["counts"]  # some rows by two views of the teacher, some by none
        rows = counts["seen"] - counts["not_finite"]
        assert counts["rows_backward"] == rows
        assert 3 * rows < counts["rows_forward"] < 4 * rows
    assert any(seen["counts"]["recovered"] for seen in first.values())
    actions = {event.action for seen in first.values() for event in seen["events"]}
    assert {"aside", "back"} <= actions
    assert all(seen["counts"]["not_finite"] == 3 for seen in first.values())


def test_any_rank_saves_the_whole_state(ranks):
    seen, _, path = ranks
    assert (path / "state-0").read_bytes() == (path / "state-1").read_bytes()
    assert (path / "state").read_bytes() == (path / "state-0").read_bytes()
    for one in seen:
        for before, after in one["loaded"].values():
            same = torch.equal(before, after) if torch.is_tensor(before) else before == after
            assert same


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("other seed", "GroupError: rank 1 was given another seed"),
        ("other method", "GroupError: rank 1 was given another method"),
        ("no images", "ValueError: no rank has an image"),
        ("other batch", "GroupError: rank 1 has seen another number of batches"),
        ("other bits", f"GroupError: rank 1 holds other bits after {EVERY} batches"),
    ],
)
def test_ranks_that_differ_are_named_on_all(ranks, what, told):
    for seen in ranks[0]:
        assert seen[what].startswith(told)


def test_a_rank_that_dies_is_named_and_nothing_is_half_done(ranks):
    before, after = ranks[1]["state"]
    assert ranks[1]["error"].startswith("GroupError: rank 1 is gone")
    assert before.pop("meta") == after.pop("meta")
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor)


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match="give a group of"):
        fata.adapt(network("resnet_gn"), "tent", group=object())
    with pytest.raises(ValueError, match="speed='fast'"):
        fata.adapt(network("resnet_gn"), "tent", speed="fast", group=object())


GRID = (
    "--model mini_resnet_gn --methods deyo+fata --domains fog --images 71 --guard "
    "--scenario normal,bs1"
)


def bench(folder, *before):
    """Cells by `fata bench`: batches of 64 and 7, and of one image, of which a rank has none."""
    command = [sys.executable, "-m", *before, "fata", "bench", "--device", "cpu", *GRID.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done, list(Store(folder / "results.db"))


@pytest.mark.slow
def test_bench_under_torchrun_is_bench(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    (alone, ones), (shared, twos) = bench(folders[0]), bench(folders[1], *launcher)
    assert (alone.returncode, shared.returncode) == (0, 0)
    assert shared.stdout == alone.stdout  # of one rank: the other is silent
    for one, two in zip(ones, twos, strict=True):
        assert two.key == one.key
        assert two.result["counts"] == one.result["counts"]
        assert two.result["classes"] == one.result["classes"]
        for name in ("accuracy", "entropy"):
            assert two.result["curve"][name] == pytest.approx(one.result["curve"][name], rel=1e-4)
