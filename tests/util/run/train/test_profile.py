"""Traces of three steps, which change nothing in a run, and snapshots of a full GPU."""

import json
import pickle
import re

import pytest
import torch

from tests.runs import assert_same_state, losses, pretrain
from util.run.processes.distributed import Process
from util.run.train import profile
from util.run.train.profile import Profile

SHORT = ("--picture_every", 0)


def steps_in(path):
    """{name of a step: names of the operators in it} of a trace."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = {}
    for step in events:
        if step["name"].startswith("step "):
            end = step["ts"] + step["dur"]
            steps[step["name"]] = {event["name"] for event in events if step["ts"] <= event["ts"] < end}
    return steps


def test_a_trace_holds_three_steps_and_changes_nothing(photos, tmp_path):
    """The traced steps 2, 3 and 4 belong to two epochs, and a checkpoint is saved among them."""
    traced = pretrain(photos, tmp_path / "traced", *SHORT, "--profile", 1)
    assert_same_state(traced, pretrain(photos, tmp_path / "plain", *SHORT))
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")

    steps = steps_in(tmp_path / "traced" / "trace-1.json")
    assert sorted(steps) == ["step 2", "step 3", "step 4"]
    for operators in steps.values():
        assert {"aten::addmm", "AddmmBackward0", "aten::_fused_adamw_"} <= operators
    log = (tmp_path / "traced" / "log.txt").read_text()
    table = log.partition("trace-1.json\n")[2].splitlines()[:10]
    times = [float(line.split()[0]) for line in table]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0
    assert all(re.search(r" ms +[\d.]+% +\d+ x  \w", line) for line in table)  # which ones is a matter of the machine

    assert not list((tmp_path / "plain").glob("trace*"))


def test_a_run_that_ends_among_the_traced_steps_writes_them(photos, tmp_path):
    pretrain(photos, tmp_path, *SHORT, "--profile", 1, "--max_steps", 2)
    path = tmp_path / "trace-1.json"
    assert sorted(steps_in(path)) == ["step 2"]
    path.unlink()
    pretrain(photos, tmp_path, *SHORT, "--profile", 1)  # it resumes behind the first traced step
    assert not path.exists()


@pytest.mark.parametrize(
    ("first", "steps", "cut"),
    [
        (None, range(9), range(9)),
        (4, range(9), range(4)),
        (4, range(4, 9), range(4, 5)),
        (4, range(6, 9), range(6, 7)),
        (4, range(7, 9), range(7, 9)),
        (4, range(4), range(4)),
        (0, range(9), range(1)),
    ],
)
def test_traced_steps_are_made_one_by_one(first, steps, cut, tmp_path):
    assert Profile(first, 100, Process(torch.device("cpu")), tmp_path, log=None).cut(steps) == cut


@pytest.fixture
def memory(monkeypatch):
    """What is asked of the memory of a GPU, which is none."""
    calls = []
    monkeypatch.replace_in(profile, "torch.cuda.memory._record_memory_history", lambda **flags: calls.append(flags))
    monkeypatch.replace_in(profile, "torch.cuda.memory._dump_snapshot", calls.append)
    return calls


def end_with(error, first, folder):
    process = Process(torch.device("cuda", 0), rank=3, world_size=8)
    with pytest.raises(type(error)), Profile(first, 100, process, folder, log=None):
        raise error


def test_a_full_gpu_leaves_a_snapshot(memory, tmp_path, capfd):
    end_with(torch.OutOfMemoryError("CUDA out of memory"), 5, tmp_path)
    path = str(tmp_path / "memory-3.pickle")
    assert memory == [{"stacks": "python", "max_entries": 100_000}, path, {"enabled": None}]
    assert f"memory of process 3: {path}" in capfd.readouterr().err


def test_other_errors_leave_no_snapshot_and_without_the_flag_nothing_is_remembered(memory, tmp_path):
    end_with(RuntimeError("a bug"), 5, tmp_path)
    assert memory == [{"stacks": "python", "max_entries": 100_000}, {"enabled": None}]
    memory.clear()
    end_with(torch.OutOfMemoryError("CUDA out of memory"), None, tmp_path)
    assert memory == []


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_can_be_read(tmp_path):
    with pytest.raises(torch.OutOfMemoryError), Profile(0, 100, Process(torch.device("cuda", 0)), tmp_path, log=None):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    snapshot = pickle.loads((tmp_path / "memory-0.pickle").read_bytes())
    assert snapshot["device_traces"]


@pytest.mark.gpu
def test_a_trace_of_a_gpu_names_its_kernels(photos, tmp_path):
    pretrain(photos, tmp_path, *SHORT, "--device", "cuda", "--profile", 1)
    events = json.loads((tmp_path / "trace-1.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert " ms " in (tmp_path / "log.txt").read_text().partition("trace-1.json\n")[2].splitlines()[0]
