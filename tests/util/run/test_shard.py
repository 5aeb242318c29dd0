import os
from functools import partial
from itertools import islice

import pytest
import torch
from timm.optim import param_groups_weight_decay
from torch.nn.parallel import DistributedDataParallel

from encoders.models_relative_vit import RelativeBlock
from encoders.models_swin import SwinBlock, swin_micro_patch4_window4
from engine_finetune import BatchAugmentation
from frameworks.models_crossmae_pr import CrossBlock
from models_vit import Block, vit_micro_patch4
from tests.loops import a_driver
from tests.patches import StandIn
from tests.runs import PLAIN, assert_same_state, contents, evaluate, finetune, pretrain, reports
from tests.test_framework_contract import CLASSES, build
from tests.two_processes import run_in_processes, run_in_two_processes
from tests.warm import reserve_port, run_by_torchrun
from util.run import shard
from util.run.checkpoint import newest_checkpoint
from util.run.distributed import PRECISIONS

CPU = torch.device("cpu")
CLASSIFIERS = {"ViT": vit_micro_patch4, "Swin": swin_micro_patch4_window4}


def make(name):
    torch.manual_seed(0)
    if name in CLASSIFIERS:
        return CLASSIFIERS[name](num_classes=5, drop_path_rate=0.3)
    return build(name)


@pytest.mark.parametrize("name", [*CLASSES, *CLASSIFIERS])
def test_blocks_of_finds_every_block_of_encoder_and_decoders(name):
    model = make(name)
    assert set(shard.blocks_of(model)) == {
        m for m in model.modules() if isinstance(m, (Block, CrossBlock, RelativeBlock, SwinBlock))
    }


def a_loop(name, sharded, precision_name="fp32", clip_grad=None, accum_iter=2, compiled=False, state=None):
    """Returns (driver, model, optimizer). state: whole (weights, optimizer state) to begin with."""
    model = make(name)
    # A large eps: gradients that are zero up to rounding, such as of a key's bias, must not become a step.
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=1e-3, eps=1e-3, fused=True)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    if sharded:
        shard.shard(model, optimizer, CPU, PRECISIONS[precision_name], compiled)
    wrapped = model if sharded else DistributedDataParallel(model, gradient_as_bucket_view=True)
    augment = BatchAugmentation() if name in CLASSIFIERS else None
    options = dict(accum_iter=accum_iter, clip_grad=clip_grad, print_freq=1, steps_per_epoch=10, last_step=10)
    driver = a_driver(wrapped, optimizer, lambda step, lr_scale=1.0: 1e-3, precision_name, augment=augment, **options)
    return driver, model, optimizer


def batches_of(name, model, rank, num, size=2):
    generator = torch.Generator().manual_seed(rank)
    for i in range(num):
        imgs = torch.randint(0, 256, (size, 3, *model.img_size), dtype=torch.uint8, generator=generator)
        if name in CLASSIFIERS:
            yield imgs, torch.randint(0, 5, (size,), generator=generator)
        else:
            _, labels, *orders = model.collator("furthest", 0)(
                [(torch.zeros(1), 0, (rank, size * i + j)) for j in range(size)]
            )
            yield imgs, labels, *orders


def _trained(rank, name, sharded, steps=2, start=0, spoil=(), **options):
    """Returns ([(loss, norm)], whole weights, whole optimizer state, numbers of this rank's weights and moments)."""
    driver, model, optimizer = a_loop(name, sharded, **options)
    count, exact = iter(range(100)), driver.loop.scaled_loss

    def spoiled(losses, micro):
        return exact(
            {k: v * float("nan") if next(count) in spoil and rank == 1 else v for k, v in losses.items()}, micro
        )

    driver.loop.scaled_loss = spoiled if spoil else exact
    driver.steps(range(start, steps), islice(batches_of(name, model, rank, 2 * steps), 2 * start, None))
    logged = [(r["loss"], r["grad_norm"]) for r in driver.loop.log.reports]
    weights, states = (shard.HostCopies(CPU).take(part.state_dict(), keep=True) for part in (model, optimizer))
    parameters = sum(p.to_local().numel() if sharded else p.numel() for p in model.parameters())
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return logged, weights, states, parameters, sum(m.to_local().numel() if sharded else m.numel() for m in moments)


