import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtune_flwr import Choice, Int, Linear, Log, SearchSpace, SpaceError

DIMENSIONS = [
    Log(1e-3, 1.0),
    Log(0.5, 2.0, by=("label-entropy",)),
    Linear(0.0, 1.2),
    Linear(-3.0, 4.0),
    Int(1, 8),
    Int(0, 5),
    Choice(8, 16, 64),
    Choice("sgd", "adam"),
]


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=repr)
@given(share=st.floats(-2, 3))
def test_every_coordinate_gives_a_value_inside_that_maps_back(dimension, share):
    low, high = dimension.bounds
    value = dimension.value(low + share * (high - low))
    again = dimension.value(dimension.coordinate(value))
    if isinstance(value, float):
        assert dimension.low <= value <= dimension.high
        assert again == pytest.approx(value)
    else:
        assert again == value
        options = getattr(dimension, "options", None)
        assert value in options if options else dimension.low <= value <= dimension.high


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=repr)
def test_bounds_are_reached(dimension):
    low, high = (dimension.value(b) for b in dimension.bounds)
    if hasattr(dimension, "options"):
        assert (low, high) == (dimension.options[0], dimension.options[-1])
    else:
        assert (low, high) == (dimension.low, dimension.high)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Log(0.0, 1.0), "above 0"),
        (lambda: Log(1.0, 1.0), "low must be below high"),
        (lambda: Log(1e-3, math.inf), "finite"),
        (lambda: Linear(2.0, 1.0), "low must be below high"),
        (lambda: Int(1.5, 3), "whole number"),
        (lambda: Int(-1, 3), "at least 0"),
        (lambda: Int(True, 3), "whole number"),
        (lambda: Choice(1), "two different"),
        (lambda: Choice(1, 1), "two different"),
        (lambda: Choice(None, 1), "can be sent"),
        (lambda: Choice([1], 2), "can be sent"),
        (lambda: Int(1, 10**400), "2\\*\\*63"),
        (lambda: Int(1, 2**63), "2\\*\\*63"),
        (lambda: Log(1, 10**400), "below 1.8e308"),
        (lambda: Log(0.1, 1.0, by=("zz",)), "'zz' is no metric"),
        (lambda: Linear(0.1, 1.0, by="log-size"), "must be a tuple"),
        (lambda: Int(1, 3, by=5), "must be a tuple"),
        (lambda: SearchSpace(), "empty"),
        (lambda: SearchSpace(lr=0.1), "must be a Log"),
        (lambda: SearchSpace(**{"server-round": Int(1, 2)}), "reserved"),
        (lambda: SearchSpace(lr=Log(0.1, 1)).coordinates({}), "missing"),
        (lambda: SearchSpace(lr=Log(0.1, 1)).coordinates({"lr": 2.0}), "outside"),
        (lambda: SearchSpace.from_dict({"lr": {"kind": "cubic"}}), "no dimension"),
    ],
)
def test_bad_spaces_say_what_is_wrong(make, words):
    with pytest.raises(SpaceError, match=words):
        make()


def test_a_space_survives_json_and_its_digest_tells_spaces_apart():
    space = SearchSpace(**{f"d{i}": d for i, d in enumerate(DIMENSIONS)})
    again = SearchSpace.from_dict(json.loads(json.dumps(space.to_dict())))
    assert again == space
    assert again.digest() == space.digest()
    assert SearchSpace(lr=Log(0.1, 1)).digest() != SearchSpace(lr=Log(0.1, 2)).digest()
