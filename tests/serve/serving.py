"""A small service for the tests, in this process or in another one."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs fata[serve]")
pytest.importorskip("httpx", reason="the test client of fastapi needs it")

from PIL import Image
from starlette.testclient import TestClient

import fata
from fata.serve.exported import Exported
from fata.serve.front import http_server
from fata.serve.scheduler import Gathering
from fata.serve.service import Service
from fata.testing.cases import images, network
from fata.zoo.loaded import Loaded, Weights
from fata.zoo.preprocess import Preprocess

ROOT = Path(__file__).parents[2]
NAMES = tuple("abcdefghij")
PREPROCESS = Preprocess(16, 16, "bilinear", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
NOW = Gathering(batch=4, wait=0.0, deadline=60.0, handed=0.2)


def adapter(net="resnet_gn", spec="tent+fata", lr=0.05, **fields):
    return fata.adapt(network(net), spec, lr=lr, seed=3, **fields)


def pixels(count, seed=1):
    """Images in [0, 1]."""
    return images(count, seed=seed).sigmoid()


def npy(tensor):
    file = io.BytesIO()
    np.save(file, np.asarray(tensor))
    return file.getvalue()


def jpeg(size=(16, 16), kind="JPEG", seed=0):
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def service(folder=None, gathering=NOW, limits=None, net="resnet_gn", fleet=None, **options):
    adapted = adapter(net)
    loaded = Loaded(
        net, adapted.model, PREPROCESS, 10, Weights("tiny", "here", "0" * 32), labels=NAMES
    )
    made = fata.Fleet(adapted, folder, **(fleet or {}))
    return Service(loaded, made, gathering, limits, **options)


@contextlib.contextmanager
def linked(made, tokens=(), **options):
    """The HTTP server of a service, both in this process."""
    ours, theirs = socket.socketpair()
    exported = Exported(made, tokens, ours)
    try:
        yield http_server(theirs, **options)
    finally:
        exported.close()
        theirs.close()
        made.close()


@contextlib.contextmanager
def client(tokens=(), **options):
    """A client of a service in this process; `.service` is the service."""
    made = service(**options)
    with (
        linked(made, tokens) as server,
        TestClient(server.config.app, raise_server_exceptions=False) as one,
    ):
        one.service = made
        yield one


def predict(one, stream, tensor, **headers):
    return one.post(
        f"/v1/streams/{stream}/predict?top=10",
        content=npy(tensor),
        headers={"content-type": "application/x-npy", **headers},
    )


def probabilities(found):
    """The probabilities of each row, by class."""
    rows = []
    for image in found["predictions"]:
        by_class = {guess["label"]: guess["probability"] for guess in image["top"]}
        rows.append([by_class[c] for c in range(10)])
    return rows


def expected(batches, **given):
    """What one adapter alone predicts."""
    alone = adapter(**given)
    return [alone(batch).softmax(1).tolist() for batch in batches]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def process(folder, *options, port=None, model="mini_resnet_gn"):
    """`fata serve` in a process of its own; killed at the end if it still runs."""
    port = port or free_port()
    command = [sys.executable, "-W", "ignore", "-m", "fata", "serve", "--model", model]
    command += ["--state-dir", str(folder), "--port", str(port), "--method", "tent+fata"]
    command += ["--speed", "exact", *options]  # on every processor
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT
    ) as started:
        started.url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(started)
            yield started
        finally:
            if started.poll() is None:
                started.send_signal(signal.SIGKILL)
            started.stdout.close()


def wait_until_ready(started):
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with contextlib.suppress(URLError, ConnectionError), urlopen(f"{started.url}/readyz"):
            return
        if started.poll() is not None:
            raise AssertionError(started.stdout.read())
        time.sleep(0.1)
    raise AssertionError("the service did not start")
