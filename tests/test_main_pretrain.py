import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision.datasets import CIFAR10

import main_pretrain
from encoders.window_groups import WindowGrouper
from framework import Framework
from frameworks import models_greenmim_pr, registry
from scripts import pack_dataset
from tests.runs import assert_same_state, contents, finish, pretrain, reports, state
from tests.warm import run_by_torchrun
from util.data import images
from util.data import open as open_data
from util.data.images import FolderImages
from util.run import distributed, shard
from util.run import training as training_module
from util.run.checkpoint import newest_checkpoint
from util.run.loop import TrainLoop

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("model", "spared", "decayed"),
    [
        ("mae_vit_micro_patch4", set(), {"cls_token", "decoder.mask_token"}),
        ("mff_vit_micro_patch4", {"cls_token", "decoder.mask_token"}, {"proj_weights"}),
        ("simmim_vit_micro_patch4", {"cls_token"}, {"mask_token"}),
        (
            "greenmim_swin_micro_patch4_window4",
            {"decoder.mask_token", "layers.0.blocks.0.attn.relative_position_bias_table"},
            {"patch_embed.proj.weight"},
        ),
    ],
)
def test_the_optimizer_spares_what_the_release_spares_from_weight_decay(model, spared, decayed):
    args = main_pretrain.parse_args(["--model", model])[1]
    model = registry.build_model(vars(args))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = main_pretrain.make_optimizer(model, args, 1e-3).param_groups
    assert [group["betas"] for group in groups] == [(0.9, 0.95)] * 2
    assert [group["weight_decay"] for group in groups] == [0, args.weight_decay]
    found = [{names[id(p)] for p in group["params"]} for group in groups]
    assert spared <= found[0] and decayed <= found[1]
    assert sum(map(len, found)) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "arm",
    [
        "",
        "--throw_ratio 0",
        "--no-progressive --sampling random",
        "--precision bf16",
        "--input_size 32 48 --throw_ratio 0.6",
    ],
)
def test_a_run_leaves_what_it_promises(photos, tmp_path, capsys, arm):
    content = pretrain(photos, tmp_path / "out", *arm.split())
    assert content["meta"]["step"] == 6
    log = reports(tmp_path / "out")
    assert [r["step"] for r in log] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "lr", "grad_norm", "images_per_s", "data_share", "epoch"} <= log[0].keys()
    assert [("epoch_loss" in r) for r in log] == [False, False, True] * 2
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["lr"] == pytest.approx(1.5e-4 * 8 / 256) and settings["accum_iter"] == 1
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Images("reconstruction")] == [6]
    out = capsys.readouterr().out
    assert "epoch 1, step 6/6: loss" in out and re.search(r"loss +[\d.]+ in epoch 0, [\d.]+ in epoch 1\n", out)
    assert (tmp_path / "out" / "log.txt").read_text().count("epoch 0, step") == 3


@pytest.fixture(scope="module")
def teacher(photos, tmp_path_factory):
    """The folder of a short run of MAE, whose encoder is a teacher."""
    folder = tmp_path_factory.mktemp("teacher")
    pretrain(photos, folder, "--model", "mae_vit_micro_patch4", "--max_steps", 1)
    return folder


def test_localmim_trains_and_resumes(photos, tmp_path):
    flags = ["--model", "localmim_vit_micro_patch4"]
    expected = pretrain(photos, tmp_path / "whole", *flags)
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 4)
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags), expected)
    assert {"loss_hog1", "loss_hog2", "loss_hog4", "loss_hog8"} <= reports(tmp_path / "whole")[0].keys()


