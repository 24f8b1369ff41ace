"""Streams: what each scenario promises, the same order for all, and batches that are whole."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import fata
from fata.corruptions import NAMES
from fata.data import DataError, Domain, serve
from fata.data.label_shift import label_shift
from fata.data.scenarios import SCENARIOS
from fata.data.shared_batches import SharedBatches

EMBEDDED = fata.data.open("embedded")
LABELS = EMBEDDED.of(Domain("clean")).labels
TWO = ["fog", "contrast"]


def order(stream):
    """Domain and number of each image, in order."""
    return [
        (str(stream.domains[place]), index)
        for place, index in zip(stream.domain.tolist(), stream.index.tolist(), strict=True)
    ]


def segments(stream):
    """The order, cut where segments start."""
    whole = order(stream)
    return [whole[a:b] for a, b in pairwise((*stream.starts, stream.images))]


def each_once(segment, images=2000):
    return sorted(index for _, index in segment) == list(range(images))


def of(scenario="normal", data=EMBEDDED, **options):
    return fata.stream(data, scenario, **{"domains": TWO, **options})


# --- scenarios -----------------------------------------------------------------------------------


def test_normal():
    stream = of()
    assert stream.resets == (True, True)
    for segment, domain in zip(segments(stream), ("fog-5", "contrast-5"), strict=True):
        assert {name for name, _ in segment} == {domain}
        assert each_once(segment)
        assert segment != sorted(segment)
    first, second = ([index for _, index in segment] for segment in segments(stream))
    assert first != second


def test_the_benchmark_is_the_default():
    stream = fata.stream(EMBEDDED)
    assert stream.domains == tuple(Domain(name, 5) for name in NAMES)
    assert (stream.images, stream.batch_size, len(stream)) == (15 * 2000, 64, 15 * 32)


def test_bs1_is_normal_one_by_one():
    alone = of("bs1")
    assert order(alone) == order(of())
    assert (alone.batch_size, len(alone)) == (1, 4000)
    assert [first for first, _, reset in alone.spans if reset] == [0, 2000]
    with pytest.raises(DataError, match="batch_size=64: bs1 is 1"):
        of("bs1", batch_size=64)


@pytest.mark.parametrize(("ratio", "length"), [(500_000, None), (10, 3_000)])
def test_label_shift_is_the_published_generator(ratio, length):
    stream = of("label-shift", ratio=ratio, length=length, seed=2022)
    wanted = label_shift(LABELS, ratio, length, 2022)
    assert stream.resets == (True, True)
    for segment in segments(stream):
        assert [index for _, index in segment] == wanted.tolist()
    assert torch.equal(stream.labels[: len(wanted)], LABELS[wanted])


def test_label_shift_over_the_classes_that_are_there():
    """A few images of a data set need not have all of its classes."""
    stream = of("label-shift", images=4, ratio=2)
    assert len(stream.labels.unique()) < 10
    assert set(stream.index.tolist()) <= set(of(images=4).index.tolist())


def test_mixed_has_every_image_of_every_domain_once():
    stream = of("mixed")
    (segment,) = segments(stream)
    assert stream.resets == (True,)
    assert sorted(segment) == sorted(
        (name, i) for name in ("fog-5", "contrast-5") for i in range(2000)
    )
    halves = [Counter(name for name, _ in half) for half in (segment[:2000], segment[2000:])]
    assert all(800 < half["fog-5"] < 1200 for half in halves)


def test_continual_never_starts_anew():
    stream = of("continual")
    assert order(stream) == order(of())
    assert stream.resets == (True, False)


@pytest.mark.parametrize(
    ("severity", "wanted"), [(5, [1, 2, 3, 4, 5, 4, 3, 2, 1]), (2, [1, 2, 1]), (1, [1])]
)
def test_gradual_goes_up_and_down(severity, wanted):
    stream = of("gradual", severity=severity)
    found = segments(stream)
    assert [{name for name, _ in segment} for segment in found] == [
        {f"{name}-{step}"} for name in TWO for step in wanted
    ]
    assert stream.resets == (True,) + (False,) * (2 * len(wanted) - 1)
    assert all(each_once(segment) for segment in found)
    assert len({tuple(index for _, index in segment) for segment in found}) == len(found)


def test_recurring_comes_again_in_another_order():
    stream = of("recurring", rounds=3)
    found = segments(stream)
    assert [segment[0][0] for segment in found] == 3 * ["fog-5", "contrast-5"]
    assert stream.resets == (True,) + (False,) * 5
    assert all(each_once(segment) for segment in found)
    assert len({tuple(index for _, index in segment) for segment in found}) == 6


def purity(stream):
    """Share of the commonest class, the mean over windows of 50 images."""
    windows = stream.labels[:2000].view(-1, 50)
    return (windows == windows.mode().values[:, None]).float().mean().item()


def test_correlated_comes_in_bursts():
    """The purer, the lower the concentration; each image still comes once."""
    pure = {c: purity(of("correlated", concentration=c)) for c in (0.01, 0.1, 100.0)}
    assert pure[0.01] > pure[0.1] > 2 * purity(of())
    assert pure[100.0] < pure[0.1]
    even = of("correlated", concentration=1e6).labels[:2000].view(10, 200)  # a slot a row
    assert all(abs(row.bincount() - 20).max() <= 1 for row in even)
    assert of("correlated").resets == (True, True)
    assert all(each_once(segment) for segment in segments(of("correlated")))
    assert purity(of("correlated")) == pure[0.1]


def test_long_shows_every_image_before_the_first_comes_again():
    stream = of("long", length=5000)
    for segment in segments(stream):
        assert len(segment) == 5000
        rounds = [segment[:2000], segment[2000:4000]]
        assert all(each_once(one) for one in rounds)
        assert rounds[0] != rounds[1]
        assert len(set(segment[4000:])) == 1000
    assert stream.resets == (True, True)


def test_few_classes_are_all_there_is_and_others_follow():
    stream = of("few-classes", classes=3)
    labels = stream.labels.view(2, 2000)
    assert [len(row.unique()) for row in labels] == [3, 3]
    assert all(row.bincount().amax() < 800 for row in labels)
    changing = of("few-classes", classes=2, every=500).labels.view(8, 500)
    assert all(len(part.unique()) == 2 for part in changing)
    assert len({tuple(part.unique().tolist()) for part in changing}) > 2
    assert of("few-classes", classes=3, seed=1).labels.unique().tolist() != labels.unique().tolist()


@pytest.mark.parametrize("share", [0.35, 0.9, 1.0])
def test_skewed_has_one_class_as_often_as_asked(share):
    labels = of("skewed", share=share).labels.view(2, 2000)
    for row in labels:
        counts = row.bincount(minlength=10).sort(descending=True).values
        assert counts[0] == round(2000 * share)
        assert counts[1:].max() - counts[1:].min() <= 40
        assert abs((row[:1000] == row.mode().values).float().mean() - share) < 0.05


# --- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_order_is_the_seeds_alone(scenario):
    """Not the batch size's, nor that of generators that others draw from."""
    torch.manual_seed(1)
    np.random.seed(1)
    stream = of(scenario, seed=3)
    torch.manual_seed(2)
    np.random.seed(2)
    size = 1 if scenario == "bs1" else 7
    again = of(scenario, data=fata.data.open("embedded"), seed=3, batch_size=size)
    assert order(again) == order(stream)
    assert (again.starts, again.resets) == (stream.starts, stream.resets)
    assert order(of(scenario, seed=4)) != order(stream)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_batches_never_cross_segments(scenario):
    stream = of(scenario, images=100)
    ends = {first for first, _, _ in stream.spans} | {stream.images}
    assert ends >= set(stream.starts)
    assert [first for first, _, _ in stream.spans] == [0, *(last for _, last, _ in stream.spans)][
        :-1
    ]
    assert all(0 < last - first <= stream.batch_size for first, last, _ in stream.spans)
    begun = [first for first, _, reset in stream.spans if reset]
    assert begun == [s for s, reset in zip(stream.starts, stream.resets, strict=True) if reset]


