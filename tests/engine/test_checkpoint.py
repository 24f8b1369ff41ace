"""The state: small, whole, and refused where it does not belong."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import fata
import fata.engine.checkpoint
import fata.guard.policy
from fata.guard.events import Event
from fata.testing.cases import Case, images, network

STREAM = Case(None, None, "resnet_gn", 16).stream()


def adapter(net="resnet_gn", spec="sar+fata", **fields):
    return fata.adapt(network(net), spec, **fields)


@pytest.fixture
def saved(tmp_path):
    adapted = adapter()
    adapted(STREAM[0])
    adapted.save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


@pytest.mark.parametrize(
    ("name", "blend", "limit"),
    [("resnet50_gn", False, 600), ("resnet50", False, 650), ("resnet50", True, 970)],
)
def test_resnet50_with_momentum_and_all_events_is_as_small_as_the_readme_says(
    name, blend, limit, tmp_path
):
    fields = {"fisher_alpha": 0, "redundancy": 2.0, "blend": blend}
    adapted = fata.adapt(timm.create_model(name), "eata+fata", **fields)
    for _ in range(2):  # the guard compares after the second batch
        adapted(torch.rand(2, 3, 64, 64))
    draws = random.Random(0)
    adapted._live().state.watched.events[:] = [
        Event(10**6, "trusted", round(100 * draws.random(), 2), 0.1**3)
        for _ in range(fata.guard.policy.LATEST)
    ]
    kept = adapted._live().state.guard
    kept["latest"] = kept["latest"][:1].repeat(fata.Guard().rows, 1)
    adapted.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size <= limit * 1024


def test_a_new_process_goes_on_with_the_same_bits(tmp_path):
    """Stopped after each batch, continued in another process: the bits of never stopping."""
    whole = adapter(spec="deyo+fata", plpd_threshold=0.0)
    expected = torch.cat([whole(x) for x in STREAM])
    first = adapter(spec="deyo+fata", plpd_threshold=0.0)
    first(STREAM[0])
    first.save(tmp_path / "state")
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import conftest, torch, fata
from fata.testing.cases import Case, network
adapter = fata.adapt(network("resnet_gn"), "deyo+fata", plpd_threshold=0.0)
adapter.load({str(tmp_path / "state")!r})
answers = [adapter(x) for x in Case(None, None, "resnet_gn", 16).stream()[1:]]
torch.save(torch.cat(answers), {str(tmp_path / "answers")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert torch.equal(torch.load(tmp_path / "answers"), expected[16:])


def test_a_state_from_before_the_first_batch_goes_on_the_same(tmp_path):
    """The guard's counts too: it knows that this is still the source model."""
    whole, first, second = (adapter(spec="tent") for _ in range(3))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for x in STREAM:
        assert torch.equal(second(x), whole(x))
        assert second.counts == whole.counts


def refused(target, path, message):
    """Loading is refused, and nothing has changed."""
    target(STREAM[1])
    before, counts = target.state_dict(), target.counts
    with pytest.raises(fata.StateError, match=message):
        target.load(path)
    after = target.state_dict()
    assert target.counts == counts
    assert before.pop("meta") == after.pop("meta")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_methods_state_is_refused(saved):
    refused(adapter(spec="tent"), saved, r"is of method 'sar\+fata'; this adapter runs 'tent'")
    refused(adapter(spec="sar"), saved, r"is of method 'sar\+fata'; this adapter runs 'sar'")


def test_another_models_state_is_refused(saved):
    model = network("resnet_gn")
    with torch.no_grad():
        model.fc.bias[0] += 1e-3  # a tensor that does not even adapt
    refused(fata.adapt(model, "sar+fata"), saved, "other source weights")
    refused(adapter("vit_ln"), saved, "taps 'blocks.10'")


def test_other_parameters_layer_or_fisher_are_refused(saved, tmp_path):
    refused(adapter(params="norm"), saved, "adapts other parameters")
    refused(adapter(layer="layer2"), saved, "FATA at layer 'layer3'; this adapter taps 'layer2'")
    eata = adapter(spec="eata", fisher_data=[images(4)])
    eata.save(tmp_path / "eata")
    with pytest.warns(UserWarning, match="is ETA"):
        without = adapter(spec="eata")
    refused(without, tmp_path / "eata", "with Fisher data, and this adapter was made without")
    refused(adapter(sigma=0.5), saved, "adapted with sigma=1.0; this adapter has sigma=0.5")
    refused(adapter(rho=0.1), saved, "adapted with rho=0.05; this adapter has rho=0.1")
    more = adapter(params="norm")
    more.save(tmp_path / "more")
    refused(adapter(), tmp_path / "more", "adapts other parameters")


