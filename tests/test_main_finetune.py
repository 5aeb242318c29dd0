import argparse
import json
import re
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import main_finetune
import main_pretrain
from encoders import classifiers
from models_vit import VisionTransformer
from scripts import pack_dataset
from scripts.export import export
from tests.conftest import write_photo
from tests.runs import (
    PLAIN,
    assert_same_state,
    contents,
    evaluate,
    evaluation,
    finetune,
    pretrain,
    refused,
    reports,
    state,
)
from tests.warm import run_by_torchrun
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.open import open_images
from util.data.pixel_format import RGB8, PixelFormat
from util.data.pretrain_augment import make_augmentation
from util.data.repeats import with_repeats
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate import evaluator
from util.run.files import checkpoint
from util.run.files.checkpoint import newest_checkpoint, save_checkpoint
from util.run.train.saving import CheckpointSaver


def evaluations(folder):
    return [report for report in reports(folder) if "val_top1" in report]


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(("which", "name"), [("last", ""), ("best", "checkpoint-best.pth")])
def test_a_checkpoint_alone_evaluates_to_what_was_logged(labelled, undisturbed_run, which, name):
    folder = undisturbed_run(finetune, labelled)
    expected = results_in(folder)[which]
    result = evaluate(labelled, folder / name)
    assert result["top1"] == expected["val_top1"]
    assert result["loss"] == pytest.approx(expected["val_loss"], rel=1e-5)


def test_learning_happens(tmp_path):
    """Dark against bright pictures."""
    for split, count in (("train", 12), ("val", 5)):
        for name, darkest in (("dark", 20), ("bright", 140)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("L", (32, 32), darkest + 6 * i).save(folder / f"{i}.png")
    finetune(tmp_path, tmp_path / "out", *PLAIN, "--epochs", 6, "--smoothing", 0, "--layer_decay", 1)
    losses = [report["epoch_loss"] for report in reports(tmp_path / "out") if "epoch_loss" in report]
    assert losses[-1] < 0.5 * losses[0]
    assert evaluations(tmp_path / "out")[-1]["val_top1"] == 100


# What depends on no clock.
STEADY = ("step", "loss", "epoch_loss", "grad_norm", "lr", "val_top1", "val_loss")


def steady_log(folder):
    log = []
    for report in reports(folder):
        log.append({name: report.get(name) for name in STEADY})
    return log


def assert_same_best(ours, theirs):
    """Bit for bit, of the folders of two runs."""
    best = contents(ours / "checkpoint-best.pth")
    expected = contents(theirs / "checkpoint-best.pth")
    step = results_in(ours)["best"]["step"]
    assert best["meta"]["step"] == step
    assert expected["meta"]["step"] == step
    for name, value in expected["model"].items():
        assert torch.equal(best["model"][name], value), name


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixup_never_mixes_crops_of_one_image(mode, labelled, tmp_path, capsys):
    """Each image has a label of its own here, so a mixed target has two."""
    mixup = timm.data.Mixup(mixup_alpha=0.8, mode=mode, label_smoothing=0, num_classes=24)
    np.random.seed(0)  # whence timm draws
    sampler = with_repeats(StepBatchSampler(24, 8, 1, 0, 1, 0), 4, range(7))
    for batch in sampler.batches(range(21)):
        _, targets = mixup(torch.zeros(8, 3, 4, 4), torch.tensor([index for _, index in batch]))
        assert targets.count_nonzero(dim=1).tolist() == [2] * 8
    odd = ("--mixup", 0.8, "--mixup_mode", mode, "--batch_size", 12, "--repeat_aug", 4)
    assert "--repeat_aug" in finetune.refused(capsys, labelled, tmp_path / "out", *odd)


@pytest.mark.parametrize("flags", [(), ("--trainable_blocks", 0, "--precision", "bf16"), ("--repeat_aug", 2)])
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(labelled, pretrained, tmp_path, flags):
    """With RandAugment, erasing, mixup and drop path: stopped in mid-epoch, with other workers."""
    flags = ("--finetune", pretrained, "--batch_size", 4, "--accum_iter", 2, "--print_freq", 3, *flags)
    expected = finetune(labelled, tmp_path / "whole", *flags)
    finetune(labelled, tmp_path / "parts", *flags, "--max_steps", 4, "--num_workers", 2)
    assert_same_state(finetune(labelled, tmp_path / "parts", *flags), expected)
    assert steady_log(tmp_path / "parts") == steady_log(tmp_path / "whole")
    assert_same_best(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("owner", "function", "epochs"),
    [
        (main_finetune, "evaluate_images", 2),
        (main_finetune, "evaluate_images", 1),
        (CheckpointSaver, "save_best", 1),
        (checkpoint, "save_checkpoint", 1),  # the thread dies while it writes the best weights
        (evaluator, "write_results", 1),
    ],
)
def test_a_run_killed_around_an_evaluation_makes_up_for_it(
    labelled, undisturbed_run, tmp_path, monkeypatch, owner, function, epochs
):
    """After the first epoch's checkpoint: while evaluating, or while writing the best weights or results.json."""
    whole = undisturbed_run(finetune, labelled, "--epochs", epochs)
    original = getattr(owner, function)
    save = CheckpointSaver.save

    def killed(*arguments, **options):
        newest, _ = newest_checkpoint(tmp_path)
        is_there = newest is not None and newest.name == "checkpoint-3.pth"
        is_of_the_best = function != "save_checkpoint" or arguments[1] == "best"
        if is_there and is_of_the_best:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    def save_at_once(saver, final=False):
        save(saver, final)
        saver.finish()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, function, killed)
        patch.setattr(CheckpointSaver, "save", save_at_once)
        finetune(labelled, tmp_path, "--epochs", epochs)
    assert_same_state(finetune(labelled, tmp_path, "--epochs", epochs), state(whole))
    for which in ("last", "best"):
        ours = results_in(tmp_path)[which]
        theirs = results_in(whole)[which]
        for name in ("step", "val_top1", "val_loss"):
            assert ours[name] == theirs[name]
    assert_same_best(tmp_path, whole)


