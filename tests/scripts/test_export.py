import argparse
import os

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import main_pretrain
import models_mae_pr
from encoders.load import load_encoder
from frameworks import registry
from models_vit import VisionTransformer, ViTEncoder, vit_mini_patch4
from scripts import export
from tests import runs
from util.run.checkpoint import save_checkpoint

SMALL_DECODER = dict(decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2)
CLOSE = dict(rtol=1e-5, atol=1e-5)
MINI_IN_TIMM = dict(img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=3)


def shake(model):
    """Change all biases, norms and tokens, so that a lost one is noticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1 or name in ("cls_token", "pos_embed", "head.weight", "head.1.weight"):
                value.add_(0.05 * torch.randn_like(value))
    return model.eval()


def pretrained(folder, model="mae_vit_mini_patch4", **options):
    """Write a checkpoint like those of main_pretrain.py."""
    torch.manual_seed(0)
    net = shake(getattr(models_mae_pr, model)(**SMALL_DECODER, **options))
    settings = {"model": model, "input_size": list(net.img_size), "patch_size": net.patch_size}
    state = {"model": net.state_dict(), "optimizer": {"state": {}}}
    return save_checkpoint(folder, 3, state, {"settings": settings})


def finetuned(folder, **options):
    """Write a checkpoint like those of main_finetune.py. Returns (path, model)."""
    torch.manual_seed(0)
    model = shake(vit_mini_patch4(num_classes=5, **options))
    settings = {
        "model": "vit_mini_patch4",
        "input_size": 32,
        "patch_size": 4,
        "global_pool": model.global_pool,
        "nb_classes": 5,
    }
    meta = {"settings": settings, "classes": list("abcde")}
    return save_checkpoint(folder, "best", {"model": model.state_dict()}, meta), model


def pretrained_run(folder, *flags):
    """Write a checkpoint like those of main_pretrain.py, with all settings. Returns (path, model)."""
    settings = vars(main_pretrain.get_args_parser().parse_args(["--model", "mae_vit_micro_patch4", *flags]))
    torch.manual_seed(0)
    model = shake(registry.build_model(settings))
    return save_checkpoint(folder, 3, {"model": model.state_dict()}, {"settings": settings}), model


def weights_in(path):
    """The weights in a .pth, under the key "model" that MAE's scripts read."""
    content = torch.load(path, weights_only=True)
    assert list(content) == ["model", "meta"]
    return content["model"]


def run(capsys, source, out, *flags):
    """Run the script, and return the lines that it prints."""
    export.main([str(source), "--out", str(out), *flags])
    return capsys.readouterr().out.splitlines()


def refused(capsys, *arguments):
    return runs.refused(capsys, export.main, *arguments)


@torch.no_grad()
def check_features(path, theirs, size=(32, 32), **sizes):
    """timm's features are those of our model after `load_encoder` of the original checkpoint."""
    ours = VisionTransformer(num_classes=3, global_pool="token", **sizes).eval()
    assert load_encoder(ours, path).missing == ["head.weight", "head.bias"]
    imgs = torch.randn(1, 3, *size)
    torch.testing.assert_close(theirs.eval().forward_features(imgs), ours.forward_features(imgs), **CLOSE)


@torch.no_grad()
def check_logits(ours, theirs):
    imgs = torch.randn(3, 3, 32, 32)
    assert ours(imgs).std() > 0.1
    torch.testing.assert_close(theirs.eval()(imgs), ours(imgs), **CLOSE)


# ---------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_encoder_of_a_run_s_folder(tmp_path, capsys, suffix):
    path, out = pretrained(tmp_path), tmp_path / f"encoder{suffix}"
    run(capsys, tmp_path, out)
    theirs = timm.create_model("vit_base_patch16_224", num_classes=0, checkpoint_path=str(out), **MINI_IN_TIMM)
    check_features(path, theirs, **MINI_IN_TIMM)
    weights = load_file(out) if suffix == ".safetensors" else weights_in(out)
    assert {k.split(".")[0] for k in weights} == {"cls_token", "pos_embed", "patch_embed", "blocks", "norm"}
    assert set(os.listdir(tmp_path)) == {"checkpoint-3.pth", "checkpoint-3.json", out.name}  # no temporary file is left
    assert out.stat().st_mode == path.stat().st_mode  # the same permissions as the checkpoint


