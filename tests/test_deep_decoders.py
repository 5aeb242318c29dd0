"""Decoders of other sizes, and masks in squares: the flags of frameworks with MAE's decoder."""

import json

import pytest
import torch

import main_pretrain
from frameworks import registry
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts
from tests.runs import pretrain
from tests.test_models_mae_pr import assert_is_slow_mae, perturbed

FAMILIES = ("mae", "mff", "crossmae")
FLAGS = ("decoder_depth", "decoder_embed_dim", "decoder_num_heads", "mask_unit")


def build(*flags):
    """Builds the model of a command line on the meta device."""
    _, args = main_pretrain.parse_args([str(flag) for flag in flags])
    with torch.device("meta"):
        return registry.build_model(vars(args))


def settings_of(model):
    """Returns the recorded values of FLAGS."""
    settings = model.own_settings()
    return tuple(settings[flag] for flag in FLAGS)


# ------------------------------------------------------------------------------------------------------ decoder's sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_flags_give_the_decoder_its_sizes(family):
    model = build("--model", f"{family}_vit_base_patch16", "--decoder_depth", 3, "--decoder_embed_dim", 384)
    assert settings_of(model) == (3, 384, 12, 1)
    assert len(model.decoder.blocks) == 3
    for block in model.decoder.blocks:
        attention = block.cross_attn if family == "crossmae" else block.attn
        assert attention.num_heads == 12
        assert block.mlp.fc1.weight.shape == (4 * 384, 384)
    assert model.decoder.aggregation.operator.weight.shape == (384, 1, 7, 7)


def test_without_flags_the_decoder_is_the_model_s():
    assert settings_of(build("--model", "crossmae_vit_small_patch16")) == (12, 256, 8, 1)


def test_frameworks_without_these_flags_refuse_them(capsys):
    with pytest.raises(SystemExit) as stop:
        build("--model", "simmim_vit_micro_patch4", "--mask_unit", 2)
    assert stop.value.code == 2
    assert "--mask_unit" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "depth"), [("mae", 1), ("crossmae", 3)])
def test_decoders_of_other_depths_train_and_resume(family, depth, photos, tmp_path, capsys):
    flags = ["--model", f"{family}_vit_micro_patch4", "--decoder_depth", depth, "--mask_unit", 2, "--epochs", 1]
    pretrain(photos, tmp_path / "run", *flags, "--max_steps", 1)
    resumed = pretrain(photos, tmp_path / "run", *flags)
    assert resumed["meta"]["step"] == 3
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert tuple(settings[flag] for flag in FLAGS) == (depth, 64, 2, 2)
    model, _ = registry.load_run(tmp_path / "run")
    assert len(model.decoder.blocks) == depth
    assert model.collator("furthest", 0).sampler.mask_unit == 2
    for flag, before in {"decoder_num_heads": 2, "mask_unit": 2, "decoder_depth": depth}.items():
        message = pretrain.refused(capsys, photos, tmp_path / "run", *flags, f"--{flag}", 4)
        assert f"--{flag} was {before} and now is 4" in message


# ----------------------------------------------------------------------------------------------------- masks in squares


def token_counts(grid_size, mask_ratio, throw_ratio, mask_unit):
    """Returns the counts of MAE on such a grid."""
    rows, columns = grid_size
    with torch.device("meta"):
        model = MaskedAutoencoderViT(
            img_size=(4 * rows, 4 * columns),
            patch_size=4,
            depth=1,
            decoder_depth=1,
            mask_ratio=mask_ratio,
            throw_ratio=throw_ratio,
            mask_unit=mask_unit,
        )
    return model.counts


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


def draw_orders(model, num_images):
    """Returns token orders that the model's collator draws."""
    blank = torch.zeros(3, 4, 4, dtype=torch.uint8)
    samples = [(blank, 0, (0, i)) for i in range(num_images)]
    _, _, ids_shuffle = model.collator("furthest", seed=0)(samples)
    return ids_shuffle


@pytest.mark.parametrize("progressive", [True, False])
def test_deep_decoder_and_squares_against_the_slow_derivation(progressive):
    torch.manual_seed(0)
    sizes = dict(
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        decoder_embed_dim=64,
        decoder_depth=3,
    )
    options = dict(
        mask_unit=2,
        throw_ratio=0.5,
        kernel_size=3,
        progressive=progressive,
        norm_pix_loss=True,
    )
    model = perturbed(MaskedAutoencoderViT(**sizes, **options))
    assert_is_slow_mae(model, draw_orders(model, 2))
