"""The README's example of one's own model runs as it is printed."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_your_own_model_runs(capsys):
    section = README.partition("## Your own model")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "torch.Size([8, 10])" in printed
    assert "'1.weight'" in printed


def test_the_number_of_architectures_is_true():
    from test_zoo import FAST, REST

    assert f"is tested on {len(FAST) + len(REST)} architectures" in " ".join(README.split())
