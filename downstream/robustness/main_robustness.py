"""Evaluates an ImageNet-fine-tuned classifier, without further training, on ImageNet-A, -R, -Sketch and -C.

    python downstream/robustness/main_robustness.py --resume output/finetune --imagenet_a DIR --imagenet_r DIR
    torchrun --nproc_per_node 8 downstream/robustness/main_robustness.py --resume output/finetune --imagenet_c DIR

Each set is a folder of class folders named by wnids, as published: DIR/<wnid>/*, and for ImageNet-C
DIR/<corruption>/<1-5>/<wnid>/*. All sets are checked before anything is evaluated. Each result is saved at once: the
same command again continues after the last set (or corruption and severity) that was finished.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.robustness.benchmarks import BENCHMARKS, Benchmark
from encoders.trained import load, note_on_view
from engine_finetune import evaluate_images
from util import collectives
from util.data.images import FolderImages, check_classes, refuse_single_class
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, ResizeCenterCrop
from util.evaluate.loop import EvalContext
from util.evaluate.results import EvaluatedModel, ResultsFile
from util.evaluate.session import evaluation_session
from util.lazy import LazyModule
from util.run.cli import Parser, run_program
from util.run.processes.distributed import PRECISIONS, precision
from util.run.start.resume import find_encoder
from util.tables import markdown_table
from util.text import count_of, shorten
from util.urls import local_path

timm_data = LazyModule("timm.data")

RESULTS = "robustness.json"


# AlexNet's error on each corruption, averaged over severities: Hendrycks and Dietterich (ICLR 2019), with the digits
# of the table in their repository.
ALEXNET_ERRORS = dict(
    gaussian_noise=0.886428,
    shot_noise=0.894468,
    impulse_noise=0.922640,
    defocus_blur=0.819880,
    glass_blur=0.826268,
    motion_blur=0.785948,
    zoom_blur=0.798360,
    snow=0.866816,
    frost=0.826572,
    fog=0.819324,
    brightness=0.564592,
    contrast=0.853204,
    elastic_transform=0.646056,
    pixelate=0.717840,
    jpeg_compression=0.606500,
)
SEVERITIES = (1, 2, 3, 4, 5)


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser("main_robustness.py", description=__doc__)
    flag = parser.add_argument
    flag("--resume", required=True, help="fine-tuned classifier: a checkpoint, or the folder of a fine-tuning run")

    data = parser.add_argument_group("data").add_argument
    for name, benchmark in BENCHMARKS.items():
        holds = "folder with val/<wnid>/*" if name == "imagenet" else f"folder of {benchmark.title}"
        data(f"--{name}", metavar="DIR", type=local_path, help=holds)
    crop = "images are resized to input_size / crop_pct, except in -C (default: .875; 1 above 224 px)"
    data("--crop_pct", type=float, help=crop)
    data("--mean", type=float, nargs=3, help="pixel mean in [0, 1] (default: the checkpoint's, else ImageNet's)")
    data("--std", type=float, nargs=3, help="pixel deviation (default: the checkpoint's, else ImageNet's)")

    run = parser.add_argument_group("run").add_argument
    run(
        "--output_dir",
        changes="nothing",
        default="output/robustness",
        help="folder for robustness.json and robustness.md",
    )
    run("--batch_size", changes="rounding", type=int, default=64, at_least=1, help="images per process and batch")
    run(
        "--num_workers",
        changes="nothing",
        per_process=True,
        type=int,
        at_least=0,
        help="loader processes per process (default: its share of the cores, at most 32)",
    )
    run(
        "--device",
        changes="rounding",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )
    run("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 or fp16 on a GPU, fp32 on a CPU")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags)."""
    parser = get_args_parser()
    return parser, parser.parse_args(argv)


def imagenet_wnids() -> list[str]:
    """Returns the wnids of ImageNet-1k in the order of a classifier's logits."""
    return sorted(timm_data.ImageNetInfo().label_names())


@dataclass(frozen=True)
class Part:
    """What is evaluated and saved at once: a set, or one severity of one corruption."""

    name: str  # "imagenet_a", "imagenet_c/fog/3"
    folder: str

    @property
    def set_name(self) -> str:
        """The name of the set in BENCHMARKS, and of its flag."""
        return self.name.partition("/")[0]

    @property
    def benchmark(self) -> Benchmark:
        """The published set."""
        return BENCHMARKS[self.set_name]

    def __str__(self) -> str:
        return f"{self.benchmark.num_images} images of {self.benchmark.num_classes} classes in {self.folder!r}"

    def open(self) -> FolderImages:
        """Opens the images. A label is a place in their `classes`, which are sorted wnids."""
        try:
            return FolderImages(self.folder, labelled=True)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_path", f"--{self.set_name}")) from error


