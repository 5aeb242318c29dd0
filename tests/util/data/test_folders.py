"""The rule for splits, and the images of folders: names, labels and order are torchvision's."""

import os
import unicodedata
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS as TORCHVISION_EXTENSIONS
from torchvision.datasets.folder import find_classes, make_dataset

from tests.conftest import write_photo
from util.data.folders import (
    IMG_EXTENSIONS,
    MissingSplit,
    find_files,
    find_samples,
    list_folder,
    refuse_inside_data,
    split_of,
    split_of_tar,
)
from util.data.images import FolderImages, match_splits
from util.data.open import open_images


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
    for name in names:
        assert split_of(name) == expected


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
    ("present", "split", "labelled", "folder", "is_noted"),
    [
        ("training validation", "train", False, "training", False),
        ("train val test", "val", True, "val", False),
        ("train testing", "val", True, "testing", True),
        ("train", "val", False, "train", True),  # images to look at, for which the labels do not matter
        ("train val annotations", "train", True, "train", False),
        ("cat dog", "train", False, "", False),
        ("cat dog", "val", False, "", False),
    ],
)
def test_the_folder_of_a_split(tmp_path, present, split, labelled, folder, is_noted):
    for name in present.split():
        tree(tmp_path, f"{name}/a/1.jpg")
    files = find_files(tmp_path, split, labelled)
    assert files.root == tmp_path / folder
    assert files.tars == []
    assert len(files.notes) == is_noted
    for note in files.notes:
        assert f"{folder}/ is read as val" in note


@pytest.mark.parametrize(
    ("present", "split", "labelled", "message"),
    [
        ("val", "train", False, "holds val, but no train: give '.*/val' itself"),
        ("test val", "train", False, "holds test, val, but no train"),
        ("train", "val", True, r"has no folder val/; expected are .*/val/<class>/\*\.jpg"),
        ("cat dog", "train", True, "has no folder train/"),
    ],
)
def test_missing_splits(tmp_path, present, split, labelled, message):
    for name in present.split():
        tree(tmp_path, f"{name}/a/1.jpg")
    with pytest.raises(MissingSplit, match=message):
        find_files(tmp_path, split, labelled)


@pytest.mark.parametrize(
    ("present", "split", "labelled", "message"),
    [
        ("train Train", "train", False, "holds Train and train for train"),
        ("train val validation", "val", True, "holds val and validation for val"),
        ("train test testing", "val", True, "holds test and testing for test"),
        (
            "bus train",
            "train",
            False,
            "train/ may be a split or a class beside images in bus; give '.*/train', or move",
        ),
        ("bus train", "val", False, "into a folder train/"),
        ("bus val", "val", True, "val/ may be a split or a class"),
        ("train2017 val2017", "train", False, "holds train2017, val2017: rename them"),
        ("test_set training_set", "train", False, "holds test_set, training_set: rename them"),
        ("train_images val_images", "val", False, "holds train_images, val_images: rename them"),
    ],
)
def test_folders_that_are_not_clear(tmp_path, present, split, labelled, message):
    for name in present.split():
        tree(tmp_path, f"{name}/a/1.jpg")
    with pytest.raises(ValueError, match=message) as error:
        find_files(tmp_path, split, labelled)
    assert error.type is ValueError


def test_folders_without_images_beside_a_split_are_no_classes(tmp_path):
    tree(tmp_path, "train/a/1.jpg", "out/log.txt", "devkit/")
    assert find_files(tmp_path).root == tmp_path / "train"


def test_folders_that_pre_training_does_not_read_are_named(tmp_path):
    tree(tmp_path, "train/a/1.jpg", "test/a/1.jpg", "unlabeled/1.jpg")
    assert find_files(tmp_path).notes == [
        f"note: unlabeled in {str(tmp_path)!r} is not read: only train/ is",
    ]
    assert find_files(tmp_path, "train", labelled=True).notes == []


@pytest.mark.parametrize("names", ["photos/train/a/1.jpg photos/val/a/1.jpg", "b/1.jpg cat/test/1.png cat/train/2.png"])
def test_splits_below_a_folder_are_not_mixed(tmp_path, names):
    tree(tmp_path, *names.split())
    folder = sorted(os.listdir(tmp_path))[-1]
    with pytest.raises(ValueError, match=f"which would be mixed: give '.*/{folder}', or a folder of links"):
        find_samples(find_files(tmp_path).root)


def test_folders_with_words_of_splits_beside_others_are_classes_with_a_warning(tmp_path):
    tree(tmp_path, "val2017/1.jpg", "train2017/1.jpg", "unlabeled2017/1.jpg")
    (warning,) = find_files(tmp_path).notes
    assert warning.startswith("warning: ")
    assert "holds train2017, val2017, which are read as classes" in warning


