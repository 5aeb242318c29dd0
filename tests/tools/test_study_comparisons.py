"""The comparisons of the second study: intervals, verdicts, tables and plots."""

import math
import random

import pytest

from tests.tools.test_study_report import ROOT, row
from tools import study_comparisons, study_report
from tools.study_comparisons import Comparison, interval, verdict
from tools.study_results import ADDED, COLUMNS, Results, read_rows, write_rows
from util.tables import write_csv

GAINS = {"mae": 0.0, "plain50": -1.2, "plain65": -2.2, "progressive50": -0.3, "progressive65": -0.7}
GAINS |= {"prmim50": 0.1, "prmim65": -0.2, "prmim50_all": -0.5, "prmim50_masknorm": 0.1, "prmim50_gaussian": 1.1}
GAINS |= {"prmim50_convnext": -0.9, "prmim50_cell": 0.1, "crossmae": -0.5, "crossmae_prmim50": -0.6, "mae_short": -0.9}
GAINS |= {"scratch": -5.0}


def result(arm, seed, top1, **others):
    return row(arm, seed, top1, mse=0.01, gmac=1.0 if arm == "mae" else 0.6) | others


@pytest.fixture
def rows():
    """All arms and seeds. The seeds differ by points, the noise of a run is 0.01."""
    rng = random.Random(0)
    return [
        result(
            arm, seed, top1 := 50 + 3 * seed + gain + rng.gauss(0, 0.01),
            top1_each=f"{top1 - 1} {top1} {top1 + 1}", knn=top1 / 2, ridge=top1 - 10,
        )
        for seed in study_comparisons.SEEDS for arm, gain in GAINS.items()
    ]  # fmt: skip


def test_interval_by_hand():
    """Deviations from 3 are -2, -1, 0 and 3, so the variance is 14/3. Student's t for 3 degrees of freedom is 3.182."""
    mean, half = interval([1.0, 2.0, 3.0, 6.0])
    assert mean == 3.0 and half == pytest.approx(3.182 * math.sqrt(14 / 3) / 2)
    assert study_comparisons.with_interval([1.0, 2.0, 3.0, 6.0]) == "+3.00 [-0.44, +6.44] (4)"
    for values in ([], [1.0], [0.0] * 9):
        with pytest.raises(ValueError, match=f"an interval needs 2 to 8 values, got {len(values)}"):
            interval(values)


def test_quantiles_of_student_s_t():
    """The density's integral up to each quantile is .975, by Simpson's rule."""
    assert len(study_comparisons.T_975) == len(study_comparisons.SEEDS) - 1
    for df, quantile in enumerate(study_comparisons.T_975, 1):
        scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(math.pi * df)
        steps = 2000
        points = [scale * (1 + (i * quantile / steps) ** 2 / df) ** (-(df + 1) / 2) for i in range(steps + 1)]
        total = points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2])
        assert 0.5 + total * quantile / steps / 3 == pytest.approx(0.975, abs=3e-5)  # quantiles have 3 decimals


# Eight values with a standard deviation of 1: the standard error is .354, half the interval .836.
UNIT = [(i - 3.5) / math.sqrt(6) for i in range(8)]


@pytest.mark.parametrize(
    ("claim", "bound", "mean", "said"),
    [
        ("higher", 0.5, 0.9, "confirmed"),
        ("higher", 0.5, 0.8, "undecided"),
        ("higher", 0.5, -0.4, "refuted"),
        ("higher", 0.5, -2.0, "refuted"),  # the wrong sign
        ("higher", 2.0, 0.9, "too small to matter"),
        ("lower", 0.5, -0.9, "confirmed"),
        ("lower", 0.5, 0.9, "refuted"),
        ("lower", 0.5, 0.0, "undecided"),
        ("level", 1.0, 0.1, "level"),
        ("level", 1.0, -0.2, "undecided"),
        ("level", 1.0, -1.9, "not level"),
        ("level", 1.0, 1.9, "not level"),
        ("differs", None, -0.9, "lower"),
        ("differs", None, 0.9, "higher"),
        ("differs", None, 0.8, "undecided"),
        ("better", None, 0.72, "candidate"),
        ("better", None, 0.70, "default stays"),
        ("better", None, -2.0, "default stays"),
    ],
)
def test_verdicts(claim, bound, mean, said):
    assert interval(UNIT)[1] == pytest.approx(2.365 / math.sqrt(8))
    assert verdict(Comparison("", (), claim, bound), [mean + value for value in UNIT]) == said


def test_table_of_comparisons(rows):
    """Both ratios are averaged first. Other seeds do not count."""
    more = [result(arm, 100, 99.0 if arm == "plain50" else 0.0) for arm in GAINS]
    text = study_comparisons.section(Results(rows + more))
    found = {line.split("|")[1].strip(" *"): line for line in text.splitlines() if line.startswith("|")}
    assert "recover what throwing costs? Answer: yes." in text
    expected = {"1.": (-1.7, "confirmed"), "2.": (1.2, "confirmed"), "3.": (-0.05, "level"), "4.": (0.45, "confirmed")}
    expected |= {"5.": (-0.6, "lower"), "7.": (1.0, "confirmed"), "6a": (0.0, ""), "6b": (-1.0, "default stays")}
    expected |= {"6c": (1.0, "candidate")}
    for start, (value, said) in expected.items():
        (line,) = (line for name, line in found.items() if name.startswith(start))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert float(cells[1].split()[0]) == pytest.approx(value, abs=0.03)
        assert float(cells[2].split()[0]) == pytest.approx(value / 2, abs=0.03)  # kNN
        assert "(8)" in cells[1] and (cells[5] == said or not said), line
    assert "| PR-MIM, ρ_d .50 |" in text and "0.600×" in text
    assert "between the fine-tunings of one run: 1.00 points" in text


