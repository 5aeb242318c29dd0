"""Pre-trains an encoder by masked image modelling with PR-MIM.

    python main_pretrain.py --recipe quickstart --data_path PHOTOS --output_dir output/photos
    torchrun --nproc_per_node 8 main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET --compile

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch

import monitor
from encoders.load import FirstWeights, load_blocks, read_first
from engine_pretrain import forward_backward, train_one_epoch, update
from framework import Framework, PixelFramework
from frameworks.hooks.pictures import Pictures
from frameworks.registry import HOOKS, MODELS, build_model, check_files, class_of, hooks_of
from prmim import AGGREGATION, SAMPLING, SpatialAggregation
from recipes import RECIPES
from util import collectives
from util.costs import fitting_images, forward_gmac, utilization
from util.data.datasets import AddressedDataset, StepBatchSampler
from util.data.images import note_on_small_images
from util.data.open import open_everywhere
from util.data.pretrain_augment import make_augmentation
from util.data.transforms import Normalize
from util.flag import Flag
from util.run.cli import Parser, early_values
from util.run.exits import run_program, user_errors
from util.run.start.flags import (
    DATA_FLAGS,
    INVALID_FLAGS,
    OPTIMISATION_FLAGS,
    PIXEL_FLAGS,
    RECIPE_FLAG,
    REPEAT_FLAG,
    SIZE_FLAGS,
    run_flags,
)
from util.run.start.plan import Plan, RunSchedule, check_repeats, schedule_by_epochs
from util.run.start.run import Run
from util.run.start.statistics import choose_statistics
from util.run.train.bad_images import BadImages
from util.run.train.logging import open_log
from util.run.train.loop import TrainLoop
from util.run.train.reports import Measure
from util.run.train.saving import CheckpointSaver
from util.run.train.training import BetweenSteps, TrainSteps, end_check, train
from util.run.train.wrap import wrap_model
from util.text import count_of, shorten

PROGRAM = "main_pretrain.py"
MODEL = "mae_vit_base_patch16"
BLR = 1.5e-4  # per 256 images; MAE's, for a total batch of 4096 and 800 epochs
FEW_STEPS = 688  # of the shortest pre-training that was seen to help: that of scripts/quickstart.sh

IMAGE_FLAGS = (
    *DATA_FLAGS,
    REPEAT_FLAG,
    *PIXEL_FLAGS,
    *INVALID_FLAGS,
    Flag(
        "crop",
        str,
        "resized",
        "resized: a random resized crop, as in MAE; padded: MFF's",
        choices=("resized", "padded"),
    ),
    Flag("interpolation", str, "bicubic", "interpolation of the crop", choices=("bicubic", "bilinear")),
)

METHOD_FLAGS = (
    Flag("model", str, MODEL, "framework and size, which may have more flags", everyday=True, choices=MODELS),
    *SIZE_FLAGS,
    Flag(
        "drop_path",
        float,
        help="drop path rate of the encoder's last block; it grows linearly from 0 (default: the model's)",
        metavar="RATE",
        at_least=0,
        below=1,
    ),
    # the path: the identity of the first weights is compared
    Flag(
        "pretrained",
        help="start from these weights: a checkpoint or a run's folder (default: random weights)",
        everyday=True,
        changes="nothing",
    ),
    Flag(
        "trainable_blocks",
        int,
        help="train this many last blocks of the encoder, and the decoder; needs --pretrained (default: all)",
        at_least=0,
    ),
    Flag(
        "decoder_warmup_epochs",
        int,
        0,
        "epochs at the start in which the encoder of --pretrained stays as it is",
        at_least=0,
    ),
    Flag("mask_ratio", float, 0.75, "share of all tokens that are masked", everyday=True),
    Flag("throw_ratio", float, 0.5, "share of all tokens that are thrown; 0: the original framework", everyday=True),
    Flag("progressive", bool, True, "reconstruct thrown tokens; --no-progressive: leave them out", everyday=True),
    Flag("sampling", str, "furthest", "how the retained tokens are chosen", everyday=True, choices=SAMPLING),
    Flag("aggregation", str, "dwconv", "what reconstructs the thrown tokens", everyday=True, choices=AGGREGATION),
    Flag("kernel_size", int, 7, "kernel size of the aggregation, odd"),
    Flag("applies_to", str, "thrown", "tokens the aggregation replaces", choices=SpatialAggregation.APPLIES_TO),
    Flag("norm_pix_loss", bool, True, "normalise the target pixels of each patch", everyday=True),
)

RUN_FLAGS = (
    Flag(
        "cuda_graph",
        bool,
        False,
        "launch a step as CUDA graphs, for hosts that are too slow for its kernels (on an H100 a ViT-S was 3 "
        "times as fast); one GPU, one shape of batches",
        changes="rounding",
    ),
    Flag(
        "picture_every",
        int,
        10,
        "epochs between pictures of reconstructions, in the folder of the run and in TensorBoard; 0: none",
        changes="nothing",
        at_least=0,
    ),
)


def get_args_parser(model: str = MODEL, samplings: Sequence[str] = ()) -> Parser:
    """Returns the parser of a run with this model and one of these samplings, which may have flags of their own."""
    parser = Parser(PROGRAM, __doc__, RECIPE_FLAG)
    parser.add_flags("data", *IMAGE_FLAGS)
    parser.add_flags("model and method", *METHOD_FLAGS)
    for sampling in HOOKS.keys() & samplings:
        parser.add_flags(f"only for --sampling {sampling}", *hooks_of(sampling).FLAGS)
    parser.add_flags("optimisation", *OPTIMISATION_FLAGS, Flag("betas", float, (0.9, 0.95), "betas of AdamW", nargs=2))
    parser.add_flags("run", *run_flags(), *RUN_FLAGS, *monitor.FLAGS)
    if model in MODELS:
        framework = class_of(model)
        parser.add_flags(f"only for some models, as {model}", *framework.flags)
        if framework.shared_visible:  # by all images of a micro-batch
            parser.changes["batch_size"] = "results"
    parser.set_defaults(warmup_epochs=40, blr=BLR, min_lr=0.0, crop_scale=(0.2, 1.0), output_dir="output/pretrain")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags). A recipe sets defaults; explicit flags win.

    Model and sampling are read first, because they decide which flags there are.
    """
    given = early_values(argv, "recipe", "model", "sampling")
    recipe = RECIPES.get(given.get("recipe", ""), {})
    model = given.get("model", str(recipe.get("model", MODEL)))
    parser = get_args_parser(model, [given.get("sampling", ""), str(recipe.get("sampling", ""))])
    return parser, parser.parse_args(argv, recipes=RECIPES)


