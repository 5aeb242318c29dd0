"""Decoders of other sizes, and masks in squares: the flags of frameworks with MAE's decoder."""

import json

import numpy as np
import pytest
import torch

import main_pretrain
from frameworks import registry
from frameworks.models_crossmae_pr import CrossMaskedAutoencoderViT
from frameworks.models_mff_pr import MFFMaskedAutoencoderViT
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from tests.runs import assert_same_state, pretrain
from tests.test_models_mae_pr import assert_is_slow_mae, perturbed

FAMILIES = ("mae", "mff", "crossmae")
FLAGS = ("decoder_depth", "decoder_embed_dim", "decoder_num_heads", "mask_unit")
MICRO = ("--model", "mae_vit_micro_patch4")


def build(*flags):
    """Builds the model of a command line on the meta device."""
    args = main_pretrain.parse_args([str(flag) for flag in flags])[1]
    with torch.device("meta"):
        return registry.build_model(vars(args))


def decoder_settings(model):
    """Returns the recorded values of the four flags that MAE, MFF and CrossMAE share."""
    return {flag.removeprefix("decoder_"): value for flag, value in model.own_settings().items() if flag in FLAGS}


# ------------------------------------------------------------------------------------------------------ decoder's sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_flags_give_the_decoder_its_sizes(family):
    model = build("--model", f"{family}_vit_base_patch16", "--decoder_depth", 3, "--decoder_embed_dim", 384)
    assert len(model.decoder.blocks) == 3 and model.decoder.blocks[0].mlp.fc1.weight.shape == (4 * 384, 384)
    attentions = [getattr(block, "cross_attn" if family == "crossmae" else "attn") for block in model.decoder.blocks]
    assert {attention.num_heads for attention in attentions} == {12}
    assert model.decoder.aggregation.operator.weight.shape == (384, 1, 7, 7)
    model = build("--model", f"{family}_vit_base_patch16", "--decoder_embed_dim", 100, "--decoder_num_heads", 4)
    depth = 12 if family == "crossmae" else 8
    assert decoder_settings(model) == dict(depth=depth, embed_dim=100, num_heads=4, mask_unit=1)


@pytest.mark.parametrize(
    ("name", "width", "depth", "heads"),
    [(f"{family}_vit_micro_patch4", 64, 4, 2) for family in FAMILIES]
    + [(f"{family}_vit_mini_patch4", 128, 4, 4) for family in FAMILIES]
    + [("mae_vit_base_patch16", 512, 8, 16), ("mff_vit_base_patch16", 512, 8, 16)]
    + [("crossmae_vit_small_patch16", 256, 12, 8), ("crossmae_vit_base_patch16", 512, 12, 16)],
)
def test_without_flags_the_decoder_is_as_before(name, width, depth, heads):
    settings = decoder_settings(build("--model", name))
    assert settings == dict(depth=depth, embed_dim=width, num_heads=heads, mask_unit=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--decoder_embed_dim", 100], "decoder_embed_dim must be a multiple of 32.*got 100.*set decoder_num_heads"),
        (["--decoder_embed_dim", 96, "--decoder_num_heads", 5], "width 96 does not divide into 5 heads"),
        (["--decoder_depth", 0], "must be at least 1, got 512, 0 and None"),
        (["--decoder_embed_dim", 0], "must be at least 1, got 0, 8 and None"),
        (["--decoder_num_heads", -1], "must be at least 1, got 512, 8 and -1"),
        (["--mask_unit", 4], "mask_unit must divide the grid of 14 x 14 tokens, got 4$"),
        (["--mask_unit", 14], "--mask_ratio 0.75 leaves none of 196 tokens visible"),
        (["--mask_unit", 7, "--mask_ratio", 0.9], "--mask_ratio 0.9 leaves none of 196 tokens visible"),
        (["--mask_unit", 0], "mask_unit must divide the grid of 14 x 14 tokens, got 0$"),
        (["--mask_unit", 2, "--mask_ratio", 1.2], "throw_ratio < mask_ratio < 1 .* got throw_ratio"),
        (["--mask_unit", 2, "--throw_ratio", 0.8], "throw_ratio 0.8 and mask_ratio 0.75"),
    ],
)
def test_sizes_that_cannot_be(flags, message):
    with pytest.raises(ValueError, match=message):
        build("--model", "mae_vit_base_patch16", *flags)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    "model", ["simmim_vit_micro_patch4", "localmim_vit_micro_patch4", "greenmim_swin_micro_patch4_window4"]
)
def test_frameworks_without_these_flags_refuse_them(model, flag):
    with pytest.raises(ValueError, match=f"--{flag} belongs to mae, mff, crossmae.* models, but --model is {model}"):
        build("--model", model, f"--{flag}", 2)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_of_other_depths_train_and_resume(family, depth, photos, tmp_path, capsys):
    flags = ["--model", f"{family}_vit_micro_patch4", "--decoder_depth", depth, "--mask_unit", 2, "--epochs", 1]
    expected = pretrain(photos, tmp_path / "whole", *flags)
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 1)
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags), expected)
    settings = json.loads((tmp_path / "parts" / "settings.json").read_text())
    assert (settings["decoder_depth"], settings["decoder_num_heads"], settings["mask_unit"]) == (depth, 2, 2)
    model, _ = registry.load_run(tmp_path / "parts")
    assert len(model.decoder.blocks) == depth and model.collator("furthest", 0).sampler.mask_unit == 2
    for flag, before in {"decoder_num_heads": 2, "mask_unit": 2, "decoder_depth": depth}.items():
        changed = [*flags, f"--{flag}", 4]
        assert f"--{flag} was {before} and now is 4" in pretrain.refused(capsys, photos, tmp_path / "parts", *changed)


