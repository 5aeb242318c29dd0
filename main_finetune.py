r"""Fine-tunes a pre-trained encoder: all of it, its last blocks, or a linear probe. Evaluates any classifier.

    torchrun --nproc_per_node 8 main_finetune.py --recipe finetune_vit_base --data_path IMAGENET --compile \
        --finetune output/prmim
    python main_finetune.py --recipe finetune_vit_base --trainable_blocks 2 --finetune ... # the last two blocks
    python main_finetune.py --recipe linprobe_vit_base --finetune ...                      # the head alone
    python main_finetune.py --eval --resume mae_finetuned_vit_base.pth --data_path IMAGENET
    python main_finetune.py --eval --eval_set imagenet_c --resume output/finetune --data_path IN-C --output_dir OUT

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from encoders.classifiers import MODELS, build_classifier, plain_size
from encoders.load import FirstWeights, load_encoder, read_first
from engine_finetune import BatchAugmentation, evaluate_images, train_one_epoch
from recipes import FINETUNE_DEFAULTS, FINETUNE_RECIPES, LINPROBE_DEFAULTS
from util.data.datasets import AddressedDataset, StepBatchSampler, stack
from util.data.finetune_augment import FinetuneAugment
from util.data.images import check_classes, match_splits, note_on_small_images
from util.data.open import open_everywhere
from util.data.pixel_format import RGB8, PixelFormat
from util.data.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop, with_vflip
from util.evaluate import robustness
from util.evaluate.context import EvalContext
from util.evaluate.evaluator import Evaluator
from util.evaluate.results import Evaluation, accuracy_text, folder_of_eval
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.start.begin import begin
from util.run.start.flags import (
    DATA_FLAGS,
    DROP_PATH_FLAG,
    FINETUNE_FLAG,
    INVALID_FLAGS,
    OPTIMISATION_FLAGS,
    PIXEL_FLAGS,
    RECIPE_FLAG,
    REPEAT_FLAG,
    SIZE_FLAGS,
    all_valid_flag,
    eval_split_flag,
    run_flags,
)
from util.run.start.plan import Plan, check_repeats, schedule_by_epochs
from util.run.start.run import Run
from util.run.start.statistics import choose_statistics
from util.run.train.bad_images import BadImages
from util.run.train.logging import open_log, summary_rows
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver
from util.run.train.training import BetweenSteps, end_check, train
from util.run.train.wrap import wrap_model
from util.text import count_of

PROGRAM = "main_finetune.py"


TASK_FLAGS = (
    RECIPE_FLAG,
    Flag(
        "eval",
        bool,
        False,
        "only evaluate the classifier at --resume on --eval_split",
        everyday=True,
        changes="nothing",
    ),
    Flag(
        "eval_set",
        help="with --eval: --data_path is this published test set of ImageNet classifiers",
        changes="nothing",
        choices=robustness.EVAL_SETS,
    ),
)

IMAGES_OF_EVAL = (all_valid_flag("with --eval: "), eval_split_flag("with --eval: "))

AUGMENTATION_FLAGS = (
    Flag("aa", help="timm's RandAugment policy, or none", everyday=True),
    Flag("color_jitter", float, help="strength of colour jitter; not with --aa", at_least=0),
    Flag("smoothing", float, help="label smoothing", at_least=0, at_most=1),
    Flag("reprob", float, help="probability of random erasing", at_least=0, at_most=1),
    Flag("remode", str, "pixel", "content of the erased box", choices=("pixel", "rand", "const")),
    Flag("recount", int, 1, "largest number of erased boxes; each image draws from 1 to it", at_least=1),
    Flag("mixup", float, help="alpha of mixup; 0: off", everyday=True, at_least=0),
    Flag("cutmix", float, help="alpha of cutmix; 0: off", everyday=True, at_least=0),
    Flag("mixup_prob", float, 1.0, "probability that a batch is mixed", at_least=0, at_most=1),
    Flag("mixup_switch_prob", float, 0.5, "probability of cutmix if both are on", at_least=0, at_most=1),
    Flag("mixup_mode", str, "batch", "what shares one mixing ratio", choices=("batch", "pair", "elem")),
    Flag("clip_crop", bool, help="one try per crop, clipped to the image: MAE's linear probing; not with --aa"),
)

MODEL_FLAGS = (
    Flag("model", str, "vit_base_patch16", "encoder and size", everyday=True, choices=MODELS),
    FINETUNE_FLAG,
    Flag("first_release_merging", bool, False, "--finetune is one of GreenMIM's public files"),
    *SIZE_FLAGS,
    Flag(
        "trainable_blocks",
        int,
        help="train the head and this many last blocks; 0: linear probing (default: all)",
        everyday=True,
        at_least=0,
    ),
    Flag(
        "global_pool",
        help="input of the head (default: avg; token for linear probing)",
        everyday=True,
        choices=("avg", "token"),
    ),
    Flag("train_pos_embed", bool, True, "train the position table; off (TEC): keep it as it was pre-trained"),
    Flag("cls_token_mlp", bool, False, "train the MLP on TEC's class token; off: fold it into the token"),
    DROP_PATH_FLAG,
    Flag("nb_classes", int, help="number of classes (default: inferred from the data; error on mismatch)", at_least=1),
)

OPTIMIZER_FLAGS = (
    Flag("optimizer", help="default: adamw; lars for linear probing", choices=("adamw", "lars")),
    Flag(
        "layer_decay",
        float,
        help="factor on the learning rate from each layer to the one before it",
        everyday=True,
        at_most=1,
        above=0,
    ),
    Flag(
        "cls_token_layer_decay",
        bool,
        True,
        "give the class token the first layer's learning rate; off (TEC): the head's",
    ),
)

EVALUATION_FLAGS = (
    Flag(
        "eval_every",
        int,
        1,
        "epochs between evaluations; the last epoch is always evaluated",
        everyday=True,
        changes="nothing",
        at_least=1,
    ),
    Flag(
        "crop_pct",
        float,
        help="val images are resized to input_size / crop_pct (default: .875; 1 above 224 px)",
        above=0,
    ),
)


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, __doc__, *TASK_FLAGS)
    parser.add_flags("data", *DATA_FLAGS, REPEAT_FLAG, *PIXEL_FLAGS, *INVALID_FLAGS, *IMAGES_OF_EVAL)
    parser.add_flags("augmentation", *AUGMENTATION_FLAGS)
    parser.add_flags("model", *MODEL_FLAGS)
    parser.add_flags("optimisation", *OPTIMISATION_FLAGS, *OPTIMIZER_FLAGS)
    parser.add_flags("evaluation", *EVALUATION_FLAGS)
    parser.add_flags("run", *run_flags())
    parser.set_defaults(output_dir="output/finetune", **FINETUNE_DEFAULTS)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags). Linear probing has other defaults; a recipe and explicit flags win over both."""
    parser = get_args_parser()
    parser.read(argv, FINETUNE_RECIPES)
    trainable_blocks = parser.values["trainable_blocks"]
    is_probe = trainable_blocks == 0
    if parser.recipe and (parser.recipe.get("trainable_blocks") == 0) != is_probe:
        probes = ", ".join(name for name in FINETUNE_RECIPES if "linprobe" in name)
        parser.error(
            f"recipe {parser.given['recipe']!r} does not go with --trainable_blocks {trainable_blocks}: linear probing "
            f"(0) has recipes of its own, {probes}"
        )
    if is_probe:
        parser.set_defaults(**LINPROBE_DEFAULTS)
    args = parser.resolve()
    args.aa = None if args.aa == "none" else args.aa
    args.global_pool = args.global_pool or ("token" if is_probe else "avg")
    args.optimizer = args.optimizer or ("lars" if is_probe else "adamw")
    if args.aa and args.color_jitter:
        parser.error(f"--color_jitter {args.color_jitter} is not applied with --aa {args.aa}: add --aa none")
    if isinstance(args.input_size, list):
        if len(args.input_size) > 2:
            parser.error(f"--input_size takes one or two numbers, got {args.input_size}")
        args.input_size = plain_size(args.input_size)
    return parser, args