def _difference(rank, name, **options):
    """Compares the sharded run with DDP's: {what: largest difference}, absolute for weights, else relative."""
    ddp, ours = (_trained(rank, name, sharded, **options) for sharded in (False, True))
    pairs = list(zip(ours[0], ddp[0], strict=True))
    assert ours[1].keys() == ddp[1].keys() and ours[2]["param_groups"] == ddp[2]["param_groups"]
    assert ours[2]["state"].keys() == ddp[2]["state"].keys()
    for name, value in ddp[1].items():
        assert ours[1][name].stride() == value.stride() and type(ours[1][name]) is torch.Tensor
    states = [(ours[2]["state"][i][k], v) for i, state in ddp[2]["state"].items() for k, v in state.items()]
    return {
        "logged": max(abs(a - b) / b for pair in pairs if None not in pair[1] for a, b in zip(*pair, strict=True)),
        "skipped": [None in theirs for _, theirs in pairs] == [None in own for own, _ in pairs],
        "weights": max(float((ours[1][k] - v).abs().max()) for k, v in ddp[1].items()),
        "moments": max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in states),
        "parameters": ours[3] / ddp[3],
        "states": ours[4] / ddp[4],
    }


# Those whose blocks or parameters differ most. PRMIM_LONG_TESTS=1 takes all.
SHARDED = ("MaskedAutoencoderViT", "GreenMIMSwin", "TECViT", "CrossMaskedAutoencoderViT", "AMTSimMIMViT")


def _frameworks(rank):
    options = dict.fromkeys(CLASSES if os.environ.get("PRMIM_LONG_TESTS") else SHARDED, {})
    options["MaskedAutoencoderViT"] = dict(clip_grad=0.1)
    return {name: _difference(rank, name, **o) for name, o in options.items()}


def _cases(rank):
    compile_ = partial(torch.compile, backend="aot_eager")  # the default backend needs a C++ compiler
    shard.torch = StandIn(torch, compile=compile_)  # in this process alone
    mae = "MaskedAutoencoderViT"
    return {
        "ViT": _difference(rank, "ViT", clip_grad=0.1, accum_iter=1),
        "Swin": _difference(rank, "Swin"),
        "compiled": _difference(rank, "ViT", compiled=True),
        "spoiled": _difference(rank, mae, steps=3, spoil={3}),
        **{name: _difference(rank, mae, precision_name=name) for name in ("bf16", "fp16")},
    }


@pytest.mark.parametrize("cases", [_frameworks, _cases])
def test_a_sharded_step_equals_ddp_s(cases):
    """With accumulation, clipping, drop path, compiled blocks, and a step that is NaN on one rank."""
    for found in run_in_two_processes(cases):
        for name, difference in found.items():
            assert difference["skipped"], name
            # Hooks of blocks change the order in which gradients of shared tensors are summed.
            assert difference["logged"] < 1e-4 and difference["weights"] < 1e-6 and difference["moments"] < 1e-4, (
                name,
                difference,
            )
            # One row cannot be sharded: rank 0 holds class token, mask token and position table.
            assert difference["parameters"] < 0.55 and difference["states"] < 0.53, (name, difference)


def _rows(rank):
    """Two rows of two ranks: the difference from DDP, and what a run that resumes ends with."""
    shard.MIN_SHARDS = 2  # in this process alone
    name = "MaskedAutoencoderViT"
    difference = _difference(rank, name, steps=3, spoil={3}, clip_grad=0.1)
    _, *state, _, _ = _trained(rank, name, True)
    resumed, undisturbed = (_trained(rank, name, True, 3, **more)[1:3] for more in (dict(start=2, state=state), {}))
    torch.testing.assert_close(resumed[0], undisturbed[0], rtol=0, atol=0)
    torch.testing.assert_close(resumed[1]["state"], undisturbed[1]["state"], rtol=0, atol=0)
    return {**difference, "sum": sum(float(value.double().sum()) for value in resumed[0].values())}


def test_rows_of_shards_equal_ddp_stay_equal_and_resume_bit_for_bit():
    found = run_in_processes(4, _rows, timeout_s=300)
    assert len({difference["sum"] for difference in found}) == 1
    for difference in found:
        assert difference["skipped"] and difference["logged"] < 1e-4 and difference["weights"] < 1e-6
        assert difference["moments"] < 1e-4 and difference["parameters"] < 0.55 and difference["states"] < 0.53


@pytest.mark.parametrize(
    ("ranks", "shards"), [(1, 1), (2, 2), (8, 8), (12, 12), (13, 13), (16, 8), (20, 10), (1024, 8)]
)
def test_a_row_has_eight_ranks_or_the_next_divisor(ranks, shards):
    assert shard.num_shards(ranks) == shards


