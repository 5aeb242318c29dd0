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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_finetune import evaluate_images
from main_finetune import load_classifier
from util import collectives
from util.data.images import FolderImages, check_classes, refuse_single_class
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import check_statistics
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize, ResizeCenterCrop
from util.lazy import LazyModule
from util.run.cli import Parser, run_program
from util.run.distributed import PRECISIONS, precision
from util.run.evaluation import ResultsFile, evaluation_session
from util.run.flags import num_workers
from util.run.resume import find_encoder
from util.tables import markdown_table
from util.text import count_of, shorten

timm_data = LazyModule("timm.data")

RESULTS = "robustness.json"


@dataclass(frozen=True)
class Benchmark:
    """A published test set. restricted: predictions are chosen from the classes of the set, as its authors do."""

    title: str
    num_images: int  # of each corruption and severity, for ImageNet-C
    num_classes: int
    protocol: str
    restricted: bool = False


RESTRICTED = "top-1, logits restricted to the set's classes"
# In the table's order; the names are the flags'.
BENCHMARKS = {
    "imagenet": Benchmark("ImageNet", 50_000, 1000, "top-1 on the validation set"),
    "imagenet_a": Benchmark("ImageNet-A", 7_500, 200, RESTRICTED, restricted=True),
    "imagenet_r": Benchmark("ImageNet-R", 30_000, 200, RESTRICTED, restricted=True),
    "imagenet_sketch": Benchmark("ImageNet-Sketch", 50_889, 1000, "top-1 among all classes"),
    "imagenet_c": Benchmark(
        "ImageNet-C", 50_000, 1000, "mCE: errors relative to AlexNet's, 15 corruptions x 5 severities"
    ),
}

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


@dataclass(frozen=True)
class Part:
    """What is evaluated and saved at once: a set, or one severity of one corruption."""

    name: str  # "imagenet_a", "imagenet_c/fog/3"
    folder: str
    num_images: int = 0
    num_classes: int = 0

    @property
    def flag(self) -> str:
        """The flag that names the set."""
        return self.name.partition("/")[0]

    @property
    def benchmark(self) -> Benchmark:
        """The published set."""
        return BENCHMARKS[self.flag]

    @property
    def incomplete(self) -> bool:
        """Whether images or classes are missing."""
        return (self.num_images, self.num_classes) != (self.benchmark.num_images, self.benchmark.num_classes)

    def __str__(self) -> str:
        return f"{self.num_images} images of {self.num_classes} classes in {self.folder!r}"

    def open(self) -> FolderImages:
        """Opens the images. A label is a place in their `classes`, which are sorted wnids."""
        try:
            return FolderImages(self.folder, "", labelled=True)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_path", f"--{self.flag}")) from error


def find_parts(args: argparse.Namespace, wnids: list[str]) -> list[Part]:
    """Returns all parts that the flags ask for. ValueError if one of them differs from the published set."""
    given = {name: Path(getattr(args, name)) for name in BENCHMARKS if getattr(args, name) is not None}
    if not given:
        flags = ", ".join(f"--{name}" for name in BENCHMARKS)
        raise ValueError(f"nothing to evaluate on: give at least one of {flags}")
    parts = []
    for name, root in given.items():
        if not root.is_dir():
            raise ValueError(f"--{name} {str(root)!r} is not a folder")
        folders = {name: root}
        if name == "imagenet":
            folders = {name: root / "val"}
        elif name == "imagenet_c":
            folders = {f"{name}/{c}/{s}": root / c / str(s) for c in ALEXNET_ERRORS for s in SEVERITIES}
        missing = [str(folder.relative_to(root)) for folder in folders.values() if not folder.is_dir()]
        if missing:
            raise ValueError(
                f"--{name} {str(root)!r} lacks {len(missing)} of its {len(folders)} folders: {shorten(missing, 5)}"
            )
        parts += [Part(part, str(folder.resolve())) for part, folder in folders.items()]
    return [check_part(part, wnids, args.allow_incomplete) for part in parts]


