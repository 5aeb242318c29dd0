"""What users give as --data_path: other names, splits beside classes, hidden files, links, odd pixels, archives."""

import io
import json
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import main_finetune
from scripts import pack_dataset
from tests.conftest import write_photo
from tests.runs import PLAIN, finetune, pretrain
from util.data.datasets import open_images
from util.data.images import FolderImages

ONE_STEP = ("--max_steps", 1)


def copy(source, *folders):
    """Copies of a folder of classes; -> the folder that holds them."""
    for folder in folders:
        shutil.copytree(source, folder)
    return folders[0].parent


def few_images(folder, classes=("cat", "dog"), number=4, first=500):
    """Some images of each class in a new folder."""
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            write_photo(folder / name / f"{i}.jpg", seed=first + i)
    return folder.parent


def trained_on(data_path, output_dir):
    """The number of images of a pre-training run, and its text log."""
    meta = pretrain(data_path, output_dir, *ONE_STEP)["meta"]
    return meta["num_images"], (Path(output_dir) / "log.txt").read_text()


def write_tar(path, files):
    """A tar of {name: bytes}."""
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def files_below(folder, prefix):
    """{PREFIX/<path below folder>: bytes}"""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {f"{prefix}/{path.relative_to(folder)}": path.read_bytes() for path in files}


@pytest.mark.fault("U20", "pre-train on a folder with training/ and validation/", "training/ alone is read")
@pytest.mark.parametrize(("train", "val"), [("training", "validation"), ("train", "valid"), ("Training", "testing")])
def test_other_names_of_splits(photos, tmp_path, train, val, record_property):
    root = copy(photos / "train", tmp_path / "data" / train)
    few_images(root / val)
    number, _ = trained_on(root, tmp_path / "out")
    assert number == 24
    record_property("measured", f"{train}/: {number} of 32 images")


@pytest.mark.fault("U21", "fine-tune on Train/ and test/", "trained on Train/, evaluated on test/, which is noted")
def test_test_stands_in_for_val(photos, tmp_path, record_property):
    root = copy(photos / "train", tmp_path / "data" / "Train")
    few_images(root / "test")
    main_finetune.main(finetune.command(root, tmp_path / "out", *PLAIN, "--epochs", 1, "--warmup_epochs", 0))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "val_top1" in results["last"]
    assert trained_on(root, tmp_path / "pre")[0] == 24
    images = open_images("folder", root, "val", labelled=True)
    assert len(images) == 8 and images.notes == ["test/ is read as val, because there is no val"]
    assert open_images("folder", root, "train", labelled=True).notes == []
    record_property("measured", "24 images trained on, 8 evaluated on")


@pytest.mark.fault("U21b", "two folders of one split: val/ and validation/, Train/ and train/", "refused by name")
def test_two_folders_of_one_split(photos, tmp_path, capsys):
    root = copy(photos / "train", tmp_path / "data" / "train", tmp_path / "data" / "Train")
    message = pretrain.refused(capsys, root, tmp_path / "out")
    assert "more than one folder of train" in message and "Train/ and train/" in message
    shutil.rmtree(root / "Train")
    few_images(root / "val")
    few_images(root / "validation")
    with pytest.raises(ValueError, match="more than one folder of val .*: val/ and validation/"):
        open_images("folder", root, "val", labelled=True)


@pytest.mark.fault("U22", "pre-train on a folder that holds val/ alone", "refused, with the path to give instead")
@pytest.mark.parametrize("name", ["val", "test"])
def test_only_the_wrong_split(photos, tmp_path, capsys, name):
    root = copy(photos / "train", tmp_path / "data" / name)
    message = pretrain.refused(capsys, root, tmp_path / "out")
    assert f"holds {name}/, but no train/. Give '{root / name}' itself" in message
    assert trained_on(root / name, tmp_path / "out")[0] == 24


@pytest.mark.fault("U22b", "class folders, one called train", "refused: it may be a split; below train/ it is a class")
def test_a_class_called_train(photos, tmp_path, capsys):
    root = few_images(tmp_path / "data" / "bus", ["."])
    copy(photos / "train" / "cat", root / "train")
    message = pretrain.refused(capsys, root, tmp_path / "out")
    assert "train/ may be a split or a class" in message and "(bus/)" in message and str(root / "train") in message
    (tmp_path / "below").mkdir()
    root.rename(tmp_path / "below" / "train")
    assert trained_on(tmp_path / "below", tmp_path / "out")[0] == 16


