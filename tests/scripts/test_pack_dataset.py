"""Packed data is the folder's data, bit for bit; packing can be stopped, repaired and verified."""

import io
import os
import re
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
from util.data import tars
from util.data.images import FolderImages, ImageError
from util.data.open import open_images
from util.data.tars import INDEX


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
        def __init__(self, _, mp_context, initializer, initargs):
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
    before = contents(packed)
    assert {*before} == {INDEX, *(f"shard-{k:06d}.tar" for k in range(len(ours.tars)))}
    pack(photos, packed.parent)
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
    with pytest.raises(ValueError, match="train/"):
        open_images("folder", tmp_path / "packed", labelled=True)


def test_larger_images_are_made_smaller(tmp_path, capsys):
    sizes = {"a": (90, 40), "b": (61, 100), "c": (30, 500), "d": (30, 20)}  # width, height
    (tmp_path / "photos").mkdir()
    for name, (width, height) in sizes.items():
        write_photo(tmp_path / "photos" / f"{name}.png", size=(width, height))
    pack(tmp_path / "photos", tmp_path / "packed", "--quality", "90", "--shorter_side", 30)
    ours = open_images("folder", tmp_path / "packed")
    expected = {"a": (68, 30), "b": (30, 49), "c": (30, 500), "d": (30, 20)}
    source = FolderImages(tmp_path / "photos")
    for i, (width, height) in enumerate(expected.values()):
        resized = Image.fromarray(source.load(i)[0]).resize((width, height), Image.Resampling.LANCZOS)
        resized.save(buffer := io.BytesIO(), "JPEG", quality=90, subsampling="4:2:0")
        assert ours.read(i) == buffer.getvalue()
    assert ours.fingerprint() == source.fingerprint() + "-q90-s30"
    pack(tmp_path / "photos", tmp_path / "packed", "--quality", "90", "--shorter_side", 30)  # is packed already
    problem = refused(capsys, tmp_path / "photos", tmp_path / "packed", "--quality", "90", "--shorter_side", 20)
    assert "shard-000000.tar" in problem
    assert "--shorter_side" in refused(capsys, tmp_path / "photos", tmp_path / "new", "--shorter_side", 20)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere", "out"], "SOURCE"),
        (["tars", "out"], "SOURCE"),
        (["tars"], "DESTINATION"),
    ],
)
def test_errors_of_the_user(photos, tmp_path, capsys, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "train.tar", "w") as tar:
        tar.add(photos / "train", "train")
    assert named in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


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
    with pytest.raises(ValueError, match=INDEX):
        open_images("folder", tmp_path / "packed")
    second.with_name(".shard-000009.tmp-1.tar").touch()  # of a killed process
    damage(second, "short")
    monkeypatch.setattr(pack_dataset, "write_shard", note)
    pack(photos, tmp_path / "packed")
    assert first not in written[2:]
    assert second in written[2:]
    assert_same_images(open_images("folder", tmp_path / "packed"), FolderImages(photos / "train"))
    assert not [*(tmp_path / "packed").rglob(".*")]


def damage(path, how):
    if how == "gone":
        path.unlink()
        return
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("how", ["short", "gone"])
@pytest.mark.parametrize("name", ["shard-000001.tar", INDEX])
def test_damage_is_named_and_the_same_command_repairs_it(photos, packed, name, how):
    whole = contents(packed)
    damage(packed / name, how)
    with pytest.raises(ValueError, match=name):
        open_images("folder", packed.parent)
    pack(photos, packed.parent)
    assert contents(packed) == whole


def test_other_data_are_not_packed_over(photos, packed, tmp_path, capsys):
    before = contents(packed)
    shutil.copytree(photos, tmp_path / "other")
    (tmp_path / "other" / "train" / "cat" / "3.jpg").unlink()
    assert "shard-00000" in refused(capsys, tmp_path / "other", packed.parent)
    assert contents(packed) == before
    shutil.copytree(photos, tmp_path / "moved")  # the same files elsewhere
    (packed / INDEX).unlink()
    pack(tmp_path / "moved", packed.parent)
    assert contents(packed) == before
    webdataset = tmp_path / "out" / "train" / "shard-000000.tar"
    webdataset.parent.mkdir(parents=True)
    with tarfile.open(webdataset, "w") as tar:
        tar.add(photos / "train" / "cat", "cat")
    before = webdataset.read_bytes()
    assert "shard-000000.tar" in refused(capsys, photos, tmp_path / "out")
    assert webdataset.read_bytes() == before


@pytest.mark.parametrize("flags", [(), ("--quality", 90)])
@pytest.mark.parametrize("damage", [lambda data: b"hello", lambda data: data[:-200]])
def test_a_damaged_file_is_copied(photos, tmp_path, flags, damage):
    shutil.copytree(photos, tmp_path / "photos")
    folder = FolderImages(tmp_path / "photos" / "train")
    broken = Path(folder.path(20))
    broken.write_bytes(damage(broken.read_bytes()))
    pack(tmp_path / "photos", tmp_path / "packed", *flags)
    ours = open_images("folder", tmp_path / "packed", max_bad_fraction=0.1)
    assert ours.read(20) == broken.read_bytes()
    for i in set(range(len(folder))) - {20}:
        assert (ours.read(i) == folder.read(i)) == (not flags)
        assert ours.load(i)[0].shape == folder.load(i)[0].shape


def test_files_that_have_changed_are_not_packed_already(tmp_path, capsys):
    """Arrays have the size of their format, whatever is in them."""
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "a.npy", np.zeros((8, 8, 4), np.float32))
    pack(tmp_path / "arrays", tmp_path / "packed", "--in_chans", 4)
    np.save(tmp_path / "arrays" / "a.npy", np.ones((8, 8, 4), np.float32))
    problem = refused(capsys, tmp_path / "arrays", tmp_path / "packed", "--in_chans", 4)
    assert "shard-000000.tar" in problem


# ------------------------------------------------------------------------------------------------- reading the shards


def test_packed_shards_are_read_as_a_whole(packed):
    shard = packed / "shard-000000.tar"
    with pytest.raises(ValueError, match=INDEX):
        open_images("folder", shard)
    shutil.copy(shard, packed / "other.tar")
    with pytest.raises(ValueError, match="other.tar"):
        open_images("folder", packed.parent)


def test_rows_are_mapped_not_copied(packed):
    images = open_images("folder", packed.parent)
    for values in (*images.rows.values(), images.names):
        assert not values.flags.owndata
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(packed / INDEX) in maps.read_text()


def test_many_shards_need_few_descriptors(packed, monkeypatch):
    monkeypatch.setattr(tars, "MAX_OPEN", 2)
    images = open_images("folder", packed.parent)
    for i in (0, 23, 5, 17, 0):
        assert images.load(i)[0].shape[2] == 3
        assert images.storage._open.cache_info().currsize <= 2
