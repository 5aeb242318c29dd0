"""Several class tokens, learned positions, drop path and no flip: the setting of Pixio for MAE and MFF."""

import pytest
import timm
import torch
from torch.testing import assert_close

import main_pretrain
import monitor
from downstream.probe.models import open_encoder
from encoders.load import load_encoder
from encoders.trained import load
from frameworks import registry
from models_mae_pr import MaskedAutoencoderViT
from models_vit import ViTEncoder, vit_micro_patch4
from scripts import export
from tests.runs import finetune, pretrain
from tests.test_models_mae_pr import SIZES, assert_is_slow_mae, official_state_dict, orders, perturbed
from util.run.errors import CheckpointError

PIXIO = ["--num_cls_tokens", "3", "--learned_pos_embed", "--mask_unit", "2"]
PIXIO += ["--drop_path", "0.3", "--no-hflip", "--decoder_depth", "2"]
SMALL = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3)


def build(*flags):
    """Builds the model of a command line."""
    torch.manual_seed(0)
    _, args = main_pretrain.parse_args([str(flag) for flag in flags])
    return registry.build_model(vars(args))


# ------------------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize(
    ("throw_ratio", "progressive"),
    [
        (0.0, True),
        (0.5, False),
        (0.5, True),
    ],
)
def test_loss_against_the_slow_derivation(throw_ratio, progressive):
    torch.manual_seed(0)
    model = MaskedAutoencoderViT(
        **SIZES,
        throw_ratio=throw_ratio,
        progressive=progressive,
        norm_pix_loss=True,
        kernel_size=3,
        num_cls_tokens=3,
        learned_pos_embed=True,
    )
    assert_is_slow_mae(perturbed(model), orders(model, 2))


def a_batch(model):
    return torch.randn(2, 3, 32, 32), orders(model, 2)


def test_learned_positions_are_random_trained_and_decayed():
    model = build("--model", "mae_vit_micro_patch4", *PIXIO)
    assert model.pos_embed.shape == (1, 3 + 64, 96)
    assert model.decoder.pos_embed.shape == (1, 3 + 64, 64)
    model(*a_batch(model))["pixel"].backward()
    _, args = main_pretrain.parse_args(["--model", "mae_vit_micro_patch4", *PIXIO])
    optimizer = main_pretrain.make_optimizer(model, args, 1e-3)
    decayed = optimizer.param_groups[1]
    assert decayed["weight_decay"] == 0.05
    decayed_ids = {id(parameter) for parameter in decayed["params"]}
    assert id(model.cls_token) in decayed_ids
    for table in (model.pos_embed, model.decoder.pos_embed):
        assert table.std().item() == pytest.approx(0.02, rel=0.15)
        assert table.mean().abs() < 1e-3
        assert table.grad[:, :3].ne(0).any()
        assert table.grad[:, 3:].ne(0).any()
        assert id(table) in decayed_ids


def test_official_weights_with_several_class_tokens():
    model = build("--model", "mae_vit_micro_patch4", *PIXIO)
    weights = official_state_dict(perturbed(model))
    assert weights["cls_token"].shape == (1, 3, 96)
    assert weights["decoder_pos_embed"].shape == (1, 67, 64)
    other = build("--model", "mae_vit_micro_patch4", *PIXIO, "--throw_ratio", 0)
    other.load_official(weights)
    assert torch.equal(other.decoder.pos_embed, model.decoder.pos_embed.float())
    with pytest.raises(ValueError, match="cls_token"):
        build("--model", "mae_vit_micro_patch4").load_official(weights)


@pytest.mark.parametrize("num_cls_tokens", [1, 3])
def test_one_class_token_is_read_after_the_final_norm_and_several_are_averaged_before(num_cls_tokens):
    torch.manual_seed(0)
    model = ViTEncoder(**SMALL, num_cls_tokens=num_cls_tokens).eval()
    imgs = torch.randn(2, 3, 16, 16)
    found = monitor.encode(model, imgs)
    tokens = model.encode(model.embed(imgs))
    expected = model.norm(tokens)[:, 0]
    if num_cls_tokens > 1:
        expected = tokens[:, :3].mean(dim=1)
    assert_close(found["cls"], expected)
    patches = model.norm(tokens)[:, num_cls_tokens:]
    assert_close(found["mean"], patches.mean(dim=1))


def test_a_model_needs_a_class_token():
    with pytest.raises(ValueError, match="num_cls_tokens"):
        build("--model", "mae_vit_micro_patch4", "--num_cls_tokens", 0)


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_pooling_leaves_out_or_averages_the_class_tokens(global_pool):
    torch.manual_seed(0)
    model = vit_micro_patch4(num_classes=4, num_cls_tokens=3, global_pool=global_pool).eval()
    imgs = torch.randn(2, 3, 32, 32)
    x = model.forward_features(imgs)
    pooled = x[:, 3:]
    if global_pool == "token":
        pooled = x[:, :3]
    expected = model.head(model.fc_norm(pooled.mean(dim=1)))
    assert_close(model(imgs), expected)


# ------------------------------------------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """The folder of a run with three class tokens."""
    folder = tmp_path_factory.mktemp("pixio")
    pretrain(photos, folder, *PIXIO, "--epochs", 1)
    return folder


def test_encoder_loads_into_the_probe(trained):
    encoder = load(trained).model
    assert encoder.num_cls_tokens == 3
    assert encoder.pos_embed.shape == (1, 67, 96)
    imgs = torch.randn(2, 3, 32, 32)
    features = open_encoder(trained)(imgs)[4]
    tokens = encoder.encode(encoder.embed(imgs))
    assert torch.equal(features.patches, encoder.forward_features(imgs)[:, 3:])
    assert torch.equal(features.cls, tokens[:, :3].mean(dim=1))


def test_encoder_loads_into_a_classifier_of_as_many_class_tokens(trained):
    classifier = vit_micro_patch4(num_classes=4, num_cls_tokens=3, img_size=64)  # a grid of 16 x 16 tokens
    report = load_encoder(classifier, trained)
    assert report.resized == ["pos_embed"]
    encoder = load(trained).model
    assert torch.equal(classifier.pos_embed[:, :3], encoder.pos_embed[:, :3])
    with pytest.raises(CheckpointError, match=str(trained)):
        load_encoder(vit_micro_patch4(num_classes=4), trained)


def test_fine_tuning_takes_the_number_of_class_tokens(trained, labelled, tmp_path):
    finetune(labelled, tmp_path, "--finetune", trained, "--max_steps", 1)
    assert load(tmp_path).model.num_cls_tokens == 3


def test_export_to_timm_and_back(trained, tmp_path):
    export.main([str(trained), "--out", str(tmp_path / "encoder")])
    assert "reg_tokens" in (tmp_path / "encoder" / "config.json").read_text()
    theirs = timm.create_model(f"local-dir:{tmp_path / 'encoder'}", pretrained=True).eval()
    assert theirs.num_prefix_tokens == 3
    ours = load(trained).model
    imgs = torch.randn(2, 3, 32, 32)
    features = theirs.forward_features(imgs)
    assert_close(features, ours.forward_features(imgs), rtol=1e-5, atol=1e-5)
    weights = ours.state_dict()
    again = load(tmp_path / "encoder").model
    for name, value in again.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_classifier_that_averages_class_tokens_is_not_exported():
    model = vit_micro_patch4(num_classes=4, num_cls_tokens=3, global_pool="token")
    with pytest.raises(ValueError, match="--global_pool avg"):
        export.timm_arguments(model)