def check_part(part: Part, wnids: list[str], allow_incomplete: bool) -> Part:
    """Returns the part with its numbers of images and classes. ValueError if they are not the published ones."""
    official, what = part.benchmark, f"--{part.flag} {part.folder!r}"
    images = part.open()
    refuse_single_class(images, "val")
    images.num_checked = 200  # there are many parts
    images.check()
    if unknown := sorted(set(images.classes) - set(wnids)):
        raise ValueError(f"{what} has {len(unknown)} folders that are no class of ImageNet-1k: {shorten(unknown, 5)}")
    part = replace(part, num_images=len(images), num_classes=len(images.classes))
    if part.num_classes > official.num_classes:
        raise ValueError(f"{what} has {part.num_classes} class folders, {official.title} has {official.num_classes}")
    if part.incomplete and not allow_incomplete:
        absent = sorted(set(wnids) - set(images.classes)) if official.num_classes == len(wnids) else []
        missing = f" (missing: {shorten(absent, 5)})" if absent else ""
        raise ValueError(
            f"{what} has {part.num_images} images of {part.num_classes} classes, {official.title} has "
            f"{official.num_images} of {official.num_classes}{missing}; --allow_incomplete scores it anyway and marks "
            f"the result"
        )
    return part


def corruption_errors(errors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns CE, mCE and un-normalised errors in percent. errors: of each corruption at severities 1 to 5, in [0, 1].

    CE_c = mean_s E_cs / AlexNet's mean_s E_cs. mCE is the mean over the 15 corruptions (Hendrycks and Dietterich,
    ICLR 2019).
    """
    means = {c: sum(errors[c]) / len(errors[c]) for c in ALEXNET_ERRORS}
    ce = {c: 100 * mean / ALEXNET_ERRORS[c] for c, mean in means.items()}
    return {
        "mce": sum(ce.values()) / len(ce),
        "mean_error": 100 * sum(means.values()) / len(means),
        "ce": ce,
        "errors": {c: 100 * mean for c, mean in means.items()},
    }


def summarise(parts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns {benchmark: its published figure and others}. ImageNet-C is included once all its parts are there."""
    summary: dict[str, dict[str, Any]] = {}
    for flag, benchmark in BENCHMARKS.items():
        own = {name: r for name, r in parts.items() if name.partition("/")[0] == flag}
        if flag == "imagenet_c":
            names = {c: [f"{flag}/{c}/{s}" for s in SEVERITIES] for c in ALEXNET_ERRORS}
            if len(own) < sum(map(len, names.values())):
                continue
            figures = corruption_errors({c: [1 - own[name]["top1"] / 100 for name in names[c]] for c in names})
        elif own:
            figures = {name: value for name, value in own[flag].items() if name.startswith("top1")}
        else:
            continue
        summary[flag] = {
            "title": benchmark.title,
            "published_protocol": benchmark.protocol,
            **figures,
            "num_classes": min(r["num_classes"] for r in own.values()),
            "official_num_classes": benchmark.num_classes,
            "num_images": sum(r["num_images"] for r in own.values()),
            "official_num_images": benchmark.num_images * len(own),
            "incomplete": any(r["incomplete"] for r in own.values()),
        }
    return summary


def report(summary: Mapping[str, dict[str, Any]], num_classes: int) -> str:
    """Returns the tables in Markdown. num_classes: of the classifier."""
    rows: list[list[Any]] = []
    corruptions: list[list[Any]] = []
    for flag, s in summary.items():
        images, classes = str(s["num_images"]), f"{s['num_classes']} of {s['official_num_classes']} classes"
        if s["incomplete"]:
            images += f" of {s['official_num_images']}, {classes}: INCOMPLETE"
        if flag == "imagenet_c":
            rows.append([s["title"], "mCE, AlexNet's is 100", s["mce"], images])
            rows.append([s["title"], "mean error, un-normalised", s["mean_error"], images])
            corruptions = [[c, s["ce"][c], s["errors"][c]] for c in s["ce"]]
            corruptions.append(["mean", s["mce"], s["mean_error"]])
        elif "top1_unrestricted" in s:
            rows.append([s["title"], f"top-1 among its {s['num_classes']} classes", s["top1"], images])
            rows.append([s["title"], f"top-1 among all {num_classes} classes", s["top1_unrestricted"], images])
        else:
            rows.append([s["title"], "top-1", s["top1"], images])
    text = results_table(["set", "metric", "%", "images"], rows)
    if corruptions:
        text += "\n" + results_table(["ImageNet-C", "CE, %", "mean error, %"], corruptions)
    return text


def results_table(titles: list[str], rows: list[list[Any]]) -> str:
    """Returns a Markdown table. Floats get two digits."""
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return markdown_table(titles, cells, pad=True) + "\n"


