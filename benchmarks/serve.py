"""The service against the same adapters in one process: `python -m benchmarks.serve`.

A real server process and real HTTP clients in a process of their own. For each number of streams:
images a second of both, measured in turns in one run, and the clients' latency. With `--minutes`
the server's memory over that time, under load (`--rate`: so many requests a second). With `--many`
so many streams on one server, each with a few images: memory, states, seconds. With `--uploads`
the most memory that the HTTP process has, while so many clients send 31 MiB at once. The record is
written to `benchmarks/runs/serve.json`; parts that were not measured stay as they are there.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
from PIL import Image
from torch import Tensor

import fata
from fata.serve.client import Client, _body
from fata.zoo.loaded import Loaded

RECORD = Path(__file__).parent / "runs" / "serve.json"
METHOD = "tent+fata"


def batches(count: int, rows: int, size: int) -> list[Tensor]:
    """Pixels as cameras send them: bytes."""
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randint(256, (rows, 3, size, size), generator=draw, dtype=torch.uint8)
        for _ in range(count)
    ]


@contextmanager
def server(
    model: str, folder: str, *options: str, method: str = METHOD
) -> Iterator[subprocess.Popen[bytes]]:
    """`fata serve` in a process of its own; `.url` is where."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "fata", "serve", "--model", model]
    command += ["--method", method, "--state-dir", folder, "--port", str(port)]
    command += ["--log-level", "warning", "--streams", "20000", *options]
    with subprocess.Popen(command) as started:
        started.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
        try:
            wait_until_ready(started)
            yield started
        finally:
            if started.poll() is None:
                started.send_signal(signal.SIGTERM)
            started.wait()


def wait_until_ready(started: subprocess.Popen[bytes]) -> None:
    """Return once predictions are possible."""
    while started.poll() is None:
        url = started.url  # type: ignore[attr-defined]
        with suppress(URLError, ConnectionError), urlopen(f"{url}/readyz"):
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not start")


