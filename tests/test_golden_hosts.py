"""The traces of the hosts of 2024 to 2026, in the format of `test_golden.py`."""

import math
from pathlib import Path

import pytest
import torch
from tests.test_golden import CLOSE, SETS, prefixed, read, replay

import fata

TRACES = sorted((Path(__file__).parent / "golden/hosts").glob("*.safetensors"))
# As the traces call it, and a method.
MEMORY = {"probs": "mean_probs", "ema": "entropy", "mean": "mean", "count": "count"}
MEMORY |= {"class_probs": "class_probs"}
HOSTS = {"come_tent": "tent", "come_eata": "eata", "come_sar": "sar"}
HOSTS |= {"neo": "neo", "neo_cont": "neo", "nctta": "nctta", "zerosiam": "zerosiam"}
HOSTS |= {"roid": "roid", "roid_nocorr": "roid", "roid_window": "roid"}
FIELDS = {"d_margin": "redundancy", "mix_prob_weight": "mix", "scale": "alignment"}
FIELDS |= {"momentum_probs": "decay"}
SAME = ("alpha", "top_k", "nu", "eta", "temperature", "batch_size")
LIMITS = {"e_margin": "threshold", "margin_e0": "threshold"}
LIMITS |= {"thre_ent": "threshold", "margin_ent": "scale"}


def fields_of(meta, tensors, step):
    """The trace's settings as fields of the host, with its views in place of random ones."""
    limit, label = math.log(meta["classes"]), meta["label"]
    fields = {name: meta[name] for name in SAME if name in meta}
    fields |= {ours: meta[name] for name, ours in FIELDS.items() if name in meta}
    fields |= {ours: meta[name] / limit for name, ours in LIMITS.items() if name in meta}
    if label.startswith("come"):
        fields["entropy"] = "come"
    if label == "come_eata":
        fields["fisher_alpha"] = meta.get("fisher_beta", 0)
    if label == "zerosiam":
        rates = meta["optimizer"]
        fields["alignment"] = meta["alignment_weight"]
        fields["predictor_rate"] = rates["lr_predictor"] / rates["lr"]
    if label.startswith("roid"):
        assert (meta["slr_clip"], meta["slr_eps"], meta["sce_alpha"]) == (0.99, 1e-5, 0.5)
        fields["source_share"] = 1 - meta["momentum_src"]
        fields["correction"] = "multiply" if meta["prior_correction"] else None
        fields["augment"] = lambda images: images.index_copy(
            0, tensors[f"rows.{step[0]}"], tensors[f"view.{step[0]}"]
        )  # the other rows have no part in the step
    return fields


def adapter_of(meta, tensors, step, speed):
    model = fata.tiny.build(meta["model"], meta["classes"])
    model.load_state_dict(prefixed(tensors, "model."))
    adapter = fata.adapt(
        model,
        HOSTS[meta["label"]],
        lr=(meta["optimizer"] or {}).get("lr"),
        params=SETS.get(meta["params"].removesuffix("+predictor")),
        fisher_data=tensors.get("fisher_x") if meta.get("fisher_beta") else None,
        guard=None,
        speed=speed,
        **fields_of(meta, tensors, step),
    )
    if speed == "fast":
        adapter._engine.execution._captures = True  # the functions of a GPU, here not captured
    return adapter


def test_all_traces_are_here():
    assert len(TRACES) == 37


@pytest.mark.parametrize("speed", ["exact", "fast"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["selected-rows", "all-rows"])
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path, share, speed):
    meta, tensors = read(path)
    step = [0]
    adapter = adapter_of(meta, tensors, step, speed)
    engine = adapter._engine  # which the adapter gives up at the end
    window = fata.Window(adapter, meta["window"]) if meta.get("window", 1) > 1 else None
    replay(adapter, tensors, share, step, window)
    memory = prefixed(tensors, "memory.")
    if "alpha" in meta:  # the recorded code does not count then; ours does, for `warmup`
        del memory["count"]
    for name, expected in memory.items():
        state, theta = engine.state, engine.theta
        learned = dict(zip(theta.names, theta.split(state.theta), strict=True))
        found = learned.get(f"beside:{name}") if name == "predictor" else state.host[MEMORY[name]]
        torch.testing.assert_close(found, expected.reshape(found.shape), **CLOSE, check_dtype=False)
