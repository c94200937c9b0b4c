"""Federations of virtual clients that look, by their metrics, like the real ones.

Proxy data is split three ways: a part trains the reference model, a part is what virtual clients
are drawn from, a part scores the emulated global model. The last two are drawn anew for every
emulation, and the reference part scores too: no emulated client ever trains on it. A bank of
virtual clients with random heterogeneity is measured by the same metric code as real clients;
each real client is stood in for by a near neighbour from the bank, drawn anew at its size.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ._checks import check_whole
from ._errors import ProxyError
from ._generators import DEFAULT_GENERATORS, Generator, label_mix
from ._metrics import NAMES, Scaler, as_matrix
from ._profile import Accumulator
from ._simulate import Emulation
from ._task import ProxyTask
from ._threads import intra_op_threads

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_SIZE = NAMES.index("log-size")


@dataclass(frozen=True)
class VirtualClient:
    """What defines a virtual client, apart from which examples it happens to hold.

    Attributes:
        mix_C: class probabilities before label noise.
        strengths: strength of each generator, in the emulator's order.
    """

    mix_C: np.ndarray
    strengths: tuple[float, ...]


class Emulator:
    """Makes emulated federations for a population of reported metrics.

    Args:
        task: proxy data and model.
        generators: kinds of heterogeneity a virtual client may have.
        bank: virtual clients to choose from.
        max_clients: an emulated federation has at most this many clients; larger populations
            are sampled.
        max_size: a virtual client holds at most this many examples.
        seed: fixes the split, the reference model, the bank and every emulation.

    Raises:
        ProxyError: a count is below 1, a generator is none, or the model cannot run on the proxy
            data.
    """

    def __init__(
        self,
        task: ProxyTask,
        *,
        generators: Sequence[Generator] = DEFAULT_GENERATORS,
        bank: int = 400,
        max_clients: int = 50,
        max_size: int = 512,
        seed: int = 0,
    ) -> None:
        for name, count in (("bank", bank), ("max_clients", max_clients), ("max_size", max_size)):
            check_whole(name, count, 1, ProxyError)
        check_whole("seed", seed, 0, ProxyError)
        for generator in generators if isinstance(generators, Sequence) else [generators]:
            if not all(callable(getattr(generator, n, None)) for n in ("draw", "apply")):
                raise ProxyError(
                    f"generators holds {generator!r}, which has no draw() and apply(); expected "
                    "objects like fedtune_flwr.LabelNoise()"
                )
        _check_model(task)
        self.task = task
        self.generators = tuple(generators)
        self.bank_size = bank
        self.max_clients = max_clients
        self.max_size = max_size
        self.seed = seed
        self._reference_index, self._rest = _stratified_split(task, seed)
        self._reference: torch.nn.Module | None = None
        self._bank: tuple[list[VirtualClient], np.ndarray] | None = None
        self._bank_sizes: tuple[int, ...] = ()

    def reference_model(self) -> "torch.nn.Module":
        """The model whose loss on a client's data is one of the metrics; trained once.

        Raises:
            ProxyError: it cannot be trained on the proxy data.
        """
        if self._reference is None:
            x, y = (part[self._reference_index] for part in self.task.data)
            with intra_op_threads(1):
                try:
                    self._reference = _train_reference(self.task, x, y, self.seed)
                except ProxyError:
                    raise
                except Exception as error:
                    raise ProxyError(
                        f"the model of model_fn cannot be trained on the proxy data: {error!r}"
                    ) from error
        return self._reference

    def measure(self, x: "torch.Tensor", y: "torch.Tensor") -> dict[str, float]:
        """The metrics a client holding these examples would report."""
        import torch

        accumulator = Accumulator(self.task.label_count)
        with torch.no_grad():
            accumulator.add(x, y, self.reference_model()(x))
        return accumulator.metrics()

    def emulate(
        self,
        metrics: Sequence[Mapping[str, float]],
        index: int,
        fraction: float = 1.0,
        *,
        held_out: int = 0,
    ) -> Emulation:
        """The emulated federation number `index` for clients that reported `metrics`.

        Args:
            metrics: one mapping a real client; missing numbers count as the median.
            index: each index gives other examples, another initial model and another order.
            fraction: share of the clients that train in a round.
            held_out: examples of its own kind to hold back for each client, drawn from the
                examples that score.

        Raises:
            ProxyError: no client.
        """
        import torch

        target_KM = as_matrix(metrics)
        if len(target_KM) == 0:
            raise ProxyError("metrics is empty; nothing to emulate")
        rng = np.random.default_rng((self.seed, 11, index))
        if len(target_KM) > self.max_clients:
            target_KM = target_KM[rng.permutation(len(target_KM))[: self.max_clients]]
        sizes = self._sizes(target_KM)
        matched = self._match(target_KM, sizes, rng)
        pool, validation = self._parts(rng)
        clients = [
            self.draw(virtual, size, rng, pool)
            for virtual, size in zip(matched, sizes.tolist(), strict=True)
        ]
        own_KM = as_matrix([self.measure(x, y) for x, y in clients])
        # A virtual client may hold fewer examples than the real one: its reported size is real.
        own_KM[:, _SIZE] = np.where(
            np.isfinite(target_KM[:, _SIZE]), target_KM[:, _SIZE], own_KM[:, _SIZE]
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**31)))
            model = self.task.model_fn()
        seed = int(rng.integers(2**31))
        # Drawn last: holding examples back leaves the federation as it was.
        own = [self.draw(v, held_out, rng, validation) for v in matched if held_out]
        return Emulation(
            tuple(x for x, _ in clients),
            tuple(y for _, y in clients),
            own_KM,
            self.task.data[0][validation],
            self.task.data[1][validation],
            {k: v.detach().clone() for k, v in model.state_dict().items()},
            max(1, min(len(clients), round(fraction * len(clients)))),
            seed,
            tuple(x for x, _ in own),
            tuple(y for _, y in own),
        )

    def draw(
        self,
        virtual: VirtualClient,
        size: int,
        rng: np.random.Generator,
        pool_index: "torch.Tensor",
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Examples of a virtual client: drawn from those of `pool_index`, then changed."""
        import torch

        x, y = (part[pool_index] for part in self.task.data)
        labels = y.numpy()
        pool = [np.flatnonzero(labels == c) for c in range(self.task.label_count)]
        wanted = rng.multinomial(size, virtual.mix_C)
        rows = np.concatenate(
            [
                # Without replacement while examples last: repeats teach less than new ones.
                rng.permutation(np.resize(rng.permutation(own), n)) if n else own[:0]
                for own, n in zip(pool, wanted.tolist(), strict=True)
            ]
        )
        index = torch.from_numpy(rng.permutation(rows))
        x, y = x[index], y[index]
        for generator, strength in zip(self.generators, virtual.strengths, strict=True):
            x, y = generator.apply(x, y, strength, self.task.label_count, rng)
        return x, y

    def _parts(self, rng: np.random.Generator) -> "tuple[torch.Tensor, torch.Tensor]":
        """What one emulation draws virtual clients from, and what scores it."""
        import torch

        pool: list[int] = []
        held = self._reference_index.tolist()
        for rows in self._rest:
            shuffled = rng.permutation(rows).tolist()
            cut = min(max(1, round(0.65 * len(shuffled))), len(shuffled) - 1)
            pool += shuffled[:cut]
            held += shuffled[cut:]
        return torch.tensor(pool), torch.tensor(held)

    def _sizes(self, target_KM: np.ndarray) -> np.ndarray:
        log_size = target_KM[:, _SIZE]
        known = log_size[np.isfinite(log_size)]
        filled = np.where(
            np.isfinite(log_size), log_size, np.median(known) if len(known) else np.log(64.0)
        )
        return np.clip(np.rint(np.exp(filled)), 2, self.max_size).astype(np.int64)

    def _match(
        self, target_KM: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
    ) -> list[VirtualClient]:
        virtual, bank_BM = self._measured_bank(sizes)
        # Scaled by the bank, whose spread is known, not by the clients, which may be alike.
        scaler = Scaler.fit(bank_BM)
        bank_z, target_z = scaler.transform(bank_BM), scaler.transform(target_KM)
        bank_z[:, _SIZE] = target_z[:, _SIZE] = 0.0
        distance_KB = np.linalg.norm(target_z[:, None] - bank_z[None], axis=2)
        nearest = np.argsort(distance_KB, axis=1, kind="stable")[:, :3]
        picks = rng.integers(0, nearest.shape[1], len(nearest))
        return [virtual[row[pick]] for row, pick in zip(nearest, picks, strict=True)]

    def _measured_bank(self, sizes: np.ndarray) -> tuple[list[VirtualClient], np.ndarray]:
        # Metrics of a sample depend on its size, so the bank is measured at the clients' sizes.
        wanted = tuple(sorted(set(sizes.tolist())))
        if self._bank is None or self._bank_sizes != wanted:
            rng = np.random.default_rng((self.seed, 12))
            pool, _ = self._parts(rng)
            virtual = [
                VirtualClient(
                    label_mix(self.task.label_count, rng),
                    tuple(g.draw(rng) for g in self.generators),
                )
                for _ in range(self.bank_size)
            ]
            rows = [
                self.measure(*self.draw(v, int(wanted[i % len(wanted)]), rng, pool))
                for i, v in enumerate(virtual)
            ]
            self._bank, self._bank_sizes = (virtual, as_matrix(rows)), wanted
        return self._bank


