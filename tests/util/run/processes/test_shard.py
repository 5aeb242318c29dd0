import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.optim import param_groups_weight_decay
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from encoders.models_relative_vit import RelativeBlock
from encoders.models_swin import SwinBlock, swin_micro_patch4_window4
from engine_finetune import BatchAugmentation
from framework import NoPixels
from frameworks.models_crossmae_pr import CrossBlock
from models_vit import Block, vit_micro_patch4
from tests.loops import a_driver
from tests.patches import StandIn
from tests.runs import PLAIN, assert_same_state, contents, evaluate, finetune, pretrain, reports
from tests.test_framework_contract import CLASSES, build
from tests.two_processes import run_in_processes, run_in_two_processes
from tests.warm import reserve_port, run_by_torchrun
from util.run.files.search import newest_checkpoint
from util.run.processes import shard
from util.run.processes.distributed import PRECISIONS
from util.run.processes.supervise import collective_timeout

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
    blocks = set()
    for module in model.modules():
        if isinstance(module, (Block, CrossBlock, RelativeBlock, SwinBlock)):
            blocks.add(module)
    assert set(shard.blocks_of(model)) == blocks


@pytest.mark.parametrize(
    ("dist_timeout", "compiles", "minutes"),
    [
        (60, False, 35),
        (7200, False, 125),
        (60, True, 65),
    ],
)
def test_the_groups_of_replicas_fail_no_sooner_than_that_of_all_ranks(monkeypatch, dist_timeout, compiles, minutes):
    """Their own default may come before the watchdog, which says what it waits for."""
    timeouts = []
    group = SimpleNamespace(set_timeout=timeouts.append)
    monkeypatch.setattr(shard, "init_device_mesh", lambda *_, **__: SimpleNamespace(get_all_groups=lambda: [group]))
    shard.make_mesh("cuda", 16, collective_timeout(dist_timeout, compiles))
    assert timeouts == [timedelta(minutes=minutes)]


def a_loop(
    name,
    sharded,
    precision_name="fp32",
    clip_grad=None,
    accum_iter=2,
    compiled=False,
    recomputed=False,
    reshard=True,
    state=None,
):
    """Returns (driver, model, optimizer). state: whole (weights, optimizer state) to begin with."""
    model = make(name)
    # A large eps: gradients that are zero up to rounding, such as of a key's bias, must not become a step.
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=1e-3, eps=1e-3, fused=True)
    if state is not None:
        weights, moments = state
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    if recomputed:
        shard.recompute_blocks(model, pointwise_only=True)
    if sharded:
        shard.shard(model, optimizer, CPU, PRECISIONS[precision_name], compiled, reshard=reshard)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    augment = None
    if name in CLASSIFIERS:
        augment = BatchAugmentation()
    driver = a_driver(
        wrapped,
        optimizer,
        constant_rate,
        precision_name,
        augment=augment,
        accum_iter=accum_iter,
        clip_grad=clip_grad,
        print_freq=1,
        steps_per_epoch=10,
        last_step=10,
    )
    return driver, model, optimizer


def constant_rate(step, lr_scale=1.0):
    return 1e-3


def batches_of(name, model, rank, num, size=2):
    generator = torch.Generator().manual_seed(rank)
    for i in range(num):
        imgs = torch.randint(0, 256, (size, 3, *model.img_size), dtype=torch.uint8, generator=generator)
        if name in CLASSIFIERS:
            yield imgs, torch.randint(0, 5, (size,), generator=generator)
        else:
            samples = [(torch.zeros(1), 0, (rank, size * i + j)) for j in range(size)]
            _, labels, *orders = model.collator("furthest", 0)(samples)
            yield imgs, labels, *orders


@dataclass
class Outcome:
    """What a training leaves on one rank."""

    logged: list[tuple[float | None, float | None]]  # loss and gradient norm of each step
    weights: dict[str, torch.Tensor]  # whole
    moments: dict[str, Any]  # the whole state of the optimizer
    num_parameters: int  # of this rank
    num_moments: int  # of this rank


