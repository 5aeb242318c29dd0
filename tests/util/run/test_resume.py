from argparse import Namespace
from dataclasses import replace

import pytest
from timm.layers import DropPath
from torch import nn

from util.run.flags import MACHINE_FLAGS, PROCESS_FLAGS
from util.run.resume import SPLIT_FLAGS, RunRecord, find_changes, find_notes, has_drop_path

SETTINGS = {
    "lr": 1.0,
    "batch_size": 8,
    "accum_iter": 1,
    "compile": False,
    "device": "cpu",
    "data_path": "a",
    "num_workers": 2,
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
    found = find_changes(META, other(**changes), MACHINE_FLAGS)
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
    notes = find_notes(META, other(**changes), has_dropout=draws, split_changes_draws=draws)
    assert len(notes) == (said is not None) and (said is None or said in notes[0])
    assert draws or not any("draws" in note for note in notes)


def test_a_fixed_flag_may_not_change_although_others_of_its_kind_may():
    now = other(batch_size=4, accum_iter=2)
    assert find_changes(META, now, MACHINE_FLAGS, {"batch_size"}) == ["--batch_size was 8 and now is 4"]


def test_drop_path_that_drops_nothing_is_none():
    assert has_drop_path(nn.Sequential(DropPath(0.1))) and not has_drop_path(nn.Sequential(DropPath(0.0)))


def test_every_named_flag_exists():
    """A renamed flag must be renamed in the rules, too."""
    import main_finetune
    import main_pretrain

    flags = [{action.dest for action in main.get_args_parser()._actions} for main in (main_pretrain, main_finetune)]
    assert MACHINE_FLAGS | PROCESS_FLAGS | set(SPLIT_FLAGS) <= flags[0] | flags[1]
