"""The page about a run."""

from pathlib import Path

import numpy as np
import pytest

import kingpin_ray as kp
from kingpin_ray import GroupedEstimator, Logistic
from kingpin_ray._cli import main
from tests.kingpin_ray.data import FEATURES, grouped_frame


@pytest.fixture(scope="module")
def fitted() -> GroupedEstimator:
    frame = grouped_frame(n_groups=12)
    frame["key"] = frame.key.replace({"g003": "<g003> & co"})
    frame.loc[frame.key == "g001", "label"] = True
    return GroupedEstimator(
        Logistic(), "key", "label", FEATURES, {"C": [0.1, 1.0]}, cv=2, plan="local", random_state=0
    ).fit(frame)


def test_the_page_holds_scores_worst_and_bad_groups(
    fitted: GroupedEstimator, tmp_path: Path
) -> None:
    about = fitted.report(tmp_path / "page.html", worst=11)
    page = (tmp_path / "page.html").read_text()
    assert about["groups"] == 12
    assert about["bad_groups"] == 1
    final = [row for row in fitted.results_.to_pylist() if row["fold"] is None]
    good = [row for row in final if row["score"] is not None]
    assert about["mean_score_by_groups"] == pytest.approx(np.mean([r["score"] for r in good]))
    weights = [row["n_rows"] for row in good]
    weighted = np.average([row["score"] for row in good], weights=weights)
    assert about["mean_score_by_rows"] == pytest.approx(weighted)
    assert "<td>every row has the same class</td>" in page
    assert "&lt;g003&gt; &amp; co" in page
    assert "<g003>" not in page
    assert "src='data:image/png;base64," in page
    order = sorted(good, key=lambda row: row["score"])
    places = [page.index(f"<tr><td>{row['key']}</td>") for row in order if row["key"][0] == "g"]
    assert places == sorted(places)


def test_a_picture_is_written(fitted: GroupedEstimator, tmp_path: Path) -> None:
    fitted.report(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["page.png"]


def test_bad_wishes_are_refused(fitted: GroupedEstimator, tmp_path: Path) -> None:
    with pytest.raises(kp.ParameterError, match="neither in \\.html nor"):
        fitted.report(tmp_path / "page.pdf")
    with pytest.raises(kp.ParameterError, match="worst=0"):
        fitted.report(tmp_path / "page.png", worst=0)
    with pytest.raises(kp.StoreError, match="cannot be written"):
        fitted.report(tmp_path / "no" / "page.png")


def test_the_command_line_reports_on_a_store(
    fitted: GroupedEstimator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted.save(tmp_path / "s")
    assert main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "r.html")]) == 0
    assert "12 groups, 1 bad; mean accuracy" in capsys.readouterr().out
    assert (tmp_path / "r.html").exists()
    assert main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "r.txt")]) == 1
    assert "neither in .html nor" in capsys.readouterr().err
