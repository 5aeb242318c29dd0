"""What users do to fine-tuning runs: other encoders, other classes, other validation images, flags that do not fit."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.faults.test_user_runs import MICRO
from tests.runs import finetune, pretrain


def test_other_validation_images_are_refused(labelled, tmp_path, capsys):
    shutil.copytree(labelled, tmp_path / "data")
    finetune(tmp_path / "data", tmp_path / "out", "--aa", "none", "--max_steps", 3)
    (tmp_path / "data" / "val" / "cat" / "0.png").unlink()
    message = finetune.refused(capsys, tmp_path / "data", tmp_path / "out", "--aa", "none")
    assert re.search(r"the validation data had 7 images \(.*\) and now has 6 images", message)
    finetune(tmp_path / "data", tmp_path / "out", "--aa", "none", "--allow_changes")


def test_another_optimizer_starts_without_the_state_of_the_former_one(labelled, tmp_path, capsys):
    flags = ("--aa", "none", "--optimizer")
    finetune(labelled, tmp_path / "out", *flags, "lars", "--max_steps", 2)
    message = finetune.refused(capsys, labelled, tmp_path / "out", *flags, "adamw")
    assert "the optimizer was LARS and now is AdamW" in message
    assert "--allow_changes" in message
    content = finetune(labelled, tmp_path / "out", *flags, "adamw", "--allow_changes")
    assert "warning: the optimizer was LARS and now is AdamW" in capsys.readouterr().out
    assert content["meta"]["step"] == 6
    for state in content["optimizer"]["state"].values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"] == 6 - 2


def test_the_encoder_is_known_by_its_content(photos, labelled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrain(photos, "base", *MICRO)
    pretrain(photos, "other", *MICRO, "--seed", 1)
    flags = ("--model", "vit_micro_patch4", "--aa", "none", "--max_steps")
    finetune(labelled, "out", *flags, 1, "--finetune", "base")
    (tmp_path / "deep").mkdir()
    for step, spelling in enumerate(("base/", "./deep/../base", tmp_path / "base", "base/checkpoint-6.pth"), start=2):
        finetune(labelled, "out", *flags, step, "--finetune", spelling)
    Path("base").rename("moved")
    for name in ("moved", "base"):  # where it is now, and the name that it had
        assert finetune(labelled, "out", *flags, 6, "--finetune", name)["meta"]["encoder"]["step"] == 6
    shutil.copy("other/checkpoint-6.pth", "moved/another.pth")  # two encoders in one folder
    for name in ("other", "moved/another.pth"):
        message = finetune.refused(capsys, labelled, "out", *flags, 6, "--finetune", name)
        assert "choose another --output_dir" in message
    shutil.rmtree("moved")  # a run that has begun needs its encoder no longer
    Path("moved").mkdir()
    assert finetune(labelled, "out", *flags, 6, "--finetune", "moved")["meta"]["step"] == 6


def test_results_know_their_encoder(photos, labelled, tmp_path, capsys):
    base = tmp_path / "base"
    out = tmp_path / "out"
    pretrain(photos, base, *MICRO, "--max_steps", 4)
    flags = ("--model", "vit_micro_patch4", "--aa", "none", "--finetune", base)
    finetune(labelled, out, *flags, "--max_steps", 4)
    assert "is not finished: it is at step 4, epoch 1.333 of 2" in capsys.readouterr().out
    assert json.loads((out / "results.json").read_text())["encoder"]["step"] == 4
    pretrain(photos, base, *MICRO)  # it goes on meanwhile
    capsys.readouterr()
    finetune(labelled, out, *flags)
    assert "warning: this run continues from " in capsys.readouterr().out
    assert "--finetune" in finetune.refused(capsys, labelled, out, *flags)
    content = finetune(labelled, tmp_path / "again", *flags)
    assert content["meta"]["encoder"]["step"] == 6
    assert "not finished" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ("--model vit_base_patch16 --finetune {base}", 4, "mae_vit_micro_patch4"),
        ("--model swin_micro_patch4_window4 --trainable_blocks 0", 2, "swin_micro_patch4_window4"),
        ("--eval --resume {tuned} --model vit_mini_patch4", 2, "vit_micro_patch4"),
        ("--resume {base}", 2, "main_pretrain.py"),
    ],
)
def test_user_errors(labelled, pretrained, tmp_path, capsys, flags, code, named):
    if "{tuned}" in flags:
        finetune(labelled, tmp_path / "tuned", "--aa", "none", "--max_steps", 1)
    words = [word.format(base=pretrained, tuned=tmp_path / "tuned") for word in flags.split()]
    assert named in finetune.refused(capsys, labelled, tmp_path / "out", *words, code=code)
