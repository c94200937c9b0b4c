from collections.abc import Iterator

import pytest
import torch

from fedtune_flwr.testing import task_identity


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with task_identity():
        yield
