"""Runs of the segmentation program: results, resume, several processes, other files, bad input, the demonstration."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from downstream.segmentation import demo, main_segmentation
from downstream.segmentation.models import UPerNet
from downstream.segmentation.trained import infer_settings
from models_vit import MICRO, VisionTransformer
from tests.downstream.segmentation.test_data import write_pairs
from tests.downstream.segmentation.test_models import randomise
from tests.runs import assert_same_state
from tests.warm import run_by_torchrun
from util.run.checkpoint import newest_checkpoint, read_checkpoint
from util.run.evaluation import RESULTS, Evaluator
from util.run.flags import MACHINE_FLAGS
from util.run.folder import read_json
from util.run.resume import find_changes

PROGRAM = "downstream/segmentation/main_segmentation.py"
SMALL = "--model vit_micro_patch4 --input_size 16 --image_scale 64 24 --stride 10 --num_classes 3 "
SMALL += "--total_batch_size 4 --warmup_iters 2 --num_workers 0 --print_freq 1 --device cpu --save_steps 0"


@pytest.fixture(scope="session")
def striped(tmp_path_factory):
    """Nine training pairs, five to evaluate on, of several sizes."""
    root = write_pairs(tmp_path_factory.mktemp("striped"), 9)
    write_pairs(root, 5, "validation", size=(31, 37))
    write_pairs(root, 1, "validation/wide", size=(70, 20))
    return root


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("encoder") / "vit.pth"
    torch.save({"model": VisionTransformer(global_pool="token", **MICRO).state_dict()}, path)
    return path


def command(data_path, output_dir, *flags):
    width = [] if "linear" in flags else ["--decoder_channels", 8]
    words = [*SMALL.split(), *width, "--num_iters", "6", "--eval_every", "4", *flags]
    return [str(word) for word in (*words, "--data_path", data_path, "--output_dir", output_dir)]


def run(data_path, output_dir, *flags):
    main_segmentation.main(command(data_path, output_dir, *flags))
    return read_checkpoint(newest_checkpoint(output_dir)[0])


def reports(output_dir):
    return [json.loads(line) for line in (Path(output_dir) / "log.jsonl").read_text().splitlines()]


def evaluate(data_path, path, *flags):
    words = ["--eval", "--resume", path, "--data_path", data_path, "--device", "cpu", "--num_workers", "0", *flags]
    return main_segmentation.main([str(word) for word in words])


def test_a_run_is_evaluated_between_and_at_its_end(striped, encoder, tmp_path, capsys):
    content = run(striped, tmp_path, "--finetune", encoder)
    out = capsys.readouterr().out
    assert "; 12 missing (" in out and "relative_position_bias_table" in out
    evaluated = [r for r in reports(tmp_path) if "val_miou" in r]
    assert [(r["step"], r["val_num_images"]) for r in evaluated] == [(4, 6), (6, 6)]
    results = read_json(tmp_path / RESULTS)
    assert results["last"] == evaluated[1] and results["encoder"]["path"] == str(encoder)
    iou = [value for value in results["details"]["iou"].values() if value is not None]
    assert results["last"]["val_miou"] == pytest.approx(np.mean(iou))
    assert f"iteration 6: mIoU {results['last']['val_miou']:.2f} %" in out and (tmp_path / "predictions.png").exists()
    assert f"pictures     {tmp_path / 'predictions.png'}" in out
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert [(event.step, event.height) for event in events.Images("predictions")] == [(4, 812), (6, 812)]
    losses = [r for r in reports(tmp_path) if "loss_aux" in r]
    assert [r["loss"] for r in losses] == pytest.approx([r["loss_decode"] + r["loss_aux"] for r in losses])
    assert content["meta"]["epoch"] == content["meta"]["settings"]["epochs"] == 3
    # The checkpoint alone gives the same scores, and takes no other flag.
    scores = evaluate(striped, tmp_path)
    assert (scores["miou"], scores["macc"]) == (results["last"]["val_miou"], results["last"]["val_macc"])
    assert scores["iou"] == results["details"]["iou"]
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("checkpoint*"))]
    run(striped, tmp_path, "--finetune", encoder)  # a finished run only says what it has done
    assert "iteration 6: mIoU" in capsys.readouterr().out and len(reports(tmp_path)) == len(losses) + 2
    assert before == [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("checkpoint*"))]


@pytest.mark.parametrize("head", ["upernet", "linear"])
@pytest.mark.parametrize("stops", [[1, 5], [4]])
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(striped, encoder, tmp_path, head, stops):
    """With drop path, dropout and BatchNorm; stopped inside an epoch and at an evaluation; with other workers."""
    flags = ["--finetune", encoder, "--head", head]
    flags += ["--drop_path", "0.3"] if head == "upernet" else []
    expected = run(striped, tmp_path / "whole", *flags)
    for stop in stops:
        run(striped, tmp_path / "parts", *flags, "--max_steps", stop, "--num_workers", 1)
    assert_same_state(run(striped, tmp_path / "parts", *flags), expected)
    keys = ("step", "loss", "loss_aux", "grad_norm", "lr", "val_miou", "val_aacc")
    whole, parts = ([{k: r.get(k) for k in keys} for r in reports(tmp_path / name)] for name in ("whole", "parts"))
    assert parts == whole


def test_a_run_killed_in_its_evaluation_makes_up_for_it(striped, tmp_path, monkeypatch):
    expected = run(striped, tmp_path / "whole")
    original = Evaluator.perform

    def killed(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "perform", killed)
    with pytest.raises(KeyboardInterrupt):
        run(striped, tmp_path / "parts")
    assert newest_checkpoint(tmp_path / "parts")[0].name == "checkpoint-4.pth"
    monkeypatch.setattr(Evaluator, "perform", original)
    assert_same_state(run(striped, tmp_path / "parts"), expected)
    scores = [
        [(r["step"], r["val_miou"]) for r in reports(tmp_path / n) if "val_miou" in r] for n in ("whole", "parts")
    ]
    assert scores[0] == scores[1]
    (tmp_path / "parts" / "results.json").unlink()
    run(striped, tmp_path / "parts")
    assert read_json(tmp_path / "parts" / RESULTS)["details"] == read_json(tmp_path / "whole" / RESULTS)["details"]


def test_evaluation_takes_the_names_of_the_run(striped, tmp_path, capsys):
    """The file of names may be gone. With --output_dir the scores of each class are written."""
    names = tmp_path / "names.txt"
    names.write_text("sky\n1 2 3 tree\nsea\n")
    run(striped, tmp_path / "run", "--class_names", names, "--num_iters", 2, "--num_pictures", 0)
    assert "  pictures  " not in capsys.readouterr().out and not (tmp_path / "run" / "predictions.png").exists()
    meta = read_checkpoint(newest_checkpoint(tmp_path / "run")[0])["meta"]
    assert meta["class_names"] == ["sky", "tree", "sea"] and meta["class_colors"][1] == [1, 2, 3]
    names.unlink()
    scores = evaluate(striped, tmp_path / "run", "--output_dir", tmp_path / "scores")
    expected = read_json(tmp_path / "run" / RESULTS)
    found = read_json(tmp_path / "scores" / RESULTS)
    assert set(scores["iou"]) == {"sky", "tree", "sea"} and found["details"] == expected["details"]
    assert found["last"] == {k: v for k, v in expected["last"].items() if k != "epoch"}
    names.write_text("a\nb\nc\n")
    assert set(evaluate(striped, tmp_path / "run", "--class_names", names)["acc"]) == {"a", "b", "c"}
    words = "--eval", "--resume", tmp_path / "run", "--data_path", striped, "--output_dir", tmp_path / "run"
    assert "holds a run, whose results --eval would replace" in fails(capsys, *words)
    assert "cannot be written to" in fails(capsys, *words[:-1], names)  # a file
    assert read_json(tmp_path / "run" / RESULTS) == expected


def test_batch_norm_keeps_its_batch_on_resume(striped, tmp_path, capsys):
    run(striped, tmp_path, "--max_steps", 1)
    words = command(striped, tmp_path, "--batch_size", 2)
    assert "--accum_iter was 1 and now is 2" in fails(capsys, *words)
    assert run(striped, tmp_path, "--batch_size", 2, "--allow_changes")["meta"]["step"] == 6
    # Two processes of half the micro-batch see the same images at once.
    one, two = ({"settings": {"batch_size": size, "accum_iter": 1}} for size in (4, 2))
    assert not find_changes(one, two, MACHINE_FLAGS, main_segmentation.FIXED_FLAGS)


def test_other_data_is_named_once_on_resume(striped, tmp_path, capsys):
    """The number of epochs follows from the data and the iterations, so it is no change of its own."""
    run(striped, tmp_path / "out", "--max_steps", 1)
    write_pairs(tmp_path / "data", 13)
    write_pairs(tmp_path / "data", 5, "validation")
    message = fails(capsys, *command(tmp_path / "data", tmp_path / "out"))
    assert "the data had 9 images" in message and "epochs" not in message


@pytest.mark.parametrize("split", ["training", "validation"])
def test_a_split_without_labelled_pixels_is_refused(tmp_path, capsys, split):
    for name in ("training", "validation"):
        write_pairs(tmp_path / "data", 5, name, values=(255,) if name == split else (0, 1))
    message = fails(capsys, *command(tmp_path / "data", tmp_path / "out"))
    name = "train" if split == "training" else "val"
    assert f"no labelled pixel in the {name} split: check its label files, --ignore_index and" in message
    assert not list(tmp_path.rglob("checkpoint*"))


def test_some_training_images_may_be_unreadable(tmp_path, capsys):
    for name in ("training", "validation"):
        write_pairs(tmp_path / "data", 5, name)
    (tmp_path / "data/images/training/1.jpg").write_bytes(b"no image")
    words = command(tmp_path / "data", tmp_path / "out", "--num_iters", 2)
    assert "1 of 5 checked pairs are bad" in fails(capsys, *words)
    main_segmentation.main([*words, "--max_bad_fraction", "0.3"])
    assert reports(tmp_path / "out")[-1]["val_num_images"] == 5
    (tmp_path / "data/images/validation/1.jpg").write_bytes(b"no image")
    words = command(tmp_path / "data", tmp_path / "other", "--max_bad_fraction", "0.3")
    assert "1 of 5 checked pairs are bad" in fails(capsys, *words)


def test_two_processes_train_and_count_as_one(striped, encoder, tmp_path):
    """The linear head has BatchNorm and no dropout. Six validation images; the loss counts labelled pixels."""
    flags = ["--finetune", encoder, "--head", "linear"]
    code, out = run_by_torchrun(PROGRAM, *command(striped, tmp_path / "two", *flags))
    assert code == 0, out[-3000:]
    run(striped, tmp_path / "one", *flags)
    ours, theirs = reports(tmp_path / "two"), reports(tmp_path / "one")
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a["step"], a.get("val_num_images")) == (b["step"], b.get("val_num_images"))
        for name in ("loss", "grad_norm", "val_miou", "val_aacc"):
            assert a.get(name) == (pytest.approx(b[name], rel=1e-4) if name in b else None), name
    state = [read_checkpoint(newest_checkpoint(tmp_path / name)[0])["model"] for name in ("one", "two")]
    for name, value in state[0].items():
        torch.testing.assert_close(state[1][name], value, rtol=1e-4, atol=1e-5)


def test_an_evaluation_in_two_processes_sees_each_image_once(striped, tmp_path):
    run(striped, tmp_path / "run")
    pictures = tmp_path / "pictures"
    flags = ["--eval", "--resume", tmp_path / "run", "--data_path", striped, "--device", "cpu", "--num_workers", "0"]
    code, out = run_by_torchrun(PROGRAM, *flags, "--output_dir", pictures)
    scores = evaluate(striped, tmp_path / "run")
    assert code == 0 and f"mIoU {scores['miou']:.2f} %, mAcc {scores['macc']:.2f} %" in out and "on 6 images" in out, (
        out
    )
    assert (pictures / "predictions.png").exists()


def test_four_images_are_learned_by_heart(tmp_path):
    """Left and right halves of noise of two textures. Pixels of a third value are ignored."""
    root, rng = tmp_path / "data", np.random.default_rng(0)
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for i in range(4):
            labels = np.zeros((16, 16), np.uint8)
            labels[:, 3 + 3 * i :] = 1
            img = np.where(labels[..., None] == 1, 150, 60) + rng.integers(-40, 40, (16, 16, 3))
            labels[:2] = 255
            Image.fromarray(img.astype(np.uint8)).save(root / "images" / split / f"{i}.png")
            Image.fromarray(labels).save(root / "annotations" / split / f"{i}.png")
    flags = ["--num_classes", 2, "--image_scale", 16, 16, "--ratio_range", 1, 1, "--lr", "5e-3", "--layer_decay", 1]
    flags += ["--num_iters", 60, "--eval_every", 60, "--no-photometric", "--print_freq", 10]
    run(root, tmp_path / "out", *flags)
    assert reports(tmp_path / "out")[-1]["val_miou"] > 90


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_from_an_rgb_encoder(tmp_path, encoder, channels):
    root = tmp_path / "data"
    for split in ("training", "validation"):
        write_pairs(root, 4, split)
        for path in (root / "images" / split).glob("*.jpg"):
            array = np.random.default_rng(0).integers(0, 256, (30, 40, channels), dtype=np.uint8)
            np.save(path.with_suffix(".npy"), array)
            path.unlink()
    content = run(root, tmp_path / "out", "--in_chans", channels, "--finetune", encoder, "--num_iters", 2)
    assert content["model"]["backbone.patch_embed.proj.weight"].shape[1] == channels
    assert evaluate(root, tmp_path / "out")["miou"] == read_json(tmp_path / "out" / RESULTS)["last"]["val_miou"]


# --------------------------------------------------------------------------------------------------- published files


def mmsegmentation_keys(name):
    """The published name of one of our keys, from the pieces of the name."""
    parts = name.split(".")
    if parts[:2] == ["backbone", "blocks"]:
        rest = ".".join(parts[3:])
        for ours, theirs in (("norm", "ln"), ("mlp.fc1", "ffn.layers.0.0"), ("mlp.fc2", "ffn.layers.1")):
            if rest.startswith(ours):
                rest = theirs + rest.removeprefix(ours)
        return f"backbone.layers.{parts[2]}.{rest}"
    return name.replace("patch_embed.proj", "patch_embed.projection")


def published_head(num_classes):
    """Classifiers of another number of classes for the model below."""
    return {
        f"{head}.conv_seg.{part}": torch.randn(num_classes, *([8, 1, 1] if part == "weight" else []))
        for head in ("decode_head", "auxiliary_head")
        for part in ("weight", "bias")
    }


def test_a_published_upernet_is_evaluated(striped, tmp_path, capsys):
    """Under mmsegmentation's names, with a bias of keys. Its scores are those of the same model in our names."""
    model = randomise(UPerNet(3, 8, **{**MICRO, "img_size": 16}))
    model.decode_head.conv_seg.bias.data.zero_()
    weights = {mmsegmentation_keys(name): value for name, value in model.state_dict().items()}
    for i in range(4):
        q, v = (weights.pop(f"backbone.layers.{i}.attn.{part}_bias") for part in "qv")
        weights[f"backbone.layers.{i}.attn.qkv.bias"] = torch.cat([q, torch.randn_like(q), v])
        weights[f"backbone.layers.{i}.attn.relative_position_index"] = torch.zeros(17, 17, dtype=torch.long)
    torch.save(
        {"meta": {"mmseg_version": "0.24", "CLASSES": ("a", "b", "c")}, "state_dict": weights}, tmp_path / "p.pth"
    )
    flags = ["--image_scale", 64, 24, "--stride", 10]
    published = evaluate(striped, tmp_path / "p.pth", *flags)
    settings = infer_settings(model.state_dict(), "w")
    expected = {"head": "upernet", "model": "vit_micro_patch4", "input_size": 16, "patch_size": 4}
    assert settings == expected | {"in_chans": 3, "decoder_channels": 8, "num_classes": 3}
    loop = {"settings": settings | {"image_scale": [64, 24], "stride": 10}}
    torch.save({"model": model.state_dict(), "meta": json.dumps(loop)}, tmp_path / "ours.pth")
    ours = evaluate(striped, tmp_path / "ours.pth")
    assert ours == published and sum(value > 0 for value in ours["acc"].values()) > 1
    torch.save({"state_dict": weights | published_head(150)}, tmp_path / "ade.pth")
    ade = ["--eval", "--resume", tmp_path / "ade.pth", "--data_path", striped, *flags]
    assert "begin at 1: give --recipe ade20k_upernet_vit_base or --reduce_zero_label" in fails(capsys, *ade)
    assert evaluate(striped, tmp_path / "ade.pth", *flags, "--no-reduce_zero_label")["num_images"] == 6
    del weights["decode_head.fpn_convs.1.bn.running_var"]
    torch.save({"state_dict": weights}, tmp_path / "p.pth")
    message = fails(capsys, "--eval", "--resume", tmp_path / "p.pth", "--data_path", striped, *flags)
    assert "do not fit this UPerNet: 1 missing: decode_head.fpn_convs.1.bn.running_var" in message