def numel(tensor):
    """The numbers of a tensor that this rank holds."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.numel()


def spoil(driver, calls):
    """Makes the losses of these micro-batches NaN."""
    count = itertools.count()
    exact = driver.loop.scaled_loss

    def scaled_loss(losses, micro):
        if next(count) in calls:
            losses = {name: loss * torch.nan for name, loss in losses.items()}
        return exact(losses, micro)

    driver.loop.scaled_loss = scaled_loss


def _train(rank, name, sharded, steps=2, start=0, spoilt=(), **options):
    """Trains from step `start` to `steps`. On rank 1 the losses of the micro-batches `spoilt` are NaN."""
    driver, model, optimizer = a_loop(name, sharded, **options)
    if rank == 1:
        spoil(driver, spoilt)
    driver.steps(range(start, steps), islice(batches_of(name, model, rank, 2 * steps), 2 * start, None))
    num_moments = 0
    for state in optimizer.state.values():
        num_moments += numel(state["exp_avg"]) + numel(state["exp_avg_sq"])
    return Outcome(
        logged=[(report["loss"], report["grad_norm"]) for report in driver.loop.log.reports],
        weights=shard.HostCopies(CPU).take(model.state_dict(), keep=True),
        moments=shard.HostCopies(CPU).take(optimizer.state_dict(), keep=True),
        num_parameters=sum(numel(parameter) for parameter in model.parameters()),
        num_moments=num_moments,
    )


def _assert_as_ddp(rank, name, **options):
    """A sharded training equals DDP's, apart from the order in which gradients of shared tensors are summed."""
    ddp = _train(rank, name, False, **options)
    sharded = _train(rank, name, True, **options)
    for ours, theirs in zip(sharded.logged, ddp.logged, strict=True):
        if None in theirs:
            assert ours == theirs, name
        else:
            assert ours == pytest.approx(theirs, rel=1e-4), name
    assert_close(sharded.weights, ddp.weights, rtol=0, atol=1e-6)
    for key, value in ddp.weights.items():
        assert sharded.weights[key].stride() == value.stride(), key
    assert sharded.moments["param_groups"] == ddp.moments["param_groups"]
    assert sharded.moments["state"].keys() == ddp.moments["state"].keys()
    for number, state in ddp.moments["state"].items():
        for key, value in state.items():
            largest = float(value.abs().max().clamp(min=1e-12))
            assert_close(sharded.moments["state"][number][key], value, rtol=0, atol=1e-4 * largest)
    # One row cannot be sharded: rank 0 holds class token, mask token and position table.
    assert sharded.num_parameters < 0.55 * ddp.num_parameters, name
    assert sharded.num_moments < 0.53 * ddp.num_moments, name


# Those whose blocks or parameters differ most. PRMIM_LONG_TESTS=1 takes all.
SHARDED = ("MaskedAutoencoderViT", "GreenMIMSwin", "TECViT", "CrossMaskedAutoencoderViT", "AMTSimMIMViT")


def _frameworks(rank):
    names = SHARDED
    if os.environ.get("PRMIM_LONG_TESTS"):
        names = CLASSES
    for name in names:
        _assert_as_ddp(rank, name)


def _cases(rank):
    compile_ = partial(torch.compile, backend="aot_eager")  # the default backend needs a C++ compiler
    shard.torch = StandIn(torch, compile=compile_)  # in this process alone
    mae = "MaskedAutoencoderViT"
    _assert_as_ddp(rank, "ViT", clip_grad=0.1, accum_iter=1)
    _assert_as_ddp(rank, "Swin")
    _assert_as_ddp(rank, mae, compiled=True, recomputed=True)
    _assert_as_ddp(rank, mae, precision_name="bf16")
    _assert_as_ddp(rank, mae, precision_name="fp16")


@pytest.mark.parametrize("cases", [_frameworks, _cases])
def test_a_sharded_step_equals_ddp_s(cases):
    """With accumulation, clipping, drop path, compiled and recomputed parts. `_rows` has a NaN step on one rank."""
    run_in_two_processes(cases)