@pytest.mark.parametrize("global_pool", ["avg", "token"])
def test_classifier(tmp_path, capsys, global_pool):
    path, ours = finetuned(tmp_path, global_pool=global_pool)
    out = tmp_path / "classifier.safetensors"
    run(capsys, path, out)
    options = dict(global_pool=global_pool, num_classes=5, **MINI_IN_TIMM)
    check_logits(ours, timm.create_model("vit_base_patch16_224", checkpoint_path=str(out), **options))
    with safe_open(out, "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["classes"] == '["a", "b", "c", "d", "e"]'


def test_linear_probe_is_folded_into_one_layer(tmp_path, capsys):
    path, ours = finetuned(tmp_path, global_pool="token", probe=True)
    torch.manual_seed(2)
    ours.head[0].running_mean.normal_()
    ours.head[0].running_var.uniform_(0.01, 4)
    save_checkpoint(
        tmp_path, "best", {"model": ours.state_dict()}, {"settings": {"model": "vit_mini_patch4", "input_size": 32}}
    )
    out = tmp_path / "probe.pth"
    assert 'global_pool="token", num_classes=5' in run(capsys, path, out)[-1]
    weights = weights_in(out)
    assert [k for k in weights if k.startswith("head.")] == ["head.weight", "head.bias"]
    options = dict(global_pool="token", num_classes=5, **MINI_IN_TIMM)
    check_logits(ours, timm.create_model("vit_base_patch16_224", checkpoint_path=str(out), **options))


def test_a_release_of_mae_with_a_pickled_namespace(tmp_path, capsys):
    """The number of heads follows from the published sizes. The decoder has MAE's key names."""
    encoder = shake(models_mae_pr.mae_vit_tiny_patch16(img_size=64, **SMALL_DECODER)).state_dict()
    weights = {k: v for k, v in encoder.items() if not k.startswith("decoder.")}
    weights |= {"mask_token": torch.zeros(1, 1, 8), "decoder_blocks.0.norm1.weight": torch.zeros(8)}
    torch.save({"model": weights, "args": argparse.Namespace(lr=0.1)}, tmp_path / "mae.pth")
    out = tmp_path / "encoder.safetensors"
    assert "vit_tiny_patch16_224" in run(capsys, tmp_path / "mae.pth", out)[-1]
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0, checkpoint_path=str(out))
    sizes = dict(img_size=64, embed_dim=192, depth=12, num_heads=3)
    check_features(tmp_path / "mae.pth", theirs, size=(64, 64), **sizes)


def test_rounding_is_told_from_a_mistake(tmp_path, capsys, monkeypatch):
    """If float32 rounds by more than the tolerance, float64 is compared. Here the outputs are rounded on purpose."""
    _, ours = finetuned(tmp_path, global_pool="token")
    torch.save({k: v for k, v in ours.state_dict().items() if not k.startswith("head.")}, tmp_path / "coarse.pth")
    exact = ViTEncoder.forward_features

    def rounded(self, imgs):
        x = exact(self, imgs)
        return x.bfloat16().float() if x.dtype == torch.float32 else x

    monkeypatch.setattr(ViTEncoder, "forward_features", rounded)
    lines = run(capsys, tmp_path / "coarse.pth", tmp_path / "encoder.pth")
    assert " in float32, which is rounding: in float64 " in lines[1]
    assert float(lines[1].split()[-1]) < 1e-9


@pytest.mark.parametrize(
    ("model", "options", "arguments"),
    [
        (
            "mae_vit_mini_patch4",
            {},
            '"vit_tiny_patch16_224", img_size=32, patch_size=4, depth=6, num_classes=0, ',
        ),
        (
            "mae_vit_mini_patch4",
            {"img_size": (16, 64)},
            '"vit_tiny_patch16_224", img_size=(16, 64), patch_size=4, depth=6',
        ),
        ("mae_vit_tiny_patch16", {"img_size": 64}, '"vit_tiny_patch16_224", img_size=64, num_classes=0, '),
        (
            "mae_vit_tiny_patch16",
            {"img_size": 64, "patch_size": 8},
            '"vit_tiny_patch16_224", img_size=64, patch_size=8, num_',
        ),
        (
            "mae_vit_small_patch16",
            {"img_size": 32, "patch_size": 8},
            '"vit_small_patch8_224", img_size=32, num_classes=0, ',
        ),
    ],
)
def test_the_printed_line_loads_the_file(tmp_path, capsys, monkeypatch, model, options, arguments):
    path = pretrained(tmp_path, model, **options)
    monkeypatch.chdir(tmp_path)
    *_, line = run(capsys, path, 'my "own".safetensors')
    assert line.startswith(f"timm.create_model({arguments}")
    theirs = eval(line, {"timm": timm})
    with torch.device("meta"):
        net = getattr(models_mae_pr, model)(**options)
    sizes = dict(patch_size=net.patch_size, embed_dim=net.embed_dim, depth=len(net.blocks))
    sizes["num_heads"] = net.blocks[0].attn.num_heads
    check_features(path, theirs, size=net.img_size, img_size=net.img_size, **sizes)


