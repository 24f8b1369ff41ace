"""Examples of the README and the docs run as they are printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(page, heading):
    """What the one example under a heading leaves behind."""
    section = page.partition(heading)[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    names = {}
    exec(compile(code, heading, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Examples may write files."""
    monkeypatch.chdir(tmp_path)


def test_three_lines_are_enough():
    names = run(README, "# fata")
    assert names["adapted"].counts["seen"] == len(names["logits"]) == 64


def test_use_leaves_a_file_and_the_source_model(tmp_path):
    names = run(README, "## Use")
    assert (tmp_path / "camera-7.safetensors").exists()
    assert names["plain"] is names["loaded"].model


def test_no_example_is_left_out():
    assert README.count("```python") == 4


def test_your_own_model_runs(capsys):
    run(README, "## Your own model")
    printed = capsys.readouterr().out
    assert "torch.Size([8, 10])" in printed
    assert "'1.weight'" in printed


def test_a_stream_is_adapted_to(capsys):
    names = run(README, "## Models, data, streams")
    assert names["seen"] == 512
    assert f"{names['right'] / 512:.1%} of 512 images" in capsys.readouterr().out


def test_an_embedded_model_is_loaded():
    names = run((ROOT / "docs" / "models.md").read_text(), "# Models")
    assert names["adapted"].counts["seen"] == 128


def test_the_number_of_architectures_is_true():
    from test_zoo import FAST, REST

    assert f"is tested on {len(FAST) + len(REST)} architectures" in " ".join(README.split())
