"""Evaluation on other test sets: metrics by hand, every figure against a slow one, restarts, and what is refused."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.robustness import main_robustness
from downstream.robustness.main_robustness import ALEXNET_ERRORS, BENCHMARKS, Part, corruption_errors
from models_vit import vit_mini_patch4
from tests.patches import MonkeyPatch
from tests.runs import refused
from tests.two_processes import run_in_two_processes
from util import collectives
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate.loop import EvalContext
from util.run import distributed
from util.run.checkpoint import save_checkpoint
from util.run.cli import Parser
from util.run.distributed import Process

WNIDS = [f"n{i:08d}" for i in range(0, 36, 3)]  # the twins' twelve classes
SUBSET = [WNIDS[i] for i in (1, 4, 5, 10)]
CORRUPTIONS = ("snow", "fog", "brightness")
SIZES = dict(imagenet=(12, 12), imagenet_a=(12, 4), imagenet_r=(8, 4), imagenet_sketch=(24, 12), imagenet_c=(12, 12))


def make_small(patch):
    """The published sets shrink to the twins' sizes."""
    patch.setattr(main_robustness, "imagenet_wnids", lambda: WNIDS)
    patch.setattr(main_robustness, "ALEXNET_ERRORS", {name: ALEXNET_ERRORS[name] for name in CORRUPTIONS})
    for name, (num_images, num_classes) in SIZES.items():
        patch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], num_images=num_images, num_classes=num_classes))


@pytest.fixture(autouse=True)
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
def twins(tmp_path_factory):
    root = tmp_path_factory.mktemp("twins")
    write_set(root / "imagenet" / "val", WNIDS, 1, 1)
    write_set(root / "imagenet_a", SUBSET, 3, 2)
    write_set(root / "imagenet_r", SUBSET, 2, 3)
    write_set(root / "imagenet_sketch", WNIDS, 2, 4)
    for i, corruption in enumerate(CORRUPTIONS):
        for severity in range(1, 6):
            write_set(root / "imagenet_c" / corruption / str(severity), WNIDS, 1, 100 * i + severity, size=32)
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
    settings = dict(model="vit_mini_patch4", input_size=32, patch_size=16, nb_classes=len(classes))
    settings |= dict(global_pool="avg", trainable_blocks=None)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, 1, {"model": model.state_dict()}, {"settings": settings, "classes": classes})
    return model


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuned")
    return folder, write_classifier(folder)


def arguments(resume, output_dir, data, sets, *flags):
    given = [item for name in sets.split() for item in (f"--{name}", data / name)]
    own = ["--resume", resume, "--output_dir", output_dir, "--device", "cpu", "--num_workers", 0]
    return [str(a) for a in (*own, *given, *flags)]


def evaluate(*args):
    main_robustness.main(arguments(*args))
    return json.loads((Path(args[1]) / "robustness.json").read_text())


@pytest.fixture
def fails(capsys, monkeypatch):
    """Returns the error message of a command that must stop before anything is scored."""

    def never(*_, **__):
        raise AssertionError("scored")

    def run(*args, code=2):
        with monkeypatch.context() as patch:
            patch.setattr(main_robustness, "evaluate_images", never)
            return refused(capsys, main_robustness.main, *arguments(*args), code=code)

    return run


def slow_top1(model, folder, view, columns=None):
    """Image by image, with class names instead of columns; percent."""
    hits = []
    for path in sorted(folder.glob("*/*.JPEG")):
        img = view(torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1))
        logits = model(Normalize()(img.unsqueeze(0)))[0]
        among = WNIDS if columns is None else columns
        hits.append(max(among, key=lambda wnid: logits[WNIDS.index(wnid)].item()) == path.parent.name)
    return 100 * sum(hits) / len(hits)


# ----------------------------------------------------------------------------------------------------------- metrics


