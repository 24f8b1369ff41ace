"""The traces of the hosts of 2024 to 2026, in the format of `test_golden.py`."""

from pathlib import Path

import pytest
import torch
from tests.test_golden import CLOSE, SETS, prefixed, read, replay

import fata

TRACES = sorted((Path(__file__).parent / "golden/hosts").glob("*.safetensors"))
MEMORY = {"probs": "mean_probs", "ema": "entropy"}  # as the traces call it, and a method


def fields_of(meta):
    """The trace's settings as fields of the host."""
    limit = torch.tensor(float(meta["classes"])).log().item()
    fields = {"entropy": "come", "redundancy": meta.get("d_margin")}
    fields["fisher_alpha"] = meta.get("fisher_beta", 0) if "eata" in meta["label"] else None
    for name in ("e_margin", "margin_e0"):
        if name in meta:
            fields["threshold"] = meta[name] / limit
    return {name: value for name, value in fields.items() if value is not None}


def test_all_traces_are_here():
    assert len(TRACES) == 13


@pytest.mark.parametrize("speed", ["exact", "fast"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["selected-rows", "all-rows"])
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path, share, speed):
    meta, tensors = read(path)
    model = fata.tiny.build(meta["model"], meta["classes"])
    model.load_state_dict(prefixed(tensors, "model."))
    adapter = fata.adapt(
        model,
        meta["label"].removeprefix("come_"),
        lr=meta["optimizer"]["lr"],
        params=SETS[meta["params"]],
        fisher_data=tensors.get("fisher_x") if meta.get("fisher_beta") else None,
        guard=None,
        speed=speed,
        **fields_of(meta),
    )
    engine = adapter._engine  # which the adapter gives up at the end
    if speed == "fast":
        engine.execution._captures = True  # the functions of a GPU, here not captured
    replay(adapter, tensors, share)
    for name, expected in prefixed(tensors, "memory.").items():
        found = engine.state.host[MEMORY[name]]
        torch.testing.assert_close(found, expected.reshape(found.shape), **CLOSE)
