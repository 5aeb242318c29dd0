"""Images of Hugging Face `datasets`: the crops are those of the folder that the rows come from."""

import argparse
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from tests import runs
from tests.patches import StandIn
from tests.two_processes import run_in_two_processes
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.folders import MissingSplit
from util.data.images import FolderImages, ImageError
from util.data.loader import Loader
from util.data.open import open_everywhere, open_images
from util.data.transforms import RandomResizedCropFlip

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
hugging_face = pytest.importorskip("util.data.hugging_face")
COMMIT = "0123456789" * 4
ENCODED = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """An empty cache, no network, no progress bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def dataset_of(columns, **features):
    """A data set of columns. Features that are not given are those of ENCODED, or inferred."""
    dataset = datasets.Dataset.from_dict(columns)
    for name, kind in (ENCODED | features).items():
        if name in columns and kind is not None:
            dataset = dataset.cast_column(name, kind)
    return dataset


def save(columns, path, **features):
    """Saves a data set without splits. Returns its folder."""
    dataset_of(columns, **features).save_to_disk(path)
    return path


def photo_columns(folder):
    """The columns of a data set with the files of a folder."""
    images = FolderImages(folder)
    files = []
    for i, name in enumerate(images.names):
        files.append({"bytes": images.read(i), "path": os.fsdecode(bytes(name))})
    return {"image": files, "label": images.labels.tolist()}


def png(seed):
    file = io.BytesIO()
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)
    Picture.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def png_columns(number=4):
    files = [{"bytes": png(i), "path": f"{i}.png"} for i in range(number)]
    return {"image": files, "label": [i % 2 for i in range(number)]}


@pytest.fixture(scope="module")
def stored(photos, tmp_path_factory):
    """The photos in each form: {name: path}."""
    root = tmp_path_factory.mktemp("stored")
    forms = {name: root / name for name in ("hub", "flat", "arrow", "saved", "saved_splits")}
    for folder in (forms["hub"] / "data", forms["flat"], forms["arrow"]):
        folder.mkdir(parents=True)
    dataset = dataset_of(photo_columns(photos / "train"))
    for part in range(2):
        rows = dataset.shard(2, part, contiguous=True)
        rows.to_parquet(forms["hub"] / "data" / f"train-0000{part}-of-00002.parquet")
        rows.to_parquet(forms["flat"] / f"train-{part}.parquet")
        rows.save_to_disk(root / f"part{part}")
        shutil.copy(root / f"part{part}" / "data-00000-of-00001.arrow", forms["arrow"] / f"train-{part}.arrow")
    rows.to_parquet(forms["hub"] / "data" / "validation-00000-of-00001.parquet")
    dataset.save_to_disk(forms["saved"], num_shards=2)
    datasets.DatasetDict(train=dataset, validation=dataset).save_to_disk(forms["saved_splits"])
    return forms


def batches_of(images, num_workers=0):
    counts = TokenCounts.from_ratios(64, 0.75, 0.5)
    dataset = AddressedDataset(images, RandomResizedCropFlip((32, 32), 3, (0.2, 1.0)))
    sampler = StepBatchSampler(len(images), 6, 1, 0, 1, 3)
    collate = MaskCollator(TokenOrderSampler(8, counts), 3)
    return list(Loader(dataset, sampler.batches(range(6)), collate, num_workers=num_workers, for_gpu=False))


@pytest.mark.parametrize("form", ["hub", "flat", "arrow", "saved", "saved_splits"])
def test_the_batches_of_the_folder_bit_for_bit(stored, photos, form):
    folder = open_images("folder", photos)
    images = open_images("hf", stored[form])
    assert images.classes == folder.classes
    assert images.notes == []
    assert np.array_equal(images.labels, folder.labels)
    assert images.names.tolist() == [os.path.basename(name) for name in folder.names.tolist()]
    expected = batches_of(folder)
    assert len(expected) == 6
    for num_workers in (0, 2):
        for ours, theirs in zip(batches_of(images, num_workers), expected, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(ours[2], theirs[2])


def test_rows_are_mapped(stored):
    held = pa.total_allocated_bytes()
    images = open_images("hf", stored["saved"])
    encoded = [images.read(i) for i in range(len(images))]
    num_bytes = sum(map(len, encoded))
    assert pa.total_allocated_bytes() - held < num_bytes / 5


# ------------------------------------------------------------------------------------------ files of their own, damage


def in_files(folder):
    """A data set that holds the paths of a folder's images alone."""
    images = FolderImages(folder)
    paths = [{"bytes": None, "path": images.path(i)} for i in range(len(images))]
    columns = {"image": paths, "label": images.labels.tolist()}
    return hugging_face.HuggingFaceImages(dataset_of(columns), "links")


