"""Peak memory of a cell, not of the process that ran others before it."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def reset_peak(device: torch.device) -> None:
    """Forget the peak of what ran before; on a CPU only Linux can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak(device: torch.device) -> int:
    """Peak bytes since then: of a GPU's tensors, or of this process with all that it holds."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = _PEAK.search(Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return 1024 * int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
