import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close

import main_pretrain
from frameworks import models_greenmim_pr, registry
from frameworks.teacher import Teacher
from frameworks.window_groups import WindowGrouper
from prmim import TokenOrderSampler, addressed_noise
from tests.runs import assert_same_state, finish, losses, pretrain, reports, reports_without_times, state
from tests.warm import run_by_torchrun
from util.data.datasets import AddressedDataset, permutation
from util.data.open import open_images
from util.data.transforms import RandomResizedCropFlip
from util.run.files.checkpoint import newest_checkpoint
from util.run.processes import distributed
from util.run.start.plan import Plan
from util.run.train import training as training_module
from util.run.train import wrap
from util.run.train.loop import TrainLoop

ROOT = Path(__file__).resolve().parents[1]
GREENMIM = ("--model", "greenmim_swin_micro_patch4_window4", "--input_size", 64)


@pytest.mark.parametrize(
    ("model", "spared", "decayed"),
    [
        ("mae_vit_micro_patch4", [], ["cls_token", "decoder.mask_token"]),
        ("mff_vit_micro_patch4", ["cls_token", "decoder.mask_token"], ["proj_weights"]),
        ("simmim_vit_micro_patch4", ["cls_token"], ["mask_token"]),
        (
            "greenmim_swin_micro_patch4_window4",
            ["decoder.mask_token", "layers.0.blocks.0.attn.relative_position_bias_table"],
            ["patch_embed.proj.weight"],
        ),
    ],
)
def test_the_optimizer_spares_what_the_release_spares_from_weight_decay(model, spared, decayed):
    _, args = main_pretrain.parse_args(["--model", model])
    model = registry.build_model(vars(args))
    decay_of = {}
    for group in main_pretrain.make_optimizer(model, args, 1e-3).param_groups:
        assert group["betas"] == (0.9, 0.95)
        for parameter in group["params"]:
            decay_of[parameter] = group["weight_decay"]
    parameters = dict(model.named_parameters())
    assert decay_of.keys() == {parameter for parameter in parameters.values() if parameter.requires_grad}
    for name in spared:
        assert decay_of[parameters[name]] == 0, name
    for name in decayed:
        assert decay_of[parameters[name]] == args.weight_decay, name


@pytest.mark.parametrize("seed", [0, 3])
def test_first_weights_images_and_their_tokens_follow_from_the_seed(photos, tmp_path, monkeypatch, seed):
    found = []

    def train_steps(model, batches, steps, loop):
        found.extend([model.state_dict(), *next(batches)])
        raise KeyboardInterrupt

    monkeypatch.setattr(main_pretrain, "train_one_epoch", train_steps)
    with pytest.raises(KeyboardInterrupt):
        pretrain(photos, tmp_path, "--seed", seed)
    weights, imgs, _, ids_shuffle = found
    torch.manual_seed(seed)
    expected = registry.MODELS["mae_vit_micro_patch4"]()
    assert_close(weights, expected.state_dict(), rtol=0, atol=0)
    indices = permutation(seed, 0, 24)[:8]
    dataset = AddressedDataset(open_images("folder", photos), RandomResizedCropFlip(32, seed))
    assert torch.equal(imgs, torch.stack([dataset[0, i][0] for i in indices]))
    noise = addressed_noise(seed, 0, indices, 64)
    assert ids_shuffle.tolist() == TokenOrderSampler(8, expected.counts)(noise).tolist()


def test_a_run_leaves_what_it_promises(photos, tmp_path, capsys):
    out = tmp_path / "out"
    content = pretrain(photos, out)
    assert content["meta"]["step"] == 6
    log = reports(out)
    assert [report["step"] for report in log] == [1, 2, 3, 4, 5, 6]
    assert [report["step"] for report in log if "epoch_loss" in report] == [3, 6]
    assert {"loss", "lr", "grad_norm", "images_per_s", "data_share", "epoch"} <= log[0].keys()
    settings = json.loads((out / "settings.json").read_text())
    assert settings["lr"] == pytest.approx(1.5e-4 * 8 / 256)
    assert settings["accum_iter"] == 1
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Images("reconstruction")] == [6]
    assert (out / "log.txt").read_text().count("epoch 0, step") == 3
    summary = r"loss +[\d.]+ in epoch 0, [\d.]+ in epoch 1\n"
    assert re.search(summary, capsys.readouterr().out)
    # A finished run says so again.
    files = sorted(os.listdir(out))
    pretrain(photos, out)
    assert re.search(summary, capsys.readouterr().out)
    assert sorted(os.listdir(out)) == files
    assert len(reports(out)) == 6