@pytest.mark.fault("U23", "images directly in a folder beside a folder with images", "refused, with both counts")
def test_flat_images_beside_a_folder(photos, tmp_path, capsys):
    root = tmp_path / "data"
    copy(photos / "train" / "cat", root)
    few_images(root / "best", ["."], number=1)
    message = pretrain.refused(capsys, root, tmp_path / "out")
    assert "holds 12 images directly (0.jpg, 1.jpg, 10.jpg, ...) beside 1 image in folders (best)" in message
    (root / "best" / "0.jpg").unlink()
    (root / "best" / "notes.txt").write_text("no image")
    number, log = trained_on(root, tmp_path / "out")
    assert number == 12 and "ignored: 1 folder without images (best)" in log


@pytest.mark.fault("U24", "hidden files, __MACOSX/, @eaDir/, .ipynb_checkpoints/ in the data", "ignored, and noted")
def test_hidden_files(photos, tmp_path, record_property):
    root = copy(photos / "train", tmp_path / "data" / "train")
    cats = root / "train" / "cat"
    for hidden in (cats / "._0.jpg", root / "train" / "dog" / ".1.jpg"):
        hidden.write_bytes(b"not an image at all")
    for folder in (".ipynb_checkpoints", "__MACOSX", "@eaDir"):
        copy(cats, root / "train" / folder, root / "train" / "dog" / folder)
    number, log = trained_on(root, tmp_path / "out")
    assert number == 24 and "ignored: 8 hidden paths (" in log
    assert open_images("folder", root).classes == ["cat", "dog"]
    record_property("measured", "24 images, 8 hidden paths ignored")


@pytest.mark.fault("U25", "a link in the data that leads back to a parent folder", "not followed, and noted")
def test_a_link_loop(photos, tmp_path, record_property):
    root = copy(photos / "train", tmp_path / "data" / "train")
    (root / "train" / "cat" / "again").symlink_to(root / "train" / "cat")
    (root / "train" / "dog" / "up").symlink_to("../..")
    number, log = trained_on(root, tmp_path / "out")
    assert number == 24 and "ignored: 2 looping links (cat/again, dog/up)" in log
    record_property("measured", f"{number} images of 24")


@pytest.mark.fault(
    "U26", "16-bit grey images; grey float TIFFs, with `--in_chans 3`", "scaled to 8 bits; refused by name"
)
def test_deep_pixels(photos, tmp_path, capsys, record_property):
    root = copy(photos / "train", tmp_path / "data" / "train")
    ramp = np.linspace(0, 65535, 40 * 50).round().astype(np.uint16).reshape(40, 50)
    Image.fromarray(ramp).save(root / "train" / "cat" / "deep.png")
    (read,) = [img for img, _, path in loaded(root) if path.endswith("deep.png")]
    assert np.array_equal(read[..., 0], np.rint(ramp / 257)) and (read == read[..., :1]).all()
    assert trained_on(root, tmp_path / "out")[0] == 25
    Image.fromarray(ramp.astype(np.float32) / 65535).save(root / "train" / "cat" / "float.tif")
    message = pretrain.refused(capsys, root, tmp_path / "float", "--max_bad_fraction", 0)
    assert "float.tif' is not a readable image" in message and "floating-point numbers" in message
    assert "convert it to 8 or 16 bits" in message
    record_property("measured", f"grey values {read.min()} to {read.max()}; refused before the first step")


def loaded(root):
    images = open_images("folder", root)
    return [(*images.load(i), images.path(i)) for i in range(len(images))]


@pytest.mark.fault("U27", "a tar with a hidden file in it", "the file is ignored, and noted")
def test_a_hidden_file_in_a_tar(photos, tmp_path, record_property):
    files = files_below(photos / "train", ".")
    files |= {
        "./cat/.hid.jpg": b"hidden",
        "__MACOSX/cat/0.jpg": b"hidden",
        ".cache/cat/0.jpg": b"hidden",
        "._x.jpg": b"",
    }
    number, log = trained_on(write_tar(tmp_path / "photos.tar", files), tmp_path / "out")
    assert number == 24 and "ignored: 4 members of the tars: hidden names" in log
    assert open_images("folder", tmp_path / "photos.tar").classes == ["cat", "dog"]
    record_property("measured", f"{number} images")


