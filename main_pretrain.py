"""Pre-trains an encoder by masked image modelling with PR-MIM.

    python main_pretrain.py --recipe quickstart --data_path PHOTOS --output_dir output/photos
    torchrun --nproc_per_node 8 main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET --batch_size 512

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from timm.layers import DropPath
from timm.optim import param_groups_weight_decay

import models_greenmim_pr
import models_localmim_pr
import models_mae_pr
import models_mff_pr
import models_simmim_pr
import models_tec_pr
from engine_pretrain import PretrainEngine
from prmim import SAMPLING, SpatialAggregation, TokenOrder
from recipes import RECIPES
from util.data.datasets import AddressedDataset
from util.data.transforms import PaddedCropFlip, RandomResizedCropFlip, ResizeCenterCrop
from util.pictures import panel_grid
from util.run import shard
from util.run.checkpoint import find_checkpoint_file
from util.run.cli import Parser, parse_with_recipe, run_program
from util.run.flags import add_data_flags, add_optimisation_flags, add_run_flags
from util.run.logging import count_of
from util.run.train_run import TrainRun, launch, open_everywhere

FRAMEWORKS = (models_mae_pr, models_mff_pr, models_simmim_pr, models_localmim_pr, models_tec_pr, models_greenmim_pr)
# Flags of one framework: passed on where they are given, and refused elsewhere.
OWN_FLAGS = dict.fromkeys(("teacher", "att_topk", "att_tau"), ("TEC", models_tec_pr))
OWN_FLAGS["decoder_order"] = ("GreenMIM", models_greenmim_pr)
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
    method("--norm_pix_loss", action=boolean, default=True, help="targets are pixels normalised per patch, where they are pixels")
    method("--decoder_order", choices=models_greenmim_pr.DECODER_ORDERS, help="GreenMIM: where visible units lie (default: true)")
    method("--teacher", help="TEC's: a checkpoint (iBOT's, MAE's, ours), a run's folder, or a timm model's name")
    method("--att_topk", type=int, help="TEC: patches whose attention is predicted (default: 9, for iBOT; 15 for MAE)")
    method("--att_tau", type=float, help="TEC: temperature of the attention target (default: 1, for iBOT; 1.8 for MAE)")

    optimisation = parser.add_argument_group("optimisation")
    add_optimisation_flags(optimisation)
    optimisation.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), help="of AdamW")
    data = parser.add_argument_group("data")
    add_data_flags(data)
    data.add_argument(
        "--crop", default="resized", choices=("resized", "padded"), help="resized: a random box, as MAE; padded: MFF's"
    )
    data.add_argument("--interpolation", default="bicubic", choices=("bicubic", "bilinear"))
    run = parser.add_argument_group("run")
    add_run_flags(run)
    run.add_argument("--picture_every", type=int, default=10, help="epochs between reconstructions in TensorBoard; 0: none")
    parser.set_defaults(warmup_epochs=40, blr=1.5e-4, min_lr=0.0, crop_scale=(0.2, 1.0), output_dir="output/pretrain")
    return parser


def build_model(settings):
    """The model that `settings` (vars(args), or a checkpoint's) describe."""
    names = ["mask_ratio", "throw_ratio", "progressive", "kernel_size", "aggregation", "applies_to", "norm_pix_loss"]
    options = {name: settings[name] for name in names}
    for name, (owner, module) in OWN_FLAGS.items():
        if settings.get(name) is not None:
            if settings["model"] not in module.__all__:
                raise ValueError(f"--{name} belongs to {owner}, but --model is {settings['model']}")
            options[name] = settings[name]
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


def make_augmentation(args):
    how = dict(interpolation=args.interpolation, reference=args.loader == "reference")
    if args.crop == "padded":
        return PaddedCropFlip(args.input_size, args.seed, **how)
    return RandomResizedCropFlip(args.input_size, args.seed, args.crop_scale, **how)


class PretrainRun(TrainRun):
    """Images, model and token orders of a pre-training run."""

    machine_flags = TrainRun.machine_flags | {"picture_every", "teacher"}  # it may move; its fingerprint stays
    program = "main_pretrain.py"

    def __init__(self, args: argparse.Namespace, flags: list[str] | None = None) -> None:
        super().__init__(args, flags)
        if args.model in models_tec_pr.__all__ and args.teacher is None:
            raise ValueError(f"--model {args.model} needs --teacher: a checkpoint, a run's folder, or the name of a timm model")
        if args.teacher and Path(args.teacher).exists():  # said so that it is found from other folders, too
            args.teacher = str(find_checkpoint_file(args.teacher).resolve())
        torch.manual_seed(args.seed)  # the same first weights in every process
        self.model = model = build_model(vars(args)).to(self.first_home)
        self.images = open_everywhere(args, "train", max_bad_fraction=args.max_bad_fraction)
        args.input_size, args.patch_size = list(model.img_size), model.patch_size
        for name in OWN_FLAGS.keys() - {"teacher"}:
            setattr(args, name, getattr(model, name, None))
        self.collator = model.collator(args.sampling, args.seed)
        self.transform = make_augmentation(args)
        # Drop path draws by micro-batch and process; a shared visible set is that of a micro-batch's first image.
        if model.shared_visible or any(isinstance(module, DropPath) for module in model.modules()):
            self.machine_flags = self.machine_flags - {"batch_size", "accum_iter"}
        groups = param_groups_weight_decay(model, args.weight_decay, no_weight_decay_list=model.no_weight_decay())
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=tuple(args.betas), fused=True)
        self.remarks += [model.teacher.origin] if args.teacher else []
        self.start(PretrainEngine)

    def describe(self):
        counts = self.model.counts
        return (
            f"{self.args.model}: {counts.num_tokens} tokens = {counts.num_visible} visible + {counts.num_retained} retained + "
            f"{counts.num_thrown} thrown; {sum(p.numel() for p in self.model.parameters() if p.requires_grad) / 1e6:.1f} M "
            f"trainable parameters; {count_of(len(self.images), 'image')} in {self.images.root}, "
            f"{count_of(self.steps_per_epoch, 'step')} an epoch"
        )

    def summary(self):
        losses = [report["epoch_loss"] for report in self.log.history() if "epoch_loss" in report]
        lines = [f"pre-trained {self.args.model} at throw_ratio {self.args.throw_ratio} {self.done_so_far()}"]
        if losses:
            lines.append(f"  loss         {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in epoch {len(losses)}")
        return "\n".join(lines + self.closing_lines())

    def extra_meta(self):
        return {"teacher": self.model.teacher.fingerprint} if self.args.teacher else {}

    def train_until(self, stop):
        if self.args.compile and self.model.planner:
            self.rehearse()
        return super().train_until(stop)

    def rehearse(self):
        """Where the planned shapes depend on the mask, all are compiled now, not in the middle of training."""
        blank = torch.zeros(3, *self.model.img_size, dtype=torch.uint8)
        imgs, labels, ids_shuffle, *_ = self.collator([(blank, 0, (0, i)) for i in range(self.args.batch_size)])
        for plans in self.model.planner.shapes(ids_shuffle[0, : self.model.counts.num_visible]):
            self.engine.rehearse((imgs, labels, ids_shuffle, *plans), self.start_step)

    def after_step(self, step):
        super().after_step(step)
        epoch, rest = divmod(step, self.steps_per_epoch)
        if self.args.picture_every and (step == self.last_step or (not rest and epoch % self.args.picture_every == 0)):
            self.draw(step)

    def draw(self, step):
        """A fixed set of training images and their reconstructions, to TensorBoard."""
        if not (self.process.is_main or self.args.shard):  # a sharded model computes in all processes or in none
            return
        indices = np.linspace(0, len(self.images) - 1, min(8, len(self.images))).astype(int)
        dataset = AddressedDataset(self.images, ResizeCenterCrop(self.model.img_size), replace=True)
        imgs, _, ids_shuffle, *_ = self.collator([dataset[(0, int(i))] for i in indices])
        with self.engine.autocast() if self.args.shard else nullcontext(), shard.unsharded(self.model):
            picture = reconstruction_picture(self.model, self.normalize, imgs, ids_shuffle)
        self.log.picture("reconstruction", picture, step)


def reconstruction_picture(model, normalize, imgs, ids_shuffle):
    """uint8 [B, 3, H, W] and ids_shuffle [B, N] -> uint8 array [H', W', 3]: image | tokens | the framework's panels."""
    device = normalize.mean.device
    was_training = model.training
    model.eval()
    panels = model.panels(normalize(imgs.to(device)), ids_shuffle.to(device), normalize.undo)
    model.train(was_training)
    order = TokenOrder(ids_shuffle, model.counts)
    state = order.mask.int() + order.thrown.int()  # 0 visible, 1 retained, 2 thrown
    return panel_grid(imgs, state.view(-1, *model.grid_size), panels)


def main(argv=None):
    parser = get_args_parser()
    return launch(parser, parse_with_recipe(parser, RECIPES, argv), PretrainRun, argv)


if __name__ == "__main__":
    run_program(main, "main_pretrain.py")
