"""The loop of pre-training: optimizer steps, accumulation, reports, and steps that are not finite."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.loops import a_driver
from tests.patches import StandIn
from tests.two_processes import run_in_two_processes
from util import collectives
from util.data.transforms import Normalize
from util.run.processes import distributed, supervise
from util.run.processes.distributed import Process
from util.run.train import reports as reports_module
from util.run.train.reports import Meter

CPU = torch.device("cpu")


class TwoLosses(nn.Module):
    """The smallest model that meets the contract: two named losses, no sampling, images of one pixel."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(3, 4)
        nn.init.constant_(self.decoder.weight, 0.1)
        nn.init.constant_(self.decoder.bias, 0.3)

    def forward(self, imgs, ids_shuffle):
        out = self.decoder(imgs.flatten(1))
        weighted = 0.1 * out * ids_shuffle
        return {"square": out.square().mean(), "sum": weighted.mean()}


def learning_rate(step, lr_scale=1.0):
    return 1e-2 * (step + 1)


def a_loop(precision_name="fp32", accum_iter=1, model=None, print_freq=2, device="cpu"):
    """A Driver with the learning rate .01 (step + 1)."""
    model = TwoLosses() if model is None else model
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    options = dict(accum_iter=accum_iter, print_freq=print_freq)
    return a_driver(model, optimizer, learning_rate, precision_name, device, **options)


