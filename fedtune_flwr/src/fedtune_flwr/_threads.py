"""How many threads emulation uses."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Limits torch's threads for a while, and restores them.

    Emulated models are small: splitting their operations over threads costs more than it saves,
    and on a busy machine the threads wait for each other (measured: 70 s of CPU instead of 9).
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
