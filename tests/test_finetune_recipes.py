"""The recipes of fine-tuning: settings of the papers and releases."""

import pytest
import torch

import main_finetune
from encoders import classifiers
from recipes import FINETUNE_RECIPES, LINPROBE_DEFAULTS
from tests.test_recipes import assert_settings

# Recipes and their settings; the later of two lines wins. `peak` is the learning rate at the total batch size.
RELEASES = [
    # The supplementary's "Fine-tuning details", and MAE's release.
    (
        "*",
        dict(
            epochs=100,
            peak=2e-3,
            total_batch_size=1024,
            min_lr=1e-6,
            warmup_epochs=5,
            lr_schedule="mae",
            weight_decay=0.05,
            layer_decay=0.65,
            drop_path=0.1,
            clip_grad=None,
            aa="rand-m9-mstd0.5-inc1",
            color_jitter=None,
            smoothing=0.1,
            reprob=0.25,
            remode="pixel",
            recount=1,
            mixup=0.8,
            cutmix=1.0,
            mixup_mode="batch",
            mixup_prob=1.0,
            mixup_switch_prob=0.5,
            crop_scale=(0.08, 1.0),
            crop_pct=None,
            clip_crop=False,
            cls_token_layer_decay=True,
            cls_token_mlp=False,
            train_pos_embed=True,
        ),
    ),
    ("*large*", dict(epochs=50, peak=4e-3, layer_decay=0.75, drop_path=0.2)),
    ("*huge", dict(epochs=50, peak=4e-3, layer_decay=0.75, drop_path=0.3)),
    ("*inat18_*", dict(dataset="inat18", epochs=360)),
    ("*inat19_*", dict(dataset="inat19", epochs=360)),
    ("mff_*", dict(lr_schedule="mff", warmup_lr=2e-3 * 1e-4)),
    ("amt_finetune_*", dict(peak=4e-3, layer_decay=0.75)),
    ("*simmim_*", dict(epochs=100, peak=5e-3, total_batch_size=2048, lr_schedule="simmim", clip_grad=5.0)),
    ("*simmim_*", dict(warmup_epochs=20, warmup_lr=1e-6, min_lr=1e-6)),
    ("simmim_*swin_base_100ep", dict(layer_decay=0.9)),
    ("simmim_*swin_base_800ep", dict(layer_decay=0.8)),
    ("simmim_*swin_large_800ep", dict(layer_decay=0.7)),
    # The release states peak, start and floor for a batch of 512 images.
    ("greenmim_*", dict(epochs=100, warmup_epochs=20, lr_schedule="simmim", clip_grad=5.0)),
    ("greenmim_*base", dict(total_batch_size=1024, peak=2 * 1.25e-3, warmup_lr=2 * 2.5e-7, min_lr=2 * 2.5e-7)),
    ("greenmim_*base", dict(layer_decay=0.9)),
    ("greenmim_*large", dict(total_batch_size=768, peak=1.5 * 1e-3, warmup_lr=1.5 * 2e-7, min_lr=1.5 * 3.5e-7)),
    ("greenmim_*large", dict(layer_decay=0.8, drop_path=0.3)),
    ("localmim_*base_100ep", dict(peak=4e-3, layer_decay=0.75, warmup_epochs=20)),
    ("localmim_*base_1600ep", dict(warmup_epochs=20, min_lr=1e-5)),
    ("localmim_*large_800ep", dict(peak=3e-3)),
    ("tec_*", dict(drop_path=0.1, cls_token_layer_decay=False, cls_token_mlp=True, train_pos_embed=False)),
    ("tec_finetune_vit_base_300ep", dict(layer_decay=0.5)),
    ("tec_finetune_vit_base_800ep", dict(layer_decay=0.55, warmup_epochs=20)),
    ("tec_mae_*base_300ep", dict(warmup_epochs=20)),
    ("tec_mae_*base_800ep", dict(layer_decay=0.55, warmup_epochs=20)),
    ("tec_mae_*large", dict(layer_decay=0.65, min_lr=1e-5)),
    # Linear probing of MAE's release
    ("linprobe_*", dict(total_batch_size=16384, peak=6.4, warmup_epochs=10, weight_decay=0, min_lr=0, layer_decay=1)),
    ("linprobe_*", dict(aa=None, mixup=0, cutmix=0, reprob=0, smoothing=0, drop_path=0, clip_crop=True)),
    ("linprobe_vit_base", dict(epochs=90)),
    ("lightly_*", dict(total_batch_size=256)),
    ("lightly_finetune_*", dict(peak=5e-4, global_pool="token")),
    ("lightly_linprobe_*", dict(epochs=90, peak=0.1, warmup_epochs=10, weight_decay=0, min_lr=0, layer_decay=1)),
    ("lightly_linprobe_*", dict(aa=None, mixup=0, cutmix=0, reprob=0, smoothing=0, drop_path=0, clip_crop=True)),
]


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


@pytest.mark.parametrize("recipe", [name for name in FINETUNE_RECIPES if "cifar10" not in name and "quick" not in name])
def test_a_recipe_trains_as_its_paper_or_release(recipe):
    assert_settings(recipe, settings_of(recipe), RELEASES)


def test_a_probe_without_a_recipe_has_the_defaults_of_a_probe_and_flags_win():
    _, args = main_finetune.parse_args(["--trainable_blocks", "0", "--epochs", "7"])
    assert args.epochs == 7
    assert args.blr == LINPROBE_DEFAULTS["blr"]
    assert args.aa is None


def test_no_cls_token_layer_decay_needs_a_class_token():
    _, args = main_finetune.parse_args(["--model", "swin_micro_patch4_window4", "--no-cls_token_layer_decay"])
    with pytest.raises(ValueError, match="--model swin_micro_patch4_window4 has none"):
        main_finetune.make_optimizer(classifiers.MODELS[args.model](), args, lr=1e-3)
