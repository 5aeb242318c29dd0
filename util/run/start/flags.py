"""The flags that the training mains share. `util.run.start.plan` checks them, and computes what follows from them."""

from util.attention import CHOICES
from util.data.folders import DEFAULT_PATH
from util.data.open import DATASETS
from util.data.pixel_format import nodata_value
from util.flag import Flag
from util.lr_sched import SCHEDULES
from util.run.processes.distributed import PRECISIONS
from util.urls import data_path

RECIPE_FLAG = Flag(
    "recipe",
    help="set defaults from recipes.py, or `list` them; explicit flags win",
    everyday=True,
    metavar="NAME",
    changes="nothing",  # by itself: the values that it sets are compared
)

FINETUNE_FLAG = Flag(
    "finetune",
    help="pre-trained encoder: a checkpoint or a run's folder (default: train from scratch)",
    everyday=True,
    changes="nothing",  # the path: the identity of the first weights is compared
)

PATCH_SIZE_FLAG = Flag("patch_size", int, help="patch side in pixels (default: the model's)", everyday=True, at_least=1)

SIZE_FLAGS = (
    Flag(
        "input_size",
        int,
        help="image side in pixels, or height and width (default: the model's)",
        everyday=True,
        nargs="+",
        at_least=1,
    ),
    PATCH_SIZE_FLAG,
)

DROP_PATH_FLAG = Flag(  # of programs that train on the encoder
    "drop_path",
    float,
    help="drop path rate of the last block; it grows linearly from 0",
    everyday=True,
    metavar="RATE",
    at_least=0,
    below=1,
)

BATCH_FLAGS = (
    Flag(
        "batch_size",
        int,
        help="images per process and micro-batch (default: 64; with --total_batch_size the largest that divides a "
        "process's share, up to 64, or 512 for a linear probe; in pre-training on GPUs up to 512 of those that fit)",
        everyday=True,
        changes="split",
        at_least=1,
    ),
    Flag(
        "accum_iter",
        int,
        help="micro-batches per step (default: 1, or what --total_batch_size needs)",
        changes="split",
        at_least=1,
    ),
    Flag(
        "total_batch_size",
        int,
        help="images per step over all processes; --accum_iter follows from it",
        everyday=True,
        at_least=1,
    ),
)

UPDATE_FLAGS = (
    Flag("clip_grad", float, help="bound on the norm of the gradient (default: no bound)", above=0),
    Flag(
        "weight_decay", float, 0.05, "weight decay of matrices; biases and norms have none", everyday=True, at_least=0
    ),
    Flag("seed", int, 0, "seed of initial weights, shuffling, augmentation and masks", everyday=True, at_least=0),
)

OPTIMISATION_FLAGS = (
    *BATCH_FLAGS,
    Flag("epochs", int, 100, "length of the schedule", everyday=True, at_least=1),
    Flag(
        "warmup_epochs",
        float,
        help="epochs of linear warm-up; if not given, that of the recipe or of the defaults, and in a schedule that is "
        "shorter than theirs at most a tenth, or their share if that is more: 40 of 800 epochs become 4 of 40",
        everyday=True,
    ),
    Flag("blr", float, help="base learning rate: lr = blr * total batch size / 256", everyday=True, at_least=0),
    Flag("lr", float, help="absolute learning rate, instead of --blr", everyday=True, at_least=0),
    Flag("min_lr", float, help="learning rate at the end of the schedule", at_least=0),
    Flag("warmup_lr", float, 0.0, "learning rate at the start of the warm-up", at_least=0),
    Flag(
        "lr_schedule",
        str,
        "mae",
        "schedule of the framework's release: see util/lr_sched.py; wsd: a constant rate, then a decay",
        choices=SCHEDULES,
    ),
    Flag("decay_epochs", int, 0, "for wsd: epochs of the decay, the last ones", at_least=0),
    Flag("lr_steps", float, (), "for simmim_steps: epochs after which the rate falls tenfold", nargs="*"),
    *UPDATE_FLAGS,
)

