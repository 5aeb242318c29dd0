"""Packed data is the folder's data, bit for bit; packing can be stopped, repaired and verified."""

import io
import json
import os
import re
import shlex
import shutil
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import pack_dataset
from tests import runs
from tests.conftest import write_photo
from tests.runs import assert_same_state, pretrain
from util import atomic
from util.data import tars
from util.data.images import FolderImages, ImageError
from util.data.open import open_images
from util.data.tars import INDEX, MANIFEST


def pack(*arguments):
    pack_dataset.main([*map(str, arguments), "--workers", "1"])


def refused(capsys, *arguments):
    return runs.refused(capsys, pack_dataset.main, *arguments, "--workers", "1")


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of about 3 kB, so that the photos need several."""
    exact = pack_dataset.shard_bounds
    monkeypatch.setattr(pack_dataset, "shard_bounds", lambda sizes, _: exact(sizes, 3000))


@pytest.fixture
def packed(photos, tmp_path, small_shards):
    """The photos in several shards: the folder of train."""
    pack(photos, tmp_path / "packed")
    return tmp_path / "packed" / "train"


@pytest.fixture
def inline(monkeypatch):
    """Workers are this process."""

    class Pool:
        def __init__(self, _, initializer, initargs):
            initializer(*initargs)

        map = staticmethod(map)
        shutdown = staticmethod(lambda **_: None)

    monkeypatch.setattr(pack_dataset, "ignore_in_worker", lambda _: None)
    monkeypatch.setattr(pack_dataset, "ProcessPoolExecutor", Pool)


def assert_same_images(ours, theirs):
    assert ours.classes == theirs.classes
    assert ours.fingerprint() == theirs.fingerprint()
    assert ours.names.tolist() == theirs.names.tolist()
    assert ours.labels.tolist() == theirs.labels.tolist()
    for i in range(len(theirs)):
        assert ours.read(i) == theirs.read(i)
        assert np.array_equal(ours.load(i)[0], theirs.load(i)[0])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -------------------------------------------------------------------------------------------------- what is packed


def test_packed_images_are_the_folder_s_in_its_order(photos, packed):
    ours = open_images("folder", packed.parent, labelled=True)
    assert len(ours.tars) > 2
    assert ours.notes == []
    assert_same_images(ours, FolderImages(photos / "train"))
    assert {*contents(packed)} == {INDEX, *(f"shard-{k:06d}.tar" for k in range(len(ours.tars)))}


def test_packing_again_does_nothing(photos, packed, capsys):
    before = contents(packed)
    pack(photos, packed.parent)
    assert "packed already" in capsys.readouterr().out
    assert contents(packed) == before


def samples_of(path):
    """The samples of a shard by WebDataset's rule: {path up to the first dot of the file name: {extension: bytes}}."""
    samples = defaultdict(dict)
    with tarfile.open(path) as tar:
        for member in tar:
            if re.match("__[^/]*__($|/)", member.name):
                continue
            key, extension = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name).groups()
            assert member.isreg()
            assert extension not in samples[key]
            samples[key][extension] = tar.extractfile(member).read()
    return samples


ODD_NAMES = ["a.b.jpg", "a_b.jpg", "a.c.jpg", "1.png", "1.jpg", "x y/ü.JPEG", "x y/.z/1.jpg", os.fsdecode(b"\xff.jpg")]


@pytest.fixture
def odd(tmp_path):
    """Classes with names that are no keys of WebDataset: dots, one stem twice, bytes that are no UTF-8."""
    for label, folder in enumerate(("v1.cat", "train", "long" * 40)):
        for k, name in enumerate(ODD_NAMES):
            path = tmp_path / "photos" / "train" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            buffer.name = "a.png" if name.endswith("png") else "a.jpg"
            write_photo(buffer, size=(20, 24), seed=10 * label + k)
            path.write_bytes(buffer.getvalue())
    return tmp_path / "photos"


