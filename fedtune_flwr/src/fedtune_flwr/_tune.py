"""Tuning: a global search, a search over policies, and a gate that must be convinced.

1. Global: every client the same. A Sobol batch at a third of the rounds, the best of it at full
   length, then the tuner.
2. Policy: slopes on top of what is best so far, starting from parts of the prior.
3. Confirm: the best policy, the best part of the prior, and the best global settings on emulations
   that nothing was tuned on; then the best of each kind on more of them. Customization is kept only
   if it probably gains more than `min_gain` there.

All candidates meet the same clients, initial model and order of examples.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import tuners
from ._batched import can_batch, simulate_batched
from ._checks import check_whole
from ._cluster import centroids
from ._cube import PolicyCube
from ._emulate import Emulator
from ._errors import TunerError
from ._metrics import Scaler, as_matrix
from ._options import TuneOptions
from ._personal import with_personal
from ._policy import Policy
from ._report import Gain, Trial, TuneReport
from ._simulate import Emulation, candidate, simulate
from ._space import SearchSpace
from ._statistics import judge
from ._threads import intra_op_threads
from .tuners._bayes import BayesTuner

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

# Settings asked for at once, at least: they train together, which is most of the speed.
_BATCH = 4
_SHORT = 1 / 3
# How far around a setting must be good too, as a share of each range (half a nat of a wide lr).
_NEIGHBOURHOOD = 0.08


def tune(
    space: SearchSpace,
    emulator: Emulator,
    metrics: Sequence[Mapping[str, float]],
    *,
    tuner: str = "bayes",
    options: TuneOptions | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneReport:
    """The best policy found for clients that reported `metrics`.

    Args:
        space: hyperparameters to tune.
        emulator: makes federations like theirs.
        metrics: a mapping a client.
        tuner: a name in `fedtune_flwr.tuners.available()`.
        options: budget and gate.
        seed: fixes the search; with the emulator's seed the whole result.
        progress: is called with a line now and then.

    Raises:
        ConfigError: the seed is no whole number of 0 or more.
        UnknownTunerError: no tuner of that name.
        ProxyError: the proxy cannot emulate these clients, or would ignore a hyperparameter.
        TunerError: the tuner raised, or returned points outside the unit cube.
    """
    options = options or TuneOptions()
    check_whole("seed", seed, 0)
    emulator.task.check_space(space)
    factory = tuners.get(tuner)
    with intra_op_threads(options.threads):
        search = _Search(space, emulator, metrics, options, progress or log.info)
        try:
            proposer = factory(search.cube.dimensions, seed)
        except Exception as error:
            raise TunerError(f"tuner {tuner!r} could not be made: {error!r}") from error
        report = search.run(proposer, tuner)
        if options.objective == "personal":
            return with_personal(report, emulator, options, progress or log.info)
        return report


@dataclass
class Finalist:
    """A policy that made it to the fresh emulations, with its scores there."""

    point: tuple[float, ...]
    policy: Policy
    scores: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean score so far."""
        return float(np.mean(self.scores))


