"""The service in a process of its own, with real connections."""

import json
import os
import select
import signal
import socket
import threading
import time
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from serving import jpeg, npy, process

import fata
from fata.serve.client import Client, ClientError

FAST = ("--wait-ms", "0", "--batch", "4", "--deadline-ms", "60000")


def pixels(count, seed=0):
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def alone():
    """What the service has for each stream."""
    loaded = fata.zoo.load("mini_resnet_gn")
    fields = loaded.settings("tent+fata", 4)
    return fata.adapt(loaded.model, "tent+fata", **fields), loaded.preprocess


def expected(batches):
    adapted, preprocess = alone()
    return [adapted(preprocess(batch)).argmax(1).tolist() for batch in batches]


def confidences(found):
    return [guesses[0].probability for guesses in found.top]


def test_sigterm_saves_every_stream_and_a_restart_continues(tmp_path):
    batches = list(pixels(24).split(4))
    with process(tmp_path, *FAST, "--save-every", "1000") as started:
        with Client(started.url) as one:
            first = [one.predict("camera-7", list(batch)) for batch in batches[:3]]
            one.configure("door", frozen=True)
        started.send_signal(signal.SIGTERM)
        log = started.stdout.read()
        assert started.wait(60) == 0, log
    assert all(json.loads(line)["level"] == "info" for line in log.splitlines())
    with process(tmp_path, *FAST) as started:
        one = Client(started.url)
        second = [one.predict("camera-7", batch) for batch in batches[3:]]
        assert one.stream("door")["frozen"]
        assert {s["stream"] for s in one.streams()} == {"camera-7", "door"}
        one.close()
    found = [prediction.labels for prediction in first + second]
    assert found == expected(batches)
    assert [p.batch for p in first + second] == [1, 2, 3, 4, 5, 6]


def test_requests_that_were_begun_are_finished_on_sigterm(tmp_path):
    options = ("--wait-ms", "1000", "--batch", "64", "--deadline-ms", "60000")
    with process(tmp_path, *options) as started:
        found = []

        def ask(name):
            with Client(started.url) as one:
                found.append(one.predict(name, pixels(1)))

        waiting = [threading.Thread(target=ask, args=(f"s{n}",)) for n in range(8)]
        for thread in waiting:
            thread.start()
        with Client(started.url) as one:
            while len(one.streams()) < 8:
                pass
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # impatience loses nothing
            started.send_signal(number)
            time.sleep(0.2)
        for thread in waiting:
            thread.join()
        assert started.wait(60) == 0
    assert [prediction.note for prediction in found] == [None] * 8
    assert len(list(tmp_path.glob("*.safetensors"))) == 8


def test_after_a_kill_a_stream_continues_from_its_last_state(tmp_path):
    batches = list(pixels(40).split(4))
    with process(tmp_path, *FAST, "--save-every", "2") as started:
        with Client(started.url) as one:
            for batch in batches[:5]:
                one.predict("camera-7", batch)
        started.kill()
        started.wait()
    with process(tmp_path, *FAST) as started:
        one = Client(started.url)
        again = [one.predict("camera-7", batch) for batch in batches[4:]]
        one.close()
    assert [p.batch for p in again] == list(range(5, 11))
    assert [p.labels for p in again] == expected(batches)[4:]


def test_a_killed_server_leaves_its_port_to_the_next(tmp_path):
    with process(tmp_path, *FAST) as started:
        started.kill()
        started.wait()
        port = int(started.url.rpartition(":")[2])
        with process(tmp_path, *FAST, port=port) as again, Client(again.url) as one:
            assert one.predict("camera-7", pixels(4)).batch == 1


def test_without_its_http_process_a_server_saves_the_streams_and_ends(tmp_path):
    with process(tmp_path, *FAST, "--save-every", "1000") as started:
        with Client(started.url) as one:
            one.predict("camera-7", pixels(4))
        listed = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        if not listed.exists():
            pytest.skip("needs Linux's list of child processes")
        os.kill(int(listed.read_text()), signal.SIGKILL)
        log = started.stdout.read()
        assert started.wait(60) == 1, log
    assert "the HTTP process ended" in log
    assert (tmp_path / "camera-7.safetensors").exists()


