"""Faults of a service under load, with a real server process: `python -m benchmarks.serve_faults`.

    kill       20 x `kill -9`: every state file is whole and bit-equal to an undisturbed run's,
               and the streams continue from it
    disk       the server's writes fail for a while: predictions go on, states are whole then
    clients    half bodies, 1,000 damaged images, 100 connections that never finish: another
               stream's predictions are bit-equal to a run without them

Exits with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import random
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import torch

import fata
from benchmarks.serve import METHOD, batches, server
from fata.engine import checkpoint
from fata.serve.client import Client, ClientError

MODEL, ROWS = "mini_resnet_gn", 4
IMAGES = [batch.numpy() for batch in batches(8, ROWS, 32)]
OPTIONS = ("--batch", str(ROWS), "--wait-ms", "0", "--deadline-ms", "600000")


class Undisturbed:
    """The same streams in this process."""

    def __init__(self, folder: Path) -> None:
        self.loaded, self.folder = fata.zoo.load(MODEL), folder
        fields = self.loaded.settings(METHOD, ROWS)
        self.fleet = fata.Fleet(fata.adapt(self.loaded.model, METHOD, **fields), folder)
        self._digests: dict[str, dict[int, str]] = {}

    def predict(self, stream: str, number: int) -> list[float]:
        """Confidences of a batch."""
        pixels = torch.from_numpy(IMAGES[number % 8]).float() / 255
        logits = self.fleet(stream, self.loaded.preprocess(pixels))
        confidences: list[float] = logits.softmax(1).amax(1).tolist()
        return confidences

    def digest(self, stream: str, batch: int) -> str:
        """Of the state after so many batches."""
        known = self._digests.setdefault(stream, {})
        while batch not in known:
            self.predict(stream, len(known))
            self.fleet.save(stream)
            known[len(known) + 1] = digest(self.folder / f"{stream}.safetensors")[1]
        return known[batch]


def digest(path: Path) -> tuple[int, str]:
    """Batches of a state, and the digest of all of it; raises `StateError` if it is damaged."""
    packed = checkpoint.load(path)
    meta = packed.pop("meta")
    if meta["digest"] != checkpoint._sealed(packed, meta):
        raise fata.StateError(f"{path.name} is damaged")
    return meta["batches"], meta["digest"]


def camera(url: str, stream: str, stop: Callable[[], bool]) -> None:
    """Send batch after batch, each the one that the stream has not learned yet."""
    with Client(url) as client, suppress(OSError, HTTPException):
        try:
            number = client.stream(stream)["batches"]
        except ClientError:
            number = 0
        while not stop():
            number = client.predict(stream, IMAGES[number % 8]).batch or number


def killed(folder: Path, kills: int) -> str:
    """Kill the server under load, again and again."""
    states, calm = folder / "states", Undisturbed(folder / "calm")
    names, draw, found = [f"camera-{n}" for n in range(4)], random.Random(0), 0
    last = dict.fromkeys(names, 0)
    for number in range(kills):
        with server(MODEL, str(states), *OPTIONS, "--save-every", "3") as started:
            url = started.url  # type: ignore[attr-defined]
            threads = [
                threading.Thread(target=camera, args=(url, name, lambda: False)) for name in names
            ]
            for thread in threads:
                thread.start()
            time.sleep(1 + 2 * draw.random())
            started.kill()
            started.wait()
            for thread in threads:
                thread.join()
        for name in names:
            path = states / f"{name}.safetensors"
            if path.exists():
                batch, ours = digest(path)
                assert batch >= last[name], f"{name} lost a state that was saved"
                assert ours == calm.digest(name, batch), f"{name} is not bit-equal"
                last[name], found = batch, found + 1
        print(f"kill {number + 1}: batches {list(last.values())}", flush=True)
    return f"{kills} kills, {found} states checked, all whole and bit-equal"


def disk(folder: Path) -> str:
    """The system refuses every write of more than a kilobyte for a while."""
    states, calm = folder / "disk", Undisturbed(folder / "calm-disk")
    with (
        server(MODEL, str(states), *OPTIONS, "--save-every", "1") as started,
        Client(started.url) as client,  # type: ignore[attr-defined]
    ):
        for number in range(30):
            if number in (10, 20):
                most = 1000 if number == 10 else resource.RLIM_INFINITY
                resource.prlimit(started.pid, resource.RLIMIT_FSIZE, (most, -1))
            found = client.predict("camera-0", IMAGES[number % 8])
            ours = [guesses[0].probability for guesses in found.top]
            assert ours == calm.predict("camera-0", number), f"batch {number}"
    batch, ours_now = digest(states / "camera-0.safetensors")
    assert batch == 30
    calm.fleet.save()
    assert ours_now == digest(folder / "calm-disk" / "camera-0.safetensors")[1]
    return "10 batches while no state could be written, 30 batches bit-equal, saved afterwards"


def clients(folder: Path) -> str:
    """Clients that do harm while another stream goes on."""
    calm, draw = Undisturbed(folder / "calm-clients"), random.Random(0)
    options = ("--timeout", "5", "--max-images", "8")
    counts = {"damaged": 0, "half": 0}
    with server(MODEL, str(folder / "clients"), *OPTIONS, *options) as started:
        url: str = started.url  # type: ignore[attr-defined]
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        head = b"POST /v1/streams/evil/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n"
        endless = [socket.create_connection(place) for _ in range(100)]
        for number, one in enumerate(endless):
            one.sendall(head[: 20 + number % 60] if number % 2 else head + b"\r\n" + bytes(100))

        def damage() -> None:
            with Client(url) as client:
                for _ in range(1000):
                    with suppress(ClientError):
                        client.predict("evil", b"\xff\xd8\xff" + draw.randbytes(200))
                    counts["damaged"] += 1

        def half() -> None:
            kind = b"Content-Type: application/x-npy\r\n\r\n"
            for _ in range(200):
                with socket.create_connection(place) as one:
                    one.sendall(head + kind + draw.randbytes(5000))
                counts["half"] += 1

        threads = [threading.Thread(target=work) for work in (damage, half)]
        for thread in threads:
            thread.start()
        number = 0
        with Client(url) as client:
            while number < 40 or any(thread.is_alive() for thread in threads):
                found = client.predict("camera-0", IMAGES[number % 8])
                ours = [guesses[0].probability for guesses in found.top]
                assert ours == calm.predict("camera-0", number), f"batch {number}"
                number += 1
        for thread in threads:
            thread.join()
        closed = sum(_closed(one) for one in endless)
        assert closed == len(endless), f"{closed} of {len(endless)} connections were closed"
    return f"{counts}, 100 endless connections closed; {number} batches bit-equal"


def _closed(one: socket.socket) -> bool:
    one.settimeout(30)
    with one, suppress(ConnectionError):
        while one.recv(4096):
            pass
    return True


def main() -> None:
    """Run all, print what held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, run in (
            ("clients", lambda: clients(folder)),
            ("disk", lambda: disk(folder)),
            ("kill", lambda: killed(folder, given.kills)),
        ):
            try:
                print(f"{title}: {run()}", flush=True)
            except (AssertionError, fata.StateError) as error:
                failed = True
                print(f"{title}: does not hold: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
