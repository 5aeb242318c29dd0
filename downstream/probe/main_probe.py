"""Evaluates a frozen encoder by k nearest neighbours, linear probes and attentive probes.

    torchrun --nproc_per_node 8 downstream/probe/main_probe.py output/prmim50_base --data_path IMAGENET
    python downstream/probe/main_probe.py mae_pretrain_vit_base.pth --data_path IMAGENET --probes knn --blocks 9 12
    python downstream/probe/main_probe.py --timm vit_small_patch16_dinov3.lvd1689m --data_path IMAGENET --probes knn

kNN: DINO's protocol on the whole training set. Probes: the heads of CAPI's grid, all trained at the same time. A tenth
of the training images is held out and selects learning rate and weight decay. The chosen heads are scored on val/ once.
The results of kNN and those of the heads are each saved once they are there. The same command continues after them; the
training of the heads starts anew after a stop.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.probe.engine_probe import Probing
from downstream.probe.models import FrozenEncoder, open_encoder
from util import collectives
from util.collectives import print_on_rank0
from util.data.images import Images, match_splits
from util.data.open import open_everywhere
from util.data.statistics import normalizer, statistics_of
from util.evaluate.knn import TEMPERATURE
from util.evaluate.results import ResultsFile
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.files import record
from util.run.processes.distributed import PRECISIONS, precision
from util.run.start import plan as plan_module
from util.run.start.begin import begin
from util.run.start.flags import DATA_FLAGS, all_valid_flag, eval_split_flag
from util.tables import markdown_table

PROGRAM = "main_probe.py"
RESULTS = "probe.json"
PROBES = ("knn", "linear", "attentive")


ENCODER_FLAGS = (
    Flag("encoder", help="a run's folder, or a checkpoint of this project, MAE or timm", positional=True, nargs="?"),
    Flag(
        "timm",
        help="a model of timm, with its pre-trained weights or those of the file given",
        everyday=True,
        metavar="NAME",
    ),
    Flag("input_size", int, help="image side in pixels (default: the encoder's)", everyday=True, at_least=1),
)

PROTOCOL_FLAGS = (
    Flag("probes", str, PROBES, "what is evaluated", everyday=True, choices=PROBES, nargs="+"),
    Flag(
        "blocks", int, help="blocks whose outputs are evaluated, from 1 (default: the last)", everyday=True, nargs="+"
    ),
    Flag("knn_temperature", float, TEMPERATURE, "kNN votes by exp(similarity / it)", above=0),
    Flag("steps", int, 12_500, "optimizer steps of the heads", everyday=True, at_least=1),
    Flag("total_batch_size", int, 1024, "images per step over all processes", everyday=True, at_least=1),
    Flag("seed", int, 0, "seed of first weights, shuffling and augmentation", everyday=True, at_least=0),
)

RUN_FLAGS = (
    Flag("output_dir", str, "output/probe", f"folder for {RESULTS}", everyday=True, changes="nothing"),
    Flag(
        "batch_size",
        int,
        help="images per process and micro-batch (default: at most 128)",
        everyday=True,
        changes="split",
        at_least=1,
    ),
    Flag(
        "device",
        str,
        "auto",
        "auto: a GPU if there is one",
        everyday=True,
        changes="rounding",
        choices=("auto", "cpu", "cuda"),
    ),
    Flag("precision", str, "auto", "of the encoder; heads have float32", everyday=True, choices=("auto", *PRECISIONS)),
)


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, __doc__, *ENCODER_FLAGS)
    parser.add_flags("data", *DATA_FLAGS, eval_split_flag(), all_valid_flag())
    parser.add_flags("protocol", *PROTOCOL_FLAGS)
    parser.add_flags("run", *RUN_FLAGS)
    parser.set_defaults(crop_scale=(0.08, 1.0))
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags)."""
    parser = get_args_parser()
    return parser, parser.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """ValueError if a flag, or a pair of flags, is out of range."""
    plan_module.check_flags(args)
    if args.encoder is None and args.timm is None:
        raise ValueError("nothing to evaluate: give a checkpoint, a run's folder, or --timm NAME")


