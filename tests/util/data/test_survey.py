"""Which files a start says it does not read, for each kind of data, and what a check of the data reports on them."""

import json
import shutil

import numpy as np
import pytest

from downstream.segmentation.data import LabelValues, SegmentationImages
from scripts import pack_dataset
from tests.conftest import write_photo
from tests.downstream.detection.coco import open_split, write_coco
from tests.downstream.segmentation.pairs import write_pairs
from tests.util.data.test_tars import photo, webdataset, write
from util.data.images import FolderImages
from util.data.open import open_images
from util.data.pixel_format import PixelFormat
from util.data.survey import survey, survey_copies, unread_files

try:
    import datasets
except ImportError:
    datasets = None

needs_datasets = pytest.mark.skipif(datasets is None, reason="needs datasets")


def in_folder(photos, root):
    shutil.copytree(photos / "train", root / "train")
    return "folder", root / "train" / "cat"


def packed(photos, root):
    pack_dataset.main([str(photos / "train"), str(root / "train"), "--workers", "1"])
    return "folder", root / "train"


def in_tars(photos, root):
    (root / "train").mkdir(parents=True)
    webdataset(root / "train" / "0.tar", [0, 1])
    return "folder", root / "train"


def tars_beside_each_other(photos, root):
    root.mkdir()
    webdataset(root / "train-0.tar", [0, 1])
    webdataset(root / "val-0.tar", [0, 1])
    return "folder", root


def rows(photos):
    path = str(photos / "train" / "cat" / "0.jpg")
    image = {"bytes": (photos / "train" / "cat" / "0.jpg").read_bytes(), "path": path}
    return datasets.Dataset.from_dict(
        {"image": [image] * 3, "label": [0, 1, 1]},
        features=datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"])),
    )


def in_parquet(photos, root):
    root.mkdir()
    rows(photos).to_parquet(root / "train-0.parquet")
    return "hf", root


def saved(photos, root):
    datasets.DatasetDict(train=rows(photos)).save_to_disk(root)
    return "hf", root


@pytest.mark.parametrize(
    "make",
    [
        in_folder,
        packed,
        in_tars,
        tars_beside_each_other,
        pytest.param(in_parquet, marks=needs_datasets),
        pytest.param(saved, marks=needs_datasets),
    ],
)
def test_a_start_counts_images_that_are_not_read(photos, tmp_path, make):
    dataset, place = make(photos, tmp_path / "data")
    assert not any("not read" in note for note in open_images(dataset, tmp_path / "data").notes)
    for i in range(9):
        write_photo(place / f"{i}.gif")
    (place / "notes.txt").touch()
    images = open_images(dataset, tmp_path / "data")
    notes = [note for note in images.notes if "not read" in note]
    assert len(notes) == 1
    assert notes[0].startswith("note: not read: 9 files ending in .gif")
    assert ".txt" not in notes[0]
    content = survey(images, with_every_file=True).content
    assert content["headers"] == sum(content["formats"].values()) == len(images)
    assert sum(content["classes"].values()) == len(images)
    json.dumps(content, allow_nan=False)


@needs_datasets
def test_images_that_rows_may_name_are_not_said_to_be_unread(photos, tmp_path):
    """A folder of images, as `datasets` reads it: GIFs, too."""
    folder = tmp_path / "train"
    shutil.copytree(photos / "train" / "cat", folder / "cat")
    write_photo(folder / "cat" / "more.gif")
    images = open_images("hf", tmp_path)
    assert len(images) == 13
    assert not any("not read" in note for note in images.notes)


