"""What a state does with each bucket: its plan, the choices that follow, and when to plan anew."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hipress_torch._calibrate import calibrate
from hipress_torch._codec import Codec
from hipress_torch._metrics import Recorder
from hipress_torch._plan import Choice, Plan
from hipress_torch._replan import LEARN, WARM_UP, Watch


class Planner:
    """Chooses for the buckets of one state; the same on all ranks.

    Attributes:
        plan: ``auto`` until it was measured, ``always``, ``never``, or a plan.
    """

    def __init__(
        self,
        plan: str | Plan,
        codecs: Mapping[str, Codec],
        otherwise: Choice,
        recorder: Recorder,
        strategies: tuple[str, ...] = ("ps", "ring"),
    ) -> None:
        """Starts nothing.

        Args:
            plan: as a user gave it.
            codecs: the codecs to choose from, by name.
            otherwise: what is done with every bucket where there is no plan.
            recorder: counters and times of the state.
            strategies: those that a measured plan may choose from.
        """
        self.plan = plan
        self._codecs = codecs
        self._otherwise = otherwise
        self._recorder = recorder
        self._strategies = strategies
        self._choices: dict[tuple[int, int], Choice] = {}
        # Set where the plan is the state's own, which may be made anew.
        self._watch: Watch | None = None
        self._passes = 0

    def measure(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Makes a plan for a group; every rank calls it.

        Raises:
            PeerError: another rank failed or did not answer in time.
        """
        profile = calibrate(group, codecs=tuple(self._codecs.values()), device=device)
        self.plan = Plan(profile, tuple(self._codecs), strategies=self._strategies)
        self._choices.clear()
        self._watch = self._watch or Watch()
        self._watch.forget()
        self._passes = 0

    def choose(self, index: int, elements: int) -> Choice:
        """Returns what to do with a bucket; asked again under one plan, the answer is the same."""
        key = (index, elements)
        if key not in self._choices:
            made = self._otherwise
            if isinstance(self.plan, Plan):
                made = self.plan.choose(elements, self._codecs)
            self._choices[key] = made
        return self._choices[key]

    def use(self, plan: Plan) -> None:
        """Goes on with another plan; buckets whose backward pass it knows are planned together."""
        self.plan = plan
        self._choices.clear()
        made = plan.choose_all(self._codecs)
        for (index, elements, _), choice in zip(plan.backward, made, strict=True):
            self._choices[index, elements] = choice

    def arrived(self, index: int, elements: int) -> None:
        """Notes that the backward pass reached a bucket."""
        if self._watch is not None:
            self._watch.arrived(index, elements)

    def left(self) -> None:
        """Notes that the backward pass goes on."""
        if self._watch is not None:
            self._watch.left()

    def between_passes(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Plans anew if there is a reason to; called with nothing under way.

        Raises:
            PeerError: another rank failed or did not answer in time.
        """
        watch, plan = self._watch, self.plan
        if watch is None or not isinstance(plan, Plan):
            return
        if not plan.backward:
            if self._passes == WARM_UP:
                watch.forget()
            if self._passes == LEARN:
                backward, step_s = watch.backward(group, device)
                self.use(replace(plan, backward=backward, step_s=step_s))
                self._recorder.taken()
        elif watch.window_ends() and watch.drifted(self._recorder.taken(), group, device):
            # What the backward pass itself takes may have changed too: it is learned again.
            self.measure(group, device)
            self._recorder.count("plans_made_anew")
        watch.began()
        self._passes += 1

    def saved(self) -> dict[str, Any] | str:
        """Returns the plan as plain values."""
        if not isinstance(self.plan, Plan):
            return self.plan
        return {
            "profile": self.plan.profile.to_dict(),
            "codecs": list(self.plan.codecs),
            "backward": [list(b) for b in self.plan.backward],
            "strategies": list(self.plan.strategies),
            "step_s": self.plan.step_s,
        }
