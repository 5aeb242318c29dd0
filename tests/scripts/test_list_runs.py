"""The table of runs: tiny runs of all mains in every state, their files damaged, and what chooses and sorts rows."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from downstream.probe import main_probe
from downstream.robustness import main_robustness
from scripts import list_runs
from tests import runs
from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.downstream.robustness import test_main_robustness as robustness
from tests.patches import MonkeyPatch
from tests.runs import evaluation, finetune, pretrain, refused, reports
from util.run.files.reports import read_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def output(labelled, tmp_path_factory):
    """Runs of all mains that train or evaluate, most of them finished."""
    root = tmp_path_factory.mktemp("output")
    pretrain(labelled, root / "mae", "--throw_ratio", 0, "--knn_every", 1)
    pretrain(labelled, root / "prmim", "--seed", 3, "--max_steps", 4)
    finetune(labelled, root / "mae" / "tuned", "--finetune", root / "mae")
    head = ["--trainable_blocks", "0", "--lr", "0.1"]
    flags = finetune.flags.replace("--lr 1e-3", "")
    runs.Program(finetune.module, flags)(labelled, root / "head", "--finetune", root / "mae", *head)
    finetune.module.main([*evaluation(root / "mae" / "tuned", labelled), "--output_dir", str(root / "scored")])
    segment(write_stripes(tmp_path_factory.mktemp("striped")), root / "segments")
    flags = "--steps 3 --total_batch_size 8 --num_workers 0 --device cpu --probes knn"
    folders = ["--data_path", str(labelled), "--output_dir", str(root / "probed")]
    main_probe.main([str(root / "mae"), *flags.split(), *folders])
    return root


def rows_of(capsys, *arguments):
    """{folder relative to the first argument: its row}, in order."""
    capsys.readouterr()
    list_runs.main([str(word) for word in (*arguments, "--format", "json")])
    rows = json.loads(capsys.readouterr().out)
    return {os.path.relpath(row["run"], arguments[0]): SimpleNamespace(**row) for row in rows}


def row_of(capsys, folder):
    (row,) = rows_of(capsys, folder).values()
    return row


# --------------------------------------------------------------------------------------------------------- programs


def test_each_run_has_a_row(output, capsys):
    programs = {name: row.program for name, row in rows_of(capsys, output).items()}
    assert programs == {
        "head": "linprobe",
        "mae": "pretrain",
        "mae/tuned": "finetune",
        "prmim": "pretrain",
        "probed": "probe",
        "scored": "eval",
        "segments": "segmentation",
    }


def test_a_pre_training_has_its_method_steps_loss_and_knn(output, capsys):
    rows = rows_of(capsys, output)
    mae, prmim = rows["mae"], rows["prmim"]
    assert (mae.model, mae.throw_ratio, mae.sampling, mae.aggregation) == ("mae_vit_micro_patch4", 0, None, None)
    assert (prmim.throw_ratio, prmim.sampling, prmim.aggregation) == (0.5, "furthest", "dwconv")
    assert (mae.step, mae.steps, mae.state) == (6, 6, "finished")  # two epochs of 24 images, 8 at a step
    assert (prmim.step, prmim.steps, prmim.state, prmim.why) == (4, 6, "stopped", "--max_steps 4")
    losses = [report["loss"] for report in reports(output / "mae") if "loss" in report]
    accuracies = [report["knn_top1"] for report in reports(output / "mae") if "knn_top1" in report]
    assert (mae.loss, mae.knn) == (losses[5], accuracies[2])
    assert prmim.knn is None


def test_scores_are_the_best_of_all_evaluations(output, capsys):
    rows = rows_of(capsys, output)
    for name, measure in (("mae/tuned", "top1"), ("head", "top1"), ("segments", "miou")):
        scores = [report[f"val_{measure}"] for report in reports(output / name) if f"val_{measure}" in report]
        assert len(scores) == 2
        assert (rows[name].best, rows[name].measure, rows[name].state) == (max(scores), measure, "finished")
    assert rows["segments"].steps == 6
    last = read_json(output / "scored" / "results.json")["last"]
    assert (rows["scored"].best, rows["scored"].step, rows["scored"].state) == (last["val_top1"], 6, "finished")
    scores = [row["top1"] for row in read_json(output / "probed" / "probe.json")["results"]]
    assert (rows["probed"].best, rows["probed"].measure) == (max(scores), "top1 knn")
    assert rows["probed"].state == "finished"
    assert "mae/checkpoint-6.pth" in rows["probed"].model


def test_a_run_of_detection(tmp_path, capsys):
    pytest.importorskip("faster_coco_eval")
    detect(write_shapes(tmp_path / "shapes"), tmp_path / "run", "--num_iters", 2)
    row = row_of(capsys, tmp_path / "run")
    last = read_json(tmp_path / "run" / "results.json")["last"]
    assert (row.program, row.step, row.steps, row.state) == ("detection", 2, 2, "finished")
    assert (row.best, row.measure) == (last["val_box_ap"], "box_ap")


def test_results_of_robustness(tmp_path, capsys):
    robustness.write_classifier(tmp_path / "classifier")
    robustness.write_set(tmp_path / "sets" / "imagenet_a", robustness.SUBSET, 3, seed=2)
    out = tmp_path / "out"
    with MonkeyPatch.context() as patch:
        robustness.make_small(patch)
        main_robustness.main(robustness.arguments(tmp_path / "classifier", out, tmp_path / "sets", "imagenet_a"))
    row = row_of(capsys, out)
    figures = read_json(out / "robustness.json")["summary"]["imagenet_a"]
    assert (row.program, row.best, row.measure) == ("robustness", figures["top1"], "top1 imagenet_a")
    assert (row.state, row.step) == ("finished", 1)
    (out / "robustness.md").unlink()  # as after a kill before the end
    assert row_of(capsys, out).state == "interrupted"


# ----------------------------------------------------------------------------------------------------------- states


def test_a_run_is_running_then_stopped_then_killed_then_running_again(photos, tmp_path, capsys):
    out = tmp_path / "run"
    first = runs.start(photos, out, "--save_steps", 1, fault=("hold", 2, "all", "-"), processes=1)
    runs.wait_for_step(out, 2, first)
    row = row_of(capsys, out)
    assert (row.state, row.step, row.steps) == ("runs", 2, 9)
    assert row.why.startswith(f"process {first.pid} on ")
    first.terminate()
    first.wait()
    row = row_of(capsys, out)
    assert (row.state, row.why, row.step) == ("stopped", "SIGTERM", 3)
    second = runs.start(photos, out, "--save_steps", 1, fault=("hold", 5, "all", "-"), processes=1)
    runs.wait_for_step(out, 5, second)
    assert row_of(capsys, out).state == "runs"
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    row = row_of(capsys, out)
    assert (row.state, row.step) == ("interrupted", 5)
    assert runs.finish(photos, out, processes=1)  # its lock was not disturbed
    assert row_of(capsys, out).state == "finished"


def test_a_loss_that_is_not_finite_fails_the_run(photos, tmp_path, capsys):
    flags = ("--epochs", 30, "--blr", 1e6, "--picture_every", 0)
    message = pretrain.refused(capsys, photos, tmp_path / "run", *flags, code=3)
    row = row_of(capsys, tmp_path / "run")
    assert (row.state, row.loss, row.steps) == ("failed", "not finite", 90)
    assert "not finite in each of the last 20 steps" in row.why
    assert row.why in message
    pretrain.refused(capsys, photos, tmp_path / "run", "--epochs", 7)  # a start that is refused changes nothing
    assert row_of(capsys, tmp_path / "run").state == "failed"


def test_an_error_of_the_program_is_the_reason(photos, tmp_path, capsys):
    runs.finish(photos, tmp_path / "run", fault=("raise", 4, "all", "-"), processes=1, code=1)
    row = row_of(capsys, tmp_path / "run")
    assert (row.state, row.why) == ("failed", "RuntimeError: a fault")
    runs.finish(photos, tmp_path / "run", processes=1)
    assert row_of(capsys, tmp_path / "run").state == "finished"


@pytest.mark.parametrize(
    ("holder", "state"),
    [("process 5 on elsewhere", "unknown"), ("", "unknown"), ("process 5 on {here}", "interrupted")],
)
def test_a_run_on_another_host_may_still_run(holder, state, tmp_path, capsys):
    """And so may one on a file system without locks, where the lock's file is empty."""
    (tmp_path / "log.jsonl").write_text('{"step": 3, "loss": 1.5}\n')
    (tmp_path / "log.txt").write_text("2026-01-01 00:00:00 epoch 0, step 3/9: loss 1.5\n")
    (tmp_path / ".lock").write_text(holder.format(here=os.uname().nodename))
    row = row_of(capsys, tmp_path)
    assert (row.state, row.step, row.steps, row.loss) == (state, 3, 9, 1.5)
    if state == "unknown":
        assert "its lock is not visible here" in row.why


