import os
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS as TORCHVISION_EXTENSIONS
from torchvision.datasets.folder import find_classes, make_dataset

from tests.conftest import write_photo
from util.data import folders
from util.data.datasets import open_images
from util.data.folders import IMG_EXTENSIONS, find_root, find_samples, list_folder
from util.data.images import FolderImages


def tree(root, *names):
    """Empty files; a name that ends with / is a folder."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return root


def test_names_labels_and_order_are_torchvision_s(tmp_path):
    names = (
        "b/1.jpg",
        "b/0.JPEG",
        "b c/1.png",
        "b/x/2.jpg",
        "b/x y/3.jpg",
        "b/x-/4.tiff",
        "b/x/a/5.webp",
        "b/x.jpg/6.bmp",
    )
    names += (
        "A/10.jpg",
        "A/9.jpg",
        "A/notes.txt",
        "ü/ä.ppm",
        "ü/\N{SNOWMAN}.pgm",
        "b-/1.jpg",
        "b/é/1.jpg",
        "b/z/empty/",
    )
    tree(tmp_path / "data", *names)
    tree(tmp_path / "elsewhere", "deep/7.jpg", "8.jpg")
    (tmp_path / "data" / "A" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "data" / "A" / "broken.jpg").symlink_to("nowhere")
    (tmp_path / "data" / "A" / "itself").symlink_to("itself")
    (tmp_path / "data" / "A" / os.fsdecode(b"\xff.jpg")).touch()
    classes, samples, notes = find_samples(tmp_path / "data")
    theirs, rank = find_classes(tmp_path / "data")
    expected = make_dataset(tmp_path / "data", rank, extensions=IMG_EXTENSIONS)
    assert classes == theirs and len(samples) == len(expected) == 19 and notes == []
    assert [(str(tmp_path / "data" / path), label) for path, label in samples] == expected


def test_extensions_are_those_of_torchvision():
    assert folders.TORCHVISION_EXTENSIONS == TORCHVISION_EXTENSIONS


def test_images_are_those_of_image_folder(photos):
    ours, theirs = FolderImages(photos), ImageFolder(photos / "train")
    assert [(ours.path(i), label) for i, label in enumerate(ours.labels.tolist())] == theirs.samples
    assert ours.classes == theirs.classes and ours.notes == [] and ours.root == photos / "train"


@pytest.mark.fault("U20", "pre-train on a folder with training/ and validation/", "training/ alone is read")
@pytest.mark.parametrize(
    ("present", "split", "labelled", "read", "notes"),
    [
        ("train val", "train", False, "train", 0),
        ("training validation", "train", False, "training", 0),
        ("train valid", "train", False, "train", 0),
        ("Training testing", "train", False, "Training", 0),
        ("training Validation", "val", True, "Validation", 0),
        ("train val test", "val", True, "val", 0),
        ("train testing", "val", True, "testing", 1),
        ("train", "val", False, "train", 1),  # images to look at, for which the labels do not matter
        ("train notes", "train", False, "train", 0),
        ("cat dog", "train", False, "", 0),
        ("cat dog", "val", False, "", 0),
        ("train val", "", False, "", 0),  # the folder itself
    ],
)
def test_the_folder_of_a_split(tmp_path, present, split, labelled, read, notes):
    for name in present.split():
        tree(tmp_path, f"{name}/a/1.jpg" if name != "notes" else "notes/1.txt")
    root, found = find_root(tmp_path, split, labelled)
    assert root == tmp_path / read and len(found) == notes
    assert all("is read as val" in note and read in note for note in found)


@pytest.mark.fault("U21b", "two folders of one split: val/ and validation/, Train/ and train/", "refused by name")
@pytest.mark.fault("U22", "pre-train on a folder that holds val/ alone", "refused, with the path to give instead")
@pytest.mark.fault("U22b", "class folders, one called train", "refused: it may be a split; below train/ it is a class")
@pytest.mark.parametrize(
    ("present", "split", "labelled", "message"),
    [
        ("train Train", "train", False, "more than one folder of train .*: Train/ and train/"),
        ("train val validation", "val", True, "more than one folder of val .*: val/ and validation/"),
        ("train test testing", "val", True, "more than one folder of test .*: test/ and testing/"),
        ("val", "train", False, r"holds val/, but no train/\. Give '.*/val' itself"),
        ("test", "train", False, r"holds test/, but no train/\. Give '.*/test' itself"),
        ("test val", "train", False, r"holds test/ and val/, but no train/\. Give '.*/test' or '.*/val' itself"),
        ("train", "val", True, r"has no folder val/; expected is .*/val/<class>/\*\.jpg"),
        ("cat dog", "train", True, "has no folder train/"),
        (
            "bus train",
            "train",
            False,
            r"train/ may be a split or a class, beside images in bus/\. Give '.*/train', or move",
        ),
        ("bus train", "val", False, r"train/ may be a split or a class, .* into a folder train/"),
        ("bus val", "val", True, "val/ may be a split or a class"),
    ],
)
def test_folders_that_are_not_clear(tmp_path, present, split, labelled, message):
    tree(tmp_path, *(f"{name}/a/1.jpg" for name in present.split()))
    with pytest.raises(ValueError, match=message):
        find_root(tmp_path, split, labelled)


def test_a_class_below_a_split_may_be_called_like_a_split(tmp_path):
    tree(tmp_path, "train/bus/1.jpg", "train/train/2.jpg")
    classes, samples, _ = find_samples(find_root(tmp_path, "train")[0])
    assert classes == ["bus", "train"] and samples == [("bus/1.jpg", 0), ("train/2.jpg", 1)]


def test_two_names_of_one_folder_are_one(tmp_path):
    tree(tmp_path, "train/a/1.jpg", "val/a/1.jpg")
    (tmp_path / "validation").symlink_to("val")
    assert find_root(tmp_path, "val", labelled=True) == (tmp_path / "val", [])


def test_images_beside_the_split_are_noted(tmp_path):
    tree(tmp_path, "train/a/1.jpg", "val/a/1.jpg", "logo.png", "cover.jpg", "README.txt", ".hidden.jpg")
    assert find_root(tmp_path, "train") == (
        tmp_path / "train",
        ["ignored: 2 images beside train/ (cover.jpg, logo.png)"],
    )


@pytest.mark.fault("U24", "hidden files, __MACOSX/, @eaDir/, .ipynb_checkpoints/ in the data", "ignored, and noted")
def test_hidden_entries_are_no_classes_and_no_images(tmp_path):
    hidden = (
        ".ipynb_checkpoints/1.jpg",
        "__MACOSX/1.jpg",
        "cat/.thumbs/1.jpg",
        "cat/@eaDir/1.jpg",
        "dog/._1.jpg",
        ".jpg",
    )
    tree(tmp_path, "cat/1.jpg", "dog/x/1.jpg", "dog/.DS_Store", *hidden)
    classes, samples, notes = find_samples(tmp_path)
    assert classes == ["cat", "dog"] and samples == [("cat/1.jpg", 0), ("dog/x/1.jpg", 1)]
    # .DS_Store is no image anyway.
    assert notes == ["ignored: 6 hidden paths (.ipynb_checkpoints, .jpg, __MACOSX, ...)"]
    tree(tmp_path / "flat", "1.jpg", "._1.jpg")
    assert find_samples(tmp_path / "flat") == ([], [("1.jpg", 0)], ["ignored: 1 hidden path (._1.jpg)"])


def test_a_data_path_below_a_hidden_folder_is_read(tmp_path):
    tree(tmp_path / ".cache" / "photos", "train/cat/1.jpg")
    assert find_samples(find_root(tmp_path / ".cache" / "photos", "train")[0])[:2] == (["cat"], [("cat/1.jpg", 0)])


def links(folder, **targets):
    for name, target in targets.items():
        (folder / name).symlink_to(target)


@pytest.mark.fault("U25", "a link in the data that leads back to a parent folder", "not followed, and noted")
def test_links_that_lead_back_are_not_followed(tmp_path):
    tree(tmp_path, "data/cat/x/1.jpg", "data/dog/2.jpg", "other/3.jpg")
    links(tmp_path / "data" / "cat", itself=".", up="../..", root=tmp_path / "data", other=tmp_path / "other")
    links(tmp_path / "other", back=tmp_path / "data" / "cat", again=".")  # reached through cat/other
    links(tmp_path / "data", loop=".")  # no class
    classes, samples, notes = find_samples(tmp_path / "data")
    assert classes == ["cat", "dog"]
    assert samples == [("cat/other/3.jpg", 0), ("cat/x/1.jpg", 0), ("dog/2.jpg", 1)]
    (note,) = notes
    assert note.startswith("ignored: 6 looping links (")
    assert folders.holds_images(tmp_path / "data", "cat") and not folders.holds_images(tmp_path / "data", "loop")


def test_links_to_other_folders_are_followed(tmp_path):
    """Also to a folder beside, whose images then count twice, as in torchvision."""
    tree(tmp_path, "a/1.jpg", "b/2.jpg", "a/data-1/3.jpg", "a/data-10/4.jpg")
    links(tmp_path / "b", a=tmp_path / "a")
    links(tmp_path / "a" / "data-10", near=tmp_path / "a" / "data-1")  # the name begins alike, which makes it no parent
    _, samples, notes = find_samples(tmp_path)
    assert [(str(tmp_path / path), label) for path, label in samples] == make_dataset(
        tmp_path, {"a": 0, "b": 1}, extensions=IMG_EXTENSIONS
    )
    assert len(samples) == 9 and notes == []


@pytest.mark.fault("U23", "images directly in a folder beside a folder with images", "refused, with both counts")
def test_flat_images(tmp_path):
    tree(tmp_path, "b.jpg", "A.PNG", "notes.txt", "papers/1.pdf")
    assert find_samples(tmp_path) == ([], [("A.PNG", 0), ("b.jpg", 0)], ["ignored: 1 folder without images (papers)"])
    with pytest.raises(ValueError, match="holds no class folders, so there are no labels"):
        find_samples(tmp_path, labelled=True)
    tree(tmp_path, "papers/deep/figures/1.png")
    message = r"holds 2 images directly \(A.PNG, b.jpg\) beside folders of images \(papers\): move one of them"
    for labelled in (False, True):
        with pytest.raises(ValueError, match=message):
            find_samples(tmp_path, labelled)


def test_a_class_of_hidden_images_is_empty(tmp_path):
    tree(tmp_path, "cat/1.jpg", "dog/._1.jpg", "emu/.cache/1.jpg")
    with pytest.raises(ValueError, match="no valid file for the classes dog, emu; remove the folders, or put images"):
        find_samples(tmp_path)


def test_a_folder_without_permission_is_noted(tmp_path, monkeypatch):
    tree(tmp_path, "cat/1.jpg", "cat/secret/2.jpg")
    exact = folders.list_folder

    def guarded(path):
        if path.name == "secret":
            raise PermissionError(13, "Permission denied")
        return exact(path)

    monkeypatch.setattr(folders, "list_folder", guarded)
    assert find_samples(tmp_path) == (["cat"], [("cat/1.jpg", 0)], ["ignored: 1 unreadable folder (cat/secret)"])


def test_a_listing_knows_each_kind(tmp_path):
    tree(tmp_path, "b/", "a/", "2.jpg", "1.JPG", "x.tar", "y.tar.gz", "z.ZIP", ".h/", ".i.png", ".j", "notes.txt")
    links(tmp_path, c="a", d=Path("1.JPG"))
    found = list_folder(tmp_path)
    assert (found.folders, found.images, found.tars) == (["a", "b", "c"], ["1.JPG", "2.jpg"], ["x.tar"])
    assert (found.archives, found.hidden) == (["y.tar.gz", "z.ZIP"], [".h", ".i.png"])


def test_an_unpacked_folder_may_be_called_like_an_archive(tmp_path):
    (tmp_path / "photos.zip").mkdir()
    write_photo(tmp_path / "photos.zip" / "1.jpg")
    assert len(FolderImages(tmp_path / "photos.zip")) == 1


@pytest.mark.fault("U79b", "Parquet or save_to_disk as --data_path without `--dataset hf`", "refused, names the flag")
@pytest.mark.parametrize(
    "names",
    ["train-0.parquet", "data/train-0.parquet", "state.json data-0.arrow", "dataset_dict.json train/data-0.arrow"],
)
def test_files_of_hugging_face_are_named(tmp_path, names):
    tree(tmp_path, *names.split())
    for labelled in (False, True):
        with pytest.raises(ValueError, match="but files of Hugging Face datasets .*, which --dataset hf reads"):
            FolderImages(tmp_path, labelled=labelled)


@pytest.mark.fault("U29", "a compressed archive as --data_path", "refused, with the command that unpacks it")
@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.xz", ".tar.zst", ".zip"])
def test_a_compressed_archive_is_not_read_in_place(tmp_path, suffix):
    tree(tmp_path, f"photos{suffix}")
    unpack = "unzip -d FOLDER" if suffix == ".zip" else "tar -C FOLDER -xf"
    message = rf"is a compressed archive, which cannot be read in place: unpack it .*{unpack} photos\{suffix}\)"
    with pytest.raises(ValueError, match=message):
        open_images("folder", tmp_path / f"photos{suffix}")
    with pytest.raises(ValueError, match=rf"holds no image but compressed archives \(photos\{suffix}\): unpack them"):
        open_images("folder", tmp_path)


@pytest.mark.fault(
    "U32", "train2017/ and val2017/, or train_images/ and val_images/", "refused, with what to do; never mixed"
)
@pytest.mark.parametrize("names", ["train2017 val2017", "test_set training_set", "train_images val_images notes"])
def test_folders_whose_names_speak_of_splits_are_not_mixed(tmp_path, names):
    first, second, *others = names.split()
    tree(tmp_path, f"{first}/0.jpg", f"{second}/0.jpg", *(f"{name}/" for name in others))
    with pytest.raises(ValueError, match=f"holds {first}/, {second}/, whose names contain more than one split"):
        open_images("folder", tmp_path)
    tree(tmp_path, "beach/0.jpg")  # classes, after all
    assert others or len(FolderImages(tmp_path).classes) == 3