def test_images_in_files_of_their_own(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "moved")
    images = in_files(photos / "train")
    moved = in_files(tmp_path / "moved")
    folder = FolderImages(photos / "train")
    for i in range(24):
        assert images.read(i) == folder.read(i)
    assert moved.fingerprint() == images.fingerprint()
    (tmp_path / "moved" / "cat" / "0.jpg").unlink()
    with pytest.raises(ImageError, match=r"cat/0\.jpg' is not a readable image"):
        moved.read(0)


def test_bad_rows_are_named_and_replaced(tmp_path):
    columns = png_columns(8)
    columns["image"][2] = None
    columns["image"][5]["bytes"] = b"no image"
    path = save(columns, tmp_path / "data")
    with pytest.raises(ImageError, match="2 of 8 .*row 2 of "):
        open_images("hf", path, max_bad_fraction=0.1)
    images = open_images("hf", path, max_bad_fraction=0.5)
    with pytest.raises(ImageError, match="row 5 of"):
        images.load(5)
    dataset = AddressedDataset(images, RandomResizedCropFlip((8, 8), 0, (0.2, 1.0)), replace=True)
    for i in range(8):
        dataset[0, i]
    assert dataset.bad.tolist() == [0, 0, 1, 0, 0, 1, 0, 0]


# -------------------------------------------------------------------------------------------------------------- columns


def test_the_column_of_images(tmp_path):
    columns = png_columns()
    one = open_images("hf", save(columns, tmp_path / "one"))
    flipped = columns["image"][::-1]
    two = save(columns | {"depth": flipped}, tmp_path / "two", depth=datasets.Image())
    depth = open_images("hf", two, image_column="depth")
    for i in range(4):
        assert depth.read(i) == one.read(3 - i)
    assert open_images("hf", two, image_column="image").fingerprint() == one.fingerprint()
    raw = save({"png": [png(i) for i in range(4)]}, tmp_path / "raw")
    assert open_images("hf", raw, image_column="png").read(3) == png(3)
    for path, column in ((two, None), (two, "x"), (raw, None)):  # ambiguous, missing, none
        with pytest.raises(ValueError, match="--image_column"):
            open_images("hf", path, image_column=column)
    with pytest.raises(ValueError, match="--image_column"):
        open_images("folder", tmp_path, image_column="png")


VALUE = datasets.Value
NAMES = datasets.ClassLabel(names=["a", "b", "c"])


@pytest.mark.parametrize(
    ("column", "values", "kind", "given", "classes", "labels"),
    [
        ("label", [2, 0, 2, 1], NAMES, None, ["a", "b", "c"], [2, 0, 2, 1]),
        ("breed", [2, 0, 2, 1], NAMES, None, ["a", "b", "c"], [2, 0, 2, 1]),
        ("label", [10, 9, 10, 100], VALUE("int32"), None, ["9", "10", "100"], [1, 0, 1, 2]),
        ("wnid", ["n2", "n1", "n1", "n2"], VALUE("string"), "wnid", ["n1", "n2"], [1, 0, 0, 1]),
        ("label", [True, False, True, True], VALUE("bool"), None, ["False", "True"], [1, 0, 1, 1]),
    ],
)
def test_labels(tmp_path, column, values, kind, given, classes, labels):
    columns = {"image": png_columns()["image"], "other": [1.0] * 4, column: values}
    dataset = dataset_of(columns, **{column: kind})
    datasets.DatasetDict(validation=dataset).save_to_disk(tmp_path / "data")
    images = open_images("hf", tmp_path / "data", "val", labelled=True, label_column=given)
    assert images.classes == classes
    assert images.labels.tolist() == labels
    assert images.labels.dtype == np.int64
    assert images.load(3)[1] == labels[3]


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        ({}, None),
        ({"fine": NAMES, "coarse": NAMES}, None),
        ({"label": VALUE("float32")}, None),
        ({"label": NAMES}, "y"),
    ],
)
def test_labels_that_are_missing_or_ambiguous(tmp_path, columns, given):
    """Pre-training needs none."""
    rows = {"image": png_columns()["image"]}
    for name in columns:
        rows[name] = [1, 0, 2, 1]
    datasets.DatasetDict(train=dataset_of(rows, **columns)).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match="label"):
        open_images("hf", tmp_path / "data", labelled=True, label_column=given)
    if given is None:
        images = open_images("hf", tmp_path / "data")
        assert images.classes == []
        assert images.labels.tolist() == [0] * 4


def test_rows_without_a_class(tmp_path):
    for i, labels in enumerate(([0, 1, -1, 1], [0, 1, None, 1])):
        rows = dataset_of({"image": png_columns()["image"], "label": labels}, label=NAMES)
        datasets.DatasetDict(train=rows).save_to_disk(tmp_path / str(i))
        with pytest.raises(ValueError, match="no class in column 'label', the first in row 2"):
            open_images("hf", tmp_path / str(i), labelled=True)
        assert open_images("hf", tmp_path / str(i)).labels.tolist() == [0, 1, -1, 1]