def unused_flags(args: argparse.Namespace) -> dict[str, str]:
    """Returns {flag: reason} for the flags that have no effect, whatever their values, because of what others say.

    They may have defaults, or values of a recipe, but a command must not give them.
    """
    model = class_of(args.model)
    aggregation = ["aggregation", "kernel_size", "applies_to"]
    unused = {}
    if args.throw_ratio == 0:
        unused = dict.fromkeys(["progressive", *aggregation], "--throw_ratio 0 throws no tokens")
        if args.sampling != "attention":  # which AMT needs all the same, and other models refuse
            unused["sampling"] = "--throw_ratio 0 retains all masked tokens"
    elif not args.progressive:
        unused = dict.fromkeys(aggregation, "--no-progressive leaves thrown tokens out")
    elif not getattr(AGGREGATION[args.aggregation], "has_window", True):
        unused["kernel_size"] = f"--aggregation {args.aggregation} has no window"
    if not issubclass(model, PixelFramework):
        unused["norm_pix_loss"] = f"the targets of {args.model} are no pixels"
    if args.crop == "padded":
        unused["crop_scale"] = "--crop padded does not scale"
    if args.lr is not None:
        unused["blr"] = "--lr sets the rate"
    if args.lr_schedule == "simmim_steps":
        unused["min_lr"] = "--lr_schedule simmim_steps has no smallest rate"
    if args.warmup_epochs == 0:
        unused["warmup_lr"] = "there is no warm-up"
    return unused


def make_optimizer(model: Framework, args: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    """Returns AdamW, without weight decay on biases, norms and what the model names.

    `first_epoch` of a group: the one with which its training begins.
    """
    from timm.optim import param_groups_weight_decay

    groups = param_groups_weight_decay(model, args.weight_decay, no_weight_decay_list=model.no_weight_decay())
    if args.decoder_warmup_epochs:
        encoder = set(model.encoder_parameters())
        for group in list(groups):
            rest = [p for p in group["params"] if p not in encoder]
            group["params"] = [p for p in group["params"] if p in encoder]
            groups.append({**group, "params": rest})
            group["first_epoch"] = args.decoder_warmup_epochs
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(args.betas), fused=True)


