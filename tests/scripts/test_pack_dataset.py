import io
import json
import os
import pickle
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
from util.data.datasets import open_images
from util.data.images import FolderImages, ImageError
from util.data.tar_scan import MANIFEST
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
def inline(monkeypatch):
    """Workers are this process."""

    class Pool:
        def __init__(self, _, initializer=lambda: None, initargs=()):
            initializer(*initargs)

        map = staticmethod(map)
        shutdown = staticmethod(lambda **_: None)
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    monkeypatch.setattr(pack_dataset, "ignore_in_worker", lambda _: None)
    monkeypatch.setattr(pack_dataset, "ProcessPoolExecutor", Pool)


def assert_same_images(ours, theirs):
    assert ours.classes == theirs.classes and ours.fingerprint() == theirs.fingerprint()
    assert ours.names.tolist() == theirs.names.tolist() and ours.labels.tolist() == theirs.labels.tolist()
    for i in range(len(theirs)):
        assert ours.read(i) == theirs.read(i) and np.array_equal(ours.load(i)[0], theirs.load(i)[0])


def test_packed_images_are_the_folder_s_in_its_order(photos, tmp_path, small_shards, capsys):
    """Through the index, and through a scan of the tars where that is lost."""
    pack(photos, tmp_path / "packed")
    ours, folder = open_images("folder", tmp_path / "packed", labelled=True), tmp_path / "packed" / "train"
    assert len(ours.tars) > 2 and ours.notes == []
    assert_same_images(ours, FolderImages(photos))
    assert "24 images, 2 classes, 0.00 GB in" in capsys.readouterr().out
    assert {p.name for p in folder.iterdir()} == {INDEX, *(f"shard-{k:06d}.tar" for k in range(len(ours.tars)))}
    pack(photos, tmp_path / "packed")
    assert "packed already" in capsys.readouterr().out
    pack(photos, tmp_path / "packed", "--verify")
    assert "24 images of 2 classes are what was packed" in capsys.readouterr().out
    (folder / INDEX).unlink()
    scanned = open_images("folder", tmp_path / "packed", labelled=True)
    assert_same_images(scanned, FolderImages(photos))
    assert scanned.notes == [] and "indexing" in capsys.readouterr().out
    assert all(np.array_equal(scanned.rows[name], ours.rows[name]) for name in ours.rows)
    shutil.rmtree(folder / ".prmim")
    pack(photos, tmp_path / "packed")  # makes the index again
    assert "packed already" not in capsys.readouterr().out and len([*folder.iterdir()]) == len(ours.tars) + 1


def samples_of(path):
    """The samples of a shard by WebDataset's rule: {path up to the first dot of the file name: {extension: bytes}}."""
    samples = defaultdict(dict)
    with tarfile.open(path) as tar:
        for member in tar:
            if re.match("__[^/]*__($|/)", member.name):
                continue
            key, extension = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name).groups()
            assert member.isreg() and extension not in samples[key]
            samples[key][extension] = tar.extractfile(member).read()
    return samples


def odd_names(root):
    """Classes with names that are no keys of WebDataset: dots, one stem twice, bytes that are no UTF-8."""
    names = ["a.b.jpg", "a_b.jpg", "a.c.jpg", "1.png", "1.jpg", "x y/ü.JPEG", "x y/.z/1.jpg", os.fsdecode(b"\xff.jpg")]
    for label, folder in enumerate(("v1.cat", "train", "long" * 40)):
        for k, name in enumerate(names):
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            buffer.name = "a.png" if name.endswith("png") else "a.jpg"
            write_photo(buffer, size=(20, 24), seed=10 * label + k)
            path.write_bytes(buffer.getvalue())
    return root


