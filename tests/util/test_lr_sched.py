import math

import pytest
import torch

from util.lr_sched import Schedule


def test_mae_against_closed_forms():
    lr = Schedule("mae", steps_per_epoch=10, epochs=100, warmup_epochs=40, lr=2.0, min_lr=0.5)
    assert lr(0) == 0
    assert lr(200) == pytest.approx(1.0)  # the middle of the warm-up
    assert lr(400) == pytest.approx(2.0)  # the end of the warm-up
    assert lr(700) == pytest.approx(1.25)  # the middle of the cosine
    share = 0.5 * (1 + math.cos(math.pi * 59.9 / 60))
    assert lr(999) == pytest.approx(0.5 + 1.5 * share)
    for step in range(400):
        assert lr(step) < lr(step + 1)
    for step in range(400, 999):
        assert lr(step) > lr(step + 1)
    assert lr(555, 0.3) == 0.3 * lr(555)
    assert lr(1000, 0.3) == pytest.approx(0.3 * 0.5)  # including the floor


def test_mae_without_a_warmup_starts_at_the_peak():
    assert Schedule("mae", steps_per_epoch=10, epochs=5, warmup_epochs=0, lr=1.0)(0) == 1.0


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_mff_reaches_its_peak_within_the_warmup_and_has_one_floor_for_all_layers(scale):
    lr = Schedule(
        "mff",
        steps_per_epoch=10,
        epochs=100,
        warmup_epochs=5,
        lr=2.0,
        min_lr=0.01,
        warmup_lr=2e-4,
    )
    peak = 2.0 * scale
    for step in range(50):
        share = 1e-4 + (1 - 1e-4) * step / 49
        assert lr(step, scale) == pytest.approx(peak * share)
    assert lr(50, scale) == pytest.approx(peak)
    assert lr(525, scale) == pytest.approx((peak + 0.01) / 2)
    assert lr(1000, scale) == pytest.approx(0.01)


@pytest.mark.parametrize(("warmup", "share"), [(20, 0.9045), (10, 0.9755)])
def test_simmims_cosine_includes_the_warmup(warmup, share):
    """The release's shares of the peak right after the warm-up were measured for 20 and for 10 of 100 epochs."""
    lr = Schedule(
        "simmim",
        steps_per_epoch=1000,
        epochs=100,
        warmup_epochs=warmup,
        lr=1.0,
        min_lr=0.0,
        warmup_lr=1e-3,
    )
    assert lr(0) == lr(1) == 1e-3 < lr(2)  # the release sets the rate after a step, from its number
    assert lr(1000 * warmup) == pytest.approx(1.0, abs=1e-4)
    assert lr(1000 * warmup + 1) == pytest.approx(share, abs=1e-4)


def test_simmims_start_and_floor_are_the_same_for_all_layers():
    lr = Schedule(
        "simmim",
        steps_per_epoch=1000,
        epochs=100,
        warmup_epochs=20,
        lr=1.0,
        min_lr=0.02,
        warmup_lr=1e-3,
    )
    assert lr(0, 0.5) == 1e-3
    assert lr(50_001, 0.5) == pytest.approx(0.02 + (0.5 - 0.02) / 2)
    assert lr(100_001, 0.5) == pytest.approx(0.02)


def test_simmims_steps():
    settings = dict(
        steps_per_epoch=10,
        epochs=800,
        warmup_epochs=10,
        lr=4e-4,
        warmup_lr=2e-6,
        lr_steps=(700,),
    )
    lr = Schedule("simmim_steps", **settings)
    assert lr(0) == lr(1) == 2e-6
    assert lr(51) == pytest.approx(2e-6 + (4e-4 - 2e-6) / 2)
    assert lr(101) == lr(7000) == pytest.approx(4e-4)
    assert lr(7001) == lr(7999) == pytest.approx(4e-5)
    assert lr(7001, 0.65) == pytest.approx(0.65 * 4e-5)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_wsd_against_a_table_and_timm(scale):
    lr = Schedule(
        "wsd", steps_per_epoch=10, epochs=12, warmup_epochs=2.5, lr=2.0, min_lr=0.5, warmup_lr=0.1, decay_epochs=4
    )
    rates = [lr(step, scale) / scale for step in range(121)]
    assert rates[:26] == pytest.approx([0.1 + 1.9 * step / 25 for step in range(26)])
    assert rates[25:81] == [2.0] * 56
    # 1 - sqrt(x) at sixteenths, quarters and the end of the decay: of 1.5 above the floor
    assert lr(80 + 40 / 16) == pytest.approx(0.5 + 1.5 * 3 / 4)
    assert [rates[90], rates[110], rates[120]] == pytest.approx([1.25, 2 - 1.5 * 0.75**0.5, 0.5])

    module = pytest.importorskip("timm.scheduler.wsd_lr", reason="timm has it from 1.0.31 on")
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 2.0, "lr_scale": scale}
    optimizer = torch.optim.SGD([group])
    sizes = {"t_initial": 95, "decay_t": 40, "warmup_t": 25, "t_in_epochs": False}  # the warm-up counts apart
    timms = module.WSDLRScheduler(optimizer, lr_min=0.5, warmup_lr_init=0.1, **sizes)
    for step, rate in enumerate(rates):
        timms.step_update(step)
        assert scale * rate == pytest.approx(optimizer.param_groups[0]["lr"]), step
