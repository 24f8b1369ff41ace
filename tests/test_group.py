"""Several ranks that share every batch do what one process does with the whole of it."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fata
from fata import tiny
from fata.check import images, network
from fata.group import GroupError
from fata.methods import SPECS

SHARED = [spec for spec in SPECS if spec not in ("cotta", "memo")]
CASES = [
    *(("resnet_gn", spec) for spec in SHARED),
    *(("vit_ln", spec) for spec in ("eata+fata", "sar+fata", "deyo+fata")),
    *(("resnet_bn", spec) for spec in ("norm", "tent", "eata+fata", "sar+fata", "deyo+fata")),
    ("resnet_bn", "tent+fata joint"),
]
SPLITS = ((8, 8), (8, 8), (16, 0), (0, 4), (0, 1), (2, 0), (3, 5), (8, 8))


def batches():
    """Images that are partly easy and partly hard, some of them not finite."""
    parts = list(images(sum(map(sum, SPLITS))).double().split([sum(split) for split in SPLITS]))
    parts[1][3] = torch.nan
    parts[5].fill_(torch.inf)  # nobody has a row to learn from
    return parts


def made(model, case, **more):
    """In double precision, in which other orders of a sum do not show."""
    spec, *joint = case.split()
    fields = {"bn_stats": "joint"} if joint else {}
    if spec.startswith("eata"):
        fields |= {"fisher_data": [images(8, seed=6).double()], "redundancy": 0.5}
    if spec.startswith("sar"):
        fields["recovery"] = 0.6  # goes back to the source now and then
    guard = fata.Guard(every=2, rows=16, narrowing=0.0)  # looks often, and takes back
    return fata.adapt(model, spec, lr=0.02, seed=3, guard=guard, **fields, **more)


def told(adapter, answers):
    state = adapter.state_dict()
    return {
        "answers": answers,
        "meta": state.pop("meta"),
        "state": state,
        "counts": adapter.counts,
        "events": adapter.guard.events if adapter.guard else [],
    }


def run(adapter, share):
    """Answers of every batch, or of this rank's share, and some of a frozen adapter."""
    answers = []
    for part, split in zip(batches(), SPLITS, strict=True):
        answers.append((adapter(share(part, split)), adapter.selected))
    with adapter.frozen():
        answers.append((adapter(share(images(6, seed=9).double(), (6, 0))), {}))
    return told(adapter, answers)


def start(rank, path, work):
    """One of two ranks, on the CPU."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", 2)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    models = torch.load(f"{path}/models", weights_only=False)
    torch.save(work(rank, models), f"{path}/{rank}")
    dist.destroy_process_group()


def two_ranks(path, work):
    """What each of two ranks gives."""
    models = {net: network(net).double() for net in tiny.NAMES}
    torch.save(models, path / "models")
    mp.spawn(start, (path, work), nprocs=2)
    return [torch.load(path / str(rank), weights_only=False) for rank in (0, 1)]


def shared_streams(rank, models):
    """Every case, by two ranks; rank 1 has no sure row in the first batch."""
    seen = {}
    for net, case in CASES:
        adapter = made(copy.deepcopy(models[net]), case, group=dist.group.WORLD)
        seen[net, case] = run(adapter, lambda part, split: part.split(split)[rank])
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks(tmp_path_factory.mktemp("ranks"), shared_streams)


@pytest.mark.parametrize(("net", "case"), CASES)
def test_two_ranks_are_one(ranks, net, case):
    one = run(made(network(net).double(), case), lambda part, split: part)
    first, second = (seen[net, case] for seen in ranks)
    close = {"rtol": 1e-6, "atol": 1e-8, "equal_nan": True}
    for whole, *parts in zip(*(them["answers"] for them in (one, first, second)), strict=True):
        torch.testing.assert_close(torch.cat([p[0] for p in parts]), whole[0], **close)
        for term, rows in whole[1].items():
            assert torch.equal(torch.cat([p[1][term] for p in parts]), rows)
    for name, tensor in one["state"].items():
        torch.testing.assert_close(first["state"][name], tensor, **close)
    for name, tensor in first["state"].items():
        assert torch.equal(second["state"][name], tensor)
    assert first["meta"] == second["meta"]
    assert first["counts"] == second["counts"] == one["counts"]
    for event, its in zip(first["events"], one["events"], strict=True):
        assert (event.batch, event.action, event.to) == (its.batch, its.action, its.to)
