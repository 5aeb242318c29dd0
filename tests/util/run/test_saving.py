"""When a run saves, and what its thread writes while training goes on."""

import re
import shlex
import threading
import time
from argparse import Namespace
from concurrent.futures import wait

import pytest
import torch

from tests.runs import contents, info_of_run
from tests.two_processes import run_in_two_processes
from util.run import checkpoint, saving
from util.run.checkpoint import list_finished, save_checkpoint, step_of
from util.run.loop import Meter
from util.run.saving import CheckpointSaver
from util.run.shard import HostCopies

FULL = OSError(28, "No space left on device")


def a_saver(folder, model, step=0, keep_every=1000, rank=0, **how_often):
    log = Namespace(lines=[], info=lambda line: log.lines.append(line))
    loop = Namespace(step=0, last_step=100, meter=Meter(torch.device("cpu")), device=torch.device("cpu"), log=log)
    loop.meter.add({"a": torch.ones(())}, torch.ones(()))
    loop.optimizer = torch.optim.AdamW(model.parameters())
    loop.precision = Namespace(scaler=torch.amp.GradScaler("cpu", enabled=False))
    start = Namespace(output_dir=folder, lock=None, process=Namespace(is_main=rank == 0))
    schedule = Namespace(keep_every=keep_every, num_steps=100, steps_per_epoch=10)
    saver = CheckpointSaver(start, info_of_run(), model, loop, schedule, **how_often)
    loop.step = step
    return saver