# --------------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("names", "split", "labelled", "expected"),
    [
        (["train", "validation", "test"], "val", True, "validation"),
        (["train", "test"], "val", True, "test"),
        (["train"], "val", False, "train"),
        (["unlabeled"], "train", False, "unlabeled"),
        ([""], "train", False, ""),
        (["val", "validation"], "val", True, ValueError),
        (["a", "b"], "train", False, MissingSplit),
        (["train"], "val", True, MissingSplit),
        ([""], "train", True, MissingSplit),
    ],
)
def test_the_split_that_is_read(names, split, labelled, expected):
    if isinstance(expected, type):
        with pytest.raises(expected, match="data has") as error:
            hugging_face.choose_rows(names, split, labelled, "data")
        assert error.type is expected
        return
    name, notes = hugging_face.choose_rows(names, split, labelled, "data")
    assert name == expected
    assert bool(notes) == (expected not in ("", "validation"))


# ---------------------------------------------------------------------------------------------------- opening the data


def test_a_network_that_fails_is_no_error_of_the_user():
    """The Hub cannot be reached here."""
    with pytest.raises(ConnectionError):
        open_images("hf", "owner/name")


@pytest.fixture
def hub(stored, monkeypatch):
    """A Hub whose only data set is that of the photos, at COMMIT. Returns the list of what was asked for."""
    asked = []
    build = datasets.load_dataset_builder

    def load_dataset_builder(name, config=None, revision=None):
        if Path(name).is_dir():
            return build(name, config)
        asked.append((name, config, revision))
        if name != "owner/photos":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset {name!r} doesn't exist on the Hub")
        builder = build(str(stored["hub"]))
        builder.hash = COMMIT
        return builder

    monkeypatch.setattr(hugging_face, "datasets", StandIn(datasets, load_dataset_builder=load_dataset_builder))
    return asked


def test_data_sets_of_the_hub(hub, stored):
    images = open_images("hf", "owner/photos")
    assert images.fingerprint() == open_images("hf", stored["saved"]).fingerprint()
    assert images.pinned_path == f"owner/photos@{COMMIT}"
    assert images.root == f"owner/photos@{COMMIT}, split train"
    images = open_images("hf", f"owner/photos:plain@{COMMIT}", "val", labelled=True)
    assert images.pinned_path == f"owner/photos:plain@{COMMIT}"
    assert len(images) == 12
    assert hub == [("owner/photos", None, None), ("owner/photos", "plain", COMMIT)]


@pytest.mark.parametrize("path", [f"owner/photos@{COMMIT[::-1]}", "owner/photo"])
def test_data_sets_that_the_hub_lacks(hub, path):
    with pytest.raises(ValueError, match="--data_path"):
        open_images("hf", path)


def open_on_both_ranks(rank, root):
    """Opens a data set that neither rank has in its cache. Returns (number of images, whether this rank converted)."""
    datasets.config.HF_DATASETS_CACHE = Path(root) / "cache"
    prepare = datasets.DatasetBuilder._download_and_prepare
    converted = []

    def counted(*args, **kwargs):
        converted.append(True)
        return prepare(*args, **kwargs)

    datasets.DatasetBuilder._download_and_prepare = counted
    args = argparse.Namespace(
        dataset="hf",
        data_path=str(Path(root) / "data"),
        loader="fast",
        in_chans=3,
        image_column=None,
        label_column=None,
    )
    return len(open_everywhere(args, "train")), bool(converted)


def test_rank_0_converts_and_the_others_read_its_cache(stored, tmp_path):
    shutil.copytree(stored["flat"], tmp_path / "data")
    assert run_in_two_processes(open_on_both_ranks, tmp_path) == [(24, True), (24, False)]


# ----------------------------------------------------------------------------------------------------------------- runs


HF = ("--dataset", "hf")
pretrain = runs.pretrain.also("--picture_every 0")


def assert_same_weights(ours, theirs):
    assert ours["meta"]["step"] == theirs["meta"]["step"]
    for name, value in theirs["model"].items():
        assert torch.equal(ours["model"][name], value)


def test_pre_training_resumes_and_equals_that_on_the_folder(photos, stored, hub, tmp_path, capsys):
    expected = pretrain(photos, tmp_path / "folder")
    parts = tmp_path / "parts"
    pretrain("owner/photos", parts, *HF, "--max_steps", 2)
    settings = json.loads((parts / "settings.json").read_text())
    assert settings["data_path"] == f"owner/photos@{COMMIT}"
    pretrain(stored["saved_splits"], parts, *HF, "--max_steps", 4)
    assert_same_weights(pretrain(stored["flat"], parts, *HF), expected)

    columns = photo_columns(photos / "train")
    columns["image"].reverse()
    other = save(columns, tmp_path / "other")
    message = pretrain.refused(capsys, other, parts, *HF, "--max_steps", 5)
    assert f"--data_path was {stored['flat']} and now is {other}" in message
