"""The document of the fault matrix: which rows are of which run."""

import re
from xml.etree import ElementTree

import pytest

from tools import fault_matrix


def report(**rows):
    """pytest's report of one test per row: {number: failed or not}."""
    root = ElementTree.Element("testsuite")
    for number, failed in rows.items():
        case = ElementTree.SubElement(root, "testcase")
        properties = ElementTree.SubElement(case, "properties")
        ElementTree.SubElement(properties, "property", name="fault", value=f"{number} | a `| tee` | exact")
        if failed:
            ElementTree.SubElement(case, "failure")
    return root


def test_rows_keep_the_commit_that_they_were_measured_at(tmp_path, monkeypatch, capsys):
    path, asked = tmp_path / "faults.md", []
    path.write_text("# Faults\n\n<!-- table -->\nold\n")

    def run(commit, *flags, **rows):
        monkeypatch.setattr(fault_matrix, "commit_at_hand", lambda: commit)
        monkeypatch.setattr(fault_matrix, "run_tests", lambda repeats, names: asked.append(names) or report(**rows))
        fault_matrix.main(["--markdown", str(path), *flags])
        text = path.read_text()
        runs = re.findall(r"^- `(.*?)`: \d{4}-\d\d-\d\d, (\d+) row.*; torch \d.*, Python \d.* cores of ", text, re.M)
        cells = [line.split(" | ") for line in text.splitlines() if "tee" in line]
        return runs, [f"{row[0][2:]} {row[-1][:-2]}" for row in cells]

    assert run("aaa", F10=False, F2=False, U1=False) == ([("aaa", "3")], ["F2 aaa", "F10 aaa", "U1 aaa"])
    expected = [("aaa", "3"), ("bbb + changes", "1")], ["F2 aaa", "F10 bbb + changes", "U1 aaa"]
    assert run("bbb + changes", "--rows", "F10", F10=False) == expected
    with pytest.raises(SystemExit):
        run("ccc", "--rows", "F2", "U1", F2=False, U1=True)
    text = path.read_text()
    assert text.startswith("# Faults\n") and "old" not in text and "`aaa`" not in text and "`ccc`" in text
    assert "2 of 2 rows held (0 not run)" in text and "0 of 1 rows held (0 not run)" in text and r"a `\| tee`" in text
    assert asked == [None, ["F10"], ["F2", "U1"]]
    assert run("ddd", F1=False) == ([("ddd", "1")], ["F1 ddd"])  # all rows anew
