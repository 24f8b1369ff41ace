"""How PyTorch computes in the tests, and the browser they share.

Tests run in two processes on small networks: one thread each is fastest there. No test may depend
on how PyTorch computes: the variables FATA_TEST_* run the suite under other conditions.
"""

import logging
import os
import platform
import shutil
import sys

import pytest
import torch

torch.set_num_threads(int(os.environ.get("FATA_TEST_THREADS", "1")))
torch.backends.nnpack.set_flags(False)  # Winograd convolutions are too coarse for the traces
if platform.machine() == "aarch64" or os.environ.get("FATA_TEST_ONEDNN") == "0":
    torch.backends.mkldnn.set_flags(False)
if os.environ.get("FATA_TEST_FLUSH") == "1" and not torch.set_flush_denormal(True):
    sys.exit("FATA_TEST_FLUSH=1: this processor cannot flush denormal numbers to zero")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What starts a Ray cluster is slow, and so is the long list of architectures."""
    for item in items:
        if "cluster" in item.fixturenames or item.get_closest_marker("zoo"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def same_logs():
    """A command that a test runs in this process may change what fata logs, and where."""
    log = logging.getLogger("fata")
    level, propagates, handlers = log.level, log.propagate, log.handlers[:]
    yield
    log.setLevel(level)
    log.propagate, log.handlers[:] = propagates, handlers


@pytest.fixture(autouse=True)
def without_bfloat16():
    """Whether this CPU has a unit for it decides the default speed, which must not decide tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fata.engine.fast.bfloat16.has_bfloat16_products", lambda: False)
        yield


BROWSER_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browser_programs():
    """Where Chromium and its driver are; without them a skip, and in CI a failure."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = " and ".join(name for name, path in programs.items() if path is None)
    if missing:
        told = f"needs a browser: {missing} not found (apt-get install chromium chromium-driver)"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    return programs


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium without a window, driven by selenium; a test opens its own pages in it."""
    programs = browser_programs()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()
