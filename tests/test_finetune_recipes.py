import pytest
import torch

import main_finetune
from encoders import classifiers
from recipes import FINETUNE_RECIPES, LINPROBE_DEFAULTS
from util.run.cli import parse_with_recipe


def settings_of(recipe):
    parser, args = main_finetune.parse_args(["--recipe", recipe])
    return vars(args)


@pytest.mark.parametrize("recipe", FINETUNE_RECIPES)
def test_recipes_build(recipe):
    settings = settings_of(recipe)
    settings["global_pool"] = "token" if settings["trainable_blocks"] == 0 else "avg"
    with torch.device("meta"):
        model = classifiers.build_classifier(settings | {"nb_classes": 10, "input_size": settings["input_size"]})
    assert settings["total_batch_size"] and any(p.requires_grad for p in model.parameters())


TABLE = {  # epochs, lr at batch 1024, layer decay, drop path
    "finetune_vit_base": (100, 2e-3, 0.65, 0.1),
    "finetune_vit_large": (50, 4e-3, 0.75, 0.2),
    "finetune_vit_huge": (50, 4e-3, 0.75, 0.3),
    "inat18_vit_base": (360, 2e-3, 0.65, 0.1),
    "inat19_vit_base": (360, 2e-3, 0.65, 0.1),
    "partial2_vit_base": (100, 2e-3, 0.65, 0.1),
    "mff_inat18_vit_base": (360, 2e-3, 0.65, 0.1),
    "mff_inat19_vit_base": (360, 2e-3, 0.65, 0.1),
}


@pytest.mark.parametrize("recipe", TABLE)
def test_finetuning_follows_the_supplementary(recipe):
    s = settings_of(recipe)
    assert (s["epochs"], s["blr"] * 1024 / 256, s["layer_decay"], s["drop_path"]) == pytest.approx(TABLE[recipe])
    assert (s["total_batch_size"], s["warmup_epochs"], s["weight_decay"], s["min_lr"]) == (1024, 5, 0.05, 1e-6)
    assert (s["aa"], s["color_jitter"]) == ("rand-m9-mstd0.5-inc1", None)
    assert (s["reprob"], s["remode"], s["recount"]) == (0.25, "pixel", 1)
    assert (s["mixup"], s["cutmix"], s["mixup_mode"]) == (0.8, 1.0, "batch")
    assert (s["mixup_prob"], s["mixup_switch_prob"]) == (1.0, 0.5)
    assert (s["smoothing"], s["crop_scale"], s["crop_pct"], s["clip_crop"]) == (0.1, (0.08, 1.0), None, False)


def test_other_frameworks_finetune_as_their_releases():
    mff, simmim, mae = (settings_of(f"{name}finetune_vit_base") for name in ("mff_", "simmim_", ""))
    changed = {key for key in mff if mff[key] != mae[key]} - {"recipe"}
    assert changed == {"lr_schedule", "warmup_lr"}
    assert (mff["lr_schedule"], mff["warmup_lr"]) == ("mff", pytest.approx(2e-3 * 1e-4))
    assert (simmim["blr"] * 2048 / 256, simmim["total_batch_size"]) == (pytest.approx(5e-3), 2048)
    assert (simmim["epochs"], simmim["warmup_epochs"], simmim["warmup_lr"], simmim["min_lr"]) == (100, 20, 1e-6, 1e-6)
    assert (simmim["layer_decay"], simmim["drop_path"]) == (0.65, 0.1)
    assert (simmim["clip_grad"], simmim["lr_schedule"]) == (5.0, "simmim")
    same = ["aa", "reprob", "mixup", "cutmix", "smoothing", "weight_decay", "crop_scale"]
    assert [simmim[key] for key in same] == [mae[key] for key in same]


@pytest.mark.parametrize(
    ("recipe", "lr", "layer_decay", "warmup_epochs", "min_lr"),
    [
        ("localmim_finetune_vit_base_100ep", 4e-3, 0.75, 20, 1e-6),
        ("localmim_finetune_vit_base_1600ep", 2e-3, 0.65, 20, 1e-5),
        ("localmim_finetune_vit_large_800ep", 3e-3, 0.75, 5, 1e-6),
        ("tec_finetune_vit_base_300ep", 2e-3, 0.5, 5, 1e-6),
        ("tec_finetune_vit_base_800ep", 2e-3, 0.55, 20, 1e-6),
        ("tec_mae_finetune_vit_base_100ep", 2e-3, 0.65, 5, 1e-6),
        ("tec_mae_finetune_vit_base_300ep", 2e-3, 0.65, 20, 1e-6),
        ("tec_mae_finetune_vit_base_800ep", 2e-3, 0.55, 20, 1e-6),
        ("tec_mae_finetune_vit_large", 4e-3, 0.65, 5, 1e-5),
    ],
)
def test_localmim_and_tec_are_fine_tuned_as_their_releases(recipe, lr, layer_decay, warmup_epochs, min_lr):
    s, mae = settings_of(recipe), settings_of("finetune_vit_large" if "large" in recipe else "finetune_vit_base")
    assert s["blr"] * s["total_batch_size"] / 256 == pytest.approx(lr)
    assert (s["layer_decay"], s["warmup_epochs"], s["min_lr"]) == (layer_decay, warmup_epochs, min_lr)
    is_tec = recipe.startswith("tec_")
    assert (s["cls_token_layer_decay"], s["cls_token_mlp"], s["train_pos_embed"]) == (not is_tec, is_tec, not is_tec)
    assert s["drop_path"] == (0.2 if recipe == "localmim_finetune_vit_large_800ep" else 0.1)
    changed = {"recipe", "blr", "layer_decay", "warmup_epochs", "min_lr", "drop_path"}
    changed |= {"cls_token_layer_decay", "cls_token_mlp", "train_pos_embed"}
    assert {k: v for k, v in s.items() if k not in changed} == {k: v for k, v in mae.items() if k not in changed}