def _stratified_split(task: ProxyTask, seed: int) -> "tuple[torch.Tensor, list[np.ndarray]]":
    """Indices of the reference part, a third of each class, and the other two thirds by class."""
    import torch

    rng = np.random.default_rng((seed, 10))
    reference: list[int] = []
    rest: list[np.ndarray] = []
    labels = task.data[1].numpy()
    for label in range(task.label_count):
        rows = rng.permutation(np.flatnonzero(labels == label))
        first = max(1, min(round(len(rows) / 3), len(rows) - 2))
        reference.extend(rows[:first].tolist())
        rest.append(rows[first:])
    return torch.tensor(reference), rest


def _check_model(task: ProxyTask) -> None:
    """One small batch through a fresh model: better refused here than in the first round."""
    import torch

    x = task.data[0][:2]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = task.model_fn()
            # Evaluation mode, since batch normalisation cannot train on so few examples.
            logits = model.eval()(x) if isinstance(model, torch.nn.Module) else None
    except Exception as error:
        raise ProxyError(
            f"the model of model_fn cannot run on proxy inputs of shape {tuple(x.shape[1:])}: "
            f"{error!r}"
        ) from error
    if logits is None:
        raise ProxyError(
            f"model_fn returned a {type(model).__name__}; expected a fresh torch.nn.Module"
        )
    shape = tuple(getattr(logits, "shape", ()))
    if shape != (len(x), task.label_count):
        raise ProxyError(
            f"the model of model_fn returned shape {shape} for {len(x)} examples; expected "
            f"{(len(x), task.label_count)}: one output a class of the proxy data"
        )


def _train_reference(
    task: ProxyTask, x: "torch.Tensor", y: "torch.Tensor", seed: int
) -> "torch.nn.Module":
    import torch

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        model = task.model_fn()
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
        # The same number of examples whatever the size of the proxy, within reason.
        steps = max(150, min(1500, 20 * -(-len(y) // 32)))
        for _ in range(steps):
            index = torch.randint(len(y), (min(32, len(y)),))
            loss = torch.nn.functional.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.eval()
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise ProxyError("the reference model diverged on the proxy data; scale the inputs")
    return model