def test_a_start_elsewhere_makes_the_end_of_the_one_before_worthless(tmp_path, capsys):
    log = tmp_path / "log.txt"
    lock = tmp_path / ".lock"
    log.write_text("2026-01-01 00:00:00 stopped by SIGTERM after step 3 of 9; the same command goes on from there\n")
    lock.write_text("process 5 on elsewhere")
    os.utime(lock, (1000, 1000))
    assert row_of(capsys, tmp_path).state == "stopped"
    os.utime(log, (999, 999))
    assert row_of(capsys, tmp_path).state == "unknown"


# ---------------------------------------------------------------------------------------------------------- damage


FILES = ("settings.json", "log.jsonl", "log.txt", "results.json", ".lock", ".progress", "checkpoint-6.json")


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", b"[1]", b'{"meta": {"settings": 3}, "last": 7}\n'])
def test_a_damaged_folder_has_a_row(output, content, tmp_path, capsys):
    """Each of the files is missing, cut off, no text, or holds something else: alone, and all of them."""
    for names in (*((name,) for name in FILES), FILES):
        folder = tmp_path / str(len(names)) / names[0]
        folder.mkdir(parents=True)
        for path in (output / "mae" / "tuned").iterdir():
            if path.suffix != ".pth" and path.is_file() and path.name not in names:
                (folder / path.name).write_bytes(path.read_bytes())
        for name in names:
            if content is not None:
                (folder / name).write_bytes(content)
        row = row_of(capsys, folder)
        if names == FILES:
            assert row.best is None
        else:
            assert (row.program, row.step, row.steps, row.measure) == ("finetune", 6, 6, "top1")
            assert row.model == "vit_micro_patch4"


