"""ImageNet-A, -R, -Sketch and -C by `main_finetune.py --eval`: each score against a slow one, and restarts."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import eval_finetune
import main_finetune
import submitit_launch
from models_vit import vit_mini_patch4
from tests.runs import refused
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate import robustness
from util.evaluate.robustness import ALEXNET_ERRORS, corruption_errors
from util.run.files.checkpoint import save_checkpoint

WNIDS = [f"n{i:08d}" for i in range(0, 36, 3)]
SUBSET = [WNIDS[i] for i in (1, 4, 5, 10)]
CORRUPTIONS = ("snow", "fog")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """ImageNet has twelve classes, and ImageNet-C two corruptions."""
    lists = {"imagenet": WNIDS, "imagenet_a": SUBSET, "imagenet_r": SUBSET}
    monkeypatch.setattr(robustness, "wnids_of", lambda eval_set="imagenet": lists[eval_set])
    monkeypatch.setattr(robustness, "ALEXNET_ERRORS", {name: ALEXNET_ERRORS[name] for name in CORRUPTIONS})


def write_set(folder, wnids, images_per_class, seed, size=40):
    rng = np.random.default_rng(seed)
    for wnid in wnids:
        (folder / wnid).mkdir(parents=True)
        for i in range(images_per_class):
            coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            coarse.resize((size, size), Image.BICUBIC).save(folder / wnid / f"{i}.JPEG")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    write_set(root / "imagenet_a", SUBSET, 3, seed=2)
    write_set(root / "imagenet_r", SUBSET, 2, seed=3)
    write_set(root / "imagenet_sketch", WNIDS, 2, seed=4)
    for i, corruption in enumerate(CORRUPTIONS):
        for severity in range(1, 6):
            write_set(root / "imagenet_c" / corruption / str(severity), WNIDS, 1, seed=100 * i + severity, size=32)
    return root


def make_classifier(seed=0):
    """A random classifier whose choices are spread over the classes."""
    torch.manual_seed(seed)
    model = vit_mini_patch4(patch_size=16, num_classes=len(WNIDS)).eval()
    with torch.no_grad():
        torch.nn.init.normal_(model.head.weight)
        imgs = torch.nn.functional.interpolate(torch.randn(32, 3, 4, 4), size=32)
        logits = model(imgs)
        model.head.weight /= logits.std(dim=0)[:, None]
        model.head.bias.copy_(-(logits / logits.std(dim=0)).mean(dim=0))
    return model


@pytest.fixture(scope="module")
def model():
    return make_classifier()


def write_checkpoint(folder, model, classes=WNIDS):
    folder.mkdir(exist_ok=True)
    settings = {
        "model": "vit_mini_patch4",
        "input_size": 32,
        "patch_size": 16,
        "nb_classes": len(WNIDS),
        "global_pool": "avg",
        "trainable_blocks": None,
    }
    save_checkpoint(folder, 1, {"model": model.state_dict()}, {"settings": settings, "classes": classes})
    return folder


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, model):
    return write_checkpoint(tmp_path_factory.mktemp("finetuned"), model)


def command(resume, data, eval_set, *flags):
    words = ["--eval", "--eval_set", eval_set, "--resume", resume, "--data_path", data / eval_set]
    return [str(word) for word in (*words, "--device", "cpu", "--num_workers", 0, *flags)]


def slow_top1(model, folder, view, wnids=WNIDS):
    """Top-1 among these classes, image by image, in percent."""
    hits = []
    for path in sorted(folder.glob("*/*.JPEG")):
        pixels = np.array(Image.open(path).convert("RGB"))
        img = view(torch.from_numpy(pixels).permute(2, 0, 1))
        logits = model(Normalize()(img.unsqueeze(0)))[0]
        choice = max(wnids, key=lambda wnid: logits[WNIDS.index(wnid)].item())
        hits.append(choice == path.parent.name)
    return 100 * sum(hits) / len(hits)


def test_the_classes_of_the_published_sets(monkeypatch):
    """A goldfish is in ImageNet-R alone."""
    monkeypatch.undo()
    imagenet = robustness.wnids_of()
    assert len(imagenet) == 1000
    for name, has_goldfish in (("imagenet_a", False), ("imagenet_r", True)):
        classes = robustness.wnids_of(name)
        assert len(classes) == 200
        assert ("n01443537" in classes) == has_goldfish
        columns = robustness.find_columns(name, classes, imagenet)
        assert [imagenet[column] for column in columns] == classes


def test_ce_against_a_hand_computed_case(monkeypatch):
    """The mean over severities comes before the division, the mean over corruptions after it."""
    monkeypatch.undo()
    errors = {corruption: [0.5] * 5 for corruption in ALEXNET_ERRORS}
    errors["fog"] = [0.1, 0.2, 0.3, 0.4, 0.638648]
    errors["snow"] = [0.0] * 5
    figures = corruption_errors(errors)
    assert figures["ce"]["fog"] == pytest.approx(40.0)
    assert figures["errors"]["fog"] == pytest.approx(32.77296)
    assert figures["ce"]["snow"] == 0
    assert figures["ce"]["brightness"] == pytest.approx(88.559526)
    assert figures["mce"] == pytest.approx(sum(figures["ce"].values()) / 15)
    assert figures["mean_error"] == pytest.approx(100 * (13 * 0.5 + 0.3277296) / 15)


@pytest.mark.parametrize(
    ("name", "classes"), [("imagenet_a", SUBSET), ("imagenet_r", SUBSET), ("imagenet_sketch", WNIDS)]
)
def test_scores_are_the_slow_ones(sets, finetuned, model, name, classes):
    scores = main_finetune.main(command(finetuned, sets, name))
    view = ResizeCenterCrop(32)
    assert scores["top1"] == pytest.approx(slow_top1(model, sets / name, view, classes))


def test_a_checkpoint_without_names_has_imagenet_s_classes(sets, finetuned, model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "official.pth")
    expected = main_finetune.main(command(finetuned, sets, "imagenet_r"))
    scores = main_finetune.main(command(tmp_path / "official.pth", sets, "imagenet_r"))
    assert scores["top1"] == expected["top1"]


def test_imagenet_c_continues_and_equals_the_slow_one(sets, finetuned, model, tmp_path, monkeypatch):
    """It is not resized: at the model's own size its view gives the file's bytes. A kill costs no finished folder."""
    score = eval_finetune.evaluate_images
    scored = []

    def counting(model, images, **options):
        scored.append(str(images.root))
        if len(scored) == 8:
            raise KeyboardInterrupt
        return score(model, images, **options)

    monkeypatch.setattr(eval_finetune, "evaluate_images", counting)
    argv = command(finetuned, sets, "imagenet_c", "--output_dir", tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        main_finetune.main(argv)
    results = tmp_path / "out" / "imagenet_c.json"
    assert len(json.loads(results.read_text())["parts"]) == 7
    assert results.name in submitit_launch.PARTS  # the SLURM job's script looks at it
    figures = main_finetune.main(argv)
    assert len(scored) == 8 + 3
    assert json.loads(results.read_text())["imagenet_c"] == figures
    as_it_is = ResizeCenterCrop(32, 1.0)
    for corruption in CORRUPTIONS:
        errors = []
        for severity in range(1, 6):
            folder = sets / "imagenet_c" / corruption / str(severity)
            errors.append(100 - slow_top1(model, folder, as_it_is))
        assert figures["ce"][corruption] == pytest.approx(np.mean(errors) / ALEXNET_ERRORS[corruption])


def test_user_errors(sets, finetuned, model, tmp_path, capsys):
    def error(*words):
        return refused(capsys, main_finetune.main, *command(*words))

    out = ("--output_dir", tmp_path / "out")
    assert "--output_dir" in error(finetuned, sets, "imagenet_c")
    assert "--crop_pct" in error(finetuned, sets, "imagenet_c", *out, "--crop_pct", 0.9)
    shutil.copytree(sets, tmp_path / "sets")
    shutil.rmtree(tmp_path / "sets" / "imagenet_c" / "fog" / "2")
    assert "fog/2" in error(finetuned, tmp_path / "sets", "imagenet_c", *out)
    shutil.rmtree(tmp_path / "sets" / "imagenet_sketch" / WNIDS[3])
    assert WNIDS[3] in error(finetuned, tmp_path / "sets", "imagenet_sketch")
    shutil.rmtree(tmp_path / "sets" / "imagenet_r" / SUBSET[2])
    assert SUBSET[2] in error(finetuned, tmp_path / "sets", "imagenet_r")
    (tmp_path / "sets" / "imagenet_a" / SUBSET[0]).rename(tmp_path / "sets" / "imagenet_a" / "tench")
    assert "tench" in error(finetuned, tmp_path / "sets", "imagenet_a")
    other = write_checkpoint(tmp_path / "other", model, classes=WNIDS[:5])
    assert "--eval_set" in error(other, sets, "imagenet_a")


def test_results_of_another_model_are_not_touched(sets, finetuned, tmp_path, capsys):
    argv = command(finetuned, sets, "imagenet_c", "--output_dir", tmp_path / "out")
    main_finetune.main(argv)
    before = (tmp_path / "out" / "imagenet_c.json").read_bytes()
    other = write_checkpoint(tmp_path / "other", make_classifier(seed=1))
    argv = command(other, sets, "imagenet_c", "--output_dir", tmp_path / "out")
    assert "--output_dir" in refused(capsys, main_finetune.main, *argv)
    assert (tmp_path / "out" / "imagenet_c.json").read_bytes() == before
    argv = command(finetuned, sets, "imagenet_r", "--output_dir", tmp_path / "out")
    main_finetune.main(argv)  # of the same folder: the errors stay
    assert (tmp_path / "out" / "imagenet_c.json").read_bytes() == before
    argv = command(other, sets, "imagenet_r", "--output_dir", tmp_path / "out")
    assert "--output_dir" in refused(capsys, main_finetune.main, *argv)
