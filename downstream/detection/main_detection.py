"""Trains Mask R-CNN on a pre-trained ViT (ViTDet), for COCO or any data set in COCO's format.

    torchrun --nproc_per_node 8 downstream/detection/main_detection.py --recipe coco_mask_rcnn_vit_base \
        --data_path COCO --finetune output/prmim50_base --output_dir output/coco
    python downstream/detection/main_detection.py --recipe coco_mask_rcnn_vit_base_short --finetune ... # for one GPU
    python downstream/detection/main_detection.py --eval --resume output/coco --data_path COCO

If the objects have no segmentations, the model is Faster R-CNN. The same command again resumes the run at the step of
its newest good checkpoint.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.common import (
    Evaluation,
    Evaluator,
    add_iteration_flags,
    check_iteration_flags,
    choose_encoder,
    progress_settings,
    schedule_by_iterations,
)
from downstream.detection.backbone import load_backbone
from downstream.detection.data import CocoImages, LargeScaleJitter, PadAndStack
from downstream.detection.engine_detection import detect_all, draw_pictures, score_detections, train_iterations
from downstream.detection.masks import coco_masks
from downstream.detection.models import SIZES, Detector, build_detector
from downstream.detection.released import detectron2_names, infer_settings, is_detectron2, read_released
from downstream.recipes import DETECTION_RECIPES, MASK_RCNN_DEFAULTS
from util.data.datasets import steps_per_epoch
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize
from util.encoder_weights import weights_of
from util.pictures import save
from util.run import checkpoint, distributed
from util.run.cli import Parser, flags_given, parse_with_recipe, run_program
from util.run.encoder_origin import warn_if_unfinished
from util.run.ending import closing_lines, describe_progress, end_after_signal, finish_run
from util.run.errors import exit_on_setup_errors, exit_on_training_errors
from util.run.flags import (
    add_batch_flags,
    add_loading_flags,
    add_run_flags,
    add_update_flags,
    check_least,
    free_flags,
    make_plan,
    num_workers,
)
from util.run.loop import TrainLoop
from util.run.precision import precision
from util.run.resume import RunRecord, json_settings, read_run, restore
from util.run.resume_rules import SPLIT_FLAGS
from util.run.saving import step_ranges
from util.run.setup import announce, assemble
from util.run.signals import StopSignal
from util.run.start import enter_folder, join_processes, refuse_different_starts
from util.text import count_of, shorten

PROGRAM = "main_detection.py"
PICTURE = "detections.png"
# Settings that describe a trained model. Evaluation takes them from the checkpoint.
MODEL_FLAGS = ("model", "input_size", "patch_size", "pretrain_size", "window_size", "decoder_channels")
SPLITS = {"train": ("annotations/instances_train2017.json", "train2017")}
SPLITS["val"] = ("annotations/instances_val2017.json", "val2017")


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, description=__doc__)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--recipe", metavar="NAME", help="set defaults from downstream/recipes.py; explicit flags win")
    flag("--eval", action=boolean, default=False, help="only evaluate the model at --resume on the validation images")

    model = parser.add_argument_group("model").add_argument
    model("--model", default="vit_base_patch16", choices=SIZES, help="size of the encoder")
    model("--finetune", help="pre-trained encoder: a checkpoint or a run's folder (default: train from scratch)")
    model("--input_size", type=int, help="side of a training crop, and longer side in evaluation, in pixels")
    model("--pretrain_size", type=int, help="side of the images of pre-training (default: the model's)")
    model("--patch_size", type=int, help="patch side in pixels (default: the model's)")
    model("--window_size", type=int, help="side of an attention window in patches")
    model("--decoder_channels", type=int, help="width of pyramid and heads")
    help_text = "train a mask head (default: if all objects have a segmentation)"
    model("--masks", action=boolean, default=None, help=help_text)
    model("--drop_path", type=float, help="drop path rate of the last block; it grows linearly from 0")

    group = parser.add_argument_group("optimisation")
    add_batch_flags(group)
    add_iteration_flags(group)
    optimisation = group.add_argument
    optimisation("--num_rois", type=int, help="boxes of an image that are sampled for the losses of the heads")
    optimisation(
        "--lr_drops", type=float, nargs="*", help="shares of --num_iters after which the rate is divided by 10"
    )
    help_text = "factor on the learning rate from each layer to the one before"
    optimisation("--layer_decay", type=float, help=help_text)
    add_update_flags(group)

    group = parser.add_argument_group("data")
    data = group.add_argument
    data("--data_path", default="data", help="folder to which the next four paths are relative")
    for split, (json_path, images) in SPLITS.items():
        data(f"--{split}_json", default=json_path, metavar="FILE", help=f"annotations of the {split} images")
        data(f"--{split}_images", default=images, metavar="DIR", help=f"folder of the {split} images")
    text = "range of the random factor of large-scale jitter"
    data("--scale_range", type=float, nargs=2, metavar=("LOW", "HIGH"), help=text)
    add_loading_flags(group)

    evaluation = parser.add_argument_group("evaluation").add_argument
    evaluation("--eval_every", type=int, help="iterations between evaluations; the last one is always evaluated")
    evaluation("--num_pictures", type=int, default=4, help="validation images in the picture of each evaluation")

    add_run_flags(parser.add_argument_group("run"), unit="iterations")
    # The last line is for the parts that all mains share: every image must be readable, by torch's kernels.
    parser.set_defaults(output_dir="output/detection", **MASK_RCNN_DEFAULTS, save_every=50_000, save_steps=2000)
    parser.set_defaults(max_bad_fraction=0.0, dataset="folder", loader="fast", min_lr=0.0)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags)."""
    parser = get_args_parser()
    return parser, parse_with_recipe(parser, DETECTION_RECIPES, argv)


