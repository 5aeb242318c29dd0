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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.robustness.benchmarks import BENCHMARKS, Benchmark
from encoders.classifiers import load_classifier
from engine_finetune import evaluate_images
from util import collectives
from util.data.images import FolderImages, check_classes, refuse_single_class
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import check_statistics
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize, ResizeCenterCrop
from util.evaluate.loop import EvalContext
from util.evaluate.results import EvaluatedModel, ResultsFile
from util.evaluate.session import evaluation_session
from util.lazy import LazyModule
from util.run.cli import Parser, run_program
from util.run.distributed import PRECISIONS, precision
from util.run.resume import find_encoder
from util.tables import markdown_table
from util.text import count_of, shorten

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
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--resume", required=True, help="fine-tuned classifier: a checkpoint, or the folder of a fine-tuning run")

    data = parser.add_argument_group("data").add_argument
    for name, benchmark in BENCHMARKS.items():
        holds = "folder with val/<wnid>/*" if name == "imagenet" else f"folder of {benchmark.title}"
        data(f"--{name}", metavar="DIR", help=holds)
    data("--allow_incomplete", action=boolean, default=False, help="also evaluate sets that lack images or classes")
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
        help="loader processes per process (default: its share of the cores, at most 16)",
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


def set_of(part_name: str) -> str:
    """Returns the set of a part: of "imagenet_c/fog/3" it is "imagenet_c"."""
    return part_name.partition("/")[0]


def corruption_parts(corruption: str) -> list[str]:
    """Returns the names of the parts of one corruption of ImageNet-C, in the order of their severity."""
    return [f"imagenet_c/{corruption}/{severity}" for severity in SEVERITIES]


@dataclass(frozen=True)
class Part:
    """What is evaluated and saved at once: a set, or one severity of one corruption."""

    name: str  # "imagenet_a", "imagenet_c/fog/3"
    folder: str
    num_images: int = 0
    num_classes: int = 0

    @property
    def set_name(self) -> str:
        """The name of the set in BENCHMARKS, and of its flag."""
        return set_of(self.name)

    @property
    def benchmark(self) -> Benchmark:
        """The published set."""
        return BENCHMARKS[self.set_name]

    @property
    def incomplete(self) -> bool:
        """Whether images or classes are missing."""
        has_all_images = self.num_images == self.benchmark.num_images
        has_all_classes = self.num_classes == self.benchmark.num_classes
        return not (has_all_images and has_all_classes)

    def __str__(self) -> str:
        return f"{self.num_images} images of {self.num_classes} classes in {self.folder!r}"

    def open(self) -> FolderImages:
        """Opens the images. A label is a place in their `classes`, which are sorted wnids."""
        try:
            return FolderImages(self.folder, labelled=True)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_path", f"--{self.set_name}")) from error


def find_parts(args: argparse.Namespace, wnids: list[str]) -> list[Part]:
    """Returns all parts that the flags ask for. ValueError if one of them differs from the published set."""
    roots = {name: Path(getattr(args, name)) for name in BENCHMARKS if getattr(args, name) is not None}
    if not roots:
        flags = ", ".join(f"--{name}" for name in BENCHMARKS)
        raise ValueError(f"nothing to evaluate on: give at least one of {flags}")
    parts = []
    for name, root in roots.items():
        for part_name, folder in find_folders(name, root).items():
            parts.append(Part(part_name, str(folder.resolve())))
    return [check_part(part, wnids, args.allow_incomplete) for part in parts]


def find_folders(set_name: str, root: Path) -> dict[str, Path]:
    """Returns {name of a part: its folder} of a set. ValueError if a folder is missing. root: the flag's value."""
    if not root.is_dir():
        raise ValueError(f"--{set_name} {str(root)!r} is not a folder")
    folders = {set_name: root}
    if set_name == "imagenet":
        folders = {set_name: root / "val"}
    elif set_name == "imagenet_c":
        folders = {}
        for corruption in ALEXNET_ERRORS:
            for name in corruption_parts(corruption):
                folders[name] = root / name.removeprefix("imagenet_c/")
    missing = [str(folder.relative_to(root)) for folder in folders.values() if not folder.is_dir()]
    if missing:
        raise ValueError(
            f"--{set_name} {str(root)!r} lacks {len(missing)} of its {len(folders)} folders: {shorten(missing, 5)}"
        )
    return folders


def check_part(part: Part, wnids: list[str], allow_incomplete: bool) -> Part:
    """Returns the part with its numbers of images and classes. ValueError if they are not the published ones."""
    published = part.benchmark
    given = f"--{part.set_name} {part.folder!r}"
    images = part.open()
    refuse_single_class(images, "val")
    images.num_checked = 200  # there are many parts
    images.check()
    unknown = sorted(set(images.classes) - set(wnids))
    if unknown:
        raise ValueError(f"{given} has {len(unknown)} folders that are no class of ImageNet-1k: {shorten(unknown, 5)}")
    part = replace(part, num_images=len(images), num_classes=len(images.classes))
    if part.num_classes > published.num_classes:
        raise ValueError(f"{given} has {part.num_classes} class folders, {published.title} has {published.num_classes}")
    if part.incomplete and not allow_incomplete:
        missing = ""
        absent = sorted(set(wnids) - set(images.classes))
        if absent and published.num_classes == len(wnids):
            missing = f" (missing: {shorten(absent, 5)})"
        raise ValueError(
            f"{given} has {part.num_images} images of {part.num_classes} classes, {published.title} has "
            f"{published.num_images} of {published.num_classes}{missing}; --allow_incomplete scores it anyway and "
            "marks the result"
        )
    return part


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
    """Returns {benchmark: its published figure and others}. ImageNet-C is included once all its parts are there."""
    summary: dict[str, dict[str, Any]] = {}
    for set_name, benchmark in BENCHMARKS.items():
        results = {name: result for name, result in parts.items() if set_of(name) == set_name}
        figures = published_figures(set_name, results)
        if figures:
            summary[set_name] = {
                "title": benchmark.title,
                "published_protocol": benchmark.protocol,
                **figures,
                "num_classes": min(result["num_classes"] for result in results.values()),
                "official_num_classes": benchmark.num_classes,
                "num_images": sum(result["num_images"] for result in results.values()),
                "official_num_images": benchmark.num_images * len(results),
                "incomplete": any(result["incomplete"] for result in results.values()),
            }
    return summary


