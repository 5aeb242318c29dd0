"""One run of the study: wrong command lines, the effect of a signal, and measures of frozen encoders."""

import json

import pytest
import torch

import main_finetune
import main_pretrain
from tests.runs import refused
from tools import study_job
from util.features import Features

JOB = {"pretrain": ["--model", "mae_vit_micro_patch4"], "finetune": [], "reading": None, "measured_images": 4}
MACHINE = {"data_path": "data", "labelled": "data", "images": "", "device": "cpu", "num_workers": 0}


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
    assert message in refused(capsys, study_job.main, tmp_path, machine)


# -------------------------------------------------------------------------------------------------- frozen encoders


def test_ridge_regression_against_the_gradient():
    """At the optimum the gradient of mean squared error plus penalty is zero, by autograd."""
    torch.manual_seed(0)
    features, queries = torch.randn(30, 4).double() * torch.tensor([1.0, 5, 0.2, 3]) + 2, torch.randn(7, 4).double()
    labels, penalty = torch.randint(0, 3, (30,)), 0.3
    scores = study_job.ridge_scores(features, labels, queries, 3, penalty)
    mean, std = features.mean(dim=0), features.std(dim=0, correction=0) + 1e-6
    x, q = (features - mean) / std, (queries - mean) / std
    solution = torch.linalg.lstsq(torch.cat([q, torch.ones(7, 1).double()], dim=1), scores).solution
    weight, offset = solution[:4].requires_grad_(), solution[4:].requires_grad_()
    targets = torch.eye(3).double()[labels]
    loss = (x @ weight + offset - targets).square().sum() / 30 + penalty * weight.square().sum()
    for gradient in torch.autograd.grad(loss, [weight, offset]):
        assert gradient.abs().max() < 1e-8


def test_accuracies_of_frozen_features():
    """Two clusters with one wrong label each. Six of eight queries lie in the cluster of their class."""
    torch.manual_seed(0)
    centres = torch.tensor([[4.0, 0, 1], [-4.0, 0, 1]])
    labels = torch.arange(100) % 2
    features = centres[labels] + 0.1 * torch.randn(100, 3)
    labels[:2] = labels[:2].flip(0)
    asked = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    queries = centres[asked] + 0.1 * torch.randn(8, 3)
    asked[:2] = 1 - asked[:2]
    bank, test = (Features({"4 mean": x}, y, torch.arange(len(x))) for x, y in ((features, labels), (queries, asked)))
    assert study_job.frozen_accuracies(bank, test, "4 mean", 2) == {"knn": 75.0, "ridge": 75.0}
