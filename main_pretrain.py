"""Pre-trains an encoder by masked image modelling with PR-MIM.

    python main_pretrain.py --recipe quickstart --data_path PHOTOS --output_dir output/photos
    torchrun --nproc_per_node 8 main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET --batch_size 512

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import nn

import models_mae_pr
import monitor
from encoders.names import load_pretrained
from engine_pretrain import compile_shapes, train_one_epoch
from framework import Framework
from frameworks import (
    attention_phases,
    models_amt_pr,
    models_crossmae_pr,
    models_greenmim_pr,
    models_localmim_pr,
    models_mff_pr,
    models_simmim_pr,
    models_tec_pr,
)
from frameworks.reconstruction import crops, reconstruction_picture
from prmim import SAMPLING, SpatialAggregation
from recipes import RECIPES
from util.data.datasets import steps_per_epoch
from util.data.images import evenly_spaced
from util.data.open import data_settings, open_everywhere
from util.data.statistics import choose_statistics
from util.data.transforms import Normalize, PaddedCropFlip, RandomResizedCropFlip
from util.run import distributed, shard
from util.run.checkpoint import find_checkpoint_file, load_strict, meta_of, pixel_settings, read_checkpoint
from util.run.cli import Parser, parse_with_recipe, run_program
from util.run.encoder_origin import choose_encoder, warn_if_unfinished
from util.run.ending import closing_lines, describe_progress, end_after_signal, finish_run
from util.run.errors import exit_on_setup_errors, exit_on_training_errors
from util.run.flags import (
    Plan,
    add_data_flags,
    add_optimisation_flags,
    add_pixel_flags,
    add_run_flags,
    check_pixel_flags,
    free_flags,
    make_plan,
    schedule_by_epochs,
)
from util.run.loop import TrainLoop
from util.run.resume import RunRecord, has_drop_path, json_settings, read_run, restore
from util.run.saving import step_ranges
from util.run.setup import announce, assemble, build_device
from util.run.signals import StopSignal
from util.run.start import enter_folder, join_processes
from util.text import count_of

FRAMEWORKS = (
    models_mae_pr,
    models_mff_pr,
    models_simmim_pr,
    models_localmim_pr,
    models_tec_pr,
    models_greenmim_pr,
    models_crossmae_pr,
    models_amt_pr,
)
FRAMEWORK_OF = {name: module for module in FRAMEWORKS for name in module.__all__ if name.islower()}
MODELS = {name: getattr(module, name) for name, module in FRAMEWORK_OF.items()}
# Frameworks' flags that name files, such as a teacher's. A file may move, so its content is compared, not its path.
PATH_FLAGS = {flag for module in FRAMEWORKS for flag in getattr(module, "PATH_FLAGS", ())}
FREE_FLAGS = {"picture_every", "pretrained"} | PATH_FLAGS | monitor.FLAGS  # may differ between two starts of a run
PROGRAM = "main_pretrain.py"


def own_flags() -> dict[str, tuple[argparse.Action, list[ModuleType]]]:
    """Returns {flag: (its definition, the framework files that declare it)} for the flags of some frameworks only."""
    found: dict[str, tuple[argparse.Action, list[ModuleType]]] = {}
    for module in FRAMEWORKS:
        if hasattr(module, "add_flags"):
            group = argparse.ArgumentParser().add_argument_group()
            module.add_flags(group)
            for action in group._group_actions:
                found.setdefault(action.dest, (action, []))[1].append(module)
    return found


def families_of(modules: Sequence[ModuleType]) -> str:
    """Returns the first words of the names of the frameworks' models, for example "mae, mff"."""
    return ", ".join(module.__name__.removeprefix("models_").removesuffix("_pr") for module in modules)


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, description=__doc__)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--recipe", metavar="NAME", help="set defaults from recipes.py, or `list` them; explicit flags win")

    method = parser.add_argument_group("model and method").add_argument
    method("--model", default="mae_vit_base_patch16", choices=MODELS, help="framework and size")
    method("--input_size", type=int, nargs="+", help="image side in pixels, or height and width (default: the model's)")
    method("--patch_size", type=int, help="patch side in pixels (default: the model's)")
    method("--pretrained", help="start from these weights: a checkpoint or a run's folder (default: random weights)")
    method("--mask_ratio", type=float, default=0.75, help="share of all tokens that are masked")
    method(
        "--throw_ratio", type=float, default=0.5, help="share of all tokens that are thrown; 0: the original framework"
    )
    method(
        "--progressive",
        action=boolean,
        default=True,
        help="reconstruct thrown tokens; --no-progressive: leave them out",
    )
    method("--sampling", default="furthest", choices=SAMPLING, help="how the retained tokens are chosen")
    method(
        "--aggregation", default="dwconv", choices=SpatialAggregation.KINDS, help="what reconstructs the thrown tokens"
    )
    method("--kernel_size", type=int, default=7, help="kernel size of the aggregation, odd")
    method(
        "--applies_to", default="thrown", choices=SpatialAggregation.APPLIES_TO, help="tokens the aggregation replaces"
    )
    method("--norm_pix_loss", action=boolean, default=True, help="normalise the target pixels of each patch")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for action, modules in own_flags().values():
        title = f"only for {families_of(modules)} models"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title]._add_action(action)

    attention_phases.add_flags(parser.add_argument_group("only for --sampling attention"))

    optimisation = parser.add_argument_group("optimisation")
    add_optimisation_flags(optimisation)
    optimisation.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), help="betas of AdamW")
    data = parser.add_argument_group("data")
    add_data_flags(data)
    add_pixel_flags(data)
    help_text = "resized: a random resized crop, as in MAE; padded: MFF's"
    data.add_argument("--crop", default="resized", choices=("resized", "padded"), help=help_text)
    data.add_argument(
        "--interpolation", default="bicubic", choices=("bicubic", "bilinear"), help="interpolation of the crop"
    )
    run = parser.add_argument_group("run")
    add_run_flags(run)
    run.add_argument("--picture_every", type=int, default=10, help="epochs between pictures in TensorBoard; 0: none")
    monitor.add_flags(run)
    parser.set_defaults(warmup_epochs=40, blr=1.5e-4, min_lr=0.0, crop_scale=(0.2, 1.0), output_dir="output/pretrain")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags). A recipe sets defaults; explicit flags win."""
    parser = get_args_parser()
    return parser, parse_with_recipe(parser, RECIPES, argv)


def build_model(settings: Mapping[str, Any], read_files: bool = True) -> Framework:
    """Builds the model that `settings` describe: vars(args) or a checkpoint's. ValueError for an impossible pair.

    read_files: whether to read the files that a framework's flags name. On the meta device nothing can be read.
    """
    name = settings["model"]
    if not read_files:
        settings = {**settings, **dict.fromkeys(PATH_FLAGS)}
    names = ["mask_ratio", "throw_ratio", "progressive", "kernel_size", "aggregation", "applies_to", "norm_pix_loss"]
    options = {option: settings[option] for option in names} | {"in_chans": settings.get("in_chans", 3)}
    for flag, (_, modules) in own_flags().items():
        if settings.get(flag) is not None:
            if FRAMEWORK_OF[name] not in modules:
                owners = families_of(modules)
                raise ValueError(f"--{flag} belongs to {owners} models, but --model is {name}: leave it out")
            options[flag] = settings[flag]
    if settings["patch_size"] is not None:
        options["patch_size"] = settings["patch_size"]
    if settings["input_size"] is not None:
        if len(settings["input_size"]) > 2:
            raise ValueError(f"--input_size takes one or two numbers, got {settings['input_size']}")
        height, *width = settings["input_size"]
        options["img_size"] = (height, *(width or [height]))
    model = MODELS[name](**options)
    if model.counts.num_visible == 0:
        tokens = count_of(model.counts.num_tokens, "token")
        raise ValueError(
            f"--mask_ratio {settings['mask_ratio']} leaves none of {tokens} visible: lower it, or use larger images or "
            "smaller patches"
        )
    return model


def add_newer_settings(settings: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Adds flags that did not exist when the run began, with their defaults, to its `settings`.

    own: the framework's flags now.
    """
    if own.keys() - settings.keys():
        with torch.device("meta"):
            defaults = build_model(settings, read_files=False).own_settings()
        settings |= {flag: value for flag, value in defaults.items() if flag not in settings}


