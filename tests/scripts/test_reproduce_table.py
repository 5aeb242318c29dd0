import csv
import json
import os
import shlex
import shutil
from importlib import import_module
from types import SimpleNamespace

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import submitit_launch
from scripts import reproduce_table
from scripts.parts.paper_tables import TABLES, Row, Table
from scripts.profile_pretrain import COLUMNS
from tests.runs import refused
from util.tables import write_csv

DATA = ["--data_path", "IMAGENET", "--inat_path", "INAT", "--ade_path", "ADE", "--teacher", "ibot.pth"]
DATA += ["--coco_path", "COCO"]
PROGRAM = reproduce_table.ROOT / "downstream" / "segmentation" / "main_segmentation.py"
DATA += [f"--{name}" if i % 2 == 0 else name for name in reproduce_table.SETS for i in range(2)]


def dry_run(capsys, *flags):
    """Returns the printed commands, as words."""
    reproduce_table.main([*DATA, "--dry_run", *flags])
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def parsed(words):
    """Returns (main, settings, output_dir) of a printed command. Its own parsers must accept it."""
    if words[0] == "torchrun":
        args = torchrun_parser().parse_args(words[1:])
        main, flags = os.path.basename(args.training_script).removesuffix(".py"), args.training_script_args
    else:
        assert words[:2] == ["python", os.path.relpath(submitit_launch.__file__)]
        args = submitit_launch.get_args_parser().parse_args(words[2:])
        main, flags = args.main, args.argv
    main = os.path.basename(main)
    settings = import_module(submitit_launch.MAINS[main]).parse_args(flags)[1]
    return main, settings, settings.output_dir


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("name", TABLES)
def test_a_dry_run_prints_every_command_once_and_in_order(name, launcher, tmp_path, capsys):
    commands = dry_run(capsys, name, "--output_dir", str(tmp_path / "runs"), "--launcher", launcher)
    done, expected = {}, set()
    for words in commands:
        main, settings, folder = parsed(words)
        assert folder not in done
        needed = getattr(settings, "finetune", None) if main != "main_robustness" else settings.resume
        assert (needed is None) == (main == "main_pretrain") and (needed is None or needed in done)
        if launcher == "slurm":
            waits = f"afterok:ID_OF_{os.path.relpath(needed, tmp_path / 'runs').replace('/', '-')}" if needed else None
            assert submitit_launch.get_args_parser().parse_args(words[2:]).dependency == waits
        done[folder] = (main, getattr(settings, "recipe", None))
    for row in TABLES[name].rows:
        if row.pretrain:
            root = tmp_path / "runs" / row.pretrain
            expected |= {(str(root), "main_pretrain", row.pretrain)}
            for recipe in row.finetune.values():
                mains = {"ade20k": "main_segmentation", "coco": "main_detection"}
                main = mains.get(recipe.partition("_")[0], "main_finetune")
                expected |= {(str(root / recipe), main, recipe)}
                if name == "robustness":
                    expected |= {(str(root / recipe / "robustness"), "main_robustness", None)}
    assert {(folder, *what) for folder, what in done.items()} == expected
    assert not (tmp_path / "runs").exists()


def test_tables_share_runs(capsys):
    ablation, schedules = (dry_run(capsys, name, "--nproc_per_node", "8") for name in ("ablation", "schedules"))
    both = dry_run(capsys, "schedules", "ablation", "schedules", "--nproc_per_node", "8")
    common = [words for words in ablation if words in schedules]
    assert len(common) == 6  # three rows of 100 epochs
    assert len(both) == len(ablation) + len(schedules) - 6 == len({tuple(words) for words in both})


