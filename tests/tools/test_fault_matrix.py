"""The document of the fault matrix: which rows are of which run."""

from xml.etree import ElementTree

import pytest

from tools import fault_matrix
from util.tables import read_csv


def report(**rows):
    """pytest's report of one test per row: {number: "failed", "skipped" or what was measured}."""
    root = ElementTree.Element("testsuite")
    for number, result in rows.items():
        case = ElementTree.SubElement(root, "testcase")
        properties = ElementTree.SubElement(case, "properties")
        ElementTree.SubElement(properties, "property", name="fault", value=f"{number} | a `| tee` | exact")
        if result == "failed":
            ElementTree.SubElement(case, "failure")
        elif result == "skipped":
            ElementTree.SubElement(case, "skipped", message="needs SLURM")
        else:
            ElementTree.SubElement(properties, "property", name="measured", value=result)
    return root


def test_rows_keep_the_commit_that_they_were_measured_at(tmp_path, monkeypatch, capsys):
    path, asked = tmp_path / "faults.md", []
    path.write_text("# Faults\n\n<!-- table -->\nold\n")

    def run(commit, *flags, **rows):
        monkeypatch.setattr(fault_matrix, "commit_at_hand", lambda: commit)
        monkeypatch.setattr(fault_matrix, "run_tests", lambda repeats, names: asked.append(names) or report(**rows))
        fault_matrix.main(["--markdown", str(path), *flags])
        return commits()

    def commits():
        columns = fault_matrix.COLUMNS
        return [f"{row['row']} {row['commit']}" for row in read_csv(path.with_suffix(".csv"), columns, columns)]

    def shown():
        return [line for line in path.read_text().splitlines() if "tee" in line]

    assert run("aaa", F10="0 lost", F2="1 lost", U1="2 lost") == ["F2 aaa", "F10 aaa", "U1 aaa"]
    assert ": F2-U1\n" in path.read_text()
    assert run("bbb + changes", "--rows", "F10", F10="3 lost") == ["F2 aaa", "F10 bbb + changes", "U1 aaa"]
    assert shown()[1] == r"| F10 a `\| tee` | exact |" and "3 lost" in path.with_suffix(".csv").read_text()
    text = path.read_text()
    assert (
        text.startswith("# Faults\n")
        and "old" not in text
        and "2 of 2 faults of a cluster held. 1 of 1 actions of users held." in text
        and len(shown()) == 2
    )
    (small,) = [line for line in text.splitlines() if line.startswith("- `bbb + changes`, 2")]
    assert small.endswith(": F10")
    described = path.with_suffix(".csv").read_text()
    assert "; torch " in described and " cores of " in described
    assert "- `aaa`, 2" in text and ": F2, U1\n" in text

    with pytest.raises(SystemExit):
        run("ccc", "--rows", "F2", "U1", F2="skipped", U1="failed")
    assert commits() == ["F2 ccc", "F10 bbb + changes", "U1 ccc"]
    text = path.read_text()
    assert "`aaa`" not in text and "1 of 1 faults of a cluster held. 0 of 1 actions of users held." in text
    assert len(shown()) == 3  # an action that did not hold is shown
    assert shown()[0].endswith("| exact (**not run**: needs SLURM) |")
    assert shown()[2].endswith("| exact (**held in 0 of 1 tests**) |")
    assert asked == [None, ["F10"], ["F2", "U1"]]
    assert run("ddd", F1="0 lost") == ["F1 ddd"]  # all rows anew