def test_greenmim_trains_on_plans_of_its_workers_and_resumes(photos, tmp_path, capsys, monkeypatch):
    """At 64 px windows are grouped; the groupings come with the batches."""
    counts, forward = [], models_greenmim_pr.GreenMIMSwin.forward
    monkeypatch.setattr(
        models_greenmim_pr.GreenMIMSwin, "forward", lambda *args: counts.append(len(args)) or forward(*args)
    )
    flags = ["--model", "greenmim_swin_micro_patch4_window4", "--input_size", 64]
    expected = pretrain(photos, tmp_path / "whole", *flags)
    assert set(counts) == {3 + 2}  # model, images, order; stage 1, shifted or not
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 4, "--num_workers", 1)
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags), expected)
    capsys.readouterr()
    flags += ["--batch_size", 4, "--accum_iter", 2]  # other images share their visible units
    assert "--batch_size was 8 and now is 4" in pretrain.refused(capsys, photos, tmp_path / "parts", *flags)
    pretrain(photos, tmp_path / "parts", *flags, "--allow_changes")
    assert "warning: --batch_size was 8 and now is 4" in capsys.readouterr().out


def test_tec_trains_and_resumes_with_its_teacher(photos, tmp_path, capsys, teacher):
    """The teacher is in no checkpoint; it may move, and another one is pointed out."""
    flags = ["--model", "tec_vit_micro_patch4", "--teacher", teacher]
    expected = pretrain(photos, tmp_path / "whole", *flags)
    said = capsys.readouterr().out
    assert "checkpoint-1.pth' (made as " in said and ", width 96, 4 blocks: 52 loaded" in said
    assert not any("teacher" in name for name in expected["model"]) and len(expected["meta"]["files"]["teacher"]) == 64
    assert {"loss_feature", "loss_attention"} <= reports(tmp_path / "whole")[0].keys()
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 4)
    moved = shutil.copytree(teacher, tmp_path / "moved")
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags[:-1], moved), expected)
    assert "warning" not in capsys.readouterr().out
    other = tmp_path / "other"
    pretrain(photos, other, "--model", "mae_vit_micro_patch4", "--max_steps", 1, "--seed", 1)
    assert "the teacher's weights have changed" in pretrain.refused(
        capsys, photos, tmp_path / "parts", *flags[:-1], other
    )


def test_the_same_batches_by_any_number_of_workers_from_a_folder_or_packed(photos, tmp_path):
    pack_dataset.main([str(photos), str(tmp_path / "packed"), "--workers", "1", "--shard_mb", "1"])
    first = pretrain(photos, tmp_path / "0", "--max_steps", 2)
    for workers, data in ((4, photos), (0, tmp_path / "packed"), (1, tmp_path / "packed")):
        assert_same_state(
            pretrain(data, tmp_path / f"{workers}-{data.name}", "--max_steps", 2, "--num_workers", workers), first
        )


def test_the_reference_loader_gives_nearly_the_same_run(photos, tmp_path):
    fast, reference = (
        pretrain(photos, tmp_path / name, "--max_steps", 1, "--loader", name) for name in ("fast", "reference")
    )
    losses = [reports(tmp_path / name)[0]["loss"] for name in ("fast", "reference")]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert fast["meta"]["settings"]["loader"] == "fast" and reference["meta"]["settings"]["loader"] == "reference"


@pytest.mark.parametrize(
    ("flags", "installed", "hint"),
    [
        (dict(num_workers=0), True, None),
        (dict(num_workers=1), True, "raise --num_workers, 1 now, to this process's 8 cores"),
        (dict(num_workers=7), False, "pip install simplejpeg"),
        (dict(num_workers=7, loader="reference"), True, "--loader reference is half as fast"),
        (dict(num_workers=7), True, "fewer and larger files by scripts/pack_dataset.py"),
    ],
)
def test_what_would_help_a_run_that_waits_for_its_data(photos, flags, installed, hint, monkeypatch):
    monkeypatch.setattr(open_data.decode, "simplejpeg", True if installed else None)
    images = FolderImages(photos / "train", use_pillow=flags.get("loader") == "reference")
    num_workers = flags["num_workers"]
    found = open_data.data_hint(images, num_workers, 8, "cpu")
    assert hint in found if hint else found == ""
    on_gpu = open_data.data_hint(images, num_workers, 8, "cuda")
    assert "GPU" not in found
    assert ("no worker loads ahead" in on_gpu) == (num_workers == 0)
    assert ("more cores per GPU" in on_gpu) == ("more cores" in found)


