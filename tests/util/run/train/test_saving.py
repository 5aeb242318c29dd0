"""When a run saves, and what its thread writes while training goes on."""

import shlex
import threading
from argparse import Namespace
from concurrent.futures import wait
from dataclasses import replace

import pytest
import torch

from tests.loops import SilentLog, a_run, a_schedule
from tests.runs import contents, info_of_run
from tests.two_processes import run_in_two_processes
from util import atomic
from util.data.transforms import Normalize
from util.run.files import checkpoint
from util.run.files.checkpoint import list_finished, save_checkpoint, step_of
from util.run.processes.distributed import Process
from util.run.start import begin as begin_module
from util.run.start.begin import check_space, checkpoint_bytes
from util.run.train import saving
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver

CPU = torch.device("cpu")
FULL = OSError(28, "No space left on device")


def a_saver(folder, model=None, step=0, keep_every=1000, rank=0, world_size=1, save_minutes=0, save_steps=0):
    """A saver of a run of 100 steps that has begun at step 0 and is at `step`."""
    if model is None:
        model = torch.nn.Linear(2, 2)
    run = a_run(save_minutes=save_minutes, save_steps=save_steps)
    run.output_dir = folder
    run.process = Process(CPU, rank, world_size)
    schedule = replace(a_schedule(None, steps_per_epoch=10), keep_every=keep_every)
    optimizer = torch.optim.AdamW(model.parameters())
    loop = TrainLoop(run, model, optimizer, schedule, Normalize(), SilentLog(), state={})
    loop.meter.add({"a": torch.ones(()), "grad_norm": torch.ones(())})
    saver = CheckpointSaver(loop, info_of_run())
    loop.step = step
    return saver


def steps_in(folder):
    return [step_of(path) for path in list_finished(folder)]


def fill_disk(monkeypatch):
    def save_checkpoint(*_):
        raise FULL

    monkeypatch.setattr(checkpoint, "save_checkpoint", save_checkpoint)