def test_another_arm_of_the_method_runs(photos, tmp_path):
    flags = "--input_size 32 48 --throw_ratio 0.6 --no-progressive --sampling random --precision bf16"
    pretrain(photos, tmp_path, *flags.split(), "--max_steps", 3)
    losses = [report["loss"] for report in reports(tmp_path)]
    assert len(losses) == 3
    assert None not in losses  # of a step that is not finite


@pytest.fixture(scope="module")
def teacher(photos, tmp_path_factory):
    """The folder of a short run of MAE, whose encoder is a teacher."""
    folder = tmp_path_factory.mktemp("teacher")
    pretrain(photos, folder, "--model", "mae_vit_micro_patch4", "--max_steps", 1)
    return folder


def test_greenmim_trains_on_plans_of_its_workers_and_resumes(photos, tmp_path, monkeypatch):
    """At 64 px windows are grouped; the groupings come with the batches."""
    forward = models_greenmim_pr.GreenMIMSwin.forward
    num_arguments = set()

    def count(*arguments):
        num_arguments.add(len(arguments))
        return forward(*arguments)

    monkeypatch.setattr(models_greenmim_pr.GreenMIMSwin, "forward", count)
    expected = pretrain(photos, tmp_path / "whole", *GREENMIM)
    assert num_arguments == {3 + 2}  # model, images, order; stage 1, shifted or not
    pretrain(photos, tmp_path / "parts", *GREENMIM, "--max_steps", 4, "--num_workers", 1)
    assert_same_state(pretrain(photos, tmp_path / "parts", *GREENMIM), expected)


def test_the_micro_batch_of_greenmim_changes_results(photos, tmp_path, capsys):
    """Its images share their visible units."""
    pretrain(photos, tmp_path, *GREENMIM, "--max_steps", 1)
    flags = (*GREENMIM, "--max_steps", 2, "--batch_size", 4, "--accum_iter", 2)
    assert "--batch_size was 8 and now is 4" in pretrain.refused(capsys, photos, tmp_path, *flags)
    pretrain(photos, tmp_path, *flags, "--allow_changes")
    assert "warning: --batch_size was 8 and now is 4" in capsys.readouterr().out


def test_crops_of_images_that_are_read_once_resume_in_the_middle_of_a_group_bit_for_bit(photos, tmp_path, capsys):
    """7 epochs of 3 steps: groups of 4, 2 and 1."""
    flags = ("--repeat_aug", 4, "--epochs", 7, "--batch_size", 4, "--accum_iter", 2)
    expected = pretrain(photos, tmp_path / "whole", *flags)
    for last, workers in ((5, 2), (14, 1), (21, 2)):
        parts = pretrain(photos, tmp_path / "parts", *flags, "--max_steps", last, "--num_workers", workers)
    assert_same_state(parts, expected)
    plain = pretrain(photos, tmp_path / "plain", *flags[2:])
    assert not torch.equal(plain["model"]["patch_embed.proj.weight"], expected["model"]["patch_embed.proj.weight"])
    assert "--repeat_aug" in pretrain.refused(capsys, photos, tmp_path / "parts", *flags, "--repeat_aug", 2)
    assert "--repeat_aug 3" in pretrain.refused(capsys, photos, tmp_path / "new", *flags, "--repeat_aug", 3)


