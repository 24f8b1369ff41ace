"""The command: a method of one's own under the battery, and wrong input."""

import subprocess
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

import fata
from fata.commands.app import app

GOOD = '''
from dataclasses import dataclass
from typing import ClassVar
import fata

@dataclass(frozen=True)
class Sure(fata.Method):
    """Learns from the rows that are surer than most, with equal weights."""

    quantile: float = 0.6
    name: ClassVar[str] = "sure"

    def select(self, batch, memory):
        rows = batch.entropy <= batch.entropy.quantile(self.quantile)
        return fata.Selection(rows, batch.entropy.new_ones(()))

class Impure(Sure):
    """Counts its calls where it must not."""

    def select(self, batch, memory):
        memory["calls"] = memory.get("calls", batch.entropy.new_zeros(())) + 1
        return super().select(batch, memory)

class Demanding(Sure):
    def __init__(self, must): ...

def function(): ...
'''


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "wrong.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_a_sound_method_holds(call):
    result = call("check", "mine:Sure", "--net", "resnet_gn")
    assert result.exit_code == 0, result.output
    assert "holds" in result.output
    assert "fails" not in result.output


def test_an_impure_method_fails_and_is_told_why(call):
    result = call("check", "mine:Impure", "--net", "resnet_gn")
    assert result.exit_code == 1
    assert "selection is pure" in result.output
    assert "memory 'calls' after select" in " ".join(result.output.split())


def test_a_method_of_ones_own_is_compared_with_others(call):
    """By other processes, too."""
    methods = "mine:Sure,mine:Sure+fata,mine:Sure:quantile=0.2,tent"
    grid = ("--model", "mini_resnet_gn", "--domains", "fog", "--images", "32", "--batch-size", "16")
    result = call("bench", *grid, "--methods", methods, "--jobs", "2")
    assert result.exit_code == 0, result.output
    for name in ("tent", "mine:Sure quantile=0.6", "mine:Sure+fata", "mine:Sure quantile=0.2"):
        assert name in result.output
    adapted = fata.adapt(fata.tiny.build("resnet_gn"), "mine:Sure+fata", quantile=0.3)
    assert (adapted.name, adapted.method.quantile) == ("sure+fata", 0.3)


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_bench_tells_of_fields_that_the_network_refuses(call, more):
    grid = ("--model", "mini_resnet_gn", "--domains", "fog", "--images", "16")
    result = call("bench", *grid, "--methods", "fata:layer=nowhere", *more)
    assert result.exit_code in (1, 2)
    assert "nowhere" in result.output
    assert isinstance(result.exception, SystemExit)


def test_bench_again_tells_what_it_runs_again(call):
    grid = ("--model", "mini_resnet_gn", "--domains", "fog", "--images", "16")
    assert "1 cell, 0 of them in" in call("bench", *grid, "--methods", "source").output
    result = call("bench", *grid, "--methods", "source,norm", "--again", "--dry-run")
    assert "2 cells, 1 of them in results.db, 1 of which are run again" in result.output


def test_check_knows_its_networks(call):
    result = call("check", "mine:Sure", "--net", "resnet")
    assert result.exit_code == 2
    assert "resnet_bn, resnet_gn, vit_ln" in " ".join(result.output.replace("│", " ").split())


def test_corrupt_draws_a_sheet(call, tmp_path):
    picture = tmp_path / "photo.png"
    Image.effect_noise((50, 40), 60).save(picture)
    result = call("corrupt", str(picture), "-o", "sheet.png", "--size", "32", "--name", "fog")
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 6 * 32
        cells = [sheet.crop((150 + i * 36, 24, 182 + i * 36, 56)).tobytes() for i in range(6)]
    assert len(set(cells)) == 6  # the clean one and five severities


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jpg"], "cannot read 'nowhere.jpg'"),
        (["mine.py"], "cannot read 'mine.py'"),
        (["photo.png", "--name", "rain"], "choose from gaussian_noise"),
        (["photo.png", "-o", "no/such/folder/s.png"], "cannot write"),
    ],
)
def test_corrupt_refuses(call, tmp_path, arguments, message):
    Image.effect_noise((20, 20), 60).save(tmp_path / "photo.png")
    result = call("corrupt", "--size", "16", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine", "as my_module:MyMethod"),
        ("nowhere:Sure", "No module named 'nowhere'"),
        ("mine:Missing", "no attribute 'Missing'"),
        ("wrong:Sure", "cannot be imported: SyntaxError"),
        (".:Sure", "cannot be imported"),
        ("mine:function", "is no subclass of fata.Method"),
        ("mine:Demanding", "needs a default for each field"),
    ],
)
def test_check_refuses(call, target, message):
    result = call("check", target)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_version_and_help(call):
    assert fata.__version__ in call("--version").output
    assert "check" in call("--help").output


def test_help_does_not_wait_for_pytorch():
    """Of all commands in one process: whatever is imported for any of them is seen."""
    names = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert "train-source" in names
    code = (
        "import sys; from fata.commands.app import app\n"
        f"for command in ([], *([name] for name in {names})):\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'torchvision', 'timm', 'plotly', 'numpy'} & {*sys.modules}"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Usage:") == 1 + len(names)


def test_the_list_of_the_papers_tables_does_not_wait_for_pytorch():
    list_ = "try: app(['reproduce'])\nfinally: print(*sys.modules)"
    code = f"import sys; from fata.commands.app import app\n{list_}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *told, modules = ran.stdout.splitlines()
    assert [line.partition(":")[0] for line in told][:2] == ["table1a", "table1b"]
    assert not {"torch", "torchvision", "timm", "plotly", "numpy"} & {*modules.split()}


def test_public_names_are_found_when_asked_for():
    assert all(getattr(fata, name) is not None for name in fata.__all__)
    assert {*fata.__all__, "__version__"} <= {*dir(fata)}
    with pytest.raises(AttributeError, match="no attribute 'adopt'"):
        _ = fata.adopt


def test_the_folder_of_the_states_is_no_file(call):
    result = call("serve", "--model", "mini_resnet_gn", "--state-dir", "mine.py")
    assert result.exit_code == 2
    assert "--state-dir" in result.output


def test_a_fast_server_is_warm_before_it_listens(call, monkeypatch):
    def listen(service, tokens, listening):
        service.close()
        for one in listening:
            one.close()
        print("listening")
        return 0

    monkeypatch.setattr("fata.serve.server.run", listen)
    monkeypatch.setattr("fata.serve.logs.log_as_json", lambda level: None)
    shown = {}
    for speed in ("fast", "exact"):
        result = call("serve", "--model", "mini_resnet_gn", "--speed", speed, "--batch", "2")
        assert result.exit_code == 0, result.output
        shown[speed] = result.stdout.splitlines()
    told, took, last = shown["fast"]
    assert told.startswith("warming up: ")
    assert took.startswith("warming up took ")
    assert last == "listening"
    assert shown["exact"] == ["listening"]

    def out_of_memory(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fata.Adapter, "warm_up", out_of_memory)
    cold = call("serve", "--model", "mini_resnet_gn", "--speed", "fast").stdout.splitlines()
    assert cold[-1] == "listening"
    assert "could not warm up" in cold[1]
