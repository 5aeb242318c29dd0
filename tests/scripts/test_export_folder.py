"""Folders in timm's layout load as `local-dir:FOLDER` with the features of our models. Uploads go to a fake Hub."""

import inspect
import json
import os
import sys

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file
from timm.layers import resize_rel_pos_bias_table
from torch.nn import functional as F

from downstream.probe.models import open_encoder
from encoders import classifiers
from encoders.load import load_encoder, load_model
from frameworks import registry
from scripts import export
from scripts.parts import timm_models
from tests.patches import StandIn
from tests.scripts.test_export import CLOSE, refused, run
from tests.scripts.test_export import shake as shake_parts
from util.run.checkpoint import save_checkpoint

FILES = {"config.json", "model.safetensors", "README.md", "export.json"}
# Newer versions of timm read oblong tables of relative positions, and build all models on the meta device.
TIMM_IS_NEW = "old_window_size" in inspect.signature(resize_rel_pos_bias_table).parameters

# Names of a pre-training model, and of the fine-tune model that loads its encoder.
VIT = "mae_vit_micro_patch4", "vit_micro_patch4"
NORMLESS = "crossmae_vit_micro_patch4", "vit_micro_patch4"
RELATIVE = "simmim_vit_micro_patch4", "relative_vit_micro_patch4"
ABSOLUTE = "amt_simmim_vit_micro_patch4", "absolute_vit_micro_patch4"
SWIN = "greenmim_swin_micro_patch4_window4", "swin_micro_patch4_window4"
SIMMIM_SWIN = "simmim_swin_micro_patch4_window4", "swin_micro_patch4_window4"


def shake(model):
    """Change bias tables, too, which begin at zero or small."""
    with torch.no_grad():
        for name, value in shake_parts(model).named_parameters():
            if name.endswith("relative_position_bias_table"):
                value.normal_()
    return model


def settings_of(model, name, in_chans):
    settings = {"model": name, "input_size": list(model.img_size), "patch_size": model.patch_size, "mask_ratio": 0.75}
    if in_chans != 3:
        settings |= dict(in_chans=in_chans, mean=[0.1 * (i + 1) for i in range(in_chans)], std=[0.3] * in_chans)
    return settings


def pretrained(folder, name, in_chans=3, **options):
    """Write a checkpoint like those of main_pretrain.py."""
    torch.manual_seed(0)
    model = shake(registry.MODELS[name](in_chans=in_chans, **options))
    meta = {"settings": settings_of(model, name, in_chans)}
    folder.mkdir(exist_ok=True)
    return save_checkpoint(folder, 3, {"model": model.state_dict()}, meta)


def finetuned(folder, name, in_chans=3, crop_pct=None, **options):
    """Write a checkpoint like those of main_finetune.py. Returns (path, model)."""
    torch.manual_seed(0)
    model = shake(classifiers.MODELS[name](num_classes=5, in_chans=in_chans, **options))
    meta = {"settings": settings_of(model, name, in_chans) | {"nb_classes": 5}, "classes": list("abcde")}
    meta["settings"]["crop_pct"] = crop_pct
    del meta["settings"]["mask_ratio"]
    return save_checkpoint(folder, "best", {"model": model.state_dict()}, meta), model


def load(folder, **options):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


@torch.no_grad()
def features_by_finetuning(path, name, imgs, options):
    """Features [B, T, D] by the fine-tune model, which loads the encoder its own way. The last norm is done by hand."""
    pool = {} if name in (RELATIVE[1], SWIN[1]) else {"global_pool": "token"}
    model = classifiers.MODELS[name](in_chans=imgs.shape[1], **pool, **options).eval()
    load_encoder(model, path)
    x = model.forward_features(imgs)
    if name == RELATIVE[1]:
        weights = torch.load(path, weights_only=True)["model"]
        x = F.layer_norm(x, x.shape[-1:], weights["norm.weight"], weights["norm.bias"], 1e-6)
    return x