def make_encoder(args: argparse.Namespace) -> FrozenEncoder:
    """Loads the encoder that the flags name, and chooses its blocks."""
    if args.timm is not None:
        from downstream.probe.timm_encoders import open_timm_model

        encoder = open_timm_model(args.timm, args.encoder, args.input_size)
    else:
        encoder = open_encoder(args.encoder, args.input_size)
    if args.blocks:
        encoder.read_blocks(args.blocks)
    return encoder


def open_data(args: argparse.Namespace, in_chans: int, pixel_settings: Mapping[str, Any]) -> tuple[Images, Images]:
    """Opens train/ and val/ as the encoder reads images. ValueError unless both have the same classes and format."""
    settings = {"in_chans": in_chans, **pixel_settings}
    images = open_everywhere(args, "train", True, args.max_bad_fraction, settings)
    val_images = open_everywhere(args, args.eval_split, True, pixel_settings=settings)
    match_splits(images, val_images)
    return images, val_images


def protocol_of(
    args: argparse.Namespace,
    encoder: FrozenEncoder,
    pixel_settings: Mapping[str, Any],
    images: Images,
    val_images: Images,
    precision_name: str,
) -> dict[str, Any]:
    """Returns everything that the results depend on, beside the weights."""
    protocol: dict[str, Any] = {
        "probes": [name for name in PROBES if name in args.probes],
        "blocks": encoder.blocks,
        "input_size": list(encoder.img_size),
        "in_chans": encoder.in_chans,
        "mean": pixel_settings["mean"],
        "std": pixel_settings["std"],
        "precision": precision_name,
        "loader": args.loader,
        "train": [len(images), images.fingerprint()],
        "val": [len(val_images), val_images.fingerprint()],
    }
    for name in record.INVALID_SETTINGS:
        if name in pixel_settings:
            protocol[name] = pixel_settings[name]
    if "knn" in args.probes:
        protocol["knn_temperature"] = args.knn_temperature
    if set(args.probes) - {"knn"}:
        for name in ("steps", "total_batch_size", "seed", "crop_scale", "hflip", "vflip"):
            protocol[name] = getattr(args, name)
    return protocol


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as a table."""
    measures = {"top1": "top-1, %"}
    if "top5" in rows[0]:  # more than five classes
        measures["top5"] = "top-5, %"
    cells = []
    for row in rows:
        if row["probe"] == "knn":
            setting = f"k {row['k']}, {row['scaling']}"
        else:
            setting = f"lr {row['lr']:g}, wd {row['weight_decay']:g}"
        block = row["block"] or "last"
        scores = [f"{row[name]:.2f}" for name in measures]
        cells.append([row["probe"], block, row["feature"], setting, *scores])
    titles = ["probe", "block", "feature", "setting", *measures.values()]
    return markdown_table(titles, cells, left=4, pad=True)


def results_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the parts say together: the chosen rows, and all heads on the held-out images."""
    heads = parts.get("heads", {"chosen": [], "held_out": []})
    return {"results": [*parts.get("knn", []), *heads["chosen"]], "held_out": heads["held_out"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluates the encoder that the flags name."""
    parser, args = parse_args(argv)
    with user_errors(parser):
        check_flags(args)
    with begin(PROGRAM, parser, args, args.output_dir) as (process, _):
        encoder = collectives.run_everywhere(lambda: make_encoder(args))
        known = encoder.pixel_settings
        if args.all_valid:
            known = record.without_marks(known)
        images, val_images = open_data(args, encoder.in_chans, known)
        (mean, std), notes = statistics_of((None, None), known, images)
        pixel_settings = {**known, "mean": mean, "std": std}
        precision_name = precision(args.precision, process.device).name
        settings = protocol_of(args, encoder, pixel_settings, images, val_images, precision_name)
        results = ResultsFile(Path(args.output_dir) / RESULTS, encoder.name, encoder.sha256, settings, results_of)
        normalize = normalizer(pixel_settings, images.pixel_format)
        probing = Probing(args, process, encoder, images, val_images, normalize)

        print_on_rank0(encoder.name, *encoder.notes, *notes, *images.notes, *val_images.notes)
        if "knn" in args.probes and "knn" not in results.parts:
            results.add("knn", probing.knn())
        if set(args.probes) - {"knn"} and "heads" not in results.parts:
            results.add("heads", probing.heads())
        print_on_rank0(f"\n{table_of(results_of(results.parts)['results'])}\n{results.path}")


if __name__ == "__main__":
    run_program(main, PROGRAM)
