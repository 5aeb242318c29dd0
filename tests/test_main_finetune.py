import argparse
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import main_finetune
import main_pretrain
from encoders import classifiers
from models_vit import VisionTransformer
from tests.conftest import write_photo
from tests.runs import PLAIN, assert_same_state, contents, evaluate, finetune, pretrain, refused, reports, state
from tests.warm import run_by_torchrun
from util.data.datasets import AddressedDataset
from util.data.open import open_images
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate import evaluator
from util.run import checkpoint
from util.run.checkpoint import newest_checkpoint, save_checkpoint
from util.run.saving import CheckpointSaver

ROOT = Path(__file__).resolve().parents[1]


def test_a_run_from_a_pretrained_encoder(labelled, pretrained, tmp_path, capsys):
    content = finetune(labelled, tmp_path / "out", "--finetune", pretrained)
    out = capsys.readouterr().out
    assert "4 missing (fc_norm.weight, fc_norm.bias, head.weight, head.bias)" in out and "0 resized" in out
    assert content["meta"]["classes"] == ["cat", "dog"] and content["meta"]["settings"]["nb_classes"] == 2
    evaluations = [r for r in reports(tmp_path / "out") if "val_top1" in r]
    assert [(r["step"], r["epoch"], r["val_num_images"]) for r in evaluations] == [(3, 0, 7), (6, 1, 7)]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["last"] == evaluations[1] and results["details"] == {}
    assert results["best"] == max(evaluations, key=lambda r: r["val_top1"])
    assert f"last         epoch 1: top-1 {results['last']['val_top1']:.2f} %" in out and "  best         epoch " in out
    # Both checkpoints evaluate to what was logged, from the file alone.
    for name, path in (("last", tmp_path / "out"), ("best", tmp_path / "out" / "checkpoint-best.pth")):
        result = evaluate(labelled, path)
        assert result["top1"] == results[name]["val_top1"] and result["loss"] == pytest.approx(
            results[name]["val_loss"], rel=1e-5
        )


def test_the_encoder_is_really_loaded(labelled, pretrained, tmp_path):
    """After a step of learning rate 0 the weights are the pre-trained ones."""
    content = finetune(labelled, tmp_path / "out", "--finetune", pretrained, "--max_steps", 1, "--warmup_epochs", 2)
    encoder = contents(newest_checkpoint(pretrained)[0])["model"]
    shared = [k for k in content["model"] if k in encoder]
    assert len(shared) > 50 and all(torch.equal(content["model"][k], encoder[k]) for k in shared)


@pytest.mark.parametrize(
    ("framework", "model", "unloaded"),
    [("mff", "vit_micro_patch4", "4 missing"), ("simmim", "relative_vit_micro_patch4", "4 missing")],
)
def test_other_frameworks_encoders(labelled, tmp_path, capsys, framework, model, unloaded):
    """From pre-training to an evaluated classifier, with the framework's own schedule and clipping."""
    flags = (
        f"--model {framework}_vit_micro_patch4 --batch_size 8 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"
    )
    main_pretrain.main(
        [*flags.split(), "--mask_ratio", "0.6", "--data_path", str(labelled), "--output_dir", str(tmp_path / "pre")]
    )
    own = ["--lr_schedule", framework, "--warmup_lr", "1e-6", "--clip_grad", "5", "--model", model]
    content = finetune(labelled, tmp_path / "out", "--finetune", tmp_path / "pre", *own)
    assert unloaded in capsys.readouterr().out
    result = evaluate(labelled, tmp_path / "out")
    assert result["top1"] == json.loads((tmp_path / "out/results.json").read_text())["last"]["val_top1"]
    if framework == "simmim":
        assert "blocks.3.attn.relative_position_bias_table" in content["model"]
        message = finetune.refused(
            capsys, labelled, tmp_path / "probe", *own, "--finetune", tmp_path / "pre", "--trainable_blocks", 0
        )
        assert "unknown --global_pool 'token', choose from avg" in message