@pytest.mark.parametrize("scores", [(12.0, 20.0, 20.0), (12.0, 20.0, 18.0)])
def test_results_name_the_best_weights_that_are_there(labelled, tmp_path, monkeypatch, capsys, scores):
    """The second write of them fails. At the end of the run that is an error, after which the same command helps."""
    best_writes = []
    scores_to_come = iter(scores)
    exact = main_finetune.evaluate_images

    def evaluate_images(*args, **options):
        return {**exact(*args, **options), "top1": next(scores_to_come)}

    def fail_once(output_dir, step, *args):
        if step == "best":
            best_writes.append(step)
            if len(best_writes) == 2:
                raise OSError(28, "No space left on device", "checkpoint-best.pth")
        return save_checkpoint(output_dir, step, *args)

    monkeypatch.setattr(main_finetune, "evaluate_images", evaluate_images)
    monkeypatch.setattr(checkpoint, "save_checkpoint", fail_once)
    epochs = 3
    if scores[1] == scores[2]:
        epochs = 2
        assert "checkpoint-best.pth" in finetune.refused(capsys, labelled, tmp_path, code=75)
    finetune(labelled, tmp_path, "--epochs", epochs)
    best = results_in(tmp_path)["best"]
    saved = contents(tmp_path / "checkpoint-best.pth")["meta"]
    assert (best["step"], best["val_top1"]) == (saved["step"], saved["val"]["top1"])
    assert (best["step"], best["val_top1"]) == (3 * epochs, scores[2])


def rename_dogs(labelled, folder, splits):
    """A copy of the images whose class dog is called fox in these splits."""
    shutil.copytree(labelled, folder)
    for split in splits:
        (folder / split / "dog").rename(folder / split / "fox")
    return folder


def test_a_run_goes_on_with_its_own_encoder_classes_and_program_only(labelled, pretrained, tmp_path, capsys):
    """The same output folder must not report the accuracy of another experiment."""
    out = tmp_path / "out"
    other = tmp_path / "other"
    finetune(labelled, out, "--finetune", pretrained, "--max_steps", 1)
    pretrain(labelled, other, "--seed", 1, "--max_steps", 1)
    renamed = rename_dogs(labelled, tmp_path / "renamed", ["train", "val"])
    assert "choose another --output_dir" in finetune.refused(capsys, labelled, out, "--finetune", other)
    assert "only one of them has dog, fox" in finetune.refused(capsys, renamed, out)
    assert "is a run of main_pretrain.py" in finetune.refused(capsys, labelled, other)


def test_a_run_that_has_begun_needs_no_encoder_flag(labelled, pretrained, tmp_path, capsys):
    finetune(labelled, tmp_path, "--finetune", pretrained, "--max_steps", 1)
    finetune(labelled, tmp_path, "--max_steps", 2, "--batch_size", 4, "--total_batch_size", 8)
    out = capsys.readouterr().out
    assert "batch_size was 8 and now is 4" in out
    assert "from scratch" not in out
    assert json.loads((tmp_path / "settings.json").read_text())["finetune"] == str(pretrained)