def test_what_fits_of_another_state_is_loaded_on_request(saved):
    """Parameters of the same name and shape; the rest stays as it is here."""
    state = fata.engine.checkpoint.load(saved)
    other = adapter(spec="tent", params="norm")
    source = other.state_dict()
    keys = other.load_state_dict(state, strict=False)
    after = other.state_dict()
    taken = [name for name in state if name.startswith(("parameter.", "momentum."))]
    assert all(torch.equal(after[name], state[name]) for name in taken)
    left = {name for name in after if name.startswith(("parameter.", "momentum."))} - {*taken}
    assert left
    assert all(torch.equal(after[name], source[name]) for name in left)
    assert set(keys.missing_keys) == left
    assert set(keys.unexpected_keys) == {*state} - {*taken, "meta"}
    assert other.counts["seen"] == 0


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_an_adapter_made_alike_is_loaded_whole(saved, strict):
    state, other = fata.engine.checkpoint.load(saved), adapter()
    assert other.load_state_dict(state, strict=strict) == ([], [])
    assert other.state_dict()["meta"] == state["meta"]


def test_a_damaged_state_is_refused_even_if_not_strict(saved):
    state = fata.engine.checkpoint.load(saved)
    state["meta"]["seed"] += 1
    with pytest.raises(fata.StateError, match="damaged"):
        adapter().load_state_dict(state, strict=False)