def test_alexnet_s_errors_give_100(monkeypatch):
    monkeypatch.undo()
    figures = corruption_errors({c: [error] * 5 for c, error in ALEXNET_ERRORS.items()})
    assert figures["mce"] == pytest.approx(100) and figures["mean_error"] == pytest.approx(78.8993, abs=5e-5)
    assert len(figures["ce"]) == 15 and all(ce == pytest.approx(100) for ce in figures["ce"].values())


def test_ce_against_a_hand_computed_case(monkeypatch):
    """The mean over severities comes before the division, the mean over corruptions after it."""
    monkeypatch.undo()
    errors = {c: [0.5] * 5 for c in ALEXNET_ERRORS} | {"fog": [0.1, 0.2, 0.3, 0.4, 0.638648], "snow": [0.0] * 5}
    figures = corruption_errors(errors)
    assert figures["ce"]["fog"] == pytest.approx(40.0) and figures["errors"]["fog"] == pytest.approx(32.77296)
    assert figures["ce"]["snow"] == 0 and figures["ce"]["brightness"] == pytest.approx(88.559526)
    others = sum(0.5 / error for c, error in ALEXNET_ERRORS.items() if c not in ("fog", "snow"))
    assert figures["mce"] == pytest.approx(100 * (others + 0.4) / 15)
    assert figures["mean_error"] == pytest.approx(100 * (13 * 0.5 + 0.3277296) / 15)


def test_the_real_wnids_are_imagenet_s(monkeypatch):
    monkeypatch.undo()
    wnids = main_robustness.imagenet_wnids()
    assert len(wnids) == len(set(wnids)) == 1000 and wnids == sorted(wnids)
    tench, retriever, tissue = wnids[0], wnids[207], wnids[999]
    assert (tench, retriever, tissue) == ("n01440764", "n02099601", "n15075141")
    sizes = {name: (b.num_images, b.num_classes, b.restricted) for name, b in main_robustness.BENCHMARKS.items()}
    assert sizes == {
        "imagenet": (50_000, 1000, False),
        "imagenet_a": (7_500, 200, True),
        "imagenet_r": (30_000, 200, True),
        "imagenet_sketch": (50_889, 1000, False),
        "imagenet_c": (50_000, 1000, False),
    }


class ChoosesByBrightness(torch.nn.Module):
    """Class 0, which is not in the subset, has the highest logit; then comes the class that the brightness names."""

    def forward(self, imgs):
        levels = (imgs.mean(dim=(1, 2, 3)) / 20).round().long()  # [B], 0..11
        logits = 5.0 * torch.nn.functional.one_hot(levels, len(WNIDS))
        logits[:, 0] = torch.where(levels == 5, 4.0, 6.0)
        return logits


@pytest.mark.parametrize(
    ("name", "figures"),
    [("imagenet_a", {"top1": 50.0, "top1_unrestricted": 25.0}), ("imagenet_sketch", {"top1": 25.0})],
)
def test_top1_against_a_hand_computed_case(tmp_path, name, figures):
    """Of four images two name the right class of the subset, one of them only where class 0 is left out.

    It is left out for ImageNet-A, but not for a Sketch that lacks its folder.
    """
    for i, level in zip((1, 4, 5, 10), (1, 10, 5, 5), strict=True):
        (tmp_path / WNIDS[i]).mkdir()
        Image.new("RGB", (32, 32), (20 * level,) * 3).save(tmp_path / WNIDS[i] / "0.png")
    part = main_robustness.check_part(Part(name, str(tmp_path)), WNIDS, True)
    settings, as_they_are = dict(input_size=32, crop_pct=1.0), Normalize((0.0,) * 3, (1 / 255,) * 3)
    context = EvalContext(as_they_are, nullcontext, batch_size=64, num_workers=0)
    result = main_robustness.evaluate_part(part, ChoosesByBrightness(), WNIDS, settings, context)
    assert {key: value for key, value in result.items() if key.startswith("top1")} == figures
    assert result["incomplete"] and (result["num_images"], result["num_classes"]) == (4, 4)