def test_tec_trains_and_resumes_with_its_teacher(photos, tmp_path, capsys, teacher):
    """The teacher is in no checkpoint; it may move, and another one is pointed out."""
    flags = ("--model", "tec_vit_micro_patch4", "--teacher")
    expected = pretrain(photos, tmp_path / "whole", *flags, teacher)
    assert not any("teacher" in name for name in expected["model"])
    assert len(expected["meta"]["files"]["teacher"]) == 64
    assert {"loss_feature", "loss_attention"} <= reports(tmp_path / "whole")[0].keys()
    pretrain(photos, tmp_path / "parts", *flags, teacher, "--max_steps", 4)
    capsys.readouterr()
    moved = shutil.copytree(teacher, tmp_path / "moved")
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags, moved), expected)
    assert "warning" not in capsys.readouterr().out
    other = tmp_path / "other"
    pretrain(photos, other, "--max_steps", 1, "--seed", 1)
    message = pretrain.refused(capsys, photos, tmp_path / "parts", *flags, other)
    assert "the teacher's weights have changed" in message


def test_a_teacher_is_told_how_its_images_are_normalised(photos, tmp_path, monkeypatch, teacher):
    told = []
    monkeypatch.setattr(Teacher, "use_statistics", lambda model, *statistics: told.append(statistics))
    flags = ("--model", "tec_vit_micro_patch4", "--teacher", teacher, "--mean", 0.1, 0.2, 0.3, "--max_steps", 1)
    settings = pretrain(photos, tmp_path, *flags)["meta"]["settings"]
    assert told[-1] == (settings["mean"], settings["std"])


def test_the_reference_loader_gives_nearly_the_same_run(photos, tmp_path):
    losses = {}
    for loader in ("fast", "reference"):
        content = pretrain(photos, tmp_path / loader, "--max_steps", 1, "--loader", loader)
        assert content["meta"]["settings"]["loader"] == loader
        losses[loader] = reports(tmp_path / loader)[0]["loss"]
    assert losses["fast"] != losses["reference"]
    assert losses["fast"] == pytest.approx(losses["reference"], rel=1e-3)


def test_loss_falls(photos, tmp_path):
    pretrain(photos, tmp_path, "--epochs", 12, "--lr", 2e-3)
    losses = [report["epoch_loss"] for report in reports(tmp_path) if "epoch_loss" in report]
    assert losses[-1] < 0.75 * losses[0]


def test_a_run_stopped_inside_an_accumulation_and_an_epoch_resumes_bit_for_bit(photos, tmp_path, monkeypatch, capsys):
    """By a signal to the trainer and its workers: weights, moments and logs are those of the undisturbed run."""
    flags = ("--batch_size", 4, "--accum_iter", 2, "--print_freq", 2)  # the sums of report and epoch differ
    expected = pretrain(photos, tmp_path / "whole", *flags)
    seed_draws = TrainLoop.seed_draws
    micro_batches = []

    def interrupted(loop, step, micro):
        if (step, micro) == (3, 0):
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        micro_batches.append((step, micro))
        return seed_draws(loop, step, micro)

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoop, "seed_draws", interrupted)
        command = pretrain.command(photos, tmp_path / "parts", *flags, "--num_workers", 2)
        assert main_pretrain.main(command) is False
    assert micro_batches[-1] == (3, 1)
    assert "stopped by SIGTERM after step 4 of 6; the same command goes on from there" in capsys.readouterr().out
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags, "--num_workers", 1), expected)
    assert reports_without_times(tmp_path / "parts") == reports_without_times(tmp_path / "whole")
    assert [report["step"] for report in reports(tmp_path / "whole")] == [2, 3, 4, 6]


def test_a_signal_to_a_run_at_its_end_is_noted_alone(photos, tmp_path, monkeypatch):
    """What the signal meant before, a requeue for example, is not for a run that has done all its steps."""
    end = training_module.end
    requeued = []

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGUSR2)
        return end(*arguments)

    monkeypatch.setattr(training_module, "end", interrupted)
    previous = signal.signal(signal.SIGUSR2, lambda *_: requeued.append("requeue"))
    try:
        assert main_pretrain.main(pretrain.command(photos, tmp_path, "--epochs", 1)) is True
        os.kill(os.getpid(), signal.SIGUSR2)  # while the program ends
        assert not requeued
    finally:
        signal.signal(signal.SIGUSR2, previous)