def test_a_class_below_a_split_may_be_called_like_a_split(tmp_path):
    tree(tmp_path, "train/bus/1.jpg", "train/train/2.jpg")
    classes, samples, _ = find_samples(find_files(tmp_path).root)
    assert classes == ["bus", "train"]
    assert samples == [("bus/1.jpg", 0), ("train/2.jpg", 1)]


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


def test_extensions_are_those_of_torchvision_and_npy():
    assert {*IMG_EXTENSIONS} == {*TORCHVISION_EXTENSIONS, ".npy"}


def test_images_are_those_of_image_folder(photos):
    ours = FolderImages(photos / "train")
    theirs = ImageFolder(photos / "train")
    assert ours.classes == theirs.classes
    assert [(ours.path(i), int(ours.labels[i])) for i in range(len(ours))] == theirs.samples


def test_hidden_entries_are_no_classes_and_no_images(tmp_path):
    tree(tmp_path, "cat/1.jpg", "dog/x/1.jpg", "dog/.DS_Store", "dog/._1.jpg", ".jpg")
    tree(tmp_path, ".ipynb_checkpoints/1.jpg", "__MACOSX/1.jpg", "cat/.thumbs/1.jpg", "cat/@eaDir/1.jpg")
    classes, samples, _ = find_samples(tmp_path)
    assert classes == ["cat", "dog"]
    assert samples == [("cat/1.jpg", 0), ("dog/x/1.jpg", 1)]


def test_a_data_path_below_a_hidden_folder_is_read(tmp_path):
    root = tree(tmp_path / ".cache" / "photos", "train/cat/1.jpg")
    assert find_samples(find_files(root).root) == (["cat"], [("cat/1.jpg", 0)], [])


def test_links_that_lead_back_end(tmp_path):
    data = tree(tmp_path / "data", "cat/x/1.jpg", "dog/2.jpg")
    other = tree(tmp_path / "other", "3.jpg")
    for name, target in (("itself", "."), ("up", "../.."), ("root", data), ("other", other)):
        (data / "cat" / name).symlink_to(target)
    (other / "back").symlink_to(data / "cat")
    (other / "again").symlink_to(".")
    _, samples, _ = find_samples(data)
    assert samples == [("cat/other/3.jpg", 0), ("cat/x/1.jpg", 0), ("dog/2.jpg", 1)]
    (data / "loop").symlink_to(".")
    with pytest.raises(ValueError, match="no valid file for the classes loop"):
        find_samples(data)


def test_images_directly_in_a_folder_have_no_classes(tmp_path):
    tree(tmp_path, "b.jpg", "A.PNG", "notes.txt", "papers/1.pdf")
    assert find_samples(tmp_path) == ([], [("A.PNG", 0), ("b.jpg", 0)], [])
    with pytest.raises(ValueError, match="holds no class folders, so there are no labels"):
        find_samples(tmp_path, labelled=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("b.jpg A.PNG papers/deep/1.png", r"images directly \(A.PNG, b.jpg\) beside folders of images \(papers\)"),
        ("cat/1.jpg dog/._1.jpg emu/.cache/1.jpg", "no valid file for the classes dog, emu"),
        ("notes.txt papers/", "holds no image; expected are images in class folders"),
    ],
)
@pytest.mark.parametrize("labelled", [False, True])
def test_folders_that_are_no_data(tmp_path, names, message, labelled):
    tree(tmp_path, *names.split())
    with pytest.raises(ValueError, match=message):
        find_samples(tmp_path, labelled)


def test_a_folder_without_permission_is_not_left_out(tmp_path, monkeypatch):
    tree(tmp_path, "cat/1.jpg", "cat/secret/2.jpg")
    (tmp_path / "cat" / "secret").chmod(0)
    try:
        os.listdir(tmp_path / "cat" / "secret")
    except PermissionError:
        with pytest.raises(PermissionError, match="secret"):
            find_samples(tmp_path)
    else:
        pytest.skip("root reads every folder")
    finally:
        (tmp_path / "cat" / "secret").chmod(0o700)


