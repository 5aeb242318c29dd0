import hashlib
import itertools
import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torchvision

from tests.conftest import write_photo
from util.data import datasets, published
from util.data import images as module
from util.data.attention_maps import BoxedDataset
from util.data.datasets import AddressedDataset, StepBatchSampler, steps_per_epoch
from util.data.images import FolderImages
from util.data.invalid_pixels import InvalidPixels
from util.data.open import open_images
from util.data.published import CifarImages
from util.data.repeats import epoch_groups, with_repeats
from util.data.transforms import RandomResizedCropFlip


def test_too_many_files_that_are_no_images_are_named(tmp_path):
    write_photo(tmp_path / "0.jpg")
    (tmp_path / "1.jpg").write_text("hello")
    with pytest.raises(ValueError, match="1.jpg"):
        open_images("folder", tmp_path)
    (note,) = open_images("folder", tmp_path, max_bad_fraction=0.01).notes  # one is let pass
    assert note.startswith("warning: 1 of")
    (tmp_path / "2.jpg").touch()
    (tmp_path / "3.png").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"3 of 4 checked .* --max_bad_fraction .*1\.jpg"):
        open_images("folder", tmp_path, max_bad_fraction=0.01)
    open_images("folder", tmp_path, max_bad_fraction=0.8)


def write_pickle(path, content):
    """Returns the file's name and MD5."""
    path.write_bytes(pickle.dumps(content))
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


