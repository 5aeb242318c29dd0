"""The one rule for splits. Folders, tars and data sets of Hugging Face are tested with it in their own files."""

import pytest

from util.data.splits import choose_split, group_by_split, only_name, split_of, split_of_tar


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train", "training", "Train", "TRAINING"), "train"),
        (("val", "valid", "validation", "Validation"), "val"),
        (("test", "testing", "TEST"), "test"),
        (("trainval", "train2017", "evaluation", "images", "interval", "vali"), None),
    ],
)
def test_names_of_splits(names, expected):
    assert {split_of(name) for name in names} == {expected}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("imagenet-train-0000.tar", "train"),
        ("ILSVRC2012_img_val.tar", "val"),
        ("val2017.tar", "val"),
        ("CC-Validation-3.tar", "val"),
        ("test.tar", "test"),
        ("train_val2018.tar", None),  # both
        ("interval-0.tar", None),
        ("trainval.tar", None),
    ],
)
def test_words_in_names_of_tars(name, expected):
    assert split_of_tar(name) == expected


@pytest.mark.parametrize(
    ("present", "split", "fall_back", "expected"),
    [
        ("train val test", "val", False, "val"),
        ("train test", "val", False, "test"),
        ("train", "val", False, None),
        ("train", "val", True, "train"),
        ("val test", "train", True, None),
    ],
)
def test_which_splits_may_stand_in(present, split, fall_back, expected):
    assert choose_split(present.split(), split, fall_back) == expected


def test_two_names_of_a_split_are_refused():
    found = group_by_split(["Train", "cat", "training", "valid"])
    assert found == {"train": ["Train", "training"], "val": ["valid"]}
    assert only_name(found["val"], "val", "x") == "valid"
    for what, names in (("folder", "Train/ and training/"), ("split", "Train and training")):
        with pytest.raises(ValueError, match=f"more than one {what} of train in x: {names}. Keep one"):
            only_name(found["train"], "train", "x", what)
