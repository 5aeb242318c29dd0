"""`main_finetune.py --eval`: evaluates the classifier at --resume on its own data, or on a published test set."""

import argparse
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

from encoders.trained import Trained, note_on_view
from engine_finetune import evaluate_images
from util import collectives
from util.collectives import print_on_rank0
from util.data.images import FolderImages, Images, Reading
from util.data.open import open_everywhere
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import ResizeCenterCrop
from util.evaluate import robustness
from util.evaluate.context import context_of_flags
from util.evaluate.results import Evaluation, ResultsFile, accuracy_text, finish_evaluation
from util.evaluate.robustness import summarise
from util.run.files import checkpoint
from util.run.files.record import INVALID_SETTINGS, CheckpointInfo, without_marks
from util.run.processes.distributed import Process, precision
from util.run.start.plan import check_same
from util.text import count_of

MODEL_FLAGS = ("model", "input_size", "patch_size", "in_chans", "nb_classes", "global_pool")


def settings_of_eval(args: argparse.Namespace, given: Set[str], classifier: Trained) -> dict[str, Any]:
    """Returns the classifier's settings, with the values of flags in place of its own.

    given: flags that were set explicitly. ValueError if one of them contradicts the model or has no effect.
    """
    settings = dict(classifier.settings)
    for name in ("crop_pct", "mean", "std"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    if args.all_valid:
        settings = without_marks(settings)
    for name in given & set(INVALID_SETTINGS):
        settings[name] = getattr(args, name)
    if args.eval_set == "imagenet_c":  # whose images are cropped already: resizing would blur what is measured
        if "crop_pct" in given:
            raise ValueError("--crop_pct has no effect, because of --eval_set imagenet_c: leave it out")
        settings["crop_pct"] = 1.0
    check_same(args, settings, given & set(MODEL_FLAGS), f"the classifier at {args.resume!r}")
    return settings


def open_split(args: argparse.Namespace, settings: Mapping[str, Any], info: CheckpointInfo) -> Images:
    """Opens the images of --eval_split. ValueError unless they have the classes of the classifier."""
    images = open_everywhere(args, args.eval_split, labelled=True, pixel_settings=settings)
    if info.classes:
        images.use_classes(info.classes, "the checkpoint")
    elif len(images.classes) != settings["nb_classes"]:
        raise ValueError(
            f"the head of {args.resume!r} has {settings['nb_classes']} classes, the data {len(images.classes)}"
        )
    return images


def make_score(
    args: argparse.Namespace, classifier: Trained, settings: Mapping[str, Any], pixels: PixelFormat, process: Process
) -> Callable[..., dict[str, float]]:
    """Returns `score(images, columns=None)`, which evaluates the classifier on images of this format."""
    print_on_rank0(*note_on_view(settings, args.resume))
    view = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], args.loader == "reference")
    context = context_of_flags(args, process, normalizer(settings, pixels), args.batch_size or 64)
    return partial(evaluate_images, classifier.model.to(process.device), transform=view, context=context)


def evaluate_split(
    args: argparse.Namespace,
    classifier: Trained,
    settings: Mapping[str, Any],
    images: Images,
    process: Process,
    output_dir: Path | None,
) -> dict[str, float]:
    """Evaluates a classifier on the images of `open_split`. Returns the scores."""
    scores = make_score(args, classifier, settings, images.pixel_format, process)(images)
    print_on_rank0(*images.notes)
    where = f"{count_of(len(images), 'image')} in {images.root}"
    line = f"{accuracy_text(scores, digits=3)}, loss {scores['loss']:.4f} on {where}"
    result = Evaluation(scores, details={"data": str(images.root)})
    finish_evaluation(result, line, output_dir, args.resume, classifier.weights.info.step)
    return scores


def evaluate_set(
    args: argparse.Namespace,
    classifier: Trained,
    settings: Mapping[str, Any],
    process: Process,
    output_dir: Path | None,
) -> dict[str, float]:
    """Evaluates a classifier of ImageNet on the test set --eval_set at --data_path. settings: of `settings_of_eval`."""
    wnids = classifier.weights.info.classes or robustness.wnids_of()
    if settings["nb_classes"] != len(wnids) or settings["in_chans"] != RGB8.channels:
        raise ValueError(f"--eval_set {args.eval_set} needs a classifier of ImageNet, and {args.resume!r} is none")
    folders = collectives.run_on_rank0(lambda: robustness.find_folders(args.eval_set, args.data_path))
    score = make_score(args, classifier, settings, RGB8, process)

    def score_folder(folder: Path) -> dict[str, float]:
        images = FolderImages(folder, labelled=True, reading=Reading(use_pillow=args.loader == "reference"))
        return score(images, columns=robustness.find_columns(args.eval_set, images.classes, wnids))

    if args.eval_set == "imagenet_c":
        protocol = {name: settings.get(name) for name in ("input_size", "mean", "std")}
        protocol["precision"] = precision(args.precision, process.device).name
        protocol["loader"] = args.loader
        protocol["data_path"] = str(Path(args.data_path).resolve())
        return evaluate_corruptions(Path(classifier.weights.path), protocol, folders, score_folder, output_dir)
    scores = score_folder(folders[args.eval_set])
    line = f"{args.eval_set}: {accuracy_text(scores)} on {count_of(int(scores['num_images']), 'image')}"
    finish_evaluation(Evaluation(scores), line, output_dir, args.resume, classifier.weights.info.step)
    return scores


def evaluate_corruptions(
    weights: Path,
    protocol: Mapping[str, Any],
    folders: Mapping[str, Path],
    score: Callable[[Path], dict[str, float]],
    output_dir: Path | None,
) -> dict[str, float]:
    """Evaluates a classifier on the folders of ImageNet-C, with `score`. Each result is saved, and none is repeated."""
    if output_dir is None:
        raise ValueError("--eval_set imagenet_c takes hours and continues after a stop: give --output_dir")
    sha256 = collectives.run_on_rank0(lambda: checkpoint.recorded_sha256(weights))
    path = output_dir / robustness.RESULTS
    results = ResultsFile(path, str(weights), sha256, protocol, lambda parts: {"imagenet_c": summarise(parts)})
    for name, folder in folders.items():
        if name not in results.parts:
            results.add(name, score(folder))
            print_on_rank0(f"{name}: {accuracy_text(results.parts[name])}")
    figures = summarise(results.parts)
    for corruption, error in figures["ce"].items():
        print_on_rank0(f"{corruption:<18} CE {error:.2f} %, error {figures['errors'][corruption]:.2f} %")
    print_on_rank0(f"mCE {figures['mce']:.2f} % (AlexNet's is 100), mean error {figures['mean_error']:.2f} %")
    print_on_rank0(f"all scores: {results.path}")
    return figures
