"""Every test runs on the CPU with one thread, so that two workers fit two cores and results repeat."""

import torch

torch.set_num_threads(1)