def test_a_signal_to_one_of_two_processes_stops_both_and_loses_no_step(photos, tmp_path):
    """Through torchrun, one signal to a rank: no rank waits for the other."""
    fault = ("signal", 3, "1", "-")
    out = finish(photos, tmp_path, "--save_steps", 100, "--print_freq", 3, fault=fault, code=1)  # of torchrun
    # Rank 1 gets the signal in the fourth step; all ranks know it one step later.
    assert "after step 5 of 9; the same command goes on from there" in out
    assert newest_checkpoint(tmp_path)[0].name == "checkpoint-5.pth"
    assert [report["step"] for report in reports(tmp_path)] == [3]


def test_greenmim_compiles_both_shapes_of_its_batches(photos, tmp_path, monkeypatch):
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def group_large_half_of_the_time(grouper, units):
        """Masks that need the larger shape are rare."""
        sizes = grouper.capacities
        if units[0] % 2:
            sizes = grouper.ceilings
        return grouper.group(units, sizes)

    monkeypatch.setattr(WindowGrouper, "__call__", group_large_half_of_the_time)
    monkeypatch.replace_in(wrap, "torch.compile", partial(torch.compile, backend=backend))
    eager = pretrain(photos, tmp_path / "eager", *GREENMIM)
    assert not graphs
    compiled = pretrain(photos, tmp_path / "compiled", *GREENMIM, "--compile")
    assert graphs
    for name, value in eager["model"].items():
        assert_close(
            compiled["model"][name],
            value,
            rtol=1e-3,
            atol=1e-5,
            msg=name,
        )


def test_the_attention_kernel_is_a_run_s_choice(photos, tmp_path, monkeypatch):
    prefer = wrap.attention.prefer
    chosen = []

    def note(name, device):
        chosen.append(name)
        return prefer(name, device)

    monkeypatch.setattr(wrap.attention, "prefer", note)
    pretrain(photos, tmp_path, "--max_steps", 1, "--attention", "short", "--device", "cpu")
    pretrain(photos, tmp_path, "--max_steps", 2, "--device", "cpu")
    assert chosen == ["short", "auto"]


@pytest.mark.parametrize("flags", [(), ("--repeat_aug", 2)])
def test_torchrun_with_two_processes_is_the_one_process_run(photos, tmp_path, flags):
    """The same global batches, the same losses, one writer; resumed at the exact step."""
    flags = ("--print_freq", 5, *flags)
    command = pretrain.command(photos, tmp_path / "two", "--batch_size", 4, "--num_workers", 2, *flags)
    code, out = run_by_torchrun("main_pretrain.py", *command, "--max_steps", 4)
    assert code == 0, out[-3000:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    done = subprocess.run([*torchrun, "main_pretrain.py", *command], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 = 4 x 2 processes x 1 accumulated" in done.stdout
    assert "at step 4" in done.stdout
    pretrain(photos, tmp_path / "one", *flags)
    ours = reports(tmp_path / "two")
    assert [report["step"] for report in ours] == [3, 5, 6]  # the report of step 5 spans the stop after step 4
    for two, one in zip(ours, reports(tmp_path / "one"), strict=True):
        for name in {"loss", "epoch_loss"} & one.keys():
            assert two[name] == pytest.approx(one[name], rel=1e-4)


TEC = "--model tec_vit_micro_patch4"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--data_path {tmp}/nowhere", "nowhere"),
        ("--input_size 30", "input_size 30 x 30"),
        ("--input_size 32 32 32", "--input_size"),
        ("--patch_size 0", "--patch_size"),
        ("--mask_ratio 0.99", "64 tokens"),
        ("--batch_size 0", "--batch_size"),
        ("--batch_size 25", "24 images"),
        ("--warmup_epochs 3", "--warmup_epochs"),
        ("--crop_scale 0 1", "--crop_scale"),
        ("--label_column label", "--label_column"),
        ("--vflip --sampling attention", "--vflip"),
        ("--device cuda", "GPU"),
        ("--resume {tmp}/nowhere.pth", "nowhere.pth"),
        ("--output_dir {tmp}/file", "--output_dir"),
        ("--pretrained {tmp}/file --trainable_blocks 5", "trainable_blocks"),
        ("--model simmim_vit_micro_patch4 --pretrained {tmp}/file --trainable_blocks 1", "--trainable_blocks"),
        ("--model simmim_vit_micro_patch4 --pretrained {tmp}/file --decoder_warmup_epochs 1", "share a table"),
        (TEC, "--teacher"),
        ("--teacher {teacher}", "--teacher"),
    ],
)
def test_user_errors_are_one_paragraph_before_the_first_step(
    photos, teacher, tmp_path, capsys, monkeypatch, flags, named
):
    monkeypatch.replace_in(distributed, "torch.cuda.is_available", lambda: False)
    (tmp_path / "file").touch()
    words = [word.format(tmp=tmp_path, teacher=teacher) for word in flags.split()]
    assert named in pretrain.refused(capsys, photos, tmp_path / "out", *words)
    assert not list((tmp_path / "out").glob("[!.]*"))


