"""The recipes of pre-training: settings of the papers and releases, and costs that they publish."""

import functools
import json
import re
from fnmatch import fnmatch

import pytest
import torch

from encoders import classifiers
from framework import PixelFramework
from frameworks.hooks.attention_phases import refresh_epochs
from frameworks.registry import MODELS, build_model
from main_pretrain import parse_args
from recipes import FINETUNE_RECIPES, RECIPES
from scripts.reproduce_table import read_published
from tests.gmac import forward_gmac


@functools.cache
def settings_of(recipe):
    return vars(parse_args(["--recipe", recipe])[1])


def meta_model(settings):
    with torch.device("meta"):
        return build_model(settings)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_builds_its_model(recipe):
    settings = settings_of(recipe)
    model = meta_model(settings)
    assert abs(model.counts.num_thrown - settings["throw_ratio"] * model.counts.num_tokens) < model.mask_unit**2
    if isinstance(model, PixelFramework):
        assert model.norm_pix_loss == settings["norm_pix_loss"]
    has_weights_of_aggregation = any("aggregation" in name for name, _ in model.named_parameters())
    is_progressive = settings["progressive"] and settings["throw_ratio"] > 0
    assert has_weights_of_aggregation == (is_progressive and settings["aggregation"] != "avgpool")


# ------------------------------------------------------------------------------------------- settings of the releases

# Recipes and their settings; the later of two lines wins. `peak` is the learning rate at the total batch size.
NO_MAPS = dict(attention_start=None, attention_every=None, attention_crop=None)  # flags of sampling by attention
RELEASES = [
    # The supplementary's "Pre-training details", and MAE's release.
    (
        "*",
        dict(
            peak=2.4e-3,
            total_batch_size=4096,
            min_lr=0.0,
            warmup_epochs=40,
            warmup_lr=0.0,
            lr_schedule="mae",
            weight_decay=0.05,
            betas=(0.9, 0.95),
            clip_grad=None,
            mask_ratio=0.75,
            norm_pix_loss=True,
            crop="resized",
            crop_scale=(0.2, 1.0),
            interpolation="bicubic",
            decoder_depth=None,
            decoder_order=None,
            visible_source=None,
            batch_size=None,
        ),
    ),
    ("deep16_*", dict(decoder_depth=16)),
    ("deep32_*", dict(decoder_depth=32)),
    # At a batch of 8192 images the release's peak is 8e-4.
    ("pixio_*", dict(peak=8e-4, total_batch_size=8192, decoder_depth=32, mask_unit=4, num_cls_tokens=8, hflip=False)),
    # Two benchmarks of other libraries: their scripts.
    ("imagenette_*", dict(peak=5e-4, total_batch_size=128, min_lr=5e-5, warmup_epochs=2, warmup_lr=5e-6)),
    ("imagenette_*", dict(epochs=200, decoder_embed_dim=384, decoder_depth=4, decoder_num_heads=6)),
    ("lightly_*", dict(epochs=100, peak=1.5e-4, total_batch_size=256, norm_pix_loss=False)),
    ("mff_*", dict(crop="padded", interpolation="bilinear", lr_schedule="mff", warmup_lr=2.4e-3 * 1e-9)),
    ("mff_*_300ep", dict(warmup_lr=2.4e-3 * 1e-4)),
    # The release's rates at 512 images, times 2048 / 512: peaks 1e-4 and 2e-4, starts 5e-7 and 1e-6, a floor of 1e-5.
    (
        "*simmim*",
        dict(
            total_batch_size=2048,
            warmup_epochs=10,
            betas=(0.9, 0.999),
            clip_grad=5.0,
            mask_ratio=0.6,
            norm_pix_loss=False,
            crop_scale=(0.67, 1.0),
            interpolation="bilinear",
        ),
    ),
    ("simmim_*_100ep", dict(peak=8e-4, warmup_lr=4e-6, min_lr=4e-5, lr_schedule="simmim")),
    ("simmim_*_800ep", dict(peak=4e-4, warmup_lr=2e-6, lr_schedule="simmim_steps", lr_steps=(700,))),
    # Swin-L, 100 epochs: 8 processes of 512 images; all others: 8 of 256. Each process draws one visible set.
    ("greenmim_*", dict(peak=8e-4, total_batch_size=2048, batch_size=256)),
    ("greenmim_*swin_base_100ep", dict(peak=1.2e-3)),
    ("greenmim_*swin_large_100ep", dict(peak=1.6e-3, total_batch_size=4096, batch_size=512)),
    ("greenmim_*_800ep", dict(decoder_order="reference")),
    # The release's peak times the predicted share of the masked tokens. PR-MIM supervises all of them.
    ("crossmae_*_400ep", dict(warmup_epochs=20)),
    ("crossmae_plain50_*", dict(peak=2.4e-3 * (0.75 - 0.5) / 0.75)),
    ("crossmae_plain65_*", dict(peak=2.4e-3 * (0.75 - 0.65) / 0.75)),
    ("localmim_*", dict(peak=1.6e-3, total_batch_size=2048, min_lr=1e-6, norm_pix_loss=False)),
    ("localmim_*_100ep", dict(warmup_epochs=10)),
    ("localmim_*large*", dict(peak=2.4e-3, total_batch_size=4096)),
    ("tec_*", dict(att_topk=9, att_tau=1.0, teacher=None, norm_pix_loss=False)),
    ("tec_mae_*", dict(att_topk=15, att_tau=1.8)),
    ("tec_mae_vit_large_*", dict(att_tau=1.4)),
    # MAE's settings, but raw pixels; maps after epochs 40, 80, ..., 360. On SimMIM: peak 1e-4, start 5e-7 and floor
    # 5e-6 at 512 images.
    ("amt_*", dict(norm_pix_loss=False, attention_start=40, attention_every=40, attention_crop="view")),
    ("amt_*vit_base_400ep", dict(sampling="attention", mask_ratio=0.85, throw_ratio=0.4, progressive=False)),
    ("amt_masking_*", dict(mask_ratio=0.75, throw_ratio=0.0)),
    ("amt_progressive_*", dict(progressive=True)),
    ("amt_mae_*", dict(sampling="furthest", mask_ratio=0.75, throw_ratio=0.0, progressive=True, **NO_MAPS)),
    ("amt_simmim*", dict(peak=4e-4, warmup_lr=2e-6, min_lr=2e-5, lr_schedule="simmim", sampling="attention")),
    ("amt_simmim_*", dict(mask_ratio=0.7, throw_ratio=0.26, progressive=False)),
    ("amt_simmim24_*", dict(mask_ratio=0.68, throw_ratio=0.24, progressive=False)),
]
LARGE_RUNS = [name for name in RECIPES if not name.startswith(("cifar10", "quickstart"))]