@pytest.mark.parametrize("flags", [(), ("--quality", 90)])
def test_shards_are_webdataset_s_and_keep_odd_names(odd, tmp_path, small_shards, flags):
    pack(odd, tmp_path / "packed", *flags)
    source = FolderImages(odd / "train")
    labels = []
    for path in sorted((tmp_path / "packed" / "train").glob("*.tar")):
        for sample in samples_of(path).values():
            labels.append(int(sample.pop("cls")))
            ((extension, data),) = sample.items()
            assert Image.open(io.BytesIO(data)).format == {"jpg": "JPEG", "png": "PNG"}[extension]
            if flags:
                assert extension == "jpg"
            else:
                assert data == source.read(len(labels) - 1)
    assert len(source) == 21
    assert labels == source.labels.tolist()
    ours = open_images("folder", tmp_path / "packed")
    assert ours.names.tolist() == source.names.tolist()
    assert ours.classes == source.classes
    assert ours.fingerprint() == source.fingerprint() + ("-q90" if flags else "")


def test_images_without_classes(photos, tmp_path):
    cats = photos / "train" / "cat"
    pack(cats, tmp_path / "packed")
    for sample in samples_of(tmp_path / "packed" / "shard-000000.tar").values():
        assert [*sample] == ["jpg"]
    assert_same_images(open_images("folder", tmp_path / "packed"), FolderImages(cats))
    with pytest.raises(ValueError, match="has no train/"):
        open_images("folder", tmp_path / "packed", labelled=True)


def test_the_first_member_of_a_shard_tells_what_is_in_it(photos, packed):
    with tarfile.open(packed / "shard-000001.tar") as tar:
        names = tar.getnames()
        manifest = json.load(tar.extractfile(MANIFEST))
    first = manifest["first"]
    folder = FolderImages(photos / "train")
    assert names[:3] == [MANIFEST, f"cat/{first:09d}.jpg", f"cat/{first:09d}.cls"]
    assert manifest["names"] == [os.fsdecode(name) for name in folder.names[first : first + len(names) // 2].tolist()]
    assert manifest["classes"] == ["cat", "dog"]
    assert manifest["shard"] == 1


def test_re_encoding_keeps_sizes(photos, tmp_path, capsys):
    pack(photos, tmp_path / "packed", "--quality", "90")
    folder = FolderImages(photos / "train")
    ours = open_images("folder", tmp_path / "packed")
    for i in range(len(folder)):
        img = folder.load(i)[0].astype(float)
        other = ours.load(i)[0].astype(float)
        assert img.shape == other.shape
        assert 0 < np.abs(img - other).mean() < 6
    error = refused(capsys, photos, tmp_path / "packed")
    assert "holds shards of other files or settings. It was packed by: python scripts/pack_dataset.py" in error
    assert "--quality 90" in error


def test_training_on_packed_data_is_training_on_the_folder(photos, packed, tmp_path):
    """And it resumes in mid-epoch, with other workers."""
    expected = pretrain(photos, tmp_path / "folder")
    pretrain(packed.parent, tmp_path / "run", "--max_steps", 4)
    assert_same_state(pretrain(packed.parent, tmp_path / "run", "--num_workers", 1), expected)


def test_splits_by_other_names_are_packed(photos, tmp_path, capsys):
    root = tmp_path / "photos"
    for name in ("Training", "validation", "testing"):
        shutil.copytree(photos / "train", root / name)
    shutil.copytree(photos / "train" / "cat", root / "Training" / ".ipynb_checkpoints")
    pack(root, tmp_path / "packed")
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == ["train", "val"]
    assert f"note: {root / 'testing'} is not packed" in capsys.readouterr().out
    for split in ("train", "val"):
        assert_same_images(
            open_images("folder", tmp_path / "packed", split, labelled=True), FolderImages(photos / "train")
        )


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("nowhere", "out", "error: SOURCE '.*nowhere' is not a folder"),
        ("tars", "out", "SOURCE '.*tars' holds tars, which need no packing"),
        ("flat", "flat/packed", "would lie among the images of '.*flat': choose another DESTINATION"),
    ],
)
def test_sources_that_cannot_be_packed(photos, packed, tmp_path, capsys, source, destination, message):
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "train.tar", "w") as tar:
        tar.add(photos / "train", "train")
    shutil.copytree(photos / "train" / "cat", tmp_path / "flat")
    assert re.search(message, refused(capsys, tmp_path / source, tmp_path / destination))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "flat" / "packed").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--verify"], "is not a valid index of tars"),
        (["third"], "give SOURCE and DESTINATION"),
    ],
)
def test_errors(photos, tmp_path, capsys, flags, message):
    assert message in refused(capsys, photos, tmp_path / "packed", *flags)


