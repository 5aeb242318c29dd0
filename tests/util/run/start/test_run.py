"""What a run prints at its end, what happens between its steps, and how long they may take."""

import os
import signal

import pytest
import torch

import main_pretrain
from monitor import Monitor
from tests.runs import pretrain, reports
from util.run.processes.distributed import Process
from util.run.train import reports as reports_module
from util.run.train import saving
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver


def test_work_between_steps_does_not_count_as_training_time(photos, tmp_path, monkeypatch):
    """Each step takes a second of the loop's clock, each evaluation an hour. Here they come inside an epoch, too."""
    now = [0.0]
    set_rates = TrainLoop.set_rates

    def step(training_loop, number):
        set_rates(training_loop, number)
        now[0] += 1

    def perform(monitor):
        now[0] += 3600

    monkeypatch.replace_in(reports_module, "time.perf_counter", lambda: now[0])
    monkeypatch.setattr(TrainLoop, "set_rates", step)
    monkeypatch.setattr(Monitor, "perform", perform)
    monkeypatch.setattr(Monitor, "is_due", lambda monitor: True)
    pretrain(photos, tmp_path, "--knn_every", 1, "--picture_every", 0, "--save_steps", 1)
    assert [report["seconds_per_step"] for report in reports(tmp_path)] == [1] * 6


def test_a_run_saves_by_time_at_its_reports(photos, tmp_path, monkeypatch):
    """A step takes 70 s. Two minutes are over at every second one, where the run reports; epochs have three."""
    now = [0.0]
    set_rates = TrainLoop.set_rates
    save = CheckpointSaver.save
    steps = []

    def step(training_loop, number):
        set_rates(training_loop, number)
        now[0] += 70

    def save_and_wait(saver, final=False):
        save(saver, final)
        saver.finish()
        steps.append(saver.saved_steps[-1])

    monkeypatch.replace_in(saving, "time.monotonic", lambda: now[0])
    monkeypatch.setattr(TrainLoop, "set_rates", step)
    monkeypatch.setattr(CheckpointSaver, "save", save_and_wait)
    pretrain(photos, tmp_path, "--epochs", 3, "--save_minutes", 2, "--save_steps", 0, "--print_freq", 2)
    assert sorted(set(steps)) == [0, 2, 4, 6, 8, 9]


def test_a_signal_in_the_last_step_leaves_what_is_due_to_the_next_start(photos, tmp_path, before_step):
    """The run has not finished: its exit code says so, and the same command makes up for the kNN evaluation."""
    command = pretrain.command(photos, tmp_path, "--knn_every", 1)

    def evaluated_steps():
        return [report["step"] for report in reports(tmp_path) if "rankme" in report]

    before_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main_pretrain.main(command) is False
    assert 6 not in evaluated_steps()
    assert main_pretrain.main(command) is True
    assert evaluated_steps()[-1] == 6


@pytest.mark.parametrize(
    ("rank", "local_rank", "hashes"),
    [
        (0, 0, False),
        (1, 1, False),
        (8, 0, True),
        (9, 1, False),
    ],
)
def test_one_process_of_each_node_hashes_the_checkpoint(rank, local_rank, hashes):
    """Rank 0 has done so before."""
    process = Process(torch.device("cpu"), rank, 16, 8, local_rank)
    assert process.need_not_verify == (not hashes)
