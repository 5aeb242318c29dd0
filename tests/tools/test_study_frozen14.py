import itertools
import math
import statistics

import numpy as np
import pytest

pytest.importorskip("scipy")
from tools import study_frozen14 as study
from tools.study_results import write_rows

GAINS = {"mae": 0.0, "plain": -0.6, "progressive": -0.1, "prmim": 0.0}


def write(path, gains=GAINS, noise=0.3, **changes):
    """Rows whose seeds differ by 1 point, and runs by `noise`. changes: of progressive65 with seed 400."""
    generator = np.random.default_rng(0)
    rows = []
    for seed, arm in itertools.product(study.SEEDS, study.ARMS):
        method = arm.rstrip("056")
        score = 40 + seed % 2 + gains[method] + noise * generator.standard_normal()
        row = {"arm": arm, "seed": seed, "status": "finished", "loss": 0.4, "knn": score - 5, "ridge": score + 5}
        row |= {"mse_masked": None if method == "plain" else 0.003}
        rows.append(row | {"top1": score} if seed in study.FINETUNED else row)
    rows[4] |= changes
    write_rows(path, rows)
    return rows


def test_a_table_with_a_missing_run_is_refused(tmp_path, capsys):
    rows = write(tmp_path / "rows.csv")
    write_rows(tmp_path / "rows.csv", rows[:-1])
    with pytest.raises(SystemExit):
        study.main([str(tmp_path / "rows.csv")])
    assert "125 of 126 runs: 1 missing, 0 not registered" in capsys.readouterr().err


def test_differences_are_paired_and_averaged_over_the_ratios(tmp_path):
    rows = write(tmp_path / "rows.csv")
    score = {(r["arm"], r["seed"]): (r["knn"] + r["ridge"]) / 2 for r in rows}
    expected = [
        ((score["plain50", s] - score["mae", s]) + (score["plain65", s] - score["mae", s])) / 2 for s in study.SEEDS
    ]
    np.testing.assert_allclose(study.difference(study.read(tmp_path / "rows.csv"), "plain", "mae"), expected)
    answer = study.answers(study.read(tmp_path / "rows.csv"))[0]
    assert answer.d == pytest.approx(statistics.fmean(expected))
    assert answer.deviation == pytest.approx(statistics.stdev(expected))


def test_p_values_by_integrals_of_student_s_density():
    d = np.array([0.3, -0.1, 0.25, 0.1, 0.4, -0.05])
    n, mean, error = len(d), d.mean(), d.std(ddof=1) / math.sqrt(len(d))
    constant = math.gamma(n / 2) / (math.sqrt((n - 1) * math.pi) * math.gamma((n - 1) / 2))
    x = np.linspace(0, 400, 4_000_001)

    def above(t):  # P(T > t) for t >= 0
        inside = x[x <= t]
        return 0.5 - np.trapezoid(constant * (1 + inside**2 / (n - 1)) ** (-n / 2), inside)

    assert study.p_value(d, 1) == pytest.approx(2 * above(mean / error), abs=1e-4)
    assert study.p_value(d, 0) == pytest.approx(above((study.LEVEL - mean) / error), abs=1e-4)  # the nearer bound
    assert study.p_value(np.array([0.1, math.nan]), 1) == 1


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([0.03, 0.001, 0.0124, 0.2, 0.5], [(k in (1, 2), (1 / 60, 0.01, 0.0125, 1 / 60, 1 / 60)[k]) for k in range(5)]),
        ([0.02] * 5, [(False, 0.01)] * 5),
        ([0.001] * 5, [(True, 0.01), (True, 0.0125), (True, 1 / 60), (True, 0.025), (True, 0.05)]),
    ],
)  # fmt: skip
def test_holm(p_values, expected):
    assert [rejected for rejected, _ in study.holm(p_values)] == [rejected for rejected, _ in expected]
    np.testing.assert_allclose([level for _, level in study.holm(p_values)], [level for _, level in expected])


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 3.0])
def test_an_interval_says_what_the_answer_says(tmp_path, noise):
    write(tmp_path / "rows.csv", noise=noise)
    for place, answer in enumerate(study.answers(study.read(tmp_path / "rows.csv"))):
        excludes = (
            answer.low > -study.LEVEL and answer.high < study.LEVEL if place == 3 else answer.low * answer.high > 0
        )
        assert excludes == (answer.verdict != "undecided")


def test_answers_of_known_effects(tmp_path):
    write(tmp_path / "rows.csv", noise=0.05)
    table = study.read(tmp_path / "rows.csv")
    assert [a.verdict for a in study.answers(table)] == ["yes", "yes", "yes", "level", "yes"]
    write(tmp_path / "rows.csv", GAINS | {"plain": 0.5}, noise=0.05)
    assert study.answers(study.read(tmp_path / "rows.csv"))[0].verdict == "the opposite"


@pytest.mark.parametrize("changes", [{"status": "diverged"}, {"loss": math.nan}, {"knn": None}])
def test_a_diverged_run_leaves_its_questions_undecided(tmp_path, changes):
    write(tmp_path / "rows.csv", noise=0.05, **changes)  # of progressive65
    found = study.answers(study.read(tmp_path / "rows.csv"))
    assert [a.verdict for a in found] == ["yes", "undecided", "yes", "level", "undecided"]
    assert found[1].p == found[4].p == 1


def test_tables_and_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    write(tmp_path / "rows.csv")
    study.main([str(tmp_path / "rows.csv"), "--figure", str(tmp_path / "study.svg")])
    out = capsys.readouterr().out
    assert out.count("4 PR-MIM − MAE") == 2 and "| plain50 | " in out
    assert "progressive − plain" in (tmp_path / "study.svg").read_text() or (tmp_path / "study.svg").stat().st_size