def load_run(path: str | Path, moved: Mapping[str, str] | None = None) -> tuple[Framework, dict[str, Any]]:
    """Loads a model that this program has pre-trained. Returns (model in eval mode, settings of its run).

    path: a checkpoint, or the folder of a run, whose newest intact checkpoint is used. moved: {flag: new path} of files
    that have moved since the run, such as a teacher's.

    ValueError if the checkpoint was not written by this program, or if such a file is not that of the run.
    """
    path = find_checkpoint_file(path)
    content = read_checkpoint(path)
    meta = meta_of(content)
    check_pretrained(meta, path)
    settings = {**meta["settings"], **pixel_settings(meta), **(moved or {})}
    model = build_model(settings)
    for flag, fingerprint in model.checkpoint_meta().items():
        if meta.get(flag, fingerprint) != fingerprint:
            raise ValueError(f"the {flag} {settings[flag]!r} has other weights than that of the run at {str(path)!r}")
    load_strict(model, content["model"], "the checkpoint's weights")
    if settings.get("mean"):
        model.use_statistics(settings["mean"], settings["std"])
    return model.eval(), settings


def check_pretrained(meta: Mapping[str, Any], path: Path) -> None:
    """ValueError unless `meta` belongs to a checkpoint of this program."""
    settings = meta.get("settings", {})
    if "nb_classes" in settings:
        encoder = (meta.get("encoder") or {}).get("path") or settings.get("finetune")
        advice = f"give its encoder, {encoder!r}" if encoder else "give a checkpoint of main_pretrain.py"
        raise ValueError(f"{str(path)!r} is a fine-tuned classifier, which reconstructs no images: {advice}")
    if "mask_ratio" not in settings:
        raise ValueError(
            f"{str(path)!r} does not hold the settings of its model: give a checkpoint of main_pretrain.py; exported "
            "and released weights have no settings"
        )
    if settings["model"] not in MODELS:
        raise ValueError(f"{str(path)!r} holds a {settings['model']!r}, which main_pretrain.py does not know")


