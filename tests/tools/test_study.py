import fcntl
import json
from pathlib import Path

import pytest
import torch

from main_finetune import parse_args as parse_finetune_args
from main_pretrain import MODELS, get_args_parser
from prmim import TokenOrder, TokenOrderSampler, addressed_noise
from tests.conftest import write_photo
from tests.warm import Python
from tools import study, study_job, study_report
from tools.study_results import read_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = study.Preset(
    pretrain=dict(model="mae_vit_micro_patch4", epochs=1, warmup_epochs=0.0, total_batch_size=8, blr=1e-2),
    finetune=dict(recipe="finetune_cifar10", model="vit_micro_patch4", epochs=1, warmup_epochs=0.0, total_batch_size=8),
    labels_per_class=8,
    measured_images=4,
)


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
def run_study(images, tmp_path, monkeypatch):
    monkeypatch.setitem(study.PRESETS, "cpu", TINY)
    monkeypatch.setattr(
        study.subprocess, "Popen", lambda command, stdout, **_: Python(*command[1:], output=stdout.name)
    )

    def run(*flags):
        places = ["--output_dir", str(tmp_path / "output"), "--report", str(tmp_path / "docs/study.md")]
        study.main(["--data_path", str(images), *places, "--jobs", "2", *flags])
        return tmp_path / "output/cpu/runs"

    return run


def test_arms_differ_in_the_method_alone():
    runs = study.plan(study.PRESETS["cpu"], study.ARMS, (0, 1), Path("x"), {})
    assert [run.seed for run in runs] == [0] * len(study.ARMS) + [1] * len(study.ARMS)  # seed by seed
    parser = get_args_parser()
    settings = {
        run.arm: vars(parser.parse_args(run.job["pretrain"])) for run in runs if run.job["pretrain"] and not run.seed
    }
    mae = settings["mae"]
    for arm, ours in settings.items():
        changed = {name for name in ours if ours[name] != mae[name]}
        assert changed <= {*study.METHOD, "applies_to"}, arm
    chosen = [(s["throw_ratio"], s["progressive"], s["sampling"]) for s in (settings["plain25"], settings["prmim65"])]
    assert chosen == [(0.25, False, "random"), (0.65, True, "furthest")]
    assert len({json.dumps(run.job) for run in runs}) == len(runs)


@pytest.mark.parametrize("name", study.PRESETS)
def test_presets_are_what_the_mains_take(name):
    preset = study.PRESETS[name]
    for run in study.plan(preset, preset.arms, (0,), Path("x"), {}):
        _, finetune = parse_finetune_args(run.job["finetune"])
        assert finetune.layer_decay == (1.0 if run.arm == "scratch" else 0.75)
        if run.job["pretrain"]:
            pretrain = get_args_parser().parse_args(run.job["pretrain"])
            assert pretrain.model.partition("_")[2] == finetune.model
            assert pretrain.input_size == (finetune.input_size and [finetune.input_size])


def test_the_report_speaks_of_every_arm_but_none_that_is_not_there():
    compared = {f"{arm}{ratio}" for arm in study_report.ABLATION for ratio in study_report.RATIOS}
    compared |= {arm for names in study_report.VARIANTS.values() for arm in names} | {"mae", "scratch"}
    assert compared == set(study.ARMS)
    assert set(study_report.PEERS) == set(study.PEERS)


def test_peers_differ_in_framework_and_method_alone():
    """All have the encoder, target and schedule of MAE. One arm has the learning rate of CrossMAE's rule."""
    preset, parser = study.PRESETS["peers"], get_args_parser()
    runs = study.plan(preset, preset.arms, (0,), Path("x"), {})
    settings = {run.arm: vars(parser.parse_args(run.job["pretrain"])) for run in runs if run.job["pretrain"]}
    for arm, ours in settings.items():
        changed = {name for name in ours if ours[name] != settings["mae"][name]}
        assert changed <= {*study.METHOD, "model", "mask_ratio" if arm == "amt" else "blr" if "lr" in arm else ""}, arm
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
    run_study(*arms, "--seeds", "0")
    assert "1 of 5 runs to do" in capsys.readouterr().out
    assert stamps() == before  # the checkpoints were found, so nothing was trained again
    assert read_rows(tmp_path / "docs/study_cpu.csv") == rows
    run_study("--arms", "mae", "--seeds", "0")  # the report still has the other runs
    assert read_rows(tmp_path / "docs/study_cpu.csv") == rows


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
def test_errors_before_any_run(run_study, flags, message, capsys):
    with pytest.raises(SystemExit):
        run_study(*flags)
    assert message in capsys.readouterr().err