OTHERS = "dog/0.gif dog/x/1.GIF dog/2.gif dog/3.jfif dog/IM0004 dog/.5.gif dog/6.txt dog/README"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (f"cat/1.jpg dog/1.jpg {OTHERS}", ["3 files ending in .gif, 1 file without an ending, 1 file ending in .jfif"]),
        ("1.jpg 2.jfif scan", ["1 file without an ending, 1 file ending in .jfif"]),
        ("cat/1.jpg Makefile 2.heic", ["1 file ending in .heic"]),
        ("cat/1.jpg cat/1.txt dog/1.jpg labels.csv", []),
    ],
)
def test_files_that_look_like_images_and_are_not_read_are_counted(tmp_path, names, expected):
    tree(tmp_path, *names.split())
    assert find_samples(tmp_path).notes == [f"note: not read: {counts}" for counts in expected]


def test_an_error_of_a_folder_without_images_names_what_is_not_read(tmp_path):
    tree(tmp_path, "cat/1.jpg", "dog/1.gif")
    with pytest.raises(ValueError, match=r"classes dog \(note: not read: 1 file ending in .gif\): remove them, or put"):
        find_samples(tmp_path)
    (tmp_path / "cat" / "1.jpg").unlink()
    with pytest.raises(ValueError, match=r"holds no image \(note: not read: 1 file ending in .gif\); expected"):
        find_samples(tmp_path)


COMPOSED = unicodedata.normalize("NFC", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


@pytest.mark.parametrize(("train", "val"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_classes_are_equal_in_any_form_of_unicode(tmp_path, train, val):
    """ "cafz" lies before one form and behind the other, so the order of the folders differs."""
    tree(tmp_path, f"train/{train}/1.jpg", "train/cafz/1.jpg", f"val/{val}/1.jpg", "val/cafz/1.jpg")
    images = FolderImages(tmp_path / "train", labelled=True)
    val_images = FolderImages(tmp_path / "val", labelled=True)
    match_splits(images, val_images)
    assert images.classes == val_images.classes
    assert sorted(images.classes) == ["cafz", COMPOSED]
    for i in range(2):
        name = val_images.path(i).split(os.sep)[-2]
        assert val_images.classes[val_images.labels[i]] == unicodedata.normalize("NFC", name)


def test_two_forms_of_one_class_are_refused(tmp_path):
    tree(tmp_path, f"{COMPOSED}/1.jpg", f"{DECOMPOSED}/1.jpg")
    if len(os.listdir(tmp_path)) == 1:
        pytest.skip("this file system knows one form")
    with pytest.raises(ValueError, match=r"'cafe\\u0301' and 'caf\\xe9', two spellings of one class: merge"):
        find_samples(tmp_path)


def test_a_listing_knows_each_kind(tmp_path):
    tree(tmp_path, "b/", "a/", "2.jpg", "1.JPG", "x.tar", "y.tar.gz", ".h/", ".i.png", ".j", "notes.txt")
    (tmp_path / "c").symlink_to("a")
    (tmp_path / "d").symlink_to(Path("1.JPG"))
    listing = list_folder(tmp_path)
    assert listing.folders == ["a", "b", "c"]
    assert listing.images == ["1.JPG", "2.jpg"]
    assert listing.tars == ["x.tar"]
    assert listing.others == ["d", "notes.txt", "y.tar.gz"]


# ------------------------------------------------------------------------------------------------------ what to do


def test_an_unpacked_folder_may_be_called_like_an_archive(tmp_path):
    (tmp_path / "photos.zip").mkdir()
    write_photo(tmp_path / "photos.zip" / "1.jpg")
    assert len(open_images("folder", tmp_path / "photos.zip")) == 1


@pytest.mark.parametrize("names", ["train-0.parquet", "data/train-0.parquet", "state.json data-0.arrow"])
@pytest.mark.parametrize("labelled", [False, True])
def test_files_of_hugging_face_are_named(tmp_path, names, labelled):
    tree(tmp_path, *names.split())
    with pytest.raises(ValueError, match="file of Hugging Face datasets, whose folder --dataset hf reads"):
        open_images("folder", tmp_path, labelled=labelled)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.xz", ".tar.zst", ".zip"])
def test_a_compressed_archive_is_not_read_in_place(tmp_path, suffix):
    tree(tmp_path, f"photos{suffix}")
    for data_path in (tmp_path, tmp_path / f"photos{suffix}"):
        with pytest.raises(ValueError, match=f"unpack photos{suffix} and give the folder"):
            open_images("folder", data_path)


def test_only_folders_of_images_and_of_hugging_face_make_data_of_what_lies_in_them(tmp_path):
    picture = tmp_path / "picture.png"
    refuse_inside_data("--out", picture, "cifar10", tmp_path)
    for dataset in ("folder", "hf"):
        with pytest.raises(ValueError, match="--out '.*picture.png' lies inside the image folder"):
            refuse_inside_data("--out", picture, dataset, tmp_path)