def test_learning_happens(tmp_path):
    """Dark against bright pictures."""
    for split, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("dark", "bright")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", (32, 32), 20 + 6 * i + 120 * label).save(tmp_path / split / name / f"{i}.png")
    finetune(tmp_path, tmp_path / "out", *PLAIN, *["--epochs", "6", "--smoothing", "0", "--layer_decay", "1"])
    losses = [r["epoch_loss"] for r in reports(tmp_path / "out") if "epoch_loss" in r]
    assert losses[-1] < 0.5 * losses[0] and reports(tmp_path / "out")[-1]["val_top1"] == 100


@pytest.mark.fault("F7", "fine-tuning with mixup and drop path, stopped", "exact")
@pytest.mark.parametrize("stops", [[1, 3], [2, 4]])
@pytest.mark.parametrize("flags", [[], ["--trainable_blocks", "0", "--precision", "bf16"]])
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(
    labelled, pretrained, undisturbed_run, tmp_path, stops, flags
):
    """With RandAugment, erasing, mixup and drop path: stopped in mid-epoch and at its end, with other workers."""
    flags = ["--print_freq", 2, *flags, "--finetune", pretrained]
    folders = undisturbed_run(finetune, labelled, *flags), tmp_path / "parts"
    for stop, workers in zip(stops, (2, 1), strict=True):
        finetune(labelled, tmp_path / "parts", *flags, "--max_steps", stop, "--num_workers", workers)
    assert_same_state(finetune(labelled, tmp_path / "parts", *flags), state(folders[0]))
    keys = ("step", "loss", "epoch_loss", "grad_norm", "lr", "val_top1", "val_loss")
    whole, parts = ([{k: r.get(k) for k in keys} for r in reports(folder)] for folder in folders)
    assert parts == whole
    best = [contents(folder / "checkpoint-best.pth") for folder in folders]
    assert all(torch.equal(best[0]["model"][k], v) for k, v in best[1]["model"].items())


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("where", ["evaluate_images", "save_best", "save_checkpoint", "write_json"])
def test_a_run_killed_around_an_evaluation_makes_up_for_it(labelled, undisturbed_run, tmp_path, monkeypatch, at, where):
    """After the checkpoint of step `at`: while evaluating, or while writing the best weights or results.json.

    save_checkpoint: the thread dies while it writes the best weights, so that they are missing beside the results.
    """
    whole = undisturbed_run(finetune, labelled)
    owners = {"save_best": CheckpointSaver, "save_checkpoint": checkpoint, "write_json": evaluator}
    owner, of_best = owners.get(where, main_finetune), where in ("save_best", "save_checkpoint")
    original, save = getattr(owner, where), CheckpointSaver.save

    def killed(*args, **kwargs):
        now = newest_checkpoint(tmp_path / "parts")[0]
        if now is not None and now.name == f"checkpoint-{at}.pth" and (where != "save_checkpoint" or args[1] == "best"):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    def save_at_once(saver, final=False):
        save(saver, final)
        saver.finish()

    monkeypatch.setattr(owner, where, killed)
    monkeypatch.setattr(CheckpointSaver, "save", save_at_once)
    best_step = json.loads((whole / "results.json").read_text())["best"]["step"]
    writes = not of_best or at == 3 or best_step == 6  # the weights of a step that is not the best are not written
    with pytest.raises(KeyboardInterrupt) if writes else nullcontext():
        finetune(labelled, tmp_path / "parts")
    monkeypatch.undo()
    assert_same_state(finetune(labelled, tmp_path / "parts"), state(whole))
    results = [json.loads((folder / "results.json").read_text()) for folder in (whole, tmp_path / "parts")]
    evaluated = [
        {(which, k): r[which][k] for which in ("last", "best") for k in ("step", "val_top1", "val_loss")}
        for r in results
    ]
    assert evaluated[0] == evaluated[1]
    best = [contents(folder / "checkpoint-best.pth") for folder in (whole, tmp_path / "parts")]
    assert best[0]["meta"]["step"] == best[1]["meta"]["step"] == results[0]["best"]["step"]