def assert_settings(recipe, settings, table):
    """Compares the settings of a recipe with those of all lines of a table whose pattern its name matches."""
    found = settings | {"peak": settings["blr"] * settings["total_batch_size"] / 256}
    expected = {}
    for pattern, values in table:
        if fnmatch(recipe, pattern):
            expected |= values
    for name, value in expected.items():
        assert found.get(name) == pytest.approx(value), name  # a flag of other models is missing


@pytest.mark.parametrize("recipe", LARGE_RUNS)
def test_a_recipe_trains_as_its_paper_or_release(recipe):
    assert_settings(recipe, settings_of(recipe), RELEASES)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if re.match("attention|cifar10_attention", name)])
def test_attention_as_a_sampling_keeps_amt_s_share_of_refreshes(recipe):
    """Nine refreshes, from a tenth of the schedule on, as in 400 epochs."""
    settings = settings_of(recipe)
    refreshes = refresh_epochs(settings["epochs"], settings["attention_start"], settings["attention_every"])
    shares = [epoch / settings["epochs"] for epoch in refreshes]
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])


def test_no_two_recipes_are_the_same():
    distinct = {json.dumps(recipe, sort_keys=True) for recipe in RECIPES.values()}
    assert len(distinct) == len(RECIPES)


# --------------------------------------------------------------------------------------------------- published costs

