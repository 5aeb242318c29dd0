"""Steps that were not finite are repeated from one file: the same losses, and the injected cause by its name."""

import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import main_pretrain
from frameworks.registry import build_model
from scripts import replay_step
from scripts.replay_step import Finder
from tests.runs import finetune, finish, pretrain, refused, reports
from util.run.train import saving
from util.run.train.loop import TrainLoop

QUIET = ("--picture_every", 0)


def replayed(capsys, *flags):
    """What the program prints."""
    capsys.readouterr()
    replay_step.main([str(flag) for flag in (*flags, "--device", "cpu")])
    return capsys.readouterr().out


def losses_in(out):
    return [float(loss) for loss in re.findall(r"^  loss \w+ (\S+)$", out, re.MULTILINE)]


VARIANTS = {
    "plain": (),
    "bf16": ("--precision", "bf16"),
    "accumulated": ("--batch_size", 4, "--accum_iter", 2),
    "invalid pixels": ("--nodata", 0),
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_a_finite_step_has_the_loss_bits_of_the_run(photos, tmp_path, capsys, flags):
    """Of the step after the checkpoint of step 3, with drop path, whose draws are seeded."""
    pretrain(photos, tmp_path, *QUIET, "--drop_path", 0.5, *flags)
    out = replayed(capsys, tmp_path / "checkpoint-3.pth")
    assert losses_in(out)[0] == reports(tmp_path)[3]["loss"]
    assert len(losses_in(out)) == 1 + ("bf16" in flags)
    assert "not finite" not in out
    assert len(re.findall(rf"{photos}/train/\w+/\d+\.jpg", out.partition("fp32:")[2])) == 8


def test_a_step_of_two_processes_is_repeated_in_one(photos, tmp_path, capsys):
    finish(photos, tmp_path, "--save_steps", 2)
    out = replayed(capsys, tmp_path / "checkpoint-8.pth")
    assert losses_in(out) == [pytest.approx(reports(tmp_path)[8]["loss"], rel=1e-6)]
    assert len(set(re.findall(rf"{photos}/train/\w+/\d+\.jpg", out))) == 8
    assert "process 1, micro-batch 0: " in out


def spoil_weights(monkeypatch, step, number_of_parameter):
    """Makes a weight NaN before this step of the runs that follow."""
    begin_step = TrainLoop.begin_step

    def begin(loop, number):
        if number == step:
            with torch.no_grad():
                loop.parameters[number_of_parameter].view(-1)[0] = torch.nan
        begin_step(loop, number)

    monkeypatch.setattr(TrainLoop, "begin_step", begin)


@pytest.mark.parametrize("print_freq", [1, 100])
def test_an_injected_weight_is_named(photos, tmp_path, capsys, monkeypatch, print_freq):
    """The file is written at the report after the step, or when the run ends."""
    args = main_pretrain.get_args_parser().parse_args(["--model", "mae_vit_micro_patch4"])
    model = build_model(vars(args))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    spoil_weights(monkeypatch, 4, names.index("blocks.2.attn.qkv.weight"))
    flags = (*QUIET, "--print_freq", print_freq, "--save_steps", 100)
    message = pretrain.refused(capsys, photos, tmp_path, *flags, code=3)
    assert "not finite" in message
    assert [path.name for path in tmp_path.glob("bad-step-*")] == ["bad-step-4.pth"]
    path = tmp_path / "bad-step-4.pth"
    command = f"scripts/replay_step.py {shlex.quote(str(path))}"
    assert f"step 5 was not finite: {command} repeats it" in (tmp_path / "log.txt").read_text()

    out = replayed(capsys, path)
    assert "weights that are not finite before the step: blocks.2.attn.qkv.weight\n" in out
    assert "first output that is not finite: blocks.2.attn.qkv, of all images\n" in out
    assert "first gradient that is not finite: " in out
    assert losses_in(out) == [pytest.approx(torch.nan, nan_ok=True)]


def test_an_injected_image_is_named(tmp_path, capsys):
    """A float that is finite, but whose square is not."""
    folder = tmp_path / "data" / "train" / "a"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(24):
        array = rng.random((32, 32, 3), dtype=np.float32)
        if i == 13:
            array += 1e30
        np.save(folder / f"{i}.npy", array)
    statistics = ("--mean", 0.5, 0.5, 0.5, "--std", 0.3, 0.3, 0.3)
    pretrain(tmp_path / "data", tmp_path / "out", *QUIET, *statistics, "--epochs", 1, "--warmup_epochs", 0, "--seed", 1)
    [bad] = [report["step"] - 1 for report in reports(tmp_path / "out") if report["skipped_steps"]]
    out = replayed(capsys, tmp_path / "out" / f"bad-step-{bad}.pth")
    [line] = re.findall("first output that is not finite: .*", out)
    assert line.endswith(f", of {folder / '13.npy'}")
    assert "weights" not in out


@pytest.mark.parametrize(("precision", "files"), [("bf16", ["bad-step-2.pth"]), ("fp16", [])])
def test_a_single_step_is_kept_at_its_report_but_not_what_a_loss_scale_tries(
    photos, tmp_path, monkeypatch, precision, files
):
    scaled_loss = TrainLoop.scaled_loss

    def spoilt_loss(loop, losses, micro):
        if loop.step in (2, 4):
            losses = {name: loss * torch.nan for name, loss in losses.items()}
        return scaled_loss(loop, losses, micro)

    monkeypatch.setattr(TrainLoop, "scaled_loss", spoilt_loss)
    pretrain(photos, tmp_path, *QUIET, "--precision", precision)
    assert [path.name for path in tmp_path.glob("bad-step-*")] == files  # the first one of a start


class NaNBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


class Broken(nn.Module):
    def forward(self, x):
        return NaNBackward.apply(x)


def test_a_gradient_alone_may_be_the_first_that_is_not_finite():
    model = nn.Sequential(nn.Linear(2, 2), Broken(), nn.Linear(2, 2))
    with Finder(model, 4) as finder:
        model(torch.ones(4, 2)).sum().backward()
    assert finder.output is None
    assert finder.gradient in ("0.weight", "0.bias")
    assert not model[0]._forward_hooks


def test_a_failed_write_is_a_warning(photos, tmp_path, capsys, monkeypatch):
    def save(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.replace_in(saving, "torch.save", save)
    spoil_weights(monkeypatch, 4, 0)
    pretrain.refused(capsys, photos, tmp_path, *QUIET, "--save_steps", 100, code=3)
    assert "warning: bad-step-4.pth could not be written" in (tmp_path / "log.txt").read_text()
    assert not list(tmp_path.glob("*bad-step*"))


def test_what_cannot_be_repeated_is_refused(photos, labelled, tmp_path, capsys):
    pretrain(photos, tmp_path / "run", *QUIET, "--max_steps", 1)
    path = tmp_path / "run" / "checkpoint-1.pth"
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    (other / "train" / "cat" / "3.jpg").unlink()
    message = refused(capsys, replay_step.main, path, "--data_path", other, "--device", "cpu")
    assert "the run had 24 images" in message
    assert f"{str(other)!r} holds others: give --data_path" in message
    finetune(labelled, tmp_path / "tuned", "--max_steps", 1)
    message = refused(capsys, replay_step.main, tmp_path / "tuned" / "checkpoint-1.pth")
    assert "is a fine-tuned classifier" in message