# --------------------------------------------------------------------------------------------------------- bad input


def fails(capsys, *arguments):
    """The error message of a command that must stop before its first step."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main_segmentation.main([str(a) for a in arguments])
    message = capsys.readouterr().err
    assert stop.value.code in (2, 3, 4) and message.startswith("main_segmentation.py: error: ") and len(message) < 1500
    return message


@pytest.mark.fault("F48", "a run that ends after fewer than 20 steps that are not finite", "exit code 3, no result")
def test_a_short_run_that_diverges_is_no_result(striped, tmp_path, capsys):
    command_line = command(striped, tmp_path, "--num_iters", 8, "--eval_every", 4, "--lr", 1e10)
    message = fails(capsys, *command_line)
    assert "not finite" in message and "checkpoint" in message


@pytest.mark.fault(
    "U81", "flags of segmentation that cannot work", "exit code 2, with the value and what would be right"
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_classes 2", "it holds the values 2; 0 to 1 are classes, 255 is ignored"),
        ("--num_classes 255 --reduce_zero_label", "takes the values 1 to 255"),
        ("--head linear", "--head linear has no use for --decoder_channels: the encoder is frozen"),
        (
            "--recipe ade20k_upernet_vit_base --head linear",
            "does not go with --head linear, which has recipes of its own",
        ),
        ("--stride 17", "--stride 17 must be at most --input_size 16"),
        ("--input_size 18", "img_size 18 x 18 is not divisible by patch_size 4; the nearest size that is: 16 x 16"),
        ("--patch_size 0", "--patch_size must be at least 1, got 0"),
        ("--warmup_iters 7", "--warmup_iters 7 must lie between 0 and --num_iters 6"),
        ("--layer_decay 0", "--layer_decay must lie in (0, 1], got 0.0"),
        ("--ratio_range 2 1", "--ratio_range must be two factors 0 < low <= high, got [2.0, 1.0]"),
        ("--cat_max_ratio 0", "--cat_max_ratio must lie in (0, 1], got 0.0"),
        ("--image_scale 24 64", "--image_scale must be two sides, the longer one first, got [24, 64]"),
        ("--in_chans 4", "has 3 channels instead of --in_chans 4"),
        ("--mean 0.5", "--mean must have a value for each of 3 channels, got [0.5]"),
        ("--std 1 1 0", "--std must lie in (0, 1], got [1.0, 1.0, 0.0]: divide by 255"),
        ("--mean 123.7 116.3 103.5", "--mean must lie in [0, 1], got [123.7, 116.3, 103.5]: divide by 255"),
        ("--std 58.4 57.1 57.4", "--std must lie in (0, 1], got [58.4, 57.1, 57.4]: divide by 255"),
        (
            "--head linear --layer_decay 1",
            "--head linear has no use for --decoder_channels, --layer_decay",
        ),
        ("--head linear --drop_path 0.1", "--head linear has no use for --decoder_channels, --drop_path"),
        ("--input_size 4 --stride 4", "at least 2 x 2 patches, got 1 x 1: raise --input_size"),
        ("--total_batch_size 1", "UPerNet's BatchNorm needs more than one image per micro-batch"),
        ("--total_batch_size 10", "the data set has 9 images, fewer than one total batch of 10"),
        ("--compile", "--compile is not for segmentation: leave it out"),
        ("--class_names none.txt", "--class_names 'none.txt' does not exist"),
        ("--data_path nowhere", "has no folder of the split 'train'"),
        ("--finetune nowhere.pth", "'nowhere.pth' does not exist"),
        ("--resume none --eval", "--eval needs --resume"),
        ("--drop_path 2", "--drop_path must be at most 1, got 2.0"),
    ],
)
def test_bad_flags_are_refused_before_training(striped, tmp_path, capsys, flags, message):
    words = command(striped, tmp_path / "out")
    assert message in re.sub(r"\s+", " ", fails(capsys, *words, *flags.split()))
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_frozen_encoder_must_be_pre_trained(striped, tmp_path, capsys):
    assert "--head linear needs --finetune" in fails(capsys, *command(striped, tmp_path, "--head", "linear"))


def test_other_runs_and_files_are_refused(striped, encoder, tmp_path, capsys):
    run(striped, tmp_path / "out", "--finetune", encoder, "--num_iters", 2)
    words = command(striped, tmp_path / "out", "--num_iters", 2)
    assert "--lr was 0.0001 and now is 0.001" in fails(capsys, *words, "--lr", "1e-3")
    message = fails(capsys, "--eval", "--resume", tmp_path / "out", "--data_path", striped, "--num_classes", 5)
    assert "--num_classes 5, but the model at" in message and "has 3: leave it out" in message
    message = fails(capsys, "--eval", "--resume", encoder, "--data_path", striped)
    assert "holds no segmentation model of this program" in message


# ------------------------------------------------------------------------------------------------------ demonstration


def test_the_demonstration_writes_what_it_says(tmp_path, capsys):
    pytest.importorskip("skimage")
    demo.main([str(tmp_path), "--num_iters", "20"])
    out = capsys.readouterr().out
    assert re.search(r"baseline +most frequent class: mIoU \d+\.\d\d %\n", out) and "this run" in out
    photos = demo.read_photos(demo.PHOTOS)
    train, val = (demo.make_mosaic(photos, s, np.random.default_rng(0)) for s in ("training", "validation"))
    assert set(np.unique(train[1])) <= set(range(6)) and 3 <= len(np.unique(train[1])) <= 5
    assert not np.array_equal(train[0], val[0]) and np.array_equal(train[1], val[1])
    for _, row in demo.baselines(tmp_path / "mosaics").items():
        assert 0 < row["miou"] < 40
    most_frequent = demo.baselines(tmp_path / "mosaics")["most frequent class"]["miou"]
    assert read_json(tmp_path / "run" / RESULTS)["last"]["val_miou"] > most_frequent


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_demonstration_beats_its_baselines(tmp_path):
    pytest.importorskip("skimage")
    assert demo.main([str(tmp_path)])
    scores = demo.baselines(tmp_path / "mosaics")
    assert set(scores) == {"most frequent class", "nearest mean colour"}
    assert read_json(tmp_path / "run" / RESULTS)["last"]["val_miou"] > 2 * max(row["miou"] for row in scores.values())
