"""Pre-trains an encoder by masked image modelling with PR-MIM.

    python main_pretrain.py --recipe quickstart --data_path PHOTOS --output_dir output/photos
    torchrun --nproc_per_node 8 main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET --batch_size 512

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from timm.optim import param_groups_weight_decay
from torch.nn.parallel import DistributedDataParallel

import models_mae_pr
from engine_pretrain import PRECISIONS, PretrainEngine, precision
from prmim import SAMPLING, MaskCollator, SpatialAggregation, TokenOrder, TokenOrderSampler
from recipes import RECIPES
from util import checkpoint, distributed
from util.cli import Parser, parse_with_recipe
from util.datasets import (
    DATASETS,
    AddressedDataset,
    ImageError,
    StepBatchSampler,
    available_cores,
    batches,
    open_images,
    steps_per_epoch,
)
from util.logging import RunLog
from util.lr_sched import warmup_cosine
from util.pictures import reconstruction_grid
from util.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop

FRAMEWORKS = (models_mae_pr,)
MODELS = {name: getattr(module, name) for module in FRAMEWORKS for name in module.__all__ if name.islower()}


def get_args_parser():
    parser = Parser("main_pretrain.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--recipe", help="named defaults from recipes.py; explicit flags win")

    method = parser.add_argument_group("model and method").add_argument
    method("--model", default="mae_vit_base_patch16", choices=MODELS)
    method("--input_size", type=int, nargs="+", help="image side in pixels, or height and width (default: the model's)")
    method("--patch_size", type=int, help="default: the model's")
    method("--mask_ratio", type=float, default=0.75, help="share of all tokens that are masked")
    method("--throw_ratio", type=float, default=0.5, help="share of all tokens that are thrown; 0 is the original framework")
    method("--progressive", action=boolean, default=True, help="off: plain partial reconstruction")
    method("--sampling", default="furthest", choices=SAMPLING, help="how the retained tokens are picked")
    method("--aggregation", default="dwconv", choices=SpatialAggregation.KINDS)
    method("--kernel_size", type=int, default=7, help="of the aggregation, odd")
    method("--applies_to", default="thrown", choices=SpatialAggregation.APPLIES_TO, help="the cells that the aggregation fills")
    method("--norm_pix_loss", action=boolean, default=True, help="targets are pixels normalised per patch")

    optimisation = parser.add_argument_group("optimisation").add_argument
    optimisation("--batch_size", type=int, help="per process and micro-batch (default: 64, or the most below that fits the total)")
    optimisation("--accum_iter", type=int, help="micro-batches per step (default: 1, or what total_batch_size needs)")
    optimisation("--total_batch_size", type=int, help="per step over all processes; accumulation is derived from it")
    optimisation("--epochs", type=int, default=100)
    optimisation("--warmup_epochs", type=float, default=40)
    optimisation("--blr", type=float, default=1.5e-4, help="base learning rate: lr = blr * total batch / 256")
    optimisation("--lr", type=float, help="absolute learning rate, instead of --blr")
    optimisation("--min_lr", type=float, default=0.0)
    optimisation("--weight_decay", type=float, default=0.05, help="not on biases and norms")
    optimisation("--seed", type=int, default=0)

    data = parser.add_argument_group("data").add_argument
    data("--dataset", default="folder", choices=DATASETS)
    data("--data_path", default="data", help="ROOT with train/, a folder of classes or of images; for CIFAR where it lies or goes")
    data("--crop_scale", type=float, nargs=2, default=(0.2, 1.0), help="area of the random crop")
    data("--num_workers", type=int, help="per process (default: its share of the cores less one, 16 at most)")

    run = parser.add_argument_group("run").add_argument
    run("--output_dir", default="output/pretrain")
    run("--resume", default="auto", help="auto: the newest good checkpoint in output_dir; none; or a checkpoint's path")
    run("--device", default="auto", choices=("auto", "cpu", "cuda"))
    run("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 or fp16 on a GPU, fp32 on the CPU")
    run("--compile", action=boolean, default=False, help="torch.compile the model")
    run("--max_steps", type=int, help="stop (and save) after this many steps of the run in all")
    run("--save_every", type=int, default=20, help="epochs whose checkpoints are kept for good; the last two are kept anyway")
    run("--save_steps", type=int, default=0, help="save every so many steps, too, not only after each epoch")
    run("--picture_every", type=int, default=10, help="epochs between reconstructions in TensorBoard; 0: none")
    run("--print_freq", type=int, default=20, help="steps between reports")
    return parser


# What may differ between two starts of one run without changing its results.
MACHINE_FLAGS = {
    *("recipe", "batch_size", "accum_iter", "num_workers", "data_path", "output_dir", "resume", "device"),
    *("compile", "max_steps", "save_every", "save_steps", "picture_every", "print_freq"),
}


def build_model(settings):
    """The model that `settings` (vars(args), or a checkpoint's) describe."""
    names = ["mask_ratio", "throw_ratio", "progressive", "kernel_size", "aggregation", "applies_to", "norm_pix_loss"]
    options = {name: settings[name] for name in names}
    if settings["patch_size"] is not None:
        options["patch_size"] = settings["patch_size"]
    if settings["input_size"] is not None:
        if len(settings["input_size"]) > 2:
            raise ValueError(f"--input_size takes one or two numbers, got {settings['input_size']}")
        height, *width = settings["input_size"]
        options["img_size"] = (height, *(width or [height]))
    model = MODELS[settings["model"]](**options)
    if model.counts.num_visible == 0:
        raise ValueError(
            f"--mask_ratio {settings['mask_ratio']} leaves none of the {model.counts.num_tokens} tokens visible; lower it"
        )
    return model


def resolve(args, process):
    """Fills in what follows from other settings: batch split, learning rate, workers. ValueError if it cannot be."""
    least = dict.fromkeys(("batch_size", "epochs", "print_freq", "save_every", "accum_iter", "total_batch_size", "max_steps"), 1)
    least |= dict.fromkeys(("num_workers", "save_steps", "picture_every", "seed", "weight_decay", "min_lr"), 0)
    for name, value in least.items():
        if getattr(args, name) is not None and getattr(args, name) < value:
            raise ValueError(f"--{name} must be at least {value}, got {getattr(args, name)}")
    if args.seed >= 2**63:
        raise ValueError(f"--seed must be below 2^63, got {args.seed}")
    if not 0 <= args.warmup_epochs <= args.epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} must lie between 0 and --epochs {args.epochs}")
    if not 0 < args.crop_scale[0] <= args.crop_scale[1] <= 1:
        raise ValueError(f"--crop_scale must be two areas 0 < low <= high <= 1, got {args.crop_scale}")
    split_batch(args, process.world_size)
    args.lr = args.blr * args.total_batch_size / 256 if args.lr is None else args.lr
    if args.num_workers is None:
        args.num_workers = min(16, max(1, available_cores() // process.local_world_size - 1))  # one core is the trainer's


def split_batch(args, world_size):
    """Sets batch_size, accum_iter and total_batch_size, so that total = batch_size * world_size * accum_iter, or ValueError."""
    total = args.total_batch_size
    if total is None:
        args.batch_size, args.accum_iter = args.batch_size or 64, args.accum_iter or 1
        args.total_batch_size = args.batch_size * args.accum_iter * world_size
        return
    per_process, rest = divmod(total, world_size)
    if rest:
        raise ValueError(f"a total batch of {total} cannot be split over {world_size} processes: change one of them")
    most = args.batch_size or (per_process // args.accum_iter if args.accum_iter else 64)
    fitting = max(size for size in range(1, max(1, most) + 1) if per_process % size == 0)
    if args.batch_size not in (None, fitting):
        split = f"--batch_size {args.batch_size} on {world_size} processes"
        raise ValueError(f"a total batch of {total} cannot be split into {split}: try --batch_size {fitting}")
    if args.accum_iter not in (None, per_process // fitting):
        split = f"--batch_size {fitting} on {world_size} processes takes {per_process // fitting}"
        raise ValueError(f"--accum_iter {args.accum_iter}, but a total batch of {total} with {split}")
    args.batch_size, args.accum_iter = fitting, per_process // fitting


def writable_folder(path):
    """Creates the folder; ValueError where it cannot be written to."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise ValueError(f"--output_dir {str(path)!r} cannot be written to ({error}); choose another folder") from error


def find_checkpoint(args):
    """-> (path of the checkpoint that --resume means, or None for a new run; what to say about it)."""
    present = bool(checkpoint.list_checkpoints(args.output_dir))
    if args.resume == "none":
        if present:
            raise ValueError(f"--resume none, but {args.output_dir!r} holds a run: choose another --output_dir, or --resume auto")
        return None, []
    if args.resume != "auto":
        return args.resume, []
    path, skipped = checkpoint.newest_checkpoint(args.output_dir)
    if path is None and present:
        raise ValueError(f"no checkpoint in {args.output_dir!r} is intact ({'; '.join(skipped)}); remove them to start over")
    return path, [f"skipped a checkpoint, {reason}" for reason in skipped]


class PretrainRun:
    """A run, ready to train: building it raises ValueError for whatever the user could have got wrong."""

    def __init__(self, args):
        self.args = args
        self.process = process = distributed.init_process(args.device)
        resolve(args, process)
        self.output_dir = writable_folder(args.output_dir)
        if args.dataset != "folder":  # one process downloads what is missing, and all hear it if that fails
            distributed.from_main(lambda: open_images(args.dataset, args.data_path) and None)
        self.images = open_images(args.dataset, args.data_path)
        self.steps_per_epoch = steps_per_epoch(len(self.images), args.total_batch_size)
        self.last_step = min(args.epochs * self.steps_per_epoch, args.max_steps or sys.maxsize)

        torch.manual_seed(args.seed)  # the same first weights in every process
        self.model = build_model(vars(args)).to(process.device)
        args.input_size, args.patch_size = list(self.model.img_size), self.model.patch_size
        order_sampler = TokenOrderSampler(self.model.grid_size, self.model.counts, args.sampling, self.model.mask_unit)
        self.collator = MaskCollator(order_sampler, args.seed, self.model.shared_visible)
        self.normalize = Normalize().to(process.device)
        args.device = process.device.type
        args.precision, autocast, self.scaler = precision(args.precision, process.device)
        groups = param_groups_weight_decay(self.model, args.weight_decay)  # none on biases and other 1-D tensors
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

        # The main process chooses, so that all resume from the same file.
        path, remarks = distributed.from_main(lambda: find_checkpoint(args))
        content = self.restore(path) if path else None
        self.start_step = content["meta"]["step"] if content else 0
        self.log = RunLog(self.output_dir, self.start_step, self.last_step, enabled=process.is_main)
        model = self.model
        if args.compile:
            model.compile(fullgraph=True, dynamic=False)
        if process.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.engine = PretrainEngine(
            model=model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            autocast=autocast,
            normalize=self.normalize,
            learning_rate=self.learning_rate,
            accum_iter=args.accum_iter,
            images_per_step=args.total_batch_size,
            steps_per_epoch=self.steps_per_epoch,
            last_step=self.last_step,
            log=self.log,
            print_freq=args.print_freq,
        )
        if content:
            self.engine.meter.load_state_dict(content["meter"])
            remarks += [f"resuming {path} at step {self.start_step}", *self.changes(content["meta"])]
        self.announce(remarks)

    def restore(self, path):
        """Loads weights, moments and loss scale; -> the checkpoint's content."""
        content = checkpoint.read_checkpoint(path)
        if "optimizer" not in content or not isinstance(content.get("meta"), dict):
            raise ValueError(f"{str(path)!r} holds weights but no run to resume; --resume takes a checkpoint of this program")
        before, now = content["meta"]["settings"]["total_batch_size"], self.args.total_batch_size
        if before != now:
            raise ValueError(f"the run's total batch was {before} and now is {now}, so its steps would no longer mean the same")
        checkpoint.load_strict(self.model, content["model"], "the checkpoint's weights")
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(content["optimizer"])
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay  # the setting of today
        if content["meta"]["settings"]["precision"] == self.args.precision:
            self.scaler.load_state_dict(content["scaler"])
        return content

    def changes(self, meta):
        """Warnings where a resumed run no longer is the old one."""
        settings, before = self.settings(), meta["settings"]
        changed = [name for name in sorted(settings.keys() - MACHINE_FLAGS) if before.get(name) != settings[name]]
        warnings = [f"warning: --{name} was {before.get(name)} and now is {settings[name]}" for name in changed]
        if meta["num_images"] != len(self.images):
            warnings.append(
                f"warning: the data had {meta['num_images']} images and now has {len(self.images)}: "
                f"order and schedule follow the new number"
            )
        return warnings

    def settings(self):
        """The resolved settings as JSON knows them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.args).items()}

    def learning_rate(self, step):
        args = self.args
        return warmup_cosine(step, self.steps_per_epoch, args.epochs, args.warmup_epochs, args.lr, args.min_lr)

    def announce(self, remarks):
        """Says what runs, and saves the resolved settings."""
        args, process, counts, settings = self.args, self.process, self.model.counts, self.settings()
        if process.is_main:
            (self.output_dir / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
        self.log.info(json.dumps(settings))
        self.log.info(
            f"{args.model}: {counts.num_tokens} tokens = {counts.num_visible} visible + {counts.num_retained} retained + "
            f"{counts.num_thrown} thrown; {sum(p.numel() for p in self.model.parameters() if p.requires_grad) / 1e6:.1f} M "
            f"trainable parameters; {len(self.images)} images, {self.steps_per_epoch} steps an epoch"
        )
        self.log.info(
            f"{process.world_size} process(es) on {args.device} in {args.precision}, total batch {args.total_batch_size} = "
            f"{args.batch_size} x {process.world_size} x {args.accum_iter} accumulated, lr {args.lr:.3g} at its peak"
        )
        if args.device == "cuda" and torch.cuda.device_count() > 1 and process.world_size == 1:
            remarks = [*remarks, f"note: 1 of {torch.cuda.device_count()} GPUs is used; torchrun --nproc_per_node uses more"]
        for remark in remarks:
            self.log.info(remark)

    def train(self):
        args = self.args
        transform = RandomResizedCropFlip(self.model.img_size, args.seed, args.crop_scale)
        addresses = StepBatchSampler(
            len(self.images),
            args.batch_size,
            args.accum_iter,
            self.process.rank,
            self.process.world_size,
            args.seed,
            self.start_step,
            self.last_step,
        )
        stream = batches(
            AddressedDataset(self.images, transform),
            addresses,
            self.collator,
            args.num_workers,
            pin_memory=self.process.device.type == "cuda",
        )
        for epoch in range(self.start_step // self.steps_per_epoch, args.epochs):
            end = min((epoch + 1) * self.steps_per_epoch, self.last_step)
            steps = range(max(epoch * self.steps_per_epoch, self.start_step), end)
            if steps:
                self.engine.train_one_epoch(epoch, steps, stream, self.after_step)
        self.log.info(self.summary())
        self.log.close()
        distributed.shut_down()

    def summary(self):
        """What the run did, from its log, so that a finished run can say it again."""
        newest, _ = checkpoint.newest_checkpoint(self.output_dir) if self.process.is_main else (None, None)
        losses = [report["epoch_loss"] for report in self.log.history() if "epoch_loss" in report]
        lines = [
            f"pre-trained {self.args.model} at throw_ratio {self.args.throw_ratio} for {self.last_step} steps on "
            f"{len(self.images)} images",
            f"  checkpoint   {newest}",
            f"  TensorBoard  tensorboard --logdir {self.output_dir / 'tensorboard'}",
        ]
        if losses:
            lines.insert(1, f"  loss         {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in epoch {len(losses)}")
        return "\n".join(lines)

    def after_step(self, step):
        """Saves and draws when it is time; `step` optimizer steps are done."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        last = step == self.last_step
        if last or not rest or (self.args.save_steps and step % self.args.save_steps == 0):
            self.save(step)
        if self.args.picture_every and (last or (not rest and epoch % self.args.picture_every == 0)):
            self.draw(step)

    def save(self, step):
        meter = self.engine.meter.state_dict()  # of all processes
        if not self.process.is_main:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "meter": meter,
        }
        meta = {
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "settings": self.settings(),
            "num_images": len(self.images),
            "torch": torch.__version__,
        }
        try:
            checkpoint.save_checkpoint(self.output_dir, step, state, meta)
            checkpoint.prune_checkpoints(self.output_dir, keep=lambda meta: meta["epoch"] % self.args.save_every == 0)
        except OSError as error:  # disk full, say: the older checkpoints stand
            if step == self.last_step:
                raise
            self.log.info(f"warning: the checkpoint of step {step} could not be written ({error}); training goes on")

    def draw(self, step):
        """A fixed set of training images and their reconstructions, to TensorBoard."""
        if not self.process.is_main:
            return
        indices = np.linspace(0, len(self.images) - 1, min(8, len(self.images))).astype(int)
        dataset = AddressedDataset(self.images, ResizeCenterCrop(self.model.img_size))
        imgs, _, ids_shuffle = self.collator([dataset[(0, int(i))] for i in indices])
        self.log.picture("reconstruction", reconstruction_picture(self.model, self.normalize, imgs, ids_shuffle), step)


def reconstruction_picture(model, normalize, imgs, ids_shuffle):
    """uint8 [B, 3, H, W] and ids_shuffle [B, N] -> uint8 array [H', W', 3]: image | tokens | reconstruction."""
    device = normalize.mean.device
    was_training = model.training
    model.eval()
    reconstruction, _ = model.reconstruct_image(normalize(imgs.to(device)), ids_shuffle.to(device))
    model.train(was_training)
    order = TokenOrder(ids_shuffle, model.counts)
    state = order.mask.int() + order.thrown.int()  # 0 visible, 1 retained, 2 thrown
    return reconstruction_grid(imgs, normalize.undo(reconstruction), state.view(-1, *model.grid_size))


def main(argv=None):
    parser = get_args_parser()
    args = parse_with_recipe(parser, RECIPES, argv)
    try:
        run = PretrainRun(args)
    except ValueError as error:
        distributed.shut_down()
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    try:
        run.train()
    except ImageError as error:  # a worker's comes with its traceback before the message
        parser.exit(2, f"{parser.prog}: error: {str(error).strip().rpartition('ImageError: ')[2]}\n")
    except FloatingPointError as error:
        parser.exit(3, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