@pytest.fixture
def gate(monkeypatch):
    """Writes wait in the thread until `gate.set()`."""
    gate = threading.Event()

    def wait_and_save(*args):
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(900)
        return save_checkpoint(*args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", wait_and_save)
    return gate


def open_when_waited_for(saver, gate, monkeypatch):
    """Opens the gate when the saver begins to wait for the write in flight."""
    join = saver.join

    def opened(**options):
        gate.set()
        join(**options)

    monkeypatch.setattr(saver, "join", opened)


def test_a_checkpoint_is_of_one_step(tmp_path, gate):
    """The optimizer changes weights, moments and sums in place while they are written."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.nn.BatchNorm2d(4))
    saver = a_saver(tmp_path, model)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    saver.loop.optimizer.step()
    for step in (1, 2):  # the second copy overwrites the first
        saver.loop.step = step
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        moments = saver.loop.optimizer.state_dict()["state"]
        first_moments = {number: moment["exp_avg"].clone() for number, moment in moments.items()}
        saver.save()
        for value in model.state_dict().values():
            value += 1
        for moment in moments.values():
            moment["exp_avg"] += 1
        saver.loop.meter.sums += 1
        gate.set()
        saver.finish()
        gate.clear()
        content = contents(tmp_path / f"checkpoint-{step}.pth")
        torch.testing.assert_close(content["model"], weights, rtol=0, atol=0)
        for number, first_moment in first_moments.items():
            assert torch.equal(content["optimizer"]["state"][number]["exp_avg"], first_moment)
        assert content["model"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
        assert content["meter"]["sums"].max() == step  # one more only after the copy


@pytest.mark.gpu
def test_a_copy_of_a_gpus_state_is_pinned_and_complete(tmp_path):
    """As soon as `copy` returns, since a thread reads it, while the next step changes the state."""
    saver = a_saver(tmp_path)
    saver.loop.device = torch.device("cuda")
    weights = torch.zeros(1024, 64, 16, 16, device="cuda").to(memory_format=torch.channels_last)  # takes milliseconds
    for value in (0, 1):
        copy = saver.copy({"a": [weights], "name": "x"})
        weights += 1
        assert (copy["a"][0] == value).all()
        assert copy["name"] == "x"
        assert copy["a"][0].is_pinned()
        assert copy["a"][0].stride() == weights.stride()


def test_a_save_by_time_is_left_out_while_another_is_written(tmp_path, gate):
    saver = a_saver(tmp_path, step=1, save_minutes=1)
    saver.save()
    saver.began -= 600
    saver.loop.step = 2
    assert not saver.is_time()
    gate.set()
    saver.finish()
    assert steps_in(tmp_path) == [1]


def test_a_save_by_steps_waits_for_the_write_before_it(tmp_path, gate, monkeypatch):
    saver = a_saver(tmp_path, step=1, save_steps=2)
    saver.save()
    saver.loop.step = 2
    assert saver.is_due()
    open_when_waited_for(saver, gate, monkeypatch)
    saver.save()
    saver.save()  # of the same step: nothing
    assert saver.writing is None
    assert steps_in(tmp_path) == [1, 2]


def test_the_best_weights_wait_for_the_write_before_them(tmp_path, gate, monkeypatch):
    saver = a_saver(tmp_path, step=1)
    before = saver.model.weight.detach().clone()
    saver.save()
    with torch.no_grad():
        saver.model.weight += 1
    open_when_waited_for(saver, gate, monkeypatch)
    saver.save_best(info_of_run())
    saver.finish()
    assert torch.equal(contents(tmp_path / "checkpoint-1.pth")["model"]["weight"], before)
    assert torch.equal(contents(tmp_path / "checkpoint-best.pth")["model"]["weight"], before + 1)


def test_a_kill_between_the_best_weights_and_their_record_leaves_weights_that_can_be_read(tmp_path, monkeypatch):
    saver = a_saver(tmp_path)
    saver.save_best(info_of_run(1))
    saver.finish()

    def killed(source, target):
        if target.suffix == ".json":
            raise KeyboardInterrupt
        source.replace(target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.replace_in(atomic, "os.replace", killed)
        saver.save_best(info_of_run(2))
        saver.finish()
    assert checkpoint.read_checkpoint(tmp_path / "checkpoint-best.pth").info.step == 2


def test_saves_by_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.replace_in(saving, "time.monotonic", lambda: now[0])
    saver = a_saver(tmp_path, save_minutes=5)
    saved = []
    for saver.loop.step in range(1, 21):
        now[0] += 70
        saver.save_best(info_of_run())  # does not count
        saver.finish()
        if saver.is_due():
            saver.save()
        saver.finish()
        saved.append(steps_in(tmp_path)[-1:])
    assert saved[3] == []
    assert saved[4] == [5]
    assert saved[19] == [20]


def test_a_write_that_fails_is_a_warning_at_the_next_report(tmp_path, monkeypatch):
    saver = a_saver(tmp_path, step=1, save_minutes=1)
    saver.save(final=True)
    saver.loop.step = 2
    saver.save(final=True)
    fill_disk(monkeypatch)
    saver.loop.step = 3
    saver.save()
    wait([saver.writing.outcome])
    saver.is_time()
    (warning,) = saver.loop.log.lines
    assert "checkpoint-3.pth could not be written" in warning
    assert steps_in(tmp_path) == [1, 2]
    monkeypatch.undo()
    saver.save(final=True)
    assert steps_in(tmp_path) == [2, 3]


def fail_to_save(saver, monkeypatch, step):
    """A save of `step` fails in the thread."""
    fill_disk(monkeypatch)
    saver.loop.step = step
    saver.save()
    wait([saver.writing.outcome])
    monkeypatch.undo()


def test_three_writes_in_a_row_that_fail_end_the_run(tmp_path, monkeypatch):
    saver = a_saver(tmp_path, save_minutes=60)
    for step in (3, 4):
        fail_to_save(saver, monkeypatch, step)
        assert not saver.is_time()
    saver.loop.step = 5
    saver.save()  # a good one
    saver.finish()
    for step in (6, 7):
        fail_to_save(saver, monkeypatch, step)
        assert not saver.is_time()
    fill_disk(monkeypatch)
    saver.loop.step = 8
    saver.save()
    with pytest.raises(OSError, match="No space left"):
        saver.finish()


def test_a_write_that_hangs_is_waited_for_at_the_next_report(tmp_path, gate, monkeypatch):
    """Then the watchdog ends the process."""
    now = [0.0]
    monkeypatch.replace_in(saving, "time.monotonic", lambda: now[0])
    saver = a_saver(tmp_path, save_minutes=1)
    saver.loop.step = 3
    saver.save()
    now[0] = 1799.0
    assert not saver.is_time()
    now[0] = 1801.0
    assert saver.is_time()
    gate.set()
    saver.join()


@pytest.mark.parametrize(
    ("continues", "free_mb", "fits"),
    [
        (False, 1.9, False),  # the second checkpoint is written beside the first
        (False, 2.1, True),
        (True, 0.9, False),
        (True, 1.1, True),
    ],
)
def test_a_disk_without_space_for_the_checkpoints(tmp_path, monkeypatch, continues, free_mb, fits):
    usage = Namespace(free=free_mb * 1e6)
    monkeypatch.replace_in(begin_module, "shutil.disk_usage", lambda path: usage)
    if fits:
        check_space(tmp_path, 1_000_000, continues)
        return
    with pytest.raises(OSError, match=f"--output_dir .* has {free_mb} MB free"):
        check_space(tmp_path, 1_000_000, continues)


def test_the_size_of_a_checkpoint_is_that_of_its_file(tmp_path):
    """Before the first step, when AdamW has no moments yet, and after it."""
    saver = a_saver(tmp_path, torch.nn.Linear(300, 200))
    expected = checkpoint_bytes(saver.model, saver.loop.optimizer)
    saver.model(torch.ones(1, 300)).sum().backward()
    saver.loop.optimizer.step()
    saver.loop.step = 1
    saver.save(final=True)
    size = (tmp_path / "checkpoint-1.pth").stat().st_size
    assert expected == pytest.approx(size, rel=0.02)
    assert checkpoint_bytes(saver.model, saver.loop.optimizer) == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("error", [ZeroDivisionError, FloatingPointError, KeyboardInterrupt])
def test_the_write_in_flight_is_complete_before_the_process_leaves(tmp_path, gate, monkeypatch, error):
    saver = a_saver(tmp_path, step=1)
    with pytest.raises(error), saver:
        saver.save()
        open_when_waited_for(saver, gate, monkeypatch)
        raise error
    assert steps_in(tmp_path) == [1]


def _save_slowly(rank, folder, is_full, final):
    """Returns whether the file was there when this rank's save came back, and what it raised. Rank 0 writes."""
    other_is_back = threading.Event()

    def save_checkpoint(*_):
        other_is_back.wait(1)  # it never comes, if all ranks wait
        if is_full:
            raise FULL
        (folder / "written").touch()

    checkpoint.save_checkpoint = save_checkpoint
    saver = a_saver(folder, step=7, rank=rank, world_size=2)
    raised = None
    try:
        saver.save(final)
        if not final:
            saver.finish()
    except OSError as error:
        raised = str(error)
    return {"is_written": (folder / "written").exists(), "raised": raised}


@pytest.mark.parametrize(
    ("is_full", "final"),
    [
        (False, True),
        (True, True),
        (False, False),
    ],
)
def test_no_rank_goes_on_before_the_checkpoint_is_written(tmp_path, is_full, final):
    """A rank that ends earlier makes torchrun or srun kill rank 0 in the middle of its write."""
    expected = {"is_written": not is_full, "raised": str(FULL) if is_full else None}
    assert run_in_two_processes(_save_slowly, tmp_path, is_full, final) == [expected, expected]


@pytest.mark.parametrize(
    ("saves", "kept", "good"),
    [  # saves: (step, steps before it in a row that were not finite)
        ([(10, 0), (20, 0), (30, 0)], [20, 30], 20),
        ([(10, 0), (20, 10)], [10], None),  # the weights are those of step 10, which no finite step has followed
        ([(10, 0), (20, 0), (30, 9), (40, 19)], [20, 30], 20),  # ruined by step 21
        ([(10, 0), (20, 0), (30, 10), (40, 20)], [10, 20], 10),  # ruined by step 20
        ([(10, 0), (20, 0), (30, 10), (40, 3), (50, 0)], [40, 50], 40),  # it went on
        ([(10, 0), (20, 0), (100, 80)], [10, 20, 100], 10),  # the end is always saved
    ],
)
def test_no_save_among_lost_steps_costs_the_last_good_checkpoint(tmp_path, saves, kept, good):
    saver = a_saver(tmp_path)
    for saver.loop.step, bad_streak in saves:
        saver.loop.meter.bad_streak.fill_(bad_streak)
        saver.save()
    saver.finish()
    assert steps_in(tmp_path) == kept
    advice = saver.name_last_good()
    if good is None:
        assert "No checkpoint of this run" in advice
    else:
        assert f"--resume {shlex.quote(str(tmp_path / f'checkpoint-{good}.pth'))}" in advice


def test_statistics_that_are_not_finite_are_not_saved(tmp_path):
    saver = a_saver(tmp_path, torch.nn.BatchNorm1d(2), step=7)
    saver.model(torch.full((2, 2), torch.nan))
    with pytest.raises(FloatingPointError, match="weights are not finite after step 7"):
        saver.save()
    assert not list(tmp_path.iterdir())