@pytest.mark.parametrize("flags", [(), ("--quality", 90)])
def test_shards_are_webdataset_s_and_keep_odd_names(tmp_path, small_shards, flags):
    odd_names(tmp_path / "photos" / "train")
    pack(tmp_path / "photos", tmp_path / "packed", *flags)
    source = FolderImages(tmp_path / "photos")
    assert len(source) == 21 and source.notes
    labels, images = [], []
    for path in sorted((tmp_path / "packed" / "train").glob("*.tar")):
        for sample in samples_of(path).values():
            labels.append(int(sample.pop("cls")))
            ((extension, data),) = sample.items()
            assert extension in ("jpg", "png") and (extension == "jpg" or not flags)
            images.append(data)
            assert Image.open(io.BytesIO(data)).format == ("PNG" if extension == "png" else "JPEG")
    assert labels == source.labels.tolist()
    assert flags or images == [source.read(i) for i in range(21)]
    ours = open_images("folder", tmp_path / "packed")
    (tmp_path / "packed" / "train" / INDEX).unlink()
    for found in (ours, open_images("folder", tmp_path / "packed")):
        assert found.names.tolist() == source.names.tolist() and found.classes == source.classes
        assert found.fingerprint() == source.fingerprint() + ("-q90" if flags else "")


def test_shards_with_other_extensions_are_read(photos, tmp_path):
    """JPEGs in older shards may be called .jpeg."""
    pack(photos, tmp_path / "packed")
    path = tmp_path / "packed" / "train" / "shard-000000.tar"
    with tarfile.open(path) as old, tarfile.open(tmp_path / "older.tar", "w", format=tarfile.GNU_FORMAT) as new:
        for member in old:
            data = old.extractfile(member)
            member.name = member.name.replace(".jpg", ".jpeg")
            new.addfile(member, data)
    os.replace(tmp_path / "older.tar", path)
    for with_index in (True, False):
        if not with_index:
            (path.parent / INDEX).unlink()
        assert_same_images(open_images("folder", tmp_path / "packed"), FolderImages(photos))
    pack(photos, tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 24


def test_images_without_classes(photos, tmp_path):
    pack(photos / "train" / "cat", tmp_path / "packed")
    assert all([*sample] == ["jpg"] for sample in samples_of(tmp_path / "packed" / "shard-000000.tar").values())
    ours, theirs = open_images("folder", tmp_path / "packed"), FolderImages(photos / "train" / "cat")
    assert_same_images(ours, theirs)
    (tmp_path / "packed" / INDEX).unlink()
    assert_same_images(open_images("folder", tmp_path / "packed"), theirs)
    with pytest.raises(ValueError, match="labelled images of train are needed"):
        open_images("folder", tmp_path / "packed", labelled=True)


def test_one_shard_may_be_read_alone_and_lost_ones_are_named(photos, tmp_path, small_shards):
    pack(photos, tmp_path / "packed")
    folder = tmp_path / "packed" / "train"
    first, *others = sorted(folder.glob("*.tar"))
    count = len(others) + 1
    images = open_images("folder", first)
    assert images.classes == ["cat", "dog"] and images.notes == [f"1 of {count} packed shards are read"]
    others[1].rename(tmp_path / "lost.tar")
    with pytest.raises(ValueError, match=r"shard-000002\.tar' is missing; \d+ bytes were indexed\. To repair it, run"):
        open_images("folder", tmp_path / "packed")
    shutil.copy(first, folder / "other.tar")
    (tmp_path / "lost.tar").rename(others[1])
    with pytest.raises(ValueError, match=rf"tars that are not in its {INDEX}: other\.tar\. Move them away"):
        open_images("folder", tmp_path / "packed")


def test_training_on_packed_data_is_training_on_the_folder(photos, tmp_path, small_shards):
    """And it resumes in mid-epoch, with other workers."""
    pack(photos, tmp_path / "packed")
    expected = pretrain(photos, tmp_path / "folder")
    pretrain(tmp_path / "packed", tmp_path / "run", "--max_steps", 4)
    assert_same_state(pretrain(tmp_path / "packed", tmp_path / "run", "--num_workers", 1), expected)


def test_packing_continues_where_it_was_stopped(photos, tmp_path, small_shards, inline, monkeypatch):
    written, exact = [], pack_dataset.write_shard

    def stop_at_third(images, path, manifest):
        if len(written) == 2:
            raise ImageError("stopped")
        written.append(path)
        exact(images, path, manifest)

    monkeypatch.setattr(pack_dataset, "write_shard", stop_at_third)
    with pytest.raises(SystemExit):
        pack(photos, tmp_path / "packed")
    first, second = written
    assert first.exists() and second.exists() and not [*(tmp_path / "packed" / "train").glob("*.tar")]
    for labelled in (False, True):
        message = "holds no image but unfinished shards: run the same pack_dataset.py command again"
        with pytest.raises(ValueError, match=message):
            open_images("folder", tmp_path / "packed", labelled=labelled)
    monkeypatch.setattr(pack_dataset, "write_shard", lambda *args: written.append(args[1]) or exact(*args))
    second.with_name(".shard-000009.tmp-1.tar").touch()  # of a killed process
    damage(second, "short")
    pack(photos, tmp_path / "packed")
    assert first not in written[2:] and second in written[2:]
    assert len(open_images("folder", tmp_path / "packed")) == 24 and not [*(tmp_path / "packed").rglob(".*")]


@pytest.mark.parametrize("killed_at", ["first move", "index", "last move"])
def test_packing_that_is_killed_at_its_end_reads_as_unfinished_or_damaged(
    photos, tmp_path, small_shards, inline, monkeypatch, killed_at
):
    """All shards are whole then, but some are not in their place, or the index is missing."""

    class Killed(BaseException):
        pass

    def replace(source, target):
        moving = Path(source).parent.name == ".packing" and Path(target).parent.name == "train"
        index = Path(target).name == INDEX
        if (killed_at == "index" and index) or (moving and killed_at == "first move"):
            raise Killed
        if moving and killed_at == "last move" and len([*Path(source).parent.glob("*.tar")]) == 1:
            raise Killed
        os.replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        for module in (pack_dataset, atomic):
            patch.replace_in(module, "os.replace", replace)
        pack(photos, tmp_path / "packed")
    with pytest.raises(ValueError, match="To repair it, run" if killed_at == "last move" else "unfinished shards"):
        open_images("folder", tmp_path / "packed")
    pack(photos, tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 24


def test_re_encoding_keeps_sizes(photos, tmp_path, capsys):
    pack(photos, tmp_path / "packed", "--quality", "90")
    folder, ours = FolderImages(photos), open_images("folder", tmp_path / "packed")
    for i in range(len(folder)):
        img, other = folder.load(i)[0].astype(float), ours.load(i)[0].astype(float)
        assert img.shape == other.shape and 0 < np.abs(img - other).mean() < 6
    error = refused(capsys, photos, tmp_path / "packed")
    assert "holds other data: it was packed by: python scripts/pack_dataset.py" in error and "--quality 90" in error


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "short":
        del data[len(data) // 2 :]
    elif how == "gone":
        return path.unlink()
    elif how in ("", "[]"):
        data = how.encode()
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return None


@pytest.mark.fault("U31", "pack again after a shard or the index was damaged", "the same command repairs it")
@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        *(("shard-000001.tar", text, rf"shard-000001\.tar' has {len(text)} bytes; \d+ bytes") for text in ("", "[]")),
        *((INDEX, text, rf"{INDEX}' is not a valid index of tars") for text in ("", "[]")),
        ("shard-000001.tar", "short", r"shard-000001\.tar' has \d+ bytes; \d+ bytes were indexed"),
        ("shard-000001.tar", "gone", r"shard-000001\.tar' is missing; \d+ bytes were indexed"),
        (INDEX, "flip", rf"{INDEX}' is not a valid index of tars"),
        (INDEX, "short", rf"{INDEX}' is not a valid index of tars"),
    ],
)
def test_damage_is_named_with_the_command_that_repairs_it(photos, tmp_path, small_shards, capsys, name, how, message):
    pack(photos, tmp_path / "packed")
    folder = tmp_path / "packed" / "train"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / name, how)
    with pytest.raises(ValueError, match=message) as error:
        open_images("folder", tmp_path / "packed")
    command = re.search("To repair it, run: python scripts/pack_dataset.py (.*)", str(error.value))[1]
    pack(*shlex.split(command))
    assert "packing again" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    pack(photos, tmp_path / "packed")
    assert "packed already" in capsys.readouterr().out