def test_shards_are_cut_by_size_and_hold_whole_images():
    sizes = np.array([40, 70, 10, 200, 5, 5])
    assert pack_dataset.shard_bounds(sizes, 100) == [(0, 2), (2, 4), (4, 6)]
    assert pack_dataset.shard_bounds(sizes, 10_000) == [(0, 6)]
    for shard_bytes in (1, 50, 100, 10_000):
        images = []
        for first, end in pack_dataset.shard_bounds(sizes, shard_bytes):
            assert end > first
            images += range(first, end)
        assert images == [*range(6)]


# ------------------------------------------------------------------------------------------ stopped, killed, damaged


def test_packing_continues_where_it_was_stopped(photos, tmp_path, small_shards, inline, monkeypatch):
    written = []
    exact = pack_dataset.write_shard

    def stop_at_third(images, path, manifest):
        if len(written) == 2:
            raise ImageError("stopped")
        written.append(path)
        exact(images, path, manifest)

    def note(images, path, manifest):
        written.append(path)
        exact(images, path, manifest)

    monkeypatch.setattr(pack_dataset, "write_shard", stop_at_third)
    with pytest.raises(SystemExit):
        pack(photos, tmp_path / "packed")
    first, second = written
    assert not [*(tmp_path / "packed" / "train").glob("*.tar")]
    with pytest.raises(ValueError, match="unfinished"):
        open_images("folder", tmp_path / "packed")
    second.with_name(".shard-000009.tmp-1.tar").touch()  # of a killed process
    damage(second, "short")
    monkeypatch.setattr(pack_dataset, "write_shard", note)
    pack(photos, tmp_path / "packed")
    assert first not in written[2:]
    assert second in written[2:]
    assert_same_images(open_images("folder", tmp_path / "packed"), FolderImages(photos / "train"))
    assert not [*(tmp_path / "packed").rglob(".*")]


@pytest.mark.parametrize(
    ("killed_at", "message"),
    [
        ("first move", "unfinished"),
        ("index", "unfinished"),
        ("last move", "It was packed by: python scripts/pack_data"),
    ],
)
def test_packing_that_is_killed_at_its_end_reads_as_unfinished_or_damaged(
    photos, tmp_path, small_shards, inline, monkeypatch, killed_at, message
):
    """All shards are whole then, but some are not in their place, or the index is missing."""

    class Killed(BaseException):
        pass

    def replace(source, target):
        is_move = Path(source).parent.name == ".packing" and Path(target).parent.name == "train"
        is_last = len([*Path(source).parent.glob("*.tar")]) == 1
        if killed_at == "index" and Path(target).name == INDEX:
            raise Killed
        if is_move and (killed_at == "first move" or (killed_at == "last move" and is_last)):
            raise Killed
        os.replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        for module in (pack_dataset, atomic):
            patch.replace_in(module, "os.replace", replace)
        pack(photos, tmp_path / "packed")
    with pytest.raises(ValueError, match=message):
        open_images("folder", tmp_path / "packed")
    pack(photos, tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 24


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "short":
        del data[len(data) // 2 :]
    elif how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("shard-000001.tar", "short", r"shard-000001\.tar' has \d+ bytes; \d+ bytes were indexed"),
        ("shard-000001.tar", "gone", r"shard-000001\.tar' is missing; \d+ bytes were indexed"),
        (INDEX, "short", f"{INDEX}' is not a valid index of tars"),
        (INDEX, "gone", f"is a shard of pack_dataset.py, but {INDEX} is not beside it: copy it, too, or pack again"),
    ],
)
def test_damage_is_named_and_the_same_command_repairs_it(photos, packed, name, how, message):
    whole = contents(packed)
    damage(packed / name, how)
    with pytest.raises(ValueError, match=message) as error:
        open_images("folder", packed.parent)
    if "packed by" in str(error.value):
        command = re.search("It was packed by: (.*)", str(error.value))[1]
        assert shlex.split(command)[2:4] == [str(photos), str(packed.parent)]
    pack(photos, packed.parent)
    assert contents(packed) == whole


