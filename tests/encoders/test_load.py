"""Weights of other layouts, key names and sizes are fitted into a model."""

import argparse
import json

import pytest
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo

from encoders.load import LoadReport, fit, load_encoder, load_model, read
from encoders.models_swin import swin_micro_patch4_window4
from frameworks.models_simmim_pr import simmim_vit_micro_patch4
from models_mae_pr import mae_vit_micro_patch4
from models_vit import VisionTransformer, ViTEncoder
from scripts.parts.transformers_models import transformers_class, transformers_config, transformers_names
from tests.runs import PLAIN, evaluate, finetune
from util.run.checkpoint import CheckpointError, read_checkpoint, save_checkpoint

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


def encoder_weights(**sizes):
    torch.manual_seed(1)
    return VisionTransformer(global_pool="token", **{**SIZES, **sizes}).state_dict()


@pytest.mark.fault("F41", "files of the releases (MAE's holds a Namespace), timm's", "read; equal tensors")
@pytest.mark.parametrize("layout", ["model", "state_dict", "bare"])
def test_load_encoder_accepts_the_usual_layouts(tmp_path, layout):
    """MAE's releases hold `model` and a pickled argparse.Namespace; timm's files are the state dict itself."""
    weights = {k: v for k, v in encoder_weights().items() if not k.startswith("head.")}
    weights |= {"decoder_embed.weight": torch.zeros(3), "mask_token": torch.zeros(1)}
    content = weights if layout == "bare" else {layout: weights, "epoch": 799, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "w.pth")
    model = VisionTransformer(num_classes=5, **SIZES)
    report = load_encoder(model, tmp_path / "w.pth")
    assert set(report.missing) == {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    assert set(report.unexpected) == {"decoder_embed.weight", "mask_token", "norm.weight", "norm.bias"}
    assert "4 missing (fc_norm.weight, fc_norm.bias, head.weight, head.bias)" in str(report)
    assert all(torch.equal(model.state_dict()[k], weights[k]) for k in report.loaded)


def test_load_encoder_resizes_positions(tmp_path):
    torch.save(encoder_weights(img_size=64), tmp_path / "w.pth")
    model = VisionTransformer(num_classes=5, **SIZES)
    assert load_encoder(model, tmp_path / "w.pth").resized == ["pos_embed"]
    table = encoder_weights(img_size=64)["pos_embed"]
    assert torch.equal(model.pos_embed[:, 0], table[:, 0])
    grid = table[0, 1:].view(8, 8, 48).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(grid, size=(4, 4), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed[0, 1:], expected[0].permute(1, 2, 0).reshape(16, 48))


def test_load_encoder_resizes_a_grid_that_is_not_square(tmp_path):
    """4 x 16 and 8 x 8 tokens have tables of the same shape. Only the settings distinguish them."""
    weights = encoder_weights(img_size=(32, 128))
    path = save_checkpoint(tmp_path, 1, {"model": weights}, {"settings": {"input_size": [32, 128], "patch_size": 8}})
    model = VisionTransformer(num_classes=5, **{**SIZES, "img_size": 64})
    assert load_encoder(model, path).resized == ["pos_embed"]
    grid = weights["pos_embed"][0, 1:].view(4, 16, 48).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(grid, size=(8, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed[0, 1:], expected[0].permute(1, 2, 0).reshape(64, 48))


def test_load_encoder_refuses_what_does_not_fit(tmp_path):
    torch.save(encoder_weights(embed_dim=96), tmp_path / "wide.pth")
    with pytest.raises(ValueError, match="holds an encoder of width 96, this VisionTransformer has width 48"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "wide.pth")
    torch.save(encoder_weights(depth=1), tmp_path / "shallow.pth")
    with pytest.raises(ValueError, match="missing: blocks.1.norm1.weight"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "shallow.pth")
    torch.save(encoder_weights(patch_size=4, img_size=16), tmp_path / "patch4.pth")
    with pytest.raises(ValueError, match="patch size 4, this VisionTransformer has 8: give --patch_size 4"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "patch4.pth")
    torch.save(encoder_weights(img_size=(16, 32)), tmp_path / "oblong.pth")
    with pytest.raises(ValueError, match=r"pos_embed \[1, 9, 48\] of '.*oblong.pth' .*cannot be resized"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "oblong.pth")
    normless = {key: value for key, value in encoder_weights().items() if not key.startswith("norm.")}
    torch.save(normless | {"mask_token": torch.zeros(1, 1, 48)}, tmp_path / "norm.pth")
    with pytest.raises(ValueError, match=r"missing: norm.weight, norm.bias"):  # of a kind of file that has one
        load_encoder(VisionTransformer(global_pool="token", **SIZES), tmp_path / "norm.pth")


def test_safetensors_files_are_read(tmp_path):
    weights = encoder_weights()
    save_file(weights, tmp_path / "w.safetensors")
    model = VisionTransformer(num_classes=5, **SIZES)
    report = load_encoder(model, tmp_path / "w.safetensors")
    assert len(report.missing) == 4 and all(torch.equal(model.state_dict()[k], weights[k]) for k in report.loaded)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="text.safetensors' cannot be read as a checkpoint"):
        read_checkpoint(tmp_path / "text.safetensors")


@pytest.mark.fault(
    "U11", "--finetune of a classifier that was fine-tuned for other classes", "the encoder is loaded, the head is not"
)
def test_a_head_of_other_classes_is_left_out(tmp_path):
    source = VisionTransformer(num_classes=3, **SIZES)
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {"classes": ["a", "b", "c"]})
    for num_classes, classes, is_loaded in (
        (3, None, True),
        (3, list("abc"), True),
        (3, list("acb"), False),
        (4, None, False),
    ):
        model = VisionTransformer(num_classes=num_classes, **SIZES)
        report = load_encoder(model, path, classes=classes)
        assert ("head.weight" in report.loaded) == is_loaded and ("head.bias" in report.missing) != is_loaded
        assert torch.equal(model.head.weight, source.head.weight) == is_loaded
        assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)