def _rows(rank):
    """Two rows of two ranks. Returns the sum of the weights with which a run ends that was resumed."""
    shard.MIN_SHARDS = 2  # in this process alone
    name = "MaskedAutoencoderViT"
    _assert_as_ddp(rank, name, steps=3, spoilt={3}, clip_grad=0.1)
    undisturbed = _train(rank, name, True, steps=3)
    part = _train(rank, name, True, steps=2)
    resumed = _train(rank, name, True, steps=3, start=2, state=(part.weights, part.moments))
    assert_close(resumed.weights, undisturbed.weights, rtol=0, atol=0)
    assert_close(resumed.moments["state"], undisturbed.moments["state"], rtol=0, atol=0)
    return sum(value.double().sum().item() for value in resumed.weights.values())


def test_rows_of_shards_equal_ddp_stay_equal_and_resume_bit_for_bit():
    sums = run_in_processes(4, _rows, timeout_s=300)
    assert len(set(sums)) == 1


@pytest.mark.parametrize(
    ("ranks", "shards"),
    [
        (1, 1),
        (2, 2),
        (8, 8),
        (12, 12),
        (13, 13),
        (16, 8),
        (20, 10),
        (1024, 8),
    ],
)
def test_a_row_has_eight_ranks_or_the_next_divisor(ranks, shards):
    assert shard.num_shards(ranks) == shards


def _reshard(rank):
    """With accumulation. Where parameters are freed, they are shards between forward and backward pass."""
    name = "MaskedAutoencoderViT"
    twice = _train(rank, name, True)
    once = _train(rank, name, True, reshard=False)
    assert once.logged == twice.logged
    assert_close(once.weights, twice.weights, rtol=0, atol=0)
    for reshard in (True, False):
        _, model, _ = a_loop(name, True, reshard=reshard)
        imgs, _, *orders = next(batches_of(name, model, rank, 1))
        model(imgs.float(), *orders)
        for block in shard.blocks_of(model):
            assert isinstance(block.norm1.weight, shard.dtensor.DTensor) == reshard


@pytest.mark.parametrize(("is_fused", "place"), [(True, "meta"), (False, "cpu")])
def test_a_step_count_lies_where_the_optimizer_reads_it(is_fused, place):
    """The device here is "meta". On the host, a count on the device would cost a wait for each parameter."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    assert shard._shard_state(torch.tensor(7.0), parameter, is_fused).device.type == place


def test_parameters_may_stay_gathered_until_the_backward_pass():
    run_in_two_processes(_reshard)


def _overflows(rank):
    """One rank's shard of the gradient is infinite."""
    loop = a_loop("MaskedAutoencoderViT", True)[0].loop
    before = [parameter.to_local().clone() for parameter in loop.parameters]
    for parameter in loop.parameters:
        parameter.grad = torch.zeros_like(parameter)
    if rank == 1:
        loop.parameters[-1].grad.to_local().view(-1)[0] = torch.inf
    assert loop.update_weights() == torch.inf
    for parameter, value in zip(loop.parameters, before, strict=True):
        assert torch.equal(parameter.to_local(), value)


def _norm_of_ones(rank):
    parameters = a_loop("MaskedAutoencoderViT", True)[0].loop.parameters
    ones = [torch.ones_like(parameter) for parameter in parameters]
    norm, num_asked = shard.total_norm(ones, torch.tensor([float(rank)]))
    assert num_asked.tolist() == [1.0]
    assert norm.item() ** 2 == pytest.approx(sum(parameter.numel() for parameter in parameters))


@pytest.mark.parametrize("case", [_overflows, _norm_of_ones])
def test_the_norm_is_that_of_the_whole_gradient_so_that_all_ranks_skip_alike(case):
    run_in_two_processes(case)


def _names_of_classes(rank):
    model = a_loop("MaskedAutoencoderViT", True)[1]
    model.target_tokens = lambda imgs, pixels: -pixels
    with pytest.raises(NoPixels) as error:
        model.views(None, None, None)
    return type(model).__name__, type(model.blocks[0]).__name__, str(error.value)


