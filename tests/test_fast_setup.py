"""What a run sets up for speed alone, which no result tells."""

import pytest
import torch

import main_finetune
import main_pretrain
from framework import Framework
from models_mae_pr import mae_vit_micro_patch4
from models_vit import vit_micro_patch4
from tests.runs import finetune, pretrain
from util.run import distributed, shard
from util.run.distributed import Process


@pytest.mark.parametrize("flag", ["--compile", "--no-compile"])
def test_a_model_is_compiled_as_a_whole_for_one_shape(photos, tmp_path, monkeypatch, flag):
    calls = []
    monkeypatch.setattr(
        Framework, "compile", lambda self, *args, **options: calls.append((type(self).__name__, args, options))
    )
    pretrain(photos, tmp_path / "out", flag, "--max_steps", 1, "--picture_every", 0)
    expected = [("MaskedAutoencoderViT", (), dict(fullgraph=True, dynamic=False))]
    assert calls == (expected if flag == "--compile" else [])


class Built(Exception):
    """Stops a run where it would join the other processes."""


@pytest.mark.parametrize(("accum_iter", "static"), [(1, True), (2, False)])
def test_ddp_shares_its_buckets_and_knows_the_graph_unless_passes_go_unreduced(
    photos, tmp_path, monkeypatch, accum_iter, static
):
    def build(model, **options):
        raise Built(options)

    process = Process(torch.device("cpu"), world_size=2, local_world_size=2)
    monkeypatch.setattr(distributed, "init_process", lambda *args: process)
    monkeypatch.setattr(shard, "DistributedDataParallel", build)
    with pytest.raises(Built) as built:
        main_pretrain.main(pretrain.command(photos, tmp_path / "out", "--accum_iter", accum_iter, "--batch_size", 4))
    expected = dict(gradient_as_bucket_view=True, static_graph=static, broadcast_buffers=False)
    assert built.value.args == (expected,)


def test_optimizers_skip_without_being_asked_to_wait(photos, tmp_path):
    """The loop takes this attribute as the sign of an optimizer that reads `found_inf` by itself."""
    args = main_pretrain.parse_args([])[1]
    assert main_pretrain.make_optimizer(mae_vit_micro_patch4(), args, lr=1e-3)._step_supports_amp_scaling
    for name, expected in (("adamw", torch.optim.AdamW), ("lars", main_finetune.LARS)):
        flags = finetune.command(photos, tmp_path / name, "--optimizer", name)
        optimizer = main_finetune.make_optimizer(vit_micro_patch4(), main_finetune.parse_args(flags)[1], lr=1e-3)
        assert type(optimizer) is expected and optimizer._step_supports_amp_scaling