def test_the_report_names_what_was_resized_and_what_is_missing():
    report = LoadReport(
        ["cls_token", "pos_embed"], ["pos_embed"], [f"head.{k}" for k in range(8)], ["decoder.a", "decoder.b"]
    )
    assert str(report) == (
        "2 loaded; 1 resized (pos_embed); 8 missing (head.0, head.1, head.2, head.3, head.4, head.5, ...); "
        "2 not used (decoder)"
    )
    assert str(LoadReport(["cls_token"], [], [], [])) == "1 loaded; 0 resized; 0 missing; 0 not used"


@pytest.mark.parametrize("name", ["model", "state_dict", "student", None])
def test_weights_are_found_in_every_layout(tmp_path, name):
    """Values that are no tensors are left out."""
    weights = {"w": torch.ones(1), "version": 3}
    torch.save(weights if name is None else {name: weights, "epoch": 3}, tmp_path / "w.pth")
    assert read(tmp_path / "w.pth").raw == {"w": torch.ones(1)}


@pytest.mark.parametrize("content", [{"model": 1}, {"state_dict": [1]}, {0: torch.ones(1)}, {"model": {"w": 1}}, {}])
def test_contents_without_named_weights_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="w.pth' holds no weights by their names"):
        read(tmp_path / "w.pth")


# -------------------------------------------------------------------------------------------------- what must match


def test_all_is_exact(tmp_path):
    torch.save(encoder_weights(), tmp_path / "w.pth")
    model = VisionTransformer(global_pool="token", **SIZES)
    assert not fit(model, read(tmp_path / "w.pth"), "all").missing
    torch.save(encoder_weights(img_size=64) | {"extra": torch.ones(1)}, tmp_path / "w.pth")
    message = (
        r"'.*w.pth' \(with the key names of MAE and timm\) do not fit this VisionTransformer: 1 unexpected: extra; "
    )
    with pytest.raises(CheckpointError, match=message + "1 of another shape: pos_embed"):
        fit(model, read(tmp_path / "w.pth"), "all")


def test_blocks_start_another_pre_training(tmp_path):
    """A decoder of another size, or of another framework, is left as it is."""
    torch.manual_seed(1)
    source = mae_vit_micro_patch4(decoder_depth=2, decoder_embed_dim=32)
    torch.save({"model": source.state_dict()}, tmp_path / "mae.pth")
    model = mae_vit_micro_patch4(decoder_depth=4, decoder_embed_dim=32)
    report = load_encoder(model, tmp_path / "mae.pth", "blocks")
    assert report.missing and all(key.startswith(("decoder.blocks.2.", "decoder.blocks.3.")) for key in report.missing)
    assert torch.equal(model.decoder.blocks[1].mlp.fc1.weight, source.decoder.blocks[1].mlp.fc1.weight)
    simmim = simmim_vit_micro_patch4()
    torch.nn.init.normal_(simmim.rel_pos_bias.relative_position_bias_table)
    torch.save({"model": simmim.state_dict()}, tmp_path / "simmim.pth")
    again = simmim_vit_micro_patch4()
    assert not load_encoder(again, tmp_path / "simmim.pth", "blocks").missing
    assert torch.equal(*(m.rel_pos_bias.relative_position_bias_table for m in (simmim, again)))
    with pytest.raises(CheckpointError, match="does not hold the encoder of this SimMIMViT: missing: blocks.0.gamma_1"):
        load_encoder(again, tmp_path / "mae.pth", "blocks")


