"""Many streams on one network: each as if it had the network to itself."""

import errno
import subprocess
import sys
import threading

import pytest
import torch

import fata
import fata.fleet
from fata.testing.cases import fit_statistics, images, network

HOSTS = ("tent", "eata", "sar", "deyo")
NAMES = ("north", "south")
GUARD = fata.Guard(every=2, level=1.0, trial=32, patience=1)
FIELDS = {"eata+fata": {"fisher_alpha": 0, "redundancy": 2.0}, "deyo+fata": {"plpd_threshold": 0.0}}


def adapter(net="resnet_gn", spec="sar+fata", guard=GUARD, **fields):
    fields = {"lr": 0.05, "threshold": 1.0, **FIELDS.get(spec, {}), **fields}
    if spec == "tent+fata":
        del fields["threshold"]
    model = fit_statistics(network(net)) if fields.get("blend") else network(net)
    return fata.adapt(model, spec, guard=guard, seed=3, **fields)


def batches(name, count=8, rows=6):
    """The images of a stream: another one has others."""
    return list(images(rows * count, seed=1 + NAMES.index(name)).split(rows))


def alone(name, count=8, **given):
    adapted = adapter(**given)
    logits = [adapted(batch) for batch in batches(name, count)]
    return logits, adapted.state_dict()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[n], theirs[n]) if n != "meta" else ours[n] == theirs[n] for n in ours
    )


@pytest.mark.parametrize("in_memory", [2, 1], ids=["memory", "disk"])
@pytest.mark.parametrize("guard", [GUARD, None], ids=["guard", "plain"])
@pytest.mark.parametrize("net", ["resnet_gn", "resnet_bn", "resnet_bn blended"])
@pytest.mark.parametrize("host", HOSTS)
def test_interleaved_streams_are_bit_equal_to_each_alone(host, net, guard, in_memory, tmp_path):
    """Predictions, weights, momentum, memories, guard, counts, random draws."""
    net, *blend = net.split()
    given = {"net": net, "spec": f"{host}+fata", "guard": guard, "blend": bool(blend)}
    fleet = fata.Fleet(adapter(**given), tmp_path, in_memory=in_memory)
    streams = {name: batches(name) for name in NAMES}
    logits = {name: [] for name in NAMES}
    for number in (0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1):
        name = NAMES[number]
        logits[name].append(fleet(name, streams[name][len(logits[name])]))
    for name in NAMES:
        expected, state = alone(name, **given)
        assert all(map(torch.equal, logits[name], expected))
        with fleet.stream(name) as adapted:
            assert same(adapted.state_dict(), state)
    assert (fleet.reads > 0) == (in_memory == 1)


def test_the_guard_did_something_in_these_streams():
    """Otherwise the comparison above would say nothing of it."""
    events = {
        event["action"]
        for net in ("resnet_gn", "resnet_bn")
        for host in HOSTS
        for name in NAMES
        for event in alone(name, net=net, spec=f"{host}+fata", guard=GUARD)[1]["meta"]["watched"][
            "events"
        ]
    }
    assert len(events) > 1


def test_the_adapter_loads_a_file_of_the_fleet(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path)
    for batch in batches("north"):
        fleet("north", batch)
    fleet.close()
    one = adapter()
    one.load(tmp_path / "north.safetensors")
    assert same(one.state_dict(), alone("north", guard=GUARD)[1])


def test_close_gives_the_adapter_back_as_it_was(tmp_path):
    adapted = adapter()
    adapted(batches("north")[0])
    before = adapted.state_dict()
    weights = [p.clone() for p in adapted.model.parameters()]
    with_fleet = fata.Fleet(adapted, tmp_path)
    with_fleet("south", batches("south")[0])
    with_fleet.configure("south", lr=0.5)
    with_fleet.close()
    assert same(adapted.state_dict(), before)
    assert all(map(torch.equal, adapted.model.parameters(), weights))
    twin = adapter()
    twin(batches("north")[0])
    assert torch.equal(adapted(batches("north")[1]), twin(batches("north")[1]))


