"""An optimizer that a user adds: one entry offers it to the program, and no script takes it for AdamW."""

import pytest
import torch
from timm.optim import Lion

from frameworks import optimizers
from main_pretrain import get_args_parser
from recipes import RECIPES
from scripts import profile_pretrain
from tests.runs import pretrain
from util.run.cli import parse_with_recipe


@pytest.fixture
def lion(monkeypatch):
    """Adds Lion, by the flags that choose it."""
    monkeypatch.setitem(
        optimizers.OPTIMIZERS, "lion", lambda groups, model, lr, betas: Lion(groups, lr=lr, betas=betas)
    )
    return ["--optimizer", "lion"]


def settings_of(recipe, *flags):
    return vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", recipe, *flags]))


def test_the_program_offers_it(lion, photos, tmp_path):
    found = pretrain(photos, tmp_path / "run", *lion, "--max_steps", 2)
    assert found["meta"]["optimizer"] == "Lion"


def test_the_time_of_its_step_is_measured(lion):
    """Without decay of vectors, and with the betas of the recipe."""
    args = profile_pretrain.get_parser().parse_args(["cifar10", "--batch_size", "2", "--device", "cpu"])
    settings = settings_of("cifar10", *lion, "--betas", "0.8", "0.9", "--weight_decay", "0.3")
    step = profile_pretrain.Step(settings, args, torch.device("cpu"))
    step()
    optimizer = step.loop.optimizer
    assert type(optimizer) is Lion
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.9)
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.3 if parameter.ndim > 1 else 0.0)