def test_a_run_goes_on_with_its_own_encoder_classes_and_program_only(labelled, pretrained, tmp_path, capsys):
    """The same output folder must not report the accuracy of another experiment."""
    finetune(labelled, tmp_path / "out", "--finetune", pretrained, "--max_steps", 1)
    shutil.copytree(labelled, tmp_path / "renamed")
    for split in ("train", "val"):
        (tmp_path / "renamed" / split / "dog").rename(tmp_path / "renamed" / split / "fox")
    pretrain(labelled, tmp_path / "other", "--seed", 1)
    for flags, message in (
        (["--finetune", tmp_path / "other"], "checkpoint-6.pth'; choose another --output_dir"),
        (["--data_path", tmp_path / "renamed"], "the run has 2 classes, the data 2; only one of them has dog, fox"),
        (["--output_dir", tmp_path / "other"], "holds a run of main_pretrain.py; choose another --output_dir"),
    ):
        assert message in finetune.refused(capsys, labelled, tmp_path / "out", *flags)
    finetune(labelled, tmp_path / "out", "--max_steps", 2, "--batch_size", 4, "--total_batch_size", 8)
    out = capsys.readouterr().out
    assert "batch_size was 8 and now is 4" in out
    assert "from scratch" not in out
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["finetune"] == str(pretrained)


def test_evaluations_can_be_rarer(labelled, tmp_path):
    """Every second epoch, and the last."""
    finetune(labelled, tmp_path / "out", "--epochs", 3, "--eval_every", 2)
    assert [r["step"] for r in reports(tmp_path / "out") if "val_top1" in r] == [6, 9]


def test_a_finetuned_classifier_is_a_start_for_another_resolution(labelled, pretrained, tmp_path, capsys):
    """Of the same classes even its head is kept; positions are resized."""
    finetune(labelled, tmp_path / "first", "--finetune", pretrained)
    capsys.readouterr()
    finetune(labelled, tmp_path / "second", "--finetune", tmp_path / "first", "--input_size", 40, "--max_steps", 1)
    assert "1 resized (pos_embed); 0 missing; 0 not used" in capsys.readouterr().out


def test_a_linear_probe_trains_the_head_alone(labelled, pretrained, tmp_path):
    content = finetune(labelled, tmp_path / "out", "--finetune", pretrained, "--trainable_blocks", 0)
    encoder = contents(newest_checkpoint(pretrained)[0])["model"]
    for name, value in content["model"].items():
        assert name.startswith("head.") or torch.equal(value, encoder[name]), name
    assert "norm.weight" in content["model"] and content["model"]["head.0.num_batches_tracked"] == 6
    settings = content["meta"]["settings"]
    assert (settings["optimizer"], settings["global_pool"], settings["mixup"], settings["clip_crop"]) == (
        "lars",
        "token",
        0,
        True,
    )
    assert evaluate(labelled, tmp_path / "out")["top1"] == reports(tmp_path / "out")[-1]["val_top1"]


def test_partial_finetuning_trains_the_last_blocks(labelled, pretrained, tmp_path):
    content = finetune(
        labelled, tmp_path / "out", "--finetune", pretrained, "--trainable_blocks", 2, "--optimizer", "adamw"
    )
    encoder = contents(newest_checkpoint(pretrained)[0])["model"]
    changed = {k for k, v in content["model"].items() if k not in encoder or not torch.equal(v, encoder[k])}
    assert {k.rsplit(".", 1)[0] for k in changed if not k.startswith("blocks.")} == {"fc_norm", "head"}
    assert {k.split(".")[1] for k in changed if k.startswith("blocks.")} == {"2", "3"}


# --------------------------------------------------------------------------------------------- classifiers of others


