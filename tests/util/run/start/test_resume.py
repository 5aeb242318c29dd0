import json

import pytest
import torch

import main_pretrain
from tests.runs import assert_same_state, info_of_run, pretrain, reports_without_times
from util.flag import Flag
from util.run.errors import CheckpointError
from util.run.files.checkpoint import save_checkpoint
from util.run.start.resume import find_changes, read_resumed

SETTINGS = {
    "lr": 1.0,
    "batch_size": 8,
    "accum_iter": 1,
    "compile": False,
    "device": "cpu",
    "data_path": "a",
    "num_workers": 2,
}
CHANGES = {
    "lr": "results",
    "batch_size": "split",
    "accum_iter": "split",
    "compile": "rounding",
    "device": "rounding",
    "data_path": "nothing",
    "num_workers": "nothing",
}
BEFORE = info_of_run(settings=SETTINGS)


def other(settings=None, **changes):
    return info_of_run(settings=SETTINGS | (settings or {}), **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"settings": {"lr": 2.0}}, ["--lr was 1.0 and now is 2.0"]),
        ({"settings": {"new_flag": 1}}, []),
        ({"settings": {"batch_size": 4, "accum_iter": 2, "num_workers": 0, "data_path": "b", "compile": True}}, []),
        ({"pixels": "uint16"}, ["the images had pixels of uint8 and now have uint16"]),
    ],
)
def test_changes_of_results_are_found(changes, said):
    found = find_changes(BEFORE, other(**changes), CHANGES)
    for text, expected in zip(found, said, strict=True):
        assert text.startswith(expected)


def test_a_recipe_that_gains_a_flag_does_not_change_a_run_silently(photos, tmp_path, capsys, monkeypatch):
    recipe = {"throw_ratio": 0.25}
    monkeypatch.setitem(main_pretrain.RECIPES, "mine", recipe)
    command = (photos, tmp_path, "--recipe", "mine", "--max_steps")
    pretrain(*command, 1)
    make_parser = main_pretrain.get_args_parser

    def make_parser_of_today(*names):
        parser = make_parser(*names)
        parser.add_flags("", Flag("target", str, "pixels"))
        return parser

    monkeypatch.setattr(main_pretrain, "get_args_parser", make_parser_of_today)
    recipe["target"] = "hog"
    assert "--target is unknown to the checkpoint and now is hog" in pretrain.refused(capsys, *command, 2)
    recipe["target"] = "pixels"  # its default, which keeps the former behaviour
    assert pretrain(*command, 2)["meta"]["settings"]["target"] == "pixels"


WSD = ["--lr_schedule", "wsd", "--lr", "1e-3", "--warmup_epochs", "1", "--picture_every", "0", "--save_every", "100"]


@pytest.mark.parametrize(
    ("flags", "stem", "longer"),
    [
        ("--epochs 4 --decay_epochs 1", 9, "--epochs 6 --decay_epochs 2"),
        ("--epochs 4 --decay_epochs 2 --repeat_aug 2", 6, "--epochs 5 --decay_epochs 1 --min_lr 1e-5"),
    ],
)
def test_two_lengths_from_one_stem_are_equal_to_two_whole_runs(photos, tmp_path, capsys, flags, stem, longer):
    short = pretrain(photos, tmp_path / "short", *WSD, *flags.split())
    path = tmp_path / "short" / f"checkpoint-{stem}.pth"
    assert path.exists()  # of checkpoints that are not kept only the last two are left
    assert str(path) in capsys.readouterr().out
    again = pretrain(photos, tmp_path / "again", *WSD, *flags.split(), "--resume", path)
    assert_same_state(again, short)
    both = (*WSD, *flags.split(), *longer.split())
    whole = pretrain(photos, tmp_path / "whole", *both)
    from_stem = pretrain(photos, tmp_path / "longer", *both, "--resume", path)
    assert_same_state(from_stem, whole)
    assert reports_without_times(tmp_path / "longer") == reports_without_times(tmp_path / "whole")[stem:]


@pytest.mark.parametrize(
    ("flags", "step", "longer"),
    [
        ("--epochs 4 --decay_epochs 2", 9, "--epochs 6"),  # a stem inside the decay
        ("--epochs 4 --decay_epochs 1", 9, "--epochs 6 --warmup_epochs 2"),
        ("--epochs 6 --decay_epochs 1 --repeat_aug 4", 15, "--epochs 8"),  # groups of 4 + 2 epochs, and of 4 + 4
        (
            "--model amt_vit_micro_patch4 --sampling attention --attention_start 1 --attention_every 1 "
            "--epochs 4 --decay_epochs 1",
            9,
            "--epochs 6",
        ),
    ],
)
def test_a_run_that_would_have_begun_otherwise_is_not_prolonged(photos, tmp_path, capsys, flags, step, longer):
    pretrain(photos, tmp_path / "short", *WSD, *flags.split(), "--max_steps", step)
    path = tmp_path / "short" / f"checkpoint-{step}.pth"
    both = (*WSD, *flags.split(), *longer.split())
    message = pretrain.refused(capsys, photos, tmp_path / "longer", *both, "--resume", path)
    assert "--epochs was" in message


def write_run(tmp_path, **parts):
    """Returns the path of a checkpoint with the given JSON of a run."""
    meta = info_of_run(**parts).to_json()
    return save_checkpoint(tmp_path, 1, {"model": {"w": torch.zeros(1)}, "optimizer": {}}, meta)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    found = write_run(tmp_path)
    sidecar = found.with_suffix(".json")
    content = json.loads(sidecar.read_text())
    del content["meta"]["origin"]
    sidecar.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="checkpoint-1.pth' was written by another version .*'origin'"):
        read_resumed(found, "main_pretrain.py", 8)


def test_best_weights_are_no_run(tmp_path):
    best = write_run(tmp_path)
    sidecar = best.with_suffix(".json")
    content = json.loads(sidecar.read_text())
    content["meta"]["val"] = {"top1": 50.0}
    sidecar.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="holds weights but no run"):
        read_resumed(best, "main_pretrain.py", 8)


def test_nothing_said_means_results():
    assert find_changes(BEFORE, other({"lr": 2.0}), {}) == ["--lr was 1.0 and now is 2.0"]


def test_paths_and_workers_may_differ_between_the_processes_of_a_start():
    flags = main_pretrain.get_args_parser("tec_vit_micro_patch4").flags
    assert {name for name, flag in flags.items() if flag.per_process} == {
        "data_path",
        "num_workers",
        "teacher",
    }