def make_augmentation(args: argparse.Namespace, img_size: Sequence[int]) -> Callable:
    """Returns the random crop and flip of training images."""
    how = dict(interpolation=args.interpolation, reference=args.loader == "reference")
    if args.crop == "padded":
        return PaddedCropFlip(img_size, args.seed, **how)
    return RandomResizedCropFlip(img_size, args.seed, args.crop_scale, **how)


def make_optimizer(model: Framework, args: argparse.Namespace, lr: float) -> torch.optim.Optimizer:
    """Returns AdamW without weight decay on biases, norms and what the model names."""
    groups = param_groups_weight_decay(model, args.weight_decay, no_weight_decay_list=model.no_weight_decay())
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(args.betas), fused=True)


def note_on_micro_batch(args: argparse.Namespace, plan: Plan) -> list[str]:
    """Returns a note if the micro-batch is not that of the recipe, for recipes whose results depend on it."""
    size = RECIPES[args.recipe].get("batch_size", plan.batch_size) if args.recipe else plan.batch_size
    if size == plan.batch_size:
        return []
    return [
        f"note: --batch_size is {plan.batch_size}, in recipe {args.recipe} it is {size}: the images of a micro-batch "
        "share their visible tokens, so masks are more or less varied than in the recipe"
    ]


def summary_rows(args: argparse.Namespace, model: Framework, images: Any) -> dict[str, str]:
    """Returns what is printed about model and data at the start."""
    counts, size = model.counts, sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    return {
        "model": f"{args.model}, {size:.1f} M trainable parameters",
        "tokens": f"{counts.num_tokens} = {counts}",
        "data": f"{count_of(len(images), 'image')} in {images.root}",
    }


