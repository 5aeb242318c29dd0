"""Updates that ruin the weights, and weights that are not finite: exit code 3, the last good state, no result."""

import shlex

import pytest
import torch

from downstream.probe import main_probe
from scripts import export, visualize
from tests.runs import assert_same_state, finetune, pretrain, refused
from util.run.files import checkpoint
from util.run.files.checkpoint import newest_checkpoint


def steps_in(folder):
    return [checkpoint.step_of(path) for path in checkpoint.list_finished(folder)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), [6, 9]),  # 9: written among steps that are not finite
        (("--save_steps", 1), [6, 7]),  # 7: written before the first of them
    ],
)
def test_the_last_good_checkpoint_stays(photos, tmp_path, capsys, flags, expected):
    out = tmp_path / "out"
    good = out / "checkpoint-6.pth"
    calm = ("--epochs", 20, "--warmup_epochs", 0, "--lr", 1e-3, "--picture_every", 0)
    pretrain(photos, out, *calm, "--max_steps", 6)
    for _ in range(2):  # the same command fails again
        message = pretrain.refused(capsys, photos, out, *calm, *flags, "--lr", 1e10, "--allow_changes", code=3)
        assert "not finite in each of the last 20 steps before step 27" in message
        assert f"The last checkpoint with a finite loss is {str(good)!r}" in message
        assert f"--resume {shlex.quote(str(good))} and --allow" in message
        assert steps_in(out) == expected
    goes_on = pretrain(photos, tmp_path / "new", *calm, "--resume", good, "--allow_changes", "--max_steps", 9)
    assert_same_state(goes_on, pretrain(photos, tmp_path / "whole", *calm, "--max_steps", 9))


@pytest.mark.parametrize("program", [pretrain, finetune])
def test_a_short_run_is_no_result(labelled, tmp_path, capsys, program):
    flags = ("--epochs", 3, "--warmup_epochs", 0, "--lr", 1e6, "--max_steps", 8)
    for _ in range(2):
        message = program.refused(capsys, labelled, tmp_path, *flags, code=3)
        assert "not finite" in message
        assert "No checkpoint of this run has a finite loss" in message
        assert steps_in(tmp_path) in ([3], [])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_a_resume_names_the_operation_that_was_not_finite(photos, tmp_path, capsys):
    flags = ("--epochs", 20, "--warmup_epochs", 0, "--lr", 1e10, "--picture_every", 0, "--save_steps", 1)
    pretrain.refused(capsys, photos, tmp_path, *flags, code=3)
    with pytest.raises(RuntimeError, match="Backward.*returned nan values"):
        pretrain(photos, tmp_path, *flags, "--detect_anomaly")
    assert not torch.is_anomaly_enabled()


@pytest.fixture(scope="module")
def spoilt(photos, tmp_path_factory):
    """Checkpoints with a weight that is NaN, and with finite weights whose features overflow."""
    folder = tmp_path_factory.mktemp("spoilt")
    pretrain(photos, folder, "--throw_ratio", 0, "--max_steps", 1)
    path, _ = newest_checkpoint(folder)
    for name, factor in {"nan": torch.nan, "large": 1e30}.items():
        content = torch.load(path, weights_only=True)
        content["model"]["blocks.0.attn.qkv.weight"] *= factor
        torch.save({key: content[key] for key in ("model", "meta")}, folder / f"{name}.pth")
    return folder


@pytest.mark.parametrize("weights", ["nan", "large"])
def test_ruined_weights_give_no_result(labelled, spoilt, tmp_path, capsys, weights):
    path = spoilt / f"{weights}.pth"
    probe = [path, "--data_path", labelled, "--output_dir", tmp_path / "probe", "--num_workers", 0, "--device", "cpu"]
    messages = [
        refused(
            capsys, visualize.main, path, "--out", tmp_path / "out.png", "--images", labelled / "val" / "cat", code=3
        ),
        refused(capsys, main_probe.main, *probe, "--probes", "knn", code=3),
        refused(capsys, main_probe.main, *probe, "--probes", "linear", "--steps", 2, "--total_batch_size", 8, code=3),
    ]
    if weights == "nan":  # an export computes in float64, where the others are finite
        messages.append(refused(capsys, export.main, path, "--out", tmp_path / "out", code=3))
        messages.append(refused(capsys, export.main, path, "--out", tmp_path / "out.safetensors", code=3))
    for message in messages:
        assert "not finite" in message
        assert len(message.splitlines()) == 1
        assert ("blocks.0.attn.qkv.weight" in message) == (weights == "nan")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in (".lock", "run.json")]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("nan", "blocks.0.attn.qkv.weight"),
        ("large", "No checkpoint of this run has a finite loss"),
    ],
)
def test_no_run_begins_with_ruined_weights(labelled, spoilt, tmp_path, capsys, weights, said):
    path = spoilt / f"{weights}.pth"
    flags = ("--throw_ratio", 0, "--pretrained", path)
    for message in (
        pretrain.refused(capsys, labelled, tmp_path / "p", *flags, code=3),
        finetune.refused(capsys, labelled, tmp_path / "f", "--finetune", path, code=3),
    ):
        assert "not finite" in message
        assert said in message
