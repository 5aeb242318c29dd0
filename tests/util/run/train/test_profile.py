"""Traces of three steps, which change nothing in a run."""

import json

import pytest

from tests.runs import assert_same_state, losses, pretrain

SHORT = ("--picture_every", 0)


def steps_in(path):
    """{name of a step: names of the operators in it} of a trace."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = {}
    for step in events:
        if step["name"].startswith("ProfilerStep#"):
            end = step["ts"] + step["dur"]
            steps[step["name"]] = {event["name"] for event in events if step["ts"] <= event["ts"] < end}
    return steps


def test_a_trace_holds_three_steps_and_changes_nothing(photos, tmp_path):
    """The traced steps 2, 3 and 4 belong to two epochs, and a checkpoint is saved among them."""
    traced = pretrain(photos, tmp_path / "traced", *SHORT, "--profile", 1)
    assert_same_state(traced, pretrain(photos, tmp_path / "plain", *SHORT))
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")

    steps = steps_in(tmp_path / "traced" / "trace-1.json")
    assert sorted(steps) == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    for operators in steps.values():
        assert {"aten::addmm", "AddmmBackward0", "aten::_fused_adamw_"} <= operators
    assert not list((tmp_path / "plain").glob("trace*"))


def test_a_run_that_ends_among_the_traced_steps_writes_them(photos, tmp_path):
    pretrain(photos, tmp_path, *SHORT, "--profile", 1, "--max_steps", 2)
    path = tmp_path / "trace-1.json"
    assert sorted(steps_in(path)) == ["ProfilerStep#1"]
    path.unlink()
    pretrain(photos, tmp_path, *SHORT, "--profile", 1)  # it resumes behind the first traced step
    assert not path.exists()


@pytest.mark.gpu
def test_a_trace_of_a_gpu_names_its_kernels(photos, tmp_path):
    pretrain(photos, tmp_path, *SHORT, "--device", "cuda", "--profile", 1)
    events = json.loads((tmp_path / "trace-1.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