@pytest.mark.fault("U28", "a tar that holds train/ and validation/", "each split has its own images")
@pytest.mark.parametrize(("train", "val"), [("train", "validation"), ("training", "val"), ("Train", "test")])
def test_a_tar_with_two_splits(photos, tmp_path, train, val, record_property):
    few_images(tmp_path / "files" / "val")
    files = files_below(photos / "train", f"set/{train}") | files_below(tmp_path / "files" / "val", f"set/{val}")
    path = write_tar(tmp_path / "set.tar", files)
    assert trained_on(path, tmp_path / "out")[0] == 24
    main_finetune.main(finetune.command(path, tmp_path / "fine", *PLAIN, "--epochs", 1, "--warmup_epochs", 0))
    found = {split: open_images("folder", path, split, labelled=True) for split in ("train", "val")}
    assert {split: len(images) for split, images in found.items()} == {"train": 24, "val": 8}
    assert all(images.classes == ["cat", "dog"] for images in found.values())
    assert all(f"/{val}/" in found["val"].path(i) for i in range(8))
    record_property("measured", f"{train}/ 24 images, {val}/ 8")


@pytest.mark.fault("U29", "a compressed archive as --data_path", "refused, with the command that unpacks it")
@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.xz", ".tar.zst", ".zip"])
def test_a_compressed_archive(tmp_path, capsys, suffix):
    path = tmp_path / "data" / f"photos{suffix}"
    path.parent.mkdir()
    path.write_bytes(b"\x1f\x8b any bytes")
    message = pretrain.refused(capsys, path, tmp_path / "out")
    unpack = "unzip -d FOLDER" if suffix == ".zip" else "tar -C FOLDER -xf"
    assert "compressed archive, which cannot be read in place" in message and f"{unpack} photos{suffix}" in message
    message = pretrain.refused(capsys, path.parent, tmp_path / "out")
    assert f"holds no image but compressed archives (photos{suffix}): unpack them" in message


@pytest.mark.fault("U30", "fine-tune on one tar without splits", "refused, with the layouts that can be fine-tuned on")
def test_fine_tuning_from_one_tar(photos, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    path = write_tar(tmp_path / "data" / "photos.tar", files_below(photos / "train", "photos"))
    for data_path in (path, path.parent):
        message = finetune.refused(capsys, data_path, tmp_path / "out", *PLAIN)
        assert "labelled images of train are needed" in message and "a tar with train/ and val/ inside" in message
        assert "train-0.tar, val-0.tar" in message


@pytest.mark.fault("U31", "pack again after a shard or the index was damaged", "the same command repairs it")
@pytest.mark.parametrize("name", ["shard-000000.tar", "prmim-index.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "empty", "odd"])
def test_damaged_packed_data_is_packed_again(photos, tmp_path, capsys, name, damage, record_property):
    pack_dataset.main([str(photos), str(tmp_path / "packed"), "--workers", "1"])
    path = tmp_path / "packed" / "train" / name
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "odd": b"[]"}[damage])
    capsys.readouterr()
    message = pretrain.refused(capsys, tmp_path / "packed", tmp_path / "out")
    command = re.search("run: python scripts/pack_dataset.py (.*)", message)
    assert name in message and command
    pack_dataset.main(shlex.split(command[1]))
    assert "packing again" in capsys.readouterr().out
    assert path.read_bytes() == whole
    assert trained_on(tmp_path / "packed", tmp_path / "out")[0] == 24
    record_property("measured", f"{name} {damage}: repaired")


@pytest.mark.fault(
    "U32", "train2017/ and val2017/, or train_images/ and val_images/", "refused, with what to do; never mixed"
)
@pytest.mark.parametrize(
    "names", [("train2017", "val2017"), ("training_set", "test_set"), ("train_images", "val_images", "notes")]
)
def test_folders_whose_names_speak_of_splits_are_not_mixed(tmp_path, capsys, names):
    for k, name in enumerate(names):
        (tmp_path / "photos" / name).mkdir(parents=True)
        if name != "notes":
            write_photo(tmp_path / "photos" / name / "0.jpg", seed=k)
    message = pretrain.refused(capsys, tmp_path / "photos", tmp_path / "out")
    first, second = sorted(names[:2])
    assert f"holds {first}/, {second}/, whose names contain more than one split" in message
    (tmp_path / "photos" / "beach").mkdir()  # classes, after all
    write_photo(tmp_path / "photos" / "beach" / "0.jpg")
    assert "notes" in names or len(FolderImages(tmp_path / "photos").classes) == 3