def test_cifar_is_read_from_disk(tmp_path, monkeypatch):
    """torchvision's own file layout, with make-believe pictures."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    train_list = []
    for i in range(1, 6):
        content = {"data": pixels, "labels": [3, 1, 4, 1]}
        train_list.append(write_pickle(folder / f"data_batch_{i}", content))
    _, hash_of_meta = write_pickle(folder / "batches.meta", {"label_names": list("0123456789")})

    class SmallCIFAR10(torchvision.datasets.CIFAR10):
        test_list = []
        meta = torchvision.datasets.CIFAR10.meta | {"md5": hash_of_meta}

    SmallCIFAR10.train_list = train_list

    monkeypatch.replace_in(published, "torchvision.datasets.CIFAR10", SmallCIFAR10)
    images = CifarImages("cifar10", tmp_path)
    assert len(images) == 20
    assert images.labels.tolist() == [3, 1, 4, 1] * 5
    img, label = images.load(6)
    assert label == 4
    planes = pixels[2].reshape(3, 32, 32)
    assert np.array_equal(img, planes.transpose(1, 2, 0))


def test_cifar_that_cannot_be_had_says_where_it_should_be(tmp_path, monkeypatch):
    class NoNetwork(torchvision.datasets.CIFAR100):
        def download(self):
            raise OSError("no route to host")

    monkeypatch.replace_in(published, "torchvision.datasets.CIFAR100", NoNetwork)
    with pytest.raises(ValueError, match="cifar100 is not in --data_path .*no route to host.*cifar-100-python"):
        CifarImages("cifar100", tmp_path)


@pytest.mark.parametrize("reading", [{"in_chans": 5}, {"invalid": InvalidPixels(nodata=0)}])
def test_cifar_has_three_channels_without_holes(tmp_path, reading):
    with pytest.raises(ValueError, match="--dataset cifar10 .*--in_chans, --nodata"):
        open_images("cifar10", tmp_path, **reading)


# --------------------------------------------------------------------------------------------------- step batches


def steps(batch_size=4, accum_iter=1, rank=0, world_size=1, seed=0, start=0, end=50, repeats=1, epochs=range(0)):
    """The micro-batches of a process, for 100 images: lists of (epoch, index)."""
    sampler = StepBatchSampler(100, batch_size, accum_iter, rank, world_size, seed)
    return list(with_repeats(sampler, repeats, epochs).batches(range(start, end)))


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


def test_an_epoch_is_a_permutation_cut_into_steps():
    batches = steps()
    assert [len(batch) for batch in batches] == [4] * 50
    first = [index for _, index in joined(batches[:25])]
    second = [index for _, index in joined(batches[25:])]
    assert sorted(first) == list(range(100))
    assert sorted(second) == list(range(100))
    assert first != second
    assert {epoch for epoch, _ in joined(batches[:25])} == {0}
    assert {epoch for epoch, _ in joined(batches[25:])} == {1}
    assert steps(seed=1) != batches


@pytest.mark.parametrize("num_values", [10, 10**6])
def test_equal_random_numbers_leave_images_in_their_order(monkeypatch, num_values):
    """One epoch in 10,000 of a million images has such a pair, which processors sort differently."""
    numbers = np.random.default_rng(0).integers(num_values, size=(1, 1000)) / num_values
    monkeypatch.setattr(datasets, "addressed_uniform", lambda *_: numbers)
    expected = sorted(range(1000), key=lambda i: (numbers[0, i], i))
    assert datasets.permutation(0, 0, 1000).tolist() == expected


@pytest.mark.parametrize(
    ("world_size", "accum_iter"),
    [
        (2, 1),
        (1, 3),
        (2, 3),
        (4, 1),
    ],
)
@pytest.mark.parametrize("repeats", [1, 2])
def test_any_split_of_the_total_batch_sees_the_same_samples_in_the_same_step(world_size, accum_iter, repeats):
    """Micro-batch by micro-batch, and in each rank by rank."""
    batch_size = 24 // (world_size * accum_iter)
    repeated = {"repeats": repeats, "epochs": range(3)}
    ranks = []
    for rank in range(world_size):
        ranks.append(steps(batch_size, accum_iter, rank, world_size, end=12, **repeated))
    taken = []
    for batches_of_ranks in zip(*ranks, strict=True):
        taken += joined(batches_of_ranks)
    assert taken == joined(steps(batch_size=24, end=12, **repeated))


@pytest.mark.parametrize("repeats", [2, 4, 10])
def test_repeats_see_the_samples_of_the_same_epochs_in_another_order(repeats):
    """7 epochs of 5 steps: 2 + 2 + 2 + 1, 4 + 2 + 1, 5 + 2."""
    plain = steps(batch_size=20, end=35)
    repeated = steps(batch_size=20, end=35, repeats=repeats, epochs=range(7))
    assert [len(batch) for batch in repeated] == [20] * 35
    assert repeated[:30] != plain[:30]
    assert Counter(joined(repeated)) == Counter(joined(plain))
    for batch in repeated:
        groups = [list(group) for _, group in itertools.groupby(batch, key=lambda address: address[1])]
        assert len({epoch for epoch, _ in batch}) == len(groups[0])
        assert len({tuple(epoch for epoch, _ in group) for group in groups}) == 1  # each image in all of the epochs
        assert len({group[0][1] for group in groups}) == len(groups)


def test_repeats_that_leave_images_out_leave_the_same_ones_out_of_a_group():
    repeated = steps(batch_size=12, end=32, repeats=4, epochs=range(4))  # 8 steps an epoch, and 4 images left
    counts = Counter(index for _, index in joined(repeated))
    assert len(counts) == 96
    assert set(counts.values()) == {4}


@pytest.mark.parametrize(
    ("repeats", "epochs", "sizes"),
    [
        (1, range(3), [1, 1, 1]),
        (4, range(8), [4, 4]),
        (4, range(3, 10), [4, 2, 1]),
        (6, range(11), [6, 3, 2]),
        (6, range(5), [3, 2]),
        (3, range(2), [1, 1]),
    ],
)
def test_groups_of_epochs(repeats, epochs, sizes):
    groups = epoch_groups(epochs, repeats)
    assert [len(group) for group in groups] == sizes
    assert list(itertools.chain.from_iterable(groups)) == list(epochs)


def test_crops_of_an_image_share_its_decoding_and_equal_those_made_one_by_one(photos, monkeypatch):
    """The third image is bad: the fourth takes its place, with its box."""
    images = FolderImages(photos / "train")
    dataset = BoxedDataset(AddressedDataset(images, RandomResizedCropFlip(16, seed=1), replace=True))
    loaded = []

    def load(i):
        loaded.append(i)
        if i == 2:
            raise module.ImageError("bad")
        return FolderImages.load(images, i)

    monkeypatch.setattr(images, "load", load)
    addresses = [(epoch, index) for index in (5, 2, 0) for epoch in (4, 5, 6)]
    together = dataset.__getitems__(addresses)
    assert loaded == [5, 2, 3, 0]
    assert dataset.bad.nonzero().flatten().tolist() == [2]
    for address, sample in zip(addresses, together, strict=True):
        img, *others = dataset[address]
        assert img.equal(sample[0])
        assert others == list(sample[1:])
    assert [sample[3][0] for sample in together] == [5] * 3 + [3] * 3 + [0] * 3
    assert not together[0][0].equal(together[1][0])


@pytest.mark.parametrize(("side", "is_noted"), [(72, False), (74, True)])
def test_images_that_are_enlarged_more_than_twice_are_noted(tmp_path, side, is_noted):
    for i, size in enumerate([(36, 90), (40, 36), (36, 36)]):
        write_photo(tmp_path / f"{i}.png", size=size, seed=i)
    images = open_images("folder", tmp_path)
    assert bool(module.note_on_small_images(images, (side, 2 * side))) is is_noted


def test_too_few_images_for_one_batch():
    with pytest.raises(ValueError, match="--total_batch_size"):
        steps_per_epoch(9, 10)
    assert steps_per_epoch(29, 10) == 2


def write_inaturalist(root, split="val", year=2019, **changes):
    """Three images of the categories 7, 3, 7 of {3, 5, 7}."""
    folder = root / f"{split}{year}" / "Aves"
    folder.mkdir(parents=True)
    content = {"images": [], "annotations": [], "categories": []}
    for image_id, category_id in ((11, 7), (12, 3), (13, 7)):
        write_photo(folder / f"{image_id}.jpg", seed=image_id)
        content["images"].append({"id": image_id, "file_name": f"{split}{year}/Aves/{image_id}.jpg"})
        content["annotations"].append({"id": image_id, "image_id": image_id, "category_id": category_id})
    for category_id in (7, 3, 5):
        content["categories"].append({"id": category_id, "name": f"species {category_id}"})
    (root / f"{split}{year}.json").write_text(json.dumps({**content, **changes}))
    return content


def test_inaturalist_labels_are_ranks_of_category_ids(tmp_path):
    write_inaturalist(tmp_path)
    images = open_images("inat19", tmp_path, "val")
    assert images.classes == ["species 3", "species 5", "species 7"]
    assert [images.load(i)[1] for i in range(3)] == [2, 0, 2]
    assert images.path(1).endswith("val2019/Aves/12.jpg")
    with pytest.raises(ValueError, match="--data_path .*val2018.json"):
        open_images("inat18", tmp_path, "val")