def published_figures(set_name: str, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a set that papers report; none if a part is missing. results: of its parts, by name."""
    if not results:
        return {}
    if set_name != "imagenet_c":
        return {name: value for name, value in results[set_name].items() if name.startswith("top1")}
    errors: dict[str, list[float]] = {}
    for corruption in ALEXNET_ERRORS:
        names = corruption_parts(corruption)
        if not results.keys() >= set(names):
            return {}
        errors[corruption] = [1 - results[name]["top1"] / 100 for name in names]
    return corruption_errors(errors)


def report(summary: Mapping[str, dict[str, Any]], num_classes: int) -> str:
    """Returns the tables in Markdown. num_classes: of the classifier."""
    rows: list[list[Any]] = []
    for entry in summary.values():
        title = entry["title"]
        images = str(entry["num_images"])
        if entry["incomplete"]:
            classes = f"{entry['num_classes']} of {entry['official_num_classes']} classes"
            images = f"{images} of {entry['official_num_images']}, {classes}: INCOMPLETE"
        if "mce" in entry:
            rows.append([title, "mCE, AlexNet's is 100", entry["mce"], images])
            rows.append([title, "mean error, un-normalised", entry["mean_error"], images])
        elif "top1_unrestricted" in entry:
            rows.append([title, f"top-1 among its {entry['num_classes']} classes", entry["top1"], images])
            rows.append([title, f"top-1 among all {num_classes} classes", entry["top1_unrestricted"], images])
        else:
            rows.append([title, "top-1", entry["top1"], images])
    text = results_table(["set", "metric", "%", "images"], rows)
    if "imagenet_c" in summary:
        entry = summary["imagenet_c"]
        corruptions = [[corruption, entry["ce"][corruption], entry["errors"][corruption]] for corruption in entry["ce"]]
        corruptions.append(["mean", entry["mce"], entry["mean_error"]])
        text += "\n" + results_table(["ImageNet-C", "CE, %", "mean error, %"], corruptions)
    return text


def results_table(titles: list[str], rows: list[list[Any]]) -> str:
    """Returns a Markdown table. Floats get two digits."""
    cells = []
    for row in rows:
        cells.append([f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row])
    return markdown_table(titles, cells, pad=True) + "\n"


def load_wnid_classifier(path: str, args: argparse.Namespace, wnids: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Returns (model, settings). ValueError if the classifier's logits are not the classes of ImageNet-1k."""
    classifier = load_classifier(path, args.crop_pct, args.mean, args.std)
    settings = classifier.settings
    pixels = PixelFormat(settings["in_chans"], settings["pixels"] or RGB8.dtype)
    if pixels != RGB8:
        raise ValueError(f"{path!r} classifies images with {pixels}, but these sets are RGB images of 8 bits")
    if settings["nb_classes"] != len(wnids):
        raise ValueError(
            f"the head of {path!r} has {settings['nb_classes']} classes, ImageNet-1k {len(wnids)}: "
            f"these sets need a classifier that was fine-tuned on ImageNet-1k"
        )
    check_classes(classifier.info.classes or wnids, wnids, repr(path), "ImageNet-1k")
    return classifier.model, settings


def evaluate_part(
    part: Part, model: nn.Module, wnids: list[str], settings: Mapping[str, Any], context: EvalContext
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
    if part.benchmark.restricted:
        figures = {name: scores[name] for name in ("top1", "top1_unrestricted")}
    else:  # if class folders are missing, their logits still compete, and label i is not logit i
        figures = {"top1": scores.get("top1_unrestricted", scores["top1"])}
    return {
        **figures,
        "num_images": part.num_images,
        "num_classes": part.num_classes,
        "incomplete": part.incomplete,
        "source": str(part),
    }


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
        where = f"{precision_name} on {count_of(process.world_size, 'process')}"
        session.print(f"{weights.path}, {where}; checking the images first")
        parts = collectives.run_on_rank0(lambda: find_parts(args, wnids))
        results = ResultsFile(
            Path(args.output_dir) / RESULTS,
            EvaluatedModel(weights.path, weights.sha256, settings),
            lambda parts: {"summary": summarise(parts)},
            sources={part.name: str(part) for part in parts},
        )
        missing = results.missing([part.name for part in parts])
        model = model.to(process.device)
        check_statistics(settings["mean"], settings["std"], RGB8)
        context = session.make_context(args, Normalize(settings["mean"], settings["std"]), args.batch_size)
        for part in parts:
            if part.name not in missing:
                continue
            begin = time.perf_counter()
            result = evaluate_part(part, model, wnids, settings, context)
            results.add(part.name, result)
            seconds = time.perf_counter() - begin
            session.print(f"{part.name}: top-1 {result['top1']:.2f} % on {part.num_images} images in {seconds:.0f} s")
        if process.is_main:
            text = report(results.content["summary"], len(wnids))
            table_path = results.path.with_suffix(".md")
            table_path.write_text(text)
            session.print(f"\n{text}\nwritten to {results.path} and {table_path}")


if __name__ == "__main__":
    run_program(main, "main_robustness.py")