def test_evaluations_can_be_rarer(labelled, tmp_path):
    """Every second epoch, and the last. A finished run that is started again repeats none."""
    for _ in range(2):
        finetune(labelled, tmp_path, "--epochs", 3, "--eval_every", 2)
    assert [report["step"] for report in evaluations(tmp_path)] == [6, 9]


def test_a_linear_probe_trains_the_head_alone(labelled, pretrained, tmp_path):
    content = finetune(labelled, tmp_path, "--finetune", pretrained, "--trainable_blocks", 0)
    weights = content["model"]
    encoder = state(pretrained)["model"]
    for name, value in weights.items():
        assert name.startswith("head.") or torch.equal(value, encoder[name]), name
    assert "norm.weight" in weights
    assert weights["head.0.num_batches_tracked"] == 6
    expected = {"optimizer": "lars", "global_pool": "token", "mixup": 0, "clip_crop": True}
    assert content["meta"]["settings"].items() >= expected.items()
    assert evaluate(labelled, tmp_path)["top1"] == evaluations(tmp_path)[-1]["val_top1"]


def test_partial_finetuning_trains_the_last_blocks(labelled, pretrained, tmp_path):
    flags = ("--trainable_blocks", 2, "--optimizer", "adamw")
    content = finetune(labelled, tmp_path, "--finetune", pretrained, *flags)
    encoder = state(pretrained)["model"]
    changed = set()
    for name, value in content["model"].items():
        if name not in encoder or not torch.equal(value, encoder[name]):
            changed.add(re.match(r"blocks\.\d+|\w+", name)[0])
    assert changed == {"blocks.2", "blocks.3", "fc_norm", "head"}


# --------------------------------------------------------------------------------------------- classifiers of others

SIZES = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 96,
    "depth": 4,
    "num_heads": 3,
    "num_classes": 2,
}


def an_official_file(path, **options):
    """A classifier of MAE's key names and pooling, beside the pickled Namespace of its releases."""
    torch.manual_seed(3)
    model = VisionTransformer(**SIZES, **options)
    torch.nn.init.normal_(model.head.weight)
    content = {
        "model": model.state_dict(),
        "args": argparse.Namespace(lr=0.1),
        "epoch": 99,
        "scaler": {},
    }
    torch.save(content, path)
    return model.eval()


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_eval_of_foreign_files(labelled, tmp_path, pool):
    """MAE's fine-tuned layout (fc_norm, no norm) and timm's (norm, safetensors): the keys tell the pooling."""
    model = an_official_file(tmp_path / "official.pth", global_pool=pool)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    theirs = timm.models.VisionTransformer(**SIZES, global_pool=pool).eval()
    theirs.load_state_dict(model.state_dict())
    images = AddressedDataset(open_images("folder", labelled, "val"), ResizeCenterCrop(32))
    num_right = 0
    for i in range(7):
        img, label, _ = images[0, i]
        logits = theirs(Normalize()(img[None]))
        num_right += int(logits.argmax()) == label
    for name in ("official.pth", "timm.safetensors"):
        result = evaluate(labelled, tmp_path / name)
        assert result["num_images"] == 7
        assert result["top1"] == pytest.approx(100 * num_right / 7)


def test_eval_of_another_kind_of_encoder_without_settings(labelled, tmp_path):
    torch.manual_seed(0)
    model = classifiers.MODELS["relative_vit_micro_patch4"](num_classes=2)
    settings = {
        "model": "relative_vit_micro_patch4",
        "nb_classes": 2,
        "input_size": 32,
        "patch_size": 4,
        "global_pool": "avg",
        "trainable_blocks": None,
        "crop_pct": 1.0,
    }
    known = save_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {"settings": settings})
    torch.save({"model": model.state_dict()}, tmp_path / "bare.pth")
    assert evaluate(labelled, tmp_path / "bare.pth", "--crop_pct", "1") == evaluate(labelled, known)


def test_an_exported_classifier_keeps_its_classes_and_statistics(labelled, tmp_path, capsys):
    exported = tmp_path / "c.safetensors"
    finetune(labelled, tmp_path / "out", *PLAIN, "--mean", 0.3, 0.3, 0.3, "--max_steps", 3)
    export(tmp_path / "out", exported)
    expected = evaluate(labelled, tmp_path / "out")["loss"]
    assert evaluate(labelled, exported)["loss"] == pytest.approx(expected)
    renamed = rename_dogs(labelled, tmp_path / "renamed", ["val"])
    message = refused(capsys, main_finetune.main, *evaluation(exported, renamed))
    assert "has the classes fox, which the checkpoint does not have" in message