def test_a_domain_comes_in_its_order_whoever_else_comes():
    alone = of(domains="contrast")
    assert order(alone) == segments(of())[1]


BY_CLASS = ("label-shift", "few-classes", "skewed")  # which images they show depends on the seed


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s not in BY_CLASS])
def test_some_images_are_the_same_for_every_seed_and_corruption(scenario):
    chosen = [
        {index for _, index in segment}
        for seed in (0, 1)
        for name in TWO
        for segment in segments(of(scenario, domains=[name], images=30, seed=seed))
    ]
    assert len(chosen[0]) == 30
    assert all(one == chosen[0] for one in chosen)


def test_more_images_than_there_are():
    assert order(of(images=10**9)) == order(of())


@pytest.mark.parametrize(
    ("scenario", "options", "message"),
    [
        ("normall", {}, "unknown scenario 'normall'.*Did you mean 'normal'"),
        ("normal", {"rounds": 2}, "normal has no option 'rounds'; it has none"),
        ("label-shift", {"rounds": 2}, "'rounds'; it has ratio, length"),
        ("label-shift", {"ratio": 0.5}, "ratio=0.5.*at least 1"),
        ("label-shift", {"length": 3}, "length=3.*at least one a class"),
        ("recurring", {"rounds": 0}, "rounds=0"),
        ("recurring", {"rounds": 1.5}, "rounds=1.5.*whole number"),
        ("correlated", {"concentration": 0.0}, "concentration=0.0.*at least 0.01"),
        ("correlated", {"concentration": float("nan")}, "concentration=nan"),
        ("long", {"length": 0}, "length=0.*at least 1"),
        ("few-classes", {"classes": 11}, "classes=11.*there are 10"),
        ("few-classes", {"every": 0}, "every=0.*at least 1"),
        ("skewed", {"share": 0}, "share=0.*above 0"),
        ("gradual", {"domains": ["fog", "clean"]}, "'clean' of embedded has no severities"),
        ("normal", {"severity": 6}, "'fog' at severity 6: it has 1, 2, 3, 4, 5"),
        ("normal", {"domains": ["fogg"]}, "has no 'fogg'.*Did you mean 'fog'"),
        ("normal", {"domains": []}, "at least one"),
        ("normal", {"domains": ["fog", "fog"]}, "each once"),
        ("normal", {"severity": "5"}, "severity='5'.*whole number"),
        ("normal", {"seed": 1.5}, "seed=1.5.*whole number"),
        ("normal", {"images": 0}, "images=0"),
        ("normal", {"images": 2.5}, "images=2.5.*whole number"),
        ("normal", {"batch_size": 2.5}, "batch_size=2.5.*whole number"),
        ("normal", {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_streams_that_cannot_be(scenario, options, message):
    with pytest.raises(DataError, match=message):
        of(scenario, **options)


def test_provenance_is_of_the_domains_that_come(pictures):
    data = fata.data.open(f"folder:{pictures}")
    a, both = (fata.stream(data, domains=names).provenance for names in (["a"], ["a", "b"]))
    assert a["images"] != both["images"] == data.fingerprint(data.domains)
    assert (a["scenario"], a["seed"]) == ("normal", "0")


# --- saved and replayed --------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["mixed", "label-shift", "gradual"])
def test_replay(tmp_path, scenario):
    stream = of(scenario, images=50, seed=5)
    stream.save(tmp_path / "order.safetensors")
    again = fata.data.replay(tmp_path / "order.safetensors", EMBEDDED)
    assert order(again) == order(stream)
    assert again.spans == stream.spans
    assert (again.scenario, again.seed, again.batch_size) == (scenario, 5, 64)
    assert torch.equal(next(iter(again)).images, next(iter(stream)).images)


def test_replay_over_other_data(tmp_path, pictures):
    data = fata.data.open(f"folder:{pictures}")
    fata.stream(data).save(tmp_path / "order")
    with pytest.raises(DataError, match="embedded has no 'a'"):
        fata.data.replay(tmp_path / "order", EMBEDDED)
    moved = pictures.rename(tmp_path / "elsewhere")
    assert fata.data.replay(tmp_path / "order", fata.data.open(f"folder:{moved}")).images == 12
    (moved / "b" / "cat" / "1.png").unlink()
    with pytest.raises(DataError, match=r"order' was made for other data: 'b' of folder:.*elsewh"):
        fata.data.replay(tmp_path / "order", fata.data.open(f"folder:{moved}"))


def test_replay_of_a_damaged_file(tmp_path):
    file = tmp_path / "order"
    of(images=50).save(file)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[-300] ^= 1
    for content in (whole[:-8], flipped, b"", whole[:20]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(repr(str(file)))):
            fata.data.replay(file, EMBEDDED)


def test_replay_of_something_else(tmp_path):
    of(images=50).save(tmp_path / "order")
    save_file(load_file(tmp_path / "order"), tmp_path / "other")
    with pytest.raises(DataError, match="other' is no stream"):
        fata.data.replay(tmp_path / "other", EMBEDDED)
    with pytest.raises(DataError, match=r"cannot read the stream.*nowhere"):
        fata.data.replay(tmp_path / "nowhere", EMBEDDED)


# --- served --------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    """Two domains of two classes of three images, each of one brightness."""
    for number, place in enumerate(d + c for d in ("a/", "b/") for c in ("cat", "dog")):
        (tmp_path / "data" / place).mkdir(parents=True)
        for image in range(3):
            file = tmp_path / "data" / place / f"{image}.png"
            Image.new("L", (8, 8), 10 * number + image).save(file)
    return tmp_path / "data"


def brightness(batch):
    return batch.images[:, 0, 0, 0].mul(255).round().int().tolist()


def test_batches_are_what_the_order_says(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), batch_size=4)
    batches = list(stream)
    assert [(b.domain, len(b.images), b.reset) for b in batches] == [
        ("a", 4, True), ("a", 2, False), ("b", 4, True), ("b", 2, False)
    ]  # fmt: skip
    shades = [0, 1, 2, 10, 11, 12]
    for batch in batches:
        wanted = [shades[i] + (20 if batch.domain == "b" else 0) for i in batch.index.tolist()]
        assert brightness(batch) == wanted
        assert batch.labels.tolist() == [i // 3 for i in batch.index.tolist()]
        assert batch.images.dtype == torch.float32
        assert not batch.damaged
    assert torch.equal(torch.cat([batch.labels for batch in batches]), stream.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_serving_draws_from_nobody(pictures, workers):
    before = torch.get_rng_state()
    list(fata.stream(fata.data.open(f"folder:{pictures}")).serve(workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def cores(monkeypatch):
    """Enough for threads in each worker; torch knows better."""
    monkeypatch.setattr(serve, "_cores", lambda: 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("workers", [2, None])
@pytest.mark.parametrize("scenario", ["normal", "mixed", "bs1"])
def test_workers_change_nothing(pictures, scenario, workers):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), scenario)
    for zero, two in zip(stream.serve(workers=0), stream.serve(workers=workers), strict=True):
        assert torch.equal(zero.images, two.images)
        assert torch.equal(zero.labels, two.labels)
        assert (zero.domains, zero.reset) == (two.domains, two.reset)


@pytest.mark.parametrize(
    ("cores", "batch_size", "processes", "threads"),
    [(1, 1, 1, 1), (2, 1, 2, 1), (16, 1, 8, 2), (64, 1, 8, 2), (9, 1, 8, 2), (16, 64, 2, 8)],
)
def test_a_few_processes_of_many_threads(
    pictures, monkeypatch, cores, batch_size, processes, threads
):
    found = []

    def loader(dataset, **options):
        found.append((options["num_workers"], dataset.threads))
        return []

    monkeypatch.setattr(serve, "DataLoader", loader)
    monkeypatch.setattr(serve, "_cores", lambda: cores)
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), batch_size=batch_size)
    serve.live(stream, torch.device("cpu"), None)
    assert found == [(processes, threads)]


def test_mixed_corrupts_each_row_by_its_own_domain():
    (batch,) = of("mixed", domains=["clean", *TWO], images=4, severity=3)
    assert batch.domain == "mixed"
    assert len(set(batch.domains)) == 3
    images = EMBEDDED.of(Domain("clean")).images
    for row, (name, severity) in enumerate(batch.domains):
        index = batch.index[row].item()
        clean = images[index][None].float() / 255
        wanted = clean if severity is None else fata.corrupt(clean, name, 3, ids=[index])
        assert torch.equal(batch.images[row], wanted[0])


def test_what_a_worker_is_given_survives_a_new_process(pictures):
    """Where processes do not start as copies, it travels pickled."""
    data = fata.data.open(f"folder:{pictures}")
    reader = serve._Batches([data.of(domain) for domain in data.domains], None, 4)
    task = None, [(0, 1), (1, 2)]
    here, there = (one[task][0] for one in (reader, pickle.loads(pickle.dumps(reader))))
    assert torch.equal(here, there)


class SetUpError(Exception):
    """Carries how a loader was set up."""


@pytest.mark.parametrize(("device", "workers"), [("cuda", 3), ("cpu", 3), ("cpu", 0)])
def test_batches_are_decoded_ahead(pictures, monkeypatch, device, workers):
    def loader(*_, **options):
        raise SetUpError(options)

    monkeypatch.setattr(serve, "DataLoader", loader)
    stream = fata.stream(fata.data.open(f"folder:{pictures}"))
    with pytest.raises(SetUpError) as caught:
        next(stream.serve(device, workers=workers))
    (options,) = caught.value.args
    assert options["num_workers"] == workers
    assert options["prefetch_factor"] == (serve.AHEAD if workers else None)
    slots = sys.platform == "linux" and workers > 0
    assert options["pin_memory"] == (device == "cuda" and not slots)


def test_a_batch_stays_as_it_was_when_others_follow(pictures):
    """Workers write where those before it were."""
    data = fata.data.open(f"folder:{pictures}")
    stream = fata.stream(data, "recurring", rounds=20, batch_size=2)
    assert len(stream) > 3 * (serve.AHEAD * 2 + 2)
    kept = list(stream.serve(workers=2))
    for here, there in zip(stream.serve(workers=0), kept, strict=True):
        assert torch.equal(here.images, there.images)


def test_images_that_fit_in_no_slot_come_all_the_same(tmp_path):
    """As where domains differ in size, or the first batch has fewer images than others."""
    for domain, side in (("small", 8), ("large", 16)):
        for name in ("cat", "dog"):
            folder = tmp_path / domain / name
            folder.mkdir(parents=True)
            for number in range(5):
                pixels = np.full((side, side, 3), 10 * number + side, np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    data = fata.data.open(f"folder:{tmp_path}")
    sources = [data.of(domain) for domain in data.domains]
    batches = [[(0, 0), (0, 5)], [(1, 1), (1, 2)], [(0, 1), (0, 2), (0, 3)], [(1, 4)]]
    here, there = (
        list(serve.read(sources, batches, len(batches), torch.device("cpu"), workers))
        for workers in (0, 2)
    )
    for (pixels, _), (again, _), rows in zip(here, there, batches, strict=True):
        assert torch.equal(pixels, again)
        assert len(pixels) == len(rows)


def test_what_cannot_be_pinned_is_copied_all_the_same(monkeypatch):
    """As where a system has little memory for it."""

    def refuse(*_):
        raise RuntimeError("out of memory")

    runtime = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=pytest.fail)
    monkeypatch.setattr("fata.data.shared_batches._runtime", lambda: runtime)
    slots = SharedBatches(1, (2, 3, 4, 4))
    slots.pixels.fill_(7)
    warns = pytest.warns(UserWarning, match="not pinned: out of memory")
    with warns, slots.pinned(torch.device("cuda")):
        assert (slots.copied(0, 2, torch.device("cpu")) == 7).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_batches_give_none(pictures, workers):
    data = fata.data.open(f"folder:{pictures}")
    sources = [data.of(data.domains[0])]
    assert list(serve.read(sources, [], 0, torch.device("cpu"), workers)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing is pinned")
def test_a_gpu_copies_from_where_workers_decode():
    slots, device = SharedBatches(2, (2, 3, 4, 4)), torch.device("cuda")
    slots.pixels.fill_(7)
    assert not slots.pixels.is_pinned()
    with slots.pinned(device):
        assert slots.pixels.is_pinned()
        copy = slots.copied(1, 2, device)
        turn = slots.free()
        assert [next(turn), next(turn), next(turn)] == [0, 1, 0]  # by then it has been copied
        slots.pixels.fill_(9)
    assert not slots.pixels.is_pinned()
    assert (copy == 7).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: batches stay on the CPU")
def test_batches_come_on_the_gpu(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), "mixed")
    for here, there in zip(stream.serve(workers=0), stream.serve("cuda", workers=2), strict=True):
        assert (there.images.device.type, there.labels.device.type) == ("cuda", "cuda")
        torch.testing.assert_close(here.images, there.images.cpu(), rtol=0, atol=1e-6)
        assert torch.equal(here.labels, there.labels.cpu())


def test_workers_below_zero():
    with pytest.raises(DataError, match="workers=-1: must be at least 0"):
        of().serve(workers=-1)


# --- damaged images ----------------------------------------------------------------------------


def cut(file):
    file.write_bytes(file.read_bytes()[:40])  # the header alone


def emptied(file):
    file.write_bytes(b"")


def text(file):
    file.write_text("<html>404</html>")


def dangling(file):
    file.unlink()
    file.symlink_to("nowhere")


def too_large(file):
    """Says that it has 10^10 pixels, as a bomb does."""
    content = bytearray(file.read_bytes())
    content[16:24] = 2 * (100_000).to_bytes(4, "big")
    file.write_bytes(content)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("workers", [0, 2, None])
@pytest.mark.parametrize("damage", [cut, emptied, text, dangling, too_large])
def test_a_damaged_image_is_named(pictures, damage, workers):
    file = pictures / "b" / "cat" / "1.png"
    damage(file)
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), "continual", batch_size=4)
    message = re.escape(f"damaged image {file} (") + r".*--skip-damaged"
    with pytest.raises(DataError, match=message):
        list(stream.serve(workers=workers))
    batches = list(stream.serve(workers=workers, skip_damaged=True))
    assert sum(len(batch.images) for batch in batches) == 11
    (damaged,) = [one for batch in batches for one in batch.damaged]
    assert damaged.startswith(f"{file} (")


def broken(pictures, stream, place, rows):
    """Damage some of the images that come in a segment; their names."""
    come = [stream.starts[place] + row for row in rows]
    sources = [stream.dataset.of(stream.domains[stream.domain[row]]) for row in come]
    names = [s.name(stream.index[row].item()) for s, row in zip(sources, come, strict=True)]
    for name in names:
        cut(pictures / name)
    return names


def test_rows_that_stay_keep_their_labels(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), "mixed")
    broken(pictures, stream, 0, [0, 1])
    (batch,) = stream.serve(skip_damaged=True)
    assert len(batch.images) == len(batch.domains) == 10
    assert batch.labels.tolist() == [shade % 20 // 10 for shade in brightness(batch)]
    assert [str(d) for d in batch.domains] == ["ab"[shade // 20] for shade in brightness(batch)]


def test_a_start_is_not_lost_with_its_batch(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), batch_size=2)
    names = broken(pictures, stream, 1, [0, 1, 2])
    batches = list(stream.serve(skip_damaged=True))
    assert [(b.domain, len(b.images), b.reset, len(b.damaged)) for b in batches] == [
        ("a", 2, True, 0), ("a", 2, False, 0), ("a", 2, False, 0),
        ("b", 1, True, 3), ("b", 2, False, 0),
    ]  # fmt: skip
    assert [damaged.partition(" ")[0] for damaged in batches[3].damaged] == names


def test_damaged_images_at_the_end_are_counted(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), batch_size=2)
    broken(pictures, stream, 1, [3, 4, 5])
    batches = list(stream.serve(skip_damaged=True))
    assert [len(batch.damaged) for batch in batches] == [0, 0, 0, 0, 3]
    assert [len(batch.images) for batch in batches] == [2, 2, 2, 2, 1]


def test_nothing_whole_is_an_error(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), domains=["a"])
    names = broken(pictures, stream, 0, range(6))
    with pytest.raises(DataError, match=f"every image.*{re.escape(names[0])}"):
        list(stream.serve(skip_damaged=True))


# --- processes -----------------------------------------------------------------------------------


def test_a_consumer_that_stops_leaves_no_process(pictures):
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), batch_size=1)
    served = stream.serve(workers=2)
    next(served)
    assert len(multiprocessing.active_children()) == 2
    served.close()
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("workers", [2, None])
def test_an_error_leaves_no_process(pictures, workers):
    """Even while the error is kept, and with it what it happened in."""
    cut(pictures / "b" / "dog" / "0.png")
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), batch_size=1)
    with pytest.raises(DataError) as error:
        list(stream.serve(workers=workers))
    assert error.value is not None
    assert not multiprocessing.active_children()