def test_threads_take_turns_and_mix_nothing(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path, in_memory=1, save_every=2)
    found = {}

    def work(name):
        found[name] = [fleet(name, batch) for batch in batches(name)]

    threads = [threading.Thread(target=work, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in NAMES:
        assert all(map(torch.equal, found[name], alone(name, guard=GUARD)[0]))


def test_a_frozen_stream_learns_nothing_and_others_do(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path, in_memory=1)
    first, second = batches("north")[:2]
    fleet("north", first)
    fleet.configure("north", frozen=True)
    with fleet.stream("north") as adapted:
        before = adapted.state_dict()
    fleet("south", first)
    assert torch.equal(fleet("north", second), fleet("north", second))
    with fleet.stream("north") as adapted:
        assert same(adapted.state_dict(), before)
    fleet.close()
    again = fata.Fleet(adapter(), tmp_path)
    assert again.settings("north").frozen
    assert not again.settings("south").frozen
    assert not again.configure("north", frozen=False).frozen
    again("north", second)
    with again.stream("north") as adapted:
        assert adapted.counts["seen"] == 12


def test_a_stream_has_its_own_rate(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path)
    fleet.configure("north", lr=0.01)
    other = adapter(lr=0.01)
    for north, south in zip(batches("north", 4), batches("south", 4), strict=True):
        assert torch.equal(fleet("north", north), other(north))
        fleet("south", south)
    expected = alone("south", 4, guard=GUARD)[1]
    with fleet.stream("south") as adapted:
        assert same(adapted.state_dict(), expected)
    for wrong in ({"lr": -1.0}, {"lr": "paper"}, {"frozen": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fleet.configure("north", **wrong)


@pytest.mark.parametrize("net", ["resnet_gn", "resnet_bn"])
def test_streams_of_several_methods_share_a_network(net, tmp_path):
    """Each is bit-equal to an adapter alone, and what no method moves is in memory once."""
    methods = {"a": None, "b": "tent", "c": "eata+fata", "d": "neo", "e": "source", "f": "cotta"}
    given = {"lr": 0.05, "guard": GUARD, "seed": 3}

    def make(model, spec):
        own = {"fisher_alpha": 0} if "eata" in spec else {}
        return fata.adapt(model, spec, **given, **own)

    fleet = fata.Fleet(adapter(net), tmp_path, in_memory=2, make=make)
    for name, method in methods.items():
        fleet.configure(name, method=method)
    found = {name: [fleet(name, batches("north")[0])] for name in methods}
    for batch in batches("north")[1:]:
        for name in methods:
            found[name].append(fleet(name, batch))
    for name, method in methods.items():
        alone = make(network(net), method) if method else adapter(net)
        assert all(torch.equal(x, alone(b)) for x, b in zip(found[name], batches("north")))  # noqa: B905
        with fleet.stream(name) as adapted:
            assert adapted.name == (method or "sar+fata")
            assert same(adapted.state_dict(), alone.state_dict())
    weights = [dict(m.adapter.model.named_parameters()) for m in fleet._network]
    for name in weights[0]:
        places = {named[name].data_ptr() for named in weights[:-1]}  # cotta moves all
        assert len(places) == 1 or "norm" in name or "bn" in name, name
    fleet.close()
    assert fata.Fleet(adapter(net), tmp_path, make=make).settings("b").method == "tent"


def test_another_method_starts_at_the_source_weights(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path, save_every=1)
    first, second = batches("north")[:2]
    fleet("north", first)
    fleet.configure("north", method="sar+fata")  # which it has already
    with fleet.stream("north") as adapted:
        assert adapted.counts["seen"] == 6
    fleet.configure("north", method="tent")
    assert not (tmp_path / "north.safetensors").exists()
    logits = fleet("north", second)
    with fleet.stream("north") as adapted:
        assert (adapted.name, adapted.counts["seen"]) == ("tent", 6)
    assert torch.equal(logits, network("resnet_gn")(second))
    fleet.close()
    again = fata.Fleet(adapter(), tmp_path)
    with again.stream("north") as adapted:
        assert (adapted.name, adapted.counts["seen"]) == ("tent", 6)
    for wrong in ("deyo+fato", "os:System", 3):
        with pytest.raises(ValueError, match="choose one of"):
            again.configure("north", method=wrong)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "a\0b", "a b", "x" * 129, "ä", None]
)
def test_a_name_is_never_a_path(name, tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path)
    for call in (fleet.stream(name).__enter__, lambda: fleet.delete(name), lambda: fleet(name, 0)):
        with pytest.raises(ValueError, match="give a name"):
            call()
    assert name not in fleet
    assert [p.name for p in tmp_path.iterdir()] == [".lease"]


def test_names_are_those_in_memory_and_on_disk(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path, in_memory=1)
    for name in NAMES:
        fleet(name, batches(name)[0])
    fleet.configure("new", frozen=True)
    assert fleet.names() == ["new", *NAMES]
    assert fleet.held() == ["new"]
    assert "north" in fleet
    fleet.delete("north")
    fleet.delete("new")
    assert fleet.names() == ["south"]
    assert "north" not in fleet
    with fleet.stream("north") as adapted:
        assert adapted.counts["seen"] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lease", "south.safetensors"]


def test_a_damaged_state_is_never_taken(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path)
    for name in NAMES:
        fleet(name, batches(name)[0])
    fleet.close()
    path = tmp_path / "north.safetensors"
    whole = path.read_bytes()
    again = fata.Fleet(adapter(), tmp_path)
    for damaged in (whole[:-7], whole[:100], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(fata.StateError):
            again("north", batches("north")[1])
        again("south", batches("south")[1])
    path.write_bytes(whole)
    again("north", batches("north")[1])
    with again.stream("north") as adapted:
        assert adapted.counts["seen"] == 12


def test_a_full_disk_costs_no_prediction_and_no_state(tmp_path, monkeypatch, caplog):
    fleet = fata.Fleet(adapter(), tmp_path, in_memory=1, save_every=1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fata.fleet, "save_tensors", full)
        logits = {n: [fleet(n, batch) for batch in batches(n)[:4]] for n in NAMES}
        with pytest.raises(OSError, match="No space"):
            fleet.save()
    assert "No space" in caplog.text
    for name in NAMES:
        rest = [fleet(name, batch) for batch in batches(name)[4:]]
        expected = alone(name, guard=GUARD)[0]
        assert all(map(torch.equal, logits[name] + rest, expected))
    assert len(fleet.held()) == 1


def test_close_saves_what_can_be_saved_and_may_be_called_again(tmp_path, monkeypatch):
    fleet = fata.Fleet(adapter(), tmp_path)
    for name in NAMES:
        fleet(name, batches(name)[0])
    save = fata.fleet.save_tensors

    def no_north(path, packed):
        if path.name.startswith("north"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, packed)

    with monkeypatch.context() as patched:
        patched.setattr(fata.fleet, "save_tensors", no_north)
        with pytest.raises(OSError, match="No space"):
            fleet.close()
    assert fleet.held() == ["north"]
    fleet.close()
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == set(NAMES)


def test_a_stream_belongs_to_one_fleet_at_a_time(tmp_path):
    ours, theirs = (fata.Fleet(adapter(), tmp_path) for _ in range(2))
    ours("north", batches("north")[0])
    theirs("south", batches("south")[0])
    for fleet, name in ((theirs, "north"), (ours, "south")):
        with pytest.raises(fata.StreamBusyError, match=name):
            fleet(name, batches(name)[1])
    ours.close()
    with theirs.stream("north") as adapted:
        assert adapted.counts["seen"] == 6


def test_a_stream_is_handed_over_to_who_waits_for_it(tmp_path):
    """Back and forth, with the bits of one fleet alone."""
    fleets = [fata.Fleet(adapter(), tmp_path) for _ in range(2)]
    logits, done = [], threading.Event()

    def hand_over():
        while not done.wait(0.002):
            for fleet in fleets:
                fleet.hand_over()

    helper = threading.Thread(target=hand_over)
    helper.start()
    try:
        for number, batch in enumerate(batches("north")):
            with fleets[number % 2].stream("north", wait=60) as adapted:
                logits.append(adapted(batch))
    finally:
        done.set()
        helper.join()
    assert all(map(torch.equal, logits, alone("north", guard=GUARD)[0]))
    assert fleets[0].hand_over() == fleets[1].hand_over() == []


def test_a_killed_process_frees_its_streams(tmp_path):
    """And the state that it had saved is what the next one continues from."""
    script = """
import os, signal, sys
sys.path[:0] = ["tests", "."]
import fata, test_fleet as t
fleet = fata.Fleet(t.adapter(), sys.argv[1], save_every=2)
for batch in t.batches("north")[:5]:
    fleet("north", batch)
print("ready", flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        fleet = fata.Fleet(adapter(), tmp_path)
        with pytest.raises(fata.StreamBusyError):
            fleet("north", batches("north")[0])
        process.communicate("x")
    expected = alone("north", guard=GUARD)[0]
    for batch, logits in zip(batches("north")[4:], expected[4:], strict=True):
        assert torch.equal(fleet("north", batch), logits)


def test_without_a_folder_all_stay_in_memory():
    fleet = fata.Fleet(adapter(), in_memory=1)
    for name in NAMES * 2:
        fleet(name, batches(name)[0])
    assert fleet.held() == list(NAMES)
    with pytest.raises(ValueError, match="has no folder"):
        fleet.save()


@pytest.mark.parametrize("wrong", [{"in_memory": 0}, {"in_memory": 1.5}, {"save_every": 0}])
def test_what_cannot_be_is_an_error(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fata.Fleet(adapter(), **wrong)


def test_a_reset_is_of_one_stream(tmp_path):
    fleet = fata.Fleet(adapter(), tmp_path, in_memory=1)
    for batch in batches("north", 3):
        for name in NAMES:
            fleet(name, batch)
    with fleet.stream("north") as adapted:
        adapted.reset()
    fleet("south", batches("south")[0])
    with fleet.stream("north") as adapted:
        assert adapted.counts["seen"] == 0
        assert torch.equal(adapted._live().theta.read(), adapted._live().source)
    with fleet.stream("south") as adapted:
        assert adapted.counts["seen"] == 24


def test_what_is_no_adapter_is_told():
    with pytest.raises(TypeError, match="give an adapter"):
        fata.Fleet(network("resnet_gn"))
