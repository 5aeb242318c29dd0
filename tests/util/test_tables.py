"""Tables as CSV and as Markdown."""

from util.tables import markdown_table, write_csv


def test_csv_holds_unrounded_numbers_and_empty_fields(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(path, ["name", "x"], [{"name": "a", "x": 1 / 3, "other": 5}, {"name": "b", "x": None}])
    assert path.read_text() == f"name,x\na,{1 / 3}\nb,\n"


def test_markdown_table():
    assert markdown_table(["a", "b"], [[1, "x"], [2.5, None]]) == "| a | b |\n| --- | --: |\n| 1 | x |\n| 2.5 | None |"
    assert markdown_table(["a", "b", "c"], [], left=2).splitlines()[1] == "| --- | --- | --: |"


def test_padded_cells_of_a_column_have_one_width():
    lines = markdown_table(["name", "b"], [["x", 12345]], pad=True).splitlines()
    assert lines == ["| name | b     |", "| ---  | --:   |", "| x    | 12345 |"]
