"""Resumes with another world size, and from a folder to tar shards of it; logs after many stops."""

import json
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts import pack_dataset
from tests.runs import assert_same_state, finetune, finish, losses, pretrain, reports_without_times, state, tiny


@pytest.mark.parametrize(
    ("program", "processes", "flags"),
    [
        (tiny, 3, "--total_batch_size 6"),
        (tiny, 4, "--batch_size 1 --accum_iter 2"),
        (finetune, 3, "--batch_size 2"),
        (finetune, 4, "--batch_size 1 --accum_iter 2 --mixup 0 --cutmix 0"),
    ],
)
def test_resumed_in_several_processes_a_run_is_the_undisturbed_one(labelled, tmp_path, program, processes, flags):
    """Of two numbers the order of a sum means nothing; of three it does."""
    flags = [*flags.split(), "--epochs", 2]
    options = dict(program=program, processes=processes)
    finish(labelled, tmp_path / "whole", *flags, **options)
    finish(labelled, tmp_path / "out", *flags, "--max_steps", 2, **options)
    finish(labelled, tmp_path / "out", *flags, **options)
    assert_same_state(state(tmp_path / "out"), state(tmp_path / "whole"))
    assert reports_without_times(tmp_path / "out") == reports_without_times(tmp_path / "whole")


def test_another_number_of_processes(photos, tmp_path):
    """The gradient is summed in another order, so not to the last bit."""
    flags = ("--epochs", 4)
    finish(photos, tmp_path / "two", *flags)
    finish(photos, tmp_path / "out", *flags, "--max_steps", 4)
    out = finish(photos, tmp_path / "out", *flags, "--max_steps", 8, processes=1)
    assert "note: world_size was 2 and now is 1" in out
    finish(photos, tmp_path / "out", *flags)
    expected = losses(tmp_path / "two")
    assert len(expected) == 12
    assert losses(tmp_path / "out") == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected]


def test_from_a_folder_to_what_was_packed_from_it(photos, tmp_path, capsys):
    """The same data by its names and labels, so no change; packed with another compression it is one."""
    expected = pretrain(photos, tmp_path / "whole")
    pack = ["--workers", "1", "--shard_mb", "1"]
    pack_dataset.main([str(photos), str(tmp_path / "packed"), *pack])
    pack_dataset.main([str(photos), str(tmp_path / "smaller"), *pack, "--quality", "90"])
    pretrain(photos, tmp_path / "out", "--max_steps", 2)
    assert "the data had 24 images" in pretrain.refused(capsys, tmp_path / "smaller", tmp_path / "out")
    assert_same_state(pretrain(tmp_path / "packed", tmp_path / "out"), expected)


def test_logs_after_many_stops(photos, tmp_path):
    for stop in (2, 5, 7):
        pretrain(photos, tmp_path, "--epochs", 4, "--max_steps", stop, "--save_steps", 1)
    for path in tmp_path.glob("checkpoint-7.*"):
        path.unlink()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 8, "loss": 1')  # a line cut off by the kill
    pretrain(photos, tmp_path, "--epochs", 4)
    assert len(losses(tmp_path)) == 12
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))
    text = (tmp_path / "log.txt").read_text()
    assert re.findall(r"resuming .+ at step (\d+)", text) == ["2", "5", "6"]
    assert json.loads((tmp_path / "settings.json").read_text()) == state(tmp_path)["meta"]["settings"]
