"""`objective="personal"`: values for fine-tuning the finished model, by what a client is like.

Clients often fine-tune the global model on their own data before they use it. How fast and how long
depends on how much data there is and how far it lies from the rest. Here emulated clients fine-tune
an emulated global model under common settings; a Gaussian process over metrics and settings
together (a contextual one) says which setting suits which metrics. The clients' metrics are covered
by up to `CONTEXTS` centres, and the best setting at each becomes a grouped policy. It is kept only
if clients of fresh emulations gain by it over the best setting for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ._batched import can_batch
from ._cluster import nearest, spread_out
from ._emulate import Emulator
from ._finetune import Values, fine_tune, fine_tune_batched, global_model
from ._metrics import Scaler, as_matrix
from ._options import TuneOptions
from ._policy import GROUP, Policy
from ._report import TuneReport
from ._simulate import Emulation, candidate, score
from ._space import SearchSpace
from ._statistics import judge
from .tuners import get
from .tuners._bayes import BayesTuner

CONTEXTS = 12
SETTINGS = 16
HELD_OUT = 60
# Settings the process chooses among; and the most scores it is fitted to (it costs n cubed).
_CHOICES = 64
_MOST_SCORES = 320
# Far from the numbers of the emulations that training was tuned and confirmed on.
_LEARN, _CHECK = 2000, 3000


def with_personal(
    report: TuneReport,
    emulator: Emulator,
    options: TuneOptions,
    progress: Callable[[str], None],
) -> TuneReport:
    """The report with a policy for fine-tuning, and its gain over one setting for all.

    The cost, in evaluations, counts the federations that were trained for it and the fine-tuning
    by the passes over data; it comes on top of the budget for training.
    """
    search = _Search(report.policy, emulator, report.metrics, options)
    progress("personal: fine-tuning on emulated clients")
    learned = [search.federation(_LEARN + i) for i in range(options.emulations)]
    points = get("sobol")(len(search.space), emulator.seed).ask(SETTINGS)
    scores = [search.fine_tune(e, [[search.values(p)] * len(e.y) for p in points]) for e in learned]
    before = float(np.mean([search.untouched(e) for e in learned]))
    single, own = search.policies(points, scores, [e.metrics_KM for e in learned])
    progress("personal: confirming on fresh emulations")
    gaps, after = [], []
    for i in range(options.emulations):
        fresh = search.federation(_CHECK + i)
        one, each = search.fine_tune(
            fresh, [list(candidate(policy, fresh).values) for policy in (single, own)]
        )
        gaps.append(each - one)
        after.append(each if own.customizes else one)
    gain = judge(np.concatenate(gaps), options.min_gain, options.confidence)
    note = (
        f"fine-tuning on each client: own accuracy {before:.3f} before, "
        f"{float(np.mean(np.concatenate(after))):.3f} after, on emulated clients"
    )
    return replace(
        report,
        personal=own if gain.kept else single,
        personal_gain=gain,
        cost=report.cost + search.cost,
        notes=(*report.notes, note),
    )


@dataclass
class _Search:
    training: Policy
    emulator: Emulator
    metrics: Sequence[Mapping[str, float]]
    options: TuneOptions
    cost: float = 0.0

    def __post_init__(self) -> None:
        self.batched = can_batch(self.emulator.task)

    @property
    def space(self) -> SearchSpace:
        return self.training.space

    def values(self, point: np.ndarray) -> Values:
        """The values at a point of the unit cube."""
        return self.space.values_at(self._coordinates(point))

    def _coordinates(self, point: np.ndarray) -> dict[str, float]:
        result = {}
        for (name, dimension), share in zip(self.space.items(), point, strict=True):
            low, high = dimension.bounds
            result[name] = low + float(share) * (high - low)
        return result

    def federation(self, number: int) -> Emulation:
        """An emulated federation whose initial model is the one that training ends in."""
        made = self.emulator.emulate(self.metrics, number, self.options.fraction, held_out=HELD_OUT)
        setting = candidate(self.training, made)
        state = global_model(
            self.emulator.task, made, setting, self.options.rounds, batched=self.batched
        )
        self.cost += 1 / self.options.emulations
        return replace(made, initial=state)

    def fine_tune(self, made: Emulation, settings: Sequence[Sequence[Values]]) -> np.ndarray:
        """Own accuracy of every client under every setting, shape (settings, clients)."""
        # A round of training has `per_round` clients; fine-tuning has all of them, once.
        rounds = len(settings) * len(made.y) / made.per_round
        self.cost += rounds / self.options.rounds / self.options.emulations
        run = fine_tune_batched if self.batched else fine_tune
        scores = run(self.emulator.task, made, settings)
        # A model that diverged is as good as a guess.
        return np.asarray(np.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0))

    def untouched(self, made: Emulation) -> float:
        """Mean own accuracy before fine-tuning."""
        model = self.emulator.task.model_fn()
        model.load_state_dict(made.initial)
        pairs = zip(made.x_own, made.y_own, strict=True)
        return float(np.mean([score(self.emulator.task, model, x, y) for x, y in pairs]))

    def policies(
        self, points: np.ndarray, scores: list[np.ndarray], metrics: list[np.ndarray]
    ) -> tuple[Policy, Policy]:
        """The best setting for all, and the best for each context."""
        real_KM = as_matrix(self.metrics)
        scaler = Scaler.fit(real_KM)
        z_KM = scaler.transform(real_KM)
        centres = spread_out(z_KM, CONTEXTS, self.emulator.seed)
        share_G = np.bincount(nearest(z_KM, centres), minlength=len(centres)) / len(z_KM)
        process, kept = self._process(points, scores, [scaler.transform(m) for m in metrics])
        choices = get("sobol")(len(self.space), self.emulator.seed + 1).ask(_CHOICES)
        choices = np.concatenate([points, choices])
        context_GM = _unit(np.asarray(centres))[:, kept]
        at = np.concatenate(
            [
                np.tile(choices, (len(centres), 1)),
                np.repeat(context_GM, len(choices), axis=0),
            ],
            axis=1,
        )
        mean_GC = process.predict(at)[0].reshape(len(centres), len(choices))
        everyone = self._coordinates(choices[int(np.argmax(share_G @ mean_GC))])
        single = Policy(self.space, everyone, scaler, origin="personal")
        each = [self._coordinates(choices[int(c)]) for c in mean_GC.argmax(axis=1)]
        slopes = {
            (name, f"{GROUP}{g}"): own[name] - each[0][name]
            for g, own in enumerate(each)
            if g
            for name in self.space
        }
        own = Policy(self.space, each[0], scaler, slopes, 1.0, "personal", centres)
        return single, own

    def _process(
        self, points: np.ndarray, scores: list[np.ndarray], z: list[np.ndarray]
    ) -> tuple[BayesTuner, np.ndarray]:
        """A process over (setting, metrics); and which metrics it uses."""
        z_KM = np.concatenate(z)
        kept = np.flatnonzero(z_KM.std(axis=0) > 0.05)
        # What a client's examples make easy or hard is the same under every setting.
        score_SK = np.concatenate([s - s.mean(axis=0) for s in scores], axis=1)
        rng = np.random.default_rng((self.emulator.seed, 51))
        clients = rng.permutation(len(z_KM))[: max(1, _MOST_SCORES // len(points))]
        rows = [
            np.concatenate([points, np.tile(_unit(z_KM[[k]])[:, kept], (len(points), 1))], axis=1)
            for k in clients
        ]
        process = BayesTuner(points.shape[1] + len(kept), self.emulator.seed)
        count = len(points) * len(clients)
        process.tell(np.concatenate(rows), score_SK[:, clients].T.reshape(-1), np.ones(count))
        return process, kept


def _unit(z_KM: np.ndarray) -> np.ndarray:
    """Scaled metrics, which lie in [-3, 3], as shares of that range."""
    return (z_KM + 3) / 6
