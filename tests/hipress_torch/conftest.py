"""One torch thread: these tensors are small, and other tests run beside these."""

import torch

torch.set_num_threads(1)