def stream(num, size=8):
    """Yields batches that are the same in each call."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        imgs = torch.randint(0, 256, (size, 3, 1, 1), dtype=torch.uint8, generator=generator)
        yield imgs, torch.zeros(size), torch.ones(size, 4, dtype=torch.int64)


def parts_of(batches, starts, size):
    """Yields the samples from each of `starts` on, of each batch, as micro-batches."""
    for batch in batches:
        for start in starts:
            yield [tensor[start : start + size] for tensor in batch]


def history_of(engine, steps, batches):
    """Makes the steps. Returns the weights after each."""
    history = []
    engine.steps(steps, batches, lambda step: history.append(engine.weights()))
    return history


def losses_of(engine):
    return [report["loss"] for report in engine.loop.log.reports]


def skipped_of(engine):
    return [report["skipped_steps"] for report in engine.loop.log.reports]


# ----------------------------------------------------------------------------------------------------- ordinary steps


def test_every_micro_batch_of_every_rank_and_step_has_a_seed_of_its_own():
    seeds = set()
    for rank in range(3):
        training_loop = a_loop().loop
        training_loop.process = Process(CPU, rank, world_size=3)
        for step in range(2):
            for micro in range(3):
                training_loop.seed_draws(step, micro)
                seeds.add(torch.initial_seed())
    assert len(seeds) == 18


def test_steps_are_adamw_s_on_the_summed_losses():
    engine = a_loop()
    engine.model.eval()
    engine.steps(range(3, 6), stream(3))
    assert engine.model.training
    model = TwoLosses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for step, (imgs, _, ids) in enumerate(stream(3), 3):
        optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1)
        optimizer.zero_grad()
        losses = model(Normalize()(imgs), ids)
        (losses["square"] + losses["sum"]).backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(model.parameters())
    assert_close(engine.weights(), expected.detach(), rtol=1e-6, atol=1e-7)


def test_accumulation_equals_the_whole_batch():
    whole = a_loop()
    whole.steps(range(5), stream(5))
    parts = a_loop(accum_iter=4)
    micro_batches = parts_of(stream(5), starts=(0, 2, 4, 6), size=2)
    parts.steps(range(5), micro_batches)
    assert_close(parts.weights(), whole.weights(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(parts.loop.log.reports, whole.loop.log.reports, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_reports_are_means_of_all_steps_since_the_last():
    engine = a_loop(print_freq=2)
    squares = []
    totals = []

    def keep(module, args, losses):
        square = losses["square"].item()
        squares.append(square)
        totals.append(square + losses["sum"].item())

    engine.model.register_forward_hook(keep)
    engine.steps(range(120, 125), stream(5))
    first, second, last = engine.loop.log.reports
    assert first["step"] == 122
    assert second["step"] == 124
    assert last["step"] == 125
    assert first["loss"] == pytest.approx(sum(totals[:2]) / 2)
    assert first["loss_square"] == pytest.approx(sum(squares[:2]) / 2)
    assert last["loss"] == pytest.approx(totals[4])
    assert "epoch_loss" not in second
    assert last["epoch_loss"] == pytest.approx(sum(totals) / 5)
    assert last["lr"] == pytest.approx(1.25)
    assert last["epoch"] == 4


@pytest.mark.gpu
def test_batches_that_are_copied_on_a_stream_of_their_own_are_whole():
    """While the GPU computes; memory is reused from copy to copy."""
    copies = distributed.DeviceCopies(torch.device("cuda", 0))
    work = torch.randn(4096, 4096, device="cuda")
    sums = []
    for number in range(20):
        batch = torch.full((1 << 22,), float(number)).pin_memory()
        for _ in range(5):
            work = (work @ work).tanh()
        sums.append(copies.copy(batch).mean())
    assert [total.item() for total in sums] == list(range(20))


# ---------------------------------------------------------------------------------------- steps that are not finite


def spoil(engine, passes, what="both"):
    """Makes the losses of the given forward passes NaN; or only their values ("loss") or their gradient."""
    count = 0

    def hook(module, args, losses):
        nonlocal count
        count += 1
        if count - 1 not in passes:
            return losses
        spoiled = {}
        for name, loss in losses.items():
            spoiled[name] = loss
            if what == "loss":
                spoiled[name] = loss + torch.inf
            elif what == "both":
                spoiled[name] = loss * torch.nan
            else:
                loss.register_hook(lambda gradient: gradient * torch.inf)
        return spoiled

    engine.model.register_forward_hook(hook)


def test_each_batch_that_is_loaded_ahead_has_the_time_of_a_micro_batch():
    """Else the watchdog would end a process that loads those of two steps, which may take longer than its time-out."""
    loop = a_loop(accum_iter=3).loop

    def load():
        for number in range(12):
            assert loop.watchdog.since is not None  # a heartbeat since the batch before
            loop.watchdog.since = None
            yield [number]

    ahead = loop.load_ahead(load())
    assert [loop.next_batch(ahead, 0) for _ in range(12)] == [[number] for number in range(12)]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["both", "loss", "gradient"])
def test_a_non_finite_step_is_skipped_and_the_rest_goes_on(name, what):
    engine = a_loop(name)
    spoil(engine, {1}, what)
    history = history_of(engine, range(4), stream(4))
    clean = a_loop(name)
    clean.steps(range(1), stream(1))
    assert torch.equal(history[0], clean.weights())
    assert torch.equal(history[1], history[0])
    assert not torch.equal(history[2], history[1])
    assert history[3].isfinite().all()
    state = engine.loop.optimizer.state_dict()["state"][0]
    assert state["step"] == 3
    assert state["exp_avg"].isfinite().all()
    assert all(0 < loss < 100 for loss in losses_of(engine))  # means over the finite steps


def test_skipped_steps_are_counted_and_poison_no_mean():
    engine = a_loop(print_freq=2)
    spoil(engine, {1, 2, 3})
    engine.steps(range(19, 25), stream(6))  # reports after steps 20, 22, 24, 25
    reports = engine.loop.log.reports
    assert skipped_of(engine) == [0, 2, 1, 0]
    lost = reports.pop(1)
    assert lost["loss"] is None
    assert lost["grad_norm"] is None
    for report in reports:
        assert 0 < report["loss"] < 100
    assert reports[-1]["epoch_loss"] > 0


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_many_skips_in_all_do_not_wear_the_guard_out(name):
    """Every other step counts, to the last: only many in a row end a run."""
    engine = a_loop(name)
    spoil(engine, range(0, 300, 2))
    history = history_of(engine, range(300), stream(300))
    for before, skipped in zip(history[1:-1:2], history[2::2], strict=True):
        assert torch.equal(before, skipped)
    assert history[-1].isfinite().all()
    assert not torch.equal(history[-1], history[-2])
    for state in engine.loop.optimizer.state.values():
        assert state["step"] == 150


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
    error = pytest.raises(FloatingPointError, match="steps before step 100")
    with error if ends else nullcontext():
        engine.steps(range(80, 100), stream(20))


def test_fp16_scales_and_backs_off():
    engine = a_loop("fp16")
    assert engine.loop.precision.scaler.get_scale() == 65536
    spoil(engine, {0})
    engine.steps(range(1), stream(1))
    assert engine.loop.precision.scaler.get_scale() == 32768


# -------------------------------------------------------------------------------------------------------- the meter


def step_of(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


def a_meter(*losses):
    meter = Meter(CPU)
    for loss in losses:
        meter.add(step_of(a=loss, grad_norm=3.0))
    return meter


def test_a_run_that_is_resumed_with_other_values_averages_each_over_its_own_steps():
    """Before: 2 and a step that was not finite. After: 4, with a value more in place of one that is gone."""
    meter = Meter(CPU)
    meter.add(step_of(a=2.0, gone=1.0, grad_norm=3.0))
    meter.add(step_of(a=1.0, gone=1.0, grad_norm=float("nan")))
    other = Meter(CPU)
    other.load_state_dict(meter.state_dict())
    other.add(step_of(a=4.0, grad_norm=3.0, new=7.0))
    assert other.means(other.since_report) == {"a": 3.0, "grad_norm": 3.0, "new": 7.0}
    assert other.num_skipped(other.since_report) == 1


@pytest.mark.parametrize(("world_size", "loss"), [(2, 6.0), (3, 4.0)])
def test_a_rank_continues_its_own_sums_and_the_mean_in_another_world_size(world_size, loss, monkeypatch):
    first = a_meter(2.0)
    second = a_meter(6.0)
    state = first.state_dict()
    state["sums"] = torch.cat([state["sums"], second.state_dict()["sums"]])
    monkeypatch.setattr(reports_module, "rank_and_world_size", lambda: (1, world_size))
    first.load_state_dict(state)
    assert first.means(first.since_report)["a"] == loss


# ------------------------------------------------------------------------------------------------------ two processes


def _train_half(rank, what):
    engine = a_loop(accum_iter=2)
    engine.model = nn.parallel.DistributedDataParallel(engine.model, gradient_as_bucket_view=True)
    if rank == 1:
        spoil(engine, {3}, what)  # one micro-batch of one process: both must skip that step
    micro_batches = parts_of(stream(4), starts=(4 * rank, 4 * rank + 2), size=2)
    engine.steps(range(4), micro_batches)
    return {"weights": engine.weights(), "losses": losses_of(engine), "skipped": skipped_of(engine)}


@pytest.mark.parametrize("what", ["both", "loss"])
def test_two_processes_skip_alike_and_report_the_same(what):
    first, second = run_in_two_processes(_train_half, what)
    assert (first["weights"] == second["weights"]).all()
    assert first["losses"] == second["losses"]
    whole = a_loop()
    spoil(whole, {1})
    whole.steps(range(4), stream(4))
    weights = torch.from_numpy(first["weights"])
    assert_close(weights, whole.weights(), rtol=1e-5, atol=1e-6)
    assert first["losses"] == pytest.approx(losses_of(whole), rel=1e-5)
    assert first["skipped"] == skipped_of(whole)


def _reports_of(rank):
    """Two reports of two steps. Also returns what the ranks exchange: in steps, and in the report after them."""
    engine = a_loop()
    bad = torch.zeros(24, dtype=torch.uint8)
    bad[: rank + 1] = 1
    engine.loop.reports.bad_images = bad
    engine.loop.reports.hosts = ["node1", "node2"]
    engine.loop.reports.data_hint = "buy a disk"
    lines = []
    engine.loop.log.report = lambda step, scalars, line, *_: lines.append((scalars, line))
    calls = []

    def counted(name):
        function = getattr(collectives.dist, name)

        def count(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return count

    names = ("all_reduce", "broadcast", "broadcast_object_list", "all_gather", "all_gather_object")
    stand_ins = {name: counted(name) for name in names}
    collectives.dist = StandIn(collectives.dist, **stand_ins)
    batches = parts_of(stream(4), starts=(4 * rank,), size=4)
    for step in range(4):
        if step == 3:  # of some 20,000 s, the one has waited for 2,000, the other for 10,000
            engine.loop.clock.start -= 20_000
            engine.loop.clock.data_seconds += (2_000, 10_000)[rank]
        engine.step(batches, step)
    return {
        "calls": calls,
        "num_bad": engine.loop.reports.num_bad_images,
        "lines": lines,
        "log": engine.loop.log.lines,
    }


def test_a_report_is_one_exchange_and_names_the_rank_that_waits_longest_for_data():
    first, second = run_in_two_processes(_reports_of)
    for found in (first, second):
        step = ["all_reduce"]  # of the flags of a signal
        report = ["all_gather"]
        assert found["calls"] == [*step, *report, *step, *step, *report, *step]
        assert found["num_bad"] == 3
        scalars, line = found["lines"][1]
        assert scalars["data_share"] == pytest.approx(0.5, abs=0.05)
        assert scalars["data_rank"] == 1
        assert ", data 50% on rank 1 (node2), " in line
    assert first["lines"][1][0]["host_share"] > 0.8
    assert first["log"][0].startswith("warning: 50% of the time on rank 1 (node2) is spent waiting for data")


# ------------------------------------------------------------------------------------------------------------- waiting


def _stops_in_work(rank):
    driver = a_loop()
    answers = []
    for i in range(4):
        if rank == 1 and i == 1:
            driver.loop.stop.name = "SIGTERM"
        try:
            driver.loop.stop_if_asked()
            answers.append("goes on")
        except supervise.Stopped:
            answers.append("stopped")
    return answers


def test_work_between_steps_is_stopped_on_all_processes_by_a_signal_to_one():
    for answers in run_in_two_processes(_stops_in_work):
        assert answers == ["goes on", "goes on", "stopped", "stopped"]