def test_flags_reach_the_mains_that_they_are_for(capsys):
    flags = ["--rows", "tec_prmim*", "--pretrain_flags", "--batch_size 256 --compile", "--finetune_flags=--shard"]
    pretrain, finetune = dry_run(capsys, "frameworks", *flags, "--", "--nnodes", "2")
    assert pretrain[:3] == ["torchrun", "--nproc_per_node", "1"] and pretrain[3:5] == ["--nnodes", "2"] == finetune[3:5]
    settings = parsed(pretrain)[1]
    assert (settings.teacher, settings.batch_size, settings.compile, settings.shard) == ("ibot.pth", 256, True, False)
    settings = parsed(finetune)[1]
    assert (settings.batch_size, settings.shard, settings.data_path) == (None, True, "IMAGENET")
    (inat,) = [words for words in dry_run(capsys, "inaturalist", "--rows", "mae*") if "inat18_vit_base" in words]
    assert parsed(inat)[1].data_path == "INAT"
    robust = dry_run(capsys, "robustness", "--rows", "mae*", "--robustness_flags", "--batch_size 512")[-1]
    assert (parsed(robust)[1].batch_size, parsed(robust)[1].imagenet_sketch) == (512, "imagenet_sketch")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "the following arguments are required: TABLE"),
        ("ablation tables", "unknown table 'tables': give ablation, schedules, "),
        ("ablation", "mae_vit_base_100ep needs --data_path"),
        ("inaturalist --data_path D", "mae_vit_base_800ep/inat18_vit_base needs --inat_path"),
        ("robustness --data_path D", "the table of robustness needs at least one of --imagenet_c, --imagenet_a, "),
        ("frameworks --data_path D", "tec_vit_base_300ep needs --teacher"),
        ("ablation --data_path D --rows large*", "--rows 'large*' matches none of mae_vit_base_100ep, plain25_vit"),
        ("ablation --data_path D --nproc_per_node 0", "--nproc_per_node must be at least 1, got 0"),
        ("ablation --data_path D --costs c.csv", "--costs goes with --collect"),
        ("ablation --data_path D/nowhere", "--data_path 'D/nowhere' does not exist"),
        ("ablation --data_path D --pretrain_flags=--no_such", "unrecognized arguments: --no_such"),
        ("ablation --data_path D --finetune_flags=--eval_every=x", "argument --eval_every: invalid int value: 'x'"),
        ("ablation --data_path D --launcher slurm -- --nodes 0", "--nodes, --cpus_per_task, --timeout_min and"),
        ("ablation --data_path D --launcher slurm -- --cluster local", "afterok:1 needs --cluster slurm, got local"),
        ("ablation --data_path D --launcher slurm -- --dry_run", "--dry_run belongs before `--`"),
        ("ablation --collect --costs nowhere.csv", "'nowhere.csv': No such file or directory"),
    ],
)
def test_errors_come_before_any_run(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce_table, "call", lambda command: pytest.fail("a run was started"))
    assert message in refused(capsys, reproduce_table.main, *flags.split()) and not any(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------- collection


def write_pretraining(folder, epoch, epochs, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint-7.pth").touch()
    meta = {"epoch": epoch, "settings": {"epochs": epochs}}
    (folder / "checkpoint-7.json").write_text(json.dumps({"size": 0, "sha256": "", "meta": meta}))
    (folder / "settings.json").write_text(json.dumps({"epochs": epochs, **settings}))


def write_finetuning(folder, epoch, epochs, top1, encoder=None):
    write_pretraining(folder, epoch, epochs)
    results = {"last": {"epoch": epoch - 1, "val_top1": top1}, "best": {"epoch": 0, "val_top1": 99}, "encoder": encoder}
    (folder / "results.json").write_text(json.dumps(results))


def collected(name, root, capsys, *flags):
    """Returns ({recipe: row of the CSV}, Markdown)."""
    reproduce_table.main([name, "--collect", "--output_dir", str(root), *flags])
    text = capsys.readouterr().out
    assert text == (root / f"{name}.md").read_text()
    with open(root / f"{name}.csv", newline="") as file:
        return {row["recipe"] or row["row"]: row for row in csv.DictReader(file)}, text


def test_runs_are_collected_into_their_cells(tmp_path, capsys):
    write_pretraining(tmp_path / "kernel3_vit_base_100ep", 100, 100, kernel_size=3, blr=1.5e-4)
    write_finetuning(tmp_path / "kernel3_vit_base_100ep" / "finetune_vit_base", 100, 100, 81.666)
    write_pretraining(tmp_path / "kernel5_vit_base_100ep", 39.5, 100)
    write_pretraining(tmp_path / "prmim50_vit_base_100ep", 100, 100)
    write_finetuning(tmp_path / "prmim50_vit_base_100ep" / "finetune_vit_base", 20, 100, 70.0)
    rows, text = collected("kernels", tmp_path, capsys)
    assert {recipe: (row["Top-1"], row["Top-1 measured"]) for recipe, row in rows.items()} == {
        "kernel3_vit_base_100ep": ("81.7", "81.666"),
        "kernel5_vit_base_100ep": ("81.7", ""),
        "prmim50_vit_base_100ep": ("81.8", ""),
        "kernel9_vit_base_100ep": ("81.7", ""),
        "kernel11_vit_base_100ep": ("81.6", ""),
    }
    assert "| 3 x 3 | kernel3_vit_base_100ep | 100 | 50 | 81.7 | 81.67 |" in text and "throw ratio. 50 %" in text
    reproduce_table.main(["kernels", "--dry_run", "--data_path", "D", "--output_dir", str(tmp_path)])
    to_do = [parsed(shlex.split(line))[2] for line in capsys.readouterr().out.splitlines()]
    assert [os.path.relpath(folder, tmp_path) for folder in to_do] == [
        "kernel5_vit_base_100ep",
        "kernel5_vit_base_100ep/finetune_vit_base",
        "prmim50_vit_base_100ep/finetune_vit_base",
        "kernel9_vit_base_100ep",
        "kernel9_vit_base_100ep/finetune_vit_base",
        "kernel11_vit_base_100ep",
        "kernel11_vit_base_100ep/finetune_vit_base",
    ]


@pytest.mark.fault("U84", "a row of a table was run with other settings than its recipe's", "--collect names each")
@pytest.mark.parametrize(
    ("settings", "deviation"),
    [
        ({"blr": 1e-3}, "blr 0.001 instead of 0.00015"),
        ({"epochs": 100}, "epochs 100 instead of 400"),
        ({"throw_ratio": 0.25}, "throw_ratio 0.25 instead of 0.5"),
        ({"precision": "fp32", "num_workers": 3, "batch_size": 8}, None),
    ],
)
def test_each_setting_that_is_not_the_recipe_s_is_named(settings, deviation, tmp_path, capsys):
    write_pretraining(tmp_path / "prmim50_vit_base_400ep", 3, **{"epochs": 400, **settings})
    text = collected("methods", tmp_path, capsys, "--rows", "prmim50*")[1]
    named = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("- prmim50")]
    assert named == ([deviation] if deviation else [])


def test_a_finished_row_needs_its_checkpoints_no_more(tmp_path, capsys):
    """The results stay when large files are deleted: pre-training does not start again."""
    write_finetuning(tmp_path / "prmim50_vit_base_400ep" / "finetune_vit_base", 100, 100, 83.0)
    for path in tmp_path.rglob("checkpoint-*"):
        path.unlink()
    reproduce_table.main(["methods", "--rows", "prmim50*", "--data_path", "D", "--output_dir", str(tmp_path)])
    assert "nothing is left to run" in capsys.readouterr().err
    rows, _ = collected("methods", tmp_path, capsys)
    assert rows["prmim50_vit_base_400ep"]["Top-1 measured"] == "83.0"


def test_detection_is_collected_from_its_last_iteration(tmp_path, capsys):
    folder = tmp_path / "prmim50_vit_base_800ep" / "coco_mask_rcnn_vit_base"
    write_pretraining(folder, 100, 100, num_iters=368_750, layer_decay=0.8)
    last = {"step": 368_750, "epoch": 99, "val_box_ap": 50.75, "val_mask_ap": 45.25}
    (folder / "results.json").write_text(json.dumps({"last": last, "details": {}}))
    rows, text = collected("coco", tmp_path, capsys)
    row = rows["prmim50_vit_base_800ep"]
    assert [row[c] for c in ("AP box", "AP box measured", "AP mask", "AP mask measured")] == [
        "50.8",
        "50.75",
        "45.2",
        "45.25",
    ]
    assert "prmim50_vit_base_800ep/coco_mask_rcnn_vit_base: layer_decay 0.8 instead of 0.7" in text
    flags = [*DATA, "--dry_run", "coco", "--rows", "mae*", "--output_dir", str(tmp_path)]
    reproduce_table.main([*flags, "--nproc_per_node", "8", "--detection_flags", "--num_pictures 2"])
    detect = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert detect[3] == os.path.relpath(reproduce_table.ROOT / "downstream" / "detection" / "main_detection.py")
    assert (parsed(detect)[1].num_pictures, parsed(detect)[1].data_path) == (2, "COCO")


def test_segmentation_is_collected_from_its_last_iteration(tmp_path, capsys):
    for pretrain, step in (("mae_vit_base_800ep", 160_000), ("prmim50_vit_base_800ep", 144_000)):
        folder = tmp_path / pretrain / "ade20k_upernet_vit_base"
        write_pretraining(folder, step / 1263, 160_000 / 1263, num_iters=160_000, layer_decay=0.65)
        last = {"step": step, "epoch": 99, "val_miou": 46.75, "val_macc": 57.5}
        (folder / "results.json").write_text(json.dumps({"last": last, "details": {}}))
    rows, text = collected("ade20k", tmp_path, capsys)
    found = {name: [row[c] for c in ("mIoU", "mIoU measured", "mAcc measured")] for name, row in rows.items()}
    assert found["mae_vit_base_800ep"] == ["46.8", "46.75", "57.5"]
    assert found["prmim50_vit_base_800ep"] == ["46.9", "", ""] and found["plain50_vit_base_800ep"] == ["45.5", "", ""]
    assert "mae_vit_base_800ep/ade20k_upernet_vit_base: layer_decay 0.65 instead of 0.75" in text
    flags = [*DATA, "--dry_run", "ade20k", "--rows", "prmim*", "--output_dir", str(tmp_path)]
    reproduce_table.main([*flags, "--nproc_per_node", "8", "--segmentation_flags", "--stride 256"])
    segment = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert segment[:4] == ["torchrun", "--nproc_per_node", "8", os.path.relpath(PROGRAM)]
    assert (parsed(segment)[1].stride, parsed(segment)[1].data_path) == (256, "ADE")


def test_robustness_is_collected_by_set(tmp_path, capsys):
    folder = tmp_path / "mff_vit_base_800ep" / "mff_finetune_vit_base"
    write_finetuning(folder, 100, 100, 83.6)
    (folder / "robustness").mkdir()
    summary = {"imagenet_a": {"title": "ImageNet-A", "top1": 37.25, "top1_unrestricted": 30.0, "incomplete": True}}
    summary["imagenet_c"] = {"title": "ImageNet-C", "mce": 49.5, "mean_error": 39.0, "incomplete": False}
    (folder / "robustness" / "robustness.json").write_text(json.dumps({"summary": summary, "parts": {"a": 1, "b": 2}}))
    rows, _ = collected("robustness", tmp_path, capsys)
    row = rows["mff_vit_base_800ep"]
    assert [row[f"IN-{x} measured"] for x in "CARS"] == ["49.5", "37.25", "", ""]
    flags = ["--data_path", "D", "--output_dir", str(tmp_path), "--rows", "mff_vit*", "--dry_run"]
    for sets, is_left in (("--imagenet_a A --imagenet_c C", False), ("--imagenet_a A --imagenet_r R", True)):
        reproduce_table.main(["robustness", *flags, *sets.split()])
        assert ("main_robustness" in capsys.readouterr().out) == is_left


def test_costs_are_relative_to_the_same_model(tmp_path, capsys):
    """Rows of 800 epochs cost what those of 100 epochs cost. FLOPs are counted."""
    profiled = [("mae_vit_base_100ep", 8000, 50.0), ("plain50_vit_base_100ep", 5000, 40.0)]
    profiled += [("prmim50_vit_large_100ep", 9000, 90.0), ("deep16_mae_vit_base_100ep", 1, 1)]
    rows = [dict(recipe=recipe, peak_mb=mb, ms=ms) for recipe, mb, ms in profiled]
    write_csv(tmp_path / "other.csv", COLUMNS, rows[2:])
    write_csv(tmp_path / "cost.csv", COLUMNS, rows[:2])
    costs = ["--costs", str(tmp_path / "other.csv"), str(tmp_path / "cost.csv")]
    rows, _ = collected("schedules", tmp_path, capsys, *costs)
    found = rows["plain50_vit_base_800ep"]
    assert [float(found[f"{column} measured"]) for column in ("FLOPs", "Memory")] == [0.717, 0.625]
    assert rows["prmim50_vit_base_800ep"]["Memory measured"] == ""  # not profiled
    assert rows["prmim50_vit_large_100ep"]["Memory measured"] == ""  # without its baseline
    assert (
        float(rows["mae_vit_base_300ep"]["Memory measured"]) == 1 == float(rows["mae_vit_base_300ep"]["FLOPs measured"])
    )
    rows, _ = collected("ablation", tmp_path, capsys, *costs)
    assert float(rows["plain50_vit_base_100ep"]["Time measured"]) == 0.8
    assert float(rows["progressive50_vit_base_100ep"]["FLOPs measured"]) == 0.721


# --------------------------------------------------------------------------------------------------------- launching


@pytest.fixture
def micro(monkeypatch):
    """A table of two small rows."""
    rows = [Row(label, 1, 50, label, {"Top-1": "quickstart_finetune"}, "50.0") for label in ("quickstart", "cifar10")]
    monkeypatch.setitem(TABLES, "micro", Table("Micro", {"Top-1": "top1"}, rows))


def test_rows_run_through_torchrun(micro, photos, tmp_path, capsys, monkeypatch):
    """Pre-training, fine-tuning and collection, by real processes on the CPU."""
    for split in ("train", "val"):
        shutil.copytree(photos / "train", tmp_path / "data" / split)
    root = tmp_path / "runs"
    small = "--device cpu --num_workers 0 --epochs 1 --warmup_epochs 0 --total_batch_size 24 --input_size 32"
    flags = ["micro", "--rows", "quickstart", "--output_dir", str(root)]
    launch = [*flags, "--data_path", str(tmp_path / "data"), "--nproc_per_node", "1"]
    launch += ["--pretrain_flags", f"{small} --picture_every 0 --model mae_vit_micro_patch4"]
    launch += ["--finetune_flags", f"{small} --model vit_micro_patch4"]
    assert reproduce_table.main(launch) is True
    top1 = json.loads((root / "quickstart" / "quickstart_finetune" / "results.json").read_text())["last"]["val_top1"]
    monkeypatch.setattr(reproduce_table, "call", lambda command: pytest.fail("a finished run was started"))
    assert reproduce_table.main(launch) is True
    capsys.readouterr()
    rows, text = collected("micro", root, capsys)
    assert rows["quickstart"]["Top-1 measured"] == str(top1) and "- quickstart: epochs 1 instead of 16\n" in text


class Launcher:
    """Replaces `call`: `does` says what a run's command does, {name of its folder: exit code}; others finish it."""

    def __init__(self, root, does):
        self.root, self.does, self.started = root, does, []

    def __call__(self, command):
        main, settings, folder = parsed(["torchrun", *command[3:]])
        name = os.path.relpath(folder, self.root)
        self.started.append(name)
        code = self.does.get(name)
        if isinstance(code, BaseException):
            raise code
        if code is None:
            write = write_finetuning if main == "main_finetune" else write_pretraining
            write(self.root / name, 1, 1, *([50.0] if main == "main_finetune" else []))
        return code or 0


FIRST, SECOND = "quickstart", "cifar10"


FIRST_FINETUNE, SECOND_FINETUNE = f"{FIRST}/quickstart_finetune", f"{SECOND}/quickstart_finetune"


@pytest.mark.parametrize(
    ("does", "started", "problems"),
    [
        ({}, [FIRST, FIRST_FINETUNE, SECOND, SECOND_FINETUNE], 0),
        ({FIRST: 1}, [FIRST, SECOND, SECOND_FINETUNE], 2),
        ({FIRST: 0}, [FIRST, SECOND, SECOND_FINETUNE], 2),  # it ended early, as by --max_steps
        ({SECOND_FINETUNE: 1}, [FIRST, FIRST_FINETUNE, SECOND, SECOND_FINETUNE], 1),
    ],
)
def test_a_row_that_fails_does_not_stop_the_others(micro, tmp_path, capsys, monkeypatch, does, started, problems):
    launcher = Launcher(tmp_path, does)
    monkeypatch.setattr(reproduce_table, "call", launcher)
    argv = ["micro", "--data_path", str(tmp_path), "--output_dir", str(tmp_path)]
    if not problems:
        assert reproduce_table.main(argv) is True
    else:
        with pytest.raises(SystemExit) as stop:
            reproduce_table.main(argv)
        told = capsys.readouterr().err.splitlines()
        assert stop.value.code == 1 and len(told) == problems + 1
        assert told[0].startswith(f"{next(iter(does))} ended with exit code {next(iter(does.values()))}, before")
        assert told[-1] == "start the same command again to go on"
    assert launcher.started == started
    launcher.does, launcher.started = {}, []
    assert reproduce_table.main(argv) is True  # only what is missing
    finished = [name for name in started if name not in does]
    everything = [FIRST, FIRST_FINETUNE, SECOND, SECOND_FINETUNE]
    assert launcher.started == [name for name in everything if name not in finished]
    assert reproduce_table.main(argv) is True and "nothing is left to run" in capsys.readouterr().err


def test_a_signal_stops_everything(micro, tmp_path, monkeypatch, capsys):
    launcher = Launcher(tmp_path, {FIRST: reproduce_table.StoppedError("SIGTERM")})
    monkeypatch.setattr(reproduce_table, "call", launcher)
    assert reproduce_table.main(["micro", "--data_path", str(tmp_path), "--output_dir", str(tmp_path)]) is False
    assert launcher.started == [FIRST] and "stopped by SIGTERM; the same command goes on" in capsys.readouterr().err


def test_slurm_jobs_wait_for_what_they_need_and_are_submitted_once(micro, tmp_path, capsys, monkeypatch):
    write_pretraining(tmp_path / SECOND, 1, 1)
    submitted, queue = {}, set()

    def submit(argv):
        args, folder = submitit_launch.parse_args(argv)
        job_id = str(100 + len(submitted))
        submitted[os.path.relpath(folder, tmp_path)] = (job_id, args.dependency, args.nodes, args.name)
        (folder / "jobs").mkdir(parents=True)
        (folder / "jobs" / f"{job_id}_submission.sh").touch()
        queue.add(job_id)
        return SimpleNamespace(job_id=job_id)

    monkeypatch.setattr(submitit_launch, "main", submit)
    monkeypatch.setattr(submitit_launch, "slurm_state", lambda job_id: "PENDING" if job_id in queue else "")
    argv = ["micro", "--data_path", str(tmp_path), "--output_dir", str(tmp_path), "--launcher", "slurm"]
    argv += ["--", "--nodes", "2", "--tasks_per_node", "1"]
    assert reproduce_table.main(argv) is True
    assert submitted == {
        FIRST: ("100", None, 2, FIRST),
        f"{FIRST}/quickstart_finetune": ("101", "afterok:100", 2, f"{FIRST}-quickstart_finetune"),
        f"{SECOND}/quickstart_finetune": ("102", None, 2, f"{SECOND}-quickstart_finetune"),
    }
    queue.remove("101")  # somebody has cancelled it
    shutil.rmtree(tmp_path / FIRST / "quickstart_finetune")
    submitted.clear()
    assert reproduce_table.main(argv) is True
    assert submitted == {f"{FIRST}/quickstart_finetune": ("100", "afterok:100", 2, f"{FIRST}-quickstart_finetune")}
    assert f"{FIRST} is already in the queue: job 100" in capsys.readouterr().out