def test_imagenet_c_is_not_resized(twins):
    """At the model's own size the view of ImageNet-C gives the file's bytes."""
    path = next((twins / "imagenet_c" / "fog" / "3").glob("*/*.JPEG"))
    img = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
    assert torch.equal(ResizeCenterCrop(32, 1.0)(img), img)
    assert not torch.equal(ResizeCenterCrop(32)(img), img)


# ------------------------------------------------------------------------------------------------------------- a run


@pytest.fixture(scope="session")
def whole(twins, classifier, tmp_path_factory):
    """A finished evaluation on everything: (its folder, its results)."""
    output_dir = tmp_path_factory.mktemp("whole")
    with MonkeyPatch.context() as patch:
        make_small(patch)
        return output_dir, evaluate(classifier[0], output_dir, twins, " ".join(SIZES))


def test_every_figure_is_the_slow_one(twins, classifier, whole):
    model, summary = classifier[1], whole[1]["summary"]
    usual, view = ResizeCenterCrop(32), ResizeCenterCrop(32, 1.0)
    for name in ("imagenet_a", "imagenet_r"):
        assert summary[name]["top1"] == pytest.approx(slow_top1(model, twins / name, usual, SUBSET))
        assert summary[name]["top1_unrestricted"] == pytest.approx(slow_top1(model, twins / name, usual))
    assert summary["imagenet"]["top1"] == pytest.approx(slow_top1(model, twins / "imagenet" / "val", usual))
    assert summary["imagenet_sketch"]["top1"] == pytest.approx(slow_top1(model, twins / "imagenet_sketch", usual))
    fog = [100 - slow_top1(model, twins / "imagenet_c" / "fog" / str(s), view) for s in range(1, 6)]
    assert summary["imagenet_c"]["ce"]["fog"] == pytest.approx(sum(fog) / 5 / ALEXNET_ERRORS["fog"])
    assert len({r["top1"] for r in whole[1]["parts"].values()}) > 3  # the figures could differ


def test_tables_and_results(whole):
    output_dir, content = whole
    assert len(content["parts"]) == 4 + 15 and len(content["sha256"]) == 64
    assert content["settings"]["precision"] == "fp32" and content["settings"]["input_size"] == 32
    assert not any(s["incomplete"] for s in content["summary"].values())
    summary = content["summary"]["imagenet_c"]
    assert summary["published_protocol"].startswith("mCE") and summary["num_images"] == 180
    text = (output_dir / "robustness.md").read_text()
    first, second = text.split("\n\n")
    for table in (first, second.rstrip("\n")):
        assert len({len(line) for line in table.splitlines()}) == 1  # aligned
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["ImageNet-C", "mCE, AlexNet's is 100", f"{summary['mce']:.2f}", "180"] in lines
    assert ["ImageNet-C", "mean error, un-normalised", f"{summary['mean_error']:.2f}", "180"] in lines
    assert ["ImageNet-A", "top-1 among its 4 classes", f"{content['summary']['imagenet_a']['top1']:.2f}", "12"] in lines
    assert ["fog", f"{summary['ce']['fog']:.2f}", f"{summary['errors']['fog']:.2f}"] in lines
    assert len(second.splitlines()) == 2 + 3 + 1


def test_finished_parts_are_skipped(twins, classifier, whole, tmp_path, capsys, monkeypatch):
    """Killed in the middle of ImageNet-C: what was scored is kept, and the rest gives the undisturbed result."""
    score, scored = main_robustness.evaluate_images, []

    def counting(model, images, *args, **kwargs):
        scored.append(str(images.root))
        if len(scored) == 8:
            raise KeyboardInterrupt
        return score(model, images, *args, **kwargs)

    monkeypatch.setattr(main_robustness, "evaluate_images", counting)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate(classifier[0], out, twins, "imagenet_a imagenet_c")
    assert len(json.loads((out / "robustness.json").read_text())["parts"]) == 7
    assert (out / ".progress").read_text() == "7\n"  # what the SLURM job's script looks at
    assert not (out / "robustness.md").exists()
    content = evaluate(classifier[0], out, twins, "imagenet_a imagenet_c")
    assert len(scored) == 8 + 16 - 7 and len(set(scored)) == 16
    assert "already holds 7 of 16 parts" in capsys.readouterr().out
    assert content["summary"] == {name: whole[1]["summary"][name] for name in ("imagenet_a", "imagenet_c")}
    content = evaluate(classifier[0], out, twins, "imagenet_r")  # the same table, one set more
    assert len(scored) == 18 and list(content["summary"]) == ["imagenet_a", "imagenet_r", "imagenet_c"]


