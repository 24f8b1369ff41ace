"""The service over HTTP, in this process."""

import io
import json
import re
import threading
import time

import pytest
import torch
from safetensors.torch import save as save_tensors
from serving import (
    NAMES,
    NOW,
    adapter,
    client,
    expected,
    jpeg,
    npy,
    pixels,
    predict,
    probabilities,
)

import fata
from fata.serve.access import Token
from fata.serve.history import CLASSES, POINTS, History
from fata.serve.limits import Limits
from fata.serve.scheduler import Gathering

STREAM = "/v1/streams/camera-7"
ALL, SOME = "a-token-for-everything", "a-token-for-some-streams"
TOKENS = [Token(ALL), Token(SOME, ("camera-*", "door"))]


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def error(answer, status):
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert list(told) == ["error"]
    return told["error"]


def test_two_streams_predict_what_two_adapters_would(tmp_path):
    batches = {name: list(pixels(20, seed).split(4)) for name, seed in (("north", 1), ("south", 2))}
    with client(folder=tmp_path, fleet={"in_memory": 1}) as one:
        found, by = ({name: [] for name in batches} for _ in range(2))
        for number in range(5):
            for name in batches:
                answer = predict(one, name, batches[name][number]).json()
                found[name].append(probabilities(answer))
                by[name].append((answer["predicted_by"], answer["phase"]))
                assert answer["learned"]
                assert answer["batch"] == number + 1
    for name in batches:
        assert found[name] == expected(batches[name])
        alone, told = adapter(), []
        for batch in batches[name]:
            alone(batch)
            who = "source" if alone._live().source_predicted else "adapted"
            told.append((who, alone.guard.phase))
        assert by[name] == told


def test_images_come_as_files_or_tensors():
    file = jpeg(kind="PNG")
    with client() as one:
        forms = [
            {"files": [("image", ("a.png", file, "image/png"))] * 2},
            {"content": file, "headers": {"content-type": "image/png"}},
            {"content": jpeg(), "headers": {"content-type": "image/jpeg"}},
            {"content": jpeg(kind="WEBP"), "headers": {"content-type": "image/webp"}},
            {
                "content": npy((pixels(3) * 255).byte()),
                "headers": {"content-type": "application/x-npy"},
            },
            {
                "content": save_tensors({"images": pixels(5)}),
                "headers": {"content-type": "application/x-safetensors"},
            },
        ]
        counts = [2, 1, 1, 1, 3, 5]
        for form, count in zip(forms, counts, strict=True):
            answer = one.post(f"{STREAM}/predict?top=1", **form)
            assert answer.status_code == 200, answer.text
            assert [len(image["top"]) for image in answer.json()["predictions"]] == [1] * count
        known = one.get(STREAM).json()
    assert known["counts"]["seen"] == sum(counts)
    assert answer.json()["predictions"][0]["top"][0]["name"] in NAMES


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("image/jpeg", jpeg()[:100], 422),
        ("image/jpeg", b"", 422),
        ("image/jpeg", b"GIF89a" + bytes(100), 422),
        ("image/png", jpeg((4001, 3000), "PNG")[:2000], 413),
        ("application/x-npy", npy(pixels(3))[:-5], 422),
        ("application/x-npy", npy(pixels(3).double()), 422),
        ("application/x-npy", npy(pixels(3)[:, :2]), 422),
        ("application/x-npy", npy(pixels(3) * 2), 422),
        ("application/x-npy", npy(pixels(3) * torch.nan), 422),
        ("application/x-npy", npy(pixels(3)[:0]), 422),
        ("application/x-npy", npy(pixels(65)), 413),
        ("application/x-npy", b"\x93NUMPY\x01\x00", 422),
        ("application/x-safetensors", b"\xff" * 64, 422),
        ("application/x-safetensors", save_tensors({"other": pixels(1)}), 422),
        ("multipart/form-data; boundary=x", b"--x\r\nhalf", 422),
        ("text/plain", b"hello", 415),
        ("application/x-npy", bytes(2 << 20), 413),
    ],
)
def test_what_is_no_image_is_said_so_and_changes_nothing(kind, body, status):
    limits = Limits(body=1 << 20, pixels=12_000_000)
    with client(limits=limits) as one:
        before = predict(one, "camera-7", pixels(4)).json()
        error(one.post(f"{STREAM}/predict", content=body, headers={"content-type": kind}), status)
        again = one.get(STREAM).json()
    assert again["batches"] == before["batch"] == 1
    assert again["counts"]["seen"] == 4


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"files": {"image": (None, "hello")}}, "send a file, as -F image=@frame.jpg"),
        ({"files": {"foo": ("a.jpg", jpeg(), "image/jpeg")}}, "no image: name the part 'image'"),
    ],
)
def test_a_form_without_an_image_says_how_to_send_one(form, message):
    with client() as one:
        assert message in error(one.post(f"{STREAM}/predict", **form), 422)