HFLIP_FLAG = Flag("hflip", bool, True, "mirror half of the training images at random", everyday=True)

LOADING_FLAGS = (
    Flag(
        "max_bad_fraction",
        float,
        0.01,
        "share of training images that may be unreadable; each is replaced by another image",
        changes="nothing",
        at_least=0,
        below=1,
    ),
    Flag(
        "num_workers",
        int,
        help="DataLoader workers per process (default: the process's share of the CPU cores minus one, from 1 to 32)",
        everyday=True,
        changes="nothing",
        per_process=True,
        at_least=0,
    ),
)

DATA_FLAGS = (
    Flag(
        "dataset",
        str,
        "folder",
        "kind of data; folder: image folders or tar shards; hf: Hugging Face datasets",
        everyday=True,
        choices=DATASETS,
    ),
    # data may move: names and labels of the images are compared
    Flag(
        "data_path",
        data_path,
        DEFAULT_PATH,
        "root of the data; CIFAR is downloaded to it if it is not there; for hf also a name on the Hub; packed "
        "shards may lie behind a URL",
        everyday=True,
        changes="nothing",
        per_process=True,
    ),
    Flag("image_column", help="only for hf: column of the images (default: the only one)", changes="nothing"),
    Flag(
        "label_column",
        help="only for hf: column of the classes (default: label, or the only ClassLabel)",
        changes="nothing",
    ),
    Flag(
        "loader", str, "fast", "reference: decode and resize by Pillow, as torchvision", choices=("fast", "reference")
    ),
    Flag("crop_scale", float, help="smallest and largest area of the random crop", nargs=2),
    HFLIP_FLAG,
    Flag(
        "vflip",
        bool,
        False,
        "turn half of the training images upside down at random: for images without an up, as of microscopes",
    ),
    *LOADING_FLAGS,
)

REPEAT_FLAG = Flag(
    "repeat_aug",
    int,
    1,
    "crops of an image in a step, which is read and decoded once for them: for GPUs that wait for data",
    metavar="R",
    at_least=1,
)

PIXEL_FLAGS = (
    Flag("in_chans", int, 3, "channels of the images; 3: RGB", everyday=True, at_least=1),
    Flag(
        "rgb_bands",
        int,
        help="with first weights for RGB and images of other bands: the numbers, from 0, of red, green and blue; the "
        "model begins as if there were no other bands, and trains its patch embedding (default of one band: 0 0 0)",
        nargs=3,
        metavar=("RED", "GREEN", "BLUE"),
        at_least=0,
    ),
    Flag(
        "mean",
        float,
        help="mean of each channel; a fraction of the full range, or in the unit of floats (default: those of the "
        "checkpoint that the run starts from, ImageNet's for 8-bit RGB, or the data's)",
        everyday=True,
        nargs="+",
    ),
    Flag(
        "std",
        float,
        help="deviation of each channel, in the unit of --mean (default: as --mean)",
        everyday=True,
        nargs="+",
    ),
)

# What marks invalid pixels, see `util.data.invalid_pixels`.
INVALID_FLAGS = (
    Flag(
        "nodata",
        nodata_value,
        help="value of invalid pixels of a band, or nan; they count neither in mean and deviation nor in the loss "
        "(write --nodata=-1e30 for a negative number with an exponent; default: all pixels are valid)",
        metavar="VALUE",
    ),
    Flag(
        "mask_band",
        int,
        help="band of the files, from 0 or -1 for the last, that is 0 at invalid pixels and no channel of --in_chans",
    ),
    Flag(
        "bands",
        int,
        help="channels, from 0, that files with as many bands hold; the others are invalid; may be repeated",
        repeats=True,
        nargs="+",
    ),
)


def all_valid_flag(purpose: str = "") -> Flag:
    """Returns what overrides the marks of invalid pixels of a trained model. purpose: what it is for, in the help."""
    return Flag(
        "all_valid",
        bool,
        False,
        f"{purpose}nothing marks invalid pixels in these images, whatever did in those of the model's training",
        changes="nothing",
    )