def check_flags(args: argparse.Namespace) -> None:
    """ValueError if a flag of detection, or a pair of them, is out of range, or if a library is missing."""
    check_iteration_flags(args)
    check_least(args, 1, "decoder_channels window_size input_size num_rois")
    check_least(args, 0, "drop_path num_pictures")
    if args.drop_path > 1:
        raise ValueError(f"--drop_path must be at most 1, got {args.drop_path}")
    if not 0 < args.layer_decay <= 1:
        raise ValueError(f"--layer_decay must lie in (0, 1], got {args.layer_decay}")
    if not 0 < args.scale_range[0] <= args.scale_range[1]:
        raise ValueError(f"--scale_range must be two factors 0 < low <= high, got {args.scale_range}")
    if not all(0 < share <= 1 for share in args.lr_drops):
        raise ValueError(f"--lr_drops must be shares in (0, 1], got {args.lr_drops}")
    for name in ("shard", "compile"):
        if getattr(args, name):
            raise ValueError(f"--{name} is not for detection: leave it out")
    coco_masks()


@dataclass(frozen=True)
class StepDecay:
    """detectron2's schedule: linear warm-up from 0.001, then a tenth of the rate after each of `drops`.

    drops: shares of `num_iters`. `schedule(step, lr_scale)` returns the learning rate of an optimizer step, from 0 on.
    """

    num_iters: int
    warmup_iters: int
    lr: float
    drops: tuple[float, ...]

    def __call__(self, step: int, lr_scale: float = 1.0) -> float:
        rate = self.lr * lr_scale * 0.1 ** sum(step >= round(share * self.num_iters) for share in self.drops)
        if step < self.warmup_iters:
            rate *= 0.001 + 0.999 * step / self.warmup_iters
        return rate


# ------------------------------------------------------------------------------------------------------------- data


