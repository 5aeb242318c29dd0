"""The flags that the training mains share. `util.run.start.plan` checks them, and computes what follows from them."""

import argparse

from util.attention import CHOICES
from util.data.folders import DEFAULT_PATH
from util.data.open import DATASETS
from util.data.pixel_format import nodata_value
from util.lr_sched import SCHEDULES
from util.run.cli import FlagContainer, FlagGroup
from util.run.processes.distributed import PRECISIONS
from util.urls import data_path

# Steps of a schedule that is compiled by default. The first step takes up to 90 s more, each later one of ViT-B 25 ms
# less (H100, 512 images).
MIN_COMPILED_STEPS = 5000


def add_optimisation_flags(group: FlagGroup) -> None:
    """Adds batch split, epochs, learning rate and its schedule, weight decay, seed."""
    add_batch_flags(group)
    add_epoch_flags(group)
    add_update_flags(group)


def add_batch_flags(group: FlagGroup) -> None:
    """Adds the split of the total batch over processes and micro-batches."""
    flag = group.add_argument
    flag(
        "--batch_size",
        everyday=True,
        changes="split",
        type=int,
        at_least=1,
        help="images per process and micro-batch (default: 64; with --total_batch_size the largest that divides a "
        "process's share, up to 64, or 512 for a linear probe; in pre-training on GPUs up to 512 of those that fit)",
    )
    flag(
        "--accum_iter",
        everyday=True,
        changes="split",
        type=int,
        at_least=1,
        help="micro-batches per step (default: 1, or what --total_batch_size needs)",
    )
    flag(
        "--total_batch_size",
        everyday=True,
        type=int,
        at_least=1,
        help="images per step over all processes; --accum_iter follows from it",
    )


def add_epoch_flags(group: FlagGroup) -> None:
    """Adds the length of a schedule in epochs, and its learning rate."""
    flag = group.add_argument
    flag("--epochs", everyday=True, type=int, default=100, at_least=1, help="length of the schedule")
    flag(
        "--warmup_epochs",
        everyday=True,
        type=float,
        help="epochs of linear warm-up; if not given, that of the recipe or of the defaults, and in a schedule that is "
        "shorter than theirs at most a tenth, or their share if that is more: 40 of 800 epochs become 4 of 40",
    )
    flag("--blr", everyday=True, type=float, at_least=0, help="base learning rate: lr = blr * total batch size / 256")
    flag("--lr", everyday=True, type=float, at_least=0, help="absolute learning rate, instead of --blr")
    flag("--min_lr", type=float, at_least=0, help="learning rate at the end of the schedule")
    flag("--warmup_lr", type=float, default=0.0, at_least=0, help="learning rate at the start of the warm-up")
    flag(
        "--lr_schedule",
        default="mae",
        choices=SCHEDULES,
        help="schedule of the framework's release: see util/lr_sched.py; wsd: a constant rate, then a decay",
    )
    flag("--decay_epochs", type=int, default=0, at_least=0, help="for wsd: epochs of the decay, the last ones")
    flag(
        "--lr_steps",
        type=float,
        nargs="*",
        default=(),
        help="for simmim_steps: epochs after which the rate falls tenfold",
    )


def add_update_flags(group: FlagGroup) -> None:
    """Adds clipping, weight decay and seed."""
    flag = group.add_argument
    flag("--clip_grad", type=float, above=0, help="bound on the norm of the gradient (default: no bound)")
    flag(
        "--weight_decay",
        everyday=True,
        type=float,
        default=0.05,
        at_least=0,
        help="weight decay of matrices; biases and norms have none",
    )
    flag(
        "--seed",
        everyday=True,
        type=int,
        default=0,
        at_least=0,
        help="seed of initial weights, shuffling, augmentation and masks",
    )


