"""One run of the study: wrong command lines, and the effect of a signal."""

import json

import pytest

import main_finetune
import main_pretrain
from tools import study_job

JOB = {"pretrain": ["--model", "mae_vit_micro_patch4"], "finetune": [], "reading": None, "measured_images": 4}
MACHINE = {"data_path": "data", "labelled": "data", "device": "cpu", "num_workers": 0}


@pytest.mark.parametrize("stopped", ["pretrain", "finetune"])
def test_a_run_that_a_signal_stops_has_no_result(tmp_path, monkeypatch, stopped):
    """An unfinished encoder is not measured or fine-tuned. An unfinished classifier is no result."""
    called = []

    def main(name, outcome):
        return lambda argv: called.append(name) or outcome

    monkeypatch.setattr(main_pretrain, "main", main("pretrain", False))
    monkeypatch.setattr(main_finetune, "main", main("finetune", False))
    job = JOB if stopped == "pretrain" else JOB | {"pretrain": None}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert study_job.main([str(tmp_path), json.dumps(MACHINE)]) is False
    assert called == [stopped] and not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("job", "machine", "message"),
    [
        (None, "{}", "job.json': No such file or directory"),
        ("{}", "cpu", "MACHINE must be a JSON object as tools/study.py writes it, got 'cpu'"),
        ("[1]", "{}", "job.json' must be a JSON object as tools/study.py writes it, got '[1]'"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, job, machine, message):
    if job is not None:
        (tmp_path / "job.json").write_text(job)
    with pytest.raises(SystemExit) as stop:
        study_job.main([str(tmp_path), machine])
    assert stop.value.code == 2 and message in capsys.readouterr().err
