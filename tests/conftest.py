"""Tests run in two processes on small networks: plain kernels on one thread are fastest there."""

import torch

torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)
torch.backends.nnpack.set_flags(False)  # its Winograd convolutions are too coarse for the traces
