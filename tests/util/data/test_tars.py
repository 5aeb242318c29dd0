"""Tars that are read in place: which tars a split has, labels, damage, and the index."""

import errno
import io
import os
import shutil
import tarfile
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_photo
from util.data import images as images_module
from util.data import tars
from util.data.folders import MissingSplit, find_files
from util.data.open import open_images
from util.data.tars import INDEX, LocalTars, TarImages, open_tars, read_index, scan_tars, write_index


def photo(seed):
    path = io.BytesIO()
    path.name = "a.jpg"
    write_photo(path, size=(20, 24), seed=seed)
    return path.getvalue()


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def add(tar, name, data=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def write(path, members):
    """Writes a tar of members (name, data)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            add(tar, name, data)
    return path


def write_images(path, *names):
    """Writes a tar of images of these names, without labels."""
    return write(path, [(name, photo(k)) for k, name in enumerate(names)])


def webdataset(path, labels, first=0):
    """Writes a shard of images with labels."""
    members = []
    for i, label in enumerate(labels, start=first):
        members.append((f"{i:04d}.cls", str(label).encode()))
        members.append((f"{i:04d}.jpg", photo(i)))
        members.append((f"{i:04d}.json", b"{}"))
    return write(path, members)


def names_of(images):
    return [name.decode() for name in images.names.tolist()]


# ------------------------------------------------------------------------------------------------------------- splits


def test_webdataset_shards(tmp_path):
    webdataset(tmp_path / "imagenet-train-0000.tar", [2, 0])
    webdataset(tmp_path / "imagenet-train-0001.tar", [1], first=2)
    webdataset(tmp_path / "imagenet-validation-00.tar", [2, 2], first=3)  # one class is enough to evaluate
    (tmp_path / "imagenet-train-0002.tar.gz").write_bytes(b"no tar")
    images = open_images("folder", tmp_path, "train", labelled=True)
    assert images.classes == ["0", "1", "2"]
    assert images.labels.tolist() == [2, 0, 1]
    for i in range(3):
        assert images.read(i) == photo(i)
    img, label = images.load(2)
    assert np.array_equal(img, pixels(photo(2)))
    assert label == 1
    assert images.path(2).endswith("imagenet-train-0001.tar: 0002.jpg")
    assert len(open_images("folder", tmp_path, "val", labelled=True)) == 2


@pytest.mark.parametrize(
    ("present", "split", "labelled", "chosen", "is_noted"),
    [
        ("a-train-0 a-val-0 b-train-1", "train", True, "a-train-0 b-train-1", False),
        ("a-train-0 a-val-0 b-train-1", "val", True, "a-val-0", False),
        ("a-Training-0 b-test-0 train_val", "train", True, "a-Training-0", False),
        ("a-Training-0 b-test-0 train_val", "val", True, "b-test-0", True),
        ("shard interval-0000", "train", False, "interval-0000 shard", False),
        ("shard interval-0000", "val", False, "interval-0000 shard", False),
        ("train/0 val/0 val/1", "val", True, "val/0 val/1", False),
        ("Train/0 testing/0", "val", True, "testing/0", True),
        ("val/0 x-val", "val", True, "val/0", False),  # a folder comes first
    ],
)
def test_the_tars_of_a_split(tmp_path, present, split, labelled, chosen, is_noted):
    for name in present.split():
        webdataset(tmp_path / f"{name}.tar", [0, 1])
    files = find_files(tmp_path, split, labelled)
    assert files.tars == [tmp_path / f"{name}.tar" for name in chosen.split()]
    assert len(files.notes) == is_noted


@pytest.mark.parametrize(
    ("present", "split", "labelled"),
    [("shard", "train", True), ("train", "val", True), ("b-test train_val", "train", False)],
)
def test_tars_without_the_split(tmp_path, present, split, labelled):
    for name in present.split():
        webdataset(tmp_path / f"{name}.tar", [0, 1])
    with pytest.raises(MissingSplit, match=split):
        find_files(tmp_path, split, labelled)


def test_one_tar_may_be_the_data_path(tmp_path):
    path = webdataset(tmp_path / "b-test-0.tar", [0, 1])
    assert len(open_images("folder", path)) == 2
    assert len(open_images("folder", path, "val", labelled=True)) == 2
    with pytest.raises(MissingSplit):  # whatever it was trained on is not evaluated on
        open_images("folder", path, labelled=True)


def test_tars_do_not_displace_files(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "flat")
    webdataset(tmp_path / "flat" / "backup.tar", [0])
    shutil.copytree(photos / "train", tmp_path / "both" / "val")
    webdataset(tmp_path / "both" / "ILSVRC2012_img_val.tar", [0])
    assert open_images("folder", tmp_path / "flat").classes == ["cat", "dog"]
    assert open_images("folder", tmp_path / "both", "val", labelled=True).classes == ["cat", "dog"]


@pytest.mark.parametrize("names", ["s/train/a/1 s/validation/a/2", "./train/1 ./val/2", "Train/a/1 test/a/2"])
def test_splits_inside_a_tar_are_not_mixed(tmp_path, names):
    path = write_images(tmp_path / "set.tar", *(f"{name}.jpg" for name in names.split()))
    with pytest.raises(ValueError, match="test/|train/"):
        open_images("folder", path)


# ------------------------------------------------------------------------------------------------------------- labels


def test_images_without_labels_pre_train_and_do_not_fine_tune(tmp_path):
    members = [("cat/1.jpg", photo(0)), ("cat/1.json", b"0"), ("dog/2.JPEG", photo(1)), ("dog/2.json", b"1")]
    path = write(tmp_path / "train" / "0.tar", members)
    images = open_images("folder", tmp_path)
    assert images.classes == []
    assert images.labels.tolist() == [0, 0]
    assert names_of(images) == ["cat/1.jpg", "dog/2.JPEG"]
    with pytest.raises(ValueError, match="labels"):
        open_tars([path], labelled=True)


def test_one_class_is_refused_where_labels_are_needed(tmp_path):
    webdataset(tmp_path / "train-0.tar", [3, 3])
    webdataset(tmp_path / "val-0.tar", [3, 3])
    with pytest.raises(ValueError, match="'3'"):
        open_images("folder", tmp_path, labelled=True)
    assert len(open_images("folder", tmp_path, "val", labelled=True)) == 2  # a part of a larger set


CLS = ("1.cls", b"1")


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([("1.cls", b"cat"), ("1.jpg", b"")], "1.cls"),
        ([("1.cls", b"1000000"), ("1.jpg", b"")], "1.cls"),  # a class for each number would fill the memory
        ([CLS, ("1.jpg", b""), ("2.jpg", b"")], "2.jpg"),
        ([CLS, ("1.jpg", b""), ("1.mask.png", b"")], "1.mask.png"),
        ([("notes.txt", b"hello")], "no image"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, members, named):
    path = write(tmp_path / "train.tar", members)
    with pytest.raises(ValueError, match=named):
        scan_tars([path])


def test_tars_with_and_without_labels_are_not_mixed(tmp_path):
    labelled = webdataset(tmp_path / "0.tar", [0, 1])
    bare = write_images(tmp_path / "1.tar", "5.jpg")
    with pytest.raises(ValueError, match="5.jpg"):
        scan_tars([labelled, bare])


@pytest.mark.parametrize("name", ["1.image.jpg", "cat/1.jpg", "v1.0/1.jpg"])
def test_the_image_of_a_sample(tmp_path, name):
    key = name.removesuffix(".jpg").removesuffix(".image")
    path = write(tmp_path / "train.tar", [(name, photo(1)), (f"{key}.cls", b"4")])
    images = open_tars([path])
    assert names_of(images) == [name]
    assert images.labels.tolist() == [4]
    assert len(images.classes) == 5


# ------------------------------------------------------------------------------------------------- members and damage


def test_links_and_hidden_members_are_left_out_and_nothing_is_written(tmp_path):
    path = tmp_path / "data" / "train.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        add(tar, "./good/1.jpg", photo(1))
        add(tar, "../../escape.jpg", photo(2))
        add(tar, "/etc/absolute.jpg", photo(3))
        add(tar, "good/link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "good/hard.jpg", type=tarfile.LNKTYPE, linkname="good/1.jpg")
        add(tar, "good/device.jpg", type=tarfile.CHRTYPE)
        for name in (".a.jpg", ".git/c.jpg", "__MACOSX/cat/1.jpg", "cat/@eaDir/1.jpg", ".x.cls"):
            add(tar, name, b"x")
    for _ in range(2):  # the second time by the index
        images = open_images("folder", path.parent)
        assert names_of(images) == ["good/1.jpg", "/etc/absolute.jpg"]
    assert os.listdir(tmp_path) == ["data"]
    assert sorted(os.listdir(path.parent)) == [".prmim", "train.tar"]


def test_a_sparse_file_is_named(tmp_path):
    """Its bytes lie in the tar without the holes."""
    path = tmp_path / "train.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "1.npy", b"x", pax_headers={"GNU.sparse.map": "9,1", "GNU.sparse.size": "10"})
    with pytest.raises(ValueError, match=r"1\.npy"):
        scan_tars([path])


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole[:3000],
        lambda whole: b"\x1f\x8b" + whole[2:],
        lambda whole: b"",
        lambda whole: whole + whole,
    ],
)
def test_damage_is_named(tmp_path, change):
    path = webdataset(tmp_path / "train.tar", [0, 1, 2])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="train.tar"):
        scan_tars([path])


def test_a_tar_cut_short_after_it_was_indexed_is_named(tmp_path):
    path = webdataset(tmp_path / "train.tar", [0, 1])
    images = open_tars([path])
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="0001.jpg"):
        images.load(1)


def test_a_stale_handle_is_replaced_before_the_next_try(tmp_path, monkeypatch):
    """NFS: every read by the open file fails (ESTALE) until the file is opened again. Then all handles are good."""
    images = open_tars([webdataset(tmp_path / "train.tar", [0, 1])])
    assert images.read(0) == photo(0)
    stale = images.storage._open("train.tar")
    pread = os.pread
    slept = []

    def faulty(descriptor, size, offset):
        if descriptor == stale.fileno():
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(descriptor, size, offset)

    monkeypatch.replace_in(tars, "os.pread", faulty)
    monkeypatch.replace_in(images_module, "time.sleep", slept.append)
    assert images.read(1) == photo(1)
    assert slept == [0.1]
    assert images.storage._open("train.tar") is not stale
    assert not stale.closed  # another thread may read it
    monkeypatch.replace_in(tars, "os.pread", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):  # for good
        images.read(0)


# -------------------------------------------------------------------------------------------------------------- index


def count_indexing(capsys):
    return capsys.readouterr().out.count("indexing 1 tar in")


def test_the_index_is_made_once_and_again_when_a_tar_has_changed(tmp_path, capsys):
    path = webdataset(tmp_path / "train-0.tar", [0, 1])
    for expected in (1, 0, 0):
        open_images("folder", tmp_path)
        assert count_indexing(capsys) == expected
    webdataset(path, [0, 1, 2])
    assert len(open_images("folder", tmp_path)) == 3
    assert count_indexing(capsys) == 1


def test_the_index_of_a_read_only_folder_is_in_the_cache(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    webdataset(tmp_path / "data" / "train-0.tar", [0, 1])
    (tmp_path / "data" / ".prmim").write_text("in the way, as a read-only folder would be")
    for expected in (1, 0):
        assert len(open_images("folder", tmp_path / "data")) == 2
        assert count_indexing(capsys) == expected


def index_of(path):
    open_tars([path])
    (index,) = (path.parent / ".prmim").iterdir()
    return index


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole[:-3],
        lambda whole: b"",
        lambda whole: b"[]",
        lambda whole: whole[:-1] + b"?",
        lambda whole: whole.replace(b"0001.jpg", b"0009.jpg"),
    ],
)
def test_a_broken_index_is_made_again(tmp_path, capsys, change):
    path = webdataset(tmp_path / "train.tar", [0, 1])
    index = index_of(path)
    whole = index.read_bytes()
    index.write_bytes(change(whole))
    with pytest.raises(ValueError, match="index"):
        read_index(index)
    capsys.readouterr()
    open_tars([path])
    assert count_indexing(capsys) == 1
    assert index.read_bytes() == whole


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    path = webdataset(tmp_path / "data" / "train.tar", [0, 1])
    shutil.copy(path, tmp_path / "secret.tar")
    rows, content = read_index(index_of(path))
    tar = content["tars"][0] | {"name": "../secret.tar"}
    write_index(path.parent / INDEX, rows, content | {"tars": [tar]})
    with pytest.raises(ValueError, match="read as a whole"):
        open_images("folder", path.parent)
    with pytest.raises(OSError, match="data/secret.tar"):
        TarImages(read_index(path.parent / INDEX), LocalTars(path.parent)).read(0)
