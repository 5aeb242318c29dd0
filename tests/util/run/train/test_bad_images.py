"""The images that a run counts as bad."""

import torch

from tests.loops import SilentLog, a_run, a_schedule
from util.data.datasets import AddressedDataset
from util.data.images import FolderImages
from util.data.transforms import Normalize
from util.run.train import bad_images
from util.run.train.bad_images import BadImages
from util.run.train.loop import TrainLoop


def test_lists_of_bad_images_are_gathered_only_if_a_report_has_found_new_ones(photos, monkeypatch):
    gathered = []
    monkeypatch.setattr(bad_images.collectives, "gather_objects", lambda value: gathered.append(value) or [value, [7]])
    dataset = AddressedDataset(FolderImages(photos), None, replace=True)
    model = torch.nn.Linear(1, 1)
    state = {}
    loop = TrainLoop(a_run(), model, None, a_schedule(None), Normalize(), SilentLog(), state, bad_images=dataset.bad)
    work = BadImages(loop, None, dataset)
    for bad in ([], [3], [], [5], []):
        dataset.bad[bad] = 1
        loop.reports.num_bad_images = int(dataset.bad.sum()) + 1  # with that of the other rank
        if work.is_due():
            work.perform()
    assert gathered == [[], [3], [3, 5]]
    assert work.known == {3, 5, 7}
    assert len(loop.log.lines) == 3
