"""How much to spend on tuning, on what, and how sure to be."""

from dataclasses import dataclass

from ._checks import check_bool, check_number, check_whole
from ._errors import ConfigError

MODES = ("policy", "groups")
OBJECTIVES = ("global", "personal")


@dataclass(frozen=True)
class TuneOptions:
    """How much to spend, and how sure to be.

    Attributes:
        budget: evaluations; one is a full-length run of one setting on the tuning emulations.
        emulations: federations that settings are tuned on.
        confirmations: fresh federations that the decision is made on, at least.
        min_gain: customization must gain more than this (0.003 of accuracy is 0.3 points).
        confidence: with at least this probability.
        rounds: rounds of a full-length emulation.
        fraction: share of the clients that train in a round.
        customize: False searches global settings only.
        weight: whether aggregation weights may be changed.
        mode: "policy" steers values by metrics; "groups" clusters the clients by their metrics
            and gives each group its own values.
        objective: "personal" also tunes values for fine-tuning the finished model on each
            client; "global" tunes training only.
        threads: torch threads while tuning; more than 1 pays for large models only.

    Raises:
        ConfigError: a value is of another type or outside its range.
    """

    budget: int = 48
    emulations: int = 2
    confirmations: int = 4
    min_gain: float = 0.003
    confidence: float = 0.9
    rounds: int = 20
    fraction: float = 1.0
    customize: bool = True
    weight: bool = True
    mode: str = "policy"
    objective: str = "global"
    threads: int = 1

    def __post_init__(self) -> None:
        check_whole("budget", self.budget, 12, advice=" evaluations")
        for name in ("emulations", "rounds", "threads"):
            check_whole(name, getattr(self, name), 1)
        check_whole("confirmations", self.confirmations, 2)
        for name in ("min_gain", "confidence", "fraction"):
            check_number(name, getattr(self, name))
        for name in ("customize", "weight"):
            check_bool(name, getattr(self, name))
        for name, allowed in (("mode", MODES), ("objective", OBJECTIVES)):
            value = getattr(self, name)
            if value not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ConfigError(f"{name}={value!r} is unknown; allowed: {words}")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction!r} must be in (0, 1]")
        if not 0 <= self.confidence < 1:
            raise ConfigError(f"confidence={self.confidence!r} must be in [0, 1)")
