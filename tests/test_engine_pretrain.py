from contextlib import nullcontext

import pytest
import torch
from timm.layers import DropPath
from torch import nn

from tests.loops import a_driver
from tests.reads import reads
from tests.two_processes import run_in_two_processes
from util.data.transforms import Normalize
from util.run import loop
from util.run.distributed import precision
from util.run.loop import Meter


class TwoLosses(nn.Module):
    """The smallest model that meets the contract: two named losses, no sampling, images of one pixel."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        nn.init.constant_(self.linear.weight, 0.1)
        nn.init.constant_(self.linear.bias, 0.3)

    def forward(self, imgs, ids_shuffle):
        out = self.linear(imgs.flatten(1))
        return {"square": out.square().mean(), "sum": 0.1 * (out * ids_shuffle).mean()}


def a_loop(precision_name="fp32", accum_iter=1, model=None, print_freq=2, device="cpu"):
    """A Driver with the learning rate .01 (step + 1)."""
    model = (model or TwoLosses()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    options = dict(accum_iter=accum_iter, print_freq=print_freq)
    return a_driver(model, optimizer, lambda step, lr_scale=1.0: 1e-2 * (step + 1), precision_name, device, **options)


def stream(num, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        imgs = torch.randint(0, 256, (size, 3, 1, 1), dtype=torch.uint8, generator=generator)
        yield imgs, torch.zeros(size), torch.ones(size, 4, dtype=torch.int64)


def test_drop_path_is_drawn_by_the_step_and_no_other_state():
    """So a resumed run draws what the undisturbed one drew."""

    class Dropping(TwoLosses):
        def forward(self, imgs, ids_shuffle):
            return {"kept": DropPath(0.5)(imgs.flatten(1)).square().mean() + 0 * self.linear.weight.sum()}

    (batch,) = stream(1)
    drawn = []
    for steps in (range(4), (3, 2)):
        torch.manual_seed(len(drawn))
        engine = a_loop(model=Dropping())
        drawn.append([engine.losses_of(batch, step, 0)["kept"].item() for step in steps])
    assert drawn[1] == [drawn[0][3], drawn[0][2]] and len({*drawn[0]}) > 1


def test_every_micro_batch_of_every_rank_and_step_has_a_seed_of_its_own(monkeypatch):
    seeds = []
    for rank in range(3):
        monkeypatch.setattr(loop, "rank_and_world_size", lambda rank=rank: (rank, 3))
        for step, micro in ((0, 0), (0, 1), (0, 2), (1, 0)):
            a_loop().loop.seed_draws(step, micro)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 12


def test_steps_are_adamw_s_on_the_summed_losses():
    engine = a_loop()
    engine.steps(range(3, 6), stream(3))
    model = TwoLosses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for step, (imgs, _, ids) in zip((3, 4, 5), stream(3), strict=True):
        optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1)
        optimizer.zero_grad()
        sum(model(Normalize()(imgs), ids).values()).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(engine.weights(), expected, rtol=1e-6, atol=1e-7)


def test_accumulation_equals_the_whole_batch():
    whole, parts = a_loop(), a_loop(accum_iter=4)
    whole.steps(range(5), stream(5))
    cut = ([t[i : i + 2] for t in batch] for batch in stream(5) for i in range(0, 8, 2))
    parts.steps(range(5), cut)
    torch.testing.assert_close(parts.weights(), whole.weights(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(parts.loop.log.reports, whole.loop.log.reports, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_reports_are_means_of_all_steps_since_the_last():
    engine, seen = a_loop(print_freq=2), []
    engine.model.register_forward_hook(lambda *args: seen.append({k: v.item() for k, v in args[2].items()}))
    after = []
    engine.steps(range(120, 125), stream(5), after.append)
    reports = engine.loop.log.reports
    assert after == [121, 122, 123, 124, 125] and [r["step"] for r in reports] == [122, 124, 125]
    totals = [sum(losses.values()) for losses in seen]
    assert reports[0]["loss"] == pytest.approx(sum(totals[:2]) / 2)
    assert reports[2]["loss"] == pytest.approx(totals[4])
    assert reports[0]["loss_square"] == pytest.approx((seen[0]["square"] + seen[1]["square"]) / 2)
    assert "epoch_loss" not in reports[1] and reports[2]["epoch_loss"] == pytest.approx(sum(totals) / 5)
    assert reports[2]["lr"] == pytest.approx(1.25) and reports[2]["epoch"] == 4


def spoil(engine, steps, what="both"):
    """Makes the losses of the given forward passes NaN; or only their values ("loss") or their gradient."""
    calls = iter(range(10**6))

    def hook(module, args, losses):
        if next(calls) not in steps:
            return losses
        if what == "gradient":
            for loss in losses.values():
                loss.register_hook(lambda gradient: gradient * torch.inf)
            return losses
        return {k: v * torch.nan if what == "both" else v + torch.inf for k, v in losses.items()}

    engine.model.register_forward_hook(hook)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["both", "loss", "gradient"])
def test_a_non_finite_step_is_skipped_and_the_rest_goes_on(name, what):
    engine, clean = a_loop(name), a_loop(name)
    spoil(engine, {1}, what)
    history = []
    engine.steps(range(4), stream(4), lambda step: history.append(engine.weights()))
    assert torch.equal(history[0], history[1]) and not torch.equal(history[1], history[2])
    assert all(w.isfinite().all() for w in history)
    state = engine.loop.optimizer.state_dict()["state"][0]
    assert state["step"] == 3 and state["exp_avg"].isfinite().all()
    assert all(0 < r["loss"] < 100 for r in engine.loop.log.reports)  # means over the finite steps
    clean.steps(range(1), stream(1))
    assert torch.equal(clean.weights(), history[0])


def test_an_optimizer_that_cannot_skip_is_not_stepped():
    engine = a_loop()
    engine.loop.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1e-3, momentum=0.9)
    spoil(engine, {1})
    history = []
    engine.steps(range(3), stream(3), lambda step: history.append(engine.weights()))
    assert torch.equal(history[0], history[1]) and not torch.equal(history[1], history[2])
    assert all(w.isfinite().all() for w in history)


def test_skipped_steps_are_counted_and_poison_no_mean():
    engine = a_loop(print_freq=2)
    spoil(engine, {1, 2, 3})
    engine.steps(range(19, 25), stream(6))  # reports after steps 20, 22, 24, 25
    reports = engine.loop.log.reports
    assert [r["skipped_steps"] for r in reports] == [0, 2, 1, 0]
    assert reports[1]["loss"] is None and reports[1]["grad_norm"] is None
    assert all(0 < r["loss"] < 100 for r in (reports[0], reports[2], reports[3])) and reports[3]["epoch_loss"] > 0


@pytest.mark.fault("F22", "150 non-finite steps of 300", "each skipped; the others count; weights finite")
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_many_skips_in_all_do_not_wear_the_guard_out(name):
    """Every other step counts, to the last: only many in a row end a run."""
    engine = a_loop(name)
    spoil(engine, set(range(0, 300, 2)))
    history = []
    engine.steps(range(300), stream(300), lambda step: history.append(engine.weights()))
    assert all(torch.equal(*pair) for pair in zip(history[1::2], history[2::2], strict=False))
    assert engine.weights().isfinite().all() and not torch.equal(history[-1], history[-2])
    assert engine.loop.optimizer.state_dict()["state"][0]["step"] == 150


def test_losing_every_step_ends_the_run_with_good_weights(monkeypatch):
    monkeypatch.setattr(loop, "MAX_BAD_STEPS", 4)
    engine = a_loop()
    spoil(engine, range(3, 10**6))
    with pytest.raises(FloatingPointError, match="last 5 steps before step 8, .* skipped: lower the learning rate"):
        engine.steps(range(20), stream(20))
    assert engine.weights().isfinite().all()


@pytest.mark.parametrize(
    ("name", "steps", "what", "ends"),
    [
        ("fp32", {98, 99}, "both", True),
        ("bf16", {98, 99}, "gradient", True),
        ("fp32", {99}, "both", False),  # one of two since the last report
        ("fp32", {97, 98}, "both", False),
        ("fp16", {98, 99}, "both", True),
        ("fp16", {98, 99}, "gradient", False),  # the scale is too large, and falls
        ("fp16", set(range(90, 100)), "gradient", True),
    ],
)
def test_a_run_does_not_end_well_if_its_last_steps_are_lost(name, steps, what, ends):
    engine = a_loop(name)
    spoil(engine, {step - 80 for step in steps}, what)
    with pytest.raises(FloatingPointError, match="steps before step 100") if ends else nullcontext():
        engine.steps(range(80, 100), stream(20))


@pytest.mark.fault("F21", "infinite gradients under fp16", "the scale is lowered")
def test_fp16_scales_and_backs_off():
    engine = a_loop("fp16")
    assert engine.loop.precision.scaler.get_scale() == 65536
    spoil(engine, {0})
    engine.steps(range(1), stream(1))
    assert engine.loop.precision.scaler.get_scale() == 32768
    assert not any(a_loop(name).loop.precision.scaler.is_enabled() for name in ("fp32", "bf16"))
    assert precision("auto", torch.device("cpu"))[0] == "fp32"


def test_a_step_never_reads_from_the_device():
    engine = a_loop(accum_iter=2, print_freq=1000)
    batches = stream(20)
    engine.step(batches, 1)  # state is made in the first step
    with reads() as found:
        engine.step(batches, 1)
    assert found == []
    with reads() as found:
        engine.loop.report(epoch_ends=False)
    assert found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_gpu(name):
    engine = a_loop(name, accum_iter=2, device="cuda", print_freq=1000)
    batches = iter([[t.pin_memory() for t in batch] for batch in stream(4)])
    engine.step(batches, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(batches, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("share", "hint", "said"), [(0.5, "buy a disk", 1), (0.5, "", 0), (0.05, "buy a disk", 0)])
def test_waiting_for_data_is_said_once_and_not_of_the_first_report(share, hint, said, monkeypatch):
    rates = {"seconds_per_step": 1.0, "images_per_s": 8.0, "data_share": share}
    monkeypatch.setattr(loop.Clock, "lap", lambda self, images: rates)
    engine = a_loop()
    engine.loop.data_hint = hint
    engine.steps(range(2), stream(2))
    assert engine.loop.log.lines == [] and len(engine.loop.log.reports) == 1
    engine.steps(range(2, 8), stream(6))
    assert engine.loop.log.lines == ["warning: 50% of the time is spent waiting for data: buy a disk"] * said


def test_meter_survives_a_checkpoint():
    meter, other = Meter(torch.device("cpu")), Meter(torch.device("cpu"))
    for value in (1.0, 2.0):
        meter.add({"a": torch.tensor(value)}, torch.tensor(3.0))
    meter.read()
    meter.add({"a": torch.tensor(6.0)}, torch.tensor(3.0))
    other.load_state_dict(meter.state_dict())
    assert other.read() == ({"a": 6.0, "grad_norm": 3.0}, 0)
    assert other.read(whole_epoch=True) == ({"a": 3.0, "grad_norm": 3.0}, 0)


@pytest.mark.parametrize(("world_size", "loss"), [(2, 6.0), (3, 4.0)])
def test_a_rank_continues_its_own_sums_and_the_mean_in_another_world_size(world_size, loss, monkeypatch):
    meters = [Meter(torch.device("cpu")) for _ in range(2)]
    for meter, value in zip(meters, (2.0, 6.0), strict=True):
        meter.add({"a": torch.tensor(value)}, torch.tensor(3.0))
    state = meters[0].state_dict() | {"sums": torch.stack([meter.sums for meter in meters])}
    monkeypatch.setattr(loop, "rank_and_world_size", lambda: (1, world_size))
    monkeypatch.setattr(loop, "all_reduce_sum", lambda tensor: tensor)
    meters[0].load_state_dict(state)
    assert meters[0].read()[0]["a"] == loss


def _train_half(rank, what):
    engine = a_loop()
    engine.model = nn.parallel.DistributedDataParallel(engine.model, gradient_as_bucket_view=True)
    engine.loop.accum_iter = 2
    if rank == 1:
        spoil(engine, {3}, what)  # one micro-batch of one process: both must skip that step
    own = ([t[4 * rank + i : 4 * rank + i + 2] for t in batch] for batch in stream(4) for i in (0, 2))
    engine.steps(range(4), own)
    return {"weights": engine.weights(), "losses": [r["loss"] for r in engine.loop.log.reports]}


@pytest.mark.parametrize("what", ["both", "loss"])
def test_two_processes_skip_alike_and_report_the_same(what):
    first, second = run_in_two_processes(_train_half, what)
    assert (first["weights"] == second["weights"]).all()
    assert first["losses"] == second["losses"]
    whole = a_loop()
    spoil(whole, {1})
    whole.steps(range(4), stream(4))
    torch.testing.assert_close(torch.from_numpy(first["weights"]), whole.weights(), rtol=1e-5, atol=1e-6)
    assert first["losses"] == pytest.approx([r["loss"] for r in whole.loop.log.reports], rel=1e-5)
