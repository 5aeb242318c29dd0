import itertools

import pytest

from tests.runs import refused
from tools import benchmark_data
from util.data import decode


@pytest.mark.long
def test_every_way_is_measured_on_the_same_images(photos, tmp_path, capsys):
    flags = ["--batch_size", "4", "--batches", "1", "--rounds", "1", "--markdown", str(tmp_path / "data.md")]
    benchmark_data.main([str(photos / "train"), *flags])
    out = capsys.readouterr().out
    assert (tmp_path / "data.md").read_text() == out
    table = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:6]] for row in out.splitlines()[4:]}
    names = [
        "reference",
        "loader reference",
        "pillow",
        *["simplejpeg"] * (decode.simplejpeg is not None),
        "packed",
        "packed q90",
    ]
    assert list(table) == names and table["reference"][1] == "1.00"
    errors = {name: float(row[3]) for name, row in table.items() if row[3] != "–"}
    assert errors["loader reference"] == 0 < errors["pillow"] == errors["packed"] < 0.5 < errors["packed q90"]


def test_errors(tmp_path, capsys):
    for arguments, message in (
        ([str(tmp_path)], "holds no image"),
        ([str(tmp_path), "--rounds", "0"], "--rounds must be at least 1, got 0"),
        ([str(tmp_path), "--markdown", "/dev/null/x.md"], "cannot be made: File exists"),
    ):
        assert message in refused(capsys, benchmark_data.main, *arguments)


def test_sampling_is_timed_for_one_image(monkeypatch):
    clock = itertools.count()  # one second for each batch
    monkeypatch.replace_in(benchmark_data, "time.perf_counter", lambda: next(clock))
    assert benchmark_data.sampling_microseconds(8, repeats=2) == 1e6 / 8
