import importlib
from argparse import Namespace
from dataclasses import replace

import pytest
from timm.layers import DropPath
from torch import nn

import main_pretrain
from util.run.flags import Plan, changes_of_flags
from util.run.resume import RunRecord, find_changes, find_notes, has_drop_path

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
META = {
    "settings": SETTINGS,
    "data": {"num_images": 24, "fingerprint": "0123456789"},
    "val_data": {"num_images": 5, "fingerprint": "abcdefghij"},
    "pixels": "uint8",
    "optimizer": "AdamW",
    "origin": {"code": "files 1"},
    "world_size": 1,
    "files": {},
}


def other(**changes):
    settings = {name: value for name, value in changes.items() if name not in META}
    return META | {"settings": SETTINGS | settings} | {k: v for k, v in changes.items() if k not in settings}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"lr": 2.0}, ["--lr was 1.0 and now is 2.0"]),
        ({"new_flag": 1}, []),  # a flag that older versions do not have
        ({"batch_size": 4, "accum_iter": 2, "num_workers": 0, "data_path": "b", "compile": True}, []),
        (
            {"data": {"num_images": 24, "fingerprint": "9876543210"}},
            ["the data had 24 images (names and labels 01234567) and now has 24 images (names and labels 98765432)"],
        ),
        (
            {"data": {"num_images": 23, "fingerprint": "0123456789"}},
            ["the data had 24 images (names and labels 01234567) and now has 23 images"],
        ),
        (
            {"val_data": {"num_images": 5, "fingerprint": "jihgfedcba"}},
            ["the validation data had 5 images (names and labels abcdefgh) and now has 5 images"],
        ),
        ({"pixels": "uint16"}, ["the images had pixels of uint8 and now have uint16"]),
        ({"optimizer": "LARS"}, ["the optimizer was AdamW and now is LARS: it starts without the state"]),
        ({"files": {"teacher": "other"}}, ["the teacher's weights have changed"]),
    ],
)
def test_changes_of_results_are_found(changes, said):
    found = find_changes(META, other(**changes), CHANGES)
    assert len(found) == len(said) and all(text.startswith(start) for text, start in zip(found, said, strict=True))


@pytest.mark.parametrize("flag", ["step", "data", "settings", "origin"])
def test_a_flag_that_names_a_file_cannot_overwrite_what_a_checkpoint_says(flag):
    """A framework chooses the names of its flags."""
    record = RunRecord(
        program="main_pretrain.py",
        settings=SETTINGS,
        data=META["data"],
        val_data=None,
        pixels="uint8",
        steps_per_epoch=4,
        process=Namespace(world_size=1),
        optimizer="AdamW",
        origin={"code": "files 1"},
    )
    expected = record.meta(8)
    found = replace(record, files={flag: "fingerprint"}).meta(8)
    assert expected["step"] == 8 and found == expected | {"files": {flag: "fingerprint"}}


@pytest.mark.parametrize(
    ("changes", "draws", "said"),
    [
        ({}, True, None),
        (
            {"batch_size": 4, "accum_iter": 2},
            False,
            "split otherwise (accum_iter was 1 and now is 2, batch_size was 8 and now is 4)",
        ),
        ({"world_size": 2}, True, "(world_size was 1 and now is 2); random draws and statistics within a step differ"),
        ({"world_size": 2}, False, "world_size was 1 and now is 2"),
        ({"compile": True}, False, "results agree to rounding, not to the last bit"),
        ({"compile": True}, True, "so drop path differs"),
        ({"device": "cuda"}, True, "--device was cpu and now is cuda"),
        ({"origin": {"code": "files 2"}}, False, "files 1 then, files 2 now"),
        ({"num_workers": 5}, True, None),
    ],
)
def test_allowed_differences_give_notes(changes, draws, said):
    """draws: whether the model draws random numbers, which then depend on the split of the batch."""
    notes = find_notes(META, other(**changes), CHANGES, has_dropout=draws, split_changes_draws=draws)
    assert len(notes) == (said is not None) and (said is None or said in notes[0])
    assert draws or not any("draws" in note for note in notes)


def test_drop_path_that_drops_nothing_is_none():
    assert has_drop_path(nn.Sequential(DropPath(0.1))) and not has_drop_path(nn.Sequential(DropPath(0.0)))


COMMON = {
    "nothing": "recipe output_dir resume allow_changes data_path num_workers max_bad_fraction dist_timeout recompute "
    "max_steps save_every save_minutes save_steps print_freq",
    "rounding": "attention compile device shard",
    "split": "accum_iter batch_size",
}
IMAGE_COLUMNS = "image_column label_column"
DENSE = "eval eval_every finetune num_pictures epochs"
OWN = {
    "main_pretrain": ("", f"{IMAGE_COLUMNS} pretrained teacher picture_every knn_every knn_train", ""),
    "main_pretrain --model greenmim_swin_base_patch4_window7": (
        "",
        f"{IMAGE_COLUMNS} pretrained teacher picture_every knn_every knn_train",
        "batch_size",
    ),
    "main_finetune": ("", f"{IMAGE_COLUMNS} eval eval_every finetune", ""),
    "main_segmentation": ("downstream.segmentation.", f"{DENSE} class_names", "accum_iter"),
    "main_detection": (
        "downstream.detection.",
        f"{DENSE} categories train_json train_images val_json val_images",
        "batch_size",
    ),
}


@pytest.mark.parametrize("command", OWN)
def test_what_flags_change_is_frozen(command):
    """All others change results. A wrong word lets a run resume with other results, or refuses to resume it.

    OWN: folder of the program, flags that change nothing, and the flag of the split that changes results.
    """
    folder, free, fixed = OWN[command]
    program, *flags = command.split()
    parser, _ = importlib.import_module(folder + program).parse_args(flags)
    expected = {name: change for change, names in COMMON.items() for name in names.split()}
    expected |= dict.fromkeys(free.split(), "nothing")
    expected.pop(fixed, None)
    assert {name: change for name, change in parser.changes.items() if change != "results"} == expected


def test_nothing_said_means_results():
    assert find_changes(META, other(lr=2.0), {}) == ["--lr was 1.0 and now is 2.0"]


def test_sharding_changes_results_where_it_also_rounds_norms():
    parser = main_pretrain.get_args_parser()
    plan = Plan(8, 1, 8, lr=1.0, num_workers=0, device="cuda", precision="fp16")
    assert changes_of_flags(parser, plan)["shard"] == "rounding"
    assert changes_of_flags(parser, replace(plan, precision="bf16"))["shard"] == "results"


def test_paths_and_workers_may_differ_between_the_processes_of_a_start():
    rules = main_pretrain.get_args_parser().rules
    assert {name for name, rule in rules.items() if rule.per_process} == {"data_path", "num_workers", "teacher"}
