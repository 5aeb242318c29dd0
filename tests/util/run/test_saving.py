"""When a run saves."""

import time
from argparse import Namespace

import pytest
import torch

from tests.two_processes import run_in_two_processes
from util.run import checkpoint
from util.run.saving import CheckpointSaver


def _save_slowly(rank, folder, error):
    """Returns when this rank's `save` came back, and what it raised. Rank 0 writes for two seconds."""

    def save_checkpoint(*_):
        time.sleep(2)
        if error:
            raise OSError(28, "No space left on device")
        (folder / "written").write_text(str(time.time()))

    checkpoint.save_checkpoint = save_checkpoint
    model = torch.nn.Linear(2, 2)
    loop = Namespace(step=7, meter=model, optimizer=torch.optim.AdamW(model.parameters()))
    loop.precision = Namespace(scaler=torch.amp.GradScaler("cpu", enabled=False))
    record = Namespace(meta=lambda step: {"step": step})
    saver = CheckpointSaver(folder, record, model, loop, False, Namespace(keep_every=5, num_steps=100), 0)
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