def add_data_flags(group: FlagGroup) -> None:
    """Adds data source, decoding, random crop, workers."""
    flag = group.add_argument
    flag(
        "--dataset",
        everyday=True,
        default="folder",
        choices=DATASETS,
        help="kind of data; folder: image folders or tar shards; hf: Hugging Face datasets",
    )
    flag(
        "--data_path",
        everyday=True,
        changes="nothing",  # data may move: names and labels of the images are compared
        per_process=True,
        type=data_path,
        default=DEFAULT_PATH,
        help="root of the data; CIFAR is downloaded to it if it is not there; for hf also a name on the Hub; packed "
        "shards may lie behind a URL",
    )
    flag("--image_column", changes="nothing", help="only for hf: column of the images (default: the only one)")
    flag(
        "--label_column",
        changes="nothing",
        help="only for hf: column of the classes (default: label, or the only ClassLabel)",
    )
    flag(
        "--loader",
        default="fast",
        choices=("fast", "reference"),
        help="reference: decode and resize by Pillow, as torchvision",
    )
    flag("--crop_scale", type=float, nargs=2, help="smallest and largest area of the random crop")
    add_hflip_flag(group)
    flag(
        "--vflip",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="turn half of the training images upside down at random: for images without an up, as of microscopes",
    )
    add_loading_flags(group)


def add_hflip_flag(group: FlagGroup) -> None:
    """Adds whether training images are mirrored."""
    group.add_argument(
        "--hflip",
        everyday=True,
        action=argparse.BooleanOptionalAction,
        default=True,
        help="mirror half of the training images at random",
    )


def add_repeat_flag(group: FlagGroup) -> None:
    """Adds how many crops a step has of an image."""
    group.add_argument(
        "--repeat_aug",
        type=int,
        default=1,
        at_least=1,
        metavar="R",
        help="crops of an image in a step, which is read and decoded once for them: for GPUs that wait for data",
    )


def add_pixel_flags(group: FlagGroup) -> None:
    """Adds channels of the images, and the statistics that normalise them."""
    flag = group.add_argument
    flag("--in_chans", everyday=True, type=int, default=3, at_least=1, help="channels of the images; 3: RGB")
    flag(
        "--rgb_bands",
        type=int,
        nargs=3,
        at_least=0,
        metavar=("RED", "GREEN", "BLUE"),
        help="with first weights for RGB and images of other bands: the numbers, from 0, of red, green and blue; the "
        "model begins as if there were no other bands, and trains its patch embedding (default of one band: 0 0 0)",
    )
    flag(
        "--mean",
        everyday=True,
        type=float,
        nargs="+",
        help="mean of each channel; a fraction of the full range, or in the unit of floats (default: those of the "
        "checkpoint that the run starts from, ImageNet's for 8-bit RGB, or the data's)",
    )
    flag(
        "--std",
        everyday=True,
        type=float,
        nargs="+",
        help="deviation of each channel, in the unit of --mean (default: as --mean)",
    )


def add_invalid_flags(group: FlagGroup) -> None:
    """Adds what marks invalid pixels, see `util.data.invalid_pixels`."""
    flag = group.add_argument
    flag(
        "--nodata",
        type=nodata_value,
        metavar="VALUE",
        help="value of invalid pixels of a band, or nan; they count neither in mean and deviation nor in the loss "
        "(write --nodata=-1e30 for a negative number with an exponent; default: all pixels are valid)",
    )
    flag(
        "--mask_band",
        type=int,
        help="band of the files, from 0 or -1 for the last, that is 0 at invalid pixels and no channel of --in_chans",
    )
    flag(
        "--bands",
        type=int,
        nargs="+",
        action="append",
        help="channels, from 0, that files with as many bands hold; the others are invalid; may be repeated",
    )


def add_all_valid_flag(group: FlagContainer, purpose: str = "") -> None:
    """Adds what overrides the marks of invalid pixels of a trained model. purpose: what it is for, in the help text."""
    group.add_argument(
        "--all_valid",
        changes="nothing",
        action="store_true",
        help=f"{purpose}nothing marks invalid pixels in these images, whatever did in those of the model's training",
    )


def add_eval_split_flag(group: FlagContainer, purpose: str = "") -> None:
    """Adds the images on which a trained model is evaluated. purpose: what it is for, in the help text."""
    group.add_argument(
        "--eval_split",
        everyday=True,
        changes="nothing",
        default="val",
        choices=("val", "test"),
        help=f"{purpose}the images that are evaluated; val is test where there is no val",
    )


def add_loading_flags(group: FlagGroup) -> None:
    """Adds unreadable images and workers."""
    flag = group.add_argument
    flag(
        "--max_bad_fraction",
        changes="nothing",
        type=float,
        default=0.01,
        help="share of training images that may be unreadable; each is replaced by another image",
    )
    flag(
        "--num_workers",
        everyday=True,
        changes="nothing",
        per_process=True,
        type=int,
        at_least=0,
        help="DataLoader workers per process (default: the process's share of the CPU cores minus one, from 1 to 32)",
    )