class _Search:
    def __init__(
        self,
        space: SearchSpace,
        emulator: Emulator,
        metrics: Sequence[Mapping[str, float]],
        options: TuneOptions,
        progress: Progress,
    ) -> None:
        self.began = time.perf_counter()
        self.emulator = emulator
        # In an order of their own, so that the result does not depend on who answered first.
        rows = as_matrix(metrics)
        order = np.lexsort(np.nan_to_num(rows, nan=-1e9).T[::-1])
        self.metrics = tuple(dict(metrics[i]) for i in order)
        self.options = options
        self.progress = progress
        scaler = Scaler.fit(as_matrix(metrics))
        centres: tuple[tuple[float, ...], ...] = ()
        if options.mode == "groups":
            centres = centroids(scaler.transform(as_matrix(self.metrics)), emulator.seed)
        # Without clear groups there is nothing to tell clients apart by.
        customizable = options.mode == "policy" or bool(centres)
        self.cube = PolicyCube(
            space,
            scaler,
            weight=options.weight,
            centroids=centres,
            metrics_KM=as_matrix(self.metrics),
        )
        self.customize = options.customize and customizable and bool(self.cube.pairs)
        self.batch = max(_BATCH, options.budget // 8)
        runs = max(2 * options.confirmations, int(0.3 * options.budget * options.emulations))
        # Two of each kind where there is money for it; then one of each on more emulations.
        self.finalists = 4 if runs >= 20 else 2
        self.first = 3 if self.finalists == 4 else runs // 2
        self.more = (runs - self.finalists * self.first) // 2
        self.batched = can_batch(emulator.task)
        self.trials: list[Trial] = []
        self.cost = 0.0
        self.emulations = [
            emulator.emulate(self.metrics, i, options.fraction) for i in range(options.emulations)
        ]

    def run(self, proposer: tuners.Tuner, name: str) -> TuneReport:
        options = self.options
        customize = self.customize
        runs = self.finalists * self.first + 2 * self.more
        search_budget = options.budget - runs / options.emulations
        self._global_stage(proposer, 0.5 * search_budget if customize else search_budget)
        if customize:
            self._policy_stage(proposer, search_budget)
        policy, gain = self._confirm(self._finalists(customize))
        notes = () if customize else (self._why_not(),)
        seconds = time.perf_counter() - self.began
        return TuneReport(
            policy, gain, tuple(self.trials), self.metrics, self.cost, seconds, name, notes
        )

    def _why_not(self) -> str:
        if not self.options.customize:
            return "one setting for all clients, as asked"
        if not self.cube.space_is_steerable:
            return "no hyperparameter of the space may vary by a metric; see by="
        if self.options.mode == "groups" and not self.cube.centroids:
            return "the clients fall into no clear groups"
        return "the clients do not differ in any metric that could steer a value"

    def _global_stage(self, proposer: tuners.Tuner, budget: float) -> None:
        held = self.cube.no_slopes()
        # Half of the money goes to short runs: 1.5 a unit each, and their best at full length.
        short = max(_BATCH, int(budget * 0.4 / _SHORT))
        self.progress(f"global search: {short} short runs")
        points = self._ask(proposer, short, held)
        low = self._evaluate(proposer, "global", points, _SHORT)
        best = points[np.argsort(-low, kind="stable")[: max(2, int(budget * 0.3))]]
        self._evaluate(proposer, "global", best, 1.0)
        while self.cost + 1 <= budget:
            count = min(self.batch, int(budget - self.cost))
            self._evaluate(proposer, "global", self._ask(proposer, count, held), 1.0)

    def _policy_stage(self, proposer: tuners.Tuner, budget: float) -> None:
        base = np.asarray(self._best(1, customizes=False)[0].point)
        room = max(1, int(budget - self.cost))
        seeds = [self.cube.point(base, s) for s in self.cube.suggestions()][:room]
        self.progress(f"policy search over {len(self.cube.pairs)} slopes: {room} runs")
        means = self._evaluate(proposer, "prior", np.stack(seeds), 1.0)
        # All on the same emulations, so a mere difference says much. Where every rule loses to no
        # rule, a better setting for all is the likelier find; slopes are still tried in between.
        hopeful = float(means.max()) > self._best(1, customizes=False)[0].score
        stages = ["policy"] if hopeful else ["global", "global", "policy"]
        turn = 0
        while self.cost + 1 <= budget:
            count = min(self.batch, int(budget - self.cost))
            stage = stages[turn % len(stages)]
            held = self.cube.no_slopes() if stage == "global" else {}
            self._evaluate(proposer, stage, self._ask(proposer, count, held), 1.0)
            turn += 1

    def _finalists(self, customize: bool) -> list[Finalist]:
        plain = [
            Finalist(t.point, self.cube.policy(np.asarray(t.point), "global"))
            for t in self._best(self.finalists // (2 if customize else 1), customizes=False)
        ]
        if not customize:
            return plain
        best = self._best(1, customizes=True)[0]
        policy = self.cube.policy(np.asarray(best.point), "tuned")
        prior = self._best(1, customizes=True, stage="prior")[0]
        if prior.point != best.point:
            # Plain rules that held elsewhere are the rival to beat, and less tuned to luck.
            other = Finalist(prior.point, self.cube.policy(np.asarray(prior.point), "prior"))
        else:
            # Shrunk towards no customization: the best of many is partly the luckiest.
            slopes = {pair: slope / 2 for pair, slope in policy.slopes.items()}
            point = self.cube.point(np.asarray(best.point), slopes)
            other = Finalist(tuple(point.tolist()), self.cube.policy(point, "tuned"))
        return plain + [Finalist(best.point, policy), other][: self.finalists // 2]

    def _confirm(self, finalists: list[Finalist]) -> tuple[Policy, Gain | None]:
        """Scores finalists on fresh emulations: all on a few, the best of each kind on more."""
        first, more = self.first, self.more
        self._score_finalists(finalists, range(first))
        plain = [f for f in finalists if not f.policy.customizes]
        own = [f for f in finalists if f.policy.customizes]
        if not own:
            pair = sorted(finalists, key=lambda f: -f.mean)[:2]
            self._score_finalists(pair, range(first, first + more))
            return max(pair, key=lambda f: f.mean).policy, None
        pair = [max(plain, key=lambda f: f.mean), max(own, key=lambda f: f.mean)]
        self._score_finalists(pair, range(first, first + more))
        difference_E = np.asarray(pair[1].scores) - np.asarray(pair[0].scores)
        gain = judge(difference_E, self.options.min_gain, self.options.confidence)
        return pair[gain.kept].policy, gain

    def _score_finalists(self, finalists: list[Finalist], numbers: range) -> None:
        if not numbers:
            return
        # Far from the numbers of the emulations that settings were tuned on.
        fresh = [
            self.emulator.emulate(self.metrics, 1000 + i, self.options.fraction) for i in numbers
        ]
        scores = self._scores([f.policy for f in finalists], fresh, self.options.rounds)
        self.cost += len(finalists) * len(fresh) / self.options.emulations
        for finalist, row in zip(finalists, scores, strict=True):
            finalist.scores += row.tolist()
            self._record("confirm", finalist.point, finalist.policy, 1.0, row)
        self.progress(f"confirm: {self.cost:.0f} of {self.options.budget}")

    def _best(self, count: int, *, customizes: bool, stage: str | None = None) -> list[Trial]:
        full = [
            t
            for t in self.trials
            if t.fidelity >= 1 and t.customizes == customizes and stage in (None, t.stage)
        ]
        if customizes and not full:
            # Every slope that was tried came to nothing; the short list still needs one.
            full = [t for t in self.trials if t.fidelity >= 1]
        expected = self._robust(full, steady=not customizes)
        return [full[i] for i in np.argsort(-expected, kind="stable")[:count]]

    def _robust(self, trials: list[Trial], *, steady: bool) -> np.ndarray:
        """What to expect around each trial, by a Gaussian process over all trials.

        The best score of many is partly luck, and may lie next to a cliff: a real federation
        diverges a little earlier or later than an emulated one. So a setting is judged by the
        mean of the process over its neighbourhood.

        Args:
            trials: full-length ones.
            steady: leave the slopes where they are.
        """
        known = [t for t in self.trials if t.stage != "confirm"]
        process = BayesTuner(self.cube.dimensions, 0)
        process.tell(
            np.asarray([t.point for t in known]),
            np.asarray([t.score for t in known]),
            np.asarray([t.fidelity for t in known]),
        )
        shifts = np.random.default_rng(0).normal(0, _NEIGHBOURHOOD, (24, self.cube.dimensions))
        if steady:
            shifts[:, list(self.cube.no_slopes())] = 0.0
        around = np.asarray([t.point for t in trials])[:, None] + shifts[None]
        try:
            mean, _ = process.predict(np.clip(around, 0, 1).reshape(-1, self.cube.dimensions))
        except Exception as error:
            log.warning("the scores could not be smoothed (%r); the highest ones are taken", error)
            return np.asarray([t.score for t in trials])
        return np.asarray(mean.reshape(len(trials), -1).mean(axis=1))

    def _ask(self, proposer: tuners.Tuner, count: int, held: Mapping[int, float]) -> np.ndarray:
        try:
            points = np.asarray(proposer.ask(count, held), dtype=np.float64)
        except Exception as error:
            raise TunerError(f"the tuner failed to propose settings: {error!r}") from error
        wanted = (count, self.cube.dimensions)
        if points.shape != wanted or not ((points >= 0) & (points <= 1)).all():
            raise TunerError(
                f"the tuner returned points of shape {points.shape}, from {points.min():g} to "
                f"{points.max():g}; expected shape {wanted} in [0, 1]"
            )
        return points

    def _evaluate(
        self, proposer: tuners.Tuner, stage: str, points: np.ndarray, fidelity: float
    ) -> np.ndarray:
        policies = [self.cube.policy(p, "tuned") for p in points]
        rounds = max(1, math.ceil(fidelity * self.options.rounds))
        scores_RE = self._scores(policies, self.emulations, rounds)
        self.cost += len(points) * fidelity
        for point, policy, row in zip(points, policies, scores_RE, strict=True):
            self._record(stage, tuple(point.tolist()), policy, fidelity, row)
        means = np.asarray(scores_RE.mean(axis=1))
        try:
            proposer.tell(points, means, np.full(len(points), fidelity))
        except Exception as error:
            raise TunerError(f"the tuner refused scores: {error!r}") from error
        best = max((t.score for t in self.trials if t.fidelity >= 1), default=float(means.max()))
        self.progress(f"{stage}: {self.cost:.0f} of {self.options.budget}, best {best:.4f}")
        return means

    def _record(
        self,
        stage: str,
        point: tuple[float, ...],
        policy: Policy,
        fidelity: float,
        scores: np.ndarray,
    ) -> None:
        values = policy.space.values_at(policy.base)
        each = tuple(float(s) for s in scores)
        mean = float(np.mean(each))
        self.trials.append(
            Trial(stage, point, dict(values), policy.customizes, fidelity, mean, each)
        )

    def _scores(
        self, policies: list[Policy], emulations: list[Emulation], rounds: int
    ) -> np.ndarray:
        """Mean score over the last fifth of the rounds, shape (policies, emulations)."""
        run = simulate_batched if self.batched else simulate
        last = max(1, rounds // 5)
        runs = [(e, candidate(p, e)) for p in policies for e in emulations]
        curves = run(self.emulator.task, runs, rounds, last)
        scores = curves.mean(axis=1).reshape(len(policies), len(emulations))
        # A user's score may be NaN for a model that diverged; that is the worst there is.
        finite = scores[np.isfinite(scores)]
        worst = float(finite.min()) if len(finite) else 0.0
        return np.asarray(np.nan_to_num(scores, nan=worst, posinf=worst, neginf=worst))