def test_an_unknown_path_says_what_a_stream_is_called():
    with client() as one:
        assert "at most 128 letters" in error(one.post("/v1/streams/a/b/predict"), 404)


def test_a_pickle_is_never_loaded():
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("a pickle was loaded",)

    import numpy as np

    file = io.BytesIO()
    np.save(file, np.array([Bomb()]), allow_pickle=True)
    torch_file = io.BytesIO()
    torch.save({"theta": torch.zeros(1)}, torch_file)
    with client() as one:
        kind = {"content-type": "application/x-npy"}
        error(one.post(f"{STREAM}/predict", content=file.getvalue(), headers=kind), 422)
        error(one.put(f"{STREAM}/state", content=torch_file.getvalue()), 422)


@pytest.mark.parametrize("name", [".hidden", "a%20b", "%2e%2e", "x" * 129, "a%00b", "a%5cb", "ä"])
def test_a_stream_is_a_name(name, tmp_path):
    with client(folder=tmp_path) as one:
        answer = predict(one, name, pixels(1))
        assert answer.status_code in (404, 422)
        assert one.put(f"/v1/streams/{name}", json={}).status_code in (404, 405, 422)
    assert [path.name for path in tmp_path.iterdir()] == [".lease"]


def test_streams_are_managed(tmp_path):
    with client(folder=tmp_path) as one:
        made = one.put(STREAM, json={"frozen": True, "lr": 0.5, "method": "tent+fata"}).json()
        assert (made["frozen"], made["lr"], made["method"]) == (True, 0.5, "tent+fata")
        assert (made["images"], made["predicted_by"]) == (0, None)
        answer = predict(one, "camera-7", pixels(4)).json()
        assert (answer["learned"], answer["note"], answer["batch"]) == (False, "frozen", 0)
        assert one.post(f"{STREAM}/unfreeze").status_code == 204
        assert predict(one, "camera-7", pixels(4)).json()["learned"]
        assert one.post(f"{STREAM}/freeze").status_code == 204
        assert not predict(one, "camera-7", pixels(4)).json()["learned"]
        known = one.get(STREAM).json()
        assert (known["images"], known["batches"], known["frozen"]) == (12, 1, True)
        assert one.post(f"{STREAM}/reset").status_code == 204
        known = one.get(STREAM).json()
        assert (known["batches"], known["frozen"], known["counts"]["seen"]) == (0, True, 0)
        assert [s["stream"] for s in one.get("/v1/streams").json()["streams"]] == ["camera-7"]
        assert one.get("/v1/streams?search=8").json() == {"streams": [], "total": 0}
        assert one.delete(STREAM).status_code == 204
        for call in (one.get, one.delete):
            assert "no such stream" in error(call(STREAM), 404)
        for action in ("reset", "freeze", "unfreeze"):
            assert "no such stream" in error(one.post(f"{STREAM}/{action}"), 404)
        for wrong in ({"frozen": None}, {"frozen": 1}, {"lr": -1}):
            assert next(iter(wrong)) in error(one.put(STREAM, json=wrong), 422)
        assert "other: unknown; choose from frozen, lr" in error(
            one.put(STREAM, json={"other": 1}), 422
        )
        kind = {"content-type": "application/json"}
        assert "finite" in error(one.put(STREAM, content=b'{"lr": 1e999}', headers=kind), 422)
        for body in (b"", b"{", b"[]", b"{'frozen': true}"):
            assert '{"frozen": true}' in error(one.put(STREAM, content=body, headers=kind), 422)
        for wrong in ("deyo+fato", "os:System", "auto"):  # nothing is imported
            assert "sar+fata" in error(one.put(STREAM, json={"method": wrong}), 422)
        error(one.put(f"{STREAM}/state", content=b"none"), 422)
        empty = {"content": b"", "headers": {"content-type": "image/png"}}
        error(one.post(f"{STREAM}/predict", **empty), 422)
        assert one.get("/v1/streams").json() == {"streams": [], "total": 0}
    assert [path.name for path in tmp_path.iterdir()] == [".lease"]


