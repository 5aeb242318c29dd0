"""A signal while a run evaluates: no step is lost, nothing half done is written, and the next start does it."""

import json
import os
import signal

import pytest

from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.runs import assert_same_state, finetune, pretrain, reports, reports_without_times, state
from util.evaluate import context as evaluation_context
from util.evaluate.evaluator import Evaluator
from util.run.files.checkpoint import list_finished, step_of
from util.run.train import saving
from util.run.train.loop import TrainLoop

ATTENTION = "--sampling attention --attention_start 0 --attention_every 1 --epochs 3 --throw_ratio 0.25"
CASES = {  # the step with the work, and the program
    "kNN before training": (0, pretrain.also("--knn_every 1")),
    "kNN": (3, pretrain.also("--knn_every 1")),
    "attention maps": (3, pretrain.also(ATTENTION)),
    "fine-tuning": (3, finetune.also("--batch_size 4 --total_batch_size 8 --drop_path 0.1")),
    "segmentation": (4, segment),
    "detection": (4, detect),
}
WORK = {"rankme", "val_num_images"}  # what only reports of evaluations hold


@pytest.fixture
def data_of(labelled, tmp_path):
    def write(program):
        if program.module == segment.module:
            return write_stripes(tmp_path / "stripes")
        if program.module == detect.module:
            return write_shapes(tmp_path / "shapes")
        return labelled

    return write


def signal_at_question(monkeypatch, step, number):
    """SIGTERM comes just before the work after `step` asks for signals for the `number`-th time."""
    questions = []
    stop_if_asked = TrainLoop.stop_if_asked

    def ask(loop):
        if loop.step == step:
            questions.append(number)
            if len(questions) == number:
                os.kill(os.getpid(), signal.SIGTERM)
        stop_if_asked(loop)

    monkeypatch.setattr(TrainLoop, "stop_if_asked", ask)
    monkeypatch.setattr(evaluation_context, "IMAGES_PER_QUESTION", 1)


def results(folder):
    content = json.loads((folder / "results.json").read_text())
    return content["last"], content.get("best")


@pytest.mark.parametrize("name", CASES)
def test_a_signal_in_work_between_steps(name, data_of, tmp_path, monkeypatch):
    step, program = CASES[name]
    data = data_of(program)
    program(data, tmp_path / "undisturbed")
    signal_at_question(monkeypatch, step, 3)  # the first question comes before the work
    folder = tmp_path / "out"
    assert program.module.main(program.command(data, folder)) is False
    assert [step_of(path) for path in list_finished(folder)] == [step] * (step > 0)
    assert not list(folder.glob("checkpoint-best*"))
    assert not list(folder.glob("attention/*"))
    assert not (folder / "results.json").exists()
    assert not any(WORK & report.keys() for report in reports(folder) if report["step"] == step)
    assert_same_state(program(data, folder), state(tmp_path / "undisturbed"))
    assert reports_without_times(folder) == reports_without_times(tmp_path / "undisturbed")
    if (tmp_path / "undisturbed" / "results.json").exists():
        assert results(folder) == results(tmp_path / "undisturbed")


@pytest.mark.parametrize(("seconds", "saved"), [(3600, []), (-1, [3])])
def test_before_an_evaluation_long_training_is_saved(labelled, tmp_path, monkeypatch, seconds, saved):
    """So a kill inside it costs a minute at most. A test that waited for a minute would be a slow one."""
    monkeypatch.setattr(saving, "UNSAVED_SECONDS", seconds)
    found = []

    def perform(evaluator):
        evaluator.saver.finish()
        found.extend(step_of(path) for path in list_finished(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "perform", perform)
    with pytest.raises(KeyboardInterrupt):
        finetune(labelled, tmp_path, "--save_steps", 0)
    assert found == saved