# ----------------------------------------------------------------------------------------------------- masks in squares


@pytest.mark.parametrize("grid_size", [(16, 16), (14, 14), (8, 12)])
@pytest.mark.parametrize(("mask_ratio", "throw_ratio"), [(0.75, 0.5), (0.6, 0.25), (0.9, 0.0)])
def test_squares_of_one_token_are_mae_s_masks(grid_size, mask_ratio, throw_ratio):
    expected = TokenCounts.from_ratios(grid_size[0] * grid_size[1], mask_ratio, throw_ratio)
    assert token_counts(grid_size, mask_ratio, throw_ratio, 1) == expected


@pytest.mark.parametrize(
    ("grid_size", "mask_ratio", "mask_unit", "counts"),
    [
        ((16, 16), 0.75, 4, TokenCounts(64, 64, 128)),  # 4 of 16 squares
        ((14, 14), 0.75, 2, TokenCounts(48, 50, 98)),  # 12 of 49 squares, .25 x 49 = 12.25
        ((14, 14), 0.6, 7, TokenCounts(49, 49, 98)),  # 1 of 4 squares, .4 x 4 = 1.6
        ((8, 12), 0.75, 4, TokenCounts(16, 32, 48)),  # 1 of 6 squares
    ],
)
def test_visible_squares_are_rounded_down(grid_size, mask_ratio, mask_unit, counts):
    assert token_counts(grid_size, mask_ratio, 0.5, mask_unit) == counts


@pytest.mark.parametrize("model", [MaskedAutoencoderViT, MFFMaskedAutoencoderViT, CrossMaskedAutoencoderViT])
def test_visible_squares_are_whole_and_tokens_are_thrown_one_by_one(model):
    sizes = dict(embed_dim=24, depth=2, num_heads=3, decoder_embed_dim=32, decoder_depth=1)
    model = model(img_size=64, patch_size=4, mask_unit=4, throw_ratio=0.5, **sizes)
    imgs = torch.zeros(3, 4, 4, dtype=torch.uint8)
    _, _, ids = model.collator("furthest", seed=0)([(imgs, 0, (0, i)) for i in range(200)])
    order = TokenOrder(ids, model.counts)
    squares = (~order.mask).view(200, 4, 4, 4, 4).sum(dim=(2, 4))  # visible tokens of each square
    assert sorted(squares.unique().tolist()) == [0, 16] and squares.eq(16).sum(dim=(1, 2)).eq(4).all()
    assert ids[:, : model.counts.num_visible].shape[1] == 64
    thrown = order.thrown.view(200, 4, 4, 4, 4).sum(dim=(2, 4))
    assert thrown.sum(dim=(1, 2)).eq(128).all() and thrown[squares == 0].unique().numel() > 4


@pytest.mark.parametrize("progressive", [True, False])
def test_deep_decoder_and_squares_against_the_slow_derivation(progressive):
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, decoder_embed_dim=64, decoder_depth=3)
    options = dict(mask_unit=2, throw_ratio=0.5, kernel_size=3, progressive=progressive, norm_pix_loss=True)
    model = perturbed(MaskedAutoencoderViT(**sizes, **options))
    blank = torch.zeros(3, 4, 4, dtype=torch.uint8)
    ids = model.collator("furthest", seed=0)([(blank, 0, (0, i)) for i in range(2)])[2]
    assert_is_slow_mae(model, ids)


def token_counts(grid_size, mask_ratio, throw_ratio, mask_unit):
    """Returns the counts of MAE on such a grid."""
    sizes = dict(img_size=tuple(4 * side for side in grid_size), patch_size=4, depth=1, decoder_depth=1)
    with torch.device("meta"):
        model = MaskedAutoencoderViT(mask_ratio=mask_ratio, throw_ratio=throw_ratio, mask_unit=mask_unit, **sizes)
    return model.counts


def fewest_kept_neighbours(sampling):
    """Returns, for 200 images of 16 x 16 tokens, the kept tokens in the 7 x 7 window of the poorest thrown token.

    The masks are squares of 4 x 4 tokens, 75 % masked and 50 % thrown. The windows are counted cell by cell.
    """
    counts = token_counts((16, 16), 0.75, 0.5, mask_unit=4)
    sampler = TokenOrderSampler(16, counts, sampling, mask_unit=4)
    ids = torch.from_numpy(sampler(addressed_noise(0, 0, np.arange(200), 256)))
    fewest = []
    for thrown in TokenOrder(ids, counts).thrown.view(200, 16, 16).numpy():
        cells = np.argwhere(thrown)
        windows = [thrown[max(0, r - 3) : r + 4, max(0, c - 3) : c + 4] for r, c in cells]
        fewest.append(min((~window).sum() for window in windows))
    return np.array(fewest)


def test_furthest_sampling_leaves_every_thrown_token_neighbours_in_large_squares():
    """Random sampling leaves some thrown tokens without any: the convolution would read zeros alone."""
    furthest, random = fewest_kept_neighbours("furthest"), fewest_kept_neighbours("random")
    assert furthest.min() >= 1 and random.min() == 0
    assert furthest.mean() == pytest.approx(5.7, abs=0.3) and random.mean() == pytest.approx(3.8, abs=0.3)