@pytest.mark.parametrize(
    ("value", "message"), [(torch.nan, "not finite: head.weight"), (3e38, "logits are not finite")]
)
def test_logits_that_are_not_finite_are_no_accuracy(labelled, tmp_path, capsys, value, message):
    path = tmp_path / "w.pth"
    model = an_official_file(path)
    torch.nn.init.constant_(model.head.bias, value)
    torch.nn.init.constant_(model.head.weight, value)
    torch.save(model.state_dict(), path)
    with pytest.raises(SystemExit, match="3"):
        evaluate(labelled, path)
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- several processes


def finetune_in_two_processes(*words):
    code, out = run_by_torchrun("main_finetune.py", *finetune.command(*words))
    assert code == 0, out[-3000:]


@pytest.mark.parametrize("flags", [(), ("--trainable_blocks", 2), ("--repeat_aug", 2)])
def test_two_processes_train_and_count_as_one(labelled, pretrained, tmp_path, flags):
    """Seven validation images on two processes; training losses of the one-process run."""
    flags = (*PLAIN, "--print_freq", 5, "--finetune", pretrained, *flags)
    finetune_in_two_processes(labelled, tmp_path / "two", "--batch_size", 4, *flags)
    finetune(labelled, tmp_path / "one", *flags)
    one = reports(tmp_path / "one")
    for ours, theirs in zip(reports(tmp_path / "two"), one, strict=True):
        for name in ("step", "loss", "grad_norm", "val_loss", "val_top1", "val_num_images"):
            assert (name in ours) == (name in theirs)
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name


def test_a_probe_s_running_statistics_are_the_checkpoint_s_in_every_process(labelled, pretrained, tmp_path):
    """BatchNorm sees other images in each process; the evaluation must use the statistics that are saved."""
    flags = ("--batch_size", 4, "--trainable_blocks", 0, "--finetune", pretrained)
    finetune_in_two_processes(labelled, tmp_path, *flags)
    expected = evaluations(tmp_path)[-1]["val_loss"]
    assert evaluate(labelled, tmp_path)["loss"] == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--nb_classes 10", "--nb_classes 10"),
        ("--data_path {tmp}/renamed", "fox"),
        ("--data_path {photos}", "val/"),
        ("--finetune {tmp}/nowhere.pth", "nowhere.pth"),
        ("--trainable_blocks 5", "trainable_blocks"),
        ("--trainable_blocks 0 --global_pool avg", "global_pool"),
        ("--trainable_blocks 0 --recipe finetune_vit_base", "linprobe_vit_base"),
        ("--trainable_blocks 2 --recipe linprobe_vit_base", "--trainable_blocks 2"),
        ("--trainable_blocks 2", "--finetune"),
        ("--trainable_blocks 0 --batch_size 1", "micro-batch"),
        ("--std 1 0 1", "--std"),
        ("--eval --resume {tmp}/ten.pth --crop_pct 0", "crop_pct"),
        ("--batch_size 3", "--batch_size"),
        ("--drop_path 1", "--drop_path"),
        ("--eval --resume {tmp}/ours.pth --nb_classes 7", "--nb_classes 7"),
        ("--layer_decay 0", "--layer_decay"),
        ("--clip_crop", "--clip_crop"),
        ("--color_jitter 0.4", "--color_jitter"),
        ("--input_size 30", "input_size 30 x 30"),
        ("--eval", "--resume"),
        ("--eval_split test", "--eval_split"),
        ("--eval --resume {pretrained}", "classification"),
        ("--eval --resume {tmp}/ten.pth", "10 classes"),
        ("--eval --resume {tmp}/ours.pth", "cat, dog"),
        ("--eval --resume {tmp}/ours.pth --data_path {tmp}/flat", "val"),
    ],
)
def test_user_errors_are_one_paragraph_before_the_first_step(
    labelled, photos, pretrained, mistakes, tmp_path, capsys, flags, named
):
    words = [word.format(tmp=mistakes, photos=photos, pretrained=pretrained) for word in flags.split()]
    assert named in finetune.refused(capsys, labelled, tmp_path / "out", *words)
    assert not list((tmp_path / "out").glob("checkpoint*"))


@pytest.fixture(scope="module")
def mistakes(labelled, tmp_path_factory):
    """Folders and weights that do not fit `labelled`."""
    root = tmp_path_factory.mktemp("mistakes")
    rename_dogs(labelled, root / "renamed", ["val"])
    (root / "flat" / "val").mkdir(parents=True)
    write_photo(root / "flat" / "val" / "0.jpg")
    torch.save(VisionTransformer(**{**SIZES, "num_classes": 10}).state_dict(), root / "ten.pth")
    save_classifier_of_foxes_and_owls(root)
    return root


