"""A small problem, client apps for it and a proxy task, shared by the tests."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedtune_flwr import ProxyTask, fedtune_client, hparams, profile

FEATURES, CLASSES = 6, 3


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES)
    )


@functools.cache
def blobs(seed: int, size: int, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three Gaussian blobs; a share of the labels is drawn anew."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(0, 1.6, (CLASSES, FEATURES))
    y = np.arange(size) % CLASSES
    x = centres[y] + rng.normal(0, 1.0, (size, FEATURES))
    y = np.where(rng.random(size) < noise, rng.integers(0, CLASSES, size), y)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def proxy(size: int = 180, **fields: Any) -> ProxyTask:
    return ProxyTask(new_model, data=blobs(99, size), defaults={"batch-size": 8}, **fields)


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def client_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the clients have mostly random labels."""
    k = partition(context)
    return blobs(k, 40 + 2 * k, 0.0 if k % 2 == 0 else 0.9)


def loaded(message: Message) -> torch.nn.Module:
    model = new_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model


def profile_fn(message: Message, context: Context) -> Mapping[str, float]:
    return profile([client_data(context)], loaded(message))


def train(message: Message, context: Context) -> Message:
    """SGD with what the config says; deterministic, and says what it applied."""
    hp = hparams(message, {"lr": 0.1, "local-epochs": 1})
    x, y = client_data(context)
    model = loaded(message)
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr)
    for _ in range(hp.local_epochs):
        for rows in torch.arange(len(y)).split(8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(y), "partition": partition(context)})
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": metrics,
        "fedtune.applied": hp.echo(),
    }
    return Message(RecordDict(content), reply_to=message)


def evaluate(message: Message, context: Context) -> Message:
    x, y = client_data(context)
    with torch.no_grad():
        right = float((loaded(message)(x).argmax(dim=1) == y).float().mean())
    metrics = MetricRecord({"num-examples": len(y), "accuracy": right})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def app(train_fn: Callable[[Message, Context], Message] = train, queries: bool = True) -> ClientApp:
    made = ClientApp()
    made.train()(train_fn)
    made.evaluate()(evaluate)
    return fedtune_client(made, profile_fn) if queries else made


def initial_arrays(seed: int = 3) -> ArrayRecord:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ArrayRecord(new_model().state_dict())


def accuracy(_: int, arrays: ArrayRecord) -> MetricRecord:
    model = new_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = blobs(1234, 300)
    with torch.no_grad():
        right = model(x).argmax(dim=1) == y
    return MetricRecord({"accuracy": float(right.double().mean())})


@contextmanager
def seeded_sampling(seed: int = 0) -> Iterator[None]:
    """Flower samples nodes, and adds noise, from the global generators."""
    import random

    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def replaced(message: Message, context: Context, **arrays: np.ndarray) -> Message:
    """What `train` replies, with some arrays replaced."""
    reply = train(message, context)
    record = reply.content.array_records["arrays"]
    for name, value in arrays.items():
        record[name.replace("__", ".")] = Array(value)
    return reply
