"""What a run prints at its end."""

import gc
import os
import signal
from argparse import Namespace

import pytest
import torch

import main_pretrain
from framework import Framework
from tests.runs import pretrain, reports
from util.run import checkpoint
from util.run import run as run_module
from util.run.checkpoint import save_checkpoint
from util.run.distributed import Process
from util.run.loop import Clock, TrainLoop
from util.run.supervise import Watchdog
from util.run.training import Training


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
    loop = Namespace(step=step, last_step=last_step)
    training = Namespace(loop=loop, images=range(24), schedule=Namespace(num_steps=60))
    assert Training.progress(training) == said


def test_the_newest_checkpoint_is_named_without_reading_it(tmp_path, monkeypatch):
    main, other = (Namespace(output_dir=tmp_path, process=Namespace(is_main=is_main)) for is_main in (True, False))
    assert [line.split()[0] for line in Training.closing_lines(main)] == ["TensorBoard"]
    for step in (9, 10):
        save_checkpoint(tmp_path, step, {}, {})
    (tmp_path / "checkpoint-11.pth").touch()  # without a record
    monkeypatch.setattr(checkpoint, "sha256", lambda path: pytest.fail("a checkpoint was read"))
    assert Training.closing_lines(main)[0] == f"  checkpoint   {tmp_path / 'checkpoint-10.pth'}"
    assert len(Training.closing_lines(other)) == 1


def test_work_between_steps_does_not_count_as_training_time():
    """The clock begins again on all ranks."""
    loop = Namespace(step=4, clock=Clock(), has_stopped=False)

    def perform():
        loop.clock.start, loop.clock.num_steps, loop.clock.waited = -1e9, 3, 5.0

    work = Namespace(is_due=lambda: True, is_done=lambda: False, perform=perform)
    Training._run_due(Namespace(loop=loop, watchdog=Watchdog(60, 60)), [work])
    assert loop.clock.start > -1e9 and (loop.clock.num_steps, loop.clock.waited) == (0, 0.0)


def test_a_signal_in_the_last_step_leaves_what_is_due_to_the_next_start(photos, tmp_path, before_step):
    """The run has not finished: its exit code says so, and the same command makes up for the kNN evaluation."""
    flags = pretrain.command(photos, tmp_path / "out", "--knn_every", 1)

    def evaluated():
        return [report["step"] for report in reports(tmp_path / "out") if "rankme" in report]

    before_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main_pretrain.main(flags) is False and 6 not in evaluated()
    assert main_pretrain.main(flags) and evaluated()[-1] == 6


def test_with_compile_the_first_steps_and_the_first_evaluation_may_take_an_hour(photos, tmp_path, monkeypatch):
    events, begin_step, heartbeat = [], TrainLoop.begin_step, Training.heartbeat

    def note(what, watchdog):
        if events[-1:] != [(what, watchdog.limit)]:
            events.append((what, watchdog.limit))

    monkeypatch.setattr(Framework, "compile", lambda model, **options: None)
    monkeypatch.setattr(TrainLoop, "begin_step", lambda loop, n: (note("step", loop.watchdog), begin_step(loop, n)))
    monkeypatch.setattr(Training, "heartbeat", lambda t: (note("kNN", t.watchdog), heartbeat(t)))
    pretrain(photos, tmp_path / "out", "--compile", "--epochs", 3, "--knn_every", 1, "--picture_every", 0)
    assert events == [
        ("kNN", 3600),
        ("step", 3600),
        ("kNN", 600),
        ("step", 600),
        ("kNN", 600),
        ("step", 600),
        ("kNN", 600),
    ]


def test_while_a_run_trains_cudnn_measures_its_kernels_and_garbage_collection_skips_the_set_up(
    photos, tmp_path, before_step
):
    counts = []
    before_step(1, lambda: counts.append(gc.get_freeze_count()))
    pretrain(photos, tmp_path / "out")
    assert counts[0] > 10_000
    assert gc.get_freeze_count() < counts[0] / 10  # other programs in this process are not affected
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("rank", "local_rank", "hashes"), [(0, 0, False), (1, 1, False), (8, 0, True), (9, 1, False)])
def test_one_process_of_each_node_hashes_the_checkpoint(monkeypatch, tmp_path, rank, local_rank, hashes):
    """Rank 0 has done so before."""
    monkeypatch.setattr(run_module, "restore", lambda path, is_verified, *_: is_verified)
    for name in ("changes_of_flags", "find_changes", "find_notes"):
        monkeypatch.setattr(run_module, name, lambda *_: [])
    this = Namespace(
        process=Process(torch.device("cpu"), rank, 16, 8, local_rank),
        start=Namespace(resume_path=tmp_path),
        args=Namespace(allow_changes=True),
        parser=None,
        plan=None,
        first_step=0,
        note=lambda *_: None,
    )
    assert run_module.Run._restore(this, None, None, None, None) == (not hashes)
