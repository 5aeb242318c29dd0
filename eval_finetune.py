"""`main_finetune.py --eval`: evaluates the classifier at --resume on its own data, or on a published test set."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from encoders.trained import Trained, load, note_on_view
from engine_finetune import evaluate_images
from util import collectives
from util.data.images import FolderImages
from util.data.open import open_everywhere
from util.data.pixel_format import RGB8
from util.data.statistics import normalizer
from util.data.transforms import ResizeCenterCrop
from util.evaluate import robustness
from util.evaluate.results import Evaluation, accuracy_text
from util.evaluate.session import Session, session_of_eval
from util.run.cli import Parser
from util.run.files.record import INVALID_SETTINGS, without_marks
from util.run.processes.distributed import precision
from util.run.start.plan import check_same
from util.run.start.resume import find_encoder
from util.text import count_of

MODEL_FLAGS = ("model", "input_size", "patch_size", "in_chans", "nb_classes", "global_pool")


def evaluate_at_resume(parser: Parser, args: argparse.Namespace) -> dict[str, float]:
    """Evaluates the classifier at --resume on --eval_split, or on --eval_set. Returns the scores."""
    given = set(parser.given)
    with session_of_eval(parser, args, given, "this program, of MAE or of timm") as session:
        classifier = load(args.resume, "classification")
        settings = settings_of_eval(args, given, classifier)
        session.print(*note_on_view(settings, args.resume))
        if args.eval_set is None:
            return evaluate_split(args, classifier, settings, session)
        return evaluate_set(args, classifier, settings, session)


def settings_of_eval(args: argparse.Namespace, given: set[str], classifier: Trained) -> dict[str, Any]:
    """Returns the classifier's settings, with the values of flags in place of its own.

    given: flags that were set explicitly. ValueError if one of them contradicts the model or has no effect.
    """
    settings = dict(classifier.settings)
    for name in ("crop_pct", "mean", "std"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    if args.all_valid:
        settings = without_marks(settings)
    for name in given.intersection(INVALID_SETTINGS):
        settings[name] = getattr(args, name)
    unused = set()
    if args.eval_set is not None:
        unused = {"eval_split", *INVALID_SETTINGS}
    if args.eval_set == "imagenet_c":  # whose images are cropped already: resizing would blur what is measured
        unused.add("crop_pct")
        settings["crop_pct"] = 1.0
    unused_and_given = sorted(unused & given)
    if unused_and_given:
        raise ValueError(f"--{unused_and_given[0]} has no effect, because of --eval_set {args.eval_set}: leave it out")
    check_same(args, settings, given.intersection(MODEL_FLAGS), f"the classifier at {args.resume!r}")
    return settings


def evaluate_split(
    args: argparse.Namespace, classifier: Trained, settings: Mapping[str, Any], session: Session
) -> dict[str, float]:
    """Evaluates a classifier on --eval_split of the data. settings: of `settings_of_eval`."""
    view = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], args.loader == "reference")
    images = open_everywhere(args, args.eval_split, labelled=True, pixel_settings=settings)
    info = classifier.weights.info
    if info.classes:
        images.use_classes(info.classes, "the checkpoint")
    elif len(images.classes) != settings["nb_classes"]:
        raise ValueError(
            f"the head of {args.resume!r} has {settings['nb_classes']} classes, the data {len(images.classes)}"
        )
    context = session.make_context(args, normalizer(settings, images.pixel_format), args.batch_size or 64)
    scores = evaluate_images(classifier.model.to(context.device), images, view, context)
    session.print(*images.notes)
    where = f"{count_of(len(images), 'image')} in {images.root}"
    line = f"{accuracy_text(scores, digits=3)}, loss {scores['loss']:.4f} on {where}"
    session.finish(Evaluation(scores, details={"data": str(images.root)}), line, args.resume, info.step)
    return scores


def evaluate_set(
    args: argparse.Namespace, classifier: Trained, settings: Mapping[str, Any], session: Session
) -> dict[str, float]:
    """Evaluates a classifier of ImageNet on the test set --eval_set at --data_path. settings: of `settings_of_eval`."""
    wnids = classifier.weights.info.classes or robustness.wnids_of()
    if settings["nb_classes"] != len(wnids) or settings["in_chans"] != RGB8.channels:
        raise ValueError(f"--eval_set {args.eval_set} needs a classifier of ImageNet, and {args.resume!r} is none")
    folders = collectives.run_on_rank0(lambda: robustness.find_folders(args.eval_set, args.data_path))
    view = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], args.loader == "reference")
    context = session.make_context(args, normalizer(settings, RGB8), args.batch_size or 64)
    model = classifier.model.to(context.device)

    def score(folder: Path) -> dict[str, float]:
        images = FolderImages(folder, labelled=True, use_pillow=args.loader == "reference")
        columns = robustness.find_columns(args.eval_set, images.classes, wnids)
        return evaluate_images(model, images, view, context, columns)

    if args.eval_set == "imagenet_c":
        return evaluate_corruptions(args, settings, session, folders, score)
    scores = score(folders[args.eval_set])
    line = f"{args.eval_set}: {accuracy_text(scores)} on {count_of(int(scores['num_images']), 'image')}"
    session.finish(Evaluation(scores), line, args.resume, classifier.weights.info.step)
    return scores


def evaluate_corruptions(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    session: Session,
    folders: Mapping[str, Path],
    score: Callable[[Path], dict[str, float]],
) -> dict[str, float]:
    """Evaluates a classifier on the folders of ImageNet-C, with `score`. Each result is saved, and none is repeated."""
    if session.output_dir is None:
        raise ValueError("--eval_set imagenet_c takes hours and continues after a stop: give --output_dir")
    weights = collectives.run_on_rank0(lambda: find_encoder(args.resume, False, "resume"))
    assert weights is not None
    protocol = {name: settings.get(name) for name in ("input_size", "mean", "std")}
    protocol["precision"] = precision(args.precision, session.process.device).name
    protocol["loader"] = args.loader
    protocol["data_path"] = str(Path(args.data_path).resolve())
    results = robustness.open_results(session.output_dir / robustness.RESULTS, weights.path, weights.sha256, protocol)
    for name in results.missing(folders):
        results.add(name, score(folders[name]))
        session.print(f"{name}: {accuracy_text(results.parts[name])}")
    figures = robustness.summarise(results.parts)
    for corruption, error in figures["ce"].items():
        session.print(f"{corruption:<18} CE {error:.2f} %, error {figures['errors'][corruption]:.2f} %")
    session.print(f"mCE {figures['mce']:.2f} % (AlexNet's is 100), mean error {figures['mean_error']:.2f} %")
    session.print(f"all scores: {results.path}")
    return figures
