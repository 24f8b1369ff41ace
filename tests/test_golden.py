"""Every step of the reference implementations' traces, and the parameters they end with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import fata

TRACES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))
CLOSE = {"atol": 2e-4, "rtol": 2e-3}


def read(path):
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["meta"]), tensors


def prefixed(tensors, prefix):
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def fields_of(meta, tensors, step):
    """The trace's settings, with its noise and its patch orders in place of draws."""
    fields = {"recovery": meta.get("e_m"), "plpd_threshold": meta.get("plpd")}
    if meta["case"].startswith("deyo"):
        fields["shuffle"] = lambda rows, patches: tensors[f"perm.{step[0]}.0"]
    if meta["case"].startswith("eata"):
        fields |= {"redundancy": meta["d_margin"], "fisher_alpha": meta.get("fisher_alpha", 0)}
    if "fata" in meta["case"]:
        fields |= {"sigma": meta["sigma_n"], "bn_stats": meta.get("bn_stats", "separate")}
        fields["noise"] = lambda rows, channels: tuple(
            tensors[f"noise.{step[0]}.{i}"] for i in (0, 1)
        )
    return {name: value for name, value in fields.items() if value is not None}


SETS = {"all": "norm", "truncated": "norm-truncated"}  # as the traces call them


def adapter_of(meta, tensors, step, speed):
    model = fata.tiny.build(meta["model"], meta["classes"])
    model.load_state_dict(prefixed(tensors, "model."))
    return fata.adapt(
        model,
        meta["case"],
        lr=meta["optimizer"]["lr"],
        params=SETS[meta["params"]],
        fisher_data=tensors.get("fisher_x") if meta.get("fisher_alpha") else None,
        guard=None,
        speed=speed,
        **fields_of(meta, tensors, step),
    )


def test_all_traces_are_here():
    assert len(TRACES) == 34


@pytest.mark.parametrize("speed", ["exact", "fast"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["selected-rows", "all-rows"])
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path, share, speed):
    meta, tensors = read(path)
    step = [0]
    adapter = adapter_of(meta, tensors, step, speed)
    if speed == "fast":
        adapter._engine.execution._captures = True  # the functions of a GPU, here not captured
    replay(adapter, tensors, share, step)


def replay(adapter, tensors, share, step=None, predict=None):
    """Every step of a trace, and the parameters at its end; `step[0]` is the number of the step.

    `predict` gives the logits in the adapter's place.
    """
    for name, expected in prefixed(tensors, "fisher.").items():
        torch.testing.assert_close(adapter.fisher[name], expected, atol=1e-6, rtol=2e-3)
    for t, images in enumerate(tensors["x"]):
        if step:
            step[0] = t
        adapter._engine.state.share = share  # learn on the selected rows, or on all with a mask
        logits = (predict or adapter)(images)
        torch.testing.assert_close(logits, tensors["logits"][t], **CLOSE)
    final = prefixed(tensors, "final.")
    assert set(final) == set(adapter.trainable)
    moved = dict(adapter.unwrap().named_parameters())
    for name, expected in final.items():
        torch.testing.assert_close(moved[name].detach(), expected, **CLOSE)
