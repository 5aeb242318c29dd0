"""Batches of an evaluation: which images a process sees, when it asks for signals."""

import multiprocessing
from contextlib import nullcontext

import pytest
import torch

from util import collectives
from util.data.datasets import AddressedDataset
from util.data.open import open_images
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate.context import EvalContext, evaluation_batches, share_of_rank
from util.run.processes.supervise import Stopped


@pytest.fixture
def dataset(photos):
    return AddressedDataset(open_images("folder", photos), ResizeCenterCrop((8, 8)))


def context(batch_size, **options):
    return EvalContext(Normalize(), nullcontext, batch_size, num_workers=0, **options)


def become(monkeypatch, rank, world_size):
    monkeypatch.setattr(collectives, "rank_and_world_size", lambda: (rank, world_size))


@pytest.mark.parametrize(
    ("num_images", "world_size"),
    [
        (10, 1),
        (10, 3),
        (2, 3),
        (16, 2),
    ],
)
def test_the_processes_see_each_image_once_in_full_batches(dataset, monkeypatch, num_images, world_size):
    seen = []
    for rank in range(world_size):
        become(monkeypatch, rank, world_size)
        batches = list(evaluation_batches(dataset, range(num_images), context(batch_size=4)))
        assert all(len(imgs) == 4 for imgs, _ in batches[:-1])
        share = share_of_rank(range(num_images)).tolist()
        pairs = []
        for imgs, labels in batches:
            pairs += zip(imgs, labels.tolist(), strict=True)
        for i, (img, label) in zip(share, pairs, strict=True):
            expected_img, expected_label, _ = dataset[0, i]
            assert torch.equal(img, expected_img)
            assert label == expected_label
        seen += share
    assert sorted(seen) == list(range(num_images))


@pytest.mark.parametrize("num_images", [1, 2, 7, 8, 9, 24])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_all_processes_ask_for_signals_equally_often(dataset, monkeypatch, num_images, batch_size):
    """One that asked once more would wait for the others without end."""
    asked = []
    for rank in range(3):
        become(monkeypatch, rank, 3)
        asked.append(0)

        def ask():
            asked[-1] += 1

        for _ in evaluation_batches(dataset, range(num_images), context(batch_size, stop_if_asked=ask)):
            pass
    assert asked[0] >= 1
    assert asked == asked[:1] * 3


def test_small_batches_ask_every_eight_images(dataset):
    events = []
    batches = evaluation_batches(dataset, range(20), context(1, stop_if_asked=lambda: events.append("?")))
    for _ in batches:
        events.append("")
    assert events == ["?"] + 8 * [""] + ["?"] + 8 * [""] + ["?"] + 4 * [""]


def test_an_evaluation_that_is_stopped_leaves_no_workers(dataset):
    others = set(multiprocessing.active_children())  # of other tests

    def workers():
        return set(multiprocessing.active_children()) - others

    def ask():
        if workers():
            raise Stopped

    options = EvalContext(
        Normalize(),
        nullcontext,
        batch_size=2,
        num_workers=1,
        stop_if_asked=ask,
    )
    with pytest.raises(Stopped):
        for _ in evaluation_batches(dataset, range(20), options):
            assert workers()
    assert not workers()