def test_the_client_does_what_the_service_does(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("# ours\na-token-for-everything\n\na-token-for-a-camera camera-*\n")
    states = tmp_path / "states"
    with process(states, *FAST, "--token-file", str(tokens)) as started:
        with Client(started.url, "a-token-for-everything") as one:
            (tmp_path / "a.jpg").write_bytes(jpeg((40, 30)))
            files = one.predict("camera-7", [tmp_path / "a.jpg", jpeg(seed=1)], top=3)
            assert [len(guesses) for guesses in files.top] == [3, 3]
            assert len(one.predict("camera-7", tmp_path / "a.jpg").labels) == 1
            latest = one.predict("camera-7", (pixels(2) * 255).byte().numpy())
            assert latest.labels
            assert asdict(latest.health) == one.stream("camera-7")["health"]
            assert latest.health.gain == latest.health.adapted - latest.health.source
            state = one.download("camera-7")
            one.upload("door", state)
            assert one.stream("door")["batches"] == one.stream("camera-7")["batches"] == 3
            one.freeze("door")
            assert one.predict("door", pixels(1)).note == "frozen"
            one.unfreeze("door")
            assert one.configure("door", lr=1e-5)["lr"] == 1e-5
            one.reset("door")
            assert one.stream("door")["batches"] == 0
            assert one.stream("door")["health"] is None
            one.delete("door")
            assert [s["stream"] for s in one.streams()] == ["camera-7"]
            with pytest.raises(ClientError, match="no such stream") as caught:
                one.stream("door")
            assert caught.value.status == 404
        with Client(started.url, "a-token-for-a-camera") as limited, Client(started.url) as nobody:
            assert limited.predict("camera-8", pixels(1)).labels
            for wrong in (lambda: limited.predict("door", pixels(1)), nobody.streams):
                with pytest.raises(ClientError) as caught:
                    wrong()
                assert caught.value.status in (401, 403)
    with pytest.raises(ValueError, match="http://"):
        Client("localhost:8000")


def test_connections_that_never_finish_and_half_bodies_change_nothing(tmp_path):
    """They end by the time-out, while others are served."""
    batches = list(pixels(12).split(4))
    body = npy(pixels(4))
    head = (
        b"POST /v1/streams/camera-7/predict HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: application/x-npy\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with process(tmp_path, *FAST, "--timeout", "2") as started:
        port = int(started.url.rpartition(":")[2])
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        for number, one in enumerate(opened):
            one.settimeout(60)
            one.sendall((b"", head[:30], head + body[:1000])[number % 3])
        gone = socket.create_connection(("127.0.0.1", port))
        gone.sendall(head + body[:5000])
        gone.close()
        client = Client(started.url)
        found = [client.predict("camera-7", batch) for batch in batches]
        ends = [one.recv(4096) for one in opened]
        assert all(end == b"" for number, end in enumerate(ends) if number % 3 < 2)
        assert all(b" 408 " in end for number, end in enumerate(ends) if number % 3 == 2)
        assert client.stream("camera-7")["batches"] == 3
        for one in opened:
            one.close()
        client.close()
    assert [p.labels for p in found] == expected(batches)


def upload(url, size, kind="application/x-npy"):
    """A connection on which the headers of a request were sent; it may not send its body yet."""
    one = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60)
    one.sendall(
        b"POST /v1/streams/camera-7/predict HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        b"Content-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind.encode(), size)
    )
    return one


def may_send(one, seconds):
    if not select.select([one], [], [], seconds)[0]:
        return False
    return b" 100 " in one.recv(4096)


@pytest.mark.parametrize("kind", ["application/x-npy", "multipart/form-data; boundary=x"])
def test_four_of_the_largest_requests_are_in_memory_and_small_ones_pass(tmp_path, kind):
    large = 1 << 20
    with process(tmp_path, *FAST, "--max-mebibytes", "1") as started:
        first = [upload(started.url, large, kind) for _ in range(4)]
        assert all(may_send(one, 60) for one in first)
        waiting = [upload(started.url, large, kind) for _ in range(2)]
        with Client(started.url) as client:
            assert len(client.predict("door", pixels(4)).labels) == 4
        assert not any(may_send(one, 0.5) for one in waiting)
        first[0].sendall(bytes(large))  # no images: it is answered with an error
        assert b" 422 " in first[0].recv(4096)
        assert may_send(waiting[0], 60)
        assert not may_send(waiting[1], 0.5)
        waiting[0].close()
        assert may_send(waiting[1], 60)
        for one in (*first, *waiting):
            one.close()


def test_images_of_a_client_that_is_gone_are_not_learned_from(tmp_path):
    rows, body = pixels(4), npy(pixels(3, 1))
    options = ("--wait-ms", "600000", "--batch", "4", "--deadline-ms", "900000")

    def wait_for(waiting):
        until = time.monotonic() + 60
        while f"fata_queue_images {waiting}" not in client._request("GET", "/metrics").decode():
            assert time.monotonic() < until, "they still wait"
            time.sleep(0.05)

    with process(tmp_path, *options) as started:
        with Client(started.url) as client:
            gone = upload(started.url, len(body))
            assert may_send(gone, 60)
            gone.sendall(body)
            wait_for("3.0")
            gone.close()
            wait_for("0.0")
            found = client.predict("camera-7", rows)
            assert client.stream("camera-7")["counts"]["seen"] == 4
            text = client._request("GET", "/metrics").decode()
        started.send_signal(signal.SIGTERM)
        log = started.stdout.read()
        assert started.wait(60) == 0, log
    assert found.labels == expected([rows])[0]
    assert 'fata_requests_total{status="499"} 1.0' in text
    assert all(json.loads(line)["level"] == "info" for line in log.splitlines())


def test_a_connection_in_use_outlasts_the_time_for_a_request(tmp_path):
    with process(tmp_path, *FAST, "--timeout", "1") as started:
        one = HTTPConnection("127.0.0.1", int(started.url.rpartition(":")[2]))
        one.connect()
        own = one.sock
        for _ in range(12):
            one.request("GET", "/healthz")
            assert one.getresponse().read()
            assert one.sock is own  # it was not opened again
            time.sleep(0.2)
        one.close()


def test_the_command_says_what_is_wrong(tmp_path):
    import subprocess
    import sys

    def serve(*options):
        command = [sys.executable, "-W", "ignore", "-m", "fata", "serve", *options]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 2, ran.stdout + ran.stderr
        return " ".join(ran.stderr.replace("│", " ").split())

    (tmp_path / "tokens").write_text("short\n")
    mini = ("--model", "mini_resnet_gn")
    assert "--token-file" in serve(*mini, "--host", "0.0.0.0")
    assert "16 characters" in serve(*mini, "--token-file", str(tmp_path / "tokens"))
    assert "unknown model" in serve("--model", "nothing")
    assert "unknown method" in serve(*mini, "--method", "nothing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in serve(*mini, "--port", str(taken.getsockname()[1]))
