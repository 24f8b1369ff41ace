"""Every Python example of the README and the user pages runs as it is printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
METHOD = DOCS / "add-a-method.md"
ELSEWHERE = {"data.md": "test_data.py"}  # pages whose examples another test runs
PRINTED = {  # what the examples of a page must print
    "index.md": ["% of 256 images"],
    "your-model.md": [
        *("torch.Size([8, 10])", "'1.weight'", "Deyo(", "sigma=0.5", "threshold=0.4"),
        "torch.Size([1, 10]) of 16, 16 learned from",
    ],
    "models.md": ["mini_resnet_gn: weights"],
    "corruptions.md": ["torch.Size([4, 3, 32, 32])"],
    "guard.md": ["aside", "Health("],
    "state.md": ["'seen': 128", "'tent': 1.0"],
    "serve.md": ["16 adapting"],
    "methods.md": ["torch.Size([16, 10])"],
    "balance.md": ["torch.Size([16, 10])"],
    "batchnorm.md": ["torch.Size([4, 10])"],
    "add-a-method.md": ["margin+fata"],
}


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(page):
    """What each example of a page leaves behind."""
    found = []
    for number, code in enumerate(examples(page)):
        names = {"__name__": f"example_{number}"}
        exec(compile(code, f"{page.name}, example {number}", "exec"), names)
        found.append(names)
    return found


PAGES = [p for p in sorted(DOCS.glob("*.md")) if examples(p) and p.name not in ELSEWHERE]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Examples may write files."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in (README, METHOD)], ids=lambda p: p.name
)
def test_the_examples_of_a_page_run(page, capsys):
    run(page)
    printed = capsys.readouterr().out
    for part in PRINTED[page.name]:
        assert part in printed


def test_the_readme_leaves_a_state_and_the_source_model(tmp_path):
    (names,) = run(README)
    assert (tmp_path / "camera-7.safetensors").exists()
    assert names["logits"].shape == (64, 10)
    assert names["adapted"].counts["seen"] == 0


@pytest.fixture
def my_method(tmp_path, monkeypatch):
    """The page's method, in the file that it says."""
    (tmp_path / "my_method.py").write_text(examples(METHOD)[0])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    sys.modules.pop("my_method", None)


@pytest.mark.usefixtures("my_method")
def test_the_method_of_the_page_adapts(capsys):
    exec(compile(examples(METHOD)[1], METHOD.name, "exec"), {})
    assert PRINTED[METHOD.name][0] in capsys.readouterr().out


@pytest.mark.usefixtures("my_method")
@pytest.mark.parametrize("with_fata", [False, True])
def test_the_method_of_the_page_passes_the_checks(with_fata):
    from my_method import Margin

    import fata
    from fata.testing.cases import Case
    from fata.testing.checks import CHECKS

    case = Case(Margin(), fata.Fata() if with_fata else None, "resnet_gn", 16)
    for check in CHECKS:
        check(case)


def test_numbers_of_checks_and_architectures_are_true():
    from tests.zoo.test_zoo import FAST, REST

    from fata.testing.checks import CHECKS

    text = {p.name: " ".join(p.read_text().split()) for p in (README, METHOD)}
    assert f"runs {len(CHECKS)} checks" in text["README.md"]
    assert f"runs {len(CHECKS)} checks" in text["add-a-method.md"]
    model = " ".join((DOCS / "your-model.md").read_text().split())
    assert f"is tested on {len(FAST) + len(REST)} architectures" in model
