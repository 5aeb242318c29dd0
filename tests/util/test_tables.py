"""Tables as CSV and as Markdown."""

from util.tables import write_csv


def test_csv_holds_unrounded_numbers_and_empty_fields(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(path, ["name", "x"], [{"name": "a", "x": 1 / 3, "other": 5}, {"name": "b", "x": None}])
    assert path.read_text() == f"name,x\na,{1 / 3}\nb,\n"