def test_ctrl_c_leaves_no_process(pictures, monkeypatch):
    """Even while the error is kept, as in a notebook."""
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), "recurring", batch_size=1)
    served = stream.serve(workers=2)
    next(served)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", interrupted)
    with pytest.raises(KeyboardInterrupt) as error:
        next(served)
    assert error.value is not None
    assert not multiprocessing.active_children()


def test_ctrl_c_is_not_for_the_workers(pictures):
    """Which end when the process that they work for says so."""
    stream = fata.stream(fata.data.open(f"folder:{pictures}"), "recurring", batch_size=1)
    served = stream.serve(workers=2)
    next(served)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
    assert sum(1 for _ in served) == len(stream) - 1


FOREVER = """
import signal
import sys
import fata

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
data = fata.data.open(f"folder:{sys.argv[1]}")
stream = fata.stream(data, "recurring", rounds=10**4, batch_size=1)
for number, batch in enumerate(stream.serve(workers=2)):
    if number == 3:
        print("served", flush=True)
"""


def test_ctrl_c_ends_all_processes(pictures):
    """As a terminal sends it: to the whole group, workers too."""
    command = [sys.executable, "-c", FOREVER, str(pictures)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "served\n", process.stderr.read()
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode != 0
    assert errors.count("KeyboardInterrupt") == 1  # none from a worker
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
