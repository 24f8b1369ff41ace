"""Tests run in two processes on small networks: plain kernels on one thread are fastest there."""

import platform

import torch

torch.set_num_threads(1)
if platform.machine() == "aarch64":
    torch.backends.mkldnn.set_flags(False)
    torch.backends.nnpack.set_flags(False)  # Winograd convolutions are too coarse for the traces