def ask(url: str, streams: int, given: argparse.Namespace, seconds: float, results: Any) -> None:
    """Clients, each with its own streams, for some seconds; latencies of the requests.

    With `--rate` they leave pauses, so that there are so many requests a second of them all.
    """
    torch.set_num_threads(1)
    latencies: list[float] = []
    images = [batch.numpy() for batch in batches(8, given.batch, given.size)]
    start = time.monotonic()

    def work(number: int) -> None:
        with Client(url) as client:
            turn = number
            while time.monotonic() - start < seconds:
                before = time.monotonic()
                client.predict(f"camera-{turn % streams}", images[turn % 8])
                latencies.append(time.monotonic() - before)
                turn += given.clients
                if given.rate:
                    time.sleep(max(0.0, before + given.clients / given.rate - time.monotonic()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(given.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((latencies, time.monotonic() - start))


def asking(url: str, streams: int, given: argparse.Namespace, seconds: float) -> tuple[Any, Any]:
    """Clients at work in a process of their own, and the queue that gets their latencies."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    clients = spawn.Process(target=ask, args=(url, streams, given, seconds, results))
    clients.start()
    return clients, results


def served(url: str, streams: int, given: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Images a second over HTTP, and latencies in milliseconds."""
    clients, results = asking(url, streams, given, seconds)
    latencies, took = results.get()
    clients.join()
    return {
        "images": len(latencies) * given.batch / took,
        "median_ms": 1000 * median(latencies),
        "p99_ms": 1000 * quantiles(latencies, n=100)[-1],
    }


def in_one_process(
    fleet: fata.Fleet, loaded: Loaded, streams: int, given: argparse.Namespace, seconds: float
) -> float:
    """Images a second of the same adapters without a service."""
    images = batches(8, given.batch, given.size)
    start, turn = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        pixels = images[turn % 8].to(given.device).float() / 255
        fleet(f"camera-{turn % streams}", loaded.preprocess(pixels)).softmax(1).tolist()
        turn += 1
    return turn * given.batch / (time.monotonic() - start)


def resident(pid: int) -> float:
    """Memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def peak(pid: int) -> float:
    """The most memory that a process has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def throughput(given: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """A line a number of streams."""
    loaded = fata.zoo.load(given.model)
    loaded.model.to(given.device)
    fields = loaded.settings(given.method, given.batch)
    adapter = fata.adapt(loaded.model, given.method, **fields)
    fleet = fata.Fleet(adapter, f"{folder}/alone", save_every=32)
    lines = []
    options = ("--batch", str(given.batch), "--wait-ms", "0", "--deadline-ms", "60000")
    options += ("--device", given.device)
    with server(given.model, f"{folder}/served", *options, method=given.method) as started:
        url = started.url  # type: ignore[attr-defined]
        for streams in given.streams:
            alone, over_http = [], []
            in_one_process(fleet, loaded, streams, given, 2)  # warm
            served(url, streams, given, 2)
            for _ in range(given.rounds):
                alone.append(in_one_process(fleet, loaded, streams, given, given.seconds))
                over_http.append(served(url, streams, given, given.seconds))
            best = {name: median(one[name] for one in over_http) for name in over_http[0]}
            ratio = median(o["images"] / a for o, a in zip(over_http, alone, strict=True))
            line = {"streams": streams, "alone": median(alone), **best, "ratio": ratio}
            lines.append(line)
            print({name: round(value, 3) for name, value in line.items()}, flush=True)
    return lines


def metric(url: str, name: str) -> float:
    """A Prometheus metric of the server, summed over its labels."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


def memory(given: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """MiB of the server every `--sample` seconds, while 100 streams are predicted."""
    found: list[dict[str, float]] = []
    options = ("--batch", str(given.batch), "--wait-ms", "0", "--device", given.device)
    with server(given.model, f"{folder}/memory", *options, method=given.method) as started:
        url = started.url  # type: ignore[attr-defined]
        start = time.monotonic()
        clients, results = asking(url, 100, given, 60 * given.minutes)
        while results.empty() and clients.is_alive():
            time.sleep(max(0.0, start + given.sample * (len(found) + 1) - time.monotonic()))
            line = {
                "seconds": round(time.monotonic() - start, 1),
                "mebibytes": round(resident(started.pid), 1),
                "images": metric(url, "fata_images_total"),
            }
            found.append(line)
            print(line, flush=True)
        results.get(timeout=60)
        clients.join()
    return found


def many(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """So many streams on one server, a request each; then every tenth once more, from disk.

    At the end some hundred of them must have learned from what they were sent, no more and no less.
    """
    states = Path(folder) / "many"
    images = [batch.numpy() for batch in batches(8, given.batch, given.size)]
    options = ("--batch", str(given.batch), "--wait-ms", "0", "--deadline-ms", "60000")
    options += ("--in-memory", str(given.in_memory), "--device", given.device)
    rounds: list[dict[str, float]] = []
    with server(given.model, str(states), *options, method=given.method) as started:
        url = started.url  # type: ignore[attr-defined]
        before = resident(started.pid)
        with Client(url) as client:
            for step in (1, 10):
                start, latencies = time.monotonic(), list[float]()
                for stream in range(0, given.many, step):
                    now = time.monotonic()
                    client.predict(f"camera-{stream}", images[(stream + step) % 8])
                    latencies.append(time.monotonic() - now)
                    if len(latencies) % 500 == 0:
                        print(f"{len(latencies):,}: {resident(started.pid):.0f} MiB", flush=True)
                names = ("streams_in_memory", "state_reads_total", "state_writes_total")
                held, reads, writes = (metric(url, f"fata_{name}") for name in names)
                files = [path.stat().st_size for path in states.glob("*.safetensors")]
                line = {
                    "requests": len(latencies),
                    "seconds": time.monotonic() - start,
                    "median_ms": 1000 * median(latencies),
                    "p99_ms": 1000 * quantiles(latencies, n=100)[-1],
                    "mebibytes": resident(started.pid),
                    "in_memory": held,
                    "on_disk": len(files),
                    "kibibytes_a_state": sum(files) / max(1, len(files)) / 1024,
                    "reads": reads,
                    "writes": writes,
                }
                rounds.append({name: round(value, 1) for name, value in line.items()})
                print(rounds[-1], flush=True)
            for stream in range(0, given.many, max(1, given.many // 100 - 1)):
                learned, sent = client.stream(f"camera-{stream}")["batches"], 1 + (stream % 10 == 0)
                if learned != sent:
                    raise RuntimeError(f"camera-{stream} learned from {learned} batches of {sent}")
        stopping = time.monotonic()
    return {
        "streams": given.many,
        "mebibytes_before": round(before, 1),
        "rounds": rounds,
        "seconds_to_stop": round(time.monotonic() - stopping, 1),
        "states_after": len(list(states.glob("*.safetensors"))),
    }


def front_of(pid: int) -> int:
    """The HTTP process of a server."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def upload(url: str, number: int, kind: str, body: bytes, found: list[float]) -> None:
    """Send a body; notes the status of the answer."""
    one = HTTPConnection(url.rpartition("/")[2], timeout=600)
    try:
        path = f"/v1/streams/camera-{number}/predict"
        one.request("POST", path, body, {"Content-Type": kind})
        found.append(one.getresponse().status)
    except OSError:  # it was answered before it was sent
        found.append(0)
    finally:
        one.close()


def uploads(given: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """MiB of the HTTP process, at rest and at most, while so many send 31 MiB at once."""
    pixels = torch.zeros((31 << 20) // (12 * given.size**2), 3, given.size, given.size)
    file = io.BytesIO()
    Image.new("RGB", (given.size, given.size)).save(file, "JPEG")
    files = [file.getvalue().ljust((31 << 20) // 4, b"\0")] * 4
    options = ("--method", "source", "--max-images", "100000", "--device", given.device)
    found = []
    for name, images in (("tensor", pixels.numpy()), ("form", files)):
        kind, body = _body(images)
        with server(given.model, f"{folder}/{name}", *options, method="source") as started:
            front, status = front_of(started.pid), list[float]()
            before = peak(front)
            clients = [
                threading.Thread(target=upload, args=(started.url, n, kind, body, status))  # type: ignore[attr-defined]
                for n in range(given.uploads)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            line = {"body": name, "before": before, "most": peak(front), "after": resident(front)}
        found.append({**line, "status": dict(Counter(status))})
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini_resnet_gn")
    parser.add_argument("--method", default=METHOD)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 10, 100, 1000])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=int, default=0)
    parser.add_argument("--sample", type=float, default=30, help="seconds between two readings")
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: all they can")
    parser.add_argument("--many", type=int, default=0, help="streams that each send a few images")
    parser.add_argument("--in-memory", type=int, default=1000, help="of those streams, at most")
    parser.add_argument("--uploads", type=int, default=0, help="clients that send 31 MiB at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        about = {
            "settings": {k: str(v) for k, v in vars(given).items() if k != "record"},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
        }
        record = json.loads(given.record.read_text()) if given.record.exists() else {}
        if given.streams:
            record |= {**about, "throughput": throughput(given, folder)}
        if given.minutes:
            record["memory"] = {**about, "readings": memory(given, folder)}
        if given.many:
            record["many"] = {**about, **many(given, folder)}
        if given.uploads:
            record["uploads"] = {**about, "readings": uploads(given, folder)}
    given.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
