import random
from pathlib import Path

import pytest

from tests.runs import refused
from tools import study_report
from tools.study_report import replace_section
from tools.study_results import ADDED, COLUMNS, TEXT, Results, mean_se, read_rows

ROOT = Path(__file__).resolve().parents[2]


def row(arm, seed, top1, mse=None, gmac=1.0, status="finished"):
    empty = dict.fromkeys(COLUMNS + ADDED) | dict.fromkeys(TEXT, "")
    return empty | dict(
        arm=arm, seed=seed, status=status, top1=top1, mse_masked=mse, gmac=gmac, device="cpu", torch="2"
    )


@pytest.fixture
def synthetic():
    """Every arm with three seeds. The seed has a large effect, the arm a small one."""
    rng = random.Random(0)
    rows = []
    for seed, level in enumerate((40.0, 45.0, 50.0)):
        for arm in study_report.PAPER:
            gain = {"plain": -1.0, "progressive": -0.2, "furthest": -0.8, "prmim": -0.1}.get(
                arm.rstrip("0123456789"), 0.0
            )
            rows.append(
                row(
                    arm,
                    seed,
                    level + gain + rng.gauss(0, 1e-3),
                    mse=0.01 * (1 - gain),
                    gmac=1.0 if arm == "mae" else 0.7,
                )
            )
        rows.append(row("scratch", seed, level - 10, gmac=None))
    rows += [row("avgpool", 0, None, status="diverged"), row("avgpool", 1, 44.0, mse=0.02)]
    return rows


def test_mean_and_standard_error():
    assert mean_se([]) == (None, None, 0) and mean_se([3.0]) == (3.0, None, 1)
    mean, error, n = mean_se([1.0, 2.0, 3.0, 6.0])
    assert (mean, n) == (3.0, 4) and error == pytest.approx((14 / 3) ** 0.5 / 2)  # deviations 4 + 1 + 0 + 9


def test_differences_are_paired_by_seed():
    """The seeds differ by 10 points, the arms by 1, so only paired differences are precise."""
    rows = [
        row("a", 0, 41.0),
        row("a", 1, 51.2),
        row("a", 3, 99.0),
        row("b", 1, 50.0),
        row("b", 0, 40.0),
        row("b", 2, 0.0),
    ]
    differences = Results(rows).effect([("a", "b")])
    assert differences == pytest.approx([1.0, 1.2])  # seeds 2 and 3 have no partner
    assert mean_se(differences)[1] == pytest.approx(0.1)
    assert Results(rows).effect([("a", "b")], relative=True) == pytest.approx([2.5, 2.4])


def test_effects_average_over_ratios_before_seeds():
    rows = [row("x25", 0, 3.0), row("y25", 0, 1.0), row("x50", 0, 5.0), row("y50", 0, 4.0)]
    rows += [row("x25", 1, 2.0), row("y25", 1, 2.0), row("x50", 1, 1.0), row("y50", 1, 0.0)]
    rows += [
        row("x25", 2, 9.0),
        row("y25", 2, 0.0),
        row("x50", 2, 9.0),
    ]  # y50 has not finished, so seed 2 does not count
    assert Results(rows).effect([("x25", "y25"), ("x50", "y50")]) == pytest.approx([1.5, 0.5])
    rows.append(row("x50", 3, None, status="diverged"))  # the other seeds would be too good
    assert Results(rows).effect([("x25", "y25"), ("x50", "y50")]) == []


def test_tables_of_synthetic_numbers(synthetic):
    results = Results(synthetic)
    text = study_report.ablation_table(results)
    assert "| 0 | MAE | 45.00 ± 2.89 (3) | reference | – | 10.00 ± 0.00 (3) | 1.00× | 81.7 |" in text
    line = next(line for line in text.splitlines() if "plain partial" in line and line.startswith("| .50"))
    assert "| -1.00 ± 0.00 (3) | reference |" in line and line.endswith("| 0.70× | 81.1 |")
    effects = study_report.effects_table(results)
    line = next(line for line in effects.splitlines() if "progressive reconstruction, random" in line)
    assert line.count("+0.80 ± 0.00 (3)") == 4 and line.endswith("| +0.3, +0.5, +1.2 |")
    designs = study_report.variants_table(results, "Design of the aggregation")
    assert "| average pooling | diverged (seeds 0); else 44.00 (1) | – |" in designs and designs.count("reference") == 2
    assert "| -10.00 ± 0.00 (3) |" in next(line for line in text.splitlines() if "no pre-training" in line)


def test_csv_and_plots(synthetic, tmp_path):
    report = tmp_path / "docs/study.md"
    tables = study_report.write(report, "cpu", synthetic)
    path = tmp_path / "docs/study_cpu.csv"
    assert read_rows(path) == synthetic
    figures = sorted((tmp_path / "docs/figures").iterdir())
    assert [f.name for f in figures] == ["study_cpu_ratios.svg", "study_cpu_variants.svg"]
    first = [f.read_text() for f in figures]
    assert all("<svg" in text and len(text) > 10_000 for text in first)
    report.write_text(report.read_text().replace("# The study", "# The study\n\nProse that stays."))
    study_report.main([str(path), "--report", str(report)])
    assert [f.read_text() for f in figures] == first  # equal numbers give equal files
    assert "Prose that stays." in report.read_text() and tables in report.read_text()
    for figure in figures:
        assert f"figures/{figure.name}" in tables


def test_plots_of_an_unfinished_study(tmp_path):
    study_report.write(tmp_path / "study.md", "cpu", [row("mae", 0, 40.0, mse=0.1), row("prmim50", 0, 39.0, mse=0.1)])
    assert "39.00 (1)" in (tmp_path / "study.md").read_text() and "Effects" not in (tmp_path / "study.md").read_text()


def test_sections_are_replaced_one_by_one():
    text = replace_section(replace_section("# Title\n", "cpu", "one"), "gpu", "two")
    assert text.index("one") < text.index("two")
    text = replace_section(text + "\nAfter.\n", "cpu", "three")
    assert (
        "one" not in text
        and "three" in text
        and "two" in text
        and text.endswith("\nAfter.\n")
        and text.startswith("# Title")
    )
    with pytest.raises(ValueError, match="only one of the markers"):
        replace_section(text.replace("<!-- end of study cpu -->", ""), "cpu", "four")


def test_errors(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for path in ("other.csv", "absent.csv"):
        assert path in refused(capsys, study_report.main, tmp_path / path, "--report", tmp_path / "study.md")