def an_official_file(path, **options):
    """A classifier of MAE's key names and pooling, beside the pickled Namespace of its releases."""
    torch.manual_seed(3)
    model = VisionTransformer(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=2, **options)
    torch.nn.init.normal_(model.head.weight)
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=0.1), "epoch": 99, "scaler": {}}, path)
    return model.eval()


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_eval_of_foreign_files(labelled, tmp_path, pool):
    """MAE's fine-tuned layout (fc_norm, no norm) and timm's (norm, safetensors): the keys tell the pooling."""
    from safetensors.torch import save_file

    model = an_official_file(tmp_path / "official.pth", global_pool=pool)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    theirs = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=2, global_pool=pool
    ).eval()
    theirs.load_state_dict(model.state_dict())
    view, normalize = ResizeCenterCrop(32), Normalize()
    images = AddressedDataset(open_images("folder", labelled, "val"), view)
    right = sum((theirs(normalize(images[(0, i)][0][None])).argmax() == images[(0, i)][1]).item() for i in range(7))
    for name in ("official.pth", "timm.safetensors"):
        result = evaluate(labelled, tmp_path / name)
        assert result["num_images"] == 7 and result["top1"] == pytest.approx(100 * right / 7)


def test_eval_of_another_kind_of_encoder_without_settings(labelled, tmp_path):
    torch.manual_seed(0)
    model = classifiers.MODELS["relative_vit_micro_patch4"](num_classes=2)
    meta = {"settings": {"model": "relative_vit_micro_patch4", "nb_classes": 2, "input_size": 32, "patch_size": 4}}
    meta["settings"] |= {"global_pool": "avg", "trainable_blocks": None, "crop_pct": 1.0}
    known = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, meta)
    torch.save({"model": model.state_dict()}, tmp_path / "bare.pth")
    assert evaluate(labelled, tmp_path / "bare.pth", "--crop_pct", "1") == evaluate(labelled, known)


def test_a_size_that_nobody_published_is_named(tmp_path, labelled, capsys):
    torch.save(
        VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3).state_dict(),
        tmp_path / "w.pth",
    )
    message = refused(capsys, main_finetune.main, "--eval", "--resume", tmp_path / "w.pth", "--data_path", labelled)
    assert "none is known for width 48 and depth 2; known (width, depth): (64, 3), (96, 4)" in message


def test_an_exported_classifier_keeps_its_classes_and_statistics(labelled, tmp_path, capsys):
    from scripts.export import export

    finetune(labelled, tmp_path / "out", *PLAIN, "--mean", 0.3, 0.3, 0.3, "--max_steps", 3)
    export(tmp_path / "out", tmp_path / "c.safetensors")
    assert evaluate(labelled, tmp_path / "c.safetensors")["loss"] == pytest.approx(
        evaluate(labelled, tmp_path / "out")["loss"]
    )
    shutil.copytree(labelled, tmp_path / "renamed")
    (tmp_path / "renamed" / "val" / "dog").rename(tmp_path / "renamed" / "val" / "fox")
    message = refused(
        capsys,
        main_finetune.main,
        "--eval",
        "--resume",
        tmp_path / "c.safetensors",
        "--data_path",
        tmp_path / "renamed",
    )
    assert "the checkpoint has 2 classes, the data 2; only one of them has dog, fox" in message


@pytest.mark.parametrize(
    ("value", "message"), [(torch.nan, "'.*w.pth'.* are not finite: head.weight"), (3e38, "logits are not finite")]
)
def test_logits_that_are_not_finite_are_no_accuracy(labelled, tmp_path, capsys, value, message):
    an_official_file(tmp_path / "w.pth")
    content = torch.load(tmp_path / "w.pth", weights_only=False)
    content["model"]["head.bias"].fill_(value)
    content["model"]["head.weight"].fill_(value)
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(SystemExit) as stop:
        main_finetune.main(
            ["--eval", "--resume", str(tmp_path / "w.pth"), "--data_path", str(labelled), "--num_workers", "0"]
        )
    assert stop.value.code == 3 and re.search(message, capsys.readouterr().err)


def test_mean_and_std_of_the_checkpoint_are_used(labelled, tmp_path):
    flags = [*PLAIN, "--mean", 0.5, 0.5, 0.5, "--std", 0.25, 0.25, 0.25, "--crop_pct", 1.0]
    finetune(labelled, tmp_path / "out", *flags)
    result, last = evaluate(labelled, tmp_path / "out"), reports(tmp_path / "out")[-1]
    assert result["loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert evaluate(labelled, tmp_path / "out", "--mean", "0", "0", "0")["loss"] != pytest.approx(
        last["val_loss"], rel=1e-3
    )


