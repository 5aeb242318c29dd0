"""The flags that the training mains share."""

import argparse

from util.attention import KERNELS
from util.datasets import DATASETS
from util.lr_sched import SCHEDULES
from util.train_engine import PRECISIONS


def add_optimisation_flags(group):
    flag = group.add_argument
    flag("--batch_size", type=int, help="per process and micro-batch (default: 64, or the most below that fits the total)")
    flag("--accum_iter", type=int, help="micro-batches per step (default: 1, or what total_batch_size needs)")
    flag("--total_batch_size", type=int, help="per step over all processes; accumulation is derived from it")
    flag("--epochs", type=int, default=100)
    flag("--warmup_epochs", type=float)
    flag("--blr", type=float, help="base learning rate: lr = blr * total batch / 256")
    flag("--lr", type=float, help="absolute learning rate, instead of --blr")
    flag("--min_lr", type=float)
    flag("--warmup_lr", type=float, default=0.0, help="where the warm-up starts")
    flag("--lr_schedule", default="mae", choices=SCHEDULES, help="the frameworks' releases differ: util/lr_sched.py")
    flag("--lr_steps", type=float, nargs="*", default=(), help="epochs of tenfold drops, with simmim_steps")
    flag("--clip_grad", type=float, help="bounds the norm of the gradient (default: no bound)")
    flag("--weight_decay", type=float, default=0.05, help="not on biases and norms")
    flag("--seed", type=int, default=0)


def add_data_flags(group):
    flag = group.add_argument
    flag("--dataset", default="folder", choices=DATASETS)
    flag("--data_path", default="data", help="the images' folder; for CIFAR where it lies or goes, for iNaturalist with the .json")
    flag("--loader", default="fast", choices=("fast", "reference"), help="reference: Pillow decodes and resizes, as torchvision's")
    flag("--crop_scale", type=float, nargs=2, help="area of the random crop")
    flag("--max_bad_fraction", type=float, default=0.01, help="unreadable training images are replaced up to this share; 0: none")
    flag("--num_workers", type=int, help="per process (default: its share of the cores less one, 16 at most)")


def add_run_flags(group):
    flag, boolean = group.add_argument, argparse.BooleanOptionalAction
    flag("--output_dir")
    flag("--resume", default="auto", help="auto: the newest good checkpoint in output_dir; none; or a checkpoint's path")
    flag("--allow_changes", action=boolean, default=False, help="resume though settings or data have changed what comes out")
    flag("--device", default="auto", choices=("auto", "cpu", "cuda"))
    flag("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 or fp16 on a GPU, fp32 on the CPU")
    flag(
        "--attention", default="auto", choices=("auto", *KERNELS), help="kernel that is tried first: scripts/benchmark_attention.py"
    )
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--dist_timeout", type=float, default=600, help="seconds without progress (a step, a save) that end a process")
    flag("--recompute", action=boolean, default=False, help="compute blocks again in the backward pass: less memory, more time")
    flag("--shard", action=boolean, default=False, help="split parameters, gradients and moments over the processes (FSDP2)")
    flag("--max_steps", type=int, help="stop (and save) after this many steps of the run in all")
    flag("--save_every", type=int, default=20, help="epochs whose checkpoints are kept for good; the last two are kept anyway")
    flag("--save_steps", type=int, default=0, help="save every so many steps, too, not only after each epoch")
    flag("--print_freq", type=int, default=20, help="steps between reports")