def test_finished_data_of_another_source_is_not_packed_over(photos, packed, tmp_path, capsys):
    (packed / INDEX).unlink()
    before = contents(packed)
    shutil.copytree(photos, tmp_path / "other")
    (tmp_path / "other" / "train" / "cat" / "3.jpg").unlink()
    assert "holds shards of other files or settings" in refused(capsys, tmp_path / "other", packed.parent)
    assert contents(packed) == before
    shutil.copytree(photos, tmp_path / "moved")  # the same files elsewhere
    pack(tmp_path / "moved", packed.parent)
    assert len(open_images("folder", packed.parent)) == 24


def test_tars_of_others_are_not_packed_over(photos, tmp_path, capsys):
    path = tmp_path / "out" / "train" / "shard-000000.tar"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as tar:
        tar.add(photos / "train" / "cat", "cat")
    before = path.read_bytes()
    assert "shard-000000.tar, which is not a shard of pack_dataset.py" in refused(capsys, photos, tmp_path / "out")
    assert path.read_bytes() == before


def test_a_broken_file_stops_the_packing_and_what_is_packed_stays(
    photos, tmp_path, small_shards, inline, monkeypatch, capsys
):
    """Broken after the folder was opened, which looks at headers, too."""
    shutil.copytree(photos, tmp_path / "photos")
    broken = Path(FolderImages(tmp_path / "photos" / "train").path(20))
    broken.write_bytes(b"hello")
    monkeypatch.setattr(FolderImages, "check", lambda self: None)
    assert f"{str(broken)!r} is not a readable image" in refused(capsys, tmp_path / "photos", tmp_path / "packed")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "packed").rglob("*.tar")}
    broken.unlink()
    pack(tmp_path / "photos", tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 23
    kept = [name for name, time in times.items() if (tmp_path / "packed/train" / name).stat().st_mtime_ns == time]
    assert times
    assert len(kept) >= len(times) - 1


def test_verify_finds_one_flipped_bit(photos, packed, capsys):
    pack("--verify", packed.parent)
    pack(photos, packed.parent, "--verify")
    assert capsys.readouterr().out.count("24 images of 2 classes are what was packed") == 2
    shard = packed / "shard-000002.tar"
    damage(shard, "flip")
    message = refused(capsys, packed.parent, "--verify")
    assert f"damaged: {shlex.quote(str(shard))}: remove them and pack again. It was packed by:" in message
    shard.unlink()
    pack(photos, packed.parent)
    pack(packed.parent, "--verify")


def test_verify_finds_another_source(photos, packed, tmp_path, capsys):
    shutil.copytree(photos, tmp_path / "other")
    image = tmp_path / "other" / "train" / "cat" / "0.jpg"
    image.rename(image.with_name("renamed.jpg"))
    error = refused(capsys, tmp_path / "other", packed.parent, "--verify")
    assert "the names, labels or classes of the images are not those of the source" in error


# ------------------------------------------------------------------------------------------------- reading the shards


def test_packed_shards_are_read_as_a_whole(packed):
    shard = packed / "shard-000000.tar"
    with pytest.raises(ValueError, match="is read as a whole by its .*: give the folder"):
        open_images("folder", shard)
    shutil.copy(shard, packed / "other.tar")
    with pytest.raises(ValueError, match=r"move away tars that are not in it \(other\.tar\)"):
        open_images("folder", packed.parent)


def test_rows_are_mapped_not_copied(packed):
    images = open_images("folder", packed.parent)
    for values in (*images.rows.values(), images.names):
        assert not values.flags.owndata
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(images.index) in maps.read_text()


def test_many_shards_need_few_descriptors(packed, monkeypatch):
    monkeypatch.setattr(tars, "MAX_OPEN", 2)
    images = open_images("folder", packed.parent)
    for i in (0, 23, 5, 17, 0):
        assert images.load(i)[0].shape[2] == 3
        assert len(images.storage._files) <= 2