def test_a_state_goes_down_and_up(tmp_path):
    batches = list(pixels(20).split(4))
    with client(folder=tmp_path) as one:
        for batch in batches[:3]:
            predict(one, "camera-7", batch)
        state = one.get(f"{STREAM}/state").content
        (tmp_path / "down").write_bytes(state)
        assert one.put("/v1/streams/door/state", content=state).status_code == 204
        doors = [probabilities(predict(one, "door", b).json()) for b in batches[3:]]
        known = one.get("/v1/streams/door").json()["counts"]
        wrong = [state[:-3], b"", state[:-1] + bytes([state[-1] ^ 1])]
        other = fata.adapt(adapter().unwrap(), "sar")
        other.save(tmp_path / "other")
        for content in (*wrong, (tmp_path / "other").read_bytes()):
            told = error(one.put("/v1/streams/door/state", content=content), 422)
            assert str(tmp_path) not in told
            assert "/" not in told
        assert one.get("/v1/streams/door").json()["counts"] == known
    alone = adapter()
    alone.load(tmp_path / "down")
    assert doors == [alone(batch).softmax(1).tolist() for batch in batches[3:]]
    assert doors == expected(batches)[3:]


def test_an_invented_state_harms_no_one(tmp_path):
    """A digest is no secret: what fits by its names may still be nonsense."""
    import fata.engine.checkpoint as checkpoint

    with client(folder=tmp_path) as one:
        for batch in pixels(8).split(4):
            predict(one, "camera-7", batch)
        (tmp_path / "s").write_bytes(one.get(f"{STREAM}/state").content)
        packed = checkpoint.load(tmp_path / "s")

        def invented(meta=None, **tensors):
            made = {**{n: t for n, t in packed.items() if n != "meta"}, **tensors}
            meta = {**packed["meta"], **(meta or {})}
            digest = checkpoint._sealed(made, meta)
            return save_tensors(made, {"meta": json.dumps({**meta, "digest": digest})})

        name = next(n for n in packed if n.startswith("parameter."))
        for content in (
            invented(**{name: packed[name] * torch.nan}),
            invented({"watched": {"since": "x", "nothing": 1}}),
            invented({"counts": 3}),
            invented({"watched": {**packed["meta"]["watched"], "phase": "asleep"}}),
        ):
            error(one.put(f"{STREAM}/state", content=content), 422)
        strange = invented(**{"plus.mean": torch.zeros(3, 3)}, meta={"batches": "many"})
        one.put("/v1/streams/evil/state", content=strange)
        answer = predict(one, "evil", pixels(4))
        assert answer.status_code == 200
        found = [probabilities(predict(one, "door", b).json()) for b in pixels(20).split(4)]
    assert found == expected(list(pixels(20).split(4)))


def test_a_failed_step_gives_the_source_prediction_and_says_so(tmp_path, monkeypatch, caplog):
    source = adapter().unwrap()
    with client(folder=tmp_path) as one:
        predict(one, "camera-7", pixels(4))
        with monkeypatch.context() as patched:

            def broken(*_):
                raise RuntimeError("secret: /etc/passwd")

            patched.setattr(type(one.service.fleet.adapter._live()), "step", broken)
            answer = predict(one, "camera-7", pixels(4)).json()
        assert (answer["predicted_by"], answer["note"]) == ("source", "failed")
        assert not answer["learned"]
        with torch.no_grad():
            assert probabilities(answer) == source(pixels(4)).softmax(1).tolist()
        assert "secret" not in json.dumps(answer)
        assert predict(one, "camera-7", pixels(4)).json()["batch"] == 2
        assert b"fata_failed_steps_total 1.0" in one.get("/metrics").content
    assert "secret" in caplog.text