def open_split(args: argparse.Namespace, split: str, training: bool) -> CocoImages:
    """Opens a split on all ranks and reads some headers. ValueError on all ranks if one of them fails."""
    root = Path(args.data_path)

    def look() -> CocoImages:
        json_path, folder = (root / getattr(args, f"{split}_{name}") for name in ("json", "images"))
        images = CocoImages(json_path, folder, training)
        images.check()
        return images

    images = distributed.run_everywhere(look)
    found = {"number of images": len(images), "names and objects": images.fingerprint()}
    distributed.refuse_differences(found, f"{split} data")
    return images


def check_categories(categories: Sequence[Sequence[Any]], images: CocoImages, what: str) -> None:
    """ValueError if the categories of `images` are not `categories`, which are those of `what`."""
    wanted, found = ([(number, name) for number, name in part] for part in (categories, images.categories))
    if wanted != found:
        missing, other = (
            shorten([f"{number} {name}" for number, name in part]) or "none"
            for part in ([c for c in wanted if c not in found], [c for c in found if c not in wanted])
        )
        raise ValueError(
            f"{str(images.json_path)!r} has {len(found)} categories that are not the {len(wanted)} of {what}: "
            f"missing {missing}; not expected {other}"
        )


def choose_masks(masks: bool | None, images: CocoImages) -> bool:
    """Returns whether a mask head is trained. ValueError if the objects have no segmentations for it."""
    if masks and not images.has_masks:
        raise ValueError(f"--masks needs segmentations, which the objects of {str(images.json_path)!r} do not have")
    return images.has_masks if masks is None else masks


# -------------------------------------------------------------------------------------------------------- reporting