def test_results_of_something_else_are_not_touched(twins, classifier, tmp_path, fails):
    out = tmp_path / "out"
    evaluate(classifier[0], out, twins, "imagenet_a")
    before = (out / "robustness.json").read_bytes()
    write_classifier(tmp_path / "other", seed=1)
    shutil.copytree(twins / "imagenet_a", tmp_path / "imagenet_a")
    for folder, data, flags, message in (
        (tmp_path / "other", twins, "", "holds other results (checkpoint was"),
        (classifier[0], twins, "--crop_pct 1", "crop_pct was None and now is 1.0"),
        (classifier[0], twins, "--precision bf16", "precision was fp32"),
        (classifier[0], twins, "--mean 0 0 0", "mean was"),
        (classifier[0], tmp_path, "", "imagenet_a was 12 images of 4 classes in"),
    ):
        found = fails(folder, out, data, "imagenet_a", *flags.split())
        assert message in found and "choose another --output_dir" in found
    assert (out / "robustness.json").read_bytes() == before
    for text in ("{", "[]", '{"sha256": "0"}', '{"sha256": "0", "settings": {}, "parts": {"imagenet_a": {}}}'):
        (out / "robustness.json").write_text(text)
        assert "is no result of this program" in fails(classifier[0], out, twins, "imagenet_a")


def test_incomplete_sets_are_marked_and_scored_on_the_right_columns(twins, classifier, tmp_path, fails):
    for name in ("imagenet_sketch", "imagenet_c", "imagenet_a"):
        shutil.copytree(twins / name, tmp_path / name)
    shutil.rmtree(tmp_path / "imagenet_sketch" / WNIDS[0])  # all labels move by one
    shutil.rmtree(tmp_path / "imagenet_c" / "fog" / "3" / WNIDS[2])
    shutil.rmtree(tmp_path / "imagenet_a" / SUBSET[1])
    (tmp_path / "imagenet_a" / SUBSET[0] / "0.JPEG").unlink()
    sets, (folder, model) = "imagenet_a imagenet_sketch imagenet_c", classifier
    assert "--allow_incomplete scores it anyway" in fails(folder, tmp_path / "out", tmp_path, sets)
    content = evaluate(folder, tmp_path / "out", tmp_path, sets, "--allow_incomplete")
    view, a, sketch = ResizeCenterCrop(32), *(content["summary"][n] for n in ("imagenet_a", "imagenet_sketch"))
    assert sketch["top1"] == pytest.approx(slow_top1(model, tmp_path / "imagenet_sketch", view))
    assert a["top1"] == pytest.approx(slow_top1(model, tmp_path / "imagenet_a", view, [SUBSET[i] for i in (0, 2, 3)]))
    assert a["incomplete"] and (a["num_images"], a["official_num_images"], a["num_classes"]) == (8, 12, 3)
    parts = content["parts"]
    marked = [name for name, r in parts.items() if r["incomplete"]]
    assert marked == ["imagenet_a", "imagenet_sketch", "imagenet_c/fog/3"]
    fog = slow_top1(model, tmp_path / "imagenet_c" / "fog" / "3", ResizeCenterCrop(32, 1.0))
    assert parts["imagenet_c/fog/3"]["top1"] == pytest.approx(fog)
    text = (tmp_path / "out" / "robustness.md").read_text()
    assert "22 of 24, 11 of 12 classes: INCOMPLETE" in text and "179 of 180, 11 of 12 classes: INCOMPLETE" in text
    assert "top-1 among its 3 classes" in text


