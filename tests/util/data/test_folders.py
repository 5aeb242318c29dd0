"""The rule for splits, and the images of folders: names, labels and order are torchvision's."""

import os
import unicodedata

import pytest
from torchvision.datasets.folder import IMG_EXTENSIONS as TORCHVISION_EXTENSIONS
from torchvision.datasets.folder import find_classes, make_dataset

from util.data.folders import (
    IMG_EXTENSIONS,
    MissingSplit,
    find_files,
    find_samples,
    refuse_inside_data,
    split_of,
    split_of_tar,
)
from util.data.images import FolderImages, match_splits


def tree(root, *names):
    """Writes empty files; a name that ends with / is a folder."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root


# ------------------------------------------------------------------------------------------------------------- splits


def test_names_of_splits():
    for name in ("train", "training", "Train", "TRAINING"):
        assert split_of(name) == "train"
    for name in ("val", "valid", "validation", "Validation"):
        assert split_of(name) == "val"
    for name in ("trainval", "train2017", "evaluation", "images", "interval"):
        assert split_of(name) is None
    assert split_of_tar("imagenet-train-0000.tar") == "train"
    assert split_of_tar("ILSVRC2012_img_val.tar") == "val"
    for name in ("train_val2018.tar", "interval-0.tar", "trainval.tar"):
        assert split_of_tar(name) is None


@pytest.mark.parametrize(
    ("present", "split", "labelled", "folder"),
    [
        ("training validation", "train", False, "training"),
        ("train val test", "val", True, "val"),
        ("train testing", "val", True, "testing"),
        ("train", "val", False, "train"),  # images to look at, for which the labels do not matter
        ("cat dog", "train", False, ""),
        ("cat dog", "val", False, ""),
    ],
)
def test_the_folder_of_a_split(tmp_path, present, split, labelled, folder):
    tree(tmp_path, *[f"{name}/a/1.jpg" for name in present.split()])
    files = find_files(tmp_path, split, labelled)
    assert files.root == tmp_path / folder
    assert files.tars == []
    assert bool(files.notes) == (folder != "" and split_of(folder) != split)


@pytest.mark.parametrize(
    ("present", "split", "labelled", "error"),
    [
        ("val", "train", False, MissingSplit),
        ("train", "val", True, MissingSplit),
        ("cat dog", "train", True, MissingSplit),
        ("train Train", "train", False, ValueError),
        ("train2017 val2017", "train", False, ValueError),
    ],
)
def test_splits_that_are_missing_or_unclear(tmp_path, present, split, labelled, error):
    tree(tmp_path, *[f"{name}/a/1.jpg" for name in present.split()])
    with pytest.raises(error, match="--data_path") as raised:
        find_files(tmp_path, split, labelled)
    assert raised.type is error


# ------------------------------------------------------------------------------------------------------------ classes

NAMES = """b/1.jpg b/0.JPEG b%c/1.png b/x/2.jpg b/x%y/3.jpg b/x-/4.tiff b/x/a/5.webp b/x.jpg/6.bmp A/10.jpg A/9.jpg
A/notes.txt ü/ä.ppm ü/☃.pgm b-/1.jpg b/é/1.jpg b/z/empty/"""


def test_names_labels_and_order_are_torchvision_s(tmp_path):
    data = tree(tmp_path / "data", *NAMES.replace("%", "\N{NO-BREAK SPACE}").split(), "b/x y/3.jpg")
    tree(tmp_path / "elsewhere", "deep/7.jpg", "8.jpg")
    (data / "A" / "link").symlink_to(tmp_path / "elsewhere")
    (data / "linked").symlink_to(tmp_path / "elsewhere" / "deep")
    (data / "A" / "broken.jpg").symlink_to("nowhere")
    (data / "A" / "itself").symlink_to("itself")
    (data / "A" / os.fsdecode(b"\xff.jpg")).touch()
    classes, samples, _ = find_samples(data)
    theirs, rank = find_classes(data)
    expected = make_dataset(data, rank, extensions=IMG_EXTENSIONS)
    assert classes == theirs
    assert len(expected) == 20
    assert [(str(data / path), label) for path, label in samples] == expected
    assert {*IMG_EXTENSIONS} == {*TORCHVISION_EXTENSIONS, ".npy"}


def test_hidden_entries_are_no_classes_and_no_images(tmp_path):
    root = tmp_path / ".cache"  # the root itself may be hidden
    tree(root, "cat/1.jpg", "dog/x/1.jpg", "dog/.DS_Store", "dog/._1.jpg", ".jpg")
    tree(root, ".ipynb_checkpoints/1.jpg", "__MACOSX/1.jpg", "cat/.thumbs/1.jpg", "cat/@eaDir/1.jpg")
    assert find_samples(root) == (["cat", "dog"], [("cat/1.jpg", 0), ("dog/x/1.jpg", 1)], [])


def test_links_that_lead_back_end(tmp_path):
    data = tree(tmp_path / "data", "cat/x/1.jpg", "dog/2.jpg")
    other = tree(tmp_path / "other", "3.jpg")
    for name, target in (("itself", "."), ("up", "../.."), ("root", data), ("other", other)):
        (data / "cat" / name).symlink_to(target)
    (other / "back").symlink_to(data / "cat")
    _, samples, _ = find_samples(data)
    assert samples == [("cat/other/3.jpg", 0), ("cat/x/1.jpg", 0), ("dog/2.jpg", 1)]


def test_images_directly_in_a_folder_have_no_classes(tmp_path):
    tree(tmp_path, "b.jpg", "A.PNG", "notes.txt", "papers/1.pdf")
    assert find_samples(tmp_path) == ([], [("A.PNG", 0), ("b.jpg", 0)], [])
    with pytest.raises(ValueError, match="--data_path"):
        find_samples(tmp_path, labelled=True)
    tree(tmp_path, "cat/1.jpg", "dog/2.jpg")
    classes, samples, (note,) = find_samples(tmp_path)
    assert (classes, samples) == ([], [("A.PNG", 0), ("b.jpg", 0), ("cat/1.jpg", 0), ("dog/2.jpg", 0)])
    assert "cat, dog" in note
    with pytest.raises(ValueError, match="b.jpg"):
        find_samples(tmp_path, labelled=True)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ("cat/1.jpg dog/1.gif emu/.cache/1.jpg", "dog, emu"),
        ("notes.txt papers/0.svs papers/1.svs", "no image"),
    ],
)
def test_folders_that_are_no_data(tmp_path, names, named):
    tree(tmp_path, *names.split())
    with pytest.raises(ValueError, match=f"--data_path .*{named}"):
        find_samples(tmp_path)


def test_classes_are_equal_in_any_form_of_unicode(tmp_path):
    """ "cafz" lies before one form and behind the other, so the order of the folders differs."""
    composed = unicodedata.normalize("NFC", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    tree(tmp_path, f"train/{composed}/1.jpg", "train/cafz/1.jpg", "val/cafz/1.jpg")
    tree(tmp_path, f"val/{unicodedata.normalize('NFD', composed)}/1.jpg")
    images = FolderImages(tmp_path / "train", labelled=True)
    val_images = FolderImages(tmp_path / "val", labelled=True)
    match_splits(images, val_images)
    assert images.classes == val_images.classes == ["cafz", composed]
    for i in range(2):
        name = val_images.path(i).split(os.sep)[-2]
        assert val_images.classes[val_images.labels[i]] == unicodedata.normalize("NFC", name)


def test_only_folders_of_images_and_of_hugging_face_make_data_of_what_lies_in_them(tmp_path):
    picture = tmp_path / "picture.png"
    refuse_inside_data("--out", picture, "cifar10", tmp_path)
    for dataset in ("folder", "hf"):
        with pytest.raises(ValueError, match="--out '.*picture.png'"):
            refuse_inside_data("--out", picture, dataset, tmp_path)
    (tmp_path / "train").mkdir()
    refuse_inside_data("--out", picture, "folder", tmp_path)  # beside the split
    with pytest.raises(ValueError, match="--out"):
        refuse_inside_data("--out", tmp_path / "train" / "picture.png", "folder", tmp_path)
