"""The commands of the paper's tables, the order in which they run, and the tables that are collected."""

import csv
import json
import os
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import submitit_launch
from scripts import reproduce_table
from scripts.parts.paper_tables import TABLES, Row, Table
from tests.runs import info_of_run, refused

PATHS = {
    "data_path": "IMAGENET",
    "inat_path": "INAT",
    "ade_path": "ADE",
    "coco_path": "COCO",
    "teacher": "ibot.pth",
}
PATHS |= {name: name for name in reproduce_table.SETS}
DATA = [word for name, path in PATHS.items() for word in (f"--{name}", path)]
# The program of a fine-tuning recipe, by the first word of its name.
MAINS = {"ade20k": "main_segmentation", "coco": "main_detection"}


def dry_run(capsys, *flags):
    """Returns the printed commands, as words."""
    reproduce_table.main([*DATA, "--dry_run", *flags])
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def parsed(words):
    """Returns (main, its flags) of a printed command. The launcher's parser and the main's must accept it."""
    if words[0] == "torchrun":
        args = torchrun_parser().parse_args(words[1:])
        main = Path(args.training_script).stem
        flags = args.training_script_args
    else:
        assert words[:2] == ["python", os.path.relpath(submitit_launch.__file__)]
        args = submitit_launch.get_args_parser().parse_args(words[2:])
        main = Path(args.main).stem
        flags = args.argv
    return main, import_module(submitit_launch.MAINS[main]).parse_args(flags)[1]


def needed_folder(main, args):
    """The run whose weights a run needs."""
    if main == "main_pretrain":
        return None
    if main == "main_robustness":
        return args.resume
    return args.finetune


def expected_runs(name, root):
    """{folder: (main, recipe)} of a table."""
    runs = {}
    for row in TABLES[name].rows:
        folder = root / row.pretrain
        runs[str(folder)] = ("main_pretrain", row.pretrain)
        for recipe in row.finetune.values():
            main = MAINS.get(recipe.partition("_")[0], "main_finetune")
            runs[str(folder / recipe)] = (main, recipe)
            if name == "robustness":
                runs[str(folder / recipe / "robustness")] = ("main_robustness", None)
    return runs


@pytest.mark.parametrize("name", TABLES)
def test_a_dry_run_prints_every_command_once_and_in_order(name, tmp_path, capsys):
    root = tmp_path / "runs"
    runs = {}
    for words in dry_run(capsys, name, "--output_dir", str(root)):
        main, args = parsed(words)
        assert args.output_dir not in runs
        needed = needed_folder(main, args)
        assert needed is None or needed in runs
        runs[args.output_dir] = (main, getattr(args, "recipe", None))
    assert runs == expected_runs(name, root)
    assert not root.exists()


def test_slurm_jobs_wait_for_the_runs_that_they_need(tmp_path, capsys):
    root = tmp_path / "runs"
    runs = {}
    for words in dry_run(capsys, "robustness", "--output_dir", str(root), "--launcher", "slurm"):
        main, args = parsed(words)
        dependency = submitit_launch.get_args_parser().parse_args(words[2:]).dependency
        needed = needed_folder(main, args)
        if needed is None:
            assert dependency is None
        else:
            assert dependency == f"afterok:ID_OF_{os.path.relpath(needed, root).replace('/', '-')}"
        runs[args.output_dir] = (main, getattr(args, "recipe", None))
    assert runs == expected_runs("robustness", root)


def test_tables_share_runs(capsys):
    ablation = dry_run(capsys, "ablation")
    schedules = dry_run(capsys, "schedules")
    both = dry_run(capsys, "schedules", "ablation", "schedules")
    shared = [words for words in ablation if words in schedules]
    assert len(shared) == 6  # three rows of 100 epochs
    assert len(both) == len(ablation) + len(schedules) - 6


def test_flags_reach_the_mains_that_they_are_for(capsys):
    flags = ["--pretrain_flags", "--batch_size 256 --compile", "--finetune_flags=--recompute", "--", "--nnodes", "2"]
    pretrain, finetune = dry_run(capsys, "frameworks", "--rows", "tec_prmim*", *flags)
    assert pretrain[1:5] == finetune[1:5] == ["--nproc_per_node", "1", "--nnodes", "2"]
    _, args = parsed(pretrain)
    assert (args.teacher, args.data_path, args.batch_size, args.compile) == ("ibot.pth", "IMAGENET", 256, True)
    assert args.recompute is False
    _, args = parsed(finetune)
    assert (args.data_path, args.batch_size, args.recompute) == ("IMAGENET", None, True)