@pytest.mark.parametrize(
    ("size", "batch", "rates", "layer_decay", "drop_path"),
    [("base", 1024, (1.25e-3, 2.5e-7, 2.5e-7), 0.9, 0.1), ("large", 768, (1e-3, 2e-7, 3.5e-7), 0.8, 0.3)],
)
def test_greenmim_is_fine_tuned_as_its_release(size, batch, rates, layer_decay, drop_path):
    """The release states peak, start and floor for a batch of 512 images."""
    s, simmim = settings_of(f"greenmim_finetune_swin_{size}"), settings_of("simmim_finetune_swin_base_100ep")
    assert (s["blr"] * 2, s["warmup_lr"] * 512 / batch, s["min_lr"] * 512 / batch) == pytest.approx(rates)
    assert (s["total_batch_size"], s["layer_decay"], s["drop_path"]) == (batch, layer_decay, drop_path)
    same = ("epochs", "warmup_epochs", "lr_schedule", "clip_grad", "weight_decay", "mixup", "cutmix", "reprob", "aa")
    assert [s[key] for key in same] == [simmim[key] for key in same] and s["epochs"] == 100


@pytest.mark.parametrize(("size", "epochs"), [("base", 90), ("large", 50), ("huge", 50)])
def test_linear_probing_follows_mae(size, epochs):
    s = settings_of(f"linprobe_vit_{size}")
    assert (s["epochs"], s["warmup_epochs"], s["total_batch_size"]) == (epochs, 10, 16384)
    assert s["blr"] * 16384 / 256 == pytest.approx(6.4) and s["weight_decay"] == s["min_lr"] == 0
    assert all(not s[name] for name in ("aa", "mixup", "cutmix", "reprob", "smoothing", "drop_path")) and s["clip_crop"]


def test_a_probe_without_a_recipe_has_the_defaults_of_a_probe_and_flags_win():
    _, args = main_finetune.parse_args(["--trainable_blocks", "0", "--epochs", "7"])
    assert args.epochs == 7 and args.blr == LINPROBE_DEFAULTS["blr"] and args.aa is None


def test_no_cls_token_layer_decay_needs_a_class_token():
    with pytest.raises(
        ValueError, match="needs a model with a class token; --model swin_micro_patch4_window4 has none"
    ):
        _, args = main_finetune.parse_args(["--model", "swin_micro_patch4_window4", "--no-cls_token_layer_decay"])
        main_finetune.make_optimizer(classifiers.MODELS[args.model](), args, lr=1e-3)


FLAGS = """
    recipe eval
    model finetune first_release_merging input_size patch_size trainable_blocks global_pool drop_path nb_classes
    batch_size accum_iter total_batch_size epochs warmup_epochs blr lr min_lr weight_decay seed optimizer layer_decay
    warmup_lr lr_schedule lr_steps clip_grad cls_token_layer_decay train_pos_embed cls_token_mlp num_cls_tokens
    dataset data_path image_column label_column loader crop_scale num_workers max_bad_fraction
    aa color_jitter smoothing reprob remode recount mixup cutmix mixup_prob mixup_switch_prob mixup_mode clip_crop
    eval_every crop_pct in_chans mean std
    output_dir resume allow_changes device precision attention compile recompute shard dist_timeout
    max_steps save_every save_minutes save_steps print_freq
"""


def test_flags_are_frozen():
    """Users' scripts depend on these names: a removal or renaming must be deliberate."""
    flags = {action.dest for action in main_finetune.get_args_parser()._actions} - {"help"}
    assert flags == set(FLAGS.split())
    with pytest.raises(SystemExit):
        parse_with_recipe(main_finetune.get_args_parser(), {"odd": dict(depth=3)}, ["--recipe", "odd"])


@pytest.mark.parametrize("year", [18, 19])
@pytest.mark.parametrize("framework", ["", "mff_"])
def test_inaturalist_differs_from_imagenet_in_epochs_alone(framework, year):
    ours, imagenet = settings_of(f"{framework}inat{year}_vit_base"), settings_of(f"{framework}finetune_vit_base")
    changed = {key: ours[key] for key in ours if ours[key] != imagenet[key] and key != "recipe"}
    assert changed == dict(dataset=f"inat{year}", epochs=360)