def test_a_damaged_state_file_is_not_used_and_not_lost(tmp_path):
    with client(folder=tmp_path) as one:
        predict(one, "camera-7", pixels(4))
    path = tmp_path / "camera-7.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    damaged = path.read_bytes()
    with client(folder=tmp_path) as one:
        answer = predict(one, "camera-7", pixels(4)).json()
        assert (answer["predicted_by"], answer["note"]) == ("source", "failed")
        assert "reset the stream" in error(one.get(STREAM), 409)
        assert path.read_bytes() == damaged
        assert one.post(f"{STREAM}/reset").status_code == 204
        assert predict(one, "camera-7", pixels(4)).json()["batch"] == 1


def test_errors_tell_nothing_of_the_inside(monkeypatch, caplog):
    with client() as one:

        def broken(*_):
            raise RuntimeError("secret: /etc/passwd")

        monkeypatch.setattr(one.service, "describe", broken)
        predict(one, "camera-7", pixels(1))
        assert error(one.get(STREAM), 500) == "internal error."
    assert "secret" in caplog.text


def test_tokens_are_asked_for_and_limit_streams():
    with client(TOKENS) as one:
        for path in ("/healthz", "/readyz", "/"):
            assert one.get(path).status_code == 200
        for headers in ({}, bearer("wrong"), bearer(""), {"authorization": f"Basic {ALL}"}):
            for answer in (
                predict(one, "camera-7", pixels(1), **headers),
                one.get("/v1/streams", headers=headers),
                one.get("/metrics", headers=headers),
                one.delete(STREAM, headers=headers),
                one.put(f"{STREAM}/state", headers=headers),
            ):
                error(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
        assert predict(one, "camera-7", pixels(1), **bearer(SOME)).status_code == 200
        assert predict(one, "garage", pixels(1), **bearer(ALL)).status_code == 200
        for call in ("get", "delete"):
            error(one.request(call, "/v1/streams/garage", headers=bearer(SOME)), 403)
        told = error(predict(one, "garage", pixels(1), **bearer(SOME)), 403)
        assert "not valid for the stream 'garage'" in told
        told = error(one.get("/metrics", headers=bearer(SOME)), 403)
        assert "not valid for what concerns all streams" in told
        assert one.get("/metrics", headers=bearer(ALL)).status_code == 200
        seen = {
            token: [
                s["stream"] for s in one.get("/v1/streams", headers=bearer(token)).json()["streams"]
            ]
            for token in (ALL, SOME)
        }
        assert seen == {ALL: ["camera-7", "garage"], SOME: ["camera-7"]}


def test_pages_of_other_sites_cannot_use_it():
    with client() as one:
        error(predict(one, "camera-7", pixels(1), origin="https://example.org"), 403)
        assert predict(one, "camera-7", pixels(1), origin="http://testserver").status_code == 200


def test_streams_requests_and_images_are_limited():
    with client(limits=Limits(streams=2, rate=1, images=4)) as one:
        for name in ("a", "b"):
            assert predict(one, name, pixels(1)).status_code == 200
        answer = predict(one, "a", pixels(1))
        assert "requests" in error(answer, 429)
        assert int(answer.headers["retry-after"]) >= 1
        assert "streams" in error(predict(one, "c", pixels(1)), 429)
        assert "streams" in error(one.put("/v1/streams/c", json={}), 429)
        assert "at most 4" in error(predict(one, "b", pixels(5)), 413)
        one.delete("/v1/streams/a")
        assert predict(one, "c", pixels(1)).status_code == 200


def test_the_requests_of_a_stream_are_gathered_in_order():
    """Four at once are one batch of four, and each has its own rows."""
    gathering = Gathering(batch=4, wait=60.0, deadline=600.0)
    rows = pixels(8)
    with client(gathering=gathering) as one:
        submit = one.service.submit
        futures = [submit("camera-7", rows[i : i + 1]) for i in range(4)]
        found = torch.cat([future.result(60).logits for future in futures])
        assert {future.result().record.batch for future in futures} == {1}
        both = submit("camera-7", rows[4:7]), submit("camera-7", rows[7:8])
        second = torch.cat([future.result(60).logits for future in both])
    alone = adapter()
    assert torch.equal(found, alone(rows[:4]))
    assert torch.equal(second, alone(rows[4:]))


def test_bytes_and_floats_of_one_batch_are_the_same_pixels():
    rows = (pixels(4) * 255).byte()
    with client(gathering=Gathering(batch=4, wait=60.0, deadline=600.0)) as one:
        futures = [one.service.submit("camera-7", p) for p in (rows[:2], rows[2:].float() / 255)]
        found = torch.cat([future.result(60).logits for future in futures])
    assert torch.equal(found, adapter()(rows.float() / 255))


def test_more_images_than_a_batch_are_several_batches():
    with client(gathering=NOW) as one:
        answer = predict(one, "camera-7", pixels(10)).json()
    assert answer["batch"] == 3
    alone = adapter()
    batches = pixels(10).split(4)
    assert probabilities(answer) == [p for b in batches for p in alone(b).softmax(1).tolist()]


def test_what_waited_past_the_deadline_is_predicted_without_learning():
    with client(gathering=Gathering(batch=4, wait=0.0, deadline=0.2)) as one:
        predict(one, "camera-7", pixels(4))
        with one.service.fleet.stream("door"):  # the network is busy
            late = one.service.submit("camera-7", pixels(4, 2))
            first = one.service.submit("camera-7", pixels(4, 3))
            time.sleep(0.5)
        outcomes = [late.result(60), first.result(60)]
        assert one.get(STREAM).json()["batches"] <= 2
    assert outcomes[-1].note == "deadline"
    assert not outcomes[-1].learned


def test_too_much_that_waits_is_refused_and_the_rest_goes_on():
    with client(limits=Limits(queue=8)) as one:
        with one.service.fleet.stream("door"):
            futures = [one.service.submit("camera-7", pixels(4)) for _ in range(2)]
            answer = predict(one, "camera-7", pixels(1))
            assert "wait" in error(answer, 503)
            assert "retry-after" in answer.headers
        assert all(future.result(60).learned for future in futures)
        assert predict(one, "camera-7", pixels(4)).status_code == 200


def test_probes_and_lists_do_not_wait_for_a_batch():
    with client() as one:
        predict(one, "camera-7", pixels(4))
        with one.service.fleet.stream("door"):  # the network is busy
            waiting = [threading.Thread(target=one.get, args=(STREAM,)) for _ in range(12)]
            for thread in waiting:
                thread.start()
            for path in ("/readyz", "/metrics", "/v1/streams", f"{STREAM}/history"):
                assert one.get(path).status_code == 200
            assert all(thread.is_alive() for thread in waiting)
        for thread in waiting:
            thread.join()


def test_a_reply_that_cannot_be_sent_is_an_error(monkeypatch, caplog):
    with client() as one:
        predict(one, "camera-7", pixels(4))
        monkeypatch.setattr(one.service, "describe", lambda name: {"secret": object()})
        assert error(one.get(STREAM), 500) == "internal error."
        assert one.get("/readyz").status_code == 200
    assert "not JSON serializable" in caplog.text


def test_another_method_begins_another_history():
    with client() as one:
        predict(one, "camera-7", pixels(4))
        changed = one.put(STREAM, json={"method": "sar"}).json()
    assert (changed["images"], changed["predicted_by"], changed["counts"]["seen"]) == (0, None, 0)


def test_a_poisoned_stream_harms_no_other():
    """One class, noise, an adversarial order, at the same time: the other's bits are the same."""
    batches = list(pixels(40).split(4))
    poison = [
        pixels(1, 9).expand(4, -1, -1, -1).contiguous(),
        torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).round(),
        torch.zeros(4, 3, 16, 16),
        pixels(4, 7).flip(0),
    ]
    with client() as one:
        stop = threading.Event()

        def attack():
            number = 0
            while not stop.is_set():
                predict(one, f"evil-{number % 3}", poison[number % 4])
                number += 1

        attacker = threading.Thread(target=attack)
        attacker.start()
        found = [probabilities(predict(one, "camera-7", batch).json()) for batch in batches]
        stop.set()
        attacker.join()
    assert found == expected(batches)


