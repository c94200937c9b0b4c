"""Finding the policy: before round 1, again when the clients have changed, in a thread if asked."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord

from ._emulate import Emulator
from ._errors import FedTuneError
from ._options import TuneOptions
from ._policy import Policy
from ._prior import prior_policy
from ._report import TuneReport
from ._space import SearchSpace
from ._tune import Progress, tune

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """What a search is told about the federation.

    Attributes:
        reported: metrics of the clients that answered.
        config: the strategy's own train config.
        rounds: rounds of an emulated federation.
        fraction: share of the clients that train in a round.
        sampled: how many that is.
        unanswered: says, for log and report, that too few clients answered.
    """

    reported: Sequence[dict[str, float]]
    config: ConfigRecord | dict[str, Any]
    rounds: int
    fraction: float
    sampled: int
    unanswered: Callable[[], str]


class _CancelledError(Exception):
    """Raised inside a search whose result nobody waits for."""


class PolicyFinder:
    """Finds a policy, and another one when it is told that the clients have changed.

    Args:
        space: hyperparameters.
        emulator: makes federations; None falls back on rules, with a warning.
        tuner: name of the tuner.
        options: budget and gate.
        seed: fixes the search.
        progress: called with a line now and then; None logs.
        background: search in a thread; until it is done, the rules or the last policy hold.

    Attributes:
        report: the last search's.
        provisional: the policy in use was found without metrics, or is held until a search ends.
        changed: a new search is wanted; set by the strategy.
    """

    def __init__(
        self,
        space: SearchSpace,
        emulator: Emulator | None,
        *,
        tuner: str,
        options: TuneOptions,
        seed: int,
        progress: Progress | None,
        background: bool,
    ) -> None:
        self.space = space
        self.emulator = emulator
        self.tuner = tuner
        self.options = options
        self.seed = seed
        self.progress = progress
        self.background = background
        self.report: TuneReport | None = None
        self.provisional = False
        self.changed = False
        self._thread: threading.Thread | None = None
        self._found: TuneReport | None = None
        self._cancelled = threading.Event()

    @property
    def searching(self) -> bool:
        """Whether a search runs in the background."""
        return self._thread is not None

    def policy(self, now: Policy | None, setting: Setting) -> Policy:
        """The policy for this round.

        Args:
            now: the one of the last round, None in the first.
            setting: the federation as it is now.
        """
        if self._thread is not None:
            if self._thread.is_alive() and now is not None:
                return now
            return self._collect(now, setting)
        wanted = now is None or self.changed or (self.provisional and len(setting.reported) >= 2)
        if not wanted:
            assert now is not None
            return now
        if self.emulator is None:
            log.warning("no proxy data: hyperparameters follow fixed rules that nothing has tested")
            self.provisional, self.changed = len(setting.reported) < 2, False
            return self._rules(setting)
        if self.background:
            return self._begin(now, setting)
        self.provisional, self.changed = len(setting.reported) < 2, False
        return self._use(self._search(setting, self.progress), now, setting)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for a search in the background; returns whether none is running any more."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Ends a search in the background, at its next step."""
        if self._thread is None:
            return
        self._cancelled.set()
        self._thread.join()
        self._thread = None
        self._cancelled.clear()

    def _begin(self, now: Policy | None, setting: Setting) -> Policy:
        self.provisional, self.changed = True, False

        def progress(line: str) -> None:
            if self._cancelled.is_set():
                raise _CancelledError
            (self.progress or log.info)(line)

        def work() -> None:
            try:
                self._found = self._search(setting, progress)
            except _CancelledError:
                log.info("tuning was ended before it was done")

        self._found = None
        self._thread = threading.Thread(target=work, name="fedtune-tuning", daemon=True)
        self._thread.start()
        return now or self._rules(setting)

    def _collect(self, now: Policy | None, setting: Setting) -> Policy:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        self.provisional = len(setting.reported) < 2
        return self._use(self._found, now, setting)

    def _use(self, report: TuneReport | None, now: Policy | None, setting: Setting) -> Policy:
        if report is None:
            return now or prior_policy(self.space, [], setting.config, weight=self.options.weight)
        self.report = report
        log.info("%s", report.summary())
        return report.policy

    def _rules(self, setting: Setting) -> Policy:
        return prior_policy(
            self.space, list(setting.reported), setting.config, weight=self.options.weight
        )

    def _search(self, setting: Setting, progress: Progress | None) -> TuneReport | None:
        """The report of a search; None, and an entry in the log, where it failed."""
        assert self.emulator is not None
        options = replace(self.options, rounds=setting.rounds, fraction=setting.fraction)
        reported = list(setting.reported)
        unanswered = None
        if len(reported) < 2:
            # Nobody reported: clients are taken to be alike, and one setting is tuned for all.
            unanswered = setting.unanswered()
            options = replace(options, customize=False)
            reported = [{}] * max(2, min(setting.sampled, 10))
        try:
            report = tune(
                self.space, self.emulator, reported, tuner=self.tuner, options=options,
                seed=self.seed, progress=progress,
            )  # fmt: skip
        except FedTuneError as error:
            log.error("tuning failed, training goes on: %s", error)
            return None
        if unanswered is not None:
            asked_for = report.notes if not self.options.customize else ()
            report = replace(report, notes=(unanswered, *asked_for))
        return report