# Multiply-adds that the papers count and this code does not do.
MASKED_PATCHES = 147 * 768 * 768  # all patches are embedded
PREDICTIONS = 50 * 512 * 768  # class token and visible tokens are predicted
LOCALMIM_HEADS = 49 * (256 * 512 + 4 * 128 * 256 + 16 * 64 * 27 + 256 * 512 + 4 * 128 * 27 + 256 * 27)
SIMMIM = 196 * 768 * 768  # 120 masked patches are embedded, 76 visible ones predicted
TEC = MASKED_PATCHES + PREDICTIONS - 2 * 768 * 3072  # the MLP on the class token is not counted
QUERY = 512 * 768  # of a token of TEC's student; here only the nine closest tokens are queried
PUBLISHED = [  # recipe, difference, multiply-adds in 10^9
    ("mae_vit_base_100ep", MASKED_PATCHES + PREDICTIONS, 9.781),
    ("mff_vit_base_800ep", MASKED_PATCHES + PREDICTIONS, 9.929),
    ("mff_prmim50_vit_base_800ep", MASKED_PATCHES + PREDICTIONS, 7.230),
    ("amt_vit_base_400ep", (196 - 30) * 768 * 768 + 31 * 512 * 768, 5.94),
    ("simmim_vit_base_100ep", SIMMIM, 17.679),
    ("simmim_prmim30_vit_base_100ep", SIMMIM, 0.701 * 17.679),
    ("simmim_prmim50_vit_base_100ep", SIMMIM, 0.499 * 17.679),
    ("amt_simmim_vit_base_200ep", SIMMIM, 12.90),
    ("localmim_vit_base_100ep", MASKED_PATCHES + LOCALMIM_HEADS, 5.234),
    ("localmim_prmim65_vit_base_100ep", MASKED_PATCHES + LOCALMIM_HEADS, 4.775),
    ("tec_vit_base_300ep", TEC + (196 - 9) * QUERY, 8.302),
    ("tec_plain50_vit_base_300ep", TEC + (49 + 49 - 9) * QUERY, 6.834),
    ("tec_prmim50_vit_base_300ep", TEC + (196 - 9) * QUERY, 6.960),
    # n (12 S D^2 + 2 S^2 D) + depth (12 T d^2 + 2 T^2 d) + embedding, convolution and head, with S = 8 + 64
    ("pixio_vit_base", 0, 35.21),
    ("pixio_prmim50_vit_large", 0, 36.46),
    ("pixio_prmim50_vit_huge", 0, 60.21),
]


@pytest.mark.parametrize(("recipe", "difference", "published"), PUBLISHED)
def test_multiply_adds_are_the_published_ones(recipe, difference, published):
    counted, _ = forward_gmac(settings_of(recipe))
    assert counted + difference / 1e9 == pytest.approx(published, rel=2e-3)


# ---------------------------------------------------------------------------------------------------------------- use


def models_of_the_paper_s_rows():
    """Returns the pairs (model of pre-training, model of fine-tuning) of all rows of the paper's tables."""
    pairs = set()
    for row in read_published():
        if row["pretrain"] in RECIPES and row["evaluate"] in FINETUNE_RECIPES:
            pairs.add((RECIPES[row["pretrain"]]["model"], FINETUNE_RECIPES[row["evaluate"]]["model"]))
    return sorted(pairs)


@pytest.mark.parametrize(("pretrained", "finetuned"), models_of_the_paper_s_rows())
def test_a_row_s_classifier_has_the_size_of_its_encoder(pretrained, finetuned):
    with torch.device("meta"):
        encoder = MODELS[pretrained]()
        classifier = classifiers.MODELS[finetuned]()
    assert encoder.patch_size == classifier.patch_size
    assert encoder.patch_embed.proj.out_channels == classifier.patch_embed.proj.out_channels
    assert len(encoder.state_dict().keys() & classifier.state_dict().keys()) > 100


@pytest.mark.parametrize(
    ("recipe", "shorter"),
    [
        ("prmim50_vit_base_800ep", "prmim50_vit_base_400ep"),
        ("simmim_vit_base_800ep", "simmim_vit_base_100ep"),
        ("localmim_vit_base_1600ep", "localmim_vit_base_100ep"),
    ],
)
def test_a_recipe_that_is_shortened_warms_up_as_the_release_s_shorter_schedule(recipe, shorter):
    published = RECIPES[shorter]
    _, args = parse_args(["--recipe", recipe, "--epochs", str(published["epochs"])])
    assert args.warmup_epochs == published["warmup_epochs"]