def check(flags):
    """Checks flags as the program does before it reads images."""
    parser, args = main_pretrain.parse_args(flags.split())
    main_pretrain.check_flags(args, SimpleNamespace(batch_size=64), set(parser.given))


RECIPE = "--recipe attention50_vit_base_100ep"
CROSSMAE = "--model crossmae_vit_micro_patch4"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--model localmim_vit_micro_patch4 --norm_pix_loss", "norm_pix_loss"),
        (f"{TEC} --teacher x --no-norm_pix_loss", "norm_pix_loss"),
        ("--throw_ratio 0 --kernel_size 5", "kernel_size"),
        ("--throw_ratio 0 --no-progressive", "progressive"),
        ("--recipe mae_vit_base_100ep --aggregation avgpool", "aggregation"),
        ("--throw_ratio 0 --sampling random", "sampling"),
        ("--no-progressive --applies_to all", "applies_to"),
        ("--aggregation transformer --kernel_size 5", "kernel_size"),
        ("--crop_scale .5 1 --crop padded", "crop_scale"),
        ("--lr 1e-3 --blr 1e-3", "blr"),
        ("--min_lr 0 --recipe simmim_vit_base_800ep", "min_lr"),
        ("--warmup_epochs 0 --warmup_lr 1e-6", "warmup_lr"),
    ],
)
def test_a_flag_that_has_no_effect_is_refused_if_it_is_given(flags, name):
    with pytest.raises(ValueError, match=f"^--{name} has no effect"):
        check(flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--throw_ratio 0",
        "--no-progressive",
        "--aggregation transformer --applies_to all",
        "--aggregation avgpool --kernel_size 5",
        "--model localmim_vit_micro_patch4",
        "--model simmim_vit_micro_patch4 --norm_pix_loss",
        "--crop padded",
        "--recipe prmim50_vit_base_100ep --lr 1e-3",
        f"{RECIPE} --sampling random",
        f"{RECIPE} --attention_start 20",
        "--model amt_vit_micro_patch4 --throw_ratio 0 --sampling attention --attention_start 20",
        f"{CROSSMAE} --visible_source zeros",
    ],
)
def test_a_value_that_nobody_gives_may_have_no_effect(flags):
    check(flags)


def test_squares_that_do_not_fit_the_grid_are_refused_before_images_are_read():
    with pytest.raises(ValueError, match="mask_unit 5"):
        check("--mask_unit 5")


@pytest.mark.parametrize(("num_steps", "first_weights", "num_notes"), [(687, None, 1), (688, None, 0), (9, "x", 0)])
def test_a_run_from_random_weights_that_is_shorter_than_any_that_helped_is_noted(num_steps, first_weights, num_notes):
    schedule = SimpleNamespace(num_steps=num_steps)
    run = SimpleNamespace(first_weights=first_weights)
    assert len(main_pretrain.note_on_few_steps(run, schedule)) == num_notes