def summary_rows(args: argparse.Namespace, model: Framework, images: Any) -> dict[str, str]:
    """Returns what is printed about model and data at the start."""
    million = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    number = count_of(len(images), "image")
    if images.classes:
        number += f" of {count_of(len(images.classes), 'class')} ({shorten(images.classes)})"
    return {
        "model": f"{args.model}, {million:.1f} M trainable parameters",
        "tokens": f"{model.counts.num_tokens} = {model.counts}",
        "data": f"{number} in {images.root}",
    }


def describe_model(model: Framework, first: FirstWeights) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what the checkpoints say about the model, beside the flags: (settings, {flag: fingerprint of a file})."""
    files = {}
    for flag, file in model.named_files().items():
        if file.fingerprint is not None:
            files[flag] = file.fingerprint
    settings = {"input_size": model.img_size, "patch_size": model.patch_size, **model.own_settings()}
    settings |= {**getattr(model, "traits", {}), "rgb_bands": first.rgb_bands}
    return settings, files


def summary_of_run(loop: TrainLoop, num_images: int) -> list[str]:
    """Returns a summary of the whole run, made from its log. A finished run that is started again prints it again."""
    args = loop.run.args
    history = loop.log.history()
    lines = [f"pre-trained {args.model} at throw_ratio {args.throw_ratio} {loop.progress(num_images)}"]
    losses = []
    for report in history:
        if report.get("epoch_loss") is not None:
            losses.append(f"{report['epoch_loss']:.4f} in epoch {report['epoch']}")
    if losses:
        line = f"  loss         {losses[0]}"
        if len(losses) > 1:
            line += f", {losses[-1]}"
        lines.append(line)
    return [*lines, *monitor.summary_lines(history)]


def check_flags(args: argparse.Namespace, plan: Plan, given: Set[str]) -> None:
    """ValueError if flags cannot work together. The model is tried out on the meta device, before images are read.

    given: names of the flags of the command.
    """
    check_repeats(args, plan.batch_size)
    check_files(vars(args))
    with torch.device("meta"):
        model = build_model(vars(args), read_files=False)
    hooks = hooks_of(args.sampling)
    if hooks is not None:
        hooks.check_sampling(args, model)
    elif model.needs_attention:
        raise ValueError(f"{args.model} draws its tokens by attention: set --sampling attention")
    model.collator(args.sampling, args.seed)  # ValueError if squares of --mask_unit do not fit the grid
    if args.trainable_blocks is not None:
        if args.pretrained is None:
            raise ValueError("--trainable_blocks needs --pretrained: the frozen blocks must be pre-trained")
        freeze_blocks(model, args)
    if args.decoder_warmup_epochs:
        if args.pretrained is None or not hasattr(model, "encoder_parameters"):
            raise ValueError("--decoder_warmup_epochs needs --pretrained and a ViT")
        model.encoder_parameters()  # ValueError if they cannot be held
    unused = unused_flags(args)
    unused_and_given = sorted(unused.keys() & given)
    if unused_and_given:
        name = unused_and_given[0]
        raise ValueError(f"--{name} has no effect, because {unused[name]}: leave it out")
    if args.cuda_graph:
        check_capture(args, plan, model)


def freeze_blocks(model: Framework, args: argparse.Namespace, has_new_bands: bool = False) -> None:
    """Freezes what --trainable_blocks leaves out. ValueError if it does not fit the model."""
    freeze = getattr(model, "freeze_all_but", None)
    if freeze is None:
        raise ValueError(f"--trainable_blocks is for ViTs, and {args.model} is none")
    freeze(args.trainable_blocks, has_new_bands)


def check_capture(args: argparse.Namespace, plan: Plan, model: Framework) -> None:
    """ValueError if a step of this run cannot be captured as a CUDA graph."""
    _, world_size = collectives.rank_and_world_size()
    needs = [
        (plan.device == "cuda", f"a GPU, and the device is {plan.device}"),
        (world_size == 1, f"a single process, and there are {world_size}"),
        (plan.precision != "fp16", f"--precision bf16 or fp32, and it is {plan.precision}"),
        (args.sampling != "attention", "a model that does not change: leave out --sampling attention"),
        (not args.recompute and not args.recompute_pointwise, "a step without recomputation: leave out --recompute"),
        (not model.shared_visible, f"batches of one shape, which those of --model {args.model} are not"),
    ]
    for is_met, need in needs:
        if not is_met:
            raise ValueError(f"--cuda_graph needs {need}")


def fitting_batch(args: argparse.Namespace) -> Callable[[int, str], int] | None:
    """Returns what says how many images fit a GPU. None where the size of a micro-batch changes the results."""
    if class_of(args.model).shared_visible:
        return None
    return partial(fitting_images, vars(args), build_model)


def note_on_few_steps(run: Run, schedule: RunSchedule) -> list[str]:
    """Returns a note if a run from random weights may be too short."""
    if schedule.num_steps >= FEW_STEPS or run.first_weights is not None:
        return []
    steps = count_of(schedule.num_steps, "step")
    return [f"note: {steps} may be too few: the shortest run that was seen to help had {FEW_STEPS} (--epochs)"]


def measures_of(settings: dict[str, Any], run: Run) -> list[Measure]:
    """Returns what reports compute of their values: the use of the GPUs, unless maps change the token counts."""
    if hooks_of(settings["sampling"]) is not None:
        return []
    count = partial(forward_gmac, settings, build_model)
    return utilization(run.process.device, run.plan.precision, count)


def main(argv: Sequence[str] | None = None) -> bool:
    """Pre-trains to the end of the schedule. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    check = partial(check_flags, given=set(parser.given))
    with Run.begin(
        PROGRAM, parser, args, argv, check=check, encoder_flag="pretrained", fitting_batch=fitting_batch(args)
    ) as run:
        with user_errors(parser):  # an error of the user ends the program in one sentence
            first = read_first(run)
            images = open_everywhere(args, "train", max_bad_fraction=args.max_bad_fraction)
            val_images, notes = monitor.open_queries(args, images)
            statistics = choose_statistics(run, images, first.pixels, first.rgb_bands)
            run.note(*images.notes, *notes)

            torch.backends.cudnn.benchmark = True  # shapes are static
            torch.manual_seed(args.seed)  # the same initial weights on every rank
            # What the first weights ask for takes the place of defaults, and flags that were given win.
            model_settings = {**vars(args), **first.settings, **parser.flags_chosen()}
            model = build_model(model_settings)
            model = model.to(run.process.device)
            for file in model.named_files().values():  # such as a teacher
                file.use_statistics(*statistics)
                run.note(file.origin)
            run.load_first_weights(first.weights, partial(load_blocks, model, rgb_bands=first.rgb_bands))
            if args.trainable_blocks is not None:
                freeze_blocks(model, args, has_new_bands=first.rgb_bands is not None)
            optimizer = make_optimizer(model, args, run.plan.lr)

            augmentation = make_augmentation(args, model.img_size)
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
            collator = model.collator(args.sampling, args.seed)
            open_loader = partial(run.open_loader, dataset, sampler, collator, model.img_size)
            schedule = schedule_by_epochs(args, run.plan, sampler.steps_per_epoch)
            run.note(*note_on_few_steps(run, schedule), *note_on_small_images(images, model.img_size))

            settings, files = describe_model(model, first)
            info = run.describe(images, optimizer, schedule, statistics, settings, files=files)
            state = run.restore(model, optimizer, info)  # weights, moments, sums: to the bit
            model_in_ddp = wrap_model(model, run)
            log = open_log(run, schedule, info, summary_rows(args, model, images))
            normalize = Normalize(*statistics, images.pixel_format).to(run.process.device)
            measures = measures_of(model_settings, run)
            loop = TrainLoop(
                run, model_in_ddp, optimizer, schedule, normalize, log, state, bad_images=dataset.bad, measures=measures
            )
            if args.check_data:
                return end_check(loop, dataset)

            saver = CheckpointSaver(loop, info)
            between: list[BetweenSteps] = [
                BadImages(loop, saver, dataset),
                Pictures(loop, images, info.settings),
                monitor.Monitor(loop, images, val_images),
            ]
            hooks = hooks_of(args.sampling)
            if hooks is not None:
                between.append(hooks.Phases(loop, dataset, sampler))
            train_steps: TrainSteps = train_one_epoch
            if args.cuda_graph:
                graphs = loop.capture_steps(forward_backward, update)
                train_steps = partial(train_one_epoch, forward_backward=graphs.forward_backward, update=graphs.update)
            summary = partial(summary_of_run, loop, len(images))
        return train(loop, train_steps, open_loader, saver, between, summary)


if __name__ == "__main__":
    run_program(main, PROGRAM)
