"""What tuning did, in a form that can be read, kept and plotted."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ._errors import StateError
from ._files import write_atomic
from ._policy import Policy


@dataclass(frozen=True)
class Trial:
    """One setting that was scored on emulated federations.

    Attributes:
        stage: "global", "prior", "policy" or "confirm".
        point: its place in the unit cube.
        values: hyperparameters of the median client.
        customizes: whether clients get different values.
        fidelity: share of the rounds that were run.
        score: mean score over the emulations, higher is better.
        scores: the score in each emulation.
    """

    stage: str
    point: tuple[float, ...]
    values: dict[str, Any]
    customizes: bool
    fidelity: float
    score: float
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Gain:
    """What customization gains over the best global setting, on emulations not tuned on.

    Attributes:
        mean: mean difference of the scores (for accuracy: 0.01 is one point).
        standard_error: of that mean.
        probability: that the gain is above the threshold, by Student's t.
        emulations: how many it was measured on.
        kept: whether customization was kept.
    """

    mean: float
    standard_error: float
    probability: float
    emulations: int
    kept: bool


@dataclass(frozen=True)
class TuneReport:
    """The result of tuning.

    Attributes:
        policy: what clients get.
        gain: the comparison that kept or dropped customization; None if there was nothing to
            customize.
        trials: every setting that was tried.
        metrics: what the clients reported, a mapping a client.
        cost: evaluations spent, one being a full-length run on the tuning emulations.
        seconds: wall time.
        tuner: its name.
        notes: remarks for a person, such as why customization is off.
        personal: what clients get for fine-tuning, with `objective="personal"`.
        personal_gain: what values of their own gain there over the best setting for all, in
            accuracy on examples of a client's own kind; one pair a client.
    """

    policy: Policy
    gain: Gain | None
    trials: tuple[Trial, ...]
    metrics: tuple[dict[str, float], ...]
    cost: float
    seconds: float
    tuner: str
    notes: tuple[str, ...] = field(default=())
    personal: Policy | None = None
    personal_gain: Gain | None = None

    def summary(self) -> str:
        """A few lines: decision, gain with its uncertainty, policy, cost."""
        if self.gain is None:
            decision = "customization off: nothing to compare"
        else:
            decision = (
                f"customization {'on' if self.gain.kept else 'off'}: emulated gain "
                f"{100 * self.gain.mean:+.2f} +- {100 * self.gain.standard_error:.2f} points over "
                f"the best global setting, P(gain) = {self.gain.probability:.2f} "
                f"({self.gain.emulations} emulations)"
            )
        cost = (
            f"{self.cost:.1f} evaluations in {self.seconds:.1f} s with tuner {self.tuner!r}, "
            f"{len(self.metrics)} clients"
        )
        lines = [decision, self.policy.explain(self.metrics), cost, *self.notes]
        if self.personal is not None and self.personal_gain is not None:
            gain = self.personal_gain
            lines += [
                f"fine-tuning values of their own {'on' if gain.kept else 'off'}: "
                f"{100 * gain.mean:+.2f} +- {100 * gain.standard_error:.2f} points over one "
                f"setting for all, P(gain) = {gain.probability:.2f} ({gain.emulations} clients)",
                self.personal.explain(self.metrics),
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold; `from_dict` reads it."""
        return {
            "policy": self.policy.to_dict(),
            "gain": None if self.gain is None else asdict(self.gain),
            "trials": [asdict(trial) for trial in self.trials],
            "metrics": [{k: v for k, v in row.items() if v == v} for row in self.metrics],
            "cost": self.cost,
            "seconds": self.seconds,
            "tuner": self.tuner,
            "notes": list(self.notes),
            "personal": None if self.personal is None else self.personal.to_dict(),
            "personal_gain": None if self.personal_gain is None else asdict(self.personal_gain),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "TuneReport":
        """The report that `to_dict` described.

        Raises:
            StateError: it is not one.
        """
        try:
            trials = tuple(
                Trial(**{**t, "point": tuple(t["point"]), "scores": tuple(t["scores"])})
                for t in fields["trials"]
            )
            return cls(
                Policy.from_dict(fields["policy"]),
                None if fields["gain"] is None else Gain(**fields["gain"]),
                trials,
                tuple(dict(row) for row in fields["metrics"]),
                float(fields["cost"]),
                float(fields["seconds"]),
                str(fields["tuner"]),
                tuple(fields["notes"]),
                *_personal(fields),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a tuning report: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON, by a temporary name and a rename."""
        write_atomic(Path(path), json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "TuneReport":
        """The report in a file that `save` wrote.

        Raises:
            StateError: the file cannot be read or is not a report.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"report file {path}: {error}") from error
        return cls.from_dict(fields)


def _personal(fields: Mapping[str, Any]) -> tuple[Policy | None, Gain | None]:
    policy, gain = fields.get("personal"), fields.get("personal_gain")
    return (
        None if policy is None else Policy.from_dict(policy),
        None if gain is None else Gain(**gain),
    )