@pytest.fixture
def gate(monkeypatch):
    """Writes wait in the thread until `gate.set()`."""
    gate = threading.Event()

    def wait_and_save(*args):
        assert threading.current_thread() is not threading.main_thread() and gate.wait(240)
        return save_checkpoint(*args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", wait_and_save)
    return gate


def open_when_waited_for(saver, gate, monkeypatch):
    """Opens the gate when the saver begins to wait for the write in flight."""
    join = saver.join

    def opened(*args):
        gate.set()
        join(*args)

    monkeypatch.setattr(saver, "join", opened)


def steps_in(folder):
    return [step_of(path) for path in list_finished(folder)]


def test_a_checkpoint_is_of_one_step(tmp_path, gate):
    """The optimizer changes weights, moments and sums in place while they are written."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.nn.BatchNorm2d(4))
    saver = a_saver(tmp_path, model, step=1)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    saver.loop.optimizer.step()
    for step in (1, 2):  # the second copy overwrites the first
        saver.loop.step = step
        state = {"model": model.state_dict(), "optimizer": saver.loop.optimizer.state_dict()}
        flat = {path: value.clone() for path, value in tensors_of(state)}
        saver.save()
        with torch.no_grad():
            for _, value in tensors_of(state):
                value.add_(1)
            saver.loop.meter.sums += 1
        gate.set()
        saver.finish()
        gate.clear()
        content = contents(tmp_path / f"checkpoint-{step}.pth")
        found = dict(tensors_of({name: content[name] for name in state}))
        assert found.keys() == flat.keys() and all(torch.equal(found[path], flat[path]) for path in flat)
        assert content["model"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
        assert content["meter"]["sums"].max() == step  # one more only after the copy


@pytest.mark.gpu
def test_a_copy_of_a_gpus_state_is_pinned_and_complete():
    weights = torch.zeros(64, 3, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    copies, state = HostCopies(weights.device), {"a": [weights], "step": torch.zeros(()), "name": "x"}
    for value in (0, 1):
        copy = copies.take(state, keep=True)
        weights += 1
        assert copy["a"][0].is_pinned() and copy["a"][0].stride() == weights.stride() and copy["name"] == "x"
        assert (copy["a"][0] == value).all() and len(copies.buffers) == 2


def tensors_of(content, path=()):
    if torch.is_tensor(content):
        yield path, content
    elif isinstance(content, (dict, list)):
        for name, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from tensors_of(value, (*path, name))


def test_one_write_at_a_time(tmp_path, gate, monkeypatch):
    """A save that is due by time is left out while another is written. One by steps waits."""
    saver = a_saver(tmp_path, torch.nn.Linear(2, 2), step=1, minutes=1, steps=2)
    saver.save()
    saver.began -= 3600
    saver.save_by_time()
    saver.save()  # of the same step
    saver.loop.step = 2
    saver.save_by_time()
    assert steps_in(tmp_path) == [] and saver.name == 1 and saver.is_due()
    open_when_waited_for(saver, gate, monkeypatch)
    saver.save()
    assert steps_in(tmp_path)[0] == 1 and saver.name == 2
    saver.finish()
    assert steps_in(tmp_path) == [1, 2]


def test_the_best_weights_wait_for_the_write_before_them(tmp_path, gate, monkeypatch):
    model = torch.nn.Linear(2, 2)
    saver, before = a_saver(tmp_path, model, step=1), model.weight.detach().clone()
    saver.save()
    with torch.no_grad():
        model.weight += 1
    open_when_waited_for(saver, gate, monkeypatch)
    saver.write("best", {"model": model.state_dict()}, {})
    saver.finish()
    found = [contents(tmp_path / f"checkpoint-{name}.pth")["model"]["weight"] for name in (1, "best")]
    assert torch.equal(found[0], before) and torch.equal(found[1], before + 1)


def test_saves_by_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.replace_in(saving, "time.monotonic", lambda: now[0])
    saver, saved = a_saver(tmp_path, torch.nn.Linear(2, 2), minutes=5, keep_every=30), []
    for saver.loop.step in range(1, 21):
        now[0] += 70
        saver.write("best", {}, {})  # does not count
        saver.finish()
        saver.save_by_time()
        saver.finish()
        saved += [step for step in steps_in(tmp_path) if step not in saved]
    assert saved == [5, 10, 15, 20]
    due = []
    for saver.loop.step in range(1, 101):
        due += [saver.loop.step] * saver.is_due()
    assert due == [30, 60, 90, 100]
    never = a_saver(tmp_path / "never", torch.nn.Linear(2, 2), step=1)
    never.save_by_time()
    assert never.writing is None


def test_a_write_that_fails(tmp_path, monkeypatch):
    """As if training had waited for it: a warning at the next report, and the older checkpoints stay."""
    saver = a_saver(tmp_path, torch.nn.Linear(2, 2), minutes=1)
    for saver.loop.step in (1, 2, 3):
        saver.save(final=True)
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda *_: (_ for _ in ()).throw(FULL))
    saver.loop.step = 4
    saver.save()
    wait([saver.writing])
    saver.save_by_time()
    (warning,) = saver.loop.log.lines
    assert warning == f"warning: checkpoint-4.pth could not be written ({FULL}); training goes on"
    with pytest.raises(OSError, match="No space left"):
        saver.save(final=True)
    assert len(saver.loop.log.lines) == 1 and steps_in(tmp_path) == [2, 3]
    monkeypatch.undo()
    saver.save(final=True)
    assert steps_in(tmp_path) == [3, 4]


@pytest.mark.parametrize("error", [None, RuntimeError, FloatingPointError, KeyboardInterrupt])
def test_the_write_in_flight_is_complete_before_the_process_leaves(tmp_path, gate, monkeypatch, error):
    saver = a_saver(tmp_path, torch.nn.Linear(2, 2), step=1)
    with pytest.raises(error or ZeroDivisionError), saver:
        saver.save()
        assert steps_in(tmp_path) == []
        open_when_waited_for(saver, gate, monkeypatch)
        raise error or ZeroDivisionError
    assert steps_in(tmp_path) == [1]


def _save_slowly(rank, folder, error, final):
    """Returns whether the file was there when this rank's save came back, and what it raised. Rank 0 writes slowly."""

    def save_checkpoint(*_):
        time.sleep(1)
        if error:
            raise FULL
        (folder / "written").touch()

    checkpoint.save_checkpoint = save_checkpoint
    saver, raised = a_saver(folder, torch.nn.Linear(2, 2), step=7, rank=rank), None
    try:
        saver.save(final)
        if not final:
            saver.finish()
    except OSError as failure:
        raised = failure.errno
    return {"written": (folder / "written").exists(), "raised": raised}


@pytest.mark.parametrize(("error", "final"), [(False, True), (True, True), (False, False)])
def test_no_rank_goes_on_before_the_checkpoint_is_written(tmp_path, error, final):
    """A rank that ends earlier makes torchrun or srun kill rank 0 in the middle of its write."""
    results = run_in_two_processes(_save_slowly, tmp_path, error, final)
    assert [result["raised"] for result in results] == [28 if error else None] * 2
    assert [result["written"] for result in results] == [not error] * 2


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
    saver = a_saver(tmp_path, torch.nn.Linear(2, 2))
    for error in (FloatingPointError(), OSError()):
        assert re.search("No checkpoint of this run|starts from the beginning", saver.advice(error))
    for saver.loop.step, bad in saves:
        saver.loop.meter.bad_streak.fill_(bad)
        saver.save()
    saver.finish()
    assert steps_in(tmp_path) == kept
    advice = saver.advice(FloatingPointError())
    resume = f"--resume {shlex.quote(str(tmp_path / f'checkpoint-{good}.pth'))}"
    assert (resume if good else "No checkpoint of this run") in advice
    assert "goes on from the newest checkpoint" in saver.advice(OSError()) and saver.advice(ValueError()) == ""


def test_statistics_that_are_not_finite_are_not_saved(tmp_path):
    saver = a_saver(tmp_path, torch.nn.BatchNorm1d(2), step=7)
    saver.model(torch.full((2, 2), torch.nan))
    with pytest.raises(FloatingPointError, match="weights are not finite after step 7"):
        saver.save()
    assert not list(tmp_path.iterdir())