def test_overwrite(tmp_path, capsys):
    path, out = pretrained(tmp_path), tmp_path / "encoder.pth"
    out.write_text("older")
    assert "exists; give another name, or --overwrite" in refused(capsys, path, "--out", out)
    assert out.read_text() == "older"
    run(capsys, path, out, "--overwrite")
    assert "cls_token" in weights_in(out)
    assert "is the checkpoint itself" in refused(capsys, path, "--out", path, "--overwrite")


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("vit.pth", "encoder.bin", "must end in .safetensors or .pth"),
        ("vit.pth", "text.pth/encoder.pth", "text.pth' cannot be made: File exists"),
        ("nowhere.pth", "encoder.pth", "no checkpoint at"),
        (".", "encoder.pth", "holds no intact checkpoint: give the folder of a run, or a checkpoint"),
        ("text.pth", "encoder.pth", "cannot be read as a checkpoint"),
        (
            "other.pth",
            "encoder.pth",
            "no encoder of a known kind: patch_embed.proj.weight, pos_embed, cls_token, ",
        ),
        ("norms.pth", "encoder.pth", "missing: norm.bias"),
        ("scaled.pth", "encoder.pth", "this ViTEncoder has no blocks.0.ls1.gamma"),
        ("wide.pth", "encoder.pth", "none is known for width 48 and depth 2; known (width, depth): (64, 3), (96, 4)"),
        ("oblong.pth", "encoder.pth", "positions for 2 tokens, which is no square"),
        ("head.pth", "encoder.pth", "1 missing: head.bias"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path, capsys, source, out, message):
    weights = vit_mini_patch4(global_pool="token").state_dict()
    encoder = {k: v for k, v in weights.items() if not k.startswith("head.")}
    wide = VisionTransformer(img_size=32, embed_dim=48, depth=2, num_heads=3, global_pool="token").state_dict()
    torch.save({"model": encoder}, tmp_path / "vit.pth")
    torch.save({"model": {"fc.weight": torch.zeros(2)}}, tmp_path / "other.pth")
    torch.save({k: v for k, v in encoder.items() if k != "norm.bias"}, tmp_path / "norms.pth")
    torch.save({**encoder, "blocks.0.ls1.gamma": torch.zeros(192)}, tmp_path / "scaled.pth")
    torch.save({k: v for k, v in wide.items() if not k.startswith("head.")}, tmp_path / "wide.pth")
    torch.save({**encoder, "pos_embed": torch.zeros(1, 3, 192)}, tmp_path / "oblong.pth")
    torch.save({k: v for k, v in weights.items() if k != "head.bias"}, tmp_path / "head.pth")
    (tmp_path / "text.pth").write_text("hello")
    before = sorted(os.listdir(tmp_path))
    error = refused(capsys, tmp_path / source, "--out", tmp_path / out)
    assert message in error and len(error.splitlines()) == 2  # the message, and the line about --help
    assert sorted(os.listdir(tmp_path)) == before


# ---------------------------------------------------------------------------------------------- MAE's own names

PROBE = {"global_pool": "token", "probe": True}
# Names of MAE's full releases that are not the encoder's.
MAE_DECODER = {"mask_token", "decoder_pos_embed", "decoder_embed", "decoder_blocks", "decoder_norm", "decoder_pred"}


@pytest.mark.parametrize("flags", [("--throw_ratio", "0"), ("--no-progressive",)])
def test_pretrained_weights_under_mae_s_names(tmp_path, capsys, flags):
    path, model = pretrained_run(tmp_path, *flags)
    lines = run(capsys, path, tmp_path / "mae.pth", "--format", "mae")
    weights = weights_in(tmp_path / "mae.pth")
    decoder = {name.split(".")[0] for name in weights} - {name.split(".")[0] for name in model.state_dict()}
    assert decoder == MAE_DECODER and len(weights) == len(model.state_dict())
    other = models_mae_pr.mae_vit_micro_patch4(throw_ratio=0)
    other.load_official({"model": weights})
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    assert any("tokens were thrown in training" in line for line in lines) == (flags == ("--no-progressive",))
    sizes = "patch_size 4, embed_dim 96, depth 4, num_heads 3"
    assert lines[1] == f"MAE's scripts have no model of this size: {sizes}"


def test_the_file_is_what_load_official_of_a_release_reads(tmp_path, capsys):
    """A model that is loaded from the file exports the same file."""
    path, model = pretrained_run(tmp_path, "--throw_ratio", "0")
    run(capsys, path, tmp_path / "mae.pth", "--format", "mae")
    first = weights_in(tmp_path / "mae.pth")
    for value in model.state_dict().values():
        value.zero_()
    model.load_official(first)
    assert all(torch.equal(value, first[name]) for name, value in export.mae_weights(model).items())