def corruption_parts(corruption: str) -> list[str]:
    """Returns the names of the parts of one corruption of ImageNet-C, in the order of their severity."""
    return [f"imagenet_c/{corruption}/{severity}" for severity in SEVERITIES]


def find_parts(args: argparse.Namespace, wnids: list[str]) -> list[Part]:
    """Returns all parts that the flags ask for. ValueError if one of them differs from the published set."""
    parts = []
    for name in BENCHMARKS:
        if getattr(args, name) is not None:
            parts += parts_of_set(name, Path(getattr(args, name)))
    if not parts:
        flags = ", ".join(f"--{name}" for name in BENCHMARKS)
        raise ValueError(f"nothing to evaluate on: give at least one of {flags}")
    for part in parts:
        check_part(part, wnids)
    return parts


def parts_of_set(set_name: str, root: Path) -> list[Part]:
    """Returns the parts of a set. ValueError if a folder is missing. root: the flag's value."""
    folders = {set_name: root}
    if set_name == "imagenet":
        folders = {set_name: root / "val"}
    elif set_name == "imagenet_c":
        folders = {}
        for corruption in ALEXNET_ERRORS:
            for name in corruption_parts(corruption):
                folders[name] = root / name.removeprefix("imagenet_c/")
    missing = [str(folder) for folder in folders.values() if not folder.is_dir()]
    if missing:
        raise ValueError(
            f"--{set_name} {str(root)!r} lacks {len(missing)} of its {len(folders)} folders: {shorten(missing)}"
        )
    return [Part(name, str(folder.resolve())) for name, folder in folders.items()]


def check_part(part: Part, wnids: list[str]) -> None:
    """ValueError unless the part has the classes and the number of images that were published."""
    images = part.open()
    refuse_single_class(images)
    images.num_checked = 200  # there are many parts
    images.check()
    unknown = sorted(set(images.classes) - set(wnids))
    if unknown:
        raise ValueError(
            f"--{part.set_name} {part.folder!r} has {len(unknown)} folders that are no class of ImageNet-1k: "
            f"{shorten(unknown, 5)}"
        )
    published = part.benchmark
    if (len(images), len(images.classes)) != (published.num_images, published.num_classes):
        raise ValueError(
            f"--{part.set_name} {part.folder!r} has {len(images)} images of {len(images.classes)} classes, "
            f"{published.title} has {published.num_images} of {published.num_classes}"
        )


def corruption_errors(errors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns CE, mCE and un-normalised errors in percent. errors: of each corruption at severities 1 to 5, in [0, 1].

    CE_c = mean_s E_cs / AlexNet's mean_s E_cs. mCE is the mean over the 15 corruptions (Hendrycks and Dietterich,
    ICLR 2019).
    """
    means = {}
    ce = {}
    for corruption, alexnet_error in ALEXNET_ERRORS.items():
        mean = sum(errors[corruption]) / len(errors[corruption])
        means[corruption] = mean
        ce[corruption] = 100 * mean / alexnet_error
    return {
        "mce": sum(ce.values()) / len(ce),
        "mean_error": 100 * sum(means.values()) / len(means),
        "ce": ce,
        "errors": {corruption: 100 * mean for corruption, mean in means.items()},
    }


def summarise(parts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns {set: its figures}. ImageNet-C is included once all its parts are there."""
    summary: dict[str, dict[str, Any]] = {}
    for set_name in BENCHMARKS:
        if set_name in parts:
            scores = parts[set_name]
            summary[set_name] = {name: value for name, value in scores.items() if name.startswith("top1")}
    errors: dict[str, list[float]] = {}
    for corruption in ALEXNET_ERRORS:
        names = corruption_parts(corruption)
        if not parts.keys() >= set(names):
            return summary
        errors[corruption] = [1 - parts[name]["top1"] / 100 for name in names]
    summary["imagenet_c"] = corruption_errors(errors)
    return summary


def report(summary: Mapping[str, dict[str, Any]], num_classes: int) -> str:
    """Returns the tables in Markdown. num_classes: of the classifier."""
    rows: list[list[Any]] = []
    for set_name, figures in summary.items():
        benchmark = BENCHMARKS[set_name]
        if set_name == "imagenet_c":
            metrics = {
                "mCE, AlexNet's is 100": "mce",
                "mean error, un-normalised": "mean_error",
            }
        elif benchmark.restricted:
            metrics = {
                f"top-1 among its {benchmark.num_classes} classes": "top1",
                f"top-1 among all {num_classes} classes": "top1_unrestricted",
            }
        else:
            metrics = {"top-1": "top1"}
        for metric, name in metrics.items():
            rows.append([benchmark.title, metric, figures[name]])
    text = results_table(["set", "metric", "%"], rows)
    if "imagenet_c" in summary:
        figures = summary["imagenet_c"]
        errors = figures["errors"]
        rows = [[corruption, ce, errors[corruption]] for corruption, ce in figures["ce"].items()]
        rows.append(["mean", figures["mce"], figures["mean_error"]])
        text += "\n" + results_table(["ImageNet-C", "CE, %", "mean error, %"], rows)
    return text


