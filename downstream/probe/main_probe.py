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

from downstream.probe.engine_probe import GRID, HELD_OUT, Probing
from downstream.probe.models import FrozenEncoder, open_encoder
from util import collectives
from util.data.folders import refuse_inside_data
from util.data.images import Images, match_splits
from util.data.open import open_everywhere
from util.data.statistics import normalizer, statistics_of
from util.evaluate.knn import TEMPERATURE
from util.evaluate.results import ResultsFile
from util.evaluate.session import evaluation_session
from util.run.cli import Parser, run_program
from util.run.files import record
from util.run.processes.distributed import PRECISIONS, precision
from util.run.start import plan as plan_module
from util.run.start.flags import add_all_valid_flag, add_data_flags, add_eval_split_flag
from util.tables import markdown_table

PROGRAM = "main_probe.py"
RESULTS = "probe.json"
PROBES = ("knn", "linear", "attentive")


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, description=__doc__)
    flag = parser.add_argument
    flag("encoder", nargs="?", help="a run's folder, or a checkpoint of this project, MAE or timm")
    flag(
        "--timm",
        everyday=True,
        metavar="NAME",
        help="a model of timm, with its pre-trained weights or those of the file given",
    )
    flag("--input_size", everyday=True, type=int, at_least=1, help="image side in pixels (default: the encoder's)")

    data = parser.add_argument_group("data")
    add_data_flags(data)
    add_eval_split_flag(data)
    add_all_valid_flag(data)

    protocol = parser.add_argument_group("protocol").add_argument
    protocol("--probes", everyday=True, nargs="+", default=PROBES, choices=PROBES, help="what is evaluated")
    protocol(
        "--blocks",
        everyday=True,
        type=int,
        nargs="+",
        help="blocks whose outputs are evaluated, from 1 (default: the last)",
    )
    protocol("--knn_temperature", type=float, above=0, default=TEMPERATURE, help="kNN votes by exp(similarity / it)")
    protocol("--steps", everyday=True, type=int, default=12_500, at_least=1, help="optimizer steps of the heads")
    protocol(
        "--total_batch_size",
        everyday=True,
        type=int,
        default=1024,
        at_least=1,
        help="images per step over all processes",
    )
    protocol(
        "--seed",
        everyday=True,
        type=int,
        default=0,
        at_least=0,
        help="seed of first weights, shuffling and augmentation",
    )

    run = parser.add_argument_group("run").add_argument
    run("--output_dir", everyday=True, changes="nothing", default="output/probe", help=f"folder for {RESULTS}")
    run(
        "--batch_size",
        everyday=True,
        changes="split",
        type=int,
        at_least=1,
        help="images per process and micro-batch (default: at most 128)",
    )
    run(
        "--device",
        everyday=True,
        changes="rounding",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )
    run(
        "--precision",
        everyday=True,
        default="auto",
        choices=("auto", *PRECISIONS),
        help="of the encoder; heads have float32",
    )
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
    refuse_inside_data("--output_dir", args.output_dir, args.dataset, args.data_path)


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
        protocol["grid"] = GRID
        protocol["held_out"] = HELD_OUT
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
    with evaluation_session(parser, args, args.output_dir, check=check_flags) as session:
        encoder = collectives.run_everywhere(lambda: make_encoder(args))
        known = encoder.pixel_settings
        if args.all_valid:
            known = record.without_marks(known)
        images, val_images = open_data(args, encoder.in_chans, known)
        (mean, std), notes = statistics_of((None, None), [known], images)
        pixel_settings = {**known, "mean": mean, "std": std}
        precision_name = precision(args.precision, session.process.device).name
        settings = protocol_of(args, encoder, pixel_settings, images, val_images, precision_name)
        results = ResultsFile(Path(args.output_dir) / RESULTS, encoder.name, encoder.sha256, settings, results_of)
        normalize = normalizer(pixel_settings, images.pixel_format)
        probing = Probing(args, session, encoder, images, val_images, normalize)

        session.print(encoder.name, *encoder.notes, *notes, *images.notes, *val_images.notes)
        parts = []
        if "knn" in args.probes:
            parts.append("knn")
        if set(args.probes) - {"knn"}:
            parts.append("heads")
        missing = results.missing(parts)
        if "knn" in missing:
            rows = probing.knn()
            results.add("knn", rows)
            if "heads" in missing:  # their training takes long; the table at the end has these rows, too
                session.print(table_of(rows))
        if "heads" in missing:
            results.add("heads", probing.heads())
        session.print(f"\n{table_of(results.content['results'])}\n{results.path}")
        chance = 100 / len(images.classes)
        session.print(f"knn: compare encoders by `mean`, `z` (standardised), k 20; a guess scores {chance:.2f} %")


if __name__ == "__main__":
    run_program(main, PROGRAM)
