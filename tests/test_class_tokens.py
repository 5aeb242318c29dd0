"""Several class tokens, learned positions, drop path and no flip: the setting of Pixio for MAE and MFF."""

import json

import pytest
import timm
import torch

import main_pretrain
import monitor
from downstream.probe.models import open_encoder
from encoders.load import load_encoder, load_model
from frameworks import registry
from models_mae_pr import MaskedAutoencoderViT
from models_vit import ViTEncoder, vit_micro_patch4
from recipes import RECIPES
from scripts import export
from tests.gmac import forward_gmac
from tests.runs import assert_same_state, contents, finetune, pretrain
from tests.slow_mae import slow_loss
from tests.test_models_mae_pr import SIZES, official_state_dict, orders, perturbed
from util.data.transforms import PaddedCropFlip, RandomResizedCropFlip
from util.evaluate.features import class_feature
from util.run.checkpoint import CheckpointError

PIXIO = ["--num_cls_tokens", "3", "--learned_pos_embed", "--mask_unit", "2"]
PIXIO += ["--drop_path", "0.3", "--no-hflip", "--decoder_depth", "2"]


def build(*flags):
    """Builds the model of a command line."""
    torch.manual_seed(0)
    return registry.build_model(vars(main_pretrain.parse_args([str(flag) for flag in flags])[1]))


def segments(ids, counts):
    """Returns the lists of visible, retained and thrown tokens."""
    bounds = [counts.num_visible, counts.num_kept]
    return [part.tolist() for part in ids.tensor_split(bounds)]