@pytest.mark.parametrize(
    ("factory", "options", "name"),
    [
        ("mae_vit_base_patch16", {}, "MAE's scripts read it as mae_vit_base_patch16"),
        ("mae_vit_huge_patch14", {}, "MAE's scripts read it as mae_vit_huge_patch14"),
        ("mae_vit_base_patch16", {"img_size": 192}, "MAE's scripts have no model of this size"),
        ("mae_vit_base_patch16", {"decoder_depth": 4}, "MAE's scripts have no model of this size"),
        ("mae_vit_small_patch16", {}, "MAE's scripts have no model of this size"),
    ],
)
def test_mae_s_own_name_of_a_model(factory, options, name):
    with torch.device("meta"):
        model = getattr(models_mae_pr, factory)(**options)
    assert export.mae_name(model, model.decoder).startswith(name)


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"global_pool": "token"}, PROBE])
def test_a_classifier_for_mae_is_the_plain_state_dict(tmp_path, capsys, options):
    path, model = finetuned(tmp_path, **options)
    lines = run(capsys, path, tmp_path / "classifier.pth", "--format", "mae")
    weights = weights_in(tmp_path / "classifier.pth")
    assert list(weights) == list(model.state_dict())  # a probe keeps its BatchNorm, as in MAE
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert lines[0].startswith("classifier of ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "trained with --throw_ratio 0.5: its decoder reconstructs thrown tokens by an aggregation"),
        (("--aggregation", "avgpool"), "by an aggregation, which MAE's decoder lacks"),  # it has no parameters
        (("--throw_ratio", "0", "--input_size", "32", "64"), "is for images of (32, 64) pixels, and MAE's are square"),
        (("--throw_ratio", "0", "--model", "mff_vit_micro_patch4"), "to a .pth, which MAE's scripts can fine-tune"),
        (("--model", "simmim_vit_micro_patch4", "--throw_ratio", "0.25"), "with --format timm to a folder"),
        (("--model", "greenmim_swin_micro_patch4_window4"), "with --format timm to a folder"),
    ],
)
def test_what_mae_s_code_could_not_run_is_refused(tmp_path, capsys, flags, message):
    path, _ = pretrained_run(tmp_path, *flags)
    error = refused(capsys, path, "--out", tmp_path / "mae.pth", "--format", "mae")
    assert message in error and "export its encoder with --format timm" in error
    assert ("MAE's scripts can fine-tune" in error) == ("to a folder" not in error)
    assert not (tmp_path / "mae.pth").exists()


def test_other_files_are_refused_for_mae(tmp_path, capsys):
    path, _ = pretrained_run(tmp_path, "--throw_ratio", "0")
    error = refused(capsys, path, "--out", tmp_path / "mae.safetensors", "--format", "mae")
    assert "--format mae writes a .pth, which is what MAE's scripts read, got --out" in error
    run(capsys, path, tmp_path / "mae.pth", "--format", "mae")
    again = ("--out", tmp_path / "again.pth", "--format", "mae")
    assert "has MAE's names already" in refused(capsys, tmp_path / "mae.pth", *again)
    run(capsys, path, tmp_path / "encoder.pth")
    assert "does not hold the settings of its model" in refused(capsys, tmp_path / "encoder.pth", *again)


def test_frameworks_without_a_plain_vit_are_named(tmp_path, capsys):
    """A file without settings is recognised by its bias tables."""
    weights = {"cls_token": torch.zeros(1), "blocks.0.attn.relative_position_bias_table": torch.zeros(2, 2)}
    save_checkpoint(tmp_path, 1, {"model": weights}, {"settings": {"model": "simmim_vit_base_patch16"}})
    error = refused(capsys, tmp_path, "--out", tmp_path / "e.pth")
    assert (
        "(made as simmim_vit_base_patch16) holds a ViT with relative positions: only plain ViTs can be exported"
        in error
    )
    assert "main_finetune.py --finetune takes it as it is" in error
    torch.save(weights, tmp_path / "bare.pth")
    assert "holds a ViT with relative positions:" in refused(capsys, tmp_path / "bare.pth", "--out", tmp_path / "e.pth")


def test_a_missing_final_norm_is_said(tmp_path, capsys):
    """As in TEC's published encoders and in CrossMAE's."""
    weights = vit_mini_patch4(global_pool="token").state_dict()
    torch.save({k: v for k, v in weights.items() if not k.startswith(("head.", "norm."))}, tmp_path / "normless.pth")
    export.main([str(tmp_path / "normless.pth"), "--out", str(tmp_path / "encoder.pth")])
    assert "holds no final norm: norm starts with weight 1" in capsys.readouterr().out