def test_a_line_that_is_being_written_is_left_out(output, tmp_path, capsys):
    text = (output / "mae" / "log.jsonl").read_text()
    losses = [report["loss"] for report in reports(output / "mae") if "loss" in report]
    (tmp_path / "log.jsonl").write_text(text[: text.index('"loss": ' + json.dumps(losses[3])) + 9])
    row = row_of(capsys, tmp_path)
    assert (row.step, row.loss) == (3, losses[2])


def test_what_an_earlier_run_has_left_is_no_run(output, tmp_path, capsys):
    (tmp_path / "earlier-1").mkdir()
    (tmp_path / "earlier-1" / "log.jsonl").write_text("")
    (tmp_path / "log.jsonl").write_text("")
    assert list(rows_of(capsys, tmp_path)) == ["."]


# ---------------------------------------------------------------------------------------------- choosing and printing


def test_rows_are_chosen_by_columns_and_settings(output, capsys):
    def names(*conditions):
        words = [word for condition in conditions for word in ("--where", condition)]
        return list(rows_of(capsys, output, *words))

    assert names("program=pretrain") == ["mae", "prmim"]
    assert names("throw_ratio=.50") == ["prmim"]
    assert names("seed=3") == ["prmim"]
    assert names("hflip=true", "program=*e*t*") == ["mae", "mae/tuned", "prmim", "segments"]
    assert names("state=failed") == []


