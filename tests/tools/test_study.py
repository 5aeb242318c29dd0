import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from downstream.probe import main_probe
from main_finetune import parse_args as parse_finetune_args
from main_pretrain import get_args_parser
from tests.conftest import write_photo
from tests.runs import refused
from tests.warm import Python
from tools import study, study_comparisons, study_presets, study_report, study_results
from tools.study_results import read_rows
from util.run import checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY = study.Preset(
    pretrain=dict(model="mae_vit_micro_patch4", epochs=1, warmup_epochs=0.0, total_batch_size=8, blr=1e-2),
    finetune=dict(recipe="finetune_cifar10", model="vit_micro_patch4", epochs=1, warmup_epochs=0.0, total_batch_size=8),
    labels_per_class=8,
    measured_images=4,
)

TIMES = {"finished": "", "cpu_seconds": None, "starts": None}


@pytest.fixture
def images(tmp_path):
    """train/ and val/ with two classes."""
    for split, count in (("train", 12), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                write_photo(folder / f"{i:02d}.jpg", (32, 32), seed=100 * label + i)
    return tmp_path / "images"


@pytest.fixture
def run_study(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(study.PRESETS, "cpu", TINY)
    start = lambda command, stdout, **_: Python(*command[1:], output=stdout.name)  # noqa: E731
    monkeypatch.replace_in(study, "subprocess.Popen", start)

    def run(*flags):
        study.main([*places, *flags])
        return tmp_path / "output/cpu/runs"

    places = ["--data_path", str(images), "--output_dir", str(tmp_path / "output"), "--jobs", "2"]
    places += ["--report", str(tmp_path / "docs/study.md")]
    run.refused = lambda *flags: refused(capsys, study.main, *places, *flags)
    return run


def test_arms_differ_in_the_method_alone():
    runs = study.plan(study.PRESETS["cpu"], study_presets.ARMS, (0, 1), Path("x"), {})
    assert [run.seed for run in runs] == [0] * len(study_presets.ARMS) + [1] * len(study_presets.ARMS)  # seed by seed
    parser = get_args_parser()
    settings = {
        run.arm: vars(parser.parse_args(run.job["pretrain"])) for run in runs if run.job["pretrain"] and not run.seed
    }
    mae = settings["mae"]
    for arm, ours in settings.items():
        changed = {name for name in ours if ours[name] != mae[name]}
        assert changed <= {*study_presets.METHOD, "applies_to"}, arm
    chosen = [(s["throw_ratio"], s["progressive"], s["sampling"]) for s in (settings["plain25"], settings["prmim65"])]
    assert chosen == [(0.25, False, "random"), (0.65, True, "furthest")]
    assert len({json.dumps(run.job) for run in runs}) == len(runs)


@pytest.mark.parametrize("name", study.PRESETS)
def test_presets_are_what_the_mains_take(name):
    preset = study.PRESETS[name]
    for run in study.plan(replace(preset, finetuned_seeds=None), preset.arms, (0,), Path("x"), {}):
        _, finetune = parse_finetune_args(run.job["finetune"])
        assert finetune.layer_decay == (1.0 if run.arm == "scratch" else 0.75)
        if run.job["pretrain"]:
            pretrain = get_args_parser().parse_args(run.job["pretrain"])
            assert pretrain.model.partition("_")[2] == finetune.model
            assert pretrain.input_size == (finetune.input_size and [finetune.input_size])


def test_arms_of_the_second_study():
    """They differ from MAE in the method alone. Seeds of fine-tuning are those of one encoder in all arms."""
    preset, parser = study.PRESETS["grid14"], get_args_parser()
    assert set(preset.arms) == set(study_comparisons.ARMS)
    compared = {arm for c in study_comparisons.COMPARISONS for pair in c.pairs for arm in pair}
    peers = {"prmim50_cell", "crossmae", "crossmae_prmim50", "scratch"}
    assert compared == set(preset.arms) - peers
    runs = study.plan(preset, preset.arms, preset.seeds, Path("x"), {})
    assert len(runs) == len({run.job_hash for run in runs}) == 128
    first = {run.arm: run.job for run in runs if run.seed == 0}
    settings = {arm: vars(parser.parse_args(job["pretrain"])) for arm, job in first.items() if job["pretrain"]}
    for arm, ours in settings.items():
        assert first[arm]["pretrain_per_class"] == (1430 if arm == "mae_short" else 2500)
        changed = {name for name in ours if ours[name] != settings["mae"][name]}
        assert changed <= {*study_presets.METHOD, "model" if arm.startswith("crossmae") else "applies_to"}, arm
    assert (
        len({json.dumps(s) for s in settings.values()}) == 12
    )  # two arms differ from PR-MIM by a reading, one from MAE by its images
    seeds = {run.seed: tuple(run.job["finetune_seeds"]) for run in runs}
    assert all(tuple(run.job["finetune_seeds"]) == seeds[run.seed] for run in runs)
    assert len({seed for of_run in seeds.values() for seed in of_run}) == 16


def test_the_learning_rate_is_tuned_for_mae_on_other_seeds():
    """All else is as in the study."""
    preset, tuning = study.PRESETS["grid14"], study.PRESETS["tuning14"]
    seeds = [
        {
            seed
            for run in study.plan(p, p.arms, p.seeds, Path("x"), {})
            for seed in [run.seed, *run.job["finetune_seeds"]]
        }
        for p in (preset, tuning)
    ]
    assert not seeds[0] & seeds[1]
    (mae,) = study.plan(preset, ["mae"], [100], Path("x"), {})
    rates = set()
    for run in study.plan(tuning, tuning.arms, [100], Path("x"), {}):
        ours, theirs = (vars(get_args_parser().parse_args(job["pretrain"])) for job in (run.job, mae.job))
        assert {name for name in ours if ours[name] != theirs[name]} <= {"blr"}
        assert run.job | {"pretrain": None} == mae.job | {"pretrain": None}
        rates.add(ours["blr"])
    assert len(rates) == len(tuning.arms) == 3


def test_arms_and_seeds_of_the_third_study():
    """Arms differ in the method alone. No seed was used before, neither in another preset nor in a CSV."""
    preset, parser = study.PRESETS["frozen14"], get_args_parser()
    steps = [f"{step}{ratio}" for ratio in (50, 65) for step in ("plain", "progressive", "prmim")]
    assert list(preset.arms) == ["mae", *steps]
    jobs = {run.arm: run.job for run in study.plan(preset, preset.arms, preset.seeds[:1], Path("x"), {})}
    settings = {arm: vars(parser.parse_args(job["pretrain"])) for arm, job in jobs.items()}
    for ours in settings.values():
        assert {name for name in ours if ours[name] != settings["mae"][name]} <= {*study_presets.METHOD}
    sampling = {arm: ours["sampling"] for arm, ours in settings.items() if arm != "mae"}
    assert sampling == {arm: "furthest" if arm.startswith("prmim") else "random" for arm in steps}
    earlier = {*(study.ROOT / "docs").glob("study_*.csv")} - {study.ROOT / "docs/study_frozen14.csv"}
    used = {row["seed"] for path in earlier for row in read_rows(path)}
    for other in study.PRESETS.values():
        if other is not preset:
            used |= {n * seed + i for seed in other.seeds for n in (1, other.finetunes) for i in range(n)}
    assert not used & set(preset.seeds) and set(preset.finetuned_seeds) < set(preset.seeds)


def test_the_report_speaks_of_every_arm_but_none_that_is_not_there():
    compared = {f"{arm}{ratio}" for arm in study_presets.ABLATION for ratio in study_report.RATIOS}
    compared |= {arm for names in study_report.VARIANTS.values() for arm in names} | {"mae", "scratch"}
    assert compared == set(study_presets.ARMS)
    assert set(study_report.PEERS) == set(study_presets.PEERS)


def test_peers_differ_in_framework_and_method_alone():
    """All have the encoder, target and schedule of MAE. One arm has the learning rate of CrossMAE's rule."""
    preset, parser = study.PRESETS["peers"], get_args_parser()
    runs = study.plan(preset, preset.arms, (0,), Path("x"), {})
    settings = {run.arm: vars(parser.parse_args(run.job["pretrain"])) for run in runs if run.job["pretrain"]}
    for arm, ours in settings.items():
        changed = {name for name in ours if ours[name] != settings["mae"][name]}
        assert changed <= {
            *study_presets.METHOD,
            "model",
            "mask_ratio" if arm == "amt" else "blr" if "lr" in arm else "",
        }, arm
    assert settings["crossmae_plain50_lr"]["blr"] == pytest.approx(settings["mae"]["blr"] / 3)


def test_a_study_from_images_to_report_and_again(run_study, tmp_path, capsys):
    arms = ["--arms", "mae", "plain50", "prmim50", "predictions", "scratch"]
    runs = run_study(*arms, "--seeds", "0")
    rows = read_rows(tmp_path / "docs/study_cpu.csv")
    assert [(row["arm"], row["seed"]) for row in rows] == [(arm, 0) for arm in arms[1:]]
    found = {row["arm"]: row for row in rows}
    assert found["plain50"]["mse_thrown"] is None and found["plain50"]["mse_masked"] is None
    assert found["mae"]["mse_masked"] == found["mae"]["mse_retained"]
    ours = found["prmim50"]
    assert ours["mse_masked"] == pytest.approx((16 * ours["mse_retained"] + 32 * ours["mse_thrown"]) / 48)
    assert found["scratch"]["loss"] is None and found["scratch"]["top1"] is not None
    assert found["predictions"]["loss"] != ours["loss"]
    assert "### Ablation" in (tmp_path / "docs/study.md").read_text()

    def stamps():
        return {path: path.stat().st_mtime_ns for path in runs.rglob("*.pth")}

    before = stamps()
    capsys.readouterr()
    (runs / "mae-seed0/result.json").unlink()
    (tmp_path / "docs/study_cpu.csv").unlink()
    run_study(*arms, "--seeds", "0")
    assert "1 of 5 runs to do" in capsys.readouterr().out
    assert stamps() == before  # the checkpoints were found, so nothing was trained again
    again = read_rows(tmp_path / "docs/study_cpu.csv")
    assert [r | TIMES for r in again] == [r | TIMES for r in rows]
    run_study("--arms", "mae", "--seeds", "0")  # the report still has the other runs
    assert read_rows(tmp_path / "docs/study_cpu.csv") == again


def test_the_csv_alone_continues_a_study(run_study, tmp_path, capsys, monkeypatch):
    """Each finished run is in the CSV before the next one ends. No run of the CSV is repeated without its folder."""
    lengths = []

    def write_rows(path, rows):
        study_results.write_rows(path, rows)
        lengths.append(len(read_rows(path)))

    monkeypatch.setattr(study, "write_rows", write_rows)
    runs = run_study("--arms", "mae", "scratch", "--seeds", "1", "0", "--jobs", "1")
    path = tmp_path / "docs/study_cpu.csv"
    text, rows = path.read_text(), read_rows(path)
    assert lengths == [1, 2, 3, 4]  # no row is lost when the next one comes
    assert [(row["seed"], row["arm"]) for row in rows] == [(0, "mae"), (0, "scratch"), (1, "mae"), (1, "scratch")]
    shutil.rmtree(runs)
    capsys.readouterr()
    run_study("--arms", "mae", "scratch", "--seeds", "0", "1")
    assert "0 of 4 runs to do" in capsys.readouterr().out and not runs.exists()
    assert path.read_text() == text
    write_rows(path, rows[1:])
    run_study("--arms", "mae", "--seeds", "0")
    again = read_rows(path)
    assert again[1:] == rows[1:]  # rows of arms and seeds that this call does not run
    assert [again[0][name] for name in ("top1", "loss", "job")] == [rows[0][name] for name in ("top1", "loss", "job")]


@pytest.mark.parametrize("kind", ["other settings", "no hash", "unknown arm"])
def test_rows_of_other_settings_are_not_replaced(run_study, tmp_path, kind, monkeypatch):
    run_study("--arms", "scratch", "--seeds", "0")
    path = tmp_path / "docs/study_cpu.csv"
    (row,) = read_rows(path)
    changed = {"other settings": {}, "no hash": {"job": ""}, "unknown arm": {"arm": "old"}}[kind]
    study_results.write_rows(path, [row | changed])
    before = path.read_text()
    shutil.rmtree(tmp_path / "output")
    if kind == "other settings":
        monkeypatch.setitem(study.PRESETS, "cpu", replace(TINY, finetune=TINY.finetune | dict(epochs=2)))
    assert "holds a run with other settings or of an older version" in run_study.refused(
        "--arms", "mae", "--seeds", "1"
    )
    assert path.read_text() == before


def test_rows_of_other_images_are_not_continued(run_study, images, tmp_path):
    """The number of images is the same, and one has other pixels."""
    run_study("--arms", "scratch", "--seeds", "0")
    before = (tmp_path / "docs/study_cpu.csv").read_text()
    write_photo(images / "train/cat/00.jpg", (32, 32), seed=999)
    assert "holds runs on other images" in run_study.refused("--arms", "scratch", "--seeds", "1")
    assert (tmp_path / "docs/study_cpu.csv").read_text() == before


def test_a_row_of_the_csv_is_not_replaced_by_a_folder(run_study, tmp_path):
    run_study("--arms", "scratch", "--seeds", "0")
    path = tmp_path / "docs/study_cpu.csv"
    (row,) = read_rows(path)
    study_results.write_rows(path, [row | dict(top1=row["top1"] + 1)])  # measured elsewhere
    (tmp_path / "output/cpu/runs/notes").mkdir()
    run_study("--arms", "scratch", "--seeds", "0")
    assert read_rows(path) == [row | dict(top1=row["top1"] + 1)]


def test_a_csv_that_cannot_be_written_does_not_stop_the_study(run_study, tmp_path, capsys, monkeypatch):
    def write_rows(path, rows):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(study, "write_rows", write_rows)
        run_study("--arms", "scratch", "--seeds", "0", "1", "--jobs", "1")
    assert capsys.readouterr().out.count("study_cpu.csv was not updated: no space left on device") == 2
    assert [row["seed"] for row in read_rows(tmp_path / "docs/study_cpu.csv")] == [0, 1]  # written at the end


def test_an_arm_with_fewer_images(run_study, tmp_path, monkeypatch):
    arms = {"mae": study_presets.ARMS["mae"], "short": study_presets.ARMS["mae"] | dict(pretrain_per_class=4)}
    monkeypatch.setitem(study.PRESETS, "cpu", replace(TINY, arms=arms))
    runs = run_study("--arms", "mae", "short", "--seeds", "0")
    # 24 and 8 images, in batches of 8.
    steps = {arm: max(runs.glob(f"{arm}-seed0/pretrain/checkpoint-*.pth")).stem for arm in arms}
    assert steps == {"mae": "checkpoint-3", "short": "checkpoint-1"}
    assert len(read_rows(tmp_path / "docs/study_cpu.csv")) == 2


def test_several_finetunings_and_the_frozen_encoder(run_study, images, tmp_path, monkeypatch):
    preset = replace(TINY, finetunes=2, finetuned_seeds=(3,), frozen=True, pretrain_per_class=10)
    monkeypatch.setitem(study.PRESETS, "cpu", preset)
    runs = run_study("--arms", "prmim50", "scratch", "--seeds", "3")
    ours, scratch = read_rows(tmp_path / "docs/study_cpu.csv")
    run_study("--arms", "prmim50", "--seeds", "4")
    *_, other = read_rows(tmp_path / "docs/study_cpu.csv")
    assert (other["seed"], other["top1"], other["starts"]) == (4, None, 1) and other["knn"] and other["ridge"]
    folder = runs / "prmim50-seed3"
    accuracies = [json.loads((folder / f"finetune-{seed}/results.json").read_text()) for seed in (6, 7)]
    accuracies = [content["last"]["val_top1"] for content in accuracies]
    assert ours["top1_each"] == " ".join(map(str, accuracies))
    assert ours["top1"] == pytest.approx(sum(accuracies) / 2)
    assert scratch["knn"] is None and scratch["ridge"] is None and len(scratch["top1_each"].split()) == 2
    seeds = {checkpoint_settings(folder / name)["seed"] for name in ("finetune-6", "finetune-7")}
    assert seeds == {6, 7} and checkpoint_settings(folder / "pretrain")["seed"] == 3
    data = Path(checkpoint_settings(folder / "pretrain")["data_path"])
    assert sorted(path.name for path in data.glob("train/dog/*")) == [f"{i:02d}.jpg" for i in range(10)]
    monkeypatch.undo()
    # The same protocol by the program for probes.
    main_probe.main(
        [str(folder / "pretrain"), "--dataset", "folder", "--data_path", str(tmp_path / "output/cpu/labelled_8")]
        + ["--probes", "knn", "--output_dir", str(tmp_path / "probe"), "--device", "cpu", "--num_workers", "0"]
    )
    (knn,) = (
        row["top1"]
        for row in json.loads((tmp_path / "probe/probe.json").read_text())["results"]
        if (row["feature"], row["scaling"], row["k"]) == ("mean", "z", 16)  # the whole bank; 20 are asked for
    )
    assert ours["knn"] == knn


def checkpoint_settings(folder):
    """The settings of a run."""
    path = checkpoint.find_checkpoint_file(folder)
    return checkpoint.meta_of(checkpoint.read_checkpoint(path))["settings"]


def test_a_failed_run_is_told_and_the_others_go_on(run_study, tmp_path, capsys):
    runs = tmp_path / "output/cpu/runs"
    (runs / "mae-seed0").mkdir(parents=True)
    (runs / "mae-seed0/pretrain").write_text("a file where a folder must be")
    with pytest.raises(SystemExit) as stop:
        run_study("--arms", "mae", "scratch", "--seeds", "0")
    assert stop.value.code == 1
    out, err = capsys.readouterr()
    assert "mae seed 0 FAILED (exit code 2" in out and "1 run failed: mae seed 0" in err
    assert [row["arm"] for row in read_rows(tmp_path / "docs/study_cpu.csv")] == ["scratch"]


def test_divergence_is_a_result(run_study, monkeypatch, tmp_path):
    wild = TINY.pretrain | dict(lr=1e30, epochs=20)
    monkeypatch.setitem(study.PRESETS, "cpu", study.Preset(wild, TINY.finetune, labels_per_class=8, measured_images=4))
    run_study("--arms", "prmim50", "--seeds", "0")
    (row,) = read_rows(tmp_path / "docs/study_cpu.csv")
    assert row["status"] == "diverged" and row["top1"] is None
    assert "diverged (seeds 0)" in (tmp_path / "docs/study.md").read_text()


def test_no_run_starts_after_the_time(run_study, capsys):
    runs = run_study("--arms", "mae", "--seeds", "0", "--max_hours", "0")
    assert "1 of 1 runs to do" in capsys.readouterr().out and not runs.exists()


def test_stopped_in_the_middle_it_stops_its_runs_and_goes_on(images, tmp_path):
    flags = ["--data_path", images, "--output_dir", tmp_path, "--report", tmp_path / "study.md"]
    argv = [*map(str, flags), "--arms", "mae", "--seeds", "0"]
    script = tmp_path / "script.py"
    script.write_text(
        "from tools import study\nfrom tests.tools.test_study import TINY\n\n"
        f"study.PRESETS['cpu'] = TINY\nstudy.main({argv})\n"
    )
    process = Python(script)
    folder = tmp_path / "cpu/runs/mae-seed0"
    while not (folder / "lock").exists():
        assert process.poll() is None
    process.terminate()
    out, _ = process.communicate(60)
    assert process.returncode == 143 and "1 of 1 runs to do" in out
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if the run still works
    assert not (folder / "result.json").exists()
    process = Python(script)
    process.communicate(200)
    assert process.returncode == 0
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"


def test_two_processes_never_work_in_one_folder(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = Python(ROOT / "tools/study_job.py", tmp_path, "{}")
        out, _ = process.communicate(100)
    assert process.returncode == 1 and "a study on this folder runs already: " in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--data_path", "nowhere"], "'nowhere' needs class folders in train/"),
        (["--arms", "nonsense"], "--arms 'nonsense' is not an arm of --preset cpu, choose from mae, plain50"),
    ],
)
def test_errors_before_any_run(run_study, flags, message):
    assert message in run_study.refused(*flags)


def test_other_settings_need_another_folder(run_study, monkeypatch):
    run_study("--arms", "scratch", "--seeds", "0")
    monkeypatch.setitem(
        study.PRESETS, "cpu", study.Preset(TINY.pretrain, TINY.finetune | dict(epochs=2), 8, measured_images=4)
    )
    assert "holds a run with other settings (finetune: " in run_study.refused("--arms", "scratch", "--seeds", "0")


def test_too_few_labels(run_study, monkeypatch):
    monkeypatch.setitem(study.PRESETS, "cpu", study.Preset(TINY.pretrain, TINY.finetune, labels_per_class=13))
    assert "class 'cat' has 12 images, but the preset needs 13 per class" in run_study.refused()


def test_the_labelled_subset_is_the_first_of_each_class(images, tmp_path):
    folder = study.labelled_subset(images, 8, tmp_path / "labelled")
    assert study.labelled_subset(images, 8, folder) == folder  # and again
    for name in ("cat", "dog"):
        assert sorted(p.name for p in (folder / "train" / name).iterdir()) == [f"{i:02d}.jpg" for i in range(8)]
    assert len(list((folder / "val/cat").iterdir())) == 3
    assert study.labelled_subset(images, None, folder) == images.resolve()
    (images / "val").rename(tmp_path / "elsewhere")
    (images / "val").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):  # a validation set that is a link itself
        assert study.labelled_subset(images, 8, tmp_path / "linked") == tmp_path / "linked"
    with pytest.raises(ValueError, match="holds links to other images"):
        study.labelled_subset(images / "train", 8, folder)


def test_other_images_need_another_folder(run_study, images):
    (images / "train/labels.txt").write_text("no class")
    (images / "train/cat/.DS_Store").write_text("no image")
    run_study("--arms", "scratch", "--seeds", "0")
    (images / "train/cat/11.jpg").unlink()
    assert "holds a run with other settings (data: " in run_study.refused("--arms", "scratch", "--seeds", "0")
