"""What a run prints at its end."""

from argparse import Namespace

import pytest

from util.run import checkpoint
from util.run.checkpoint import save_checkpoint
from util.run.loop import Clock
from util.run.run import Run, closing_lines, describe_progress


@pytest.mark.parametrize(
    ("step", "last_step", "said"),
    [
        (60, 60, "for 60 steps on 24 images"),
        (20, 20, "for 20 steps of 60 on 24 images; the same command without --max_steps goes on"),
        (40, 20, "for 40 steps of 60 on 24 images; the same command without --max_steps goes on"),
        (60, 20, "for 60 steps on 24 images"),  # a finished run, started again with --max_steps 20
    ],
)
def test_the_progress_is_that_of_the_run_not_that_of_its_last_start(step, last_step, said):
    assert describe_progress(Namespace(step=step, last_step=last_step), 24, total=60) == said


def test_the_newest_checkpoint_is_named_without_reading_it(tmp_path, monkeypatch):
    assert [line.split()[0] for line in closing_lines(tmp_path, is_main=True)] == ["TensorBoard"]
    for step in (9, 10):
        save_checkpoint(tmp_path, step, {}, {"step": step})
    (tmp_path / "checkpoint-11.pth").touch()  # without a record
    monkeypatch.setattr(checkpoint, "sha256", lambda path: pytest.fail("a checkpoint was read"))
    assert closing_lines(tmp_path, is_main=True)[0] == f"  checkpoint   {tmp_path / 'checkpoint-10.pth'}"
    assert len(closing_lines(tmp_path, is_main=False)) == 1


def test_work_between_steps_does_not_count_as_training_time():
    """The clock begins again on all ranks."""
    loop = Namespace(step=4, clock=Clock(), has_stopped=lambda: False)

    def perform():
        loop.clock.start, loop.clock.num_steps, loop.clock.waited = -1e9, 3, 5.0

    work = Namespace(is_due=lambda: True, is_done=lambda: False, perform=perform)
    Run._run_due(Namespace(loop=loop), [work])
    assert loop.clock.start > -1e9 and (loop.clock.num_steps, loop.clock.waited) == (0, 0.0)
