import argparse
import json
import os

import pytest
import torch

from models_vit import VisionTransformer
from util import checkpoint
from util.checkpoint import load_encoder, newest_checkpoint, prune_checkpoints, read_checkpoint, save_checkpoint

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


def save(folder, step, value=0.0, **meta):
    return save_checkpoint(folder, step, {"model": {"w": torch.full((100,), value)}}, {"step": step, **meta})


def test_round_trip_without_pickled_classes(tmp_path):
    path = save(tmp_path, 7, 3.5, settings={"epochs": 5, "crop": [0.2, 1.0]})
    content = torch.load(path, weights_only=True)
    assert json.loads(content["meta"])["settings"] == {"epochs": 5, "crop": [0.2, 1.0]}
    assert read_checkpoint(path)["meta"]["step"] == 7
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-7.json", "checkpoint-7.pth"]  # nothing temporary is left


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path):
    path.write_bytes(b"")


def damage_record(path):
    path.with_suffix(".json").unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_record])
def test_the_newest_intact_one_is_found_and_the_reason_told(tmp_path, damage):
    good, newest = save(tmp_path, 90), save(tmp_path, 100)
    assert newest_checkpoint(tmp_path) == (newest, [])  # 100 after 90: by number, not by name
    damage(newest)
    path, skipped = newest_checkpoint(tmp_path)
    assert path == good and len(skipped) == 1 and skipped[0].startswith("checkpoint-100.pth: ")
    damage(good)
    assert newest_checkpoint(tmp_path)[0] is None and len(newest_checkpoint(tmp_path)[1]) == 2


@pytest.mark.parametrize("fails_in", ["torch.save", "os.replace", "os.fsync"])
def test_a_failed_write_costs_nothing(tmp_path, monkeypatch, fails_in):
    before = save(tmp_path, 1, 1.0)

    def full(*args, **kwargs):
        if fails_in == "torch.save":
            args[1].write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch if fails_in == "torch.save" else os, fails_in.split(".")[1], full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, 2.0)
    monkeypatch.undo()
    assert newest_checkpoint(tmp_path)[0] == before
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_pruning_keeps_the_last_two_and_the_marked(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, epoch=step)
        prune_checkpoints(tmp_path, keep=lambda meta: meta["epoch"] % 3 == 0)
    assert sorted(p.stem for p in tmp_path.glob("*.pth")) == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    assert len(list(tmp_path.glob("*.json"))) == 3


class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Payload()}, "evil.pth")
    with pytest.raises(ValueError, match="evil.pth' cannot be read as a checkpoint of tensors"):
        read_checkpoint("evil.pth")
    assert not os.path.exists("pwned")


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere.pth"):
        read_checkpoint(tmp_path / "nowhere.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match="text.pth' cannot be read"):
        read_checkpoint(tmp_path / "text.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="list.pth' holds a list"):
        read_checkpoint(tmp_path / "list.pth")
    path = save(tmp_path, 1)
    damage_flip(path)
    with pytest.raises(ValueError, match="damaged: its SHA-256"):
        read_checkpoint(path)


# -------------------------------------------------------------------------------------------------- load_encoder


def encoder_weights(**sizes):
    torch.manual_seed(1)
    return VisionTransformer(global_pool="token", **{**SIZES, **sizes}).state_dict()


@pytest.mark.parametrize("layout", ["model", "state_dict", "bare"])
def test_load_encoder_accepts_the_usual_layouts(tmp_path, layout):
    """MAE's releases hold `model` beside a pickled argparse.Namespace; timm's files are bare."""
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


def test_load_encoder_refuses_what_does_not_fit(tmp_path):
    torch.save(encoder_weights(embed_dim=96), tmp_path / "wide.pth")
    with pytest.raises(ValueError, match=r"pos_embed \[1, 17, 96\] cannot be resized"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "wide.pth")
    torch.save(encoder_weights(depth=1), tmp_path / "shallow.pth")
    with pytest.raises(ValueError, match="missing: blocks.1.norm1.weight"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "shallow.pth")
    torch.save(encoder_weights(patch_size=4, img_size=16), tmp_path / "patch4.pth")
    with pytest.raises(ValueError, match=r"patch_embed.proj.weight is \[48, 3, 4, 4\], the model's \[48, 3, 8, 8\]"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "patch4.pth")


def test_load_strict_reports_every_kind_at_once():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"1 missing: bias; 1 unexpected: scale; 1 of another shape: weight is \[4, 2\]"):
        checkpoint.load_strict(model, {"weight": torch.zeros(4, 2), "scale": torch.zeros(1)}, "weights")