def add_run_flags(group: FlagGroup, unit: str = "epochs") -> None:
    """Adds output folder, resuming, device, precision, memory, saving, reports. unit: of --save_every."""
    add_folder_flags(group)
    add_check_flag(group)
    add_device_flags(group)
    add_saving_flags(group, unit)
    group.add_argument(
        "--print_freq", changes="nothing", type=int, default=20, at_least=1, help="steps between reports"
    )
    group.add_argument(
        "--profile",
        changes="nothing",
        metavar="STEP",
        type=int,
        at_least=0,
        help="trace the three steps after this step of the run (rank 0)",
    )
    group.add_argument(
        "--detect_anomaly",
        changes="nothing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="end the run at the first operation whose gradient is NaN, and name it (slow)",
    )


def add_folder_flags(group: FlagGroup) -> None:
    """Adds output folder and resuming."""
    flag = group.add_argument
    flag(
        "--output_dir",
        everyday=True,
        changes="nothing",
        help="folder of the run: checkpoints, logs, settings; the same command resumes the run in it",
    )
    flag(
        "--resume",
        everyday=True,
        changes="nothing",
        default="auto",
        help="where a new run starts: a checkpoint or a run's folder; not used if --output_dir holds checkpoints",
    )
    flag(
        "--allow_changes",
        changes="nothing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="resume although changed settings or data change the results",
    )


def add_check_flag(group: FlagGroup) -> None:
    """Adds the end of a run before its first step, see `util.data.survey` and `Training.train`."""
    group.add_argument(
        "--check_data",
        everyday=True,
        changes="nothing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="set the run up, report what its images are, and end before the first step",
    )


def add_device_flags(group: FlagGroup) -> None:
    """Adds how the model is computed: device, precision, kernels, memory."""
    flag = group.add_argument
    boolean = argparse.BooleanOptionalAction
    flag(
        "--device",
        everyday=True,
        changes="rounding",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )
    flag(
        "--precision",
        everyday=True,
        default="auto",
        choices=("auto", *PRECISIONS),
        help="auto: bf16 or fp16 on a GPU, fp32 on a CPU",
    )
    flag(
        "--attention",
        changes="rounding",
        default="auto",
        choices=CHOICES,
        help="attention kernel that is tried first; short: for training with at most 128 tokens, auto on an H100",
    )
    flag(
        "--compile",
        everyday=True,
        changes="rounding",
        action=boolean,
        help="compile the training step by torch.compile, block by block (default: on a GPU with a C compiler, for "
        f"schedules of {MIN_COMPILED_STEPS} steps or more)",
    )
    flag(
        "--dist_timeout",
        changes="nothing",
        type=float,
        default=600,
        above=0,
        help="seconds without progress after which a process ends",
    )
    flag(
        "--recompute",
        everyday=True,
        changes="nothing",
        action=boolean,
        default=False,
        help="recompute blocks in the backward pass: less memory, more time",
    )
    flag(
        "--recompute_pointwise",
        changes="nothing",
        action=boolean,
        default=False,
        help="recompute blocks apart from matrix products and attention: takes less time, saves less memory",
    )


def add_saving_flags(group: FlagGroup, unit: str) -> None:
    """Adds the end of this start, and how often it saves. unit: of --save_every."""
    flag = group.add_argument
    flag(
        "--max_steps",
        everyday=True,
        changes="nothing",
        type=int,
        at_least=1,
        help="save and end after this step of the run (default: at the end of the schedule)",
    )
    flag(
        "--save_every",
        everyday=True,
        changes="nothing",
        type=int,
        default=20,
        at_least=1,
        help=f"{unit} between checkpoints that are kept; of the others the last two stay",
    )
    flag(
        "--save_minutes",
        changes="nothing",
        type=float,
        default=5.0,
        at_least=0,
        help="minutes between checkpoints, written at a report while training continues; 0: none",
    )
    flag(
        "--save_steps",
        changes="nothing",
        type=int,
        default=0,
        at_least=0,
        help="steps between checkpoints, besides; 0: none",
    )