def results_table(titles: list[str], rows: list[list[Any]]) -> str:
    """Returns a Markdown table. Floats get two digits."""
    cells = []
    for row in rows:
        cells.append([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row])
    return markdown_table(titles, cells, pad=True) + "\n"


def load_wnid_classifier(path: str, args: argparse.Namespace, wnids: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Returns (model, settings). ValueError if the classifier's logits are not the classes of ImageNet-1k."""
    classifier = load(path, "classification")
    settings = dict(classifier.settings)
    for name in ("crop_pct", "mean", "std"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    pixels = PixelFormat(settings["in_chans"], settings["pixels"] or RGB8.dtype)
    if pixels != RGB8:
        raise ValueError(f"{path!r} classifies images with {pixels}, but these sets are RGB images of 8 bits")
    if settings["nb_classes"] != len(wnids):
        raise ValueError(
            f"the head of {path!r} has {settings['nb_classes']} classes, ImageNet-1k {len(wnids)}: "
            f"these sets need a classifier that was fine-tuned on ImageNet-1k"
        )
    check_classes(classifier.weights.info.classes or wnids, wnids, repr(path), "ImageNet-1k")
    return classifier.model, settings


def evaluate_part(
    part: Part,
    model: nn.Module,
    wnids: list[str],
    settings: Mapping[str, Any],
    context: EvalContext,
) -> dict[str, Any]:
    """Returns the part's entry in the results: top-1 in percent by the published protocol, and others."""
    images = part.open()
    # ImageNet-C was resized and cropped before it was corrupted: resizing it again would blur what is measured.
    crop_pct = 1.0 if part.set_name == "imagenet_c" else settings["crop_pct"]
    view = ResizeCenterCrop(settings["input_size"], crop_pct)
    columns = None
    if images.classes != wnids:
        columns = [wnids.index(wnid) for wnid in images.classes]
    scores = evaluate_images(model, images, view, context, columns)
    result: dict[str, Any] = {"top1": scores["top1"], "num_images": len(images), "source": str(part)}
    if part.benchmark.restricted:
        result["top1_unrestricted"] = scores["top1_unrestricted"]
    return result


def settings_of(classifier: Mapping[str, Any], precision_name: str) -> dict[str, Any]:
    """Returns everything that the results depend on, beside weights and images. classifier: its settings."""
    ResizeCenterCrop(classifier["input_size"], classifier["crop_pct"])  # ValueError now rather than later
    return {
        "input_size": classifier["input_size"],
        "crop_pct": classifier["crop_pct"],
        "mean": list(classifier["mean"] or IMAGENET_MEAN),
        "std": list(classifier["std"] or IMAGENET_STD),
        "precision": precision_name,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Checks all sets that the flags name, then evaluates what is not done yet."""
    parser, args = parse_args(argv)
    with evaluation_session(parser, args, args.output_dir) as session:
        process = session.process
        wnids = imagenet_wnids()
        weights = collectives.run_on_rank0(lambda: find_encoder(args.resume, False, "resume"))
        assert weights is not None
        model, classifier_settings = load_wnid_classifier(weights.path, args, wnids)
        precision_name = precision(args.precision, process.device).name
        settings = settings_of(classifier_settings, precision_name)
        normalize = normalizer(classifier_settings, RGB8)
        where = f"{precision_name} on {count_of(process.world_size, 'process')}"
        session.print(f"{weights.path}, {where}; checking the images first")
        session.print(*note_on_view(classifier_settings, weights.path))
        parts = collectives.run_on_rank0(lambda: find_parts(args, wnids))
        results = ResultsFile(
            Path(args.output_dir) / RESULTS,
            EvaluatedModel(weights.path, weights.sha256, settings),
            lambda parts: {"summary": summarise(parts)},
            sources={part.name: str(part) for part in parts},
        )
        missing = results.missing([part.name for part in parts])
        model = model.to(process.device)
        context = session.make_context(args, normalize, args.batch_size)
        for part in parts:
            if part.name not in missing:
                continue
            begin = time.perf_counter()
            result = evaluate_part(part, model, wnids, settings, context)
            results.add(part.name, result)
            seconds = time.perf_counter() - begin
            session.print(f"{part.name}: top-1 {result['top1']:.2f} % in {seconds:.0f} s")
        if process.is_main:
            text = report(results.content["summary"], len(wnids))
            table_path = results.path.with_suffix(".md")
            table_path.write_text(text)
            session.print(f"\n{text}\nwritten to {results.path} and {table_path}")


if __name__ == "__main__":
    run_program(main, "main_robustness.py")
