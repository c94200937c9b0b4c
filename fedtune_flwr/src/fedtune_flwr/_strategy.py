"""`FedTune`: a strategy around a strategy that gives every client its own hyperparameters."""

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ._checks import check_bool, check_number, check_whole
from ._clients import ClientTable
from ._emulate import Emulator
from ._errors import ConfigError, FedTuneError, SpaceError, StateError
from ._generators import DEFAULT_GENERATORS, Generator
from ._inner import capture, numbers, restore
from ._policy import Policy
from ._prior import prior_policy
from ._replies import (
    averages_arrays,
    chain,
    fault,
    mismatch,
    odd_ones,
    reweight,
    take_own,
    weight_key,
    weights_matter,
)  # fmt: skip
from ._space import SearchSpace
from ._state import Saved, StateFolder
from ._survey import Survey
from ._task import ProxyTask
from ._tune import Progress, TuneOptions, tune
from ._wire import config_key, with_config

if TYPE_CHECKING:
    from ._report import TuneReport

log = logging.getLogger(__name__)

# Emulated federations are at most this long; settings rank alike well before convergence.
_MOST_ROUNDS = 20
# More reports than this tell the tuner nothing new.
_MOST_PROFILED = 2000


class FedTune(Strategy):
    """Any Flower strategy, with per-client hyperparameters tuned on the server.

    Before its first round the wrapper asks every connected node for at most six numbers about its
    data (one forward pass, once), emulates clients like them on proxy data, and tunes a policy
    from those numbers to hyperparameters. In every round the inner strategy samples and builds
    its messages; the wrapper rebuilds each with the node's own values under the plain keys of the
    space, sharing the arrays. Replies with non-finite arrays or weights are set aside; the rest
    go to the inner strategy. It must be outermost: `FedTune(DifferentialPrivacy...(FedAvg()))`.

    With neither space nor policy nothing is customized and every call passes straight through.

    The emulated federation averages as FedAvg does, whatever the inner strategy is.

    Args:
        strategy: the strategy that samples and aggregates.
        space: hyperparameters to tune, by the keys clients read; None customizes nothing.
        proxy: proxy data and model; None falls back on rules, with a warning.
        tuner: a name in `fedtune_flwr.tuners.available()`.
        mode: "policy" steers values by metrics; "groups" clusters the clients by their metrics
            and gives each group its own values.
        budget: evaluations to spend on tuning.
        state_dir: folder that keeps policy, trials, clients, model and the inner strategy's
            state after every round. `start` on a folder that holds some goes on after its last
            round, without tuning again and without asking known clients again.
        seed: fixes tuning. The wrapper draws nothing from Python's or NumPy's global generators.
        policy: a ready policy, as `fedtune tune` writes; nothing is tuned then.
        customize: False tunes one setting for all clients.
        weight: whether aggregation weights may be tuned; None decides by the inner strategy.
            Refused under differential-privacy wrappers.
        generators: kinds of heterogeneity the emulator knows.
        options: all further settings of the search; `mode`, `budget` and `customize` above
            override it.
        profile_timeout_s: seconds to wait for the answers to the profile query.
        progress: called with a line now and then while tuning; None logs.

    Attributes:
        strategy: the inner strategy.
        policy: the policy in use; None before the first round.
        report: what tuning did; None if nothing was tuned.
        clients: a row a node: metrics, values, failures.

    Raises:
        ConfigError: an argument is not usable, or the wrapper is not outermost.
        SpaceError: the space names a metric that does not exist, or differs from the policy's.
        ProxyError: the proxy would ignore a hyperparameter of the space.
        UnknownTunerError: no tuner of that name.
        StateError: `state_dir` is damaged, or was written for another space or strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        space: SearchSpace | None = None,
        proxy: ProxyTask | None = None,
        *,
        tuner: str = "bayes",
        mode: str = "policy",
        budget: int = 48,
        state_dir: str | Path | None = None,
        seed: int = 0,
        policy: Policy | None = None,
        customize: bool = True,
        weight: bool | None = None,
        generators: Sequence[Generator] = DEFAULT_GENERATORS,
        options: TuneOptions | None = None,
        profile_timeout_s: float = 60.0,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigError(
                f"strategy is a {type(strategy).__name__}; expected a "
                "flwr.serverapp.strategy.Strategy such as FedAvg()"
            )
        if any(isinstance(each, FedTune) for each in chain(strategy)):
            raise ConfigError("strategy already contains a FedTune; wrap once, outermost")
        for name, value, kind in (
            ("space", space, SearchSpace),
            ("proxy", proxy, ProxyTask),
            ("policy", policy, Policy),
            ("options", options, TuneOptions),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r} must be a {kind.__name__} or None")
        check_whole("seed", seed, 0)
        check_number("profile_timeout_s", profile_timeout_s)
        if weight is not None:
            check_bool("weight", weight)
        if policy is not None and space is not None and policy.space != space:
            raise SpaceError(f"policy was tuned for {policy.space}, not for space={space}")
        if not profile_timeout_s > 0:
            raise ConfigError(f"profile_timeout_s={profile_timeout_s!r} must be above 0")
        from . import tuners

        tuners.get(tuner)
        self.strategy = strategy
        self.space = policy.space if policy is not None else space
        self.proxy = proxy
        self.tuner = tuner
        self.seed = seed
        self.policy = policy
        self.report: TuneReport | None = None
        self.clients = ClientTable()
        self.quarantined = 0
        self.weight = self._check_weight(weight)
        self.options = replace(
            options or TuneOptions(),
            budget=budget,
            customize=customize,
            weight=self.weight,
            mode=mode,
        )
        self.progress = progress
        # Set while the policy was found without metrics, to be replaced when some arrive.
        self._provisional = False
        self._weight_key = weight_key(strategy)
        self._num_rounds = _MOST_ROUNDS
        self._surveyed = False
        self._assigned_by: Policy | None = None
        self._emulator: Emulator | None = None
        self._reference: ArrayRecord | None = None
        innermost = chain(strategy)[-1]
        self._arrays_key = str(getattr(innermost, "arrayrecord_key", "arrays"))
        self._config_key = str(getattr(innermost, "configrecord_key", "config"))
        self._last_arrays: ArrayRecord | None = None
        self._offset = 0
        self._inner_numbers = numbers(chain(strategy))
        self._folder = self._open(state_dir)
        self._survey = Survey(self.clients, self._arrays_key, profile_timeout_s)
        if proxy is not None and self.space is not None and policy is None:
            proxy.check_space(self.space)
            self._emulator = Emulator(proxy, generators=generators, seed=seed)

    def _open(self, state_dir: str | Path | None) -> StateFolder | None:
        if state_dir is None:
            return None
        if self.space is None:
            raise ConfigError("state_dir needs a space or a policy; there is no state without")
        if any(getattr(each, "accountant", None) is not None for each in chain(self.strategy)):
            raise ConfigError(
                "state_dir cannot keep what a privacy accountant has spent; a resumed run would "
                "start from zero. Keep the accountant yourself, and leave state_dir out"
            )
        settings = {
            "strategies": [type(each).__name__ for each in chain(self.strategy)],
            "seed": self.seed,
        }
        folder = StateFolder(state_dir, self.space, settings)
        saved = folder.load()
        if saved is not None:
            self._resume(saved)
        return folder

    def _resume(self, saved: Saved) -> None:
        try:
            restore(chain(self.strategy), saved.inner, saved.inner_arrays)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise StateError(f"the inner strategy's state is damaged: {error!r}") from error
        if saved.sampling is not None:
            try:
                version, internal, gauss = saved.sampling
                random.setstate((version, tuple(internal), gauss))
            except (ValueError, TypeError, OverflowError) as error:
                raise StateError(f"the sampling state is damaged: {error!r}") from error
        self._offset = saved.server_round
        self.policy = self.policy or saved.policy
        self._provisional = saved.provisional
        self.report = saved.report
        self.clients.update({row.node_id: row for row in saved.rows})
        self._assigned_by = self.policy if self.policy == saved.policy else None
        self._surveyed = bool(saved.rows)
        self._last_arrays = saved.arrays
        log.info("resumed after round %d with %d known clients", self._offset, len(saved.rows))

    def _save(self, server_round: int) -> None:
        if self._folder is None:
            return
        manifest, arrays = capture(chain(self.strategy), self._inner_numbers)
        state = Saved(
            server_round,
            self.policy,
            self._provisional,
            self.report,
            list(self.clients.values()),
            self._last_arrays,
            manifest,
            arrays,
            random.getstate(),
        )
        try:
            self._folder.save(state)
        except StateError as error:
            # Training is worth more than its record; a full disk must not end it.
            log.error("%s", error)

    def _check_weight(self, weight: bool | None) -> bool:
        effective = weights_matter(self.strategy)
        if weight and not effective:
            names = " around ".join(type(each).__name__ for each in chain(self.strategy))
            raise ConfigError(
                f"weight=True, but {names} either needs equal weights (differential privacy) or "
                "does not average by weight; use weight=None"
            )
        return effective if weight is None else weight

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not the wrapper's own, such as `privacy_spent`.
        if name == "strategy" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Runs the federation, as `Strategy.start`, or the rest of it after a resume.

        With a state of r rounds, rounds r + 1 to `num_rounds` are run from the saved model;
        `initial_arrays` is not used then, and the result holds those rounds only.
        """
        self._num_rounds = num_rounds
        done = self._offset
        arrays = initial_arrays if self._last_arrays is None else self._last_arrays
        evaluate = evaluate_fn
        if done and evaluate_fn is not None:
            given = evaluate_fn

            def evaluate(server_round: int, model: ArrayRecord) -> MetricRecord | None:
                return given(server_round + done, model)

        left = max(0, num_rounds - done)
        result = super().start(grid, arrays, left, timeout, train_config, evaluate_config, evaluate)
        if not left:
            result.arrays = arrays
        for kind in (
            "train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp",
        ):  # fmt: skip
            by_round = getattr(result, kind)
            setattr(result, kind, {number + done: value for number, value in by_round.items()})
        # A second call starts over, as it does with every strategy.
        self._offset, self._last_arrays = 0, None
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages, each with its node's own hyperparameters."""
        server_round += self._offset
        self._last_arrays = arrays
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if self.space is None or not messages:
            return messages
        node_ids = [message.metadata.dst_node_id for message in messages]
        self._profile(grid, node_ids, arrays, server_round)
        policy = self._ensure_policy(config, len(node_ids), len(list(grid.get_node_ids())))
        self._assign(policy, node_ids)
        for message in messages:
            row = self.clients[message.metadata.dst_node_id]
            row.rounds += 1
            extra = dict(row.values)
            if row.by_mod:
                extra |= self._survey.request_by_mod(self._reference_arrays(arrays))  # type: ignore[arg-type]
            key = config_key(message.content, self._config_key) or self._config_key
            message.content = with_config(message.content, key, extra)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's aggregate of the replies that are sound."""
        server_round += self._offset
        kept: list[Message] = []
        quarantined = self.quarantined
        for reply in replies:
            node_id = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("round %d: node %d failed: %s", server_round, node_id, reply.error)
                kept.append(reply)
                continue
            self._read_own(reply)
            problem = fault(reply.content, self._weight_key)
            if problem is not None:
                self._set_aside(server_round, node_id, problem)
                continue
            kept.append(reply)
        if averages_arrays(self.strategy):
            kept = self._without_odd_ones(server_round, kept)
        if self.weight and self.policy is not None:
            self._reweight(kept, self.policy)
        if all(reply.has_error() for reply in kept):
            log.error(
                "round %d: no client returned a usable reply (%d failed, %d set aside); "
                "the model stays as it was",
                server_round, len(kept), self.quarantined - quarantined,
            )  # fmt: skip
        arrays, metrics = self.strategy.aggregate_train(server_round, kept)
        if arrays is not None:
            self._last_arrays = arrays
        return arrays, metrics

    def _without_odd_ones(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Replies, errors included, less those that cannot be averaged with the others."""
        sound = [reply for reply in replies if not reply.has_error()]
        problems = odd_ones([r.content for r in sound], self._weight_key, self._last_arrays)
        odd = {id(r): p for r, p in zip(sound, problems, strict=True) if p is not None}
        for reply in sound:
            if id(reply) in odd:
                self._set_aside(server_round, reply.metadata.src_node_id, odd[id(reply)])
        return [reply for reply in replies if id(reply) not in odd]

    def _set_aside(self, server_round: int, node_id: int, problem: str) -> None:
        self.quarantined += 1
        self.clients.row(node_id).quarantined += 1
        log.warning("round %d: reply of node %d set aside: %s", server_round, node_id, problem)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages."""
        server_round += self._offset
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The inner strategy's aggregate; the round is finished then, and its state kept."""
        server_round += self._offset
        metrics = self.strategy.aggregate_evaluate(server_round, replies)
        self._save(server_round)
        return metrics

    def summary(self) -> None:
        """Logs the settings of the wrapper and of the inner strategy."""
        log.info(
            "FedTune: space %s, tuner %r, budget %d", self.space, self.tuner, self.options.budget
        )
        self.strategy.summary()

    def _profile(
        self, grid: Grid, node_ids: Sequence[int], arrays: ArrayRecord, server_round: int
    ) -> None:
        wanted = list(node_ids)
        if not self._surveyed:
            # The whole population says what "usual" is; a sample of it would do so less well.
            self._surveyed = True
            others = sorted(set(grid.get_node_ids()) - set(wanted))
            rng = np.random.default_rng((self.seed, 31))
            wanted += [others[i] for i in rng.permutation(len(others))[:_MOST_PROFILED]]
        due = self._survey.due(wanted, server_round)
        self._survey.ask(grid, due, self._reference_arrays(arrays), server_round)

    def _reference_arrays(self, arrays: ArrayRecord) -> ArrayRecord:
        if self._emulator is None:
            return arrays
        if self._reference is None:
            self._reference = ArrayRecord(self._emulator.reference_model().state_dict())
        return self._reference

    def _ensure_policy(self, config: ConfigRecord, sampled: int, connected: int) -> Policy:
        reported = self.clients.reported()
        if self.policy is None or (self._provisional and len(reported) >= 2):
            self.policy = self._find_policy(config, reported, sampled, connected)
        assert self.policy is not None
        return self.policy

    def _find_policy(
        self,
        config: ConfigRecord,
        reported: list[dict[str, float]],
        sampled: int,
        connected: int,
    ) -> Policy:
        assert self.space is not None
        self._provisional = len(reported) < 2
        unanswered = self._warn_unanswered(len(reported)) if self._provisional else None
        if self._emulator is None:
            log.warning("no proxy data: hyperparameters follow fixed rules that nothing has tested")
            return prior_policy(self.space, reported, config, weight=self.weight)
        rounds = self.proxy.rounds if self.proxy is not None and self.proxy.rounds else None
        options = replace(
            self.options,
            rounds=rounds or min(self._num_rounds, _MOST_ROUNDS),
            fraction=min(1.0, sampled / max(1, connected)),
        )
        if len(reported) < 2:
            # Nobody reported: clients are taken to be alike, and one setting is tuned for all.
            options = replace(options, customize=False)
            reported = [{}] * max(2, min(sampled, 10))
        try:
            self.report = tune(
                self.space, self._emulator, reported, tuner=self.tuner, options=options,
                seed=self.seed, progress=self.progress,
            )  # fmt: skip
        except FedTuneError as error:
            log.error("tuning failed, training goes on: %s", error)
            return self.policy or prior_policy(self.space, [], config, weight=self.weight)
        if unanswered is not None:
            asked_for = self.report.notes if not self.options.customize else ()
            self.report = replace(self.report, notes=(unanswered, *asked_for))
        log.info("%s", self.report.summary())
        return self.report.policy

    def _warn_unanswered(self, answered: int) -> str:
        """Says, for the log and for the report, that tuning lacks what it is made for."""
        said = (
            f"{answered} of {len(self.clients)} clients answered the query; "
            "tuned for clients taken to be alike"
        )
        log.warning("%s. First failure: %s", said, self._survey.first_failure or "none")
        return said

    def _assign(self, policy: Policy, node_ids: Sequence[int]) -> None:
        if policy is not self._assigned_by:
            self._assigned_by = policy
            self.clients.assign(policy, list(self.clients))
        # Nodes that reported since, or are new.
        self.clients.assign(policy, [n for n in node_ids if not self.clients.row(n).values])

    def _read_own(self, reply: Message) -> None:
        metrics, applied = take_own(reply.content)
        row = self.clients.row(reply.metadata.src_node_id)
        if metrics is not None:
            self._survey.accept(row, metrics)
            row.values = {} if self._assigned_by is not None else row.values
        if applied is not None and row.values:
            problem = mismatch(row.values, dict(applied.items()))
            if problem is not None:
                row.mismatches += 1
                log.warning("node %d did not apply what it was sent: %s", row.node_id, problem)

    def _reweight(self, replies: Sequence[Message], policy: Policy) -> None:
        if policy.weight_exponent == 1.0 and not policy.customizes:
            return
        for reply in replies:
            if not reply.has_error():
                row = self.clients.row(reply.metadata.src_node_id)
                reweight(reply, self._weight_key, policy.weight_exponent, row.weight_factor)