def test_other_settings_need_another_folder(run_study, monkeypatch, capsys):
    run_study("--arms", "scratch", "--seeds", "0")
    monkeypatch.setitem(
        study.PRESETS, "cpu", study.Preset(TINY.pretrain, TINY.finetune | dict(epochs=2), 8, measured_images=4)
    )
    with pytest.raises(SystemExit):
        run_study("--arms", "scratch", "--seeds", "0")
    assert "holds a run with other settings (finetune: " in capsys.readouterr().err


def test_too_few_labels(run_study, monkeypatch, capsys):
    monkeypatch.setitem(study.PRESETS, "cpu", study.Preset(TINY.pretrain, TINY.finetune, labels_per_class=13))
    with pytest.raises(SystemExit):
        run_study()
    assert "class 'cat' has 12 images, but the preset needs 13 per class" in capsys.readouterr().err


def test_the_labelled_subset_is_the_first_of_each_class(images, tmp_path):
    folder = study.labelled_subset(images, 8, tmp_path / "labelled")
    assert study.labelled_subset(images, 8, folder) == folder  # and again
    for name in ("cat", "dog"):
        assert sorted(p.name for p in (folder / "train" / name).iterdir()) == [f"{i:02d}.jpg" for i in range(8)]
    assert len(list((folder / "val/cat").iterdir())) == 3
    assert study.labelled_subset(images, None, folder) == images.resolve()
    with pytest.raises(ValueError, match="holds links to other images"):
        study.labelled_subset(images / "train", 8, folder)


def test_other_images_need_another_folder(run_study, images, capsys):
    (images / "train/labels.txt").write_text("no class")
    (images / "train/cat/.DS_Store").write_text("no image")
    run_study("--arms", "scratch", "--seeds", "0")
    (images / "train/cat/11.jpg").unlink()
    with pytest.raises(SystemExit):
        run_study("--arms", "scratch", "--seeds", "0")
    assert "holds a run with other settings (data: " in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ readings not in the core


def reading_model(name):
    model = MODELS["mae_vit_micro_patch4"](throw_ratio=0.5, norm_pix_loss=True).double().eval()
    study_job.READINGS[name](model)
    return model.double()


def test_convolution_on_predictions_against_a_loop():
    model = reading_model("predictions")
    ids = torch.from_numpy(TokenOrderSampler((8, 8), model.counts)(addressed_noise(0, 0, [3], 64)))
    order = TokenOrder(ids, model.counts)
    imgs = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    decoder, first, kept = model.decoder, model.counts.num_visible, model.counts.num_kept
    with torch.no_grad():
        predicted = decoder.pred(decoder.norm(decoder.decode(model.forward_encoder(model.cut(imgs), order), order)))[0]
    pred = model.reconstruct(imgs, ids)[0][0]  # raster
    cells = {divmod(token, 8): value for token, value in zip(ids[0, :kept].tolist(), predicted, strict=True)}
    weight, bias = decoder.aggregation.operator.weight.detach(), decoder.aggregation.operator.bias.detach()
    for rank, token in enumerate(ids[0].tolist()):
        if first <= rank < kept:
            assert torch.allclose(pred[token], predicted[rank], atol=1e-10)
        elif rank >= kept:
            row, column = divmod(token, 8)
            value = bias.clone()
            for (r, c), neighbour in cells.items():
                if max(abs(r - row), abs(c - column)) <= 3:
                    value += weight[:, 0, r - row + 3, c - column + 3] * neighbour
            assert torch.allclose(pred[token], value, atol=1e-10)


@pytest.mark.parametrize("name", ["init_average", "init_normal"])
def test_initialisations_change_the_convolution_alone(name):
    torch.manual_seed(0)
    plain = MODELS["mae_vit_micro_patch4"](throw_ratio=0.5)
    torch.manual_seed(0)
    model = MODELS["mae_vit_micro_patch4"](throw_ratio=0.5)
    study_job.READINGS[name](model)
    other = plain.state_dict()
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, other[k])]
    assert changed == ["decoder.aggregation.operator.weight", "decoder.aggregation.operator.bias"]
    weight = model.decoder.aggregation.operator.weight
    if name == "init_average":
        assert torch.allclose(weight.sum(dim=(1, 2, 3)), torch.ones(64)) and weight.min() == weight.max()
    else:
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