def test_runs_are_sorted_and_those_without_a_value_come_last(output, capsys):
    ascending = [row.loss for row in rows_of(capsys, output, "--sort", "loss").values()]
    descending = [row.loss for row in rows_of(capsys, output, "--sort", "loss", "--descending").values()]
    numbers = sorted(loss for loss in ascending if loss is not None)
    assert ascending == [*numbers, None, None]
    assert descending == [*reversed(numbers), None, None]


def test_settings_are_shown_if_runs_of_a_program_differ_in_them(output, capsys):
    rows = rows_of(capsys, output, "--where", "program=pretrain")
    settings = {name: read_json(output / name / "settings.json") for name in rows}
    columns = {"model", "throw_ratio", "sampling", "aggregation", "output_dir"}
    differing = {name for name in settings["mae"] if settings["mae"][name] != settings["prmim"][name]}
    for name, row in rows.items():
        assert row.settings == {setting: settings[name][setting] for setting in differing - columns}
    assert rows["prmim"].settings["seed"] == 3
    assert "seed" not in rows_of(capsys, output)["segments"].settings  # a single run of its program


def test_csv_has_the_numbers_of_json(output, capsys):
    rows = rows_of(capsys, output)
    list_runs.main([str(output), "--format", "csv"])
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["run"] for line in lines] == [row.run for row in rows.values()]
    for line, row in zip(lines, rows.values(), strict=True):
        assert line["loss"] == ("" if row.loss is None else repr(row.loss))
        assert line["state"] == row.state
        assert line["seed"] == str(row.settings.get("seed", ""))


def test_the_table_shows_what_is_known(output, capsys):
    list_runs.main([str(output), "--where", "program=pretrain"])
    header, _, mae, prmim = capsys.readouterr().out.splitlines()
    titles = [cell.strip() for cell in header.split("|")]
    assert "best" not in titles  # neither run has been scored
    for line, words in ((mae, ("6/6", "finished")), (prmim, ("4/6", "stopped: --max_steps 4", "seed 3"))):
        assert all(word in line for word in words)


def test_curves_of_the_chosen_runs_are_drawn(output, tmp_path, capsys):
    list_runs.main([str(output), "--where", "step=*", "--plot", str(tmp_path / "l.svg")])
    notes = capsys.readouterr().err
    assert "losses of 5 runs" in notes
    assert "not drawn: there is no log at" in notes
    assert (tmp_path / "l.svg").stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--where", "seed"], "--where 'seed' must be NAME=VALUE"),
        (["--where", "sed=3"], "--where: no column or setting is called 'sed'; close to it: seed"),
        (["--sort", "los"], "--sort: no column or setting is called 'los'; close to it: loss"),
        (["--plot", "l.txt"], "--plot 'l.txt' must end in .svg"),
        (["--plot", "l.svg", "--where", "program=probe"], "no listed run has a loss"),
    ],
)
def test_what_cannot_be_listed_is_refused(output, flags, message, capsys):
    assert message in refused(capsys, list_runs.main, output, *flags)


def test_folders_without_runs_are_refused(tmp_path, capsys):
    assert "is no folder" in refused(capsys, list_runs.main, tmp_path / "missing")
    assert "no run in" in refused(capsys, list_runs.main, tmp_path)


def test_the_list_waits_for_no_slow_library():
    code = "import sys, scripts.list_runs; print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "set()\n", found.stderr