def check_flags(args: argparse.Namespace, plan: Plan) -> None:
    """ValueError if flags of fine-tuning do not go together."""
    batch_size = plan.batch_size
    if args.all_valid:
        raise ValueError("--all_valid is for --eval: fine-tuning takes all pixels as valid unless a flag marks some")
    if args.eval_set or args.eval_split != "val":
        raise ValueError("--eval_set and --eval_split are for --eval: fine-tuning is evaluated on val/")
    if args.clip_crop and (args.aa or args.color_jitter):
        raise ValueError(f"--clip_crop goes without --aa and --color_jitter, got {args.aa!r} and {args.color_jitter}")
    check_repeats(args, batch_size)
    if (args.mixup or args.cutmix) and batch_size // args.repeat_aug % 2:  # timm mixes number i with the i-th last one
        repeats = f" / --repeat_aug {args.repeat_aug}" if args.repeat_aug > 1 else ""
        raise ValueError(f"mixup pairs the images of a batch, so --batch_size{repeats} must be even, got {batch_size}")
    if args.trainable_blocks == 0 and args.model.startswith(("swin_", "relative_vit_")):
        raise ValueError(
            f"--trainable_blocks 0, linear probing, reads a class token, which --model {args.model} does not offer: "
            "downstream/probe/main_probe.py probes its patch tokens"
        )
    if args.trainable_blocks == 0 and batch_size == 1:
        raise ValueError("a linear probe's BatchNorm needs more than one image a micro-batch, got --batch_size 1")