def verdicts(rows):
    lines = study_comparisons.comparisons_table(Results(rows)).splitlines()[2:]
    return [line.strip("|").split("|")[-1].strip() for line in lines]


def test_no_verdict_without_all_seeds_or_with_a_diverged_run(rows):
    said = verdicts(r for r in rows if (r["arm"], r["seed"]) != ("progressive65", 3))
    assert said[:4] == ["confirmed", "7 of 8 seeds", "level", "7 of 8 seeds"]
    lost = [r | dict(status="diverged", top1=None) if (r["arm"], r["seed"]) == ("mae", 0) else r for r in rows]
    said = verdicts(lost)
    assert said[0] == "none: an arm diverged" and said[2] == "none: an arm diverged (exploratory)"
    lines = study_comparisons.comparisons_table(Results(lost)).splitlines()
    assert [line.count("| – | – | – |") for line in lines[2:6]] == [1, 0, 1, 0]  # questions 1 and 3
    assert study_comparisons.recovery(Results(lost)).startswith("not shown, because one of")
    unfinished = [r for r in rows if (r["arm"], r["seed"]) != ("progressive65", 3)]
    assert study_comparisons.recovery(Results(unfinished)) == "not known yet"


def test_a_primary_question_is_exploratory_after_one_without_a_yes(rows):
    assert not any("exploratory" in said for said in verdicts(rows))
    small = shifted(rows, {"progressive50": -1.2 + 0.3, "progressive65": -2.2 + 0.3})  # surely less than half a point
    said = verdicts(small)
    assert said[:4] == ["confirmed", "too small to matter", "level (exploratory)", "confirmed (exploratory)"]
    assert not any("exploratory" in later for later in said[4:])  # these are secondary
    assert study_comparisons.recovery(Results(small)).startswith("not shown, because one of")


def shifted(rows, gains):
    """The rows with other differences to MAE for some arms."""
    return [r | dict(top1=r["top1"] + gains[r["arm"]] - GAINS[r["arm"]]) if r["arm"] in gains else r for r in rows]


def test_only_the_best_aggregation_is_the_candidate(rows):
    both = shifted(rows, {"prmim50_masknorm": 0.9, "prmim50_gaussian": 1.1, "prmim50_convnext": 0.3})
    assert verdicts(both)[5:8] == ["better, but not the best", "better, but not the best", "candidate"]


def test_recovery_needs_a_plain_that_is_not_level(rows):
    """Plain loses .55 in the mean, which is confirmed and below the bound of .6."""
    small = shifted(rows, {"plain50": -0.53, "plain65": -0.57, "progressive50": 0.0, "progressive65": 0.0})
    assert verdicts(small)[:3] == ["confirmed", "confirmed", "level"]
    assert "plain itself is level" in study_comparisons.recovery(Results(small))
    assert study_comparisons.recovery(Results(rows)) == "yes"


def test_section_and_plots(rows, tmp_path):
    report = tmp_path / "study.md"
    tables = study_report.write(report, "grid14", rows)
    assert tables in report.read_text() and read_rows(tmp_path / "study_grid14.csv") == rows
    figures = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in figures] == ["study_grid14_arms.svg", "study_grid14_comparisons.svg"]
    assert all(f"figures/{path.name}" in tables for path in figures)
    first = [path.read_text() for path in figures]
    study_report.main([str(tmp_path / "study_grid14.csv"), "--report", str(report)])
    assert [path.read_text() for path in figures] == first
    write_rows(tmp_path / "study_grid14.csv", rows[:1])  # a study that has just begun
    study_report.main([str(tmp_path / "study_grid14.csv"), "--report", str(report)])
    assert report.read_text().count("0 of 8 seeds") == 11
    assert all(path.read_text() != before for path, before in zip(figures, first, strict=True))


def test_csvs_of_earlier_studies_are_read(tmp_path):
    """Their numbers are what the files hold. What they lack is empty."""
    for name in ("cpu", "peers"):
        lines = (ROOT / f"docs/study_{name}.csv").read_text().splitlines()
        found = read_rows(ROOT / f"docs/study_{name}.csv")
        assert len(found) == len(lines) - 1
        for line, read in zip(lines[1:], found, strict=True):
            arm, seed, _, top1, *_ = line.split(",")
            assert (read["arm"], str(read["seed"]), str(read["top1"])) == (arm, seed, top1)
            assert read["knn"] is None and read["job"] == ""
    write_csv(tmp_path / "old.csv", COLUMNS, found)
    write_rows(tmp_path / "new.csv", read_rows(tmp_path / "old.csv"))
    assert read_rows(tmp_path / "new.csv") == found
    assert (tmp_path / "new.csv").read_text().splitlines()[0] == ",".join(COLUMNS + ADDED)