# ------------------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize(("throw_ratio", "progressive"), [(0.0, True), (0.5, False), (0.5, True)])
def test_loss_against_the_slow_derivation(throw_ratio, progressive):
    torch.manual_seed(0)
    options = dict(throw_ratio=throw_ratio, progressive=progressive, norm_pix_loss=True, kernel_size=3)
    model = perturbed(MaskedAutoencoderViT(**SIZES, **options, num_cls_tokens=3, learned_pos_embed=True))
    imgs, ids = torch.randn(2, 3, 32, 32, dtype=torch.float64), orders(model, 2)
    kernel = dict(model.decoder.aggregation.operator.named_parameters()) if throw_ratio and progressive else None
    weights = official_state_dict(model)
    losses = [
        slow_loss(weights, imgs[b], *segments(ids[b], model.counts), 8, 3, 2, True, aggregation=kernel)[0]
        for b in range(2)
    ]
    torch.testing.assert_close(model(imgs, ids)["pixel"], torch.stack(losses).mean(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("model", ["mae_vit_micro_patch4", "mff_vit_micro_patch4"])
def test_blocks_see_class_tokens_and_kept_tokens(model):
    model, seen = build("--model", model, *PIXIO), {}
    for name, block in (("encoder", model.blocks[0]), ("decoder", model.decoder.blocks[0])):
        block.register_forward_hook(lambda module, args, output, name=name: seen.update({name: args[0].shape[1]}))
    model(torch.randn(2, 3, 32, 32), model_orders(model))
    assert seen == {"encoder": 3 + model.counts.num_visible, "decoder": 3 + model.counts.num_kept}


def model_orders(model, batch=2):
    """Returns token orders that the model's collator draws."""
    blank = torch.zeros(3, 4, 4, dtype=torch.uint8)
    return model.collator("furthest", seed=0)([(blank, 0, (0, i)) for i in range(batch)])[2]


def test_learned_positions_are_random_trained_and_decayed():
    model = build("--model", "mae_vit_micro_patch4", *PIXIO)
    for table, width in ((model.pos_embed, 96), (model.decoder.pos_embed, 64)):
        assert table.shape == (1, 3 + 64, width) and table.requires_grad
        assert table.std().item() == pytest.approx(0.02, rel=0.15) and table.mean().abs() < 1e-3
    model(torch.randn(2, 3, 32, 32), model_orders(model))["pixel"].backward()
    assert model.pos_embed.grad[:, :3].ne(0).any() and model.decoder.pos_embed.grad.ne(0).any()
    args = main_pretrain.parse_args(["--model", "mae_vit_micro_patch4", *PIXIO])[1]
    decayed = main_pretrain.make_optimizer(model, args, 1e-3).param_groups[1]
    assert decayed["weight_decay"] == 0.05
    assert {id(model.pos_embed), id(model.cls_token)} <= {id(parameter) for parameter in decayed["params"]}


def test_one_class_token_is_mae_and_keeps_its_initial_weights():
    plain = build("--model", "mae_vit_micro_patch4")
    same = build("--model", "mae_vit_micro_patch4", "--num_cls_tokens", 1, "--no-learned_pos_embed")
    for (name, value), other in zip(plain.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_official_weights_with_several_class_tokens():
    model = build("--model", "mae_vit_micro_patch4", *PIXIO)
    other = build("--model", "mae_vit_micro_patch4", *PIXIO, "--throw_ratio", 0)
    weights = official_state_dict(perturbed(model))
    assert weights["cls_token"].shape == (1, 3, 96) and weights["decoder_pos_embed"].shape == (1, 67, 64)
    other.load_official(weights)
    assert torch.equal(other.decoder.pos_embed, model.decoder.pos_embed.float())
    with pytest.raises(ValueError, match="cls_token"):
        build("--model", "mae_vit_micro_patch4").load_official(weights)


def test_cls_attention_is_that_of_the_first_class_token():
    torch.manual_seed(0)
    model = ViTEncoder(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_cls_tokens=4).double()
    imgs, inputs = torch.randn(2, 3, 16, 16, dtype=torch.float64), []
    model.blocks[-1].register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    model.forward_features(imgs)
    block = model.blocks[-1]
    q, k, _ = block.attn.qkv(block.norm1(inputs[0])).view(2, 20, 3, 3, 8).unbind(2)  # [B, T, heads, d]
    attention = (torch.einsum("bhd,bthd->bht", q[:, 0], k) / 8**0.5).softmax(dim=-1)
    torch.testing.assert_close(model.cls_attention(imgs), attention[..., 4:].float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_cls_tokens", [1, 3])
def test_class_feature(num_cls_tokens):
    """One class token is read after the final norm, several are averaged before it."""
    torch.manual_seed(0)
    model = ViTEncoder(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_cls_tokens=num_cls_tokens)
    imgs, P = torch.randn(2, 3, 16, 16), num_cls_tokens
    found = monitor.encode(model.eval(), imgs)
    tokens = model.encode(model.embed(imgs))
    expected = tokens[:, :P].mean(dim=1) if P > 1 else model.norm(tokens)[:, 0]
    assert torch.equal(found["cls"], expected)
    torch.testing.assert_close(found["mean"], model.norm(tokens)[:, P:].mean(dim=1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "simmim_vit_micro_patch4", "--num_cls_tokens", 2], "--num_cls_tokens belongs to mae, mff models"),
        (["--model", "tec_vit_micro_patch4", "--learned_pos_embed"], "--learned_pos_embed belongs to mae, mff models"),
        (["--model", "mae_vit_micro_patch4", "--num_cls_tokens", 0], "num_cls_tokens must be at least 1, got 0"),
    ],
)
def test_impossible_models(flags, message):
    with pytest.raises(ValueError, match=message):
        build(*flags)


@pytest.mark.parametrize("name", ["amt_vit_micro_patch4", "crossmae_vit_micro_patch4", "localmim_vit_micro_patch4"])
def test_frameworks_for_one_class_token_take_no_more(name):
    with pytest.raises(ValueError, match="is made for one class token, got 2"):
        registry.MODELS[name](num_cls_tokens=2)


def test_class_tokens_of_a_network_without_blocks_are_averaged():
    x = torch.randn(2, 7, 5)
    torch.testing.assert_close(class_feature(x, None, 2), (x[:, 0] + x[:, 1]) / 2)
    assert torch.equal(class_feature(x, None, 1), x[:, 0])


# -------------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("size", "full", "thrown"), [("base", 35.21, 20.66), ("large", 51.02, 36.46), ("huge", 74.77, 60.21)]
)
def test_multiply_adds_of_pixio_s_recipes(size, full, thrown):
    """n (12 S D^2 + 2 S^2 D) + depth (12 T d^2 + 2 T^2 d) + embedding, convolution and head, with S = 8 + 64."""
    counted = []
    for name in (f"pixio_vit_{size}", f"pixio_prmim50_vit_{size}"):
        settings = vars(main_pretrain.parse_args(["--recipe", name])[1])
        counted.append(forward_gmac(settings)[0])
    assert counted == pytest.approx([full, thrown], rel=1e-3)


def test_pixio_s_recipes_differ_in_the_method_alone():
    rows = [RECIPES[f"pixio_{arm}vit_large"] for arm in ("", "plain50_", "prmim50_")]
    method = ("throw_ratio", "progressive", "sampling")
    assert len({json.dumps({key: row[key] for key in row if key not in method}, sort_keys=True) for row in rows}) == 1


# ------------------------------------------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """The folder of a run with three class tokens."""
    folder = tmp_path_factory.mktemp("pixio")
    pretrain(photos, folder, *PIXIO, "--epochs", 1)
    return folder


def test_a_run_resumes_bit_for_bit_and_records_its_flags(trained, photos, tmp_path, capsys):
    flags = [*PIXIO, "--epochs", 1]
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 1)
    assert_same_state(
        pretrain(photos, tmp_path / "parts", *flags), contents(sorted(trained.glob("checkpoint-*.pth"))[-1])
    )
    settings = json.loads((trained / "settings.json").read_text())
    names = ("num_cls_tokens", "learned_pos_embed", "drop_path", "hflip")
    assert [settings[name] for name in names] == [3, True, 0.3, False]
    message = pretrain.refused(capsys, photos, tmp_path / "parts", *flags, "--num_cls_tokens", 2)
    assert "--num_cls_tokens was 3 and now is 2" in message