def test_what_was_dropped_is_not_predicted_and_the_rest_is_not_held_up():
    rows = pixels(8)
    with client(gathering=Gathering(batch=4, wait=0.5, deadline=600.0)) as one:
        submit, drop = one.service.submit, one.service.drop
        first, alone = submit("camera-7", rows[:3]), submit("door", rows[:1])
        time.sleep(0.1)
        second = submit("camera-7", rows[4:5])
        drop("camera-7", first)
        drop("door", alone)
        assert "fata_queue_images 1.0" in one.get("/metrics").text
        found = second.result(60)
        assert one.get("/v1/streams/door").json()["counts"]["seen"] == 0
        assert one.get(STREAM).json()["counts"]["seen"] == 1
        drop("camera-7", second)  # too late, which is no error
    assert torch.equal(found.logits, adapter()(rows[4:5]))


def test_another_server_that_holds_a_stream_is_waited_for(tmp_path):
    other = fata.Fleet(adapter(), tmp_path)
    batches = list(pixels(8).split(4))
    other("camera-7", batches[0])
    with client(folder=tmp_path) as one:
        answer = predict(one, "camera-7", batches[1])
        assert "another server" in error(answer, 503)
        assert "another server" in error(one.get(STREAM), 503)
        waiting = one.service.submit("camera-7", batches[1])
        while not other.hand_over():
            time.sleep(0.001)
            if waiting.done():
                waiting = one.service.submit("camera-7", batches[1])
        assert waiting.result(60).logits.softmax(1).tolist() == expected(batches)[1]


