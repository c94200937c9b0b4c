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
from ._drift import moved
from ._emulate import Emulator
from ._errors import ConfigError, SpaceError, StateError
from ._finder import PolicyFinder, Setting
from ._generators import DEFAULT_GENERATORS, Generator
from ._inner import capture, numbers, restore
from ._options import TuneOptions
from ._policy import Policy
from ._replies import (
    averages_arrays,
    chain,
    reweight,
    weight_key,
    weights_matter,
)  # fmt: skip
from ._screen import Screen
from ._space import SearchSpace
from ._state import Saved, StateFolder
from ._survey import Survey
from ._task import ProxyTask
from ._tune import Progress
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
        objective: "personal" also tunes values for fine-tuning the finished model on each client.
            They go out with the evaluate messages, under the same keys.
        background: tune in a thread while rounds go on. Until it is done the first rounds follow
            untested rules, so results depend on how long tuning takes; it also shares torch's
            global random generator with the server app.
        budget: evaluations to spend on tuning.
        state_dir: folder that keeps policy, trials, clients, model and the inner strategy's
            state after every round. `start` on a folder that holds some goes on after its last
            round, without tuning again and without asking known clients again.
        seed: fixes tuning. The wrapper draws nothing from Python's or NumPy's global generators.
        policy: a ready policy, as `fedtune tune` writes; nothing is tuned then.
        personal: a ready policy for fine-tuning.
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
        personal: the policy for fine-tuning; None without one.
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
        objective: str = "global",
        mode: str = "policy",
        background: bool = False,
        budget: int = 48,
        state_dir: str | Path | None = None,
        seed: int = 0,
        policy: Policy | None = None,
        personal: Policy | None = None,
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
            ("personal", personal, Policy),
            ("options", options, TuneOptions),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}={value!r} must be a {kind.__name__} or None")
        check_whole("seed", seed, 0)
        check_number("profile_timeout_s", profile_timeout_s)
        check_bool("background", background)
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
        self.personal = personal
        self.clients = ClientTable()
        self.weight = self._check_weight(weight)
        self.options = replace(
            options or TuneOptions(),
            budget=budget,
            customize=customize,
            weight=self.weight,
            mode=mode,
            objective=objective,
        )
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
        self._survey = Survey(self.clients, self._arrays_key, profile_timeout_s)
        self._screen = Screen(self.clients, self._survey, self._weight_key)
        self._finder: PolicyFinder | None = None
        if self.space is not None:
            if proxy is not None and policy is None:
                proxy.check_space(self.space)
                self._emulator = Emulator(proxy, generators=generators, seed=seed)
            self._finder = PolicyFinder(
                self.space, self._emulator, tuner=tuner, options=self.options, seed=seed,
                progress=progress, background=background,
            )  # fmt: skip
        self._folder = self._open(state_dir)

    @property
    def report(self) -> "TuneReport | None":
        """What tuning did; None if nothing was tuned."""
        return None if self._finder is None else self._finder.report

    @property
    def quarantined(self) -> int:
        """Replies that were set aside."""
        return self._screen.quarantined

    def reprofile(self, node_ids: Iterable[int] | None = None) -> None:
        """Has clients asked for their metrics anew, the next time each is sampled.

        Args:
            node_ids: which; None for all. Clients whose number of examples has halved or doubled
                are asked anew by themselves.
        """
        for node_id in list(self.clients) if node_ids is None else node_ids:
            self.clients.row(node_id).stale = True

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
        if self._finder is not None:
            self._finder.provisional, self._finder.report = saved.provisional, saved.report
        if self.personal is None and saved.report is not None:
            self.personal = saved.report.personal
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
            self._finder is not None and self._finder.provisional,
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
        try:
            result = super().start(
                grid, arrays, left, timeout, train_config, evaluate_config, evaluate
            )
        finally:
            if self._finder is not None:
                self._finder.close()
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
        policy = self._find_policy(config, len(node_ids), len(list(grid.get_node_ids())))
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
        kept = self._screen.trained(
            server_round, replies, self._last_arrays, averages=averages_arrays(self.strategy)
        )
        if self.weight and self.policy is not None:
            self._reweight(kept, self.policy)
        arrays, metrics = self.strategy.aggregate_train(server_round, kept)
        if arrays is not None:
            self._last_arrays = arrays
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages; with a personal policy, each with its node's values."""
        server_round += self._offset
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        if self.personal is None:
            return messages
        messages = list(messages)
        for message in messages:
            row = self.clients.row(message.metadata.dst_node_id)
            key = config_key(message.content, self._config_key) or self._config_key
            values = self.personal.assign(row.metrics).values
            message.content = with_config(message.content, key, values)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The inner strategy's aggregate of sound replies; then the round's state is kept."""
        server_round += self._offset
        kept = self._screen.evaluated(server_round, replies)
        metrics = self.strategy.aggregate_evaluate(server_round, kept)
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
        again = [n for n in due if self.clients.row(n).metrics is not None]
        self._survey.ask(grid, due, self._reference_arrays(arrays), server_round)
        if again and self.report is not None and self._finder is not None:
            changed = moved(self.report.metrics, self.clients.reported())
            if changed:
                log.info("clients have changed in %s; tuning anew", ", ".join(changed))
                self._finder.changed = True

    def _reference_arrays(self, arrays: ArrayRecord) -> ArrayRecord:
        if self._emulator is None:
            return arrays
        if self._reference is None:
            self._reference = ArrayRecord(self._emulator.reference_model().state_dict())
        return self._reference

    def _find_policy(self, config: ConfigRecord, sampled: int, connected: int) -> Policy:
        assert self._finder is not None
        reported = self.clients.reported()
        rounds = self.proxy.rounds if self.proxy is not None and self.proxy.rounds else None
        setting = Setting(
            reported,
            config,
            rounds or min(self._num_rounds, _MOST_ROUNDS),
            min(1.0, sampled / max(1, connected)),
            sampled,
            lambda: self._warn_unanswered(len(reported)),
        )
        before = self._finder.report
        self.policy = self._finder.policy(self.policy, setting)
        if self._finder.report is not before and self._finder.report is not None:
            self.personal = self._finder.report.personal or self.personal
        return self.policy

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

    def _reweight(self, replies: Sequence[Message], policy: Policy) -> None:
        if policy.weight_exponent == 1.0 and not policy.customizes:
            return
        for reply in replies:
            if not reply.has_error():
                row = self.clients.row(reply.metadata.src_node_id)
                reweight(reply, self._weight_key, policy.weight_exponent, row.weight_factor)
