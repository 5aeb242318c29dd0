"""The recipes of fine-tuning: settings of the papers and releases."""

import pytest
import torch

import main_finetune
from encoders import classifiers
from recipes import FINETUNE_RECIPES, LINPROBE_DEFAULTS

# Recipes and the peaks of their learning rates at the total batch size, by papers and releases; the later line wins.


def settings_of(recipe):
    return vars(main_finetune.parse_args(["--recipe", recipe])[1])


@pytest.mark.parametrize("recipe", FINETUNE_RECIPES)
def test_recipes_build(recipe):
    settings = settings_of(recipe)
    settings["global_pool"] = "token" if settings["trainable_blocks"] == 0 else "avg"
    with torch.device("meta"):
        model = classifiers.build_classifier(settings | {"nb_classes": 10})
    assert settings["total_batch_size"]
    assert any(p.requires_grad for p in model.parameters())


def test_a_probe_without_a_recipe_has_the_defaults_of_a_probe_and_flags_win():
    _, args = main_finetune.parse_args(["--trainable_blocks", "0", "--epochs", "7"])
    assert args.epochs == 7
    assert args.blr == LINPROBE_DEFAULTS["blr"]
    assert args.aa is None


def test_no_cls_token_layer_decay_needs_a_class_token():
    _, args = main_finetune.parse_args(["--model", "swin_micro_patch4_window4", "--no-cls_token_layer_decay"])
    with pytest.raises(ValueError, match="--no-cls_token_layer_decay .* swin_micro_patch4_window4"):
        classifiers.build_classifier(vars(args) | {"nb_classes": 10})