def timm_features(model, imgs):
    x = model.forward_features(imgs)
    return x.flatten(1, 2) if x.ndim == 4 else x


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    ("family", "options", "in_chans"),
    [
        (VIT, {}, 3),
        (VIT, {}, 1),
        (VIT, {}, 5),
        (VIT, {"patch_size": 8}, 3),
        (VIT, {"img_size": (16, 64)}, 3),
        (NORMLESS, {}, 3),
        (RELATIVE, {}, 3),
        (RELATIVE, {"patch_size": 8}, 5),
        (RELATIVE, {"img_size": (16, 64)}, 3),
        (ABSOLUTE, {}, 3),
        (ABSOLUTE, {"img_size": (64, 32)}, 1),
        (SWIN, {}, 3),
        (SWIN, {"img_size": (64, 96)}, 5),
        (SIMMIM_SWIN, {}, 1),
    ],
)
def test_encoders(tmp_path, capsys, family, options, in_chans):
    name, finetune = family
    path = pretrained(tmp_path / "run", name, in_chans, **options)
    out = tmp_path / "encoder"
    if family is RELATIVE and "img_size" in options and not TIMM_IS_NEW:
        assert "does not load the weights" in refused(capsys, path, "--out", out) and not out.exists()
        return
    line = run(capsys, tmp_path / "run", out)[-1]
    assert line == f'timm.create_model("local-dir:{out}", pretrained=True)' and set(os.listdir(out)) == FILES
    assert sorted(os.listdir(tmp_path)) == ["encoder", "run"]
    theirs = eval(line, {"timm": timm}).eval()
    assert theirs.num_classes == 0 and theirs.patch_embed.proj.in_channels == in_chans
    imgs = torch.randn(2, in_chans, *options.get("img_size", (32, 32)))
    expected = features_by_finetuning(path, finetune, imgs, options)
    assert expected.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(timm_features(theirs, imgs), expected, **CLOSE)
        pooled = expected.mean(dim=1) if finetune == SWIN[1] else expected[:, 0]
        torch.testing.assert_close(theirs(imgs), pooled, **CLOSE)
    check_read_back(out, imgs, expected)


@torch.no_grad()
def check_read_back(path, imgs, expected):
    """Our programs read an export with the image size and the features [B, T, D] of its run."""
    ours, probed = load_model(path), open_encoder(path)
    assert ours.img_size == probed.img_size == imgs.shape[2:]
    for encoder in (ours, probed.network):
        torch.testing.assert_close(encoder.forward_features(imgs), expected, **CLOSE)


@pytest.mark.parametrize(
    ("name", "options", "in_chans"),
    [
        (VIT[1], {"global_pool": "avg"}, 3),
        (VIT[1], {"global_pool": "token"}, 5),
        (VIT[1], {"global_pool": "token", "probe": True}, 3),
        (RELATIVE[1], {}, 3),
        (ABSOLUTE[1], {"global_pool": "avg"}, 3),
        (ABSOLUTE[1], {"global_pool": "token"}, 3),
        (SWIN[1], {}, 5),
    ],
)
def test_classifiers(tmp_path, capsys, name, options, in_chans):
    path, ours = finetuned(tmp_path, name, in_chans, **options)
    assert "largest difference of timm's logits" in run(capsys, path, tmp_path / "classifier")[1]
    theirs, imgs = load(tmp_path / "classifier"), torch.randn(3, in_chans, 32, 32)
    with torch.no_grad():
        assert ours(imgs).std() > 0.05
        torch.testing.assert_close(theirs(imgs), ours(imgs), **CLOSE)
    assert tuple(theirs.pretrained_cfg["label_names"]) == tuple("abcde")


@pytest.mark.parametrize("family", [VIT, RELATIVE, ABSOLUTE, SWIN], ids=["vit", "relative", "absolute", "swin"])
@torch.no_grad()
def test_other_uses_in_timm(tmp_path, capsys, family):
    """A new head, maps of features, and another image size."""
    path = pretrained(tmp_path, family[0])
    run(capsys, path, tmp_path / "encoder")
    imgs = torch.randn(1, 3, 32, 32)
    expected = features_by_finetuning(path, family[1], imgs, {})
    headed = load(tmp_path / "encoder", num_classes=7)
    assert headed(imgs).shape == (1, 7)
    torch.testing.assert_close(timm_features(headed, imgs), expected, **CLOSE)
    last = load(tmp_path / "encoder", features_only=True)(imgs)[-1]
    weights = load_file(tmp_path / "encoder" / "model.safetensors")
    if family is SWIN:
        tokens, eps, own = last.flatten(1, 2), 1e-5, expected
    else:
        tokens, eps, own = last.flatten(2).transpose(1, 2), 1e-6, expected[:, 1:]
    normed = F.layer_norm(tokens, tokens.shape[-1:], weights["norm.weight"], weights["norm.bias"], eps)
    torch.testing.assert_close(normed, own, **CLOSE)
    larger = load(tmp_path / "encoder", img_size=64)
    assert larger(torch.randn(1, 3, 64, 64)).isfinite().all()
    unchanged = {name for name, value in larger.state_dict().items() if torch.equal(value, weights.get(name, value))}
    assert {"patch_embed.proj.weight", "norm.weight"} <= unchanged