@pytest.mark.fault("U77b", "a damaged shard in a folder that was moved", "the command names the new folder")
@pytest.mark.parametrize("split", [".", "train"])
def test_the_command_that_repairs_names_the_folder_as_it_is_now(photos, tmp_path, small_shards, capsys, split):
    """split ".": class folders, packed into a folder that may itself be called train."""
    old, new = tmp_path / "old" / "train", tmp_path / "new" / "train"
    pack(*((photos / "train", old) if split == "." else (photos, old.parent)))
    shard = new / "shard-000001.tar"
    (tmp_path / "old").rename(tmp_path / "new")
    shard.write_bytes(bytes(shard.stat().st_size))
    verified = re.search(r"run: rm .+ && (.*)", refused(capsys, new if split == "." else new.parent, "--verify"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match="is missing") as error:
        open_images("folder", new)
    command = re.search("To repair it, run: (.*)", str(error.value))[1]
    assert command == verified and str(tmp_path / "old") not in command
    pack(*shlex.split(command)[2:])
    assert len(open_images("folder", new)) == 24


def test_a_cut_shard_without_its_index_is_named_with_the_command(photos, tmp_path, small_shards):
    pack(photos, tmp_path / "packed")
    folder = tmp_path / "packed" / "train"
    (folder / INDEX).unlink()
    damage(folder / "shard-000001.tar", "short")
    with pytest.raises(ValueError, match=r"shard-000001\.tar' cannot be read .* run: python scripts/pack_dataset\.py"):
        open_images("folder", tmp_path / "packed")
    pack(photos, tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 24


@pytest.mark.parametrize("what", ["shard", "index", "nothing"])
def test_finished_data_of_another_source_is_not_packed_over(photos, tmp_path, small_shards, capsys, what):
    pack(photos, tmp_path / "packed")
    folder = tmp_path / "packed" / "train"
    if what == "shard":
        damage(folder / "shard-000001.tar", "short")
    if what == "index":
        (folder / INDEX).unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.copytree(photos, tmp_path / "other")
    (tmp_path / "other" / "train" / "cat" / "3.jpg").unlink()
    assert "holds other data: the files were others" in refused(capsys, tmp_path / "other", tmp_path / "packed")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    shutil.copytree(photos, tmp_path / "moved")  # the same files elsewhere
    pack(tmp_path / "moved", tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 24


def test_tars_of_others_are_not_packed_over(photos, tmp_path, capsys):
    path = tmp_path / "out" / "train" / "shard-000000.tar"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as tar:
        tar.add(photos / "train" / "cat", "cat")
    before = path.read_bytes()
    assert "shard-000000.tar is not a shard of pack_dataset.py" in refused(capsys, photos, tmp_path / "out")
    assert path.read_bytes() == before


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
    assert len(images) == 24 and images.notes == ["train/ is read as val, because there is no val"]


def test_sources_that_cannot_be_packed(photos, tmp_path, capsys):
    pack(photos, tmp_path / "packed")
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "train.tar", "w") as tar:
        tar.add(photos / "train", "train")
    (tmp_path / "photos.zip").write_bytes(b"PK")
    flat = shutil.copytree(photos / "train" / "cat", tmp_path / "flat")
    for source, destination, message in (
        (tmp_path / "nowhere", "out", "error: SOURCE '.*nowhere' is not a folder"),
        (tmp_path / "packed", "out", "SOURCE '.*packed' holds tars, which need no packing"),
        (tmp_path / "tars", "out", "SOURCE '.*tars' holds tars, which need no packing"),
        (tmp_path / "photos.zip", "out", "SOURCE '.*photos.zip' is a compressed archive"),
        (flat, flat, "would lie among the images of '.*flat': choose another DESTINATION"),
        (flat, flat / "packed", "would lie among the images of '.*flat': choose another DESTINATION"),
    ):
        assert re.search(message, refused(capsys, source, tmp_path / destination))
    assert not (tmp_path / "out").exists() and not (flat / "packed").exists()


def test_verify_finds_one_flipped_bit_and_another_source(photos, tmp_path, small_shards, capsys):
    pack(photos, tmp_path / "packed")
    pack("--verify", tmp_path / "packed")
    assert "24 images of 2 classes are what was packed" in capsys.readouterr().out
    shard = tmp_path / "packed" / "train" / "shard-000002.tar"
    damage(shard, "flip")
    error = refused(capsys, photos, tmp_path / "packed", "--verify")
    found = re.search(r"damaged: (.*)\. To repair it, run: rm (.*) && python scripts/pack_dataset\.py (.*)", error)
    assert [found[1]] == shlex.split(found[2]) == [str(shard)]
    shard.unlink()
    pack(*shlex.split(found[3]))
    pack(photos, tmp_path / "packed", "--verify")
    for change in ("removed", "renamed"):
        shutil.copytree(photos, tmp_path / change)
        first = Path(FolderImages(tmp_path / change).path(0))
        first.unlink() if change == "removed" else first.rename(first.with_name("renamed.jpg"))
        error = refused(capsys, tmp_path / change, tmp_path / "packed", "--verify")
        assert "the names, labels or classes of the images are not those of the source" in error


def test_a_broken_file_stops_the_packing_and_what_is_packed_stays(
    photos, tmp_path, small_shards, inline, monkeypatch, capsys
):
    """Broken after the folder was opened, which looks at headers, too."""
    shutil.copytree(photos, tmp_path / "photos")
    broken = Path(FolderImages(tmp_path / "photos").path(20))
    monkeypatch.setattr(FolderImages, "check", lambda self: None)
    broken.write_bytes(b"hello")
    assert f"{str(broken)!r} is not a readable image" in refused(capsys, tmp_path / "photos", tmp_path / "packed")
    shards = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "packed").rglob("*.tar")}
    broken.unlink()
    pack(tmp_path / "photos", tmp_path / "packed")
    assert len(open_images("folder", tmp_path / "packed")) == 23 and not [*(tmp_path / "packed").rglob(".*")]
    kept = [(tmp_path / "packed" / "train" / name).stat().st_mtime_ns == time for name, time in shards.items()]
    assert shards and sum(kept) >= len(shards) - 1