def test_a_swin_of_more_blocks_is_refused(tmp_path):
    torch.save({"model": swin_micro_patch4_window4(depths=(2, 6)).state_dict()}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"this SwinTransformer has no layers\.1\.blocks\.4\.norm1\.weight"):
        load_encoder(swin_micro_patch4_window4(), tmp_path / "w.pth")


# ---------------------------------------------------------------------------------------------------- Transformers


def transformers_folder(folder, model, layout="safetensors", **changes):
    """Writes the weights of a ViT as `save_pretrained` does; tests/encoders/test_transformers.py has the library."""
    config = transformers_config(model, None, None) | {"id2label": {"0": "cat", "1": "dog"}} | changes
    weights = transformers_names(model.state_dict(), transformers_class(model))
    if not config.get("qkv_bias", True):
        weights = {
            name: value
            for name, value in weights.items()
            if not name.endswith(("query.bias", "value.bias", "key.bias"))
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    if layout == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        number = 2 if layout == "shards" else 1
        names = ["model.safetensors"] if number == 1 else [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        for i, name in enumerate(names):
            save_file({key: weights[key] for key in sorted(weights)[i::number]}, folder / name, {"format": "pt"})
    return folder


def random_vit(kind=VisionTransformer, eps=1e-12, **options):
    torch.manual_seed(2)
    model = kind(**{**SIZES, **options}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = eps
    return model


@torch.no_grad()
@pytest.mark.parametrize("layout", ["safetensors", "bin", "shards"])
def test_folders_of_transformers(tmp_path, layout):
    """The number of heads and the epsilon are those of the config: ViTConfig has 1e-12, and 1e-6 is MAE's."""
    source, imgs = random_vit(ViTEncoder), torch.randn(2, 3, 32, 32)
    folder = transformers_folder(tmp_path / "vit", source, layout)
    assert torch.equal(load_model(folder).forward_features(imgs), source.forward_features(imgs))
    model = VisionTransformer(global_pool="token", **SIZES).eval()
    report = load_encoder(model, folder)
    assert report.missing == ["head.weight", "head.bias"] and not report.unexpected
    assert "the file's config has LayerNorms with eps 1e-12, here eps is 1e-06" in str(report)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in source.state_dict().items())
    if layout == "shards":
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match="no checkpoint at '.*model-00002-of-00002.safetensors'"):
            load_model(folder)


@torch.no_grad()
def test_classifiers_of_transformers(tmp_path):
    source, imgs = random_vit(global_pool="token", num_classes=2, eps=1e-5), torch.randn(2, 3, 32, 32)
    folder = transformers_folder(tmp_path / "vit", source, layer_norm_eps=1e-5)
    weights = read(folder)
    assert weights.classes == ["cat", "dog"] and weights.pixels["mean"] == [0.5] * 3
    assert torch.equal(load_model(folder)(imgs), source(imgs))
    transformers_folder(tmp_path / "unnamed", source, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    assert read(tmp_path / "unnamed").classes is None
    transformers_folder(tmp_path / "relu", source, hidden_act="relu")
    with pytest.raises(CheckpointError, match="has the activation 'relu'"):
        read(tmp_path / "relu")
    names = ImageNetInfo()
    labels = {str(i): names.index_to_description(i) for i in range(1000)}
    transformers_folder(tmp_path / "imagenet", random_vit(global_pool="token", num_classes=1000), id2label=labels)
    assert read(tmp_path / "imagenet").classes[:2] == ["n01440764", "n01443537"]


def test_transformers_without_biases_of_qkv(tmp_path):
    source = random_vit(ViTEncoder)
    for block in source.blocks:
        torch.nn.init.zeros_(block.attn.qkv.bias)
    model = load_model(transformers_folder(tmp_path / "vit", source, qkv_bias=False))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in source.state_dict().items())


def test_a_folder_of_transformers_is_evaluated_and_fine_tuned(labelled, tmp_path, capsys):
    """Its file is a link to another name, as in the cache of the Hub. The statistics are those of its images."""
    sizes = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)
    source = random_vit(global_pool="token", num_classes=2, **sizes)
    folder = transformers_folder(tmp_path / "vit", source)
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    state = dict(model="vit_micro_patch4", nb_classes=2, input_size=32, patch_size=4, global_pool="token", crop_pct=1.0)
    settings = state | dict(trainable_blocks=None, mean=[0.5] * 3, std=[0.25] * 3)
    known = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {"settings": settings})
    ours, theirs = evaluate(labelled, known), evaluate(labelled, folder, "--crop_pct", "1")
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-3) and theirs["num_images"] == 7
    content = finetune(labelled, tmp_path / "out", *PLAIN, "--finetune", folder, "--max_steps", 1)
    assert content["meta"]["encoder"]["path"] == str(folder / "model.safetensors")
    assert content["meta"]["settings"]["mean"] == [0.5] * 3
    assert "the file's config has LayerNorms with eps 1e-12, here eps is 1e-06" in capsys.readouterr().out