def summary_of_run(args: argparse.Namespace, loop: TrainLoop, num_images: int, closing: Sequence[str]) -> str:
    """Returns a summary of the whole run, made from its log. A finished run that is started again prints it again."""
    progress = describe_progress(loop, num_images, args.epochs * loop.steps_per_epoch)
    lines = [f"pre-trained {args.model} at throw_ratio {args.throw_ratio} {progress}"]
    finite = [report for report in loop.log.history() if report.get("epoch_loss") is not None]
    losses = [f"{report['epoch_loss']:.4f} in epoch {report['epoch']}" for report in finite[:1] + finite[1:][-1:]]
    if losses:
        lines.append(f"  loss         {', '.join(losses)}")
    return "\n".join([*lines, *monitor.summary_lines(loop.log.history()), *closing])


def compile_planned_shapes(
    wrapped: nn.Module, model: Framework, collator: Callable, loop: TrainLoop, size: int
) -> None:
    """Compiles all shapes that a framework's plans can have, instead of one by one in the middle of training.

    size: images in a micro-batch.
    """
    if model.planner is None:
        return
    pixels = loop.normalize.pixels
    blank = torch.zeros(pixels.channels, *model.img_size, dtype=getattr(torch, pixels.dtype))
    imgs, labels, ids_shuffle, *_ = collator([(blank, 0, (0, i)) for i in range(size)])
    for plans in model.planner.shapes(ids_shuffle[0, : model.counts.num_visible]):
        compile_shapes(wrapped, (imgs, labels, ids_shuffle, *plans), loop)


def draw_reconstructions(
    model: Framework, settings: Mapping[str, Any], images: Any, loop: TrainLoop, is_main: bool
) -> None:
    """Sends a fixed set of training images and their reconstructions to TensorBoard. All ranks must call it."""
    is_sharded = shard.is_sharded(model)
    if not (is_main or is_sharded):  # a sharded model computes on all ranks or on none
        return
    indices = evenly_spaced(len(images), 8)
    ((imgs, ids_shuffle),) = crops(model, settings, images, indices, replace=True)
    with loop.autocast() if is_sharded else nullcontext(), shard.unsharded(model):
        picture = reconstruction_picture(model, loop.normalize, imgs, ids_shuffle)
    loop.log.picture("reconstruction", picture, loop.step)


