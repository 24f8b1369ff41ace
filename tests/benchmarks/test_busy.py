"""What `benchmarks.busy` writes and streams, and what `benchmarks.race` says of memory."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import fata
from benchmarks import busy, race
from fata.bench.run.measure import measure
from fata.data import Domain


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    def called(*arguments):
        file = tmp_path / "found.json"
        usual = ["--device", "cpu", "--model", "resnet_gn", "--workers", "0", "--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["busy", *usual, *arguments])
        busy.main()
        return capsys.readouterr().out, json.loads(file.read_text())

    return called


def test_files_lie_as_imagenet_c_does(tmp_path, monkeypatch):
    monkeypatch.setattr(busy, "PICTURES", 3)
    busy.write(tmp_path, 1005)
    data = fata.data.open(f"imagenet-c:{tmp_path}")
    (domain,) = data.domains
    assert domain == Domain("brightness", 5)
    assert data.of(domain).labels.bincount().tolist() == [2] * 5 + [1] * 995
    assert len({file.stat().st_ino for file in tmp_path.rglob("*.JPEG")}) == 3


def test_pictures_are_as_smooth_as_photographs(tmp_path):
    """Decoding takes as long as a file has bytes."""
    draws = torch.Generator().manual_seed(0)
    one, other = busy.picture(draws), busy.picture(draws)
    assert one.tobytes() != other.tobytes()
    one.save(tmp_path / "one.jpg", quality=busy.QUALITY)
    assert 16_000 < (tmp_path / "one.jpg").stat().st_size < 32_000
    red, green, _ = torch.from_numpy(np.array(one)).float().unbind(2)
    for a, b in ((red[:, 1:], red[:, :-1]), (red[1:], red[:-1]), (red, green)):
        assert torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1] > 0.85


def test_a_share_of_the_time(call, monkeypatch):
    results = []
    monkeypatch.setattr(busy, "measure", lambda *given: results.append(measure(*given)))
    printed, found = call("--images", "150")
    assert [result["rows"] for result in results] == [150]
    assert found["busy"] == pytest.approx(found["stream"] / found["alone"])
    assert found["decoding"] > 0
    assert found["selected"] == pytest.approx({"eata": 0.4, "fata": 0.4}, abs=0.01)
    assert f"| {found['busy']:.0%} |" in printed


def test_pictures_of_ones_own(call, tmp_path):
    place = tmp_path / "ImageNet-C" / "fog" / "3" / "n01440764"
    place.mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (224, 224), (50 * number, 0, 0)).save(place / f"{number}.JPEG")
    _, found = call("--data", str(tmp_path / "ImageNet-C"))
    assert found["selected"] == {"eata": 0.4, "fata": 0.4}  # of five


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--images", "0"], "--images 0"),
        (["--data", "nowhere"], "nowhere"),
        (["--model", "resnet_xx", "--images", "1"], "resnet_xx"),
    ],
)
def test_what_cannot_be(call, capsys, arguments, part):
    with pytest.raises(SystemExit) as stopped:
        call(*arguments)
    assert stopped.value.code == 2
    assert part in capsys.readouterr().err


class Card:
    """Counts memory as torch does on a GPU."""

    def __init__(self):
        self.tensors, self.cached, self.pools, self.peak = 1000, 300, 0, 0

    def use(self, size):
        """A tensor that is gone after a call; its memory stays cached."""
        self.peak, self.cached = max(self.peak, self.tensors + size), max(self.cached, size)

    def empty_cache(self):
        self.cached = 0

    def reset_peak_memory_stats(self):
        self.peak = self.tensors

    def memory_allocated(self):
        return self.tensors

    def max_memory_allocated(self):
        return self.peak

    def memory_reserved(self):
        return self.tensors + self.cached + self.pools

    def synchronize(self):
        pass


@pytest.mark.parametrize(("pool", "call", "needed"), [(0, 70, 170), (500, 70, 600)])
def test_memory_is_what_a_call_takes_or_what_its_programs_keep(monkeypatch, pool, call, needed):
    card = Card()
    for name in vars(Card):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(card, name), raising=False)

    def make():
        card.tensors += 100  # the network
        once = iter([9999])  # compiling takes more, which does not count

        def run(_):
            card.pools = max(card.pools, pool)
            card.use(next(once, call))

        return run

    (runner,) = race.race({"ours": make}, SimpleNamespace(is_cuda=True), 1).values()
    assert runner.peak == needed
