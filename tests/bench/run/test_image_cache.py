"""Images that several cells use: the cache serves what would be decoded live."""

import shutil
import threading

import numpy as np
import pytest
import torch
from PIL import Image

import fata
from fata.bench.cell import Cell
from fata.bench.run import image_cache
from fata.bench.run.image_cache import ImageCache
from fata.bench.run.local import Task, TaskQueue
from fata.bench.run.runner import CellRunner, _in_thread
from fata.data import DataError, serve
from fata.data.dataset import ImageFiles

CPU = torch.device("cpu")
SIZE = 32


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for number in range(5):
            pixels = draw.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / kind / f"{number}.png")
    return tmp_path


def seen(stream, decoded, skip_damaged=False):
    return list(serve.batches(stream, decoded, CPU, skip_damaged))


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.images, b.images, rtol=0, atol=1e-6)
        assert torch.equal(a.labels, b.labels)
        assert (a.domains, a.damaged, a.reset) == (b.domains, b.damaged, b.reset)


@pytest.mark.parametrize("scenario", ["normal", "mixed", "continual", "label-shift"])
def test_the_cache_serves_what_comes_live(scenario):
    data = fata.data.open("embedded")
    stream = fata.stream(data, scenario, domains=["fog", "contrast", "shot_noise"], images=50)
    cache = ImageCache(2**30)
    for _ in range(2):
        decoded = cache.begin(stream, SIZE, CPU, 0)()
        same(seen(stream, decoded), list(stream.serve()))


def test_the_second_time_nothing_is_decoded(folder, monkeypatch):
    data = fata.data.open(f"folder:{folder}")
    cache = ImageCache(2**30)
    first = fata.stream(data, domains=["fog"], images=6)
    seen(first, cache.begin(first, SIZE, CPU, 0)())
    asked = []
    monkeypatch.setattr(
        image_cache, "read", lambda *args: asked.append(args[1]) or serve.read(*args)
    )
    seen(first, cache.begin(first, SIZE, CPU, 0)())
    assert asked == []
    whole = fata.stream(data, domains=["fog"])
    same(seen(whole, cache.begin(whole, SIZE, CPU, 0)()), list(whole.serve(workers=0)))
    assert len(asked) == 1  # for the four that were not there


def domains(folder):
    """The same images as two domains that are on the disk."""
    for name in ("a", "b"):
        shutil.copytree(folder / "cat", folder / "of" / name / "0")
        shutil.copytree(folder / "dog", folder / "of" / name / "1")
    return f"folder:{folder / 'of'}"


def test_a_new_domain_is_cached_while_it_is_served(folder, monkeypatch):
    data, read = fata.data.open(domains(folder)), []
    once = ImageFiles.read
    monkeypatch.setattr(ImageFiles, "read", lambda *args: read.append(args[1]) or once(*args))
    stream, cache = fata.stream(data, domains=["a"], batch_size=2), ImageCache(2**30)
    expected = list(stream.serve(workers=0))
    left = serve.batches(stream, cache.begin(stream, SIZE, CPU, 0)(), CPU, skip_damaged=False)
    read.clear()
    assert torch.equal(next(left).images, expected[0].images)
    assert len(read) <= 6  # a batch is known to be not the last, and one is under way
    left.close()
    for asked in (10, 0):  # what was left in the middle is not there
        read.clear()
        same(seen(stream, cache.begin(stream, SIZE, CPU, 0)()), expected)
        assert len(read) == asked
    other = fata.stream(data, domains=["b"], batch_size=2)
    for asked in (10, 0):
        read.clear()
        same(seen(other, cache.begin(other, SIZE, CPU, 0)()), list(other.serve(workers=0)))
        assert len(read) == asked + 10


def test_what_is_being_cached_is_not_prefetched_as_well(folder):
    spec = domains(folder)
    cells = [
        Cell("mini_resnet_bn", spec, "normal", (domain,), 5, method, 0)
        for domain, method in (("a", "norm"), ("a", "tent"), ("b", "norm"))
    ]
    alone, ahead = ([CellRunner(workers=0) for _ in cells], CellRunner(workers=0))
    expected = [one.run(cell, lambda *_: None) for one, cell in zip(alone, cells, strict=True)]
    begun = []
    for cell, then in zip(cells, (*cells[1:], None), strict=True):
        result = ahead.run(cell, lambda *_: None, then)
        begun.append(ahead._prefetched is not None)
        assert result["entropies"] == expected[cells.index(cell)]["entropies"]
    assert begun == [False, True, False]


