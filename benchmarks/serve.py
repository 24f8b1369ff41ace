"""The service against the same adapters in one process: `python -m benchmarks.serve`.

A real server process and real HTTP clients in a process of their own. For each number of streams:
images a second of both, measured in turns in one run, and the clients' latency. With `--minutes`
the server's memory over that time. The record is written to `benchmarks/runs/serve.json`.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
from torch import Tensor

import fata
from fata.serve.client import Client
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
def server(model: str, folder: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`fata serve` in a process of its own; `.url` is where."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "fata", "serve", "--model", model]
    command += ["--method", METHOD, "--state-dir", folder, "--port", str(port)]
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
    """Clients, each with its own streams, for some seconds; latencies of the requests."""
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

    threads = [threading.Thread(target=work, args=(n,)) for n in range(given.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((latencies, time.monotonic() - start))


def served(url: str, streams: int, given: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Images a second over HTTP, and latencies in milliseconds."""
    results = multiprocessing.get_context("spawn").Queue()
    clients = multiprocessing.get_context("spawn").Process(
        target=ask, args=(url, streams, given, seconds, results)
    )
    clients.start()
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


def throughput(given: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """A line a number of streams."""
    loaded = fata.zoo.load(given.model)
    loaded.model.to(given.device)
    fields = loaded.settings(METHOD, given.batch)
    fleet = fata.Fleet(fata.adapt(loaded.model, METHOD, **fields), f"{folder}/alone", save_every=32)
    lines = []
    options = ("--batch", str(given.batch), "--wait-ms", "0", "--deadline-ms", "60000")
    with server(given.model, f"{folder}/served", *options, "--device", given.device) as started:
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


def memory(given: argparse.Namespace, folder: str) -> list[float]:
    """MiB of the server once a minute, under load."""
    found: list[float] = []
    options = ("--batch", str(given.batch), "--wait-ms", "0", "--device", given.device)
    with server(given.model, f"{folder}/memory", *options) as started:
        for minute in range(given.minutes + 1):
            served(started.url, 100, given, 5 if not minute else 60)  # type: ignore[attr-defined]
            found.append(resident(started.pid))
            print(f"minute {minute}: {found[-1]:.0f} MiB", flush=True)
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini_resnet_gn")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 10, 100, 1000])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        record = {
            "settings": {k: str(v) for k, v in vars(given).items() if k != "record"},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "throughput": throughput(given, folder) if given.streams else [],
            "memory": memory(given, folder) if given.minutes else [],
        }
    given.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