def test_a_foreign_checkpoint_has_no_class_list(twins, classifier, whole, tmp_path):
    torch.save(classifier[1].state_dict(), tmp_path / "official.pth")
    content = evaluate(tmp_path / "official.pth", tmp_path / "out", twins, "imagenet_r")
    assert content["summary"]["imagenet_r"] == whole[1]["summary"]["imagenet_r"]


def _evaluate_as(rank, argv):
    with MonkeyPatch.context() as patch:
        make_small(patch)
        place = Process(torch.device("cpu"), rank, 2, 2)
        patch.setattr(distributed, "init_process", lambda *_, **__: place)
        patch.setattr(distributed, "shut_down", lambda: None)
        patch.setattr(Parser, "exit", lambda parser, status=0, message=None: pytest.fail(message))
        try:
            main_robustness.main(argv)
        except pytest.fail.Exception as error:
            return {"error": str(error)}
        collectives.run_on_rank0(lambda: None)  # has written it
        results = Path(argv[argv.index("--output_dir") + 1]) / "robustness.json"
        return {"parts": json.loads(results.read_text())["parts"]}


def _evaluate_twice(rank, good, bad):
    return [_evaluate_as(rank, good)["parts"], _evaluate_as(rank, bad)["error"]]


def test_two_processes_agree(twins, classifier, whole, tmp_path):
    """They share the images, skip the same parts, and both hear of a mistake; one writes."""
    evaluate(classifier[0], tmp_path / "out", twins, "imagenet_r")
    good = arguments(classifier[0], tmp_path / "out", twins, "imagenet_a imagenet_r imagenet_sketch", "--batch_size", 5)
    bad = arguments(classifier[0], tmp_path / "out", tmp_path, "imagenet_a")
    (first, error), (second, same_error) = run_in_two_processes(_evaluate_twice, good, bad)
    expected = {name: whole[1]["parts"][name] for name in ("imagenet_a", "imagenet_r", "imagenet_sketch")}
    assert first == second == expected
    assert error == same_error and "is not a folder" in error
    assert json.loads((tmp_path / "out" / "robustness.json").read_text())["parts"] == first


# --------------------------------------------------------------------------------------------------------- bad input


def without(*path):
    """Removes a part of a data set."""

    def spoil(root):
        place = root.joinpath(*path)
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return spoil


def with_fog_missing(root):
    for severity in "245":
        without("imagenet_c", "fog", severity)(root)


def with_another_class(root):
    (root / "imagenet_a" / SUBSET[0]).rename(root / "imagenet_a" / "tench")


def with_an_empty_class(root):
    for path in (root / "imagenet_r" / SUBSET[2]).iterdir():
        path.unlink()


