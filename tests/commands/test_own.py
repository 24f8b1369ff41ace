"""Models, data and methods of one's own, in every command that takes a name."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fata
from fata.commands.app import app
from fata.data import DataError
from fata.zoo import ZooError

OWN = """
from dataclasses import dataclass
from typing import ClassVar

import torch

import fata

def build(classes=10):
    torch.manual_seed(0)
    use = fata.zoo.Preprocess(32, 32, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return fata.tiny.build("resnet_gn", classes), use

def no_preprocess():
    return fata.tiny.build("resnet_gn")

def fails():
    raise RuntimeError("nothing here")

class Noise(torch.utils.data.Dataset):
    classes = [f"class {number}" for number in range(10)]

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 10

class Normalised(Noise):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image - 0.5, label

def loader():
    return Noise()

def cameras():
    return {"left": Noise(), "right": Noise()}

def normalised():
    return Normalised()

def nothing():
    return 3

@dataclass(frozen=True)
class All(fata.Method):
    name: ClassVar[str] = "all"

    def select(self, batch, memory):
        rows = torch.ones_like(batch.entropy, dtype=torch.bool)
        return fata.Selection(rows, torch.ones_like(batch.entropy))
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A command, in a folder with a module of one's own."""
    (tmp_path / "things.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "things", raising=False)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture
def things(call, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)


def test_a_benchmark_of_ones_own_things(call):
    grid = ("--model", "things:build", "--data", "things:loader", "--domains", "fog")
    result = call("bench", *grid, "--methods", "source,things:All+fata", "--batch-size", "16")
    assert result.exit_code == 0, result.output
    assert "things:build, things:loader, normal, severity 5" in result.output
    assert "0.000125 (the paper's) for things:All+fata" in result.output


def test_cost_counts_a_method_of_ones_own(call):
    result = call("cost", "--model", "things:build", "--methods", "tent,things:All", "--share", "1")
    assert result.exit_code == 0, result.output
    tent, own = (line.split() for line in result.output.splitlines()[-2:])
    assert own[0] == "things:All"
    assert own[1:] == tent[2:]  # as TENT, without the paper's number


def test_a_table_of_the_paper_with_ones_own_things(call):
    own = ("--model", "things:build", "--data", "things:loader", "--methods", "things:All")
    result = call("reproduce", "table7", *own, "--subset", "8", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "things:build normal fog-5 things:All #0" in result.output
    assert "is a figure" in call("reproduce", "fig1", *own).output


def test_data_lists_ones_own(call):
    result = call("data", "things:cameras", "--check")
    assert result.exit_code == 0, result.output
    assert "left" in result.output
    assert "read 96 images, 0 damaged" in result.output


def test_a_source_model_is_trained_from_ones_own_network(call, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(8):
            image = Image.new("RGB", (32, 32), (number * 30, 0, 255 * (name == "cat")))
            image.save(tmp_path / "pictures" / name / f"{number}.png")
    told = ("--data", "folder:pictures", "--model", "things:build", "--epochs", "1")
    result = call("train-source", *told, "--workers", "0", "-o", "mine.safetensors")
    assert result.exit_code == 0, result.output
    assert fata.zoo.load(Path("mine.safetensors")).classes == 2


def test_pixels_pass_through_as_they_are(things):
    data = fata.data.open("things:loader", fit=fata.zoo.load("things:build"))
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(7))
    assert data[7][1] == 7
    assert (data[7][0] - image).abs().max() <= 0.5 / 255 + 1e-6
    assert data.classes[3] == "class 3"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("things:no_preprocess", "return \\(model, fata.zoo.Preprocess"),
        ("things:fails", "RuntimeError: nothing here"),
        ("things:absent", "no attribute 'absent'"),
        ("nowhere_module:build", "unknown model .*There is no module 'nowhere_module'"),
    ],
)
def test_what_is_no_model_is_told(things, name, why):
    with pytest.raises(ZooError, match=why):
        fata.zoo.load(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("things:nothing", "returns int: return a torch data set"),
        ("things:fails", "nothing here"),
        ("things:absent", "no attribute 'absent'"),
    ],
)
def test_what_is_no_data_is_told(things, name, why):
    with pytest.raises(DataError, match=why):
        fata.data.open(name)


def test_normalised_pixels_are_refused(things):
    data = fata.data.open("things:normalised")
    with pytest.raises(DataError, match="without normalisation"):
        data[0]
