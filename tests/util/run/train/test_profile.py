"""Traces of three steps, which change nothing in a run."""

import json

import pytest
import torch

from tests.runs import assert_same_state, losses, pretrain
from util.run.processes.distributed import Process
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
def test_traced_steps_are_made_one_by_one(first, steps, cut):
    assert Profile(first, 100, Process(torch.device("cpu")), log=None).cut(steps) == cut


@pytest.mark.gpu
def test_a_trace_of_a_gpu_names_its_kernels(photos, tmp_path):
    pretrain(photos, tmp_path, *SHORT, "--device", "cuda", "--profile", 1)
    events = json.loads((tmp_path / "trace-1.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