@pytest.mark.parametrize("made", [True, False])
def test_damaged_images_are_told_each_time(folder, made):
    (folder / "dog" / "2.png").write_bytes(b"none")
    data = fata.data.open(f"folder:{folder}" if made else domains(folder))
    stream = fata.stream(data, domains=["fog" if made else "a"], batch_size=3)
    cache = ImageCache(2**30)
    for _ in range(2):
        decoded = cache.begin(stream, SIZE, CPU, 0)()
        same(seen(stream, decoded, True), list(stream.serve(workers=0, skip_damaged=True)))
        with pytest.raises(fata.data.DataError, match=r"2\.png"):
            seen(stream, cache.begin(stream, SIZE, CPU, 0)())


def test_what_does_not_fit_comes_live():
    stream = fata.stream(fata.data.open("embedded"), domains=["fog"], images=50)
    cache = ImageCache(50 * 3 * SIZE * SIZE * 4 - 1)
    same(seen(stream, cache.begin(stream, SIZE, CPU, 0)()), list(stream.serve()))
    assert not cache._entries


def test_old_images_make_room():
    data = fata.data.open("embedded")
    cache = ImageCache(2 * 50 * 3 * SIZE * SIZE * 4)
    for name in ("fog", "contrast", "snow"):
        stream = fata.stream(data, domains=[name], images=50)
        seen(stream, cache.begin(stream, SIZE, CPU, 0)())
    assert [domain.name for _, domain in cache._entries] == ["contrast", "snow"]


def test_what_is_decoded_ahead_does_not_hold_up_the_end():
    """As a pool's threads would after Ctrl-C; its error is for who asks for the images."""
    working = []

    def work():
        working.append(threading.current_thread())
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):
        _in_thread(work).result(60)
    assert working[0].daemon


def test_the_next_cells_images_are_decoded_ahead(folder):
    for number, kind in enumerate(("cat", "dog")):
        (folder / kind).rename(folder / str(number))
    cells = [
        Cell("mini_resnet_bn", f"folder:{folder}", "normal", (name,), 5, "norm", 0)
        for name in ("fog", "contrast")
    ]
    alone, ahead = CellRunner(workers=0), CellRunner(workers=0)
    expected = [alone.run(cell, lambda *_: None)["entropies"] for cell in cells]
    found = [ahead.run(cells[0], lambda *_: None, cells[1])["entropies"]]
    assert ahead._prefetched is not None
    assert ahead._prefetched[0] == cells[1]
    found.append(ahead.run(cells[1], lambda *_: None)["entropies"])
    assert found == expected


def test_a_worker_stays_with_the_images_it_has():
    tasks = [
        Task(Cell("m", "d", "normal", (name,), 5, method, 0), f"{name} {method}", {"length": 10})
        for name in ("fog", "snow")
        for method in ("tent", "sar", "eata")
    ]
    queue = TaskQueue(tasks)
    one, two = queue.next(None), queue.next(None)
    assert {tasks[one].cell.domains, tasks[two].cell.domains} == {("fog",), ("snow",)}
    group = ("m", "d", tasks[one].cell.domains)
    three = queue.next(group)
    assert tasks[three].cell.domains == tasks[one].cell.domains
    rest = [queue.next(group) for _ in range(3)]
    assert sorted([one, two, three, *rest]) == list(range(6))
    assert queue.next(group) is None


def test_a_task_that_comes_back_is_handed_out_again():
    tasks = [
        Task(Cell("m", "d", "normal", (name,), 5, "tent", 0), name, {"length": 10})
        for name in ("fog", "snow")
    ]
    queue = TaskQueue(tasks)
    ahead = queue.peek(None)
    one, two = queue.next(None), queue.next(None)
    assert ahead == one
    assert (len(queue), queue.peek(None)) == (0, None)
    queue.put_back(two)
    assert len(queue) == 1
    assert queue.next(("m", "d", tasks[one].cell.domains)) == two


def test_long_work_is_begun_first():
    """Else it would be all that is left at the end, for a few workers."""
    lengths = {("fog",): 10, ("snow",): 10, ("fog", "snow"): 100}
    tasks = [
        Task(Cell("m", "d", "normal", domains, 5, method, 0), f"{domains} {method}", {"length": n})
        for domains, n in lengths.items()
        for method in ("tent", "sar", "eata")
    ]
    queue = TaskQueue(tasks)
    given = [tasks[queue.next(None)].cell.domains for _ in range(9)]
    assert given[:2] == [("fog", "snow")] * 2
    assert set(given) == set(lengths)


def test_what_was_broken_off_is_decoded_again(monkeypatch):
    data = fata.data.open("embedded")
    stream = fata.stream(data, domains=["fog"], images=50)
    cache, finish, calls = ImageCache(2**30), type(data).finish, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return finish(*args)

    monkeypatch.setattr(image_cache, "_BATCH", 20)
    monkeypatch.setattr(type(data), "finish", failing)
    with pytest.raises(RuntimeError, match="memory"):
        cache.begin(stream, SIZE, CPU, 0)()
    same(seen(stream, cache.begin(stream, SIZE, CPU, 0)()), list(stream.serve()))
