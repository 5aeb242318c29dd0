import hashlib
import json
import multiprocessing
import os
import pickle
import re
import tarfile

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from prmim import MaskCollator, TokenCounts, TokenOrderSampler
from tests.conftest import write_photo
from util.data import datasets, workers
from util.data import images as module
from util.data.datasets import (
    AddressedDataset,
    StepBatchSampler,
    batches,
    stack,
    steps_per_epoch,
)
from util.data.images import CifarImages, FolderImages, evenly_spaced
from util.data.open import open_images
from util.data.transforms import RandomResizedCropFlip
from util.run.flags import split_batch


def test_class_folders_under_train(photos):
    images = FolderImages(photos / "train")
    assert len(images) == 24 and images.classes == ["cat", "dog"]
    img, label = images.load(13)
    assert img.shape[2:] == (3,) and img.dtype == np.uint8
    assert label == 1 and images.path(13).startswith(str(photos / "train" / "dog"))


def test_flat_folder_needs_no_classes(tmp_path):
    for i in range(3):
        write_photo(tmp_path / f"{i}.png", seed=i)
    (tmp_path / "notes.txt").write_text("not listed: not an image's extension")
    images = FolderImages(tmp_path)
    assert len(images) == 3 and images.classes == [] and images.load(2)[1] == 0


def test_images_say_what_stands_in(photos):
    assert open_images("folder", photos).notes == []
    images = open_images("folder", photos, "val")
    assert images.root == photos / "train" and len(images) == 24
    assert images.notes == ["train/ is read as val, because there is no val"]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    name = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new(mode, (9, 7)).save(name)
    img, _ = FolderImages(tmp_path).load(0)
    assert img.shape == (7, 9, 3)


