"""Tables as CSV and as Markdown."""

import pytest

from util.tables import markdown_table, read_csv, write_csv


def test_csv_and_back(tmp_path):
    rows = [{"name": "a", "x": 1 / 3, "other": 5}, {"name": "b", "x": None, "other": 6}]
    write_csv(tmp_path / "t.csv", ["name", "x"], rows)
    assert read_csv(tmp_path / "t.csv", ["name", "x"], ("name",)) == [
        {"name": "a", "x": 1 / 3},
        {"name": "b", "x": None},
    ]
    with pytest.raises(ValueError, match="is no CSV of this script"):
        read_csv(tmp_path / "t.csv", ["missing"], ())


def test_markdown_table():
    assert markdown_table(["a", "b"], [[1, "x"], [2.5, None]]) == "| a | b |\n| --- | --: |\n| 1 | x |\n| 2.5 | None |"
    assert markdown_table(["a", "b", "c"], [], left=2).splitlines()[1] == "| --- | --- | --: |"
