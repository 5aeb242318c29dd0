"""The event file as TensorBoard reads it, and what happens to it when its folder goes."""

import itertools
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from util.run.train import events as events_module
from util.run.train.events import EventFile

PICTURE = np.zeros((4, 6, 3), np.uint8)


def losses_in(folder):
    """Returns {step: value} of "loss"."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


def sizes_in(folder):
    """Returns {step: (width, height)} of "a picture"."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return {event.step: (event.width, event.height) for event in events.Images("a picture")}


def test_tensorboard_reads_what_torch_s_writer_would_write(tmp_path):
    ours = EventFile(tmp_path / "ours", purge_step=0)
    theirs = SummaryWriter(tmp_path / "theirs", purge_step=0)
    for writer in (ours, theirs):
        for step in range(3):
            writer.add_scalar("loss", step / 4, step)
    ours.add_picture("a picture", PICTURE, 2)
    theirs.add_image("a picture", PICTURE, 2, dataformats="HWC")
    theirs.close()
    for folder in (tmp_path / "ours", tmp_path / "theirs"):  # before ours is closed
        assert losses_in(folder) == {0: 0.0, 1: 0.25, 2: 0.5}
        assert sizes_in(folder) == {2: (6, 4)}


@pytest.mark.parametrize("files_before", [9, 99])
def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path, monkeypatch, files_before):
    """TensorBoard reads files in the order of their names, here of the tenth and the eleventh of one second."""
    monkeypatch.setattr(events_module, "NUMBERS", itertools.count(files_before))
    first = EventFile(tmp_path)
    resumed = EventFile(tmp_path, purge_step=2)
    for step in (1, 2, 3):
        first.add_scalar("loss", 1.0, step)
    resumed.add_scalar("loss", 2.0, 2)
    assert losses_in(tmp_path) == {1: 1.0, 2: 2.0}


def test_a_deleted_folder_is_no_error(tmp_path):
    file = EventFile(tmp_path / "tensorboard")
    shutil.rmtree(tmp_path / "tensorboard")
    file.add_scalar("loss", 1.0, 1)
    file.close()


def test_the_report_gets_the_error_of_a_full_disk(tmp_path):
    file = EventFile(tmp_path)
    with open("/dev/full", "wb", buffering=0) as full:
        file.records = type(file.records)(full)
        with pytest.raises(OSError, match="No space left"):
            file.add_scalar("loss", 1.0, 1)