def main(argv: Sequence[str] | None = None) -> bool:
    """Pre-trains to the end of the schedule. Returns False if a signal stopped the run before."""
    parser, args = parse_args(argv)
    with exit_on_setup_errors(parser):
        process = join_processes(args, PATH_FLAGS)
        plan = make_plan(args, process)
        check_pixel_flags(args, args.in_chans)
        start = enter_folder(PROGRAM, args, argv, process)

        framework = FRAMEWORK_OF[args.model]
        if hasattr(framework, "check_flags"):
            framework.check_flags(vars(args))
        torch.manual_seed(args.seed)  # the same initial weights on every rank
        model = build_model(vars(args)).to(build_device(args, process))
        start.remarks += attention_phases.check_sampling(args, model)
        optimizer = make_optimizer(model, args, plan.lr)

        content = read_run(start, plan.total_batch_size)
        pretrained = choose_encoder(args.pretrained, start, content, "pretrained")
        images = open_everywhere(args, "train", max_bad_fraction=args.max_bad_fraction)
        if content is None and pretrained is not None:
            report = load_pretrained(model, pretrained["path"])
            start.remarks += [f"weights from {pretrained['path']}: {report}", *warn_if_unfinished(pretrained)]
        (mean, std), remarks = choose_statistics(args, images, content, pretrained)
        start.remarks += remarks
        model.use_statistics(mean, std)
        normalize = Normalize(mean, std, images.pixel_format).to(process.device)

        transform = make_augmentation(args, model.img_size)
        collator = model.collator(args.sampling, args.seed)
        derived = {"input_size": model.img_size, "patch_size": model.patch_size, "mean": mean, "std": std}
        if content is not None:
            derived["pretrained"] = content["meta"]["settings"].get("pretrained")
        settings = json_settings(vars(args), asdict(plan), derived, model.own_settings(), data_settings(images))
        data = {"num_images": len(images), "data": images.fingerprint(), "pixels": images.pixel_format.dtype}
        files = model.checkpoint_meta()
        distributed.refuse_differences(files, "model")
        extra = {} if pretrained is None else {"encoder": pretrained}
        epoch_steps = steps_per_epoch(len(images), plan.total_batch_size, process.world_size)
        record = RunRecord(PROGRAM, settings, data, epoch_steps, process, start.origin, extra, files)
        start.remarks += model.notes() + note_on_micro_batch(args, plan) + images.notes
        if content is not None:
            if content["meta"]["settings"]["model"] == args.model:
                add_newer_settings(content["meta"]["settings"], model.own_settings())
            # All images of a micro-batch may share one visible set. Drop path draws by micro-batch and rank.
            fixed = frozenset({"batch_size"} if model.shared_visible else ())
            split_changes_draws = model.shared_visible or has_drop_path(model)
            free = free_flags(plan, FREE_FLAGS)
            restore(content, start, record, model, optimizer, free, args.allow_changes, split_changes_draws, fixed)
        schedule = schedule_by_epochs(args, plan, epoch_steps)
        run = assemble(
            args, plan, start, record, schedule, content, model, optimizer, normalize, images, transform, collator
        )
        phases = attention_phases.AttentionPhases(args, plan, start, model, images, run)
        observer = monitor.Monitor(args, plan, start, model, images, run)
        announce(args, plan, start, schedule, run.loop.log, settings, summary_rows(args, model, images))
        del content  # weights and moments of the checkpoint

    with exit_on_training_errors(parser, run.saver), run.watchdog, StopSignal(process.device) as stop:
        loop = run.loop
        loop.stop = stop
        if args.compile:
            compile_planned_shapes(run.model, model, collator, loop, plan.batch_size)
        observer.run_if_due()  # before the first step, or missing because the run was stopped meanwhile
        for steps in step_ranges(loop.step, loop.last_step, loop.steps_per_epoch, args.save_steps):
            stopped = not phases.begin(steps)  # only for sampling by attention: maps and batches of a new phase
            stopped = stopped or train_one_epoch(run.model, run.batches, steps, loop)
            run.saver.save(required=stopped or loop.step == loop.last_step)
            if picture_is_due(args.picture_every, loop):
                draw_reconstructions(model, settings, images, loop, process.is_main)
            if stopped and loop.step < loop.last_step:
                end_after_signal(loop, stop)  # the resumed run makes up for a missing evaluation
                return False
            observer.run_if_due()
        closing = closing_lines(start.output_dir, process.is_main)
        finish_run(loop, stop, summary_of_run(args, loop, len(images), closing))
    return True


def picture_is_due(picture_every: int, loop: TrainLoop) -> bool:
    """Whether pictures are drawn after this step: every `picture_every` epochs and after the last step; 0: never."""
    if not picture_every:
        return False
    epoch, rest = divmod(loop.step, loop.steps_per_epoch)
    return loop.step == loop.last_step or (rest == 0 and epoch % picture_every == 0)


if __name__ == "__main__":
    run_program(main, PROGRAM)
