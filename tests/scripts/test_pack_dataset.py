import json
import pickle
import re
import shutil
import tarfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from scripts import pack_dataset
from tests.test_main_pretrain import assert_same_state, run
from util.data import packed
from util.data.datasets import open_images
from util.data.images import FolderImages, ImageError


def pack(*arguments):
    pack_dataset.main([*map(str, arguments), "--workers", "1"])


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of about 3 kB, so that the photos need several."""
    monkeypatch.setattr(pack_dataset, "plan_shards", lambda sizes, _, plan=pack_dataset.plan_shards: plan(sizes, 3000))


def test_packed_images_are_the_folder_s_in_its_order(photos, tmp_path, small_shards, capsys):
    pack(photos, tmp_path / "packed")
    folder, ours = FolderImages(photos), open_images("folder", tmp_path / "packed", labelled=True)
    assert len(ours.content["shards"]) > 2 and ours.classes == folder.classes and len(ours) == len(folder)
    for i in range(len(folder)):
        (img, label), (other, same) = folder.load(i), ours.load(i)
        assert np.array_equal(img, other) and label == same and ours.read(i) == folder.read(i)
    assert "24 images, 2 classes, 0.00 GB in" in capsys.readouterr().out
    assert sorted(p.suffix for p in (tmp_path / "packed" / "train").iterdir() if p.suffix != ".bin") == [
        ".json",
        ".npy",
    ]
    pack(photos, tmp_path / "packed")
    assert "packed already" in capsys.readouterr().out
    pack(photos, tmp_path / "packed", "--verify")
    assert "24 images of 2 classes are what was packed" in capsys.readouterr().out


def test_training_on_packed_data_is_training_on_the_folder(photos, tmp_path, small_shards):
    """And it resumes in mid-epoch, with other workers."""
    pack(photos, tmp_path / "packed")
    expected = run(photos, tmp_path / "folder")
    run(tmp_path / "packed", tmp_path / "run", "--max_steps", 4, "--num_workers", 2)
    assert_same_state(run(tmp_path / "packed", tmp_path / "run", "--num_workers", 1), expected)


def test_packing_goes_on_where_it_was_stopped(photos, tmp_path, small_shards, monkeypatch):
    written, exact = [], pack_dataset.pack_shard

    class Inline:  # a pool in this process
        def __init__(self, _, initializer, initargs):
            initializer(*initargs)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def submit(self, function, *args):
            future = Future()
            try:
                future.set_result(function(*args))
            except ImageError as error:
                future.set_exception(error)
            return future

        def shutdown(self, **_):
            pass

    def stop_at_third(*args):
        if len(written) == 2:
            raise ImageError("stopped")
        written.append(args[2])
        return exact(*args)

    monkeypatch.setattr(pack_dataset, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(pack_dataset, "pack_shard", stop_at_third)
    with pytest.raises(SystemExit):
        pack(photos, tmp_path / "packed")
    first = list(written)
    assert len(first) == 2 and all(path.exists() for path in first)
    message = "holds shards without prmim-index.json: pack_dataset.py has not finished; run it again"
    with pytest.raises(ValueError, match=message):
        open_images("folder", tmp_path / "packed")
    monkeypatch.setattr(pack_dataset, "pack_shard", lambda *args: written.append(args[2]) or exact(*args))
    (tmp_path / "packed" / "train" / ".shard-00009.bin.tmp-dead").touch()  # of a killed process
    damaged(first[1], "short")
    pack(photos, tmp_path / "packed")
    assert first[0] not in written[2:] and first[1] in written[2:]
    assert len(open_images("folder", tmp_path / "packed")) == 24 and not [*(tmp_path / "packed").rglob("*.tmp-*")]


def test_re_encoding_keeps_sizes(photos, tmp_path, capsys):
    pack(photos, tmp_path / "packed", "--quality", "90")
    folder, ours = FolderImages(photos), open_images("folder", tmp_path / "packed")
    for i in range(len(folder)):
        img, other = folder.load(i)[0].astype(float), ours.load(i)[0].astype(float)
        assert img.shape == other.shape and 0 < np.abs(img - other).mean() < 6
    with pytest.raises(SystemExit):
        pack(photos, tmp_path / "packed")
    error = capsys.readouterr().err
    assert "--quality was 90, now None. Choose another DESTINATION" in error and "the files were others" not in error


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "short":
        del data[-5:]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("shard-00001.bin", "short", r"shard-00001\.bin' has \d+ bytes; \d+ bytes were indexed"),
        ("shard-00001.bin", "gone", r"shard-00001\.bin' is missing"),
        ("prmim-index.npy", "flip", r"prmim-index\.npy is not what it describes"),
        ("prmim-index.json", "short", r"prmim-index\.json' is no index of packed images"),
    ],
)
def test_damage_is_named_when_the_data_is_opened(photos, tmp_path, small_shards, name, how, message):
    pack(photos, tmp_path / "packed")
    path = tmp_path / "packed" / "train" / name
    path.unlink() if how == "gone" else damaged(path, how)
    with pytest.raises(ValueError, match=message):
        open_images("folder", tmp_path / "packed")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("shard-00001.bin", "short"),
        ("shard-00001.bin", "gone"),
        ("prmim-index.npy", "flip"),
        ("prmim-index.npy", "gone"),
        ("prmim-index.json", "short"),
        ("prmim-index.json", "odd"),
    ],
)
def test_the_same_command_repairs_damage(photos, tmp_path, small_shards, capsys, name, how):
    pack(photos, tmp_path / "packed")
    folder = tmp_path / "packed" / "train"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    if how == "gone":
        (folder / name).unlink()
    elif how == "odd":
        (folder / name).write_text('{"num_images": 24}')
    else:
        damaged(folder / name, how)
    pack(photos, tmp_path / "packed")
    assert "packing again" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    pack(photos, tmp_path / "packed")
    assert "packed already" in capsys.readouterr().out


def test_damaged_data_of_another_source_is_not_packed_over(photos, tmp_path, small_shards, capsys):
    pack(photos, tmp_path / "packed")
    shard = tmp_path / "packed" / "train" / "shard-00001.bin"
    damaged(shard, "short")
    before = shard.read_bytes()
    shutil.copytree(photos, tmp_path / "other")
    (tmp_path / "other" / "train" / "cat" / "3.jpg").unlink()
    with pytest.raises(SystemExit):
        pack(tmp_path / "other", tmp_path / "packed")
    assert "the files were others (24 images then, 23 now)" in capsys.readouterr().err
    assert shard.read_bytes() == before


def test_a_damaged_record_of_a_shard_is_packed_again(photos, tmp_path):
    stamp, shard = ["x", None], tmp_path / "shard-00000.bin"
    shard.write_bytes(b"12345")
    for text, expected in (('{"stamp": ["x", null], "size": 5}', True), ('{"stamp": ["x", nu', False), ("[]", False)):
        shard.with_suffix(".json").write_text(text)
        assert pack_dataset.is_packed(shard, stamp) is expected


def test_splits_by_other_names_are_packed_and_hidden_files_are_not(photos, tmp_path, capsys):
    root = tmp_path / "photos"
    shutil.copytree(photos / "train", root / "Training")
    shutil.copytree(photos / "train", root / "validation")
    (root / "Training" / "cat" / "._0.jpg").write_bytes(b"hidden")
    shutil.copytree(root / "Training" / "cat", root / "Training" / ".ipynb_checkpoints")
    pack(root, tmp_path / "packed")
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == ["train", "val"]
    assert "ignored: 2 hidden paths (.ipynb_checkpoints, cat/._0.jpg)" in capsys.readouterr().out
    for split in ("train", "val"):
        images = open_images("folder", tmp_path / "packed", split, labelled=True)
        assert len(images) == 24 and images.classes == ["cat", "dog"] and images.notes == []
    shutil.rmtree(tmp_path / "packed" / "val")
    images = open_images("folder", tmp_path / "packed", "val")
    assert len(images) == 24 and images.notes == ["train/ stands in for val, which is not there"]


def test_sources_that_cannot_be_packed(photos, tmp_path, capsys):
    pack(photos, tmp_path / "packed")
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "train.tar", "w") as tar:
        tar.add(photos / "train", "train")
    (tmp_path / "photos.zip").write_bytes(b"PK")
    flat = shutil.copytree(photos / "train" / "cat", tmp_path / "flat")
    for source, destination, message in (
        (tmp_path / "nowhere", "out", "error: SOURCE '.*nowhere' is not a folder"),
        (tmp_path / "packed", "out", "SOURCE '.*packed' is packed already: give the folder that it was packed from"),
        (tmp_path / "tars", "out", "SOURCE '.*tars' holds tars, which need no packing"),
        (tmp_path / "photos.zip", "out", "SOURCE '.*photos.zip' is a compressed archive"),
        (flat, flat, "would lie among the images of '.*flat': choose another DESTINATION"),
        (flat, flat / "packed", "would lie among the images of '.*flat': choose another DESTINATION"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            pack(source, tmp_path / destination)
        assert stop.value.code == 2 and re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists() and not (flat / "packed").exists()


def test_verify_finds_one_flipped_bit_and_another_source(photos, tmp_path, small_shards, capsys):
    pack(photos, tmp_path / "packed")
    damaged(tmp_path / "packed" / "train" / "shard-00002.bin", "flip")
    with pytest.raises(SystemExit):
        pack(photos, tmp_path / "packed", "--verify")
    error = capsys.readouterr().err
    assert "is not what was packed" in error and "shard-00002.bin: its SHA-256 is not the recorded one" in error
    assert "Remove the shards that are damaged" in error
    (tmp_path / "packed" / "train" / "shard-00002.bin").unlink()
    pack(photos, tmp_path / "packed")
    pack(photos, tmp_path / "packed", "--verify")
    capsys.readouterr()
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    next((other / "train" / "cat").iterdir()).unlink()
    with pytest.raises(SystemExit):
        pack(other, tmp_path / "packed", "--verify")
    assert "its images are not the source's" in capsys.readouterr().err


def test_a_broken_file_stops_the_packing_and_what_is_packed_stays(photos, tmp_path, small_shards, monkeypatch, capsys):
    """Broken after the folder was opened, which looks at headers, too."""
    shutil.copytree(photos, tmp_path / "photos")
    broken = Path(FolderImages(tmp_path / "photos").path(20))
    monkeypatch.setattr(FolderImages, "check", lambda self: None)
    broken.write_bytes(b"hello")
    with pytest.raises(SystemExit):
        pack(tmp_path / "photos", tmp_path / "packed")
    assert f"{str(broken)!r} is not a readable image" in capsys.readouterr().err
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "packed" / "train").glob("*.bin")}
    broken.unlink()
    pack(tmp_path / "photos", tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 23
    assert shards and sum(path.stat().st_mtime_ns == time for path, time in shards.items()) >= len(shards) - 2


def test_verify_compares_names_and_labels_and_does_without_the_source(photos, tmp_path, capsys):
    shutil.copytree(photos, tmp_path / "photos")
    pack(tmp_path / "photos", tmp_path / "packed")
    pack("--verify", tmp_path / "packed")
    assert "24 images of 2 classes are what was packed" in capsys.readouterr().out
    first = Path(FolderImages(tmp_path / "photos").path(0))
    first.rename(first.with_name("renamed.jpg"))
    with pytest.raises(SystemExit):
        pack(tmp_path / "photos", tmp_path / "packed", "--verify")
    assert "its names and labels are not the source's" in capsys.readouterr().err


def test_a_copy_for_another_process_reads_the_index_by_itself(photos, tmp_path, small_shards):
    pack(photos, tmp_path / "packed")
    images = open_images("folder", tmp_path / "packed")
    images.reference, expected = True, images.read(7)
    data = pickle.dumps(images)
    other = pickle.loads(data)
    assert len(data) < 1000 and other.reference
    assert other.read(7) == expected and other.labels.tolist() == images.labels.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["shards"][0].update(name="../secret.jpg"), "'../secret.jpg' is no plain file name"),
        (lambda c: c["shards"][0].update(size=10), "record 0 lies outside its shard or the classes"),
        (lambda c: c.update(shards=[1]), "TypeError"),
        (lambda c: c.update(classes=["cat"]), "lies outside its shard or the classes"),
        (lambda c: c.pop("index_sha256"), "KeyError"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(photos, tmp_path, change, message):
    pack(photos, tmp_path / "packed")
    path = tmp_path / "packed" / "train" / packed.INDEX
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        open_images("folder", tmp_path / "packed")


def test_shards_are_cut_by_size_and_hold_whole_images():
    sizes = np.array([40, 70, 10, 200, 5, 5])
    assert pack_dataset.plan_shards(sizes, 100) == [(0, 2), (2, 4), (4, 6)]
    for shard_bytes in (1, 50, 100, 10_000):
        shards = pack_dataset.plan_shards(sizes, shard_bytes)
        assert [i for first, end in shards for i in range(first, end)] == list(range(6))
        assert all(end > first for first, end in shards)
    assert pack_dataset.plan_shards(sizes, 10_000) == [(0, 6)]


def test_many_shards_need_few_descriptors(photos, tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(packed, "_OPEN_SHARDS", 2)
    pack(photos, tmp_path / "packed")
    images = open_images("folder", tmp_path / "packed")
    for i in (0, 23, 5, 17, 0):
        assert images.load(i)[0].shape[2] == 3
        assert len(images._files) <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard_mb", "0"], "must be at least 1, got 0"),
        (["--quality", "101"], "--quality must be from 1 to 100, got 101"),
        (["--verify"], "is no index of packed images"),
        (["third"], "give SOURCE and DESTINATION"),
    ],
)
def test_errors(photos, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        pack(photos, tmp_path / "packed", *flags)
    assert message in capsys.readouterr().err


def test_the_record_of_an_image_is_small_and_typed():
    rows = packed.records([(0, 1, 2, 3, 4, b"a/b.jpg"), (1, 0, 5, 6, 7, b"c.jpg")])
    assert rows["name"].tolist() == [b"a/b.jpg", b"c.jpg"] and rows["offset"].dtype == np.int64 and rows.itemsize == 35
    assert json.dumps(rows["label"].tolist()) == "[1, 0]"
