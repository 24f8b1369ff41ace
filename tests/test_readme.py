"""Examples of the README and the docs run as they are printed."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(page, heading):
    """What the one example under a heading leaves behind."""
    section = page.partition(heading)[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    names = {}
    exec(compile(code, heading, "exec"), names)
    return names


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
