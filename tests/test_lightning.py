"""The example of docs/state.md with Lightning."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import fata
from fata.testing.cases import images, network

pytest.importorskip("lightning", reason="needs lightning, which no part of fata depends on")

DOCS = Path(__file__).parent.parent / "docs" / "state.md"


@pytest.mark.filterwarnings("ignore")
def test_the_example_predicts_what_an_adapter_does(tmp_path, monkeypatch):
    (code,) = re.findall(r"```py\n(import fata, lightning\n.*?)```", DOCS.read_text(), re.DOTALL)
    code = code.replace("devices=1", "devices=1, accelerator='cpu', enable_progress_bar=False")
    monkeypatch.chdir(tmp_path)
    stream = images(24, seed=2)
    found = {"model": network("resnet_gn"), "loader": DataLoader(stream, batch_size=8)}
    exec(code, found)
    alone = fata.adapt(network("resnet_gn"), "tent+fata")
    assert len(found["logits"]) == 3
    for batch, logits in zip(stream.split(8), found["logits"], strict=True):
        assert torch.equal(logits, alone(batch))
    twin = fata.adapt(network("resnet_gn"), "tent+fata")
    twin.load("camera-7.safetensors")
    assert twin.counts == alone.counts
    assert alone.counts["stepped"] == 3
    (metrics,) = tmp_path.rglob("metrics.csv")
    lines = metrics.read_text().splitlines()
    assert "fata/loss" in lines[0]
    assert len(lines) == 4
