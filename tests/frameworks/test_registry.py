"""Models that runs have pre-trained."""

import pytest
import torch

import main_pretrain
from frameworks.registry import load_run
from util.run.files.checkpoint import save_checkpoint
from util.run.files.record import CheckpointError


def test_a_run_of_another_version_is_refused(tmp_path):
    _, args = main_pretrain.parse_args(["--model", "mae_vit_micro_patch4"])
    settings = vars(args)
    del settings["kernel_size"]
    save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(1)}}, {"settings": settings})
    with pytest.raises(CheckpointError, match="checkpoint-2.pth' does not say 'kernel_size': .* another version"):
        load_run(tmp_path)
