import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtune_flwr import METRICS, MetricsError, profile
from fedtune_flwr._metrics import NAMES, Scaler, allowed, label_entropy, received
from tests.fedtune_flwr.apps import CLASSES, FEATURES, blobs, new_model

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS))
def test_whatever_is_sent_is_finite_in_range_and_on_the_grid(values):
    for name, value in allowed(values).items():
        metric = METRICS[name]
        assert metric.low <= value <= metric.high
        on_grid = abs(value / metric.step - round(value / metric.step)) < 1e-4
        assert on_grid or value in (metric.low, metric.high)


def test_nothing_outside_the_allow_list_is_sent():
    assert len(METRICS) <= 6
    with pytest.raises(MetricsError, match="histogram"):
        allowed({"histogram": 1.0})
    with pytest.raises(MetricsError, match="number"):
        allowed({"log-size": "many"})


@given(st.dictionaries(st.sampled_from([*NAMES, "other"]), NUMBERS | st.text() | st.booleans()))
def test_the_server_accepts_any_report(values):
    report = received(values)
    assert set(report.values) == set(NAMES)
    for name, value in report.values.items():
        assert math.isnan(value) or METRICS[name].low <= value <= METRICS[name].high
    clean = not report.problems
    assert clean == (set(values) == set(NAMES) and all(
        isinstance(v, float) and METRICS[k].low <= v <= METRICS[k].high for k, v in values.items()
    ))  # fmt: skip


def test_profile_matches_its_definitions():
    x, y = blobs(5, 90, 0.3)
    model = new_model()
    got = profile([(x[:50], y[:50]), {"img": x[50:], "label": y[50:]}], model)
    with torch.no_grad():
        logits = model(x)
    loss = float(torch.nn.functional.cross_entropy(logits, y))
    p = torch.softmax(logits, 1) - torch.nn.functional.one_hot(y, CLASSES)
    assert got["log-size"] == pytest.approx(math.log(90), abs=0.18)
    assert got["reference-loss"] == pytest.approx(loss, abs=0.026)
    assert got["gradient-norm"] == pytest.approx(float(p.mean(0).norm()), abs=0.026)
    assert got["feature-norm"] == pytest.approx(math.log(float((x**2).mean().sqrt())), abs=0.026)
    counts = np.bincount(y.numpy(), minlength=CLASSES)
    assert got["label-entropy"] == pytest.approx(label_entropy(counts), abs=0.026)
    assert model.training


def test_profile_leaves_out_what_needs_a_model():
    x, y = blobs(5, 30)
    assert set(profile([(x, y)], classes=3)) == {"log-size", "label-entropy", "feature-norm"}
    tokens = torch.zeros(4, 7, dtype=torch.int64)
    assert "feature-norm" not in profile([(tokens, torch.zeros(4, dtype=torch.int64))], classes=3)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([], "no example"),
        ([(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))], "no example"),
        ([torch.zeros(3, FEATURES)], "expected"),
        ([{"a": 1}], "keys"),
        ([(torch.zeros(2, FEATURES), torch.zeros(2))], "class labels"),
        ([(torch.zeros(2, FEATURES), torch.tensor([0, 9]))], "expected 0 to 2"),
        ([(torch.zeros(3, FEATURES), torch.zeros(2, dtype=torch.int64))], "one label an input"),
        ([(torch.zeros(2, FEATURES), None)], "Tensor and NoneType"),
        ([(None, torch.zeros(2))], "NoneType and Tensor"),
        ([(["a"], ["b"])], "list and list"),
        ([(torch.tensor(1.0), torch.tensor(1))], "one label an input"),
        ([(torch.zeros(2, FEATURES), torch.tensor([0, 2**40]))], "expected 0 to 2"),
        (5, "loader=5"),
    ],
)
def test_profile_refuses_what_it_cannot_measure(loader, words):
    with pytest.raises(MetricsError, match=words):
        profile(loader, new_model())


def test_profile_needs_a_model_or_classes():
    with pytest.raises(MetricsError, match="classes="):
        profile([blobs(1, 9)])
    with pytest.raises(MetricsError, match="classes=0"):
        profile([blobs(1, 9)], classes=0)
    with pytest.raises(MetricsError, match="model is a str"):
        profile([blobs(1, 9)], "model")


def test_scaler_centres_on_the_median_and_does_not_blow_up_small_differences():
    matrix = np.tile([[4.0, 1.0, 0.5, 0.1, 0.0]], (5, 1))
    matrix[:, 2] = [0.5, 0.5, 0.51, 3.0, math.nan]
    scaler = Scaler.fit(matrix)
    z = scaler.transform(matrix)
    assert scaler.scale[0] == METRICS["log-size"].spread
    assert np.all(z[:, 0] == 0)
    assert z[4, 2] == 0
    assert z[3, 2] > 1
    empty = Scaler.fit(np.full((2, len(NAMES)), math.nan))
    assert np.all(empty.transform(np.full((2, len(NAMES)), math.inf)) <= 3)


def test_label_entropy_of_one_class_and_of_equal_classes():
    assert label_entropy([5, 0, 0]) == 0
    assert label_entropy([5, 5, 5]) == pytest.approx(1)
    assert label_entropy([7]) == 0
    assert label_entropy([0, 0]) == 0