def save_classifier_of_foxes_and_owls(folder):
    settings = {
        "model": "vit_micro_patch4",
        "input_size": 32,
        "nb_classes": 2,
        "global_pool": "avg",
        "trainable_blocks": None,
    }
    model = VisionTransformer(**SIZES)
    meta = {"settings": settings, "classes": ["fox", "owl"]}
    path = save_checkpoint(folder, "ours", {"model": model.state_dict()}, meta)
    path.rename(folder / "ours.pth")


def test_another_split_is_evaluated(labelled, undisturbed_run, tmp_path):
    (tmp_path / "test").symlink_to(labelled / "train")
    scores = evaluate(tmp_path, undisturbed_run(finetune, labelled), "--eval_split", "test")
    assert scores["num_images"] == len(open_images("folder", labelled, "train", labelled=True))


@pytest.mark.parametrize("packed", [False, True])
def test_validation_images_may_lack_a_class(tmp_path, packed):
    """Labels of the others are those of training. It is noted."""
    for split, names in (("train", "ant bee cat"), ("val", "ant cat")):
        for name in names.split():
            for i in range(2):
                (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
                write_photo(tmp_path / split / name / f"{i}.jpg", seed=i)
    root = tmp_path
    if packed:
        root = tmp_path / "packed"
        pack_dataset.main([str(tmp_path), str(root), "--workers", "1"])
    args = main_finetune.parse_args(["--data_path", str(root)])[1]
    images, val_images = main_finetune.open_data(args)
    assert val_images.classes == images.classes == ["ant", "bee", "cat"]
    assert [val_images.load(i)[1] for i in range(4)] == [0, 0, 2, 2]
    assert val_images.notes == [f"note: {str(root / 'val')!r} has no image of bee"]


@pytest.mark.parametrize(
    ("program", "flags", "pixels"),
    [
        ("main_finetune", [], RGB8),
        ("main_finetune", ["--clip_crop"], RGB8),
        ("main_finetune", [], PixelFormat(2, "uint16")),
        ("main_pretrain", [], RGB8),
        ("main_pretrain", ["--crop", "padded"], PixelFormat(2, "uint16")),
    ],
)
@pytest.mark.parametrize(("switch", "place"), [("hflip", (0, -1)), ("vflip", (-1, 0))])
def test_images_are_flipped_if_the_flags_say_so(program, flags, pixels, switch, place):
    """The pixels of an image are brighter to the right, and those of another towards its lower edge."""
    flipped = []
    for value in (f"--{switch}", f"--no-{switch}"):
        if program == "main_finetune":
            _, args = main_finetune.parse_args(["--aa", "none", value, *flags])
            augment, _ = main_finetune.make_augmentation(args, (32, 32), pixels, set())
        else:
            _, args = main_pretrain.parse_args([value, *flags])
            augment = make_augmentation(args, (32, 32))
        ramp = torch.arange(40).to(getattr(torch, pixels.dtype))
        img = ramp.expand(pixels.channels, 40, 40)
        if switch == "vflip":
            img = img.transpose(1, 2)
        row, column = place
        num_flipped = 0
        for i in range(20):
            crop = augment(img, 0, i)[0].int()
            num_flipped += int(crop[0, 0] > crop[row, column])
        flipped.append(num_flipped)
    assert 5 <= flipped[0] <= 15
    assert flipped[1] == 0


def test_a_broken_validation_image_keeps_the_epoch(labelled, tmp_path, capsys):
    data = shutil.copytree(labelled, tmp_path / "data")
    broken = data / "val" / "cat" / "2.png"
    broken.write_bytes(broken.read_bytes()[:-200])  # its header is good
    assert "2.png' cannot be decoded" in finetune.refused(capsys, data, tmp_path / "out")
    assert newest_checkpoint(tmp_path / "out")[0].name == "checkpoint-3.pth"
    shutil.copy(labelled / "val" / "cat" / "2.png", broken)
    finetune(data, tmp_path / "out")
    assert [report["step"] for report in evaluations(tmp_path / "out")] == [3, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_the_gpu(labelled, tmp_path, precision):
    content = finetune(labelled, tmp_path, "--device", "cuda", "--precision", precision)
    assert content["meta"]["step"] == 6
    assert evaluations(tmp_path)[-1]["val_num_images"] == 7