def test_metrics_are_by_stream_up_to_a_limit():
    from fata.serve.metrics import Metrics

    with client(metrics=Metrics(2)) as one:
        for name in ("a", "b", "c", "d"):
            predict(one, name, pixels(4))
        text = one.get("/metrics").text
        assert 'fata_images_total{predicted_by="adapted",stream="a"} 4.0' in text
        assert 'fata_images_total{predicted_by="adapted",stream="other"} 8.0' in text
        assert 'stream="c"' not in text
        assert 'fata_stream_phase{phase="adapting",stream="a"} 1.0' in text
        assert "fata_batch_images_count 4.0" in text
        assert "fata_streams 4.0" in text
        assert "fata_swaps_total 4.0" in text
        assert "fata_queue_images 0.0" in text
        one.delete("/v1/streams/a")
        assert 'stream="a"' not in one.get("/metrics").text
        predict(one, "c", pixels(4))
        assert 'stream="c"' in one.get("/metrics").text


def test_metrics_have_the_health_of_some_streams_and_the_mean_of_the_others():
    from fata.serve.metrics import Metrics

    metrics = Metrics(1)
    with client(metrics=metrics) as one:
        for seed, name in enumerate(("a", "b", "c")):
            predict(one, name, pixels(4, seed))
        found = {name: one.get(f"/v1/streams/{name}").json()["health"] for name in ("a", "b", "c")}
        assert len({health["source"] for health in found.values()}) == 3

        def read(stream, model):
            given = {"stream": stream, "model": model}
            return metrics.registry.get_sample_value("fata_health", given)

        for model in ("source", "adapted"):
            assert read("a", model) == found["a"][model]
            mean = (found["b"][model] + found["c"][model]) / 2
            assert read("other", model) == pytest.approx(mean)
            assert read("b", model) is None
        one.post("/v1/streams/b/reset")
        assert read("other", "source") == found["c"]["source"]
        one.delete("/v1/streams/c")
        assert read("other", "source") is None