def test_a_copy_for_another_process_maps_the_index_by_itself(photos, tmp_path, small_shards):
    pack(photos, tmp_path / "packed")
    images = open_images("folder", tmp_path / "packed")
    images.reference, expected = True, images.read(7)
    data = pickle.dumps(images)
    other = pickle.loads(data)
    assert len(data) < 1000 and other.reference
    assert other.read(7) == expected and other.labels.tolist() == images.labels.tolist()


def test_rows_are_mapped_not_copied(photos, tmp_path):
    pack(photos, tmp_path / "packed")
    images = open_images("folder", tmp_path / "packed")
    assert not any(values.flags.owndata for values in (*images.rows.values(), images.names))
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(images.index) in maps.read_text()


def test_shards_are_cut_by_size_and_hold_whole_images():
    sizes = np.array([40, 70, 10, 200, 5, 5])
    assert pack_dataset.shard_bounds(sizes, 100) == [(0, 2), (2, 4), (4, 6)]
    for shard_bytes in (1, 50, 100, 10_000):
        shards = pack_dataset.shard_bounds(sizes, shard_bytes)
        assert [i for first, end in shards for i in range(first, end)] == list(range(6))
        assert all(end > first for first, end in shards)
    assert pack_dataset.shard_bounds(sizes, 10_000) == [(0, 6)]