def load_first_weights(model: Detector, encoder: dict[str, Any] | None) -> list[str]:
    """Loads the encoder of a new run. Returns remarks."""
    if encoder is None:
        return ["no --finetune: training from scratch"]
    report = load_backbone(model.backbone, encoder["path"])
    return [f"encoder from {encoder['path']}: {report}", *warn_if_unfinished(encoder)]


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation in one line."""
    parts = []
    for name in ("box", "mask"):
        values = [scores.get(f"{name}_{key}") for key in ("ap", "ap50", "ap75")]
        if values[0] is not None:
            parts.append(f"AP {name} {values[0]:.2f} % ({values[1]:.2f} at IoU .5, {values[2]:.2f} at .75)")
    return f"{', '.join(parts) or 'no objects'} on {count_of(int(scores['num_images']), 'image')}"


def make_evaluation(
    model: Detector, images: CocoImages, loop: TrainLoop, workers: int, num_pictures: int, masks: bool, folder: Path
) -> Any:
    """Returns the function of an `Evaluator`: scores, a picture in TensorBoard, and the same picture in the folder."""

    def evaluate(alive: Any) -> Evaluation:
        results, pictures = detect_all(model, images, loop.normalize, loop.autocast, workers, alive, num_pictures)
        scores = {**score_detections(images, results, masks), "num_images": len(images)}
        if pictures and distributed.rank_and_world_size()[0] == 0:
            picture = draw_pictures(pictures, [name for _, name in images.categories])
            loop.log.picture("detections", picture, loop.step)
            try:
                save(picture, folder / PICTURE)
            except OSError as error:  # a full disk; other processes would wait for this one
                loop.log.info(f"warning: {PICTURE} could not be written ({error}); training goes on")
        scalars = {name: value for name, value in scores.items() if value is not None}
        return Evaluation(scalars, describe_scores(scores), {})

    return evaluate


def summary_rows(args: argparse.Namespace, model: Detector, masks: bool, *data: CocoImages) -> dict[str, str]:
    """Returns what is printed about model and data at the start."""
    million = sum(p.numel() for p in model.parameters()) / 1e6
    rows = {
        "model": f"{'Mask' if masks else 'Faster'} R-CNN on {args.model}, {million:.2f} M parameters",
        "classes": str(len(data[0].categories)),
    }
    for split, images in zip(SPLITS, data, strict=True):
        notes = "".join(f"; {note}" for note in images.notes)
        objects = count_of(images.num_objects, "object")
        rows[split] = f"{count_of(len(images), 'image')} with {objects} in {images.json_path}{notes}"
    return rows


def summary_of_run(args: argparse.Namespace, loop: TrainLoop, num_images: int, evaluator: Evaluator) -> str:
    """Returns what the run did, from its log, so that a finished run can say it again."""
    lines = [f"trained a detector on {args.model} {describe_progress(loop, num_images, args.num_iters)}"]
    last = evaluator.results().get("last")
    if last:
        scores = {name.removeprefix("val_"): value for name, value in last.items()}
        lines.append(f"  iteration {last['step']}: {describe_scores(scores)}")
        lines.append(f"  pictures     {evaluator.saver.output_dir / PICTURE}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> bool | dict[str, Any]:
    """Trains to the end of the schedule, or evaluates. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    if args.eval:
        with exit_on_setup_errors(parser):
            return evaluate_only(args, flags_given(parser, argv))
    with exit_on_setup_errors(parser):
        process = join_processes(args)
        plan = make_plan(args, process)
        check_flags(args)
        start = enter_folder(PROGRAM, args, argv, process)

        images, val_images = open_split(args, "train", True), open_split(args, "val", False)
        check_categories(images.categories, val_images, str(images.json_path))
        masks = choose_masks(args.masks, images)
        derived: dict[str, Any] = {"masks": masks, "categories": [list(category) for category in images.categories]}
        torch.manual_seed(args.seed)  # the same initial weights on every rank
        model = build_detector(vars(args) | derived)
        content = read_run(start, plan.total_batch_size)
        encoder = choose_encoder(args, start, content)
        if content is None:
            start.remarks += load_first_weights(model, encoder)
        model = model.to(process.device)
        normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD).to(process.device)
        optimizer = torch.optim.AdamW(
            model.param_groups(args.weight_decay, args.layer_decay), lr=plan.lr, betas=(0.9, 0.999), fused=True
        )

        epoch_steps = steps_per_epoch(len(images), plan.total_batch_size)
        derived |= {"patch_size": model.patch_size, **progress_settings(args, epoch_steps)}
        derived["pretrain_size"] = model.backbone.grid_size[0] * model.patch_size
        if content is not None:
            derived["finetune"] = content["meta"]["settings"]["finetune"]
        settings = json_settings(vars(args), asdict(plan), derived)
        data = {"num_images": len(images), "data": images.fingerprint()}
        data |= {"num_val_images": len(val_images), "val_data": val_images.fingerprint()}
        record = RunRecord(PROGRAM, settings, data, epoch_steps, process, start.origin, {"encoder": encoder})
        if content is not None:
            # The sampled boxes and the losses depend on the micro-batches, so their size is fixed.
            paths = {f"{split}_{name}" for split in SPLITS for name in ("json", "images")}
            free = free_flags(plan, {"finetune", "eval", "eval_every", "num_pictures", *paths}, SPLIT_FLAGS)
            restore(content, start, record, model, optimizer, free, args.allow_changes)
        decay = StepDecay(args.num_iters, args.warmup_iters, plan.lr, tuple(args.lr_drops))
        schedule = schedule_by_iterations(args, plan, epoch_steps, decay)
        jitter = LargeScaleJitter(images, args.input_size, args.seed, args.scale_range, masks)
        collator = PadAndStack(args.input_size)
        run = assemble(
            args, plan, start, record, schedule, content, model, optimizer, normalize, images, jitter, collator
        )
        loop = run.loop
        evaluate = make_evaluation(
            model, val_images, loop, plan.num_workers, args.num_pictures, masks, start.output_dir
        )
        announce(args, plan, start, schedule, loop.log, settings, summary_rows(args, model, masks, images, val_images))
        del content  # weights and moments of the checkpoint

    with exit_on_training_errors(parser), run.watchdog, StopSignal(process.device) as stop:
        loop.stop = stop
        evaluator = Evaluator(evaluate, model, loop, run.saver, args.eval_every)
        if evaluator.is_due() and not evaluator.is_done():
            evaluator.run()  # the run was stopped between the checkpoint and its evaluation
        for steps in step_ranges(loop.step, loop.last_step, args.eval_every, args.save_steps, args.save_every):
            stopped = train_iterations(run.model, run.batches, steps, loop)
            run.saver.save(required=stopped or loop.step == loop.last_step)
            if stopped and loop.step < loop.last_step:
                end_after_signal(loop, stop)  # the resumed run makes up for a missing evaluation
                return False
            if evaluator.is_due():
                evaluator.run()
        summary = summary_of_run(args, loop, len(images), evaluator)
        finish_run(loop, stop, "\n".join([summary, *closing_lines(start.output_dir, process.is_main)]))
    return True


