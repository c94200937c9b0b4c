"""What a state refuses: wrong arguments, damaged state dicts, use after close."""

import copy
import math

import pytest
import torch

from hipress_torch import (
    FSDPState,
    HiPressState,
    Plan,
    PlanError,
    RegistrationError,
    StateError,
    UnsupportedError,
    _state,
    hipress_hook,
    register,
)
from tests.hipress_torch.test_plan import profile_of


def bound() -> HiPressState:
    state = HiPressState("onebit", plan=Plan(profile_of(1e9), ("onebit",)))
    state.bind([("weight", torch.zeros(3, 4))])
    return state


SAVED = {
    **bound().state_dict(),
    "iteration": 7,
    "residuals": {"weight": torch.ones(3, 4)},
    "velocities": {"weight": torch.ones(3, 4)},
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"iteration": "a"}, "iteration must be a whole number"),
        ({"iteration": -5}, "iteration must be a whole number"),
        ({"residuals": 5}, "residuals must be a dict"),
        ({"residuals": {"weight": 5}}, "residuals of 'weight' must be a tensor"),
        ({"velocities": None}, "velocities must be a dict"),
        ({"velocities": {"weight": torch.ones(2)}}, "velocity of 'weight': shape"),
        ({"plan": {"profile": {}}}, "plan is wrong"),
        ({"plan": {"profile": profile_of(1e9).to_dict()}}, "plan is wrong"),
        ({"seed": 1}, "seed"),
        ({"version": 9}, "this release reads"),
    ],
)
def test_a_damaged_state_dict_is_told_and_changes_nothing(changes, told):
    state = bound()
    state.load_state_dict(copy.deepcopy(SAVED))
    before = state.state_dict()
    with pytest.raises(StateError, match=told):
        state.load_state_dict({**SAVED, "residuals": {"weight": torch.zeros(3, 4)}, **changes})
    after = state.state_dict()
    assert after["iteration"] == before["iteration"] == 7
    assert after["plan"] == before["plan"]
    for kind in ("residuals", "velocities"):
        assert torch.equal(after[kind]["weight"], before[kind]["weight"])


@pytest.mark.parametrize("state", [HiPressState(), FSDPState()], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("wrong", [None, 5, {}, {"version": 1}])
def test_what_is_no_state_dict_is_told(state, wrong):
    with pytest.raises(StateError, match="state_dict"):
        state.load_state_dict(wrong)


@pytest.mark.parametrize(
    "changes",
    [{"iterations": {"a": -1}}, {"iterations": 3}, {"residuals": {"a": "b"}}, {"residuals": None}],
)
def test_a_damaged_fsdp_state_dict_is_told(changes):
    state = FSDPState()
    with pytest.raises(StateError, match=next(iter(changes))):
        state.load_state_dict({**state.state_dict(), **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", "a"),
        ("timeout_s", math.inf),
        ("timeout_s", math.nan),
        ("timeout_s", True),
        ("seed", "a"),
        ("seed", 1.5),
        ("error_feedback", "no"),
        ("process_group", 5),
    ],
)
def test_wrong_arguments_are_told(name, value):
    with pytest.raises(PlanError, match=name):
        HiPressState(**{name: value})
    if name != "timeout_s":
        with pytest.raises(PlanError, match=name):
            FSDPState(**{name: value})


def test_a_plan_needs_a_profile_and_names():
    with pytest.raises(PlanError, match="profile must be a Profile"):
        Plan(None, ("onebit",))
    with pytest.raises(PlanError, match="codecs must be a tuple"):
        Plan(profile_of(1e9), "onebit")


def test_a_closed_state_does_not_start_again():
    state = HiPressState()
    state.close()
    state.close()
    with pytest.raises(RegistrationError, match="closed"):
        state.start()


def test_the_hook_refuses_what_is_no_bucket():
    gradient = torch.zeros(2)
    with pytest.raises(RegistrationError, match="use 'ddp_optimizer'"):
        hipress_hook(HiPressState(), (gradient, gradient))


def test_register_refuses_what_is_no_ddp():
    with pytest.raises(RegistrationError, match="wrap the module first"):
        register(torch.nn.Linear(2, 2))


def test_a_state_needs_a_process_group():
    with pytest.raises(UnsupportedError, match="init_process_group"):
        HiPressState().start()


def test_nccl_cannot_send_what_is_on_the_cpu(monkeypatch):
    monkeypatch.setattr(_state, "require_group", lambda group: group)
    monkeypatch.setattr(_state.dist, "get_backend", lambda group: "nccl")
    with pytest.raises(UnsupportedError, match="use 'gloo', or move the module to a GPU"):
        bound().start()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_gradients_of_other_dtypes_are_refused(dtype):
    class Bucket:
        def buffer(self):
            return torch.zeros(4, dtype=dtype)

    state = HiPressState()
    state._engine = object()
    with pytest.raises(UnsupportedError, match=r"allowed: torch\.float32, torch\.float16"):
        state.synchronize(Bucket())