def make_augmentation(
    args: argparse.Namespace, img_size: Sequence[int], pixels: PixelFormat, given: Set[str]
) -> tuple[Callable, list[str]]:
    """Returns (the augmentation of single training images, notes).

    Policies and colour jitter are for RGB of 8 bits. Other images are only cropped and flipped. given: flags that were
    set explicitly. ValueError if one of them cannot be applied.
    """
    reference = args.loader == "reference"
    if not args.clip_crop and pixels == RGB8:
        augment = FinetuneAugment(
            img_size, args.seed, args.crop_scale, args.aa, args.color_jitter, reference, hflip=args.hflip
        )
        return with_vflip(augment, args.vflip, args.seed), []
    notes = []
    for name in ("aa", "color_jitter"):
        value = getattr(args, name)
        if value and name in given:
            raise ValueError(f"--{name} {value} is for RGB images of 8 bits, the data has {pixels}: leave it out")
        if value:
            notes.append(f"note: --{name} {value} is not applied, because the images have {pixels}")
    crop = RandomResizedCropFlip(
        img_size, args.seed, args.crop_scale, clip=bool(args.clip_crop), reference=reference, hflip=args.hflip
    )
    return with_vflip(crop, args.vflip, args.seed), notes


def make_batch_augmentation(args: argparse.Namespace, num_classes: int, device: torch.device) -> BatchAugmentation:
    """Returns random erasing, mixup and cutmix, and label smoothing."""
    from timm.data import Mixup
    from timm.data.random_erasing import RandomErasing

    erase = None
    mixup = None
    if args.reprob:
        erase = RandomErasing(args.reprob, mode=args.remode, max_count=args.recount, device=device)
    if args.mixup or args.cutmix:
        mixup = Mixup(
            mixup_alpha=args.mixup,
            cutmix_alpha=args.cutmix,
            prob=args.mixup_prob,
            switch_prob=args.mixup_switch_prob,
            mode=args.mixup_mode,
            label_smoothing=args.smoothing,
            num_classes=num_classes,
        )
    return BatchAugmentation(erase, mixup, args.smoothing)


def make_optimizer(model: nn.Module, args: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    """Returns AdamW or LARS with layer-wise learning rates."""
    from timm.optim import param_groups_layer_decay

    groups = param_groups_layer_decay(model, args.weight_decay, model.no_weight_decay(), layer_decay=args.layer_decay)
    if args.optimizer == "lars":
        from util.lars import LARS

        return LARS(groups, lr=lr, weight_decay=args.weight_decay)
    assert args.optimizer == "adamw"
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), fused=True)


def match_run(run: Run, model: nn.Module, classes: list[str]) -> None:
    """ValueError if frozen blocks would stay untrained, or if a resumed run had other classes."""
    if run.resumed is None:
        if model.frozen and run.args.finetune is None:
            blocks = f"--trainable_blocks {run.args.trainable_blocks}"
            raise ValueError(f"{blocks} needs --finetune: the frozen blocks must be pre-trained")
        return
    check_classes(run.resumed.classes or [], classes, "the run", "the data")


def describe_model(model: nn.Module, first: FirstWeights, num_classes: int) -> dict[str, Any]:
    """Returns what the checkpoints say about the model, beside the flags."""
    return {
        "nb_classes": num_classes,
        "input_size": plain_size(model.img_size),
        "patch_size": model.patch_size,
        **first.settings,
    }


