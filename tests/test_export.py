"""The adapted model as a file for other programs."""

import pytest
import torch

import fata
from fata.testing.cases import images, network

IMAGES = images(8, seed=1)


def adapted(net, spec="tent+fata", **fields):
    made = fata.adapt(network(net), spec, **{"lr": 0.01, "guard": None, **fields})
    for _ in range(3):
        made(IMAGES)
    return made


def frozen(made, batch):
    with made.frozen():
        return made(batch)


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn", "vit_ln"])
def test_a_program_gives_the_logits_of_the_frozen_adapter(net, blend, tmp_path):
    made = adapted(net, blend=blend)
    expected = frozen(made, IMAGES)
    made.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(IMAGES), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(frozen(made, IMAGES), expected)  # and the adapter continues
    if net != "vit_ln":  # its code reads the size of the batch
        some = IMAGES[:5]
        torch.testing.assert_close(program(some), frozen(made, some), atol=1e-4, rtol=1e-4)


def test_it_says_where_the_batch_size_is_fixed(tmp_path, caplog):
    adapted("vit_ln").export(tmp_path / "model.pt2")
    assert "8 images" in caplog.text


def test_cotta_exports_the_teacher(tmp_path):
    made = adapted("resnet_gn", "cotta")
    made.export(tmp_path / "model.pt2", IMAGES[:2])
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(IMAGES), frozen(made, IMAGES), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("net", ["resnet_bn", "resnet_gn", "vit_ln"])
def test_onnxruntime_agrees(net, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnx and onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    made = adapted(net)
    made.export(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(["logits"], {"images": IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), frozen(made, IMAGES), atol=1e-4, rtol=1e-4)


def test_what_cannot_be_exported_is_said(tmp_path):
    fresh = fata.adapt(network("resnet_gn"), "tent")
    with pytest.raises(ValueError, match="no batch was seen"):
        fresh.export(tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"\.pt2 .* or \.onnx"):
        adapted("resnet_gn").export(tmp_path / "model.bin")
    memo = fata.adapt(network("resnet_bn"), fata_memo := "memo", views=2)
    with pytest.raises(ValueError, match=fata_memo):
        memo.export(tmp_path / "model.pt2", IMAGES)
    assert list(tmp_path.iterdir()) == []
