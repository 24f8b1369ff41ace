"""Small networks are fastest on one thread; two test processes use two cores."""

import torch

torch.set_num_threads(1)