def test_label_files_and_images_that_nothing_names(tmp_path):
    root = write_pairs(tmp_path / "pairs")
    write_photo(root / "annotations" / "training" / "0.tif")
    images = SegmentationImages(root, "train", LabelValues(3))
    folder = root / "annotations" / "training"
    note = f"note: not read: 1 file ending in .tif in the folder of label files, {str(folder)!r}"
    assert images.notes == [note]
    (folder / "0.png").unlink()
    with pytest.raises(ValueError, match=r"1 name without a label file .*: 0 \(note: not read: 1 file ending in .tif"):
        SegmentationImages(root, "train", LabelValues(3))

    def leave_out_one(content):
        content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] != 100]

    root = write_coco(tmp_path / "shapes", "train", 4, edit=leave_out_one)
    write_photo(root / "train2017" / "new.jpg")
    shapes = open_split(root)
    shapes.check()
    assert shapes.notes == [  # the image without objects has a note of its own
        "images without objects ignored: 1",
        f"note: not read: 1 file ending in .jpg in {str(root / 'train2017')!r}, which instances_train2017.json does "
        "not name",
    ]


def test_members_of_tars_are_counted_by_ending_and_reason(tmp_path):
    members = [("a.jpg", photo(0)), ("a.cls", b"0"), ("a.json", b"{}"), ("b.gif", b"GIF"), (".c.jpg", photo(1))]
    write(tmp_path / "0.tar", members)
    part = survey(open_images("folder", tmp_path))
    assert part.content["images"] == 1
    found = {entry["ending"]: entry["files"] for entry in part.content["not_read"]}
    assert found == {".json": 1, ".gif": 1, "": 1}
    json.dumps(part.content, allow_nan=False)


def test_unread_files_are_found_behind_links_and_in_hidden_folders_once(tmp_path):
    folder = tmp_path / "data"
    (folder / ".cache" / "deep").mkdir(parents=True)
    (folder / ".cache" / "deep" / "a.jpg").touch()
    (folder / "a").mkdir()
    (folder / "a" / "1.gif").touch()
    (folder / "a" / "up").symlink_to(folder)
    (folder / "a" / "read.jpg").touch()
    assert dict(unread_files(folder, {b"a/read.jpg"})) == {
        ("", "in the hidden folder .cache"): 1,
        (".gif", "images of this format are not read: convert them"): 1,
    }


def test_floats_without_a_valid_pixel_and_constant_bands_are_reported(tmp_path):
    pixels = np.stack([np.full((8, 8), 3.0), np.arange(64.0).reshape(8, 8)], axis=2).astype(np.float32)
    np.save(tmp_path / "0.npy", pixels)
    part = survey(open_images("folder", tmp_path, in_chans=2))
    assert any("channel 0 (counted from 0) is constant" in line for line in part.lines)
    assert part.content["pixels"]["lowest"] == [3.0, 0.0]
    assert part.content["pixels"]["highest"] == [3.0, 63.0]


def test_a_problem_that_files_share_is_told_once(tmp_path):
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.ones((8, 8, 2), np.complex64))
    np.save(tmp_path / "4.npy", np.random.default_rng(0).random((8, 8, 2), np.float32))
    (tmp_path / "5.npy").write_bytes(b"no array")
    images = FolderImages(tmp_path, in_chans=2)
    images.pixel_format = PixelFormat(2, "float32")
    part = survey(images)
    for kind in ("unreadable", "not_decoded"):
        assert len(part.content[kind]) == 5
        (line,) = [line for line in part.lines if line.startswith(kind.replace("_", " "))]
        assert line.count(".npy") == 2
        assert "0.npy" in line
        assert "(and 3 more like it), " in line
        assert "5.npy" in line


def test_copies_are_those_with_the_same_bytes(tmp_path):
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            write_photo(tmp_path / split / name / "0.jpg", seed=ord(name) + len(split))
    shutil.copy(tmp_path / "train" / "a" / "0.jpg", tmp_path / "val" / "b" / "9.jpg")
    opened = {split: open_images("folder", tmp_path, split, labelled=True) for split in ("train", "val")}
    part = survey_copies(opened)
    assert part.content["copies"] == {"val in train": [f"{opened['val'].path(2)} = {opened['train'].path(0)}"]}
    assert part.content["copies_with_other_class"] == 1
    del opened["train"]
    assert survey_copies(opened).lines == ["no two images have the same bytes"]