def test_the_health_of_a_stream_is_told_where_it_is_asked_for(tmp_path):
    batches = pixels(48).split(4)
    alone = adapter()
    with client(folder=tmp_path) as one:
        one.put(STREAM, json={})
        assert one.get(STREAM).json()["health"] is None
        for batch in batches:
            alone(batch)
            told = predict(one, "camera-7", batch).json()["health"]
            assert told == alone.health.as_dict()
            assert told["gain"] == told["adapted"] - told["source"]
        assert one.get(STREAM).json()["health"] == told
        assert one.get("/v1/streams").json()["streams"][0]["health"] == told
        assert one.get(f"{STREAM}/history").json()["points"][-1]["health"] == told
    with client(folder=tmp_path) as one:  # it is part of the state
        assert one.get(STREAM).json()["health"] == told
        one.post(f"{STREAM}/freeze")
        assert predict(one, "camera-7", batches[0]).json()["health"] == told
        one.post(f"{STREAM}/reset")
        assert one.get(STREAM).json()["health"] is None


def test_the_history_sums_up_batches_and_images_are_kept_only_if_asked():
    with client(keep_images=True) as one:
        for _ in range(20):
            predict(one, "camera-7", pixels(4))
        points = one.get(f"{STREAM}/history").json()["points"]
        assert [point["images"] for point in points] == [64, 16]
        assert all(0 < sum(point["classes"].values()) <= 1.0001 for point in points)
        latest = one.get(f"{STREAM}/images").json()["images"]
        assert len(latest) == 12
        assert latest[0]["name"] in NAMES
    with client() as one:
        predict(one, "camera-7", pixels(4))
        assert "--show-images" in error(one.get(f"{STREAM}/images"), 404)


def test_the_history_of_a_stream_of_many_classes_stays_small():
    history = History()
    for start in range(0, 6000, 64):
        labels = [start, start, *range(start, start + 62)]
        history.add(None, labels, [0.5] * 64)
        assert history.points[-1].shown()["classes"][str(start)] == 3 / 64
    assert len(history.points) == POINTS
    kept = [len(point.classes) for point in history.points]
    assert kept[:-1] == [CLASSES] * (POINTS - 1)
    assert history.points[-2].shown()["classes"][str(start - 64)] == 3 / 64


def test_the_interface_is_described():
    with client() as one:
        paths = one.get("/openapi.json").json()["paths"]
        assert one.get("/docs").status_code == 200
        assert one.get("/redoc").status_code == 404
    assert set(paths["/v1/streams/{stream}"]) == {"get", "put", "delete"}
    assert (
        "multipart/form-data"
        in paths["/v1/streams/{stream}/predict"]["post"]["requestBody"]["content"]
    )


def test_the_interface_asks_for_a_token_where_one_is_needed():
    with client(TOKENS) as one:
        schema = one.get("/openapi.json").json()
        assert one.get("/openapi.json").json() == schema
    assert schema["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    assert schema["security"] == [{"token": []}]
    free = {path for path, of in schema["paths"].items() if of.get("get", {}).get("security") == []}
    with client(TOKENS) as one:
        for path in schema["paths"]:
            if "{" not in path:
                assert (one.get(path).status_code == 200) == (path in free), path
    with client() as one:
        schema = one.get("/openapi.json").json()
    assert "security" not in schema
    assert "securitySchemes" not in schema["components"]


def test_the_pages_refer_to_no_other_host():
    with client() as one:
        for path in ("/", "/docs"):
            answer = one.get(path)
            assert answer.headers["content-type"].startswith("text/html")
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            links = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
            assert links
            assert not [link for link in links if "//" in link]
            for link in links:
                if link not in ("./", "docs", "openapi.json") and "swagger" not in link:
                    assert one.get(f"/{link}").status_code == 200, link


def test_the_interface_is_described_without_a_network():
    pytest.importorskip("fastapi_offline", reason="has the scripts of /docs")
    with client() as one:
        for name, kind in (("swagger-ui-bundle.js", "javascript"), ("swagger-ui.css", "css")):
            answer = one.get(f"/{name}")
            assert answer.status_code == 200
            assert kind in answer.headers["content-type"]
            assert len(answer.content) > 10_000
