"""What a run sets up for speed alone, which no result tells."""

import pytest
import torch
from torch import nn

import main_finetune
import main_pretrain
from models_vit import vit_micro_patch4
from tests import test_main_finetune
from tests.test_main_pretrain import command, run
from util.run import train_run
from util.run.cli import parse_with_recipe
from util.run.distributed import Process
from util.run.logging import RunLog


def set_up(photos, output_dir, monkeypatch, *flags):
    """A pre-training run that is ready to train, and never will: without a log, whose writer would live on."""
    monkeypatch.setattr(train_run, "RunLog", lambda *args, enabled: RunLog(*args, enabled=False))
    args = parse_with_recipe(main_pretrain.get_args_parser(), main_pretrain.RECIPES, command(photos, output_dir, *flags))
    return main_pretrain.PretrainRun(args)


@pytest.mark.parametrize("flag", ["--compile", "--no-compile"])
def test_a_model_is_compiled_as_a_whole_for_one_shape(photos, tmp_path, monkeypatch, flag):
    calls = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *args, **options: calls.append((type(self).__name__, args, options)))
    run(photos, tmp_path / "out", flag, "--max_steps", 1, "--picture_every", 0)
    expected = [("MaskedAutoencoderViT", (), dict(fullgraph=True, dynamic=False))]
    assert calls == (expected if flag == "--compile" else [])


class Built(Exception):
    """Stops a run where it would join the other processes."""


@pytest.mark.parametrize(("accum_iter", "static"), [(1, True), (2, False)])
def test_ddp_shares_its_buckets_and_knows_the_graph_unless_passes_go_unreduced(photos, tmp_path, monkeypatch, accum_iter, static):
    def build(model, **options):
        raise Built(options)

    process = Process(torch.device("cpu"), world_size=2, local_world_size=2)
    monkeypatch.setattr(train_run.distributed, "init_process", lambda *args: process)
    monkeypatch.setattr(train_run, "DistributedDataParallel", build)
    with pytest.raises(Built) as built:
        set_up(photos, tmp_path / "out", monkeypatch, "--accum_iter", accum_iter, "--batch_size", 4)
    expected = dict(gradient_as_bucket_view=True, static_graph=static, broadcast_buffers=False)
    assert built.value.args == (expected,)


def test_optimizers_skip_without_being_asked_to_wait(photos, tmp_path, monkeypatch):
    """What the engine takes for the sign of an optimizer that looks at `found_inf` by itself."""
    ready = set_up(photos, tmp_path / "out", monkeypatch)
    assert ready.engine.optimizer is ready.optimizer and ready.optimizer._step_supports_amp_scaling
    for name, expected in (("adamw", torch.optim.AdamW), ("lars", main_finetune.LARS)):
        flags = test_main_finetune.command(photos, tmp_path / name, "--optimizer", name)
        optimizer = main_finetune.make_optimizer(vit_micro_patch4(), main_finetune.parse_args(flags)[1])
        assert type(optimizer) is expected and optimizer._step_supports_amp_scaling
