"""What works without the optional packages, and what the others say."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = ("typer", "rich", "yaml", "plotly", "jinja2", "PIL")
ZOO = ("timm", "torchvision", "transformers")

START = """
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {absent!r}
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
"""


def without(absent, code, *arguments):
    """Run Python code in a process that finds none of some packages."""
    script = START.replace("{absent!r}", repr(absent)) + code
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def fata(absent, *arguments):
    """The installed command."""
    return without(absent, "from fata.cli import run; run()", *arguments)


def test_the_library_needs_no_extra():
    """Every method adapts, but MEMO and ROID, whose views are torchvision's."""
    ran = without(
        (*BENCH, *ZOO, "ray", "imagecorruptions"),
        """
import torch, fata
from fata.methods import SPECS

for spec in SPECS:
    if spec not in ("memo", "roid", "roid+fata"):
        net = fata.tiny.build("resnet_gn").eval()
        data = {"fisher_data": [torch.rand(4, 3, 16, 16)]} if "eata" in spec else {}
        adapted = fata.adapt(net, spec, **data)
        assert adapted(torch.rand(4, 3, 16, 16)).shape == (4, 10), spec
for name in fata.corruptions.BY_NAME:
    if name != "jpeg_compression":
        assert fata.corrupt(torch.rand(1, 3, 32, 32), name, 1).shape == (1, 3, 32, 32)
assert fata.zoo.load("mini_vit").classes == 10
""",
    )
    assert ran.returncode == 0, ran.stderr


NEEDS = {
    "fata.corrupt(torch.rand(1, 3, 32, 32), 'jpeg_compression', 1)": "pip install fata[bench]",
    "fata.data.open('embedded')": "pip install fata[bench]",
    "fata.zoo.load('resnet50_gn')": "pip install fata[zoo]",
    "fata.zoo.load('resnet50_bn')": "pip install fata[zoo]",
    "fata.zoo.load('resnet51')": "choose one of resnet50_bn",
    "fata.zoo.load('hf:google/vit')": "pip install transformers",
    "fata.adapt(fata.tiny.build('resnet_gn'), 'memo')(torch.rand(1, 3, 16, 16))": "or give augment",
}


def test_what_needs_an_extra_says_which():
    ran = without(
        (*BENCH, *ZOO),
        f"""
import torch, fata

for code in {list(NEEDS)}:
    try:
        print(eval(code))
    except Exception as error:
        print(error)
""",
    )
    assert ran.returncode == 0, ran.stderr
    for said, message in zip(ran.stdout.splitlines(), NEEDS.values(), strict=True):
        assert message in said


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_the_command_without_its_extra_is_one_sentence(absent):
    ran = fata((absent,), "demo")
    assert ran.returncode == 2
    assert ran.stderr == f"fata: this needs {absent}: pip install fata[bench]\n"
    assert not ran.stdout


def test_a_command_that_needs_more_says_so(tmp_path):
    """Only a page needs plotly."""
    bench = ("bench", "--model", "mini_resnet_bn", "--methods", "source", "--domains", "fog")
    store = str(tmp_path / "results.db")
    ran = fata(ZOO, *bench, "--images", "4", "--store", store)
    assert ran.returncode == 0, ran.stderr
    ran = fata(("plotly",), "report", store, "--output", str(tmp_path / "report.html"))
    assert (ran.returncode, ran.stderr) == (2, "fata: this needs plotly: pip install fata[bench]\n")
    assert not Path(tmp_path, "report.html").exists()


@pytest.mark.parametrize(
    ("absent", "arguments", "message"),
    [
        (ZOO, ("cost", "--model", "timm:resnet18"), "pip install fata[zoo]"),
        (ZOO, ("data", "imagenet:{folder}"), "pip install fata[zoo]"),
        (ZOO, ("data", "cifar10:{folder}", "--download"), "pip install fata[zoo]"),
        (("fastapi",), ("serve", "--model", "mini_vit"), "pip install fata[serve]"),
        (("ray",), ("bench", "--model", "mini_vit", "--on", "ray"), "pip install fata[ray]"),
    ],
)
def test_a_command_says_which_extra_it_needs(absent, arguments, message, tmp_path):
    ran = fata(absent, *(one.format(folder=tmp_path) for one in arguments))
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