def load_wnid_classifier(path: str, args: argparse.Namespace, wnids: list[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Returns (model, settings). ValueError if the classifier's logits are not the classes of ImageNet-1k."""
    model, settings, meta = load_classifier(path, args)
    pixels = PixelFormat(settings["in_chans"], settings["pixels"] or RGB8.dtype)
    if pixels != RGB8:
        raise ValueError(f"{path!r} classifies images with {pixels}, but these sets are RGB images of 8 bits")
    if settings["nb_classes"] != len(wnids):
        raise ValueError(
            f"the head of {path!r} has {settings['nb_classes']} classes, ImageNet-1k {len(wnids)}: "
            f"these sets need a classifier that was fine-tuned on ImageNet-1k"
        )
    check_classes(meta.get("classes") or wnids, wnids, repr(path), "ImageNet-1k")
    return model, settings


def evaluate_part(
    part: Part,
    model: nn.Module,
    wnids: list[str],
    settings: Mapping[str, Any],
    normalize: Normalize,
    autocast: Callable[[], AbstractContextManager],
    sizes: tuple[int, int],
) -> dict[str, Any]:
    """Returns the part's entry in the results: top-1 in percent by the published protocol, and others.

    sizes: batch size and number of workers.
    """
    images = part.open()
    # ImageNet-C was resized and cropped before it was corrupted: resizing it again would blur what is measured.
    view = ResizeCenterCrop(settings["input_size"], 1.0 if part.flag == "imagenet_c" else settings["crop_pct"])
    columns = None if images.classes == wnids else [wnids.index(wnid) for wnid in images.classes]
    result = evaluate_images(model, images, view, normalize, autocast, *sizes, columns=columns)
    if part.benchmark.restricted:
        figures = {name: result[name] for name in ("top1", "top1_unrestricted")}
    else:  # if class folders are missing, their logits still compete, and label i is not logit i
        figures = {"top1": result.get("top1_unrestricted", result["top1"])}
    numbers = {"num_images": part.num_images, "num_classes": part.num_classes, "incomplete": part.incomplete}
    return {**figures, **numbers, "source": str(part)}


def settings_of(found: Mapping[str, Any], precision_name: str) -> dict[str, Any]:
    """Returns everything that the results depend on, beside weights and images. found: settings of the classifier."""
    ResizeCenterCrop(found["input_size"], found["crop_pct"])  # ValueError now rather than later
    return {
        "input_size": found["input_size"],
        "crop_pct": found["crop_pct"],
        "mean": list(found["mean"] or IMAGENET_MEAN),
        "std": list(found["std"] or IMAGENET_STD),
        "precision": precision_name,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Checks all sets that the flags name, then evaluates what is not done yet."""
    parser, args = parse_args(argv)
    with evaluation_session(parser, args, args.output_dir) as session:
        process, output_dir, wnids = session.process, Path(args.output_dir), imagenet_wnids()
        origin: Any = collectives.run_on_rank0(lambda: find_encoder(args.resume, False, "resume"))
        model, found = load_wnid_classifier(origin["path"], args, wnids)
        name, autocast, _ = precision(args.precision, process.device)
        settings = settings_of(found, name)
        session.print(
            f"{origin['path']}, {name} on {count_of(process.world_size, 'process')}; checking the images first"
        )
        parts = collectives.run_on_rank0(lambda: find_parts(args, wnids))
        what = {"checkpoint": origin["path"], "sha256": origin["sha256"], "settings": settings}
        sources = {part.name: str(part) for part in parts}
        results = ResultsFile(output_dir / RESULTS, what, lambda done: {"summary": summarise(done)}, sources)
        missing = results.missing(sources)
        model = model.to(process.device)
        check_statistics(settings["mean"], settings["std"], RGB8)
        normalize = Normalize(settings["mean"], settings["std"]).to(process.device)
        sizes = args.batch_size, num_workers(args, process)
        for part in (part for part in parts if part.name in missing):
            start = time.perf_counter()
            result = evaluate_part(part, model, wnids, settings, normalize, autocast, sizes)
            results.add(part.name, result)
            seconds = time.perf_counter() - start
            session.print(f"{part.name}: top-1 {result['top1']:.2f} % on {part.num_images} images in {seconds:.0f} s")
        if process.is_main:
            text = report(results.content["summary"], len(wnids))
            results.path.with_suffix(".md").write_text(text)
            session.print(f"\n{text}\nwritten to {results.path} and {results.path.with_suffix('.md')}")


if __name__ == "__main__":
    run_program(main, "main_robustness.py")