@pytest.mark.fault("F31", "a data folder that is empty, missing, or has an empty class", "named at the start")
def test_bad_folders_are_named(tmp_path, photos):
    with pytest.raises(ValueError, match="nowhere' is not a folder; expected are images in class folders"):
        FolderImages(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no image"):
        FolderImages(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    write_photo(tmp_path / "cat" / "0.jpg")
    with pytest.raises(ValueError, match="no valid file for the classes dog"):
        FolderImages(tmp_path)
    with pytest.raises(ValueError, match="unknown dataset 'mnist', choose from folder, cifar10, cifar100"):
        open_images("mnist", photos)


def test_a_file_that_is_no_image_is_named_before_training(tmp_path):
    write_photo(tmp_path / "0.jpg")
    (tmp_path / "1.jpg").write_text("hello")
    with pytest.raises(ValueError, match=r"1\.jpg' is not a readable image"):
        open_images("folder", tmp_path)
    (note,) = open_images("folder", tmp_path, max_bad_fraction=0.01).notes  # one is let pass
    assert note.startswith("warning: 1 of") and "cannot be read and will be replaced: " in note
    (tmp_path / "2.jpg").touch()
    (tmp_path / "3.png").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"3 of 4 checked .* more than --max_bad.*: .*1\.jpg.*2\.jpg.*3\.png"):
        open_images("folder", tmp_path, max_bad_fraction=0.01)
    open_images("folder", tmp_path, max_bad_fraction=0.8)


def test_a_decompression_bomb_is_named_before_it_unfolds(tmp_path):
    """A few kilobytes; Pillow itself would warn of the first and unfold it."""
    for side, message in ((13000, "13000 x 13000 pixels are more than"), (20000, "exceeds limit")):
        Image.new("1", (side, side)).save(tmp_path / "0.png")
        with pytest.raises(ValueError, match=rf"0\.png' is not a readable image.*{message}"):
            open_images("folder", tmp_path)
        with pytest.raises(ValueError, match=rf"0\.png' cannot be decoded.*{message}"):
            FolderImages(tmp_path).load(0)


def test_a_truncated_file_is_named_when_it_is_read(tmp_path):
    write_photo(tmp_path / "0.jpg", size=(200, 200))
    data = (tmp_path / "0.jpg").read_bytes()
    (tmp_path / "0.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"0\.jpg' cannot be decoded"):
        FolderImages(tmp_path).load(0)


def test_cifar_is_read_from_disk(tmp_path, monkeypatch):
    """torchvision's own file layout, with make-believe pictures."""

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 1, 4, 1]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    hashes = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    class SmallCIFAR10(torchvision.datasets.CIFAR10):
        train_list = [[name, hashes[name]] for name in sorted(hashes) if name.startswith("data")]
        test_list = [["test_batch", hashes["test_batch"]]]
        meta = torchvision.datasets.CIFAR10.meta | {"md5": hashes["batches.meta"]}

    monkeypatch.replace_in(module, "torchvision.datasets.CIFAR10", SmallCIFAR10)
    images = CifarImages("cifar10", tmp_path)
    assert len(images) == 20 and images.load(2)[1] == 4
    assert images.labels.tolist() == [3, 1, 4, 1] * 5
    assert np.array_equal(images.load(5)[0], pixels[1].reshape(3, 32, 32).transpose(1, 2, 0))


def test_cifar_that_cannot_be_had_says_where_it_should_be(tmp_path, monkeypatch):
    class NoNetwork(torchvision.datasets.CIFAR100):
        def download(self):
            raise OSError("no route to host")

    monkeypatch.replace_in(module, "torchvision.datasets.CIFAR100", NoNetwork)
    with pytest.raises(ValueError, match="cifar100 is not in --data_path .*no route to host.*cifar-100-python"):
        CifarImages("cifar100", tmp_path)


# --------------------------------------------------------------------------------------------------- step batches


def steps(num_samples=100, batch_size=4, accum_iter=1, rank=0, world_size=1, seed=0, start=0, end=50):
    return list(StepBatchSampler(num_samples, batch_size, accum_iter, rank, world_size, seed, start, end))


def test_an_epoch_is_a_permutation_cut_into_steps():
    all_steps = steps()
    assert len(all_steps) == 50 and all(len(batch) == 4 for batch in all_steps)
    first, second = sum(all_steps[:25], []), sum(all_steps[25:], [])
    assert {e for e, _ in first} == {0} and {e for e, _ in second} == {1}
    assert sorted(i for _, i in first) == sorted(i for _, i in second) == list(range(100))
    assert [i for _, i in first] != [i for _, i in second] != list(range(100))
    assert steps(seed=1) != all_steps


def test_any_split_of_the_total_batch_sees_the_same_samples_in_the_same_step():
    whole = [sorted(batch) for batch in steps(batch_size=12, end=16)]
    for world_size, accum_iter in ((2, 1), (1, 3), (2, 3), (4, 1)):
        batch_size = 12 // (world_size * accum_iter)
        ranks = [steps(100, batch_size, accum_iter, rank, world_size, end=16) for rank in range(world_size)]
        for step, expected in enumerate(whole):
            parts = [batch for r in ranks for batch in r[step * accum_iter : (step + 1) * accum_iter]]
            assert sorted(sum(parts, [])) == expected


def test_micro_batches_take_the_samples_in_the_order_of_micro_batch_and_rank():
    ranks = [steps(100, 2, 3, rank, 2, end=16) for rank in range(2)]
    taken = [batch for micro in zip(*ranks, strict=True) for batch in micro]
    assert sum(taken, []) == sum(steps(batch_size=12, end=16), [])


def test_starting_later_skips_exactly():
    sampler = StepBatchSampler(100, 4, 3, rank=0, world_size=1, seed=0, start_step=0, end_step=20)
    assert list(sampler[2:][5:]) == list(sampler[7:]) == list(sampler)[7:]
    assert steps(start=37) == steps()[37:]
    assert steps(accum_iter=2, end=24)[2 * 13 :] == steps(accum_iter=2, start=13, end=24)


def test_too_few_images_for_one_step():
    with pytest.raises(ValueError, match="5 images, fewer than one total batch of 64"):
        steps_per_epoch(5, 64)


@pytest.mark.fault("U87", "a recipe with a total batch larger than the data", "a batch that fits, as flags to copy")
@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("num_images", [9, 40, 1000, 4000])
def test_the_advice_for_too_few_images_can_be_followed(num_images, world_size):
    with pytest.raises(ValueError) as raised:
        steps_per_epoch(num_images, 4096, world_size)
    total, batch = map(int, re.search(r"--total_batch_size (\d+) --batch_size (\d+)", str(raised.value)).groups())
    with_four_steps = [size for k in range(12) if 4 * (size := world_size * 2**k) <= num_images]
    assert total == max(with_four_steps, default=world_size)
    assert split_batch(batch, None, total, world_size)[0] == batch <= 64
    assert steps_per_epoch(num_images, total, world_size) >= 1


def all_batches(photos, num_workers, start=0):
    images = FolderImages(photos)
    dataset = AddressedDataset(images, RandomResizedCropFlip(32, seed=2))
    collator = MaskCollator(TokenOrderSampler(8, TokenCounts.from_ratios(64, 0.75, 0.5)), seed=2)
    sampler = StepBatchSampler(len(images), 4, 1, 0, 1, 2, start, 12)
    return [[t.clone() for t in batch] for batch in batches(dataset, sampler, collator, num_workers, pin_memory=False)]


def test_batches_are_the_same_for_any_number_of_workers_and_from_any_start(photos):
    expected = all_batches(photos, num_workers=0)
    assert len(expected) == 12 and expected[0][0].shape == (4, 3, 32, 32)
    for other, offset in ((all_batches(photos, 2), 0), (all_batches(photos, 1, start=7), 7)):
        assert len(other) == 12 - offset
        for ours, theirs in zip(expected[offset:], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(expected[0][0], expected[6][0])  # the second epoch crops anew


@pytest.mark.parametrize(("old", "num_workers", "expected"), [(True, 2, [0]), (True, 0, []), (False, 2, [])])
def test_threads_settle_before_workers_are_forked(photos, monkeypatch, old, num_workers, expected):
    """Else a worker can hang at its start on an old Python."""
    sampler = [[(0, 8 * batch + i) for i in range(8)] for batch in range(3)]
    loader = batches(
        AddressedDataset(FolderImages(photos), RandomResizedCropFlip(32, seed=2)), sampler, stack, num_workers, False
    )
    before, children = set(multiprocessing.active_children()), []
    monkeypatch.setattr(workers, "FORKS_HOLD_LOCKS", old)
    monkeypatch.replace_in(workers, "dist.is_initialized", lambda: True)

    def sleep(_):
        children.append(len(set(multiprocessing.active_children()) - before))

    monkeypatch.replace_in(workers, "time.sleep", sleep)
    assert next(loader)[0].shape == (8, 3, 32, 32)
    assert children == expected
    loader.close()


def test_paths_survive_odd_names(tmp_path):
    name = "ünïcode \N{SNOWMAN}.jpg"
    write_photo(tmp_path / name)
    images = FolderImages(tmp_path)
    assert os.path.basename(images.path(0)) == name and images.load(0)[0].shape == (40, 48, 3)


def test_tar_is_not_mistaken_for_an_image(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w"):
        pass
    with pytest.raises(ValueError, match="holds no image"):
        FolderImages(tmp_path)


def test_labelled_folders_need_the_split_and_its_classes(tmp_path, photos):
    assert open_images("folder", photos, "train", labelled=True).classes == ["cat", "dog"]
    with pytest.raises(ValueError, match=r"has no folder val/; expected are .*val/<class>"):
        open_images("folder", photos, "val", labelled=True)
    (tmp_path / "val").mkdir()
    write_photo(tmp_path / "val" / "0.jpg")
    with pytest.raises(ValueError, match="val' holds no class folders, so there are no labels"):
        open_images("folder", tmp_path, "val", labelled=True)


def write_inaturalist(root, split="val", year=2019, **changes):
    """Three images of the categories 7, 3, 7 of {3, 5, 7}."""
    names = [f"{split}{year}/Aves/{i}.jpg" for i in (11, 12, 13)]
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_photo(root / name, seed=i)
    content = {
        "images": [{"id": i, "file_name": name} for i, name in zip((11, 12, 13), names, strict=True)],
        "annotations": [{"id": i, "image_id": 11 + i, "category_id": c} for i, c in enumerate((7, 3, 7))],
        "categories": [{"id": c, "name": f"species {c}"} for c in (7, 3, 5)],
    }
    (root / f"{split}{year}.json").write_text(json.dumps({**content, **changes}))
    return content


def test_inaturalist_labels_are_ranks_of_category_ids(tmp_path):
    write_inaturalist(tmp_path)
    images = open_images("inat19", tmp_path, "val")
    assert images.classes == ["species 3", "species 5", "species 7"]
    assert [images.load(i)[1] for i in range(3)] == [2, 0, 2] and images.path(1).endswith("val2019/Aves/12.jpg")
    message = "--data_path must hold iNaturalist's val2018.json, but '.*val2018.json' is no file"
    with pytest.raises(ValueError, match=message):
        open_images("inat18", tmp_path, "val")


ANNOTATIONS = [
    {"image_id": 11, "category_id": 7},
    {"image_id": 12, "category_id": 3},
    {"image_id": 13, "category_id": 7},
]
NAMES = ["val2019/Aves/11.jpg", "val2019/Aves/12.jpg", "val2019/Aves/13.jpg"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(annotations=ANNOTATIONS[:2]), "names val2019/Aves/13.jpg, an image without a category"),
        (dict(categories=[{"id": 3}, {"id": 5}]), "names val2019/Aves/11.jpg, an image without a category"),
        (
            dict(images=[{"id": 11 + i, "file_name": n} for i, n in enumerate([*NAMES[:2], "val2019/14.jpg"])]),
            "14.jpg' is not a",
        ),
        (dict(images=[], annotations=[]), "names no image"),
        (dict(images=[{"id": 1}]), "must hold iNaturalist's .*file_name"),
    ],
)
def test_inaturalist_label_files_that_disagree_are_refused(tmp_path, changes, message):
    write_inaturalist(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        open_images("inat19", tmp_path, "val")


@pytest.mark.parametrize(("batch_bytes", "expected"), [(0, 4), (2**33, 1)])
def test_the_loader_prepares_as_many_batches_ahead(photos, monkeypatch, batch_bytes, expected):
    asked, exact = [], torch.utils.data.DataLoader
    note = lambda *args, **flags: asked.append(flags["prefetch_factor"]) or exact(*args, **flags)  # noqa: E731
    monkeypatch.replace_in(datasets, "torch.utils.data.DataLoader", note)
    dataset = AddressedDataset(FolderImages(photos), RandomResizedCropFlip(32, seed=2))
    sampler = StepBatchSampler(24, 4, 1, 0, 1, 2, 0, 2)
    assert len(list(batches(dataset, sampler, stack, 1, pin_memory=False, batch_bytes=batch_bytes))) == 2
    assert len(list(batches(dataset, sampler, stack, 0, pin_memory=False, batch_bytes=batch_bytes))) == 2
    assert asked == [expected, None]


def test_stack():
    imgs, labels = stack([(torch.full((3, 2, 2), i, dtype=torch.uint8), i + 5, (0, i)) for i in range(3)])
    assert imgs.shape == (3, 3, 2, 2) and imgs.dtype == torch.uint8
    assert imgs[2].eq(2).all() and labels.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("length", "most", "expected"), [(5, 9, range(5)), (5, 5, range(5)), (9, 3, [0, 4, 8]), (3, 1, [0])]
)
def test_evenly_spaced_indices(length, most, expected):
    np.testing.assert_array_equal(evenly_spaced(length, most), list(expected))
