"""The demo: what it runs, and that its sentences follow from the cells."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fata.bench.paired import pack
from fata.bench.report import demo_story as demo
from fata.bench.store import Record
from fata.commands.app import app


def record(cell, right):
    method, guard = cell.method, {"a": 1} if cell.guard else None
    domains = [f"{cell.domains[0]}-5"]
    protocol = {"model": cell.model, "method": method, "domains": domains, "guard": guard}
    result = {"right": pack(torch.from_numpy(right)), "rows": len(right)}
    return Record(str(cell), protocol, {}, result, "")


def told(accuracies):
    """The story where each cell's first images are right, as many as its accuracy says."""
    return demo.story_of(
        [record(cell, np.arange(200) < 2 * accuracies(cell)) for cell in demo.cells(200)]
    )


def plain(cell):
    if cell.method == "source":
        return 40
    if cell.guard or cell.method != "deyo" or cell.model == demo.BN:
        return 60 if cell.method == "norm" else 70
    return 10


def test_every_host_is_run_with_and_without_fata():
    cells = demo.cells(200)
    assert len({str(cell) for cell in cells}) == len(cells)
    compared = {c.method for c in cells if c.domains == (demo.COMPARED,) and c.model == demo.BN}
    assert compared >= {f"{host}{plus}" for host in demo.HOSTS for plus in ("", "+fata")}
    assert {cell.images for cell in demo.cells(100)} == {100}


def test_the_sentences_have_the_cells_numbers():
    adapting, adding, guarding = told(plain).sentences
    assert "BatchNorm network 40 % -> 70 % on average" in adapting
    assert "+20.0 are the batch's statistics and +10.0 learning" in adapting
    assert "within noise (200 images): tent +0.00, eata +0.00, sar +0.00, deyo +0.00" in adding
    assert "mean accuracy 40.0 % unadapted -> 10.0 %; with the guard 70.0 %" in guarding


@pytest.mark.parametrize(("more", "sign"), [(20, "+20.00"), (-20, "-20.00")])
def test_a_clear_difference_is_said_with_its_sign(more, sign):
    story = told(lambda cell: plain(cell) + more * (cell.method == "sar+fata"))
    assert f"sar {sign} [" in story.sentences[1]
    assert "within noise (200 images): tent +0.00, eata +0.00, deyo +0.00" in story.sentences[1]
    assert [addition.gain.sign for addition in story.additions] == [0, 0, more // 20, 0]


def test_images_that_change_are_counted():
    effect = told(plain).effects[0]
    assert (effect.became_right, effect.became_wrong, effect.images) == (60, 0, 200)


def test_the_curve_is_of_the_last_images():
    curve = demo._moving(np.arange(2 * demo.WINDOW) < demo.WINDOW)
    assert curve[demo.WINDOW - 1] == 100
    assert curve[demo.WINDOW + demo.WINDOW // 2 - 1] == 50
    assert curve[-1] == 0


@pytest.mark.slow
def test_the_demo_prints_its_story_and_writes_a_page(tmp_path, browser):
    out = tmp_path / "out"
    call = ["demo", "--images", "16", "--output", str(out)]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    begin = ("1. Adaptation without", "2. FATA")
    sentences = [line for line in result.output.splitlines() if line.startswith(begin)]
    again = CliRunner().invoke(app, call)
    assert "0 streams to run" in again.output
    assert sentences[0] in again.output
    browser.get((out / "report.html").as_uri())
    shown = browser.find_element("css selector", ".headline").text
    assert [line.partition(". ")[2] for line in sentences] == shown.splitlines()[:2]
    assert len(browser.find_elements("css selector", ".story .main-svg")) >= 2
    strips = browser.find_elements("css selector", ".strip")
    assert len(strips) == sum(map(len, demo.HARDEST.values()))
    script = "return [...document.images].every(image => image.naturalWidth === 32)"
    assert browser.execute_script(script)
    assert len(strips[0].find_elements("css selector", "figure")) == demo.SHOWN


def test_the_demo_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "cannot write" in result.output
