"""The list of runs: tiny runs of several programs in every state, and damaged files."""

import json
import os
import signal
from pathlib import Path

import pytest

from downstream.probe import main_probe
from scripts import list_runs
from tests import runs
from tests.runs import evaluation, finetune, pretrain, reports
from util.run.files.json_files import read_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def output(labelled, tmp_path_factory):
    """Runs of mains that train or evaluate, most of them finished."""
    root = tmp_path_factory.mktemp("out put")
    pretrain(labelled, root / "mae", "--throw_ratio", 0, "--knn_every", 1)
    pretrain(labelled, root / "prmim", "--seed", 3, "--max_steps", 4)
    finetune(labelled, root / "mae" / "tuned", "--finetune", root / "mae")
    finetune.module.main([*evaluation(root / "mae" / "tuned", labelled), "--output_dir", str(root / "scored")])
    flags = "--steps 3 --total_batch_size 8 --num_workers 0 --device cpu --probes knn"
    folders = ["--data_path", str(labelled), "--output_dir", str(root / "probed")]
    main_probe.main([str(root / "mae"), *flags.split(), *folders])
    return root


def rows_of(capsys, folder):
    """{folder relative to `folder`: its row}"""
    capsys.readouterr()
    list_runs.main([str(folder), "--format", "json"])
    return {os.path.relpath(row["run"], folder): row for row in json.loads(capsys.readouterr().out)}


def row_of(capsys, folder):
    (row,) = rows_of(capsys, folder).values()
    return row


def test_each_run_has_a_row(output, capsys):
    rows = rows_of(capsys, output)
    found = {name: (row["program"], row["step"], row["last_step"], row["state"]) for name, row in rows.items()}
    assert found == {
        "mae": ("main_pretrain.py", 6, 6, "finished"),
        "mae/tuned": ("main_finetune.py", 6, 6, "finished"),
        "prmim": ("main_pretrain.py", 4, 6, "stopped"),
        "probed": ("main_probe.py", None, None, "finished"),
        "scored": ("main_finetune.py", None, None, "finished"),
    }
    assert rows["prmim"]["why"] == "--max_steps 4"
    assert rows["prmim"]["throw_ratio"] == 0.5
    ours = rows["prmim"] | {"mean": [0.25]}
    assert list_runs.differing_settings(ours, [ours, rows["mae"]]).startswith("throw_ratio 0.5")
    losses = [report["loss"] for report in reports(output / "mae") if "loss" in report]
    accuracies = [report["knn_top1"] for report in reports(output / "mae") if "knn_top1" in report]
    assert (rows["mae"]["loss"], rows["mae"]["knn"]) == (losses[-1], accuracies[-1])
    scores = [report["val_top1"] for report in reports(output / "mae" / "tuned") if "val_top1" in report]
    assert (rows["mae/tuned"]["score"], rows["mae/tuned"]["measure"]) == (max(scores), "top1")
    assert rows["scored"]["score"] == read_json(output / "scored" / "results.json")["last"]["val_top1"]


def test_a_run_is_running_then_stopped_then_killed_then_finished(photos, tmp_path, capsys):
    out = tmp_path / "run"
    first = runs.start(photos, out, "--save_steps", 1, fault=("hold", 2, "all", "-"), processes=1)
    runs.wait_for_step(out, 2, first)
    row = row_of(capsys, out)
    assert (row["state"], row["step"], row["last_step"]) == ("running", 2, 9)
    first.terminate()
    first.wait()
    row = row_of(capsys, out)
    assert (row["state"], row["why"]) == ("stopped", "SIGTERM")
    assert row["step"] in (2, 3)  # the signal may come before the run begins to wait
    second = runs.start(photos, out, "--save_steps", 1, fault=("hold", 5, "all", "-"), processes=1)
    runs.wait_for_step(out, 5, second)
    assert row_of(capsys, out)["state"] == "running"
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    row = row_of(capsys, out)
    assert (row["state"], row["step"]) == ("interrupted", 5)
    assert runs.finish(photos, out, processes=1)  # its lock was not disturbed
    assert row_of(capsys, out)["state"] == "finished"


def test_a_run_that_fails_says_why(photos, tmp_path, capsys):
    message = pretrain.refused(capsys, photos, tmp_path, "--epochs", 30, "--blr", 1e6, "--picture_every", 0, code=3)
    row = row_of(capsys, tmp_path)
    assert (row["state"], row["loss"], row["last_step"]) == ("failed", None, 90)
    assert row["why"] in message
    pretrain.refused(capsys, photos, tmp_path, "--epochs", 7)  # a start that is refused changes nothing
    assert row_of(capsys, tmp_path) == row


def test_a_run_that_stopped_between_two_reports_has_its_own_step(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"state": "stopped", "step": 8}')
    (tmp_path / "log.jsonl").write_text('{"step": 6, "loss": 1.0}\n')
    row = row_of(capsys, tmp_path)
    assert (row["step"], row["loss"]) == (8, 1.0)


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe"])
def test_a_damaged_folder_has_a_row(output, content, tmp_path, capsys):
    for name in ("settings.json", "log.jsonl", "results.json", ".lock", "run.json"):
        folder = tmp_path / name
        folder.mkdir()
        for path in (output / "mae" / "tuned").glob("*.json*"):
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
        if content is not None or name != "run.json":
            row = row_of(capsys, folder)
            assert row["step"] == 6
            assert (row["measure"] == "top1") == (name != "results.json")