@torch.no_grad()
def test_mean_of_a_plain_vit_s_tokens(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0])
    run(capsys, path, tmp_path / "encoder")
    imgs = torch.randn(2, 3, 32, 32)
    theirs = load(tmp_path / "encoder", global_pool="avg", fc_norm=False)
    expected = features_by_finetuning(path, VIT[1], imgs, {})[:, 1:].mean(dim=1)
    torch.testing.assert_close(theirs(imgs), expected, **CLOSE)


def test_timm_knows_the_images_of_the_model(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0], 5, img_size=(16, 64))
    run(capsys, path, tmp_path / "encoder")
    config = timm.data.resolve_model_data_config(load(tmp_path / "encoder"))
    assert list(config["input_size"]) == [5, 16, 64] and config["interpolation"] == "bicubic"
    assert config["crop_pct"] == 0.875
    assert list(config["mean"]) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5]) and list(config["std"]) == [0.3] * 5


VITS = ("vit_tiny_patch16", "vit_small_patch16", "vit_base_patch16", "vit_large_patch16", "vit_huge_patch14")
PUBLISHED = {name: (f"{name}_224", {}) for name in VITS} | {
    "swin_base_patch4_window7": ("swin_base_patch4_window7_224", {}),
    "swin_large_patch4_window14": ("swin_large_patch4_window7_224", {"window_size": 14}),
    "relative_vit_base_patch16": ("beit_base_patch16_224", {}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_timm_s_names(name):
    with torch.device("meta"):
        model = classifiers.MODELS[name](num_classes=7)
        architecture, options = timm_models.timm_arguments(model)
        theirs = timm.create_model(architecture, **options) if TIMM_IS_NEW or name in VITS else None
    expected, changed = PUBLISHED[name]
    assert (architecture, options) == (expected, changed | {"global_pool": "avg", "num_classes": 7})
    if theirs is not None:
        shapes = [sorted(tuple(value.shape) for value in m.state_dict().values()) for m in (model, theirs)]
        assert shapes[0] == shapes[1]
    if name in VITS:
        assert theirs.state_dict().keys() == model.state_dict().keys()
        assert theirs.blocks[0].attn.num_heads == model.blocks[0].attn.num_heads
        assert {m.eps for m in theirs.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}


# ------------------------------------------------------------------------------------------------------ what is refused


def test_windows_that_timm_cuts_otherwise(tmp_path, capsys):
    path = pretrained(tmp_path, SIMMIM_SWIN[0], img_size=(32, 64))
    error = refused(capsys, path, "--out", tmp_path / "encoder")
    assert "timm's features differ from ours by up to" in error and "(timm shifts the windows of a stage" in error
    assert not (tmp_path / "encoder").exists()


def test_weights_whose_facts_are_unknown(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0], 5)
    content = torch.load(path, weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    error = refused(capsys, tmp_path / "bare.pth", "--out", tmp_path / "e")
    assert "does not hold the pixel mean and deviation of its 5 channels" in error
    swin = torch.load(pretrained(tmp_path / "s", SWIN[0]), weights_only=True)
    torch.save({"model": swin["model"]}, tmp_path / "swin.pth")
    error = refused(capsys, tmp_path / "swin.pth", "--out", tmp_path / "e")
    assert "a Swin Transformer without the settings of a run: its image size and the order" in error
    assert not (tmp_path / "e").exists()


def test_an_existing_folder(tmp_path, capsys):
    path, out = pretrained(tmp_path, VIT[0]), tmp_path / "encoder"
    run(capsys, path, out)
    assert "exists; give another name, or --overwrite" in refused(capsys, path, "--out", out)
    (out / "notes.txt").write_text("mine")
    (out / "deep").mkdir()
    before = (out / "model.safetensors").read_bytes()
    torch.manual_seed(5)
    other = pretrained(tmp_path / "other", VIT[0], img_size=64)
    run(capsys, other, out, "--overwrite")
    assert (out / "model.safetensors").read_bytes() != before and (out / "notes.txt").read_text() == "mine"
    assert set(os.listdir(out)) == FILES | {"notes.txt", "deep"} and load(out).patch_embed.img_size == (64, 64)
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


@pytest.mark.parametrize("changed", ["README.md", "config.json", "model.safetensors"])
def test_files_of_the_user_are_never_replaced(tmp_path, capsys, changed):
    path, out = pretrained(tmp_path, VIT[0]), tmp_path / "encoder"
    run(capsys, path, out)
    with open(out / changed, "ab") as file:
        file.write(b" ")
    before = {name: (out / name).read_bytes() for name in FILES}
    error = refused(capsys, path, "--out", out, "--overwrite")
    assert f"{changed} there was not written by this script, or was changed since" in error
    assert {name: (out / name).read_bytes() for name in FILES} == before
    (out / "export.json").unlink()
    error = refused(capsys, path, "--out", out, "--overwrite")
    assert "config.json, model.safetensors, README.md there was not written by this script" in error


def damage_values(model):
    model.norm.bias.data += 1e-3


def damage_keys(model):
    raise RuntimeError("Missing key(s) in state_dict: cls_token")  # as a strict load does


@pytest.mark.parametrize(
    ("damage", "message"), [(damage_values, "differ from ours by up to 1.0e-03"), (damage_keys, "does not load the")]
)
@pytest.mark.parametrize("name", ["encoder", "encoder.safetensors"])
def test_what_timm_reads_otherwise_is_not_put_in_place(tmp_path, capsys, monkeypatch, name, damage, message):
    path, out, create_model = pretrained(tmp_path, VIT[0]), tmp_path / name, timm.create_model
    run(capsys, path, out)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}

    def damaged(name, **options):
        model = create_model(name, **options)
        if name.startswith("local-dir:") or "checkpoint_path" in options:
            damage(model)
        return model

    monkeypatch.replace_in(export, "timm.create_model", damaged)
    assert message in refused(capsys, path, "--out", out, "--overwrite")
    assert message in refused(capsys, path, "--out", tmp_path / f"new_{name}")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_names_that_are_no_folders(tmp_path, capsys):
    path = pretrained(tmp_path, VIT[0])
    (tmp_path / "file").write_text("mine")
    assert "is a file; without a suffix" in refused(capsys, path, "--out", tmp_path / "file", "--overwrite")
    assert "or have no suffix for a folder" in refused(capsys, path, "--out", tmp_path / "prmim.v2")
    run(capsys, path, tmp_path / "a" / "b")
    assert set(os.listdir(tmp_path / "a" / "b")) == FILES
    assert "--format mae writes a .pth" in refused(capsys, path, "--out", tmp_path / "e", "--format", "mae")


# ------------------------------------------------------------------------------------------------------------- the card


def test_card_and_record(tmp_path, capsys):
    path, _ = finetuned(tmp_path, VIT[1], global_pool="avg")
    run(capsys, path, tmp_path / "classifier")
    card = (tmp_path / "classifier" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\npipeline_tag: image-classification\n") and "license:" in card
    assert 'timm.create_model("local-dir:classifier", pretrained=True).eval()' in card and str(tmp_path) not in card
    assert "`vit_tiny_patch16_224` with `img_size=32, patch_size=4, embed_dim=96, depth=4` |" in card
    assert "# classifier\n" in card and "| output | logits of 5 classes |" in card
    assert "| images | 3 channels, 32 x 32 pixels, patches of 4 x 4 |" in card
    assert huggingface_hub.ModelCard(card).data.to_dict()["library_name"] == "timm"
    record = json.loads((tmp_path / "classifier" / "export.json").read_text())
    assert record["source"] == "checkpoint-best.pth" and record["code"] == export.code_version()
    torch.save({"model": torch.load(path, weights_only=True)["model"]}, tmp_path / "mae.pth")  # as MAE's scripts do
    run(capsys, tmp_path / "mae.pth", tmp_path / "mae")
    assert "pipeline_tag: image-classification\n" in (tmp_path / "mae" / "README.md").read_text()


# -------------------------------------------------------------------------------------------------------------- the Hub


class FakeHub:
    """Stands for huggingface_hub.HfApi. Keeps what is uploaded."""

    used = public = False
    login: Exception | None = None
    upload: Exception | None = None

    def __init__(self):
        self.calls = []
        FakeHub.last = self

    def whoami(self):
        if self.login is not None:
            raise self.login
        return {"name": "me"}

    def file_exists(self, repo_id, filename):
        return self.used

    def create_repo(self, repo_id, private, exist_ok):
        self.calls.append(("create", repo_id, private))

    def model_info(self, repo_id):
        return type("Info", (), {"private": not self.public})

    def upload_folder(self, repo_id, folder_path, allow_patterns, commit_message):
        if self.upload is not None:
            raise self.upload
        names = sorted(set(os.listdir(folder_path)) & set(allow_patterns))
        self.calls.append(("upload", repo_id, {n: open(os.path.join(folder_path, n), "rb").read() for n in names}))


@pytest.fixture
def hub(monkeypatch):
    library = StandIn(huggingface_hub, HfApi=FakeHub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)  # which is imported where it is used
    for name in ("used", "public", "login", "upload"):
        monkeypatch.setattr(FakeHub, name, getattr(FakeHub, name))
    FakeHub.last = None
    return FakeHub


def test_nothing_is_uploaded_without_the_flag(tmp_path, capsys, hub):
    run(capsys, pretrained(tmp_path, VIT[0]), tmp_path / "encoder")
    assert hub.last is None


@pytest.mark.parametrize(("name", "flags"), [("vit", ()), ("lab/vit", ("--private",))])
def test_the_folder_is_uploaded_as_it_is(tmp_path, capsys, hub, name, flags):
    out, full = tmp_path / "encoder", {"vit": "me/vit"}.get(name, name)
    path = pretrained(tmp_path, VIT[0])
    run(capsys, path, out)
    (out / "private.txt").write_text("mine")
    lines = run(capsys, path, out, "--overwrite", "--push_to_hub", name, *flags)
    assert lines[-1] == f"uploaded to https://huggingface.co/{full}"
    create, upload = hub.last.calls
    assert create == ("create", full, bool(flags))
    assert upload == ("upload", full, {name: (out / name).read_bytes() for name in FILES})
    card = (out / "README.md").read_text()
    assert f'"hf-hub:{full}", pretrained=True' in card and str(tmp_path) not in card and "# vit\n" in card


@pytest.mark.parametrize(
    ("attribute", "value", "flags", "message"),
    [
        ("login", LocalTokenNotFoundError("no token"), (), "needs a login: run `hf auth login`, or set HF_TOKEN"),
        ("login", ConnectionError("no route to host"), (), "the Hub cannot be used: no route to host"),
        ("used", True, (), "holds a model; give another name, or --overwrite to add a commit"),
    ],
)
def test_no_upload_and_nothing_is_written(tmp_path, capsys, hub, monkeypatch, attribute, value, flags, message):
    path = pretrained(tmp_path, VIT[0])
    monkeypatch.setattr(hub, attribute, value)
    assert message in refused(capsys, path, "--out", tmp_path / "e", "--push_to_hub", "me/vit", *flags)
    assert hub.last.calls == [] and not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("upload", ConnectionError("broken pipe"), "broken pipe; upload it later with `hf upload me/vit"),
        ("public", True, "it exists and is public, but --private was given"),
    ],
)
def test_a_failed_upload_keeps_the_folder(tmp_path, capsys, hub, monkeypatch, attribute, value, message):
    path, out = pretrained(tmp_path, VIT[0]), tmp_path / "encoder"
    monkeypatch.setattr(hub, attribute, value)
    error = refused(capsys, path, "--out", out, "--push_to_hub", "me/vit", "--private")
    assert message in error and "is written, but it was not uploaded to me/vit" in error
    assert set(os.listdir(out)) == FILES and [call[0] for call in hub.last.calls] == ["create"]


def test_flags_of_an_upload(tmp_path, capsys, hub):
    path = pretrained(tmp_path, VIT[0])
    assert "--private belongs to --push_to_hub" in refused(capsys, path, "--out", tmp_path / "e", "--private")
    error = refused(capsys, path, "--out", tmp_path / "e.pth", "--push_to_hub", "me/vit")
    assert "--push_to_hub uploads a folder of --format timm or transformers, got --format timm and --out" in error
    assert "'no such name'" in refused(capsys, path, "--out", tmp_path / "e", "--push_to_hub", "no such name")
    assert hub.last is None and not (tmp_path / "e").exists()