def test_many_shards_need_few_descriptors(photos, tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(tars, "MOST_OPEN", 2)
    pack(photos, tmp_path / "packed")
    images = open_images("folder", tmp_path / "packed")
    for i in (0, 23, 5, 17, 0):
        assert images.load(i)[0].shape[2] == 3
        assert len(images._files) <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard_mb", "0"], "must be at least 1, got 0"),
        (["--quality", "0"], "--quality must be at least 1, got 0"),
        (["--verify"], "is not a valid index of tars"),
        (["third"], "give SOURCE and DESTINATION"),
    ],
)
def test_errors(photos, tmp_path, capsys, flags, message):
    assert message in refused(capsys, photos, tmp_path / "packed", *flags)


def test_the_first_member_of_a_shard_tells_what_is_in_it(photos, tmp_path, small_shards):
    pack(photos, tmp_path / "packed")
    with tarfile.open(tmp_path / "packed" / "train" / "shard-000001.tar") as tar:
        names = tar.getnames()
        manifest = json.load(tar.extractfile(MANIFEST))
    first, folder = manifest["first"], FolderImages(photos)
    assert names[:3] == [MANIFEST, f"cat/{first:09d}.jpg", f"cat/{first:09d}.cls"]
    assert manifest["names"] == [os.fsdecode(name) for name in folder.names[first : first + len(names) // 2].tolist()]
    assert manifest["classes"] == ["cat", "dog"] and manifest["shard"] == 1