# ------------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("flags", [[], ["--trainable_blocks", "2"]])
def test_two_processes_train_and_count_as_one(labelled, pretrained, tmp_path, flags):
    """Seven validation images on two processes; training losses of the one-process run."""
    flags = [*flags, "--finetune", pretrained]
    two = finetune.command(labelled, tmp_path / "two", *PLAIN, "--batch_size", 4, "--print_freq", 5, *flags)
    code, out = run_by_torchrun("main_finetune.py", *two)
    assert code == 0, out[-3000:]
    finetune(labelled, tmp_path / "one", *PLAIN, "--print_freq", 5, *flags)
    ours, theirs = reports(tmp_path / "two"), reports(tmp_path / "one")
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "val_loss", "val_top1", "val_num_images"):
            assert a.get(name) == (pytest.approx(b[name], rel=1e-3) if name in b else None), name


def test_a_probe_s_running_statistics_are_the_checkpoint_s_in_every_process(labelled, pretrained, tmp_path):
    """BatchNorm sees other images in each process; the evaluation must use the statistics that are saved."""
    flags = finetune.command(
        labelled, tmp_path / "two", "--batch_size", 4, "--trainable_blocks", 0, "--finetune", pretrained
    )
    code, out = run_by_torchrun("main_finetune.py", *flags)
    assert code == 0, out[-3000:]
    last = reports(tmp_path / "two")[-1]
    assert evaluate(labelled, tmp_path / "two")["loss"] == pytest.approx(last["val_loss"], rel=1e-5)


# --------------------------------------------------------------------------------------------------------- bad input


WEIGHTS_THAT_DO_NOT_FIT = [
    "holds no intact checkpoint",
    "(made as mae_vit_micro_patch4) holds an encoder of width 96, this VisionTransformer has width 192",
    "holds an encoder of patch size 4, this VisionTransformer has 8: give --patch_size 4",
]