@pytest.mark.parametrize(
    ("table", "flags", "main", "expected"),
    [
        ("inaturalist", [], "main_finetune", {"data_path": "INAT"}),
        ("ade20k", ["--segmentation_flags", "--stride 256"], "main_segmentation", {"data_path": "ADE", "stride": 256}),
        ("coco", ["--detection_flags", "--num_pictures 2"], "main_detection", {"data_path": "COCO", "num_pictures": 2}),
        (
            "robustness",
            ["--robustness_flags", "--batch_size 512"],
            "main_robustness",
            {"imagenet_sketch": "imagenet_sketch", "batch_size": 512},
        ),
    ],
)
def test_each_main_gets_its_data(capsys, table, flags, main, expected):
    program, args = parsed(dry_run(capsys, table, "--rows", "mae*", *flags)[-1])
    assert program == main
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("ablation tables", "unknown table 'tables': give ablation, schedules, "),
        ("ablation", "mae_vit_base_100ep needs --data_path"),
        ("inaturalist --data_path D", "mae_vit_base_800ep/inat18_vit_base needs --inat_path"),
        ("robustness --data_path D", "the table of robustness needs at least one of --imagenet_c, --imagenet_a, "),
        ("frameworks --data_path D", "tec_vit_base_300ep needs --teacher"),
        ("ablation --data_path D --rows large*", "--rows 'large*' matches none of mae_vit_base_100ep, plain25_vit"),
        ("ablation --data_path D/nowhere", "--data_path 'D/nowhere' does not exist"),
        ("ablation --data_path D --pretrain_flags=--no_such", "unknown flag --no_such\n"),
        ("ablation --data_path D --launcher slurm -- --nodes 0", "--nodes must be at least 1, got 0"),
        ("ablation --data_path D --launcher slurm -- --dry_run", "--dry_run belongs before `--`"),
    ],
)
def test_errors_come_before_any_run(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce_table, "call", lambda command: pytest.fail("a run was started"))
    assert message in refused(capsys, reproduce_table.main, *flags.split())
    assert not any(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------- collection


def write_pretraining(folder, epoch, epochs, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint-7.pth").touch()
    meta = info_of_run(7, epoch=epoch, settings={"epochs": epochs}).to_json()
    (folder / "checkpoint-7.json").write_text(json.dumps({"size": 0, "sha256": "", "meta": meta}))
    (folder / "settings.json").write_text(json.dumps({"epochs": epochs, **settings}))


def write_finetuning(folder, epoch, epochs, top1):
    write_pretraining(folder, epoch, epochs)
    results = {"last": {"epoch": epoch - 1, "val_top1": top1}, "best": {"epoch": 0, "val_top1": 99}}
    (folder / "results.json").write_text(json.dumps(results))


def write_dense(folder, step, num_iters, scores, **settings):
    write_pretraining(folder, 100, 100, num_iters=num_iters, **settings)
    (folder / "results.json").write_text(json.dumps({"last": {"step": step, "epoch": 99, **scores}}))


def collected(name, root, capsys, *flags):
    """Returns ({recipe: row of the CSV}, Markdown)."""
    reproduce_table.main([name, "--collect", "--output_dir", str(root), *flags])
    text = capsys.readouterr().out
    assert text == (root / f"{name}.md").read_text()
    with open(root / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["recipe"]: row for row in rows}, text


@pytest.fixture
def kernels(tmp_path):
    """The first row is finished, the second has been pre-trained in part, the third has been fine-tuned in part."""
    write_pretraining(tmp_path / "kernel3_vit_base_100ep", 100, 100, kernel_size=3)
    write_finetuning(tmp_path / "kernel3_vit_base_100ep" / "finetune_vit_base", 100, 100, 81.666)
    write_pretraining(tmp_path / "kernel5_vit_base_100ep", 39.5, 100)
    write_pretraining(tmp_path / "prmim50_vit_base_100ep", 100, 100)
    write_finetuning(tmp_path / "prmim50_vit_base_100ep" / "finetune_vit_base", 20, 100, 70.0)
    return tmp_path


def test_runs_are_collected_into_their_cells(kernels, capsys):
    rows, text = collected("kernels", kernels, capsys)
    assert {recipe: (row["Top-1"], row["Top-1 measured"]) for recipe, row in rows.items()} == {
        "kernel3_vit_base_100ep": ("81.7", "81.666"),
        "kernel5_vit_base_100ep": ("81.7", ""),
        "prmim50_vit_base_100ep": ("81.8", ""),
        "kernel9_vit_base_100ep": ("81.7", ""),
        "kernel11_vit_base_100ep": ("81.6", ""),
    }
    assert "| 3 x 3 | kernel3_vit_base_100ep | 100 | 50 | 81.7 | 81.67 |" in text


def test_only_what_is_missing_runs(kernels, capsys):
    commands = dry_run(capsys, "kernels", "--output_dir", str(kernels))
    folders = []
    for words in commands:
        _, args = parsed(words)
        folders.append(os.path.relpath(args.output_dir, kernels))
    assert folders == [
        "kernel5_vit_base_100ep",
        "kernel5_vit_base_100ep/finetune_vit_base",
        "prmim50_vit_base_100ep/finetune_vit_base",
        "kernel9_vit_base_100ep",
        "kernel9_vit_base_100ep/finetune_vit_base",
        "kernel11_vit_base_100ep",
        "kernel11_vit_base_100ep/finetune_vit_base",
    ]


@pytest.mark.parametrize(
    ("settings", "deviations"),
    [
        ({"blr": 1e-3}, ["blr 0.001 instead of 0.00015"]),
        ({"epochs": 100}, ["epochs 100 instead of 400"]),
        ({"kernel_size": 9}, ["kernel_size 9 instead of 7"]),  # a default, which the recipe does not set
        ({"throw_ratio": 0.25}, ["throw_ratio 0.25 instead of 0.5"]),
        ({"precision": "fp32", "num_workers": 3, "batch_size": 8}, []),
    ],
)
def test_each_setting_that_is_not_the_recipe_s_is_named(settings, deviations, tmp_path, capsys):
    write_pretraining(tmp_path / "prmim50_vit_base_400ep", 3, **{"epochs": 400, **settings})
    _, text = collected("methods", tmp_path, capsys, "--rows", "prmim50*")
    notes = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("- prmim50")]
    assert notes == deviations


def test_a_finished_row_needs_its_checkpoints_no_more(tmp_path, capsys):
    """The results stay when large files are deleted: pre-training does not start again."""
    write_finetuning(tmp_path / "prmim50_vit_base_400ep" / "finetune_vit_base", 100, 100, 83.0)
    for path in tmp_path.rglob("checkpoint-*"):
        path.unlink()
    assert dry_run(capsys, "methods", "--rows", "prmim50*", "--output_dir", str(tmp_path)) == []
    rows, _ = collected("methods", tmp_path, capsys)
    assert rows["prmim50_vit_base_400ep"]["Top-1 measured"] == "83.0"


def test_detection_is_collected_from_its_last_iteration(tmp_path, capsys):
    folder = tmp_path / "prmim50_vit_base_800ep" / "coco_mask_rcnn_vit_base"
    write_dense(folder, 368_750, 368_750, {"val_box_ap": 50.75, "val_mask_ap": 45.25}, layer_decay=0.8)
    rows, text = collected("coco", tmp_path, capsys)
    row = rows["prmim50_vit_base_800ep"]
    assert (row["AP box"], row["AP box measured"]) == ("50.8", "50.75")
    assert (row["AP mask"], row["AP mask measured"]) == ("45.2", "45.25")
    assert "prmim50_vit_base_800ep/coco_mask_rcnn_vit_base: layer_decay 0.8 instead of 0.7" in text


def test_segmentation_is_collected_from_its_last_iteration(tmp_path, capsys):
    """The second run is not finished."""
    scores = {"val_miou": 46.75, "val_macc": 57.5}
    write_dense(tmp_path / "mae_vit_base_800ep" / "ade20k_upernet_vit_base", 160_000, 160_000, scores)
    write_dense(tmp_path / "prmim50_vit_base_800ep" / "ade20k_upernet_vit_base", 144_000, 160_000, scores)
    rows, _ = collected("ade20k", tmp_path, capsys)
    row = rows["mae_vit_base_800ep"]
    assert (row["mIoU"], row["mIoU measured"], row["mAcc measured"]) == ("46.8", "46.75", "57.5")
    row = rows["prmim50_vit_base_800ep"]
    assert (row["mIoU"], row["mIoU measured"], row["mAcc measured"]) == ("46.9", "", "")


@pytest.fixture
def evaluated(tmp_path):
    """A row of the table of robustness that is evaluated on two sets."""
    folder = tmp_path / "mff_vit_base_800ep" / "mff_finetune_vit_base"
    write_finetuning(folder, 100, 100, 83.6)
    (folder / "robustness").mkdir()
    summary = {
        "imagenet_a": {"top1": 37.25, "top1_unrestricted": 30.0},
        "imagenet_c": {"mce": 49.5, "mean_error": 39.0},
    }
    (folder / "robustness" / "robustness.json").write_text(json.dumps({"summary": summary}))
    return tmp_path


def test_robustness_is_collected_by_set(evaluated, capsys):
    rows, _ = collected("robustness", evaluated, capsys)
    row = rows["mff_vit_base_800ep"]
    assert [row[f"IN-{name} measured"] for name in "CARS"] == ["49.5", "37.25", "", ""]


@pytest.mark.parametrize(
    ("sets", "is_left"),
    [
        ("--imagenet_a A --imagenet_c C", False),
        ("--imagenet_r R", True),
    ],
)
def test_robustness_is_finished_with_the_sets_that_are_given(evaluated, capsys, sets, is_left):
    flags = ["--data_path", "D", "--output_dir", str(evaluated), "--rows", "mff_vit*", "--dry_run"]
    reproduce_table.main(["robustness", *flags, *sets.split()])
    assert ("main_robustness" in capsys.readouterr().out) == is_left


def test_flops_are_counted(tmp_path, capsys):
    """Rows of 800 epochs cost what those of 100 epochs cost, and progressive ones what PR-MIM's cost."""
    rows, _ = collected("schedules", tmp_path, capsys)
    assert rows["mae_vit_base_300ep"]["FLOPs measured"] == "1.0"
    assert rows["plain50_vit_base_800ep"]["FLOPs measured"] == "0.717"
    assert rows["plain50_vit_base_800ep"]["Memory"] == "0.64"
    assert not any("Memory measured" in row for row in rows.values())  # nothing here measures it
    rows, _ = collected("ablation", tmp_path, capsys)
    assert rows["progressive50_vit_base_100ep"]["FLOPs measured"] == "0.721"


# --------------------------------------------------------------------------------------------------------- launching

FIRST = "quickstart"
SECOND = "cifar10"
FIRST_FINETUNE = "quickstart/quickstart_finetune"
SECOND_FINETUNE = "cifar10/quickstart_finetune"


@pytest.fixture
def micro(monkeypatch):
    """A table of two small rows."""
    rows = [Row(name, 1, 50, name, {"Top-1": "quickstart_finetune"}, "50.0") for name in (FIRST, SECOND)]
    monkeypatch.setitem(TABLES, "micro", Table("Micro", {"Top-1": "top1"}, rows))


@pytest.mark.long
def test_rows_run_through_torchrun(micro, photos, tmp_path, capsys):
    """Pre-training, fine-tuning and collection, by real processes on the CPU."""
    for split in ("train", "val"):
        shutil.copytree(photos / "train", tmp_path / "data" / split)
    root = tmp_path / "runs"
    small = "--device cpu --num_workers 0 --epochs 1 --warmup_epochs 0 --total_batch_size 24 --input_size 32"
    flags = ["micro", "--rows", FIRST, "--output_dir", str(root), "--data_path", str(tmp_path / "data")]
    flags += ["--nproc_per_node", "1", "--finetune_flags", f"{small} --model vit_micro_patch4"]
    flags += ["--pretrain_flags", f"{small} --picture_every 0 --model mae_vit_micro_patch4"]
    assert reproduce_table.main(flags) is True
    capsys.readouterr()
    results = json.loads((root / FIRST_FINETUNE / "results.json").read_text())
    rows, text = collected("micro", root, capsys)
    assert rows[FIRST]["Top-1 measured"] == str(results["last"]["val_top1"])
    assert "- quickstart: epochs 1 instead of 16\n" in text


class Launcher:
    """Replaces `call`. endings: {name of a run's folder: exit code, or what is raised}; other runs are finished."""

    def __init__(self, root, endings):
        self.root = root
        self.endings = endings
        self.started = []

    def __call__(self, command):
        main, args = parsed(["torchrun", *command[3:]])
        name = os.path.relpath(args.output_dir, self.root)
        self.started.append(name)
        ending = self.endings.get(name)
        if isinstance(ending, BaseException):
            raise ending
        if ending is not None:
            return ending
        if main == "main_finetune":
            write_finetuning(self.root / name, 1, 1, 50.0)
        else:
            write_pretraining(self.root / name, 1, 1)
        return 0


@pytest.fixture
def launch(micro, tmp_path, monkeypatch):
    """Runs the table of two rows. Returns (what `main` returns, the runs that were started)."""

    def run(endings=None, flags=()):
        launcher = Launcher(tmp_path, endings or {})
        monkeypatch.setattr(reproduce_table, "call", launcher)
        argv = ["micro", "--data_path", str(tmp_path), "--output_dir", str(tmp_path), *flags]
        try:
            result = reproduce_table.main(argv)
        except SystemExit as stop:
            result = stop.code
        return result, launcher.started

    return run


def test_finished_runs_are_not_started_again(launch, capsys):
    assert launch() == (True, [FIRST, FIRST_FINETUNE, SECOND, SECOND_FINETUNE])
    assert launch() == (True, [])
    assert "nothing is left to run" in capsys.readouterr().err


def test_finished_runs_of_other_settings_are_named(launch, tmp_path, capsys):
    launch()
    settings = {"epochs": 1, "total_batch_size": 24, "input_size": [32, 32]}
    (tmp_path / FIRST / "settings.json").write_text(json.dumps(settings))
    (tmp_path / FIRST_FINETUNE / "settings.json").write_text(json.dumps({"epochs": 1, "aa": None, "input_size": 32}))
    flags = ["--pretrain_flags", "--total_batch_size 24 --input_size 32"]
    flags += ["--finetune_flags", "--epochs 1 --aa none --input_size 32"]
    assert launch(flags=flags) == (True, [])
    errors = capsys.readouterr().err.splitlines()
    end = "in a finished run, which is not started again"
    notes = [f"note: {FIRST}: epochs 1 instead of 16 {end}", f"note: {SECOND}: epochs 1 instead of 100 {end}"]
    assert errors == [*notes, "nothing is left to run"]


@pytest.mark.parametrize("code", [1, 0])
def test_a_row_that_fails_does_not_stop_the_others(launch, capsys, code):
    """Exit code 0: it ended early, as by --max_steps. The same command goes on."""
    assert launch(endings={FIRST: code}) == (1, [FIRST, SECOND, SECOND_FINETUNE])
    errors = capsys.readouterr().err
    assert f"{FIRST} ended with exit code {code}, before its end" in errors
    assert f"{FIRST_FINETUNE} was not started" in errors
    assert launch() == (True, [FIRST, FIRST_FINETUNE])


def test_a_signal_stops_everything(launch, capsys):
    assert launch(endings={FIRST: reproduce_table.StoppedError("SIGTERM")}) == (False, [FIRST])
    assert "stopped by SIGTERM; the same command goes on" in capsys.readouterr().err


def test_jobs_are_submitted_with_the_jobs_that_they_wait_for(micro, tmp_path, monkeypatch):
    write_pretraining(tmp_path / SECOND, 1, 1)
    submitted = {}

    def submit(argv):
        args, folder = submitit_launch.parse_args(argv)
        job_id = str(100 + len(submitted))
        submitted[os.path.relpath(folder, tmp_path)] = (job_id, args.dependency, args.nodes)
        return SimpleNamespace(job_id=job_id)

    monkeypatch.setattr(submitit_launch, "main", submit)
    argv = ["micro", "--data_path", str(tmp_path), "--output_dir", str(tmp_path), "--launcher", "slurm"]
    assert reproduce_table.main([*argv, "--", "--nodes", "2"]) is True
    assert submitted == {
        FIRST: ("100", None, 2),
        FIRST_FINETUNE: ("101", "afterok:100", 2),
        SECOND_FINETUNE: ("102", None, 2),
    }