def with_a_text(root):
    (root / "imagenet_r" / SUBSET[2] / "0.JPEG").write_text("hello")


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("imagenet_a", without("imagenet_a"), "imagenet_a' is not a folder"),
        ("imagenet", without("imagenet", "val"), "lacks 1 of its 1 folders: val"),
        ("imagenet_a", with_another_class, "has 1 folders that are no class of ImageNet-1k: tench"),
        (
            "imagenet_r",
            without("imagenet_r", SUBSET[2]),
            "has 6 images of 3 classes, ImageNet-R has 8 of 4; --allow_incomplete scores it anyway",
        ),
        (
            "imagenet_a",
            lambda root: write_set(root / "imagenet_a", WNIDS[:1], 1, 0),
            "has 5 class folders, ImageNet-A has 4",
        ),
        (
            "imagenet_sketch",
            without("imagenet_sketch", WNIDS[3], "1.JPEG"),
            "has 23 images of 12 classes, ImageNet-Sketch has 24 of 12; --allow_incomplete",
        ),
        ("imagenet_sketch", without("imagenet_sketch", WNIDS[3]), f"of 12 (missing: {WNIDS[3]}); "),
        ("imagenet_c", with_fog_missing, "lacks 3 of its 15 folders: fog/2, fog/4, fog/5"),
        (
            "imagenet_c",
            without("imagenet_c", "snow", "5", WNIDS[3]),
            f"/snow/5' has 11 images of 11 classes, ImageNet-C has 12 of 12 (missing: {WNIDS[3]})",
        ),
        ("imagenet_r", with_an_empty_class, f"no valid file for the classes {SUBSET[2]}"),
        ("imagenet_r", with_a_text, "0.JPEG' is not a readable image"),
    ],
)
def test_bad_sets_are_named_before_anything_is_scored(twins, classifier, tmp_path, fails, name, spoil, message):
    shutil.copytree(twins / name, tmp_path / name)
    spoil(tmp_path)
    flags = ["--allow_incomplete"] if spoil is with_fog_missing else []  # a severity that is missing is no small set
    found = fails(classifier[0], tmp_path / "out", tmp_path, name, *flags)
    assert message in found and "--data_path" not in found


def test_bad_flags_and_checkpoints(twins, classifier, tmp_path, capsys, fails):
    write_classifier(tmp_path / "ten", WNIDS[:10])
    write_classifier(tmp_path / "cats", [*WNIDS[:11], "n99999999"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    good = classifier[0]
    for resume, sets, flags, message in (
        (tmp_path / "ten", "imagenet_a", "", "has 10 classes, ImageNet-1k 12"),
        (tmp_path / "cats", "imagenet_a", "", "12 classes, ImageNet-1k 12; only one of them has n00000033, n99999999"),
        (good, "", "", "nothing to evaluate on: give at least one of --imagenet, --imagenet_a"),
        (tmp_path / "nowhere.pth", "imagenet_a", "", "nowhere.pth' does not exist: give a checkpoint"),
        (good, "imagenet_a", "--batch_size 0", "--batch_size must be at least 1, got 0"),
        (good, "imagenet_a", "--crop_pct 2", "crop_pct must lie in (0, 1], got 2.0"),
        (good, "imagenet_a", "--output_dir {tmp}/file", "cannot be written to"),
    ):
        assert message in fails(
            resume, tmp_path / "out", twins, sets, *(word.format(tmp=tmp_path) for word in flags.split())
        )
    message = fails(tmp_path / "empty", tmp_path / "out", twins, "imagenet_a", code=4)
    assert "holds no intact checkpoint" in message
    message = refused(capsys, main_robustness.main, "--imagenet_a", twins)
    assert "the following arguments are required: --resume" in message


def test_a_broken_image_keeps_what_was_scored(twins, classifier, tmp_path, capsys):
    shutil.copytree(twins / "imagenet_r", tmp_path / "imagenet_r")
    shutil.copytree(twins / "imagenet_a", tmp_path / "imagenet_a")
    broken = tmp_path / "imagenet_r" / SUBSET[3] / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:-200])  # its header is good
    with pytest.raises(SystemExit) as stop:
        evaluate(classifier[0], tmp_path / "out", tmp_path, "imagenet_a imagenet_r", "--num_workers", 1)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "1.JPEG' cannot be decoded" in message and message.count("\n") == 1
    assert list(json.loads((tmp_path / "out" / "robustness.json").read_text())["parts"]) == ["imagenet_a"]


def test_flags_are_frozen():
    """Users' scripts depend on these names: a removal or renaming must be deliberate."""
    flags = {action.dest for action in main_robustness.get_args_parser()._actions} - {"help"}
    assert flags == set(
        "resume imagenet imagenet_a imagenet_r imagenet_sketch imagenet_c allow_incomplete crop_pct mean "  # noqa: SIM905
        "std output_dir batch_size num_workers device precision".split()
    )