def test_refused_flags_leave_no_folder(photos, tmp_path, capsys):
    pretrain.refused(capsys, photos, tmp_path / "out", "--mask_unit", 5)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_names_the_keys(photos, tmp_path, capsys):
    out = tmp_path / "out"
    pretrain(photos, out, "--max_steps", 1)
    assert "--patch_size was 4 and now is 8" in pretrain.refused(capsys, photos, out, "--patch_size", 8)
    message = pretrain.refused(capsys, photos, out, "--patch_size", 8, "--allow_changes", code=4)
    assert "patch_embed.proj.weight" in message


def test_weights_are_no_run_to_resume(photos, tmp_path, capsys):
    path = tmp_path / "weights.pth"
    torch.save({"model": {"w": torch.zeros(1)}}, path)
    message = pretrain.refused(capsys, photos, tmp_path / "out", "--resume", path, code=4)
    assert "holds weights but no run to resume" in message


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_the_gpu(photos, tmp_path, precision):
    flags = ("--device", "cuda", "--precision", precision, "--epochs", 4, "--lr", 1e-3)
    content = pretrain(photos, tmp_path, *flags)
    assert content["meta"]["step"] == 12
    losses = [report["epoch_loss"] for report in reports(tmp_path) if "epoch_loss" in report]
    assert losses[-1] < losses[0]


@pytest.mark.gpu
def test_batches_of_workers_reach_the_gpu_by_pinned_memory_as_those_of_none_and_the_run_resumes(photos, tmp_path):
    flags = ("--device", "cuda", "--precision", "bf16", "--epochs", 10, "--batch_size", 4, "--picture_every", 0)
    expected = pretrain(photos, tmp_path / "none", *flags, "--num_workers", 0)
    pretrain(photos, tmp_path / "parts", *flags, "--num_workers", 2, "--max_steps", 25)
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags, "--num_workers", 3), expected)
    assert losses(tmp_path / "parts") == losses(tmp_path / "none")


@pytest.mark.parametrize(
    ("flags", "need"),
    [
        ("", "GPU"),
        ("--device cuda --precision fp16", "--precision"),
        ("--device cuda --sampling attention", "--sampling"),
        ("--device cuda --recompute", "--recompute"),
        ("--device cuda --model greenmim_swin_base_patch4_window7", "--model"),
        ("--device cuda", None),
        ("--device cuda --nodata 0", None),
    ],
)
def test_a_step_that_cannot_be_captured_is_refused(flags, need):
    """As for a process that has a GPU."""
    _, args = main_pretrain.parse_args(f"--model mae_vit_micro_patch4 --cuda_graph {flags}".split())
    precision = "bf16" if args.precision == "auto" else args.precision
    device = "cuda" if args.device == "cuda" else "cpu"
    plan = Plan(8, 1, 8, 1e-3, 0, device, precision)
    if need is None:
        main_pretrain.check_flags(args, plan, set())
        return
    with pytest.raises(ValueError, match=f"--cuda_graph needs .*{need}"):
        main_pretrain.check_flags(args, plan, set())


@pytest.mark.gpu
def test_a_captured_run_hears_a_signal_resumes_and_gives_the_bits_of_a_plain_one(photos, tmp_path, before_step):
    flags = ("--device", "cuda", "--precision", "bf16", "--epochs", 7, "--accum_iter", 2, "--batch_size", 4)
    flags = (*flags, "--drop_path", 0.1, "--picture_every", 0)
    expected = pretrain(photos, tmp_path / "plain", *flags)
    before_step(10, lambda: os.kill(os.getpid(), signal.SIGTERM))
    command = pretrain.command(photos, tmp_path / "out", *flags, "--cuda_graph")
    assert main_pretrain.main(command) is False
    assert 10 < state(tmp_path / "out")["meta"]["step"] < 21
    assert main_pretrain.main(command) is True
    assert_same_state(state(tmp_path / "out"), expected)
    assert losses(tmp_path / "out") == losses(tmp_path / "plain")