def test_loss_falls(photos, tmp_path):
    pretrain(photos, tmp_path / "out", "--epochs", 12, "--lr", 2e-3)
    losses = [r["epoch_loss"] for r in reports(tmp_path / "out") if "epoch_loss" in r]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.fault("F3", "other numbers of workers at each start", "exact")
@pytest.mark.fault("F2", "stops at an epoch's end and one step from it", "exact")
@pytest.mark.fault("F1", "a stop in mid-epoch", "exact")
@pytest.mark.parametrize("stops", [[1, 3], [2, 4]])
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(photos, undisturbed_run, tmp_path, stops):
    """Stopped in mid-epoch and at its end, resumed with other workers: weights, moments, losses and logs."""
    folders = undisturbed_run(pretrain, photos, "--print_freq", 2), tmp_path / "parts"
    for stop, workers in zip(stops, (2, 1), strict=True):
        pretrain(photos, tmp_path / "parts", "--print_freq", 2, "--max_steps", stop, "--num_workers", workers)
    assert_same_state(pretrain(photos, tmp_path / "parts", "--print_freq", 2), state(folders[0]))
    keys = ("step", "loss", "epoch_loss", "grad_norm", "lr")
    whole, parts = ([{k: r.get(k) for k in keys} for r in reports(folder)] for folder in folders)
    assert parts == whole and [r["step"] for r in whole] == [2, 3, 4, 6]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_loses_no_step(photos, undisturbed_run, tmp_path, name, before_step, capsys):
    """Sent in the midst of the second step, to the trainer and its worker: saved after it, and resumed bit for bit."""
    expected = state(undisturbed_run(pretrain, photos))

    def interrupt():
        for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
            os.kill(pid, getattr(signal, name))

    before_step(1, interrupt)
    flags = pretrain.command(photos, tmp_path / "parts", "--num_workers", 1)
    if name == "SIGINT":  # which means more than this run
        with pytest.raises(KeyboardInterrupt):
            main_pretrain.main(flags)
    else:
        assert main_pretrain.main(flags) is False
    assert state(tmp_path / "parts")["meta"]["step"] == 2
    assert f"stopped by {name} after step 2 of 6; the same command goes on from there" in capsys.readouterr().out
    assert_same_state(pretrain(photos, tmp_path / "parts"), expected)
    assert [r["step"] for r in reports(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]


def test_a_signal_to_a_run_at_its_end_is_noted_alone(photos, tmp_path, monkeypatch):
    """What the signal meant before, a requeue for example, is not for a run that has done all its steps."""
    heard, finish = [], training_module.finish_run
    previous = signal.signal(signal.SIGUSR2, lambda *_: heard.append("requeue"))
    monkeypatch.setattr(training_module, "finish_run", lambda *a: (os.kill(os.getpid(), signal.SIGUSR2), finish(*a)))
    try:
        assert main_pretrain.main(pretrain.command(photos, tmp_path / "out", "--epochs", 1)) is True and not heard
        os.kill(os.getpid(), signal.SIGUSR2)  # while the program ends
        assert not heard
    finally:
        signal.signal(signal.SIGUSR2, previous)


@pytest.mark.fault("F12", "a signal to one process of two", "both stop after the same step; 0 lost")
def test_a_signal_to_one_of_two_processes_stops_both_and_loses_no_step(photos, tmp_path):
    """Through torchrun, one signal to a rank: no rank waits for the other, and the run ends as the undisturbed one."""
    flags = ("--save_steps", 100)
    out = finish(photos, tmp_path / "run", *flags, fault=("signal", 3, "1", "-"), code=1)  # of torchrun
    stopped = 5  # rank 1 gets the signal in the fourth step; all ranks know it one step later
    assert f"after step {stopped} of 9; the same command goes on from there" in out
    assert newest_checkpoint(tmp_path / "run")[0].name == f"checkpoint-{stopped}.pth"
    assert [r["step"] for r in reports(tmp_path / "run")] == list(range(1, stopped + 1))


def test_a_finished_run_says_so_again(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "out")
    capsys.readouterr()
    before = sorted(os.listdir(tmp_path / "out"))
    pretrain(photos, tmp_path / "out")
    assert "in epoch 0, " in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "out")) == before and len(reports(tmp_path / "out")) == 6


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({0: 0.7, 1: 0.6, 2: 0.5}, "0.7000 in epoch 0, 0.5000 in epoch 2"),
        ({0: None, 1: 0.6, 2: 0.5, 3: None}, "0.6000 in epoch 1, 0.5000 in epoch 2"),  # None: no step was finite
        ({4: 0.6, 5: 0.5}, "0.6000 in epoch 4, 0.5000 in epoch 5"),  # it began at --resume PATH
        ({4: 0.6}, "0.6000 in epoch 4"),
        ({0: None}, None),
    ],
)
def test_the_summary_names_the_epochs_of_the_losses(losses, said):
    history = [{"step": 3, "loss": 1.0}]
    history += [{"step": 3 * e + 3, "epoch": e, "loss": 1.0, "epoch_loss": loss} for e, loss in losses.items()]
    run = argparse.Namespace(log=argparse.Namespace(history=lambda: history), progress=lambda: "for 18 steps")
    args = argparse.Namespace(model="a", throw_ratio=0.5)
    _, *lines = main_pretrain.summary_of_run(args, run)
    assert lines == ([] if said is None else [f"  loss         {said}"])


