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
from util.data.datasets import open_images
from util.data.tar_scan import scan_tars
from util.data.tars import Choice, TarImages, find_tars, write_index
from util.data.tars import open_tars as open_choice


def open_tars(paths, split="train"):
    return open_choice(Choice(paths), split)


def photo(seed):
    path = io.BytesIO()
    path.name = "a.jpg"
    write_photo(path, size=(20, 24), seed=seed)
    return path.getvalue()


def add(tar, name, data=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def write(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for member in members:
            add(tar, *member)
    return path


def webdataset(path, labels, first=0):
    members = []
    for i, label in enumerate(labels, start=first):
        members += [(f"{i:04d}.cls", str(label).encode()), (f"{i:04d}.jpg", photo(i)), (f"{i:04d}.json", b"{}")]
    return write(path, members)


def test_webdataset_shards(tmp_path):
    webdataset(tmp_path / "imagenet-train-0000.tar", [2, 0])
    webdataset(tmp_path / "imagenet-train-0001.tar", [1], first=2)
    webdataset(tmp_path / "imagenet-validation-00.tar", [2, 2], first=3)  # one class is enough to evaluate
    images = open_images("folder", tmp_path, "train", labelled=True)
    assert len(images) == 3 and images.classes == ["0", "1", "2"] and images.labels.tolist() == [2, 0, 1]
    expected = pixels(photo(2))
    assert np.array_equal(images.load(2)[0], expected) and images.load(2)[1] == 1
    assert [images.read(i) == photo(i) for i in range(3)] == [True] * 3  # to the byte
    assert images.path(2).endswith("imagenet-train-0001.tar: 0002.jpg")
    assert len(open_images("folder", tmp_path, "val", labelled=True)) == 2


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_folders_inside_and_wordnet_ids_are_classes(tmp_path):
    write(tmp_path / "a" / "one.tar", [("x/cat/1.jpg", photo(1)), ("x/dog/2.JPEG", photo(2)), ("._3.jpg", b"macOS")])
    images = open_tars([tmp_path / "a" / "one.tar"])
    assert images.classes == ["cat", "dog"] and images.labels.tolist() == [0, 1]
    for name, seed in (("n00000002", 1), ("n00000001", 2)):
        write(tmp_path / "b" / "train" / f"{name}.tar", [(f"{name}_{seed}.JPEG", photo(seed))])
    images = open_images("folder", tmp_path / "b", "train", labelled=True)
    assert images.classes == ["n00000001", "n00000002"] and images.labels.tolist() == [0, 1]
    assert np.array_equal(images.load(0)[0], pixels(photo(2)))


def test_imagenet_s_tar_of_tars(tmp_path):
    names, inner = ("n00000001", "n00000002"), []
    for k, name in enumerate(names):
        path = write(tmp_path / f"{name}.part", [(f"{name}_1.JPEG", photo(k))])
        inner.append((f"{name}.tar", path.read_bytes()))
    outer = write(tmp_path / "data" / "ILSVRC2012_img_train.tar", inner)
    images = open_images("folder", outer, "train")
    assert images.classes == list(names)
    for k in range(2):
        assert np.array_equal(images.load(k)[0], pixels(photo(k)))


def test_unlabelled_images_pre_train_and_do_not_fine_tune(tmp_path):
    write(tmp_path / "train" / "0.tar", [("1.jpg", photo(1))])
    assert open_images("folder", tmp_path).classes == [] and open_images("folder", tmp_path).load(0)[1] == 0
    with pytest.raises(ValueError, match="have no labels"):
        open_images("folder", tmp_path, labelled=True)


def test_the_index_is_made_once_and_again_when_a_tar_has_changed(tmp_path, capsys, monkeypatch):
    path = webdataset(tmp_path / "train-0.tar", [0, 1])
    for expected in (1, 0, 0):
        open_images("folder", tmp_path)
        assert capsys.readouterr().out.count(f"indexing 1 tar in {tmp_path}, once\n") == expected
    webdataset(path, [0, 1, 2])
    assert len(open_images("folder", tmp_path)) == 3 and "indexing" in capsys.readouterr().out
    (tmp_path / ".prmim").rename(tmp_path / "gone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / ".prmim").write_text("in the way, as a read-only folder would be")
    for expected in (1, 0):
        assert len(open_images("folder", tmp_path)) == 3
        assert capsys.readouterr().out.count("indexing") == expected


@pytest.mark.fault("F34", "a tar with ../, absolute names, links, devices", "left out and counted; nothing is written")
def test_hostile_names_links_and_devices_are_left_out_and_nothing_is_written(tmp_path):
    path = tmp_path / "data" / "train.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        add(tar, "good/1.jpg", photo(1))
        add(tar, "../../escape.jpg", photo(2))
        add(tar, "/etc/absolute.jpg", photo(3))
        add(tar, "good/link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "good/hard.jpg", type=tarfile.LNKTYPE, linkname="good/1.jpg")
        add(tar, "good/device.jpg", type=tarfile.CHRTYPE)
    images = open_images("folder", path.parent)
    assert len(images) == 1 and images.path(0).endswith("good/1.jpg")
    note = "ignored: 5 members of the tars: links, devices, sparse files, or names that lead out of the tar"
    assert images.notes == [note] == open_images("folder", path.parent).notes  # of the index that is there by now
    assert sorted(os.listdir(tmp_path)) == ["data"] and sorted(os.listdir(path.parent)) == [".prmim", "train.tar"]


def test_damage_is_named(tmp_path):
    path = webdataset(tmp_path / "train.tar", [0, 1, 2])
    whole = path.read_bytes()
    for damaged, message in (
        (whole[:3000], "does not lie inside it|no end mark"),
        (b"\x1f\x8b" + whole[2:], "cannot be read as a tar"),
        (b"", "it is empty"),
        (whole + whole, "or more behind it"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            scan_tars([path])
    write(path, [("1.cls", b"cat"), ("1.jpg", photo(1))])
    with pytest.raises(ValueError, match=r"in '.*': '1\.cls' holds 'cat', which is not .*: write 0, 1, \.\.\. into"):
        scan_tars([path])
    write(path, [("1.cls", b"3"), ("1.jpg", photo(1)), ("2.jpg", photo(2))])
    with pytest.raises(ValueError, match="not labelled alike"):
        scan_tars([path])
    write(path, [("notes.txt", b"hello")])
    with pytest.raises(ValueError, match=r"no image is in '.*train\.tar'; extensions \.jpg"):
        scan_tars([path])


@pytest.mark.fault(
    "U77", "fine-tune on images of one class, or on tars with labels in .json", "refused, says where labels are"
)
@pytest.mark.parametrize("folder", ["data/", ""])
def test_labels_that_are_not_read_are_named(tmp_path, folder):
    for split in ("train", "val"):
        members = [
            (f"{folder}{i}.{kind}", data) for i in range(3) for kind, data in (("jpg", photo(i)), ("json", b"0"))
        ]
        write(tmp_path / f"{split}-0.tar", members)
        with pytest.raises(ValueError, match=r"labels come from \.cls or from folders, not from \.json beside"):
            open_images("folder", tmp_path, split, labelled=True)
    assert len(open_images("folder", tmp_path)) == 3  # without labels
    members = [(f"{name}/{i}.{kind}", photo(i)) for name in ("a", "b") for i in range(2) for kind in ("txt", "jpg")]
    path = write(tmp_path / "folders" / "train-0.tar", [*members, ("readme.csv", b"")])
    images = open_images("folder", path.parent, labelled=True)
    assert images.notes == [
        "note: the classes are a, b; labels come from .cls or from folders, not from .txt beside the images"
    ]


@pytest.mark.fault(
    "U77", "fine-tune on images of one class, or on tars with labels in .json", "refused, says where labels are"
)
def test_one_class_is_refused_where_labels_are_needed(tmp_path, photos):
    for split in ("train", "val"):
        shutil.copytree(photos / "train" / "cat", tmp_path / "one" / split / "cat")
        webdataset(tmp_path / "same" / f"{split}-0.tar", [3, 3])
        with pytest.raises(
            ValueError, match="all 12 images of .* have the class 'cat', but a classifier needs two or more$"
        ):
            open_images("folder", tmp_path / "one", split, labelled=True)
    with pytest.raises(ValueError, match="all 2 images of .* have the class '3', but a classifier needs two or more$"):
        open_images("folder", tmp_path / "same", labelled=True)
    assert len(open_images("folder", tmp_path / "same", "val", labelled=True)) == 2  # a part of a larger set


def test_numbers_that_no_image_has_are_named(tmp_path):
    webdataset(tmp_path / "train-0.tar", [0, 4])
    webdataset(tmp_path / "train-1.tar", [2, 4], first=2)
    images = open_images("folder", tmp_path, labelled=True)
    note = (
        "note: the largest number in the .cls of train-0.tar, ... is 4, so there are 5 classes; 2 have no image: 1, 3"
    )
    assert images.notes == [note] and len(images.classes) == 5


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.image.jpg"], ["1.image.jpg"]),
        (["1.image.jpg", "1.jpg"], ["1.jpg"]),
        (["1.image.jpg", "1.mask.png", "2.jpg"], ["2.jpg"]),
    ],
)
def test_the_image_of_a_sample(tmp_path, names, expected):
    members = [(name, photo(1)) for name in names] + [(f"{key}.cls", b"1") for key in {name[0] for name in names}]
    images = open_tars([write(tmp_path / "train.tar", members)])
    assert names_of(images) == expected and images.labels.tolist() == [1]
    ignored = "ignored: 2 members of the tars: images of samples with more than one, none of them named like x.jpg"
    assert (ignored in images.notes) == (len(names) == 3)


def test_a_tar_cut_short_after_it_was_indexed_is_named(tmp_path):
    path = webdataset(tmp_path / "train.tar", [0, 1])
    images = open_tars([path])
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="was cut short: it ends before .*0001.jpg"):
        images.load(1)


def test_splits_by_folder_and_by_name(tmp_path):
    for name in ("a-train-0.tar", "a-val-0.tar", "b-train-1.tar"):
        webdataset(tmp_path / name, [0])
    assert [p.name for p in find_tars(tmp_path, "train")] == ["a-train-0.tar", "b-train-1.tar"]
    assert [p.name for p in find_tars(tmp_path, "val", labelled=True)] == ["a-val-0.tar"]
    one = webdataset(tmp_path / "other" / "shard.tar", [0])
    assert find_tars(one.parent, "train") == find_tars(one.parent, "val") == [one] == find_tars(one, "train")
    with pytest.raises(ValueError, match="labelled images of val are needed"):  # not those that it was trained on
        open_images("folder", one.parent, "val", labelled=True)


def test_a_number_wins_over_a_folder_and_masks_are_no_images(tmp_path):
    members = [("cat/1.jpg", photo(1)), ("cat/1.cls", b"4"), ("cat/1.mask.png", photo(2))]
    images = open_tars([write(tmp_path / "train.tar", members)])
    assert images.labels.tolist() == [4] and len(images.classes) == 5
    write(tmp_path / "train.tar", [("1.jpg", photo(1)), ("1.cls", b"99999999")])
    with pytest.raises(ValueError, match="not the number of a class"):
        scan_tars([tmp_path / "train.tar"])


def test_classes_are_the_folders_below_what_all_have_in_common(tmp_path):
    names = ("cat/x/1", "cat/y/2", "dog/x/3")
    write(tmp_path / "a.tar", [(f"data/{name}.jpg", photo(k)) for k, name in enumerate(names)])
    images = open_tars([tmp_path / "a.tar"])
    assert images.classes == ["cat", "dog"] and images.labels.tolist() == [0, 0, 1]


def test_splits_inside_a_tar(tmp_path):
    names = ("s/train/cat/1.jpg", "s/train/dog/2.jpg", "s/val/cat/3.jpg", "s/val/dog/4.jpg")
    path = write(tmp_path / "set.tar", [(name, photo(k)) for k, name in enumerate(names)])
    train, val = (open_tars([path], split) for split in ("train", "val"))
    assert [images.read(1) for images in (train, val)] == [photo(1), photo(3)]
    assert train.classes == val.classes == ["cat", "dog"] and len(train) == len(val) == 2


def named(path, *names):
    """A tar of images of these names."""
    return write(path, [(name, photo(k)) for k, name in enumerate(names)])


def names_of(images):
    return [name.decode() for name in images.names.tolist()]


def test_a_class_called_train_is_a_class(tmp_path):
    named(tmp_path / "coco.tar", "bus/0.jpg", "train/1.jpg", "train/2.jpg")
    images = open_tars([tmp_path / "coco.tar"])
    assert images.classes == ["bus", "train"] and images.labels.tolist() == [0, 1, 1]
    assert images.notes == ["train/ in the tar is read as a class, because bus/ lies beside it"]
    with pytest.raises(ValueError, match="labelled images of train are needed, .* are no such folders"):
        open_images("folder", tmp_path / "coco.tar", "train", labelled=True)


@pytest.mark.fault("U30", "fine-tune on one tar without splits", "refused, with the layouts that can be fine-tuned on")
def test_one_tar_without_splits_cannot_be_fine_tuned_on(tmp_path):
    path = named(tmp_path / "photos.tar", "photos/cat/1.jpg", "photos/dog/2.jpg")
    message = r"labelled images of train are needed, .* a tar with train/ and val/ inside, .*train-0\.tar, val-0\.tar"
    for data_path in (path, tmp_path):
        with pytest.raises(ValueError, match=message):
            open_images("folder", data_path, labelled=True)


@pytest.mark.fault("U28", "a tar that holds train/ and validation/", "each split has its own images")
@pytest.mark.parametrize(
    ("members", "split", "expected", "notes"),
    [
        ("s/train/a/1 s/train/b/2 s/validation/a/3", "train", "s/train/a/1 s/train/b/2", 0),
        ("s/train/a/1 s/train/b/2 s/validation/a/3", "val", "s/validation/a/3", 0),
        ("training/a/1 val/a/2", "train", "training/a/1", 0),
        ("Train/a/1 test/a/2", "val", "test/a/2", 1),
        ("train/a/1 val/a/2 test/a/3", "val", "val/a/2", 0),
        ("./train/a/1 ./val/a/2", "train", "train/a/1", 0),
        ("train/a/1 val/a/2 extra/a/3 logo", "train", "train/a/1", 1),  # other entries beside two splits
        ("train/a/1 logo", "train", "train/a/1", 1),  # images beside a split
        ("x/train/1 y/train/2 y/val/3", "train", "x/train/1 y/train/2", 0),  # at any depth, if all say it
        ("train/test/1 train/car/2 val/test/3", "train", "train/test/1 train/car/2", 0),  # a class called test
        ("train/a/1 train/b/2", "train", "train/a/1 train/b/2", 0),
        ("train/a/1 train/b/2", "val", "train/a/1 train/b/2", 1),  # to look at
        ("a/1 b/2", "train", "a/1 b/2", 0),
    ],
)
def test_the_splits_inside_a_tar(tmp_path, members, split, expected, notes):
    path = named(tmp_path / "set.tar", *(f"{name}.jpg" for name in members.split()))
    images = open_tars([path], split)
    assert names_of(images) == [f"{name}.jpg" for name in expected.split()] and len(images.notes) == notes


@pytest.mark.parametrize(
    ("members", "split", "message"),
    [
        ("val/a/1 val/b/2", "train", "inside '.*set.tar' is val/, but no train/: unpack it"),
        ("test/a/1 val/b/2", "train", "is test/ and val/, but no train/"),
        ("train/a/1 Train/b/2 val/b/3", "train", "more than one folder of train in '.*set.tar': Train/ and train/"),
        ("train/a/1 val/b/2 validation/b/3", "val", "more than one folder of val .*: val/ and validation/"),
    ],
)
def test_splits_inside_a_tar_that_are_not_clear(tmp_path, members, split, message):
    path = named(tmp_path / "set.tar", *(f"{name}.jpg" for name in members.split()))
    with pytest.raises(ValueError, match=message):
        open_tars([path], split)


def test_labelled_images_of_one_tar_need_both_splits_inside(tmp_path):
    path = named(tmp_path / "a" / "set.tar", "train/cat/1.jpg", "train/dog/2.jpg", "test/cat/3.jpg", "test/dog/4.jpg")
    for data_path in (path, path.parent):
        train, val = (open_images("folder", data_path, split, labelled=True) for split in ("train", "val"))
        assert names_of(train) == ["train/cat/1.jpg", "train/dog/2.jpg"]
        assert names_of(val) == ["test/cat/3.jpg", "test/dog/4.jpg"] and train.classes == val.classes == ["cat", "dog"]
    only = named(tmp_path / "b" / "set.tar", "train/cat/1.jpg", "train/dog/2.jpg")
    assert len(open_images("folder", only, "train", labelled=True)) == 2
    assert len(open_images("folder", only, "val")) == 2  # whose index says that it is train's
    with pytest.raises(ValueError, match=r"labelled images of val are needed, .* inside '.*set.tar' are only train/\."):
        open_images("folder", only, "val", labelled=True)


def test_names_of_tars_say_the_split(tmp_path):
    for name in ("a-Training-0.tar", "a-valid-0.tar", "b-test-0.tar", "train_val.tar"):
        webdataset(tmp_path / name, [0, 1])
    assert [p.name for p in find_tars(tmp_path, "train", labelled=True)] == ["a-Training-0.tar"]
    assert [p.name for p in find_tars(tmp_path, "val")] == ["a-valid-0.tar"]
    (tmp_path / "a-valid-0.tar").unlink()
    images = open_images("folder", tmp_path, "val", labelled=True)
    assert images.notes == ["b-test-0.tar is read as val, because there is no val"]
    (tmp_path / "a-Training-0.tar").unlink()
    message = r"no tar with train in its name \(names with test: b-test-0.tar; no split: train_val.tar\)"
    with pytest.raises(ValueError, match=message):
        open_images("folder", tmp_path, "train")
    assert len(open_images("folder", tmp_path / "b-test-0.tar", "train")) == 2  # itself


def test_names_of_folders_of_tars_say_the_split(tmp_path):
    for name in ("Train", "testing"):
        webdataset(tmp_path / name / "0.tar", [0, 1])
    assert find_tars(tmp_path, "train", labelled=True) == [tmp_path / "Train" / "0.tar"]
    images = open_images("folder", tmp_path, "val", labelled=True)
    assert len(images) == 2 and images.notes == ["testing/ is read as val, because there is no val"]
    webdataset(tmp_path / "validation" / "0.tar", [0])
    assert find_tars(tmp_path, "val") == [tmp_path / "validation" / "0.tar"]


@pytest.mark.fault("U27", "a tar with a hidden file in it", "the file is ignored, and noted")
def test_hidden_members_are_ignored(tmp_path):
    images = (".a.jpg", "cat/.b.jpg", ".git/c.jpg", "__MACOSX/cat/1.jpg", "cat/@eaDir/1.jpg")
    hidden = (*images, "._n00000001.tar", ".x.cls")
    names = ("./cat/1.jpg", "./dog/2.jpg")
    members = [(name, photo(k)) for k, name in enumerate(names)] + [(name, b"x") for name in hidden]
    path = write(tmp_path / "set.tar", members)
    images = open_tars([path])
    assert names_of(images) == ["cat/1.jpg", "dog/2.jpg"] and images.classes == ["cat", "dog"]
    assert images.notes == ["ignored: 5 members of the tars: hidden names"]
    write(path, [(".a.jpg", b"x")])
    with pytest.raises(ValueError, match="no image is in"):
        open_tars([path])


def test_an_index_of_older_rules_is_made_again(tmp_path, capsys):
    path = named(tmp_path / "set.tar", "train/a/1.jpg", "validation/a/2.jpg")
    open_tars([path])
    (index,) = (tmp_path / ".prmim").iterdir()
    images = TarImages(index, tmp_path)
    rows = {name: np.concatenate([values, values]) for name, values in images.rows.items() if name != "name"}
    rows["name"] = np.concatenate([images.names, images.names])
    stamp = images.content["stamp"] | {"rule": 0}
    write_index(index, rows, images.content | {"stamp": stamp})
    assert len(TarImages(index, tmp_path)) == 2
    capsys.readouterr()
    assert len(open_tars([path])) == 1 and "indexing 1 tar in" in capsys.readouterr().out
    open_tars([path])
    assert capsys.readouterr().out == "" and len([*(tmp_path / ".prmim").iterdir()]) == 1


def test_tars_do_not_displace_files(photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "flat")
    webdataset(tmp_path / "flat" / "backup.tar", [0])
    assert open_images("folder", tmp_path / "flat").classes == ["cat", "dog"]
    shutil.copytree(photos / "train", tmp_path / "both" / "val")
    webdataset(tmp_path / "both" / "ILSVRC2012_img_val.tar", [0])
    assert open_images("folder", tmp_path / "both", "val", labelled=True).classes == ["cat", "dog"]
    only = webdataset(tmp_path / "only" / "interval-0000.tar", [0])  # says no val
    assert find_tars(only.parent, "train") == [only]


def inner_tar(members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for member in members:
            add(tar, *member)
    return data.getvalue()


def blocks(data):
    """Bytes that a member takes, with its header."""
    return 512 + 512 * -(-len(data) // 512)


def test_an_inner_tar_ends_where_it_ends(tmp_path):
    whole = inner_tar([("n1_1.JPEG", photo(1)), ("n1_2.JPEG", photo(2))])
    cut = whole[: blocks(photo(1))]  # at a member's boundary
    for data, message in (
        (cut, "no end mark|does not lie inside"),
        (b"", "it is empty"),
        (whole[:700], "does not lie inside"),
    ):
        path = write(tmp_path / "train.tar", [("n00000001.tar", data), ("n00000002.tar", whole)])
        with pytest.raises(ValueError, match=message):
            scan_tars([path])
    path = write(tmp_path / "train.tar", [("n00000001.tar", inner_tar([("deep.tar", whole), ("1.jpg", photo(1))]))])
    assert len(scan_tars([path])[0]["name"]) == 1  # one level, no more


def test_a_negative_size_ends(tmp_path):
    path = write(tmp_path / "train.tar", [("1.jpg", photo(1)), ("2.jpg", photo(2))])
    data, header = bytearray(path.read_bytes()), blocks(photo(1))
    data[header + 124 : header + 136] = b"\xff" * 12  # -1, in base 256
    checksum = 256 + sum(data[header : header + 148]) + sum(data[header + 156 : header + 512])
    data[header + 148 : header + 156] = b"%06o\0 " % checksum
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as a tar"):
        scan_tars([path])


def test_a_broken_index_is_made_again(tmp_path, capsys):
    path = webdataset(tmp_path / "train.tar", [0, 1])
    open_tars([path])
    (index,) = (tmp_path / ".prmim").iterdir()
    whole = index.read_bytes()
    for damaged in (whole[:-3], whole[:5], b"", b"[]", whole[:-1] + b"?", whole.replace(b"0001.jpg", b"0009.jpg")):
        index.write_bytes(damaged)
        capsys.readouterr()
        assert len(open_tars([path])) == 2 and "indexing" in capsys.readouterr().out
        assert index.read_bytes() == whole


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    path = webdataset(tmp_path / "data" / "train.tar", [0, 1])
    shutil.copy(path, tmp_path / "secret.tar")
    open_tars([path])
    (index,) = (tmp_path / "data" / ".prmim").iterdir()
    images = TarImages(index, tmp_path / "data")
    names = {"tars": [{**images.content["tars"][0], "name": "../secret.tar"}]}
    write_index(index, images.rows | {"name": images.names}, images.content | names)
    with pytest.raises(ValueError, match=r"data/secret\.tar' is missing"):
        TarImages(index, tmp_path / "data")
    assert len(open_tars([path])) == 2


def test_a_stale_handle_is_replaced_before_the_next_try(tmp_path, monkeypatch):
    """NFS: every read by the open file fails (ESTALE) until the file is opened again. Then all handles are good."""
    images = open_tars([webdataset(tmp_path / "train.tar", [0, 1])])
    assert images.read(0) == photo(0)
    stale, pread = images._file(0), os.pread

    def faulty(descriptor, size, offset):
        if not stale.closed and descriptor == stale.fileno():
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(descriptor, size, offset)

    slept = []
    monkeypatch.replace_in(tars, "os.pread", faulty)
    monkeypatch.replace_in(images_module, "time.sleep", slept.append)
    assert images.read(1) == photo(1) and slept == [0.1] and stale.closed
    monkeypatch.replace_in(tars, "os.pread", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):  # for good
        images.read(0)
