"""The program `fata`."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

# Modules that a command may lack, and the extra of `pip install` that has them.
EXTRAS = {
    **dict.fromkeys(("typer", "rich", "yaml", "plotly", "jinja2", "PIL"), "bench"),
    **dict.fromkeys(("timm", "torchvision"), "zoo"),
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "python_multipart"), "serve"),
    "ray": "ray",
}


def run() -> None:
    """Run a command. SIGTERM, as `timeout` and batch systems send it, ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        from fata.commands import LogHandler
        from fata.commands.app import app

        log = logging.getLogger("fata")
        log.setLevel(logging.INFO)
        log.addHandler(LogHandler())
        app(prog_name="fata")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(f"fata: this needs {missing}: pip install fata[{EXTRAS[missing]}]", file=sys.stderr)
        raise SystemExit(2) from None


def _as_ctrl_c(_: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # a job in the background ignores Ctrl-C, but not this
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)