def test_divergence_ends_with_exit_code_3(photos, tmp_path, capsys, monkeypatch):
    def diverge(*_):
        raise FloatingPointError("not finite")

    monkeypatch.setattr(TrainLoop, "begin_step", diverge)
    assert "error: not finite" in pretrain.refused(capsys, photos, tmp_path / "out", code=3)


def test_total_batch_size_derives_accumulation(photos, tmp_path):
    accumulated = pretrain(photos, tmp_path / "a", "--batch_size", 4, "--total_batch_size", 8)
    whole = pretrain(photos, tmp_path / "b", "--batch_size", 8)
    assert accumulated["meta"]["settings"]["accum_iter"] == 2
    for name, value in whole["model"].items():
        torch.testing.assert_close(accumulated["model"][name], value, rtol=1e-3, atol=1e-5)


def test_a_compiled_run_has_all_its_graphs_before_the_first_step(photos, tmp_path, monkeypatch):
    """GreenMIM's planned shapes depend on the mask; and what came before leaves no trace."""
    graphs, counts, shapes = [], [], set()
    compile_, next_batch = Framework.compile, TrainLoop.next_batch
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def compile_and_count(model, **options):
        compile_(model, backend=lambda graph, inputs: graphs.append(graph) or aot_eager(graph, inputs), **options)

    def take_and_count(loop, batches, micro):
        batch = next_batch(loop, batches, micro)
        if not isinstance(batches, type(iter([]))):  # which the shapes are compiled with
            counts.append(len(graphs))
            shapes.add(tuple(len(grouping) for grouping in batch[3:]))
        return batch

    # Masks that need the larger shape are rare: here half of them get it.
    group = lambda grouper, units: grouper.group(units, grouper.ceilings if units[0] % 2 else grouper.capacities)  # noqa: E731
    monkeypatch.setattr(WindowGrouper, "__call__", group)
    flags = ["--model", "greenmim_swin_micro_patch4_window4", "--input_size", 64]
    eager = pretrain(photos, tmp_path / "eager", *flags)
    monkeypatch.setattr(Framework, "compile", compile_and_count)
    monkeypatch.setattr(TrainLoop, "next_batch", take_and_count)
    compiled = pretrain(photos, tmp_path / "compiled", *flags, "--compile")
    assert len(shapes) == 2 and counts == [2] * 6 and len(graphs) == 2
    for name, value in eager["model"].items():
        torch.testing.assert_close(compiled["model"][name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_the_attention_kernel_is_a_run_s_choice(photos, tmp_path, monkeypatch, capsys):
    asked, prefer = [], shard.attention.prefer
    monkeypatch.setattr(shard.attention, "prefer", lambda name: (asked.append(name), prefer(name)))
    pretrain(photos, tmp_path / "out", "--max_steps", 1, "--attention", "math")
    pretrain(photos, tmp_path / "out", "--max_steps", 2)
    assert asked == ["math", "auto"]
    assert "note: --attention was math and now is auto: results agree to rounding" in capsys.readouterr().out


def test_torchrun_with_two_processes_is_the_one_process_run(photos, tmp_path):
    """The same global batches, the same losses, one writer; resumed at the exact step."""
    flags = pretrain.command(photos, tmp_path / "two", "--batch_size", 4, "--print_freq", 5)
    code, out = run_by_torchrun("main_pretrain.py", *flags, "--max_steps", 4)
    assert code == 0, out[-3000:]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "main_pretrain.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = dict(capture_output=True, text=True, timeout=240)
    done = subprocess.run([*program, *flags], cwd=ROOT, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    for said in ("2 processes on cpu in fp32", "8 = 4 x 2 processes x 1 accumulated", "at step 4"):
        assert said in done.stdout
    pretrain(photos, tmp_path / "one", "--print_freq", 5)
    ours, theirs = reports(tmp_path / "two"), reports(tmp_path / "one")
    assert [r["step"] for r in ours] == [3, 5, 6]  # the report of step 5 spans the stop after step 4
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-4)
    assert ours[2]["epoch_loss"] == pytest.approx(theirs[2]["epoch_loss"], rel=1e-4)


TEC = "--model tec_vit_micro_patch4"


@pytest.mark.fault(
    "F33", "data smaller than a batch, and other errors of the user", "exit code 2 before the first step, one paragraph"
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data_path {tmp}/nowhere", "nowhere' is not a folder; expected are images in class folders"),
        ("--data_path {tmp}/empty", "empty' holds no image"),
        ("--data_path {tmp}/hollow", "no valid file for the classes dog"),
        ("--data_path {tmp}/fake --max_bad_fraction 0", "1.jpg' is not a readable image"),
        ("--data_path {tmp}/fake/1.jpg", "1.jpg' is not a folder"),
        ("--dataset cifar10 --data_path {tmp}/empty", "cifar10 is not in --data_path"),
        ("--input_size 30", "30 x 30 is not divisible by --patch_size 4; the nearest size that is: 32 x 32"),
        ("--input_size 32 32 32", "--input_size takes one or two numbers, got [32, 32, 32]"),
        ("--patch_size 0", "not divisible by --patch_size 0"),
        ("--throw_ratio 0.75", "got --throw_ratio 0.75 and --mask_ratio 0.75"),
        ("--mask_ratio 1.5", "got --throw_ratio 0.5 and --mask_ratio 1.5"),
        ("--mask_ratio 0.99", "leaves none of 64 tokens visible: lower it"),
        ("--input_size 4", "leaves none of 1 token visible: lower it, or use larger images, smaller patches or "),
        ("--model mae_vit_giant", "invalid choice: 'mae_vit_giant'"),
        ("--sampling grid", "invalid choice: 'grid'"),
        ("--recipe prmim50_base", "unknown recipe 'prmim50_base'; close to it: prmim50_vit_base"),
        ("--kernel_size 4", "kernel_size must be odd"),
        ("--batch_size 0", "--batch_size must be at least 1, got 0"),
        ("--total_batch_size 0", "--total_batch_size must be at least 1, got 0"),
        ("--accum_iter -1", "--accum_iter must be at least 1, got -1"),
        ("--max_steps 0", "--max_steps must be at least 1, got 0"),
        ("--num_workers -1", "--num_workers must be at least 0, got -1"),
        ("--batch_size 25", "24 images, fewer than one total batch of 25"),
        (
            "--total_batch_size 12",
            "a total batch of 12 cannot be split into --batch_size 8 on 1 process: try --batch_size 6",
        ),
        ("--total_batch_size 16 --accum_iter 3", "--accum_iter 3, but a total batch of 16"),
        ("--warmup_epochs 3", "--warmup_epochs 3.0 must lie between 0 and --epochs 2"),
        ("--crop_scale 0 1", "--crop_scale must be two areas"),
        ("--device cuda", "torch sees no GPU"),
        ("--resume {tmp}/nowhere.pth", "no checkpoint at"),
        ("--output_dir {tmp}/fake/1.jpg", "--output_dir"),
        ("--epoch 3 --frobnicate", "unrecognized arguments: --frobnicate"),
        ("--decoder_order true", "--decoder_order belongs to greenmim models"),
        (TEC, "--model tec_vit_micro_patch4 needs --teacher: the pre-trained ViT"),
        (f"{TEC} --teacher nowhere.pth", "'nowhere.pth' is neither a file nor the name of a timm"),
        (
            f"{TEC} --teacher {{teacher}} --patch_size 8",
            "cuts patches of 4 px, the student of 8: tokens must be the same",
        ),
        (f"{TEC} --teacher {{teacher}} --att_topk 65", "att_topk must be from 1 to 64"),
        ("--teacher {teacher}", "--teacher belongs to tec models, but --model is mae_vit_micro_patch4"),
    ],
)
def test_user_errors_are_one_paragraph_before_the_first_step(
    photos, teacher, tmp_path, capsys, monkeypatch, flags, message
):
    class NoNetwork(CIFAR10):
        def download(self):
            raise OSError("no route to host")

    monkeypatch.replace_in(images, "torchvision.datasets.CIFAR10", NoNetwork)
    monkeypatch.replace_in(distributed, "torch.cuda.is_available", lambda: False)
    for name in ("empty", "hollow/cat", "hollow/dog", "fake"):
        (tmp_path / name).mkdir(parents=True)
    picture = next((photos / "train" / "cat").iterdir()).read_bytes()
    (tmp_path / "hollow" / "cat" / "0.jpg").write_bytes(picture)
    (tmp_path / "fake" / "0.jpg").write_bytes(picture)
    (tmp_path / "fake" / "1.jpg").write_text("hello")
    words = [word.format(tmp=tmp_path, teacher=teacher) for word in flags.split()]
    assert message in pretrain.refused(capsys, photos, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("F39", "a checkpoint of another model", "exit code 4, with the keys and shapes")
def test_a_checkpoint_of_another_model_names_the_keys(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "out", "--max_steps", 1)
    assert "--patch_size was 4 and now is 8" in pretrain.refused(capsys, photos, tmp_path / "out", "--patch_size", 8)
    message = pretrain.refused(capsys, photos, tmp_path / "out", "--patch_size", 8, "--allow_changes", code=4)
    assert "do not fit this MaskedAutoencoderViT" in message and "patch_embed.proj.weight is [96, 3, 4, 4]" in message
    torch.save({"model": contents(tmp_path / "out" / "checkpoint-1.pth")["model"]}, tmp_path / "weights.pth")
    assert "holds weights but no run to resume" in pretrain.refused(
        capsys, photos, tmp_path / "b", "--resume", tmp_path / "weights.pth", code=4
    )


@pytest.mark.parametrize("names", [["RANK"], ["RANK", "WORLD_SIZE", "LOCAL_RANK"], ["WORLD_SIZE"]])
def test_half_an_environment_is_named(photos, tmp_path, capsys, monkeypatch, names):
    for name in names:
        monkeypatch.setenv(name, "1")
    assert "start with torchrun, or unset them" in pretrain.refused(capsys, photos, tmp_path / "out")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_the_gpu(photos, tmp_path, precision):
    content = pretrain(
        photos, tmp_path / "out", "--device", "cuda", "--precision", precision, "--epochs", 4, "--lr", 1e-3
    )
    losses = [r["epoch_loss"] for r in reports(tmp_path / "out") if "epoch_loss" in r]
    assert content["meta"]["step"] == 12 and losses[-1] < losses[0]