def test_damaged_and_foreign_files_are_refused(saved, tmp_path):
    whole = saved.read_bytes()
    for name, content in (
        ("empty", b""),
        ("cut", whole[: len(whole) // 2]),
        ("text", b"not a state at all, but long enough to look like one"),
    ):
        (tmp_path / name).write_bytes(content)
        refused(adapter(), tmp_path / name, "damaged or no safetensors file")
    save_file({"x": torch.ones(2)}, tmp_path / "foreign")
    refused(adapter(), tmp_path / "foreign", "not the state of an adapter")
    flipped = bytearray(whole)
    flipped[-50] ^= 0x10
    (tmp_path / "flipped").write_bytes(flipped)
    refused(adapter(), tmp_path / "flipped", "its contents are not those that were saved")
    state = fata.engine.checkpoint.load(saved)
    for broken in (
        {**state, "meta": {"format": fata.engine.checkpoint.FORMAT}},
        {n: state[n] for n in list(state)[3:]},
    ):
        with pytest.raises(fata.StateError, match="damaged"):
            adapter().load_state_dict(broken)
    with pytest.raises(FileNotFoundError, match="no state at"):
        adapter().load(tmp_path / "nowhere")
    with pytest.raises(fata.StateError, match="no 'meta'"):
        adapter().load_state_dict({})


def test_a_state_of_another_format_is_refused(saved, tmp_path):
    meta = {"meta": json.dumps({**fata.engine.checkpoint.load(saved)["meta"], "format": 99})}
    save_file(load_file(saved), tmp_path / "future", metadata=meta)
    refused(
        adapter(),
        tmp_path / "future",
        f"has format 99; this version of fata reads {fata.engine.checkpoint.FORMAT}",
    )


def test_a_save_that_fails_leaves_the_old_file_whole(saved, monkeypatch):
    whole = saved.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)  # written, but never safely on the disk
    with pytest.raises(OSError, match="what was there before is whole: No space left"):
        adapter().save(saved)
    assert saved.read_bytes() == whole
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_file_system_that_has_become_read_only_is_named(saved, monkeypatch):
    """Not even what was begun can be taken away there."""

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.fsync", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OSError, match="what was there before is whole: Read-only") as error:
        adapter().save(saved)
    assert error.value.filename == str(saved)


def test_a_kill_in_the_midst_of_a_save_leaves_the_old_state(saved):
    whole, own = saved.read_bytes(), adapter()
    child = os.fork()
    if not child:
        fata._files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        own.save(saved)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert saved.read_bytes() == whole
    own.load(saved)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no/such/state'?: make the folder first"):
        adapter().save(tmp_path / "no" / "such" / "state")
    with pytest.raises(FileNotFoundError, match="is a folder, not a state"):
        adapter().load(tmp_path)


def test_a_saved_file_keeps_the_usual_permissions(saved, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    assert saved.stat().st_mode == plain.stat().st_mode


def test_memo_has_nothing_to_save():
    memo = adapter(spec="memo", views=2)
    memo(images(2))
    assert set(memo.state_dict()) == {"meta"}


def test_a_model_with_shared_layers_and_a_counter_is_known_again():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm = network("resnet_gn"), torch.nn.LayerNorm(10)
            self.same = self.norm
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.same(self.norm(self.net(x)))

    one, two = (fata.adapt(Shared(), "eata+fata", fisher_alpha=0, lr=0.1) for _ in range(2))
    one(STREAM[0])
    two.load_state_dict(one.state_dict())
    assert torch.equal(two(STREAM[1]), one(STREAM[1]))


def test_a_reset_after_loading_another_seed_is_ones_own():
    mine, other = adapter(seed=1), adapter(seed=2)
    first = torch.cat([mine(x) for x in STREAM])
    other(STREAM[0])
    mine.load_state_dict(other.state_dict())
    mine.reset()
    assert torch.equal(torch.cat([mine(x) for x in STREAM]), first)


def test_inside_a_larger_module_an_adapter_is_an_ordinary_one():
    whole = torch.nn.ModuleDict({"camera": adapter()})
    assert "camera.model.fc.weight" in whole.state_dict()


def test_state_dict_is_a_copy():
    adapted = adapter(lr=0.1)
    before = adapted.state_dict()
    kept = {name: t.clone() for name, t in before.items() if name != "meta"}
    adapted(STREAM[0])
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    adapted.load_state_dict(before)
    assert torch.equal(adapted.model.bn1.weight, network("resnet_gn").bn1.weight)


def test_two_streams_on_one_model_by_swapping_states():
    """Interleaved streams, each with its own state, give the bits of streams apart."""
    apart = []
    for seed in (1, 2):
        alone = adapter()
        apart.append([alone(images(16, seed=10 * seed + t)) for t in range(3)])
    shared = adapter()
    states = [shared.state_dict() for _ in range(2)]
    for t in range(3):
        for stream, seed in enumerate((1, 2)):
            shared.load_state_dict(states[stream])
            assert torch.equal(shared(images(16, seed=10 * seed + t)), apart[stream][t])
            states[stream] = shared.state_dict()


def test_a_stream_is_no_state(tmp_path):
    data = fata.data.open("embedded")
    fata.stream(data, domains=["fog"], images=2).save(tmp_path / "order.safetensors")
    adapted = fata.adapt(fata.tiny.build("resnet_gn"), "tent")
    with pytest.raises(fata.StateError, match="this is a stream, not the state"):
        adapted.load(tmp_path / "order.safetensors")


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """Every byte of the header, which has `meta` in it, and a sample of the data."""
    fields = {"spec": "eata+fata", "fisher_alpha": 0, "params": ["bn1"]}
    adapted, path = adapter(**fields), tmp_path / "state"
    adapted(STREAM[0])
    adapted.save(path)
    whole, draws = path.read_bytes(), random.Random(0)
    expected = adapted.state_dict()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(header), *draws.sample(range(header, len(whole)), 100)]
    target = adapter(**fields)
    refused = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draws.randrange(8)
        path.write_bytes(damaged)
        try:
            target.load(path)
        except fata.StateError:
            refused += 1
            continue
        found = target.state_dict()
        assert found["meta"] == expected["meta"], place
        assert found.keys() == expected.keys(), place
        assert all(torch.equal(found[n], expected[n]) for n in found if n != "meta"), place
    assert refused > 0.9 * len(places)


def test_a_file_cut_anywhere_is_refused(saved, tmp_path):
    whole = saved.read_bytes()
    for length in (*range(0, 400, 7), *range(400, len(whole), len(whole) // 50), len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(fata.StateError, match="damaged or no safetensors file"):
            fata.engine.checkpoint.load(tmp_path / "cut")


@pytest.mark.parametrize("meta", ["", "{", "[]", "7", '"text"', "{}", "[" * 100_000, "9" * 9_000])
def test_meta_that_is_none_is_refused(meta, saved, tmp_path):
    save_file(load_file(saved), tmp_path / "odd", metadata={"meta": meta})
    refused(adapter(), tmp_path / "odd", "is damaged|has no 'meta'")


@pytest.mark.parametrize(
    "change",
    [
        {"batches": 7},
        {"seed": 5},
        {"share": 0.25},
        {"counts": {}},
        {"watched": None},
        {"digest": None},
        {"method": 3},
        {"source": 1.5},
        {"odd": {1, 2}},
    ],
    ids=str,
)
def test_meta_is_covered_by_the_digest(change, saved):
    state = fata.engine.checkpoint.load(saved)
    with pytest.raises(fata.StateError, match="its contents are not those that were saved"):
        adapter().load_state_dict({**state, "meta": {**state["meta"], **change}})


def test_what_is_no_tensor_or_no_json_is_refused(saved):
    state = fata.engine.checkpoint.load(saved)
    name = next(name for name in state if name.startswith("parameter."))
    with pytest.raises(fata.StateError, match="no tensor"):
        adapter().load_state_dict({**state, name: [1.0, 2.0]})
    odd = {**state["meta"], "share": {1}, "digest": None}
    with pytest.raises(fata.StateError, match="not JSON"):
        adapter().load_state_dict({**state, "meta": odd})


def test_a_symbolic_link_stays_and_its_target_is_written(saved, tmp_path):
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    link.symlink_to(Path("folder") / "target")
    for _ in range(2):  # there is no target at first
        adapter().save(link)
        assert link.is_symlink()
        assert target.is_file()
        adapter().load(link)
    assert [path.name for path in target.parent.iterdir()] == ["target"]
