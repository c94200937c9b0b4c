import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcd_bo import InvalidInput
from mlcd_bo._prior import MODEL_NOISE
from mlcd_bo._steady import Speed, steady_speed
from mlcd_bo.profilers._watch import pays_no_more


def clock(gaps):
    return np.cumsum(np.concatenate([[0.0], gaps]))


def test_constant_pace_is_exact():
    speed = steady_speed(clock([0.5] * 40), [8.0] * 41)
    assert speed.value == pytest.approx(16.0)
    assert speed.half_width == pytest.approx(0.0, abs=1e-9)


def test_too_few_steps_say_nothing():
    assert steady_speed([], []) is None
    assert steady_speed([1.0, 2.0, 3.0], [1, 1, 1]) is None


def test_warm_up_is_cut_off():
    gaps = [2.0] * 10 + [0.1] * 60
    speed = steady_speed(clock(gaps), np.ones(71))
    assert speed.value == pytest.approx(10.0, rel=1e-6)
    assert speed.discarded >= 10


def test_zero_samples_give_no_speed():
    assert steady_speed(clock([0.1] * 30), np.zeros(31)) is None


@pytest.mark.parametrize(
    ("times", "work", "says"),
    [
        ([0, 1, 2], [1, 1], "one length"),
        ([0, 1, np.nan], [1, 1, 1], "finite"),
        ([0, 1, 2], [1, np.inf, 1], "finite"),
        ([0, 1, 2], [1, -1, 1], "negative"),
        ([0, 2, 1], [1, 1, 1], "backwards"),
    ],
)
def test_refuses(times, work, says):
    with pytest.raises(InvalidInput, match=says):
        steady_speed(times, work)


def autoregressive(rng, steps, pull):
    """Noise whose neighbours correlate by `pull`, of one standard deviation whatever it is."""
    noise = np.zeros(steps)
    noise[0] = rng.standard_normal()
    for i in range(1, steps):
        noise[i] = pull * noise[i - 1] + np.sqrt(1 - pull**2) * rng.standard_normal()
    return noise


@pytest.mark.parametrize(("pull", "least"), [(0.0, 0.9), (0.3, 0.9), (0.9, 0.9), (0.97, 0.78)])
def test_interval_covers_the_truth_at_about_its_level(pull, least):
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        gaps = 0.1 + 0.02 * autoregressive(rng, 300, pull).clip(-4.0)
        speed = steady_speed(clock(gaps), np.ones(301))
        hits += abs(speed.value - 10.0) <= speed.half_width * speed.value
    # Nominal 95 %; the data-driven cut costs a little, strong drift more.
    assert least <= hits / 300 <= 0.995


@given(
    st.lists(st.floats(1e-3, 10.0), min_size=12, max_size=80),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_units_scale_through(gaps, seconds, samples):
    times = clock(gaps)
    one = steady_speed(times, np.ones(len(times)))
    other = steady_speed(times * seconds, np.full(len(times), samples))
    assert other.value == pytest.approx(one.value * samples / seconds, rel=1e-6)
    assert other.half_width == pytest.approx(one.half_width, rel=1e-5, abs=1e-9)


def test_a_probe_ends_where_a_unit_of_knowledge_is_cheapest():
    """Against the minimum of cost times variance, searched on a grid of lengths."""
    for spread in (0.02, 0.1, 0.5):
        for startup in (1.0, 15.0, 300.0):
            lengths = np.geomspace(0.01, 1e5, 20001)
            price = (startup + lengths) * (spread**2 / lengths + MODEL_NOISE**2)
            best = lengths[np.argmin(price)]

            def so_far(seconds, spread=spread):
                half = 1.959964 * spread / np.sqrt(seconds)
                return Speed(1.0, half / 1.959964, half, 100, 0)

            assert not pays_no_more(so_far(0.98 * best), 0.98 * best, startup)
            assert pays_no_more(so_far(1.02 * best), 1.02 * best, startup)