@pytest.mark.fault(
    "F32",
    "classes that do not fit the data, or val/ not train/",
    "exit code 2, with the numbers and the first that differs",
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nb_classes 10", "--nb_classes 10, but the data has 2 classes"),
        (
            "--data_path {tmp}/other",
            "the training data has 2 classes, the validation data 2; only one of them has dog, fox",
        ),
        ("--data_path {tmp}/fewer", "fewer/val' have the class 'cat', but a classifier needs two or more"),
        ("--data_path {photos}", "has no folder val/"),
        ("--dataset inat18", "--data_path must hold iNaturalist's train2018.json, but"),
        ("--finetune {tmp}/nowhere.pth", "nowhere.pth' does not exist"),
        ("--finetune {tmp}/other", "holds no intact checkpoint"),
        (
            "--finetune {pretrained} --model vit_tiny_patch16",
            "(made as mae_vit_micro_patch4) holds an encoder of width 96, this VisionTransformer has width 192",
        ),
        (
            "--finetune {pretrained} --patch_size 8",
            "holds an encoder of patch size 4, this VisionTransformer has 8: give --patch_size 4",
        ),
        ("--model vit_giant", "invalid choice: 'vit_giant'"),
        ("--trainable_blocks 5", "trainable_blocks must be at least 0 and below the 4 blocks, got 5"),
        ("--trainable_blocks -1", "--trainable_blocks must be at least 0, got -1"),
        ("--trainable_blocks 0 --global_pool avg", "needs --global_pool 'token'"),
        (
            "--trainable_blocks 0 --recipe finetune_vit_base",
            "linear probing (0) has recipes of its own, linprobe_vit_base",
        ),
        ("--trainable_blocks 2 --recipe linprobe_vit_base", "does not go with --trainable_blocks 2"),
        ("--trainable_blocks 2", "--trainable_blocks 2 needs --finetune: the frozen blocks must be pre-trained"),
        ("--trainable_blocks 0 --batch_size 1", "BatchNorm needs more than one image a micro-batch"),
        ("--std 1 0 1", "--std must be positive, got [1.0, 0.0, 1.0]"),
        ("--eval --resume {tmp}/ten.pth --crop_pct 0", "crop_pct must lie in (0, 1], got 0.0"),
        ("--recipe finetune", "unknown recipe 'finetune'; close to it: finetune_"),
        ("--batch_size 3", "so --batch_size must be even, got 3"),
        ("--aa rnd-m9", "timm does not know the augmentation policy 'rnd-m9'"),
        ("--drop_path 1.5", "--drop_path must be at most 1, got 1.5"),
        ("--layer_decay 0", "--layer_decay must lie in (0, 1], got 0.0"),
        ("--clip_crop", "--clip_crop goes without --aa"),
        ("--crop_pct 2", "crop_pct must lie in (0, 1], got 2.0"),
        ("--input_size 30", "30 x 30 is not divisible by --patch_size 4"),
        ("--eval", "--eval needs --resume"),
        ("--eval --resume {pretrained}", "holds no classifier (no head.weight): fine-tune the encoder first"),
        ("--eval --resume {tmp}/ten.pth", "has 10 classes, the data 2"),
        (
            "--eval --resume {tmp}/ours.pth",
            "the checkpoint has 2 classes, the data 2; only one of them has cat, dog, fox, owl",
        ),
        ("--eval --resume {tmp}/ours.pth --data_path {tmp}/flat", "val' holds no class folders"),
    ],
)
def test_user_errors_are_one_paragraph_before_the_first_step(
    labelled, photos, pretrained, tmp_path, capsys, flags, message
):
    for name in ("other", "fewer"):
        shutil.copytree(labelled, tmp_path / name)
    (tmp_path / "other" / "val" / "dog").rename(tmp_path / "other" / "val" / "fox")
    shutil.rmtree(tmp_path / "fewer" / "val" / "dog")
    (tmp_path / "flat" / "val").mkdir(parents=True)
    write_photo(tmp_path / "flat" / "val" / "0.jpg")
    sizes = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)
    torch.save(VisionTransformer(num_classes=10, **sizes).state_dict(), tmp_path / "ten.pth")
    settings = dict(model="vit_micro_patch4", input_size=32, nb_classes=2, global_pool="avg", trainable_blocks=None)
    meta = {"settings": settings, "classes": ["fox", "owl"]}
    save_checkpoint(tmp_path, "ours", {"model": VisionTransformer(num_classes=2, **sizes).state_dict()}, meta)
    (tmp_path / "checkpoint-ours.pth").rename(tmp_path / "ours.pth")
    words = [word.format(tmp=tmp_path, photos=photos, pretrained=pretrained) for word in flags.split()]
    code = 4 if message in WEIGHTS_THAT_DO_NOT_FIT else 2
    assert message in finetune.refused(capsys, labelled, tmp_path / "out", *words, code=code)
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_a_broken_validation_image_keeps_the_epoch(labelled, tmp_path, capsys):
    shutil.copytree(labelled, tmp_path / "data")
    broken = tmp_path / "data" / "val" / "cat" / "2.png"
    broken.write_bytes(broken.read_bytes()[:-200])  # its header is good
    message = finetune.refused(capsys, tmp_path / "data", tmp_path / "out")
    assert "2.png' cannot be decoded" in message
    assert newest_checkpoint(tmp_path / "out")[0].name == "checkpoint-3.pth"
    shutil.copy(labelled / "val" / "cat" / "2.png", broken)
    finetune(tmp_path / "data", tmp_path / "out")
    assert [r["step"] for r in reports(tmp_path / "out") if "val_top1" in r] == [3, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_the_gpu(labelled, tmp_path, precision):
    content = finetune(labelled, tmp_path / "out", "--device", "cuda", "--precision", precision)
    assert content["meta"]["step"] == 6 and reports(tmp_path / "out")[-1]["val_num_images"] == 7