def open_data(args: argparse.Namespace) -> tuple[Any, Any]:
    """Opens train/ and val/. ValueError unless both have the same classes, --nb_classes of them."""
    images = open_everywhere(args, "train", labelled=True, max_bad_fraction=args.max_bad_fraction)
    val_images = open_everywhere(args, "val", labelled=True)
    match_splits(images, val_images)
    number = len(images.classes)
    if args.nb_classes not in (None, number):
        raise ValueError(f"--nb_classes {args.nb_classes}, but the data has {number} classes; leave the flag out")
    return images, val_images


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation in one line."""
    return f"{accuracy_text(scores)} on {count_of(int(scores['num_images']), 'image')}"


def make_evaluator(loop: TrainLoop, saver: CheckpointSaver, images: Any) -> Evaluator:
    """Returns the evaluation of a training on `images`."""
    model: Any = loop.model
    args = loop.run.args
    view = ResizeCenterCrop(model.img_size, args.crop_pct, args.loader == "reference")

    def evaluate(context: EvalContext) -> Evaluation:
        return Evaluation(evaluate_images(model, images, view, context))

    return Evaluator(loop, saver, evaluate, describe_scores, best_by="top1")


def main(argv: Sequence[str] | None = None) -> bool | dict[str, float]:
    """Trains to the end of the schedule, or evaluates. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    given = set(parser.given)
    if args.eval:
        from encoders.trained import load
        from eval_finetune import evaluate_set, evaluate_split, open_split, settings_of_eval

        folder = folder_of_eval(parser, args, "this program, of MAE or of timm")
        with begin(PROGRAM, parser, args, folder) as (process, output_dir):
            classifier = load(args.resume, "classification")
            settings = settings_of_eval(args, given, classifier)
            if args.eval_set is not None:
                return evaluate_set(args, classifier, settings, process, output_dir)
            images = open_split(args, settings, classifier.weights.info)
            return evaluate_split(args, classifier, settings, images, process, output_dir)
    largest = 512 if args.trainable_blocks == 0 else 64  # a probe's BatchNorm sees 512 images in MAE's protocol
    with Run.begin(
        PROGRAM, parser, args, argv, check=check_flags, encoder_flag="finetune", default_batch_size=largest
    ) as run:
        with user_errors(parser):  # an error of the user ends the program in one sentence
            first = read_first(run)
            images, val_images = open_data(args)
            classes = images.classes
            run.note(*images.notes, *val_images.notes)
            statistics = choose_statistics(run, images, first.pixels, first.rgb_bands)

            torch.manual_seed(args.seed)  # the same initial weights on every rank
            model = build_classifier({**vars(args), "nb_classes": len(classes), **first.settings})
            load_weights = partial(
                load_encoder,
                model,
                classes=classes,
                first_release_merging=args.first_release_merging,
                rgb_bands=first.rgb_bands,
            )
            run.load_first_weights(first.weights, load_weights, note_without="no --finetune: training from scratch")
            match_run(run, model, classes)
            model = model.to(run.process.device)
            optimizer = make_optimizer(model, args, run.plan.lr)

            augmentation, notes = make_augmentation(args, model.img_size, images.pixel_format, given)
            run.note(*notes, *note_on_small_images(images, model.img_size))
            dataset = AddressedDataset(images, augmentation, replace=args.max_bad_fraction > 0)
            sampler = StepBatchSampler(
                len(dataset),
                run.plan.batch_size,
                run.plan.accum_iter,
                run.process.rank,
                run.process.world_size,
                args.seed,
            )
            if args.repeat_aug > 1:
                from util.data.repeats import with_repeats

                sampler = with_repeats(sampler, args.repeat_aug, range(args.epochs))
            open_loader = partial(run.open_loader, dataset, sampler, stack, model.img_size)

            schedule = schedule_by_epochs(args, run.plan, sampler.steps_per_epoch)
            settings = describe_model(model, first, len(classes))
            info = run.describe(
                images, optimizer, schedule, statistics, settings, val_images=val_images, classes=classes
            )
            state = run.restore(model, optimizer, info)
            model_in_ddp = wrap_model(model, run)
            rows = summary_rows(args.model, model, len(classes), images, val_images)
            log = open_log(run, schedule, info, rows)
            normalize = Normalize(*statistics, images.pixel_format).to(run.process.device)
            loop = TrainLoop(run, model_in_ddp, optimizer, schedule, normalize, log, state, bad_images=dataset.bad)
            if args.check_data:
                return end_check(loop, dataset)

            saver = CheckpointSaver(loop, info)
            evaluator = make_evaluator(loop, saver, val_images)
            between: list[BetweenSteps] = [BadImages(loop, saver, dataset), evaluator]
            augment_batch = make_batch_augmentation(args, len(classes), run.process.device)
            train_steps = partial(train_one_epoch, augment=augment_batch)
            summary = partial(evaluator.summary, args.model, len(images))
        return train(loop, train_steps, open_loader, saver, between, summary)


if __name__ == "__main__":
    run_program(main, PROGRAM)
