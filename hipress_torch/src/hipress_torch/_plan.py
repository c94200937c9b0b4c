"""When compression pays: a cost model of one bucket, and the plan that follows from it.

Source: SeCoPa of HiPress (its released code): every term is ``T(x) = max(floor, A + B x)``,
    compressed and
plain synchronization are compared for each size, with the number of parts that suits each best.
Here the terms are measured (:func:`hipress_torch.calibrate`) and parts are pipelined, where there
a part costs what it costs alone. Once the backward pass is known, all buckets are planned together:
see ``_schedule.py``.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hipress_torch._checks import is_time
from hipress_torch._codec import Codec
from hipress_torch._errors import PlanError, StateError
from hipress_torch._metrics import write_text
from hipress_torch._schedule import schedule

PROFILE_VERSION = 1
COLLECTIVES = ("all_reduce", "all_to_all", "all_gather")
STAGES = ("encode", "merge", "decode")
PART_CHOICES = tuple(1 << e for e in range(18, 25))


@dataclass(frozen=True)
class Term:
    """Seconds as a function of a size: ``max(floor_s, offset_s + size * per_unit_s)``.

    Attributes:
        floor_s: least time, in seconds.
        offset_s: time at size 0 by the fit, in seconds.
        per_unit_s: seconds for each byte (collectives) or element (kernels).
    """

    floor_s: float
    offset_s: float
    per_unit_s: float

    def __call__(self, size: float) -> float:
        """Returns the seconds for a size."""
        return max(self.floor_s, self.offset_s + self.per_unit_s * size)

    @classmethod
    def fit(cls, points: Mapping[int, float]) -> "Term":
        """Returns the term through the smallest and the largest size measured.

        A smaller size is taken to need no more than a larger one did: what exceeds that is a
        disturbance. The floor is the least time; with one size the time is taken as constant.

        Raises:
            PlanError: there are no points.
        """
        if not points:
            raise PlanError("a term needs at least one measured size")
        low, high = min(points), max(points)
        least = min(points.values())
        slope = 0.0 if low == high else (points[high] - least) / (high - low)
        return cls(least, max(0.0, points[high] - slope * high), slope)


@dataclass(frozen=True)
class Profile:
    """What the machines and the network of a process group were measured to take.

    Attributes:
        ranks: how many ranks there were.
        collectives: ``all_reduce``, ``all_to_all`` and ``all_gather`` by bytes of one rank's
            message; with more than two ranks ``hop`` too, in which every rank sends to the next.
        codecs: for each codec ``encode``, ``merge`` and ``decode`` by elements.
        busy: processor seconds of the collectives, likewise by bytes.
        contention: seconds that the backward pass loses for each second that another thread of
            the process computes: 0 with cores to spare, about 1 with none.
    """

    ranks: int
    collectives: dict[str, Term]
    codecs: dict[str, dict[str, Term]] = field(default_factory=dict)
    busy: dict[str, Term] = field(default_factory=dict)
    contention: float = 0.0

    def busy_s(self, collective: str, size: float) -> float:
        """Returns the processor seconds a collective takes on one rank, 0 if not measured."""
        return self.busy[collective](size) if collective in self.busy else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as JSON, beside and renamed.

        Raises:
            FileError: the file cannot be written.
        """
        write_text(Path(path), json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Returns the profile that :meth:`save` wrote.

        Raises:
            PlanError: the file cannot be read, is no profile, or of another version.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{os.fspath(path)} is no profile: {error}") from error
        except OSError as error:
            raise PlanError(
                f"profile {os.fspath(path)} cannot be read ({error.strerror or error}); "
                f"`hipress calibrate` writes one"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the profile as plain values."""
        return {"version": PROFILE_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Profile":
        """Returns the profile of plain values.

        Raises:
            PlanError: a field is missing or wrong, or the version is another.
        """
        try:
            if values["version"] != PROFILE_VERSION:
                raise PlanError(
                    f"profile: version {values['version']!r}, this release reads "
                    f"{PROFILE_VERSION}; "
                    f"calibrate again"
                )
            ranks = values["ranks"]
            if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
                raise PlanError(f"profile: ranks must be 1 or more, got {ranks!r}; calibrate again")
            return cls(
                ranks,
                _terms(values["collectives"], COLLECTIVES, "collectives"),
                {name: _terms(terms, STAGES, name) for name, terms in values["codecs"].items()},
                _terms(values.get("busy", {}), (), "busy"),
                _time(values.get("contention", 0.0), "contention"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"profile: {error!r} is missing or wrong; calibrate again") from error


def _terms(values: Mapping[str, Any], needed: tuple[str, ...], what: str) -> dict[str, Term]:
    if missing := [n for n in needed if n not in values]:
        raise PlanError(f"profile: {what} lacks {', '.join(missing)}; calibrate again")
    for name, term in values.items():
        if not all(is_time(t) for t in term.values()):
            raise PlanError(f"profile: {what} {name}: {term!r} are no times; calibrate again")
    return {name: Term(**term) for name, term in values.items()}


def _time(value: Any, what: str) -> float:
    if not is_time(value):
        raise PlanError(f"profile: {what}: {value!r} is no time; calibrate again")
    return float(value)


@dataclass(frozen=True)
class Choice:
    """What is done with a bucket.

    Attributes:
        codec: a codec's name; ``none`` is a plain all-reduce.
        part_elements: the bucket is cut into parts of about this many elements.
        ring: whether messages go round in a ring, and not to the rank that merges them.
        seconds: predicted seconds, 0 without a profile.
        candidates: predicted seconds of every codec that was considered.
    """

    codec: str
    part_elements: int
    seconds: float = 0.0
    candidates: tuple[tuple[str, float], ...] = ()
    ring: bool = False

    @property
    def label(self) -> str:
        """The codec, and whether by a ring."""
        return f"{self.codec} (ring)" if self.ring else self.codec


class Stages(NamedTuple):
    """Seconds of a part's stages: encode, first hop, merge, second hop, decode."""

    encode: float
    scatter: float
    merge: float
    gather: float
    decode: float


@dataclass(frozen=True)
class Plan:
    """Chooses for each bucket by its size, the same on all ranks that have the same profile.

    Attributes:
        profile: what was measured.
        codecs: the codecs to choose from beside ``none``, by name.
        backward: for each bucket its index, its elements, and the seconds that the backward pass
            computes before it; with it the buckets are planned together.
        strategies: ``ps``, ``ring`` or both; a ring is weighed if the profile has its ``hop``.
        step_s: seconds of a whole step, of which planning together has to promise a share to be
            preferred to plain all-reduce; 0 if not known.
    """

    profile: Profile
    codecs: tuple[str, ...]
    backward: tuple[tuple[int, int, float], ...] = ()
    strategies: tuple[str, ...] = ("ps", "ring")
    step_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the types.

        Raises:
            PlanError: there is no profile, or the codecs or strategies are no names.
        """
        if not isinstance(self.profile, Profile):
            raise PlanError(
                f"profile must be a Profile, as calibrate() or Profile.load() return it, got "
                f"{type(self.profile).__name__}"
            )
        if isinstance(self.codecs, str) or not all(isinstance(c, str) for c in self.codecs):
            raise PlanError(f"codecs must be a tuple of codec names, got {self.codecs!r}")
        wrong = set(self.strategies) - {"ps", "ring"}
        if isinstance(self.strategies, str) or wrong or not self.strategies:
            raise PlanError(
                f"strategies must be a tuple of 'ps', 'ring' or both, got {self.strategies!r}"
            )

    def choose(self, elements: int, codecs: Mapping[str, Codec]) -> Choice:
        """Returns what to do with a bucket of that many float32 elements.

        Args:
            elements: size of the bucket.
            codecs: the codecs by name; those of the plan are considered.
        """
        best: dict[str, Choice] = {}
        for option in self.options(elements, codecs):
            known = best.get(option.codec)
            if known is None or option.seconds < known.seconds:
                best[option.codec] = option
        chosen = min(best.values(), key=lambda c: (c.seconds, c.codec))
        return replace(chosen, candidates=tuple((n, c.seconds) for n, c in best.items()))

    def choose_all(self, codecs: Mapping[str, Codec]) -> tuple[Choice, ...]:
        """Returns what to do with each bucket of the backward pass, planned together.

        Args:
            codecs: the codecs by name; those of the plan are considered.
        """
        buckets = [(elements, seconds) for _, elements, seconds in self.backward]
        together = schedule(self, buckets, codecs)
        alone = [self.choose(elements, codecs) for elements, _ in buckets]
        return tuple(
            replace(t, candidates=a.candidates) for t, a in zip(together, alone, strict=True)
        )

    def options(self, elements: int, codecs: Mapping[str, Codec]) -> list[Choice]:
        """Returns all codecs, sizes of parts and strategies, by the time of the bucket alone."""
        found = [Choice("none", PART_CHOICES[-1], self.plain(elements))]
        for name in self.codecs:
            if name in codecs and name in self.profile.codecs:
                sizes = [p for p in PART_CHOICES if p == PART_CHOICES[0] or p < 2 * elements]
                found += [
                    Choice(
                        name, part, self.compressed(elements, codecs[name], part, ring), ring=ring
                    )
                    for part in sizes
                    for ring in self._rings()
                ]
        return found

    def _rings(self) -> list[bool]:
        """Returns whether a ring, a server at every rank or both are to be weighed."""
        if "hop" in self.profile.collectives:
            return [s == "ring" for s in self.strategies]
        # Without the term, or between two ranks, both are taken to be the same.
        return ["ps" not in self.strategies]

    def plain(self, elements: int) -> float:
        """Returns the predicted seconds of a plain all-reduce."""
        return self.profile.collectives["all_reduce"](4 * elements)

    def compressed(
        self, elements: int, codec: Codec, part_elements: int, ring: bool = False
    ) -> float:
        """Returns the predicted seconds with a codec in parts of that size.

        The stages of a part follow one another; different parts overlap, and the slowest stage sets
        the pace: the first part's time, and the slowest stage for each further part.
        """
        parts = max(1, round(elements / part_elements))
        s = self.stages(elements / parts, codec, ring)
        # A ring's hops and what is computed between them are one stage, of one thread.
        paces = (s.encode, s.scatter + s.merge, s.gather, s.decode) if ring else s
        return sum(s) + (parts - 1) * max(paces)

    def stages(self, elements: float, codec: Codec, ring: bool) -> "Stages":
        """Returns the predicted seconds of each stage of a part of that many elements."""
        n = self.profile.ranks
        share = elements / n
        wire = codec.wire_bytes(max(1, int(share)))
        terms, collectives = self.profile.codecs[codec.name], self.profile.collectives
        encode, merge = terms["encode"](share), terms["merge"](share)
        gather, decode = collectives["all_gather"](wire), terms["decode"](elements)
        if ring and "hop" in collectives:
            # From one message to add to the next, the merge of one: measured are none and n - 1.
            one = encode + max(0.0, merge - encode) / max(1, n - 1)
            hops = (n - 1) * collectives["hop"](wire)
            return Stages(0.0, hops, encode + (n - 1) * one, gather, decode)
        sent = collectives["all_to_all"](wire * (n - 1))
        return Stages(terms["encode"](elements * (n - 1) / n), sent, merge, gather, decode)


def saved_plan(saved: object) -> Plan | None:
    """Returns the plan of a state dict; None if it holds none that was measured.

    Raises:
        StateError: something is missing or wrong.
    """
    if not isinstance(saved, Mapping):
        return None
    try:
        backward = tuple((int(i), int(n), float(s)) for i, n, s in saved.get("backward", ()))
        profile = Profile.from_dict(saved["profile"])
        strategies = tuple(saved.get("strategies", ("ps", "ring")))
        step_s = float(saved.get("step_s", 0.0))
        return Plan(profile, tuple(saved["codecs"]), backward, strategies, step_s)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"state dict: plan is wrong: {error}") from error
