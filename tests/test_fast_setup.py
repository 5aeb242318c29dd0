"""What a run sets up for speed alone, which no result tells."""

import pytest
import torch

import main_finetune
import main_pretrain
from models_mae_pr import mae_vit_micro_patch4
from models_vit import vit_micro_patch4
from tests.runs import finetune, pretrain
from util.run.processes.distributed import Process
from util.run.start import begin
from util.run.train import wrap


class Built(Exception):
    """Stops a run where it would join the other processes."""


@pytest.mark.parametrize(("accum_iter", "is_static"), [(1, True), (2, False)])
def test_ddp_knows_the_graph_unless_passes_go_unreduced(photos, tmp_path, monkeypatch, accum_iter, is_static):
    class Joined:
        def __init__(self, model, **options):
            self.options = options

        def register_comm_hook(self, *_):
            raise Built(self)

    process = Process(torch.device("cpu"), world_size=2, local_world_size=2)
    monkeypatch.setattr(begin, "init_process", lambda *args, **options: process)
    monkeypatch.setattr(wrap, "DistributedDataParallel", Joined)
    with pytest.raises(Built) as built:
        main_pretrain.main(pretrain.command(photos, tmp_path / "out", "--accum_iter", accum_iter, "--batch_size", 4))
    (ddp,) = built.value.args
    assert ddp.options["static_graph"] is is_static
    assert ddp.options["gradient_as_bucket_view"]
    assert not ddp.broadcast_buffers


def reads_found_inf(optimizer):
    """Whether the optimizer skips a step by itself. The training loop takes this attribute as the sign."""
    return optimizer._step_supports_amp_scaling


def test_pre_training_s_optimizer_skips_without_being_asked_to_wait():
    args = main_pretrain.parse_args([])[1]
    assert reads_found_inf(main_pretrain.make_optimizer(mae_vit_micro_patch4(), args, lr=1e-3))


@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_fine_tuning_s_optimizers_skip_without_being_asked_to_wait(name, tmp_path):
    args = main_finetune.parse_args(finetune.command(tmp_path, tmp_path, "--optimizer", name))[1]
    optimizer = main_finetune.make_optimizer(vit_micro_patch4(), args, lr=1e-3)
    assert type(optimizer).__name__.lower() == name
    assert reads_found_inf(optimizer)