def _overflows(rank):
    """One rank's shard of the gradient is infinite."""
    loop = a_loop("MaskedAutoencoderViT", True)[0].loop
    before = [p.to_local().clone() for p in loop.parameters]
    for p in loop.parameters:
        p.grad = torch.zeros_like(p)
    if rank == 1:
        loop.parameters[-1].grad.to_local().view(-1)[0] = float("inf")
    norm = loop.update_weights()
    same = all(torch.equal(p.to_local(), b) for p, b in zip(loop.parameters, before, strict=True))
    for p in loop.parameters:
        p.grad = torch.ones_like(p)
    ones = shard.total_norm([p.grad for p in loop.parameters]) ** 2
    return {"norm": float(norm), "same": same, "ones": float(ones) / sum(p.numel() for p in loop.parameters)}


def test_all_ranks_skip_a_step_that_overflows_on_one():
    for found in run_in_two_processes(_overflows):
        assert found["norm"] == float("inf") and found["same"] and found["ones"] == pytest.approx(1)


def test_a_run_may_change_between_sharded_and_not_and_the_number_of_processes(photos, tmp_path, capsys):
    """Two sharded processes, then one, then two again. They also draw pictures, which needs all ranks."""
    whole = pretrain(photos, tmp_path / "whole", "--clip_grad", 1)
    flags = ["--clip_grad", 1, "--batch_size", 2, "--accum_iter", 2, "--shard"]
    flags = pretrain.command(photos, tmp_path / "parts", *flags)
    code, out = run_by_torchrun("main_pretrain.py", *flags, "--max_steps", 2)
    assert code == 0, out[-3000:]
    pretrain(photos, tmp_path / "parts", "--clip_grad", 1, "--max_steps", 4)
    assert "warning" not in capsys.readouterr().out
    code, out = run_by_torchrun("main_pretrain.py", *flags)
    assert code == 0 and "at step 4" in out and "warning" not in out, out[-3000:]
    parts = contents(newest_checkpoint(tmp_path / "parts")[0])
    torch.testing.assert_close(parts["model"], dict(whole["model"]), rtol=1e-3, atol=1e-5)
    assert parts["optimizer"]["state"].keys() == whole["optimizer"]["state"].keys()
    losses = [[r["loss"] for r in reports(tmp_path / name)] for name in ("parts", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_fine_tuning_sharded_evaluates_and_keeps_the_best(labelled, pretrained, tmp_path):
    """Seven images in batches of three: one rank evaluates two batches, the other rank one."""
    flags = [*PLAIN, "--finetune", pretrained, "--epochs", 1]
    command = finetune.command(labelled, tmp_path / "two", *flags, "--batch_size", 3, "--shard")
    code, out = run_by_torchrun("main_finetune.py", *command)
    assert code == 0, out[-3000:]
    finetune(labelled, tmp_path / "one", *flags, "--batch_size", 6)
    ours, theirs = ([r.get("val_loss", r.get("loss")) for r in reports(tmp_path / name)] for name in ("two", "one"))
    assert ours == pytest.approx(theirs, rel=1e-3)
    last = evaluate(labelled, tmp_path / "two" / "checkpoint-best.pth")
    assert last["loss"] == pytest.approx(ours[-1], rel=1e-5)


def test_shard_without_a_process_group_is_an_error(photos, tmp_path, capsys):
    message = pretrain.refused(capsys, photos, tmp_path / "out", "--shard")
    assert "--shard needs several processes: start with torchrun" in message


@pytest.fixture
def alone(monkeypatch):
    """The environment of torchrun with one process."""
    environment = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=reserve_port())
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def test_a_sharded_run_of_one_process_equals_the_plain_run(photos, tmp_path, alone):
    plain, sharded = (pretrain(photos, tmp_path / flag, "--max_steps", 3, flag) for flag in ("--no-shard", "--shard"))
    assert_same_state(sharded, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("precision_name", ["fp32", "bf16", "fp16"])
def test_a_sharded_run_on_the_gpu(photos, tmp_path, alone, precision_name):
    flags = ["--device", "cuda", "--precision", precision_name, "--lr", 1e-3]
    plain, sharded = (pretrain(photos, tmp_path / flag, *flags, flag) for flag in ("--no-shard", "--shard"))
    assert sharded["meta"]["step"] == plain["meta"]["step"] == 6
    flags = ("--no-shard", "--shard")
    losses = [[r["epoch_loss"] for r in reports(tmp_path / flag) if "epoch_loss" in r] for flag in flags]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if precision_name == "fp32" else 3e-2)
