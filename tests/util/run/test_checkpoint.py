import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models_vit import VisionTransformer
from util.run import checkpoint
from util.run.checkpoint import (
    find_checkpoint_file,
    load_encoder,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
)

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


@pytest.mark.fault(
    "F35", "the newest checkpoint cut off, flipped in one bit, empty, without record", "the one before, with the reason"
)
@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_record])
def test_the_newest_intact_one_is_found_and_the_reason_told(tmp_path, damage):
    good, newest = save(tmp_path, 90), save(tmp_path, 100)
    assert newest_checkpoint(tmp_path) == (newest, [])  # 100 after 90: by number, not by name
    damage(newest)
    path, skipped = newest_checkpoint(tmp_path)
    assert path == good and len(skipped) == 1 and skipped[0].startswith("checkpoint-100.pth: ")
    damage(good)
    assert newest_checkpoint(tmp_path)[0] is None and len(newest_checkpoint(tmp_path)[1]) == 2


NO_SPACE, BAD_POSITION = OSError(28, "No space left on device"), RuntimeError("unexpected pos 576 vs 534")


@pytest.mark.parametrize(
    ("fails_in", "error"),
    [("torch.save", NO_SPACE), ("torch.save", BAD_POSITION), ("os.replace", NO_SPACE), ("os.fsync", NO_SPACE), ("json", NO_SPACE)],
)
def test_a_failed_write_costs_nothing(tmp_path, monkeypatch, fails_in, error):
    """torch's zip writer reports a full disk as one or the other; the caller sees OSError."""
    before = save(tmp_path, 1, 1.0)

    def full(*args, **kwargs):
        if fails_in == "torch.save":
            args[1].write(b"half a checkpoint")
        raise error

    module = {"torch": torch, "os": os}.get(fails_in.split(".")[0])
    if module:
        monkeypatch.setattr(module, fails_in.split(".")[1], full)
    else:  # the record's write, after the weights stand
        write = checkpoint._write_atomically
        monkeypatch.setattr(checkpoint, "_write_atomically", lambda p, w: full() if p.suffix == ".json" else write(p, w))
    with pytest.raises(OSError, match="No space left|unexpected pos"):
        save(tmp_path, 2, 2.0)
    monkeypatch.undo()
    assert newest_checkpoint(tmp_path) == (before, [])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1.json", "checkpoint-1.pth"]


def test_a_really_full_disk(tmp_path):
    """The kernel refuses to let a child's files grow beyond 300 kB: for some sizes torch then raises RuntimeError."""
    save(tmp_path, 1)
    code = """if True:
        import resource, signal, sys, torch
        from util.run.checkpoint import save_checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        for size in (75_000, 80_000, 200_000, 1_000_000):
            try:
                save_checkpoint(sys.argv[1], size, {"w": torch.zeros(size)}, {})
            except OSError:
                print("refused")
    """
    root = Path(__file__).resolve().parents[3]
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=root, timeout=120)
    assert out.stdout.split() == ["refused"] * 4, out.stderr
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1.json", "checkpoint-1.pth"]


def test_pruning_keeps_the_last_two_and_the_marked(tmp_path):
    for name in ("checkpoint-best.pth", "weights.pth"):
        (tmp_path / name).touch()  # the user's own
    for step in range(1, 8):
        save_checkpoint(tmp_path, step, {"model": {}}, {"step": step}, keep=step % 3 == 0)
        prune_checkpoints(tmp_path, [step - 1, step])
    left = ["checkpoint-3", "checkpoint-6", "checkpoint-7", "checkpoint-best", "weights"]
    assert sorted(p.stem for p in tmp_path.glob("*.pth")) == left
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_pruning_never_counts_an_unfinished_one(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, epoch=step)
    (tmp_path / "checkpoint-2.json").unlink()
    (tmp_path / ".checkpoint-2.pth.tmp-1").touch()
    prune_checkpoints(tmp_path, [1, 3])
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".json") == ["checkpoint-1.pth", "checkpoint-3.pth"]


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


@pytest.mark.fault("F41", "files of the releases (MAE's holds a Namespace), timm's", "read; equal tensors")
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


def test_load_encoder_resizes_a_grid_that_is_not_square(tmp_path):
    """4 x 16 and 8 x 8 tokens have tables of the same shape; only the settings tell them apart."""
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
    with pytest.raises(ValueError, match=r"patch_embed.proj.weight is \[48, 3, 4, 4\], the model's \[48, 3, 8, 8\]"):
        load_encoder(VisionTransformer(**SIZES), tmp_path / "patch4.pth")


def test_timm_s_safetensors_files_are_read(tmp_path):
    from safetensors.torch import save_file

    weights = encoder_weights()
    save_file(weights, tmp_path / "w.safetensors")
    model = VisionTransformer(num_classes=5, **SIZES)
    report = load_encoder(model, tmp_path / "w.safetensors")
    assert len(report.missing) == 4 and all(torch.equal(model.state_dict()[k], weights[k]) for k in report.loaded)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="text.safetensors' cannot be read as a checkpoint"):
        read_checkpoint(tmp_path / "text.safetensors")


def test_a_run_s_folder_stands_for_its_newest_checkpoint(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, "best")  # never the newest: it is no step
    newest = save(tmp_path, 2)
    assert find_checkpoint_file(tmp_path) == newest and find_checkpoint_file(str(newest)) == newest
    damage_flip(newest)
    assert find_checkpoint_file(tmp_path).name == "checkpoint-1.pth"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty' holds no intact checkpoint"):
        find_checkpoint_file(tmp_path / "empty")


def test_load_strict_reports_every_kind_at_once():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"1 missing: bias; 1 unexpected: scale; 1 of another shape: weight is \[4, 2\]"):
        checkpoint.load_strict(model, {"weight": torch.zeros(4, 2), "scale": torch.zeros(1)}, "weights")
