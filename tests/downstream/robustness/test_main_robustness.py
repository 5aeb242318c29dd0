"""Evaluation on other test sets: metrics by hand, every figure against a slow one, restarts, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.robustness import main_robustness
from downstream.robustness.main_robustness import ALEXNET_ERRORS, BENCHMARKS, corruption_errors
from models_vit import vit_mini_patch4
from tests.patches import MonkeyPatch
from tests.runs import refused
from tests.two_processes import run_in_two_processes
from util import collectives
from util.data.transforms import Normalize, ResizeCenterCrop
from util.run.cli import Parser
from util.run.files.checkpoint import save_checkpoint
from util.run.processes import distributed
from util.run.processes.distributed import Process

WNIDS = [f"n{i:08d}" for i in range(0, 36, 3)]  # the twelve classes of the small sets
SUBSET = [WNIDS[i] for i in (1, 4, 5, 10)]
CORRUPTIONS = ("snow", "fog", "brightness")
# (images, classes) of the small sets.
SIZES = {
    "imagenet": (12, 12),
    "imagenet_a": (12, 4),
    "imagenet_r": (8, 4),
    "imagenet_sketch": (24, 12),
    "imagenet_c": (12, 12),
}


def make_small(patch):
    """The published sets shrink to these sizes."""
    patch.setattr(main_robustness, "imagenet_wnids", lambda: WNIDS)
    patch.setattr(main_robustness, "ALEXNET_ERRORS", {name: ALEXNET_ERRORS[name] for name in CORRUPTIONS})
    for name, (num_images, num_classes) in SIZES.items():
        patch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], num_images=num_images, num_classes=num_classes))


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


def write_set(folder, wnids, images_per_class, seed, size=40):
    rng = np.random.default_rng(seed)
    for wnid in wnids:
        (folder / wnid).mkdir(parents=True)
        for i in range(images_per_class):
            coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            coarse.resize((size, size), Image.BICUBIC).save(folder / wnid / f"{i}.JPEG")


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    write_set(root / "imagenet" / "val", WNIDS, 1, seed=1)
    write_set(root / "imagenet_a", SUBSET, 3, seed=2)
    write_set(root / "imagenet_r", SUBSET, 2, seed=3)
    write_set(root / "imagenet_sketch", WNIDS, 2, seed=4)
    for i, corruption in enumerate(CORRUPTIONS):
        for severity in range(1, 6):
            write_set(root / "imagenet_c" / corruption / str(severity), WNIDS, 1, seed=100 * i + severity, size=32)
    return root


def write_classifier(folder, classes=WNIDS, seed=0):
    """A random classifier whose choices are spread over the classes."""
    torch.manual_seed(seed)
    model = vit_mini_patch4(patch_size=16, num_classes=len(classes)).eval()  # 4 tokens: the tests score 3,000 images
    with torch.no_grad():
        torch.nn.init.normal_(model.head.weight)
        imgs = torch.nn.functional.interpolate(torch.randn(32, 3, 4, 4), size=32)
        logits = model(imgs)
        model.head.weight /= logits.std(dim=0)[:, None]
        model.head.bias.copy_(-(logits / logits.std(dim=0)).mean(dim=0))
    settings = {
        "model": "vit_mini_patch4",
        "input_size": 32,
        "patch_size": 16,
        "nb_classes": len(classes),
        "global_pool": "avg",
        "trainable_blocks": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, 1, {"model": model.state_dict()}, {"settings": settings, "classes": classes})
    return model


@pytest.fixture(scope="session")
def finetuned(tmp_path_factory):
    return tmp_path_factory.mktemp("finetuned")


@pytest.fixture(scope="session")
def classifier(finetuned):
    """The model in the folder `finetuned`."""
    return write_classifier(finetuned)


def arguments(resume, output_dir, data, names, *flags):
    words = ["--resume", resume, "--output_dir", output_dir, "--device", "cpu", "--num_workers", 0]
    for name in names.split():
        words += [f"--{name}", data / name]
    return [str(word) for word in (*words, *flags)]


def evaluate(resume, output_dir, data, names, *flags):
    main_robustness.main(arguments(resume, output_dir, data, names, *flags))
    return json.loads((output_dir / "robustness.json").read_text())


@pytest.fixture
def fails(capsys, monkeypatch, small):
    """Returns the error message of a command that must stop before anything is scored."""

    def run(*words, code=2):
        with monkeypatch.context() as patch:
            patch.setattr(main_robustness, "evaluate_images", lambda *_: pytest.fail("scored"))
            return refused(capsys, main_robustness.main, *arguments(*words), code=code)

    return run


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


# ----------------------------------------------------------------------------------------------------------- metrics


def test_alexnet_s_errors_give_100():
    errors = {corruption: [error] * 5 for corruption, error in ALEXNET_ERRORS.items()}
    figures = corruption_errors(errors)
    assert len(figures["ce"]) == 15
    assert figures["mce"] == pytest.approx(100)
    assert figures["mean_error"] == pytest.approx(78.8993, abs=5e-5)


def test_ce_against_a_hand_computed_case():
    """The mean over severities comes before the division, the mean over corruptions after it."""
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


# ------------------------------------------------------------------------------------------------------------- a run


@pytest.fixture(scope="session")
def finished(sets, finetuned, classifier, tmp_path_factory):
    """The folder of an evaluation on everything."""
    output_dir = tmp_path_factory.mktemp("finished")
    with MonkeyPatch.context() as patch:
        make_small(patch)
        evaluate(finetuned, output_dir, sets, " ".join(SIZES))
    return output_dir


@pytest.fixture(scope="session")
def content(finished):
    """The results of an evaluation on everything."""
    return json.loads((finished / "robustness.json").read_text())


@pytest.mark.parametrize("name", ["imagenet_a", "imagenet_r"])
def test_figures_of_restricted_sets_are_the_slow_ones(sets, classifier, content, name):
    figures = content["summary"][name]
    view = ResizeCenterCrop(32)
    assert figures["top1"] == pytest.approx(slow_top1(classifier, sets / name, view, SUBSET))
    assert figures["top1_unrestricted"] == pytest.approx(slow_top1(classifier, sets / name, view))


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("imagenet", "imagenet/val"),
        ("imagenet_sketch", "imagenet_sketch"),
    ],
)
def test_figures_of_other_sets_are_the_slow_ones(sets, classifier, content, name, folder):
    expected = slow_top1(classifier, sets / folder, ResizeCenterCrop(32))
    assert content["summary"][name]["top1"] == pytest.approx(expected)


def test_figures_of_corruptions_are_the_slow_ones(sets, classifier, content):
    """ImageNet-C is not resized: at the model's own size its view gives the file's bytes."""
    as_it_is = ResizeCenterCrop(32, 1.0)
    errors = []
    for severity in range(1, 6):
        errors.append(100 - slow_top1(classifier, sets / "imagenet_c" / "fog" / str(severity), as_it_is))
    assert content["summary"]["imagenet_c"]["ce"]["fog"] == pytest.approx(np.mean(errors) / ALEXNET_ERRORS["fog"])


def test_tables_show_the_results(finished, content):
    assert len(content["parts"]) == 4 + 15
    rows = []
    for line in (finished / "robustness.md").read_text().splitlines():
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    summary = content["summary"]
    corruptions = summary["imagenet_c"]
    assert ["ImageNet-A", "top-1 among its 4 classes", f"{summary['imagenet_a']['top1']:.2f}"] in rows
    assert ["ImageNet-C", "mCE, AlexNet's is 100", f"{corruptions['mce']:.2f}"] in rows
    assert ["ImageNet-C", "mean error, un-normalised", f"{corruptions['mean_error']:.2f}"] in rows
    assert ["fog", f"{corruptions['ce']['fog']:.2f}", f"{corruptions['errors']['fog']:.2f}"] in rows


def test_finished_parts_are_skipped(sets, finetuned, content, tmp_path, monkeypatch, small):
    """Killed in the middle of ImageNet-C: what was scored is kept, and the rest gives the undisturbed result."""
    score = main_robustness.evaluate_images
    scored = []

    def counting(model, images, *args):
        scored.append(str(images.root))
        if len(scored) == 8:
            raise KeyboardInterrupt
        return score(model, images, *args)

    monkeypatch.setattr(main_robustness, "evaluate_images", counting)
    out = tmp_path / "out"
    names = "imagenet_a imagenet_c"
    with pytest.raises(KeyboardInterrupt):
        evaluate(finetuned, out, sets, names)
    assert len(json.loads((out / "robustness.json").read_text())["parts"]) == 7
    assert (out / ".progress").read_text() == "7\n"  # what the SLURM job's script looks at
    resumed = evaluate(finetuned, out, sets, names)
    assert len(scored) == 8 + 16 - 7
    assert resumed["summary"] == {name: content["summary"][name] for name in names.split()}
    assert list(evaluate(finetuned, out, sets, "imagenet_r")["summary"]) == ["imagenet_a", "imagenet_r", "imagenet_c"]


def test_results_of_other_settings_are_not_touched(sets, finetuned, finished, fails):
    before = (finished / "robustness.json").read_bytes()
    error = fails(finetuned, finished, sets, "imagenet_a", "--crop_pct", 1)
    assert "crop_pct was None and now is 1.0" in error
    assert "choose another --output_dir" in error
    assert (finished / "robustness.json").read_bytes() == before


def test_results_of_another_model_are_not_touched(sets, finished, tmp_path, fails):
    write_classifier(tmp_path / "other", seed=1)
    assert "(checkpoint was" in fails(tmp_path / "other", finished, sets, "imagenet_a")


def test_results_of_other_images_are_not_touched(sets, finetuned, finished, tmp_path, fails):
    shutil.copytree(sets / "imagenet_a", tmp_path / "imagenet_a")
    error = fails(finetuned, finished, tmp_path, "imagenet_a")
    assert "imagenet_a was 12 images of 4 classes in" in error


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"sha256": "0"}',
        '{"sha256": "0", "settings": {}, "parts": {"a": 1}}',
    ],
)
def test_foreign_results_are_refused(sets, finetuned, classifier, tmp_path, fails, text):
    (tmp_path / "robustness.json").write_text(text)
    error = fails(finetuned, tmp_path, sets, "imagenet_a")
    assert "is no result of this program" in error or "holds other results" in error


def test_a_foreign_checkpoint_has_no_class_list(sets, classifier, content, tmp_path, small):
    torch.save(classifier.state_dict(), tmp_path / "official.pth")
    results = evaluate(tmp_path / "official.pth", tmp_path / "out", sets, "imagenet_r")
    assert results["summary"]["imagenet_r"] == content["summary"]["imagenet_r"]


def _evaluate_as(rank, argv):
    """Runs the program as one of two ranks. Returns its error, or the parts of its results."""
    with MonkeyPatch.context() as patch:
        make_small(patch)
        place = Process(torch.device("cpu"), rank, 2, 2)
        patch.setattr(distributed, "init_process", lambda *_, **__: place)
        patch.setattr(distributed, "shut_down", lambda **_: None)
        patch.setattr(Parser, "exit", lambda parser, status=0, message=None: pytest.fail(message))
        try:
            main_robustness.main(argv)
        except pytest.fail.Exception as error:
            return str(error)
        collectives.run_on_rank0(lambda: None)  # has written it
        results = Path(argv[argv.index("--output_dir") + 1]) / "robustness.json"
        return json.loads(results.read_text())["parts"]


def test_two_processes_share_the_images(sets, finetuned, content, tmp_path, small):
    """They skip the same parts, and one writes."""
    evaluate(finetuned, tmp_path / "out", sets, "imagenet_r")
    names = ["imagenet_a", "imagenet_r", "imagenet_sketch"]
    argv = arguments(finetuned, tmp_path / "out", sets, " ".join(names), "--batch_size", 5)
    first, second = run_in_two_processes(_evaluate_as, argv)
    assert first == second == {name: content["parts"][name] for name in names}


def test_two_processes_both_hear_of_a_mistake(finetuned, classifier, tmp_path):
    argv = arguments(finetuned, tmp_path / "out", tmp_path, "imagenet_a")
    first, second = run_in_two_processes(_evaluate_as, argv)
    assert first == second
    assert "lacks 1 of its 1 folders" in first


# --------------------------------------------------------------------------------------------------------- bad input


def without(*path):
    """Removes a part of a data set."""

    def spoil(root):
        place = root.joinpath(*path)
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()

    return spoil


def rename_class(root):
    (root / "imagenet_a" / SUBSET[0]).rename(root / "imagenet_a" / "tench")


def empty_class(root):
    for path in (root / "imagenet_r" / SUBSET[2]).iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("imagenet_a", without("imagenet_a"), "lacks 1 of its 1 folders"),
        ("imagenet", without("imagenet", "val"), "lacks 1 of its 1 folders"),
        ("imagenet_a", rename_class, "has 1 folders that are no class of ImageNet-1k: tench"),
        ("imagenet_r", without("imagenet_r", SUBSET[2]), "has 6 images of 3 classes, ImageNet-R has 8 of 4"),
        ("imagenet_sketch", without("imagenet_sketch", WNIDS[3], "1.JPEG"), "has 23 images of 12 classes"),
        ("imagenet_c", without("imagenet_c", "fog", "2"), "lacks 1 of its 15 folders"),
        ("imagenet_r", empty_class, SUBSET[2]),
    ],
)
def test_bad_sets_are_named_before_anything_is_scored(
    sets, finetuned, classifier, tmp_path, fails, name, spoil, message
):
    shutil.copytree(sets / name, tmp_path / name)
    spoil(tmp_path)
    error = fails(finetuned, tmp_path / "out", tmp_path, name)
    assert message in error
    assert "--data_path" not in error


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (WNIDS[:10], "has 10 classes, ImageNet-1k 12"),
        ([*WNIDS[:11], "n99999999"], "only one of them has n00000033, n99999999"),
    ],
)
def test_a_classifier_of_other_classes_is_refused(sets, tmp_path, fails, classes, message):
    write_classifier(tmp_path / "other", classes)
    assert message in fails(tmp_path / "other", tmp_path / "out", sets, "imagenet_a")


@pytest.mark.parametrize(
    ("names", "flags", "message"),
    [
        ("", "", "nothing to evaluate on: give at least one of --imagenet, --imagenet_a"),
        ("imagenet_a", "--crop_pct 2", "crop_pct must lie in (0, 1], got 2.0"),
    ],
)
def test_bad_flags_are_refused(sets, finetuned, classifier, tmp_path, fails, names, flags, message):
    assert message in fails(finetuned, tmp_path / "out", sets, names, *flags.split())


def test_a_missing_checkpoint_is_refused(sets, tmp_path, fails):
    error = fails(tmp_path / "nowhere.pth", tmp_path / "out", sets, "imagenet_a")
    assert "nowhere.pth' does not exist: give a checkpoint" in error


def test_a_broken_image_keeps_what_was_scored(sets, finetuned, classifier, tmp_path, capsys, small):
    shutil.copytree(sets / "imagenet_r", tmp_path / "imagenet_r")
    shutil.copytree(sets / "imagenet_a", tmp_path / "imagenet_a")
    broken = tmp_path / "imagenet_r" / SUBSET[3] / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:-200])  # its header is good
    with pytest.raises(SystemExit) as stop:
        evaluate(finetuned, tmp_path / "out", tmp_path, "imagenet_a imagenet_r", "--num_workers", 1)
    assert stop.value.code == 2
    assert "1.JPEG' cannot be decoded" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "robustness.json").read_text())
    assert list(content["parts"]) == ["imagenet_a"]