def test_encoder_loads_into_the_classifier_and_the_probe(trained):
    encoder = load_model(trained)
    assert encoder.num_cls_tokens == 3 and encoder.pos_embed.shape == (1, 67, 96)
    imgs = torch.randn(2, 3, 32, 32)
    tokens = open_encoder(trained)(imgs)[4]
    assert torch.equal(tokens.patches, encoder.forward_features(imgs)[:, 3:])
    assert torch.equal(tokens.cls, encoder.encode(encoder.embed(imgs))[:, :3].mean(dim=1))
    classifier = vit_micro_patch4(num_classes=4, num_cls_tokens=3, img_size=64)  # a grid of 16 x 16 tokens
    report = load_encoder(classifier, trained)
    assert report.resized == ["pos_embed"] and torch.equal(classifier.pos_embed[:, :3], encoder.pos_embed[:, :3])
    with pytest.raises(CheckpointError, match="encoder with 3 class tokens, this .* has 1: --num_cls_tokens 3 of"):
        load_encoder(vit_micro_patch4(num_classes=4), trained)


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_pooling_leaves_out_or_averages_the_class_tokens(global_pool):
    torch.manual_seed(0)
    model = vit_micro_patch4(num_classes=4, num_cls_tokens=3, global_pool=global_pool).eval()
    imgs = torch.randn(2, 3, 32, 32)
    x = model.forward_features(imgs)
    pooled = x[:, :3] if global_pool == "token" else x[:, 3:]
    torch.testing.assert_close(model(imgs), model.head(model.fc_norm(sum(pooled.unbind(1)) / pooled.shape[1])))


def test_export_to_timm_and_back(trained, tmp_path, capsys):
    export.main([str(trained), "--out", str(tmp_path / "encoder")])
    assert "reg_tokens" in (tmp_path / "encoder" / "config.json").read_text()
    theirs = timm.create_model(f"local-dir:{tmp_path / 'encoder'}", pretrained=True).eval()
    ours, imgs = load_model(trained), torch.randn(2, 3, 32, 32)
    assert theirs.num_prefix_tokens == 3
    torch.testing.assert_close(theirs.forward_features(imgs), ours.forward_features(imgs), rtol=1e-5, atol=1e-5)
    for name, value in load_model(tmp_path / "encoder").state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


@pytest.mark.parametrize(("layout", "out"), [("mae", "mae.pth"), ("transformers", "folder")])
def test_only_timm_has_several_class_tokens(layout, out, trained, tmp_path):
    with pytest.raises(ValueError, match="has 3 class tokens, and .* have one: use --format timm"):
        export.export(trained, tmp_path / out, layout=layout)
    assert not (tmp_path / out).exists()


def test_a_classifier_that_averages_class_tokens_is_not_exported():
    model = vit_micro_patch4(num_classes=4, num_cls_tokens=3, global_pool="token")
    with pytest.raises(ValueError, match="timm reads one class token, and this classifier the mean of 3"):
        export.timm_arguments(model)


def test_fine_tuning_takes_the_number_of_class_tokens(trained, labelled, tmp_path):
    finetune(labelled, tmp_path, "--finetune", trained, "--num_cls_tokens", 3, "--epochs", 1)
    assert load_model(tmp_path).num_cls_tokens == 3


# --------------------------------------------------------------------------------------------------------- augmentation


@pytest.mark.parametrize("transform", [RandomResizedCropFlip, PaddedCropFlip])
def test_without_flips_the_crops_stay_the_same(transform):
    """The flip is the last draw of a sample, so leaving it out changes nothing else."""
    img = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    both, never = transform(32, 3), transform(32, 3, hflip=False)
    flips = [both.crop_box((40, 40), 0, i).flip for i in range(20)]
    assert 0 < sum(flips) < 20
    for i, flip in enumerate(flips):
        crop = never(img, 0, i)
        assert not never.crop_box((40, 40), 0, i).flip
        assert torch.equal(both(img, 0, i), crop.flip(-1) if flip else crop)