def eval_split_flag(purpose: str = "") -> Flag:
    """Returns the images on which a trained model is evaluated. purpose: what it is for, in the help."""
    return Flag(
        "eval_split",
        str,
        "val",
        f"{purpose}the images that are evaluated; val is test where there is no val",
        everyday=True,
        changes="nothing",
        choices=("val", "test"),
    )


FOLDER_FLAGS = (
    Flag(
        "output_dir",
        help="folder of the run: checkpoints, logs, settings; the same command resumes the run in it",
        everyday=True,
        changes="nothing",
    ),
    Flag(
        "resume",
        str,
        "auto",
        "where a new run starts: a checkpoint or a run's folder; not used if --output_dir holds checkpoints",
        everyday=True,
        changes="nothing",
    ),
    Flag(
        "allow_changes", bool, False, "resume although changed settings or data change the results", changes="nothing"
    ),
)

# How the model is computed: device, precision, kernels, memory.
DEVICE_FLAGS = (
    Flag(
        "device",
        str,
        "auto",
        "auto: a GPU if there is one",
        everyday=True,
        changes="rounding",
        choices=("auto", "cpu", "cuda"),
    ),
    Flag(
        "precision",
        str,
        "auto",
        "auto: bf16 or fp16 on a GPU, fp32 on a CPU",
        everyday=True,
        choices=("auto", *PRECISIONS),
    ),
    Flag(
        "attention",
        str,
        "auto",
        "attention kernel that is tried first; short: for training with at most 128 tokens, auto on an H100",
        changes="rounding",
        choices=CHOICES,
    ),
    Flag(
        "compile",
        bool,
        False,
        "compile the training step by torch.compile, block by block; the first step of a ViT-B took up to 90 s more, "
        "each later one 25 ms less (H100, 512 images)",
        everyday=True,
        changes="rounding",
    ),
    Flag("dist_timeout", float, 600, "seconds without progress after which a process ends", changes="nothing", above=0),
    Flag(
        "recompute",
        bool,
        False,
        "recompute blocks in the backward pass: less memory, more time",
        everyday=True,
        changes="nothing",
    ),
    Flag(
        "recompute_pointwise",
        bool,
        False,
        "recompute blocks apart from matrix products and attention: takes less time, saves less memory",
        changes="nothing",
    ),
)


def run_flags(unit: str = "epochs") -> tuple[Flag, ...]:
    """Returns the flags of a run: its folder, device, end and saving, reports. unit: of --save_every."""
    return (
        *FOLDER_FLAGS,
        Flag(
            "check_data",
            bool,
            False,
            "set the run up, report what its images are, and end before the first step",
            everyday=True,
            changes="nothing",
        ),
        *DEVICE_FLAGS,
        Flag(
            "max_steps",
            int,
            help="save and end after this step of the run (default: at the end of the schedule)",
            everyday=True,
            changes="nothing",
            at_least=1,
        ),
        Flag(
            "save_every",
            int,
            20,
            f"{unit} between checkpoints that are kept; of the others the last two stay",
            everyday=True,
            changes="nothing",
            at_least=1,
        ),
        Flag(
            "save_minutes",
            float,
            5.0,
            "minutes between checkpoints, written at a report while training continues; 0: none",
            changes="nothing",
            at_least=0,
        ),
        Flag("save_steps", int, 0, "steps between checkpoints, besides; 0: none", changes="nothing", at_least=0),
        Flag("print_freq", int, 20, "steps between reports", changes="nothing", at_least=1),
        Flag(
            "profile",
            int,
            help="trace the three steps after this step of the run (rank 0)",
            changes="nothing",
            metavar="STEP",
            at_least=0,
        ),
        Flag(
            "detect_anomaly",
            bool,
            False,
            "end the run at the first operation whose gradient is NaN, and name it (slow)",
            changes="nothing",
        ),
    )
