"""When a run saves."""

import re
import shlex
import time
from argparse import Namespace

import pytest
import torch

from tests.two_processes import run_in_two_processes
from util.run import checkpoint
from util.run.loop import Meter
from util.run.saving import CheckpointSaver


def a_saver(folder, model, step, keep_every=5):
    loop = Namespace(step=step, last_step=100, meter=Meter(torch.device("cpu")))
    loop.meter.add({"a": torch.ones(())}, torch.ones(()))
    loop.optimizer = torch.optim.AdamW(model.parameters())
    loop.precision = Namespace(scaler=torch.amp.GradScaler("cpu", enabled=False))
    record = Namespace(meta=lambda step: {"step": step})
    return CheckpointSaver(folder, record, model, loop, False, Namespace(keep_every=keep_every, num_steps=100), 0)


def _save_slowly(rank, folder, error):
    """Returns when this rank's `save` came back, and what it raised. Rank 0 writes for two seconds."""

    def save_checkpoint(*_):
        time.sleep(2)
        if error:
            raise OSError(28, "No space left on device")
        (folder / "written").write_text(str(time.time()))

    checkpoint.save_checkpoint = save_checkpoint
    model = torch.nn.Linear(2, 2)
    saver = a_saver(folder, model, step=7)
    raised = None
    try:
        saver.save(required=True)
    except OSError as failure:
        raised = failure.errno
    return {"returned": time.time(), "raised": raised}


@pytest.mark.parametrize("error", [False, True])
def test_no_rank_goes_on_before_the_checkpoint_is_written(tmp_path, error):
    """A rank that ends earlier makes torchrun or srun kill rank 0 in the middle of its write."""
    results = run_in_two_processes(_save_slowly, tmp_path, error)
    assert [result["raised"] for result in results] == [28 if error else None] * 2
    if not error:
        written = float((tmp_path / "written").read_text())
        assert all(result["returned"] >= written for result in results)


@pytest.mark.parametrize(
    ("saves", "kept", "good"),
    [  # saves: (step, steps before it in a row that were not finite)
        ([(10, 0), (20, 0), (30, 0)], [20, 30], 20),
        ([(10, 0), (20, 10)], [10], None),  # the weights are those of step 10, which no finite step has followed
        ([(10, 0), (20, 0), (30, 9), (40, 19)], [20, 30], 20),  # ruined by step 21
        ([(10, 0), (20, 0), (30, 10), (40, 20)], [10, 20], 10),  # ruined by step 20
        ([(10, 0), (20, 0), (30, 10), (40, 3), (50, 0)], [40, 50], 40),  # it went on
        ([(10, 0), (20, 0), (100, 80)], [10, 20, 100], 10),  # the end is always saved
    ],
)
def test_no_save_among_lost_steps_costs_the_last_good_checkpoint(tmp_path, saves, kept, good):
    saver = a_saver(tmp_path, torch.nn.Linear(2, 2), 0, keep_every=1000)
    for error in (FloatingPointError(), OSError()):
        assert re.search("No checkpoint of this run|starts from the beginning", saver.advice(error))
    for saver.loop.step, bad in saves:
        saver.loop.meter.bad_streak.fill_(bad)
        saver.save(required=False)
    assert [checkpoint.step_of(path) for path in checkpoint.list_finished(tmp_path)] == kept
    advice = saver.advice(FloatingPointError())
    resume = f"--resume {shlex.quote(str(tmp_path / f'checkpoint-{good}.pth'))}"
    assert (resume if good else "No checkpoint of this run") in advice
    assert "goes on from the newest checkpoint" in saver.advice(OSError()) and saver.advice(ValueError()) == ""


def test_statistics_that_are_not_finite_are_not_saved(tmp_path):
    saver = a_saver(tmp_path, torch.nn.BatchNorm1d(2), step=7)
    saver.model(torch.full((2, 2), torch.nan))
    with pytest.raises(FloatingPointError, match="weights are not finite after step 7"):
        saver.save(required=False)
    assert not list(tmp_path.iterdir())
