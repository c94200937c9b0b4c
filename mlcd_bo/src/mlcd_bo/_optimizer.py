"""The search itself: ask for a trial, tell its outcome, recommend; or `run` it all."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np

from ._check import positive_int, real, whole
from ._errors import (
    InvalidInput,
    NoFeasibleDeployment,
    NothingObserved,
    ProfilingFailed,
    StoreError,
)
from ._evidence import Evidence
from ._explain import estimate_of, nothing_left, reason_for
from ._job import Job
from ._ledger import Ledger, Lost
from ._model import PlainModel, ScalingModel
from ._prior import MODEL_NOISE
from ._recommendation import Recommendation, counted
from ._scenario import Scenario
from ._situation import Situation
from ._space import Deployment, SearchSpace
from ._store import Store, in_order, same_space, search_fields, sound, space_of
from ._strategies import strategy_named
from ._transfer import EarlierJob, TransferModel
from ._trial import Limits, Profiler, Trial, TrialCost
from ._trial_loop import Outcome, kept_alive, run_batch

# A recommendation less likely than this to keep the limit is reported as none at all.
_LEAST_CHANCE = 0.3
_FAILURES_IN_A_ROW = 2


class DeploymentOptimizer:
    """Finds where to run a training job, counting what finding it costs.

    Args:
        space: the deployments to choose from.
        scenario: what to minimise and which limit to keep, exploration included.
        job: how much work there is.
        strategy: ``"gittins"`` (see `mlcd_bo.strategies` for the names).
        seed: for strategies that draw by chance.
        store: a file in which everything is kept as it happens, to `resume` from.
        earlier: searches of other jobs (or the stores they are kept in), whose curves are used
            as far as they fit (strategies on the scaling model only).
        trial_cost: most seconds a trial of a deployment may last; `run` takes the profiler's
            own `trial_seconds` where it has one.

    Raises:
        InvalidInput: an argument is of the wrong kind, or a limit is below the cheapest trial.
        UnknownName: no such strategy.
        StoreError: the store cannot be used, or holds another search.

    Example:
        >>> import mlcd_bo as mlcd
        >>> types = [mlcd.InstanceType("small", 0.1), mlcd.InstanceType("big", 0.4)]
        >>> space = mlcd.SearchSpace(mlcd.Catalog(types), counts=[1, 2, 4])
        >>> search = mlcd.DeploymentOptimizer(
        ...     space, mlcd.Scenario.cheapest_by(deadline=10.0), mlcd.Job(total_samples=1e6)
        ... )
        >>> print(search.ask()[0])
        small x1
    """

    def __init__(
        self,
        space: SearchSpace,
        scenario: Scenario,
        job: Job,
        strategy: str = "gittins",
        seed: int = 0,
        store: str | PathLike[str] | None = None,
        *,
        earlier: "Sequence[DeploymentOptimizer | EarlierJob | str | PathLike[str]]" = (),
        trial_cost: Callable[[Deployment], float] | None = None,
    ) -> None:
        for name, value, kind in (
            ("space", space, SearchSpace),
            ("scenario", scenario, Scenario),
            ("job", job, Job),
        ):
            if not isinstance(value, kind):
                raise InvalidInput(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        self.space = space
        self.scenario = scenario
        self.job = job
        self.strategy = strategy
        self.seed = whole("seed", seed)
        self.trials: list[Trial] = []
        self._decider = strategy_named(strategy)
        if isinstance(earlier, str | PathLike) or not isinstance(earlier, Iterable):
            raise InvalidInput(
                f"earlier must be a list of searches or of their stores, got {earlier!r}"
            )
        self._earlier = [_earlier(job) for job in earlier]
        self._model = PlainModel(space) if self._decider.model == "plain" else ScalingModel(space)
        if self._earlier and self._decider.model == "scaling":
            self._model = TransferModel(space, self._earlier)
        self._rate = np.array([d.price_per_hour for d in space])
        self._count = np.array([d.count for d in space])
        self._stop_reason = ""
        self._lost: list[Lost] = []
        self._plan_trials(trial_cost or TrialCost())
        if trial_cost is not None:
            self._check_limits()
        self._store = None if store is None else Store(store, create=True)
        if self._store is not None:
            self._store.begin(
                search_fields(space, scenario, job, strategy, self.seed, self._earlier)
            )
            if self._store.begun():
                raise StoreError(
                    f"store {str(store)!r} already holds trials of this search; go on with them "
                    "by `mlcd resume` or DeploymentOptimizer.resume(store), or give another path"
                )

    @classmethod
    def resume(
        cls,
        store: str | PathLike[str],
        space: SearchSpace | None = None,
        *,
        accept_prices: bool = False,
        trial_cost: Callable[[Deployment], float] | None = None,
    ) -> "DeploymentOptimizer":
        """Returns the search kept in `store`, ready for the same next `ask`.

        A trial that was under way when its process died is charged for as long as it is known
        to have run, and may be tried again.

        Args:
            store: the file given as `store` when the search was begun.
            space: today's search space; None takes the kept one.
            accept_prices: go on although prices or sizes in `space` are not the kept ones;
                trials keep what they cost.
            trial_cost: as in the constructor; it is not kept.

        Raises:
            StoreError: there is no search in it, it cannot be read, or another process is still
                running the search.
            CatalogChanged: `space` is not the kept one.
        """
        search = cls._load(store, space, accept_prices, trial_cost)
        assert search._store is not None
        search._store.close_running(search._rate.tolist())
        search._lost = search._store.lost()
        return search

    @classmethod
    def _load(
        cls,
        store: str | PathLike[str],
        space: SearchSpace | None = None,
        accept_prices: bool = False,
        trial_cost: Callable[[Deployment], float] | None = None,
    ) -> "DeploymentOptimizer":
        """Returns the kept search to look at; one that is being run is not disturbed."""
        if space is not None and not isinstance(space, SearchSpace):
            raise InvalidInput(f"space must be a SearchSpace, got {type(space).__name__}")
        if not isinstance(store, str | PathLike) or not Path(store).is_file():
            raise StoreError(f"store {str(store)!r} is not there; give the file of a search")
        file = Store(store)
        content = file.content()
        if content is None:
            raise StoreError(f"store {str(store)!r} holds no search")
        with sound(store):
            kept = space_of(content) if space is None else same_space(content, space, accept_prices)
            scenario, job = Scenario(**content["scenario"]), Job(**content["job"])
            earlier = [EarlierJob.from_rows(rows) for rows in content["earlier"]]
            strategy, seed = content["strategy"], whole("seed", content["seed"])
            strategy_named(strategy)
        search = cls(kept, scenario, job, strategy, seed, earlier=earlier, trial_cost=trial_cost)
        search.trials = file.trials(search.space)
        search._lost = file.lost()
        search._store = file
        return search

    def _plan_trials(self, trial_cost: Callable[[Deployment], float]) -> None:
        if not callable(trial_cost):
            raise InvalidInput(
                "trial_cost must be a function of a deployment that returns seconds, got "
                f"{trial_cost!r}"
            )
        seconds = np.array([real("trial_cost(deployment)", trial_cost(d)) for d in self.space])
        if not (np.isfinite(seconds) & (seconds > 0)).all():
            raise InvalidInput("trial_cost must give finite seconds above 0 for every deployment")
        self._trial_hours = seconds / 3600
        self._trial_dollars = self._trial_hours * self._rate

    def _check_limits(self) -> None:
        self.scenario.check_allows(float(self._trial_dollars.min()), float(self._trial_hours.min()))

    @classmethod
    def look(cls, store: str | PathLike[str]) -> "DeploymentOptimizer":
        """Returns the search kept in `store`, to look at; it may still be run elsewhere.

        Raises:
            StoreError: there is no search in it, or it cannot be read.
        """
        search = cls._load(store)
        search._store = None
        return search

    @property
    def ledger(self) -> Ledger:
        """What has been spent on trials, and what is left of the limits."""
        return Ledger.of(self.scenario, self.trials, self._lost)

    @property
    def work_left(self) -> float:
        """Job units still to be trained; trials whose checkpoint is carried on count."""
        done = sum(trial.observation.work_done for trial in self.trials)
        return max(self.job.work - done, 0.0)

    def ask(self, n: int = 1) -> list[Deployment]:
        """Returns up to `n` deployments to try next, side by side; none means: stop.

        Asking changes nothing: the answer depends on what was told and on the seed alone.

        Raises:
            ProfilingFailed: the first trials all failed by an error of the script.
            InvalidInput: a limit is below the cheapest trial.
        """
        positive_int("n", n)
        if not self.trials:
            # Not before: a profiler given to `run` may take less time than was assumed.
            self._check_limits()
        self._check_failures()
        if len(self.space) == 1:
            if not self.trials:
                return [self.space[0]]
            self._stop_reason = "there is no other deployment to try"
            return []
        pending: list[int] = []
        for _ in range(n):
            row, why = self._next(pending)
            if row is None:
                if not pending:
                    self._stop_reason = why
                break
            pending.append(row)
        return [self.space[row] for row in pending]

    def _next(self, pending: Sequence[int]) -> tuple[int | None, str]:
        """Returns the next trial beside those under way, or None, and why."""
        if not self.work_left:
            return None, "the trials have already trained the whole job"
        situation = self._situation(pending)
        if not situation.open.any():
            return None, "every deployment was tried or ruled out"
        proposal = self._decider.propose(situation)
        return proposal.row, proposal.why

    def tell(self, trial: Trial) -> None:
        """Takes in the outcome of a trial; failed ones are charged and learned from.

        Raises:
            InvalidInput: its deployment is not in the search space.
            StoreError: it could not be kept; the search knows it nevertheless.
        """
        if not isinstance(trial, Trial):
            raise InvalidInput(f"trial must be a Trial, got {type(trial).__name__}")
        row = self.space.position(trial.deployment)
        if trial.price_per_hour is None:
            trial = replace(trial, price_per_hour=trial.deployment.price_per_hour)
        # First here: what was paid for is known although the store may fail.
        self.trials = in_order([*self.trials, trial], self.space)
        if self._store is not None:
            self._store.add(row, trial)

    def recommend(self) -> Recommendation:
        """Returns the deployment to run the job on, by what is known now.

        Raises:
            NothingObserved: no trial has given a speed.
            NoFeasibleDeployment: none is likely to keep the limit; `nearest` misses it least.
        """
        situation = self._situation()
        if not situation.observed.any():
            raise NothingObserved(
                f"none of {counted(len(self.trials))} gave a speed; tell() at least one that did"
            )
        row = self._decider.choose(situation)
        chance = situation.feasible(situation.most_hours())
        unsure = situation.limited and not situation.incumbents()[row]
        if self.work_left and unsure and chance[row] < _LEAST_CHANCE:
            short = np.where(
                situation.observed, situation.measured - situation.most_hours(), np.inf
            )
            nearest = self._recommendation(situation, int(np.argmin(short)))
            raise NoFeasibleDeployment(
                f"no deployment is likely to be {self.scenario.describe()}; the nearest miss is "
                f"{nearest.deployment} with {nearest.total_hours:.3g} h and "
                f"${nearest.total_dollars:.3g} in all",
                nearest,
            )
        return self._recommendation(situation, row)

    def run(
        self,
        profiler: Profiler,
        parallel: int = 1,
        *,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> Recommendation:
        """Returns the recommendation after profiling as long as it pays.

        Args:
            profiler: measures one deployment at a time.
            parallel: trials to run side by side; their spend is committed before they start.
            on_trial: called with each trial, after all of its batch are told.

        Raises:
            InvalidInput: an argument is not allowed, or the profiler returned no `Observation`.
            ProfilingFailed: trials keep failing by an error of the script.
            NoFeasibleDeployment: no deployment is likely to keep the limit.
            StoreError: another process is running the search of this store.
            Exception: whatever the profiler raised, after the finished trials of its batch were
                told and kept.
        """
        positive_int("parallel", parallel)
        if not isinstance(profiler, Profiler) or isinstance(profiler, type):
            raise InvalidInput(
                f"profiler must have a method profile(deployment, limits), got {profiler!r}"
            )
        planned = getattr(profiler, "trial_seconds", None)
        if planned is not None:
            self._plan_trials(planned)
        if on_trial is not None and not callable(on_trial):
            raise InvalidInput(f"on_trial must be a function of a trial, got {on_trial!r}")
        with nullcontext() if self._store is None else self._store.owned():
            while chosen := self.ask(parallel):
                problem = self._run_batch(profiler, chosen, on_trial)
                if problem is not None:
                    raise problem
        return self.recommend()

    def _run_batch(
        self,
        profiler: Profiler,
        chosen: Sequence[Deployment],
        on_trial: Callable[[Trial], None] | None,
    ) -> BaseException | None:
        """Profiles side by side; each outcome is told, or charged if it raised, as it comes."""
        began, batch = time.time(), self._next_batch()
        rows = [self.space.position(deployment) for deployment in chosen]

        def done(place: int, outcome: Outcome) -> None:
            if outcome.observation is None:
                self._charge(rows[place], batch, outcome.seconds / 3600)
            else:
                price = chosen[place].price_per_hour
                self.tell(Trial(chosen[place], outcome.observation, batch, price, began))

        limits = [self._limits(deployment) for deployment in chosen]
        with kept_alive(self._store, rows, batch, began):
            problem = run_batch(profiler, chosen, limits, done)
        if on_trial is not None:
            for trial in [trial for trial in self.trials if trial.batch == batch]:
                on_trial(trial)
        return problem

    def _next_batch(self) -> int:
        batches = [trial.batch for trial in self.trials if trial.batch is not None]
        return max([*batches, *(lost.batch for lost in self._lost)], default=-1) + 1

    def _charge(self, row: int, batch: int, hours: float) -> None:
        """Charges a trial that gave no observation for as long as it ran."""
        lost = Lost(batch, hours, hours * float(self._rate[row]))
        self._lost.append(lost)
        if self._store is not None:
            self._store.lose([row], lost)

    def _limits(self, deployment: Deployment) -> Limits:
        """Returns how long to profile: not on, once a deployment is surely worse than the best."""
        row = self.space.position(deployment)
        situation = self._situation()
        useful = 0.0
        held = situation.incumbents() & ~situation.failed
        if held.any():
            best = float(np.min(np.exp(situation.log_objective)[held]))
            longest = best if self.scenario.objective == "time" else best / self._rate[row]
            useful = self.work_left / (longest * 3600)
        keep = self.job.checkpoint
        return Limits(
            seconds=float(self._trial_hours[row] * 3600),
            useful_speed=useful,
            unit=self.job.unit,
            checkpoint=None if keep is None else os.fspath(keep),
        )

    def _recommendation(self, situation: Situation, row: int) -> Recommendation:
        worth = self._decider.worth(situation)
        usable = [
            i for i in np.argsort(worth, kind="stable") if i != row and not situation.failed[i]
        ]
        alternatives = tuple(estimate_of(situation, int(i), self.space[int(i)]) for i in usable[:3])
        estimate = estimate_of(situation, row, self.space[row])
        if not self.work_left:
            estimate = nothing_left(estimate, self.ledger)
        return Recommendation(
            **vars(estimate),
            trials=len(self.trials),
            spent_hours=self.ledger.hours,
            spent_dollars=self.ledger.dollars,
            reason=reason_for(situation, estimate, alternatives, self._stop_reason),
            alternatives=alternatives,
        )

    def report(self, folder: str | PathLike[str]) -> Path:
        """Writes a self-contained ``report.html`` and PNG pictures; returns the page's path.

        Args:
            folder: made if it is not there.

        Raises:
            NothingObserved: no trial has given a speed.
            MissingExtra: matplotlib is not installed (extra ``plot``).
            StoreError: the folder cannot be written.
        """
        from ._report import write_report

        return write_report(self, folder)

    def situation(self) -> Situation:
        """Returns what the strategy sees now: beliefs, prices, what is left of the limits."""
        return self._situation()

    def _situation(self, pending: Sequence[int] = ()) -> Situation:
        """Returns the state of the search, with `pending` trials committed at their most."""
        seen = Evidence.of(self.space, self.job, self.trials)
        # Nothing left: beliefs about the whole job, which curves can still be drawn of.
        left = (self.work_left or self.job.work) / 3600
        rows, values, noise = seen.rows, seen.values, seen.noise
        posterior = self._model.posterior(rows, values, noise)
        for row in pending:
            # A running trial is taken to turn out as expected: it narrows, it does not move.
            rows = np.append(rows, row)
            values = np.append(values, posterior.mean[row])
            noise = np.append(noise, MODEL_NOISE**2)
            posterior = self._model.posterior(rows, values, noise)
        spent = self.ledger
        side_by_side = max((self._trial_hours[row] for row in pending), default=0.0)
        committed = Ledger(
            spent.hours + side_by_side,
            spent.dollars + sum(self._trial_dollars[row] for row in pending),
            spent.budget,
            spent.deadline,
        )
        closed = seen.failed | np.isfinite(seen.pace)
        closed[list(pending)] = True
        return Situation(
            objective=self.scenario.objective or "time",
            ledger=committed,
            rate=self._rate,
            mean=posterior.mean + math.log(left),
            sd=posterior.sd,
            measured=seen.pace * left,
            measured_sd=seen.pace_sd,
            open=~closed,
            failed=seen.failed,
            trial_hours=np.maximum(self._trial_hours - side_by_side, 0.0),
            trial_dollars=self._trial_dollars,
            expected=seen.part_of(self._trial_hours * 3600),
            kept_part=seen.kept_part,
            kind=self._model.features.kind,
            count=self._count,
            tried=seen.tried,
            running=len(pending),
            rng=np.random.default_rng([self.seed, len(self.trials), len(pending)]),
        )

    def _check_failures(self) -> None:
        last = [trial.observation for trial in self.trials[-_FAILURES_IN_A_ROW:]]
        broken = [o for o in last if o.status in ("error", "timeout")]
        if len(broken) == _FAILURES_IN_A_ROW and not any(
            trial.observation.status == "ok" for trial in self.trials
        ):
            raise ProfilingFailed(
                f"{len(broken)} trials in a row failed and none gave a speed; the last says:\n"
                f"{broken[-1].status}: {broken[-1].detail or 'no detail'}",
                self.trials,
            )


def _earlier(job: "DeploymentOptimizer | EarlierJob | str | PathLike[str]") -> EarlierJob:
    if isinstance(job, EarlierJob):
        return job
    if not isinstance(job, DeploymentOptimizer):
        job = DeploymentOptimizer._load(job)
    return EarlierJob.of(job.trials)