def test_messages_about_a_sharded_model_name_the_class_of_the_user():
    for model, block, message in run_in_two_processes(_names_of_classes):
        assert (model, block) == ("MaskedAutoencoderViT", "Block")
        assert message.startswith("the targets of MaskedAutoencoderViT are no pixels")


def test_a_run_may_change_between_sharded_and_not_and_the_number_of_processes(photos, tmp_path, capsys):
    """Two sharded processes, then one, then two again. They also draw pictures, which needs all ranks."""
    whole = pretrain(photos, tmp_path / "whole", "--clip_grad", 1)
    flags = ["--clip_grad", 1, "--batch_size", 2, "--accum_iter", 2, "--shard"]
    command = pretrain.command(photos, tmp_path / "parts", *flags)
    code, out = run_by_torchrun("main_pretrain.py", *command, "--max_steps", 2)
    assert code == 0, out[-3000:]
    pretrain(photos, tmp_path / "parts", "--clip_grad", 1, "--max_steps", 4)
    assert "warning" not in capsys.readouterr().out
    code, out = run_by_torchrun("main_pretrain.py", *command)
    assert code == 0, out[-3000:]
    assert "at step 4" in out
    assert "warning" not in out
    parts = contents(newest_checkpoint(tmp_path / "parts")[0])
    assert_close(parts["model"], dict(whole["model"]), rtol=1e-3, atol=1e-5)
    assert parts["optimizer"]["state"].keys() == whole["optimizer"]["state"].keys()
    losses = [report["loss"] for report in reports(tmp_path / "whole")]
    assert [report["loss"] for report in reports(tmp_path / "parts")] == pytest.approx(losses, rel=1e-4)


def test_fine_tuning_sharded_evaluates_and_keeps_the_best(labelled, pretrained, tmp_path):
    """Seven images in batches of three: one rank evaluates two batches, the other rank one."""
    flags = [*PLAIN, "--finetune", pretrained, "--epochs", 1]
    command = finetune.command(labelled, tmp_path / "two", *flags, "--batch_size", 3, "--shard")
    code, out = run_by_torchrun("main_finetune.py", *command)
    assert code == 0, out[-3000:]
    finetune(labelled, tmp_path / "one", *flags, "--batch_size", 6)
    for ours, theirs in zip(reports(tmp_path / "two"), reports(tmp_path / "one"), strict=True):
        for name in {"loss", "val_loss"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    best = evaluate(labelled, tmp_path / "two" / "checkpoint-best.pth")
    assert best["loss"] == pytest.approx(ours["val_loss"], rel=1e-5)


def test_shard_without_a_process_group_is_an_error(photos, tmp_path, capsys):
    message = pretrain.refused(capsys, photos, tmp_path / "out", "--shard")
    assert "--shard needs several processes: start with torchrun" in message


@pytest.fixture
def alone(monkeypatch):
    """The environment of torchrun with one process."""
    environment = dict(
        RANK=0,
        LOCAL_RANK=0,
        WORLD_SIZE=1,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=reserve_port(),
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def test_a_sharded_run_of_one_process_equals_the_plain_run_also_if_it_is_resumed(photos, tmp_path, alone):
    plain = pretrain(photos, tmp_path / "plain", "--max_steps", 3)
    pretrain(photos, tmp_path / "sharded", "--max_steps", 2, "--shard")
    sharded = pretrain(photos, tmp_path / "sharded", "--max_steps", 3, "--shard")
    assert_same_state(sharded, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("precision_name", ["fp32", "bf16", "fp16"])
def test_a_sharded_run_on_the_gpu(photos, tmp_path, alone, precision_name):
    flags = ["--device", "cuda", "--precision", precision_name, "--lr", 1e-3]
    pretrain(photos, tmp_path / "plain", *flags)
    assert pretrain(photos, tmp_path / "sharded", *flags, "--shard")["meta"]["step"] == 6
    rel = 3e-2
    if precision_name == "fp32":
        rel = 1e-3
    for ours, theirs in zip(reports(tmp_path / "sharded"), reports(tmp_path / "plain"), strict=True):
        if "epoch_loss" in theirs:
            assert ours["epoch_loss"] == pytest.approx(theirs["epoch_loss"], rel=rel)