# ------------------------------------------------------------------------------------------------------- evaluation


def load_detector(path: str | Path, args: argparse.Namespace, given: set[str], images: CocoImages) -> Detector:
    """Loads a trained model, in eval mode: ours, or a released ViTDet of detectron2, which has COCO's categories.

    given: names of the flags that were set explicitly. ValueError if the model has other categories than `images`.
    """
    path = checkpoint.find_checkpoint_file(path)
    content = read_released(path) if path.suffix == ".pkl" else checkpoint.read_checkpoint(path)
    weights, stored = weights_of(content), checkpoint.meta_of(content).get("settings", {})
    if is_detectron2(weights):
        weights = detectron2_names(weights)
        stored = infer_settings(weights, repr(str(path)))
        if stored.pop("num_classes") != len(images.categories):
            raise ValueError(
                f"{str(path)!r} detects {weights['roi_heads.box_predictor.cls_score.bias'].numel() - 1} categories, "
                f"but {str(images.json_path)!r} has {len(images.categories)}"
            )
        stored["categories"] = images.categories
    if "categories" not in stored:
        raise ValueError(f"{str(path)!r} holds no detector of this program or of detectron2's ViTDet")
    for name in MODEL_FLAGS:
        if name in given and getattr(args, name) != stored[name]:
            raise ValueError(
                f"--{name} {getattr(args, name)}, but the model at {str(path)!r} has {stored[name]}: leave it out"
            )
    check_categories(stored["categories"], images, f"the model at {str(path)!r}")
    model = build_detector({**stored, "drop_path": 0.0})
    checkpoint.load_strict(model, weights, f"the weights in {str(path)!r}")
    return model.eval()


def evaluate_only(args: argparse.Namespace, given: set[str]) -> dict[str, Any]:
    """Evaluates the model at --resume on the validation images and returns the scores."""
    process = distributed.init_process(args.device)
    refuse_different_starts(args)
    if args.resume in ("auto", "none"):
        raise ValueError("--eval needs --resume: a checkpoint of this program or of detectron2, or a run's folder")
    check_least(args, 0, "num_workers num_pictures")
    coco_masks()
    images = open_split(args, "val", False)
    model = load_detector(args.resume, args, given, images).to(process.device)
    normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD).to(process.device)
    autocast = precision(args.precision, process.device).autocast
    num_pictures = args.num_pictures if "output_dir" in given else 0
    workers = num_workers(args, process)
    results, pictures = detect_all(model, images, normalize, autocast, workers, num_pictures=num_pictures)
    scores = score_detections(images, results, model.roi_heads.has_mask()) | {"num_images": len(images)}
    if process.is_main:
        print(describe_scores(scores))
        if pictures:
            path = Path(args.output_dir) / PICTURE
            path.parent.mkdir(parents=True, exist_ok=True)
            save(draw_pictures(pictures, [name for _, name in images.categories]), path)
            print(f"pictures: {path}")
    distributed.shut_down()
    return scores


if __name__ == "__main__":
    run_program(main, PROGRAM)
