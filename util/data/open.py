"""Opens the images of a run on all ranks, and the stream of batches that its training loop reads."""

import argparse
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from util.data import decode
from util.data.bad_images import BadImages
from util.data.datasets import (
    DOWNLOADED,
    INATURALIST,
    AddressedDataset,
    StepBatchSampler,
    batches,
    cores_per_process,
    look_ahead,
    open_images,
)
from util.data.folders import list_folder, readable_splits, split_of, split_of_tar
from util.data.hugging_face import HuggingFaceImages
from util.data.images import EncodedImages, Images
from util.data.tars import find_tars
from util.run import distributed
from util.run.flags import Plan
from util.run.logging import RunLog, print_line

# (steps, collator, with_views=False) -> generator of batches; workers start with the first one, `close()` ends them
OpenBatches = Callable[..., Generator[Any, None, None]]


def open_everywhere(
    args: argparse.Namespace,
    split: str,
    labelled: bool = False,
    max_bad_fraction: float = 0.0,
    in_chans: int | None = None,
) -> Any:
    """Calls `open_images` with the flags on every rank. Rank 0 downloads, converts or indexes first.

    in_chans: channels of a trained model's images (default: the flag's).
    ValueError on all ranks if one of them fails, or if they see different data.
    """
    in_tars = args.dataset == "folder" and distributed.run_everywhere(
        lambda: bool(find_tars(args.data_path, split, labelled))
    )
    distributed.refuse_differences({"--data_path": "tars" if in_tars else "no tars"}, "kind of data")

    channels = args.in_chans if in_chans is None else in_chans

    def open_split() -> Any:
        options = max_bad_fraction, channels, args.image_column, args.label_column, in_chans is not None
        return open_images(args.dataset, args.data_path, split, labelled, *options)

    # On nodes with a cache of their own, the processes of `datasets` wait for each other by a lock.
    if args.dataset in (*DOWNLOADED, "hf") or in_tars:
        distributed.run_on_rank0(lambda: bool(open_split()))
    images = distributed.run_everywhere(open_split)
    found = {"number of images": len(images), "names and labels": images.fingerprint()}
    found["channels and depth"] = str(images.pixel_format)
    distributed.refuse_differences(found, f"{split} data")
    images.reference = args.loader == "reference"
    return images


def has_val(args: argparse.Namespace, images: Images) -> bool:
    """Whether the data holds a split of validation images. It reads names alone. images: the training images."""
    root, wanted = Path(args.data_path), set(readable_splits("val"))
    if args.dataset in INATURALIST:
        return (root / f"val{INATURALIST[args.dataset]}.json").is_file()
    if isinstance(images, HuggingFaceImages):
        return bool({split_of(name) for name in images.splits} & wanted)
    if args.dataset in DOWNLOADED or getattr(images, "content", {}).get("split_inside"):
        return True
    if not root.is_dir():  # a tar without splits
        return False
    listing = list_folder(root)
    return bool(({split_of(name) for name in listing.folders} | {split_of_tar(name) for name in listing.tars}) & wanted)


def data_settings(images: Any) -> dict[str, str]:
    """Returns the settings that pin the data of a run: --data_path with the commit, if it is a data set of the Hub."""
    pinned_path = getattr(images, "pinned_path", None)
    return {"data_path": pinned_path} if pinned_path else {}


def training_batches(
    args: argparse.Namespace,
    plan: Plan,
    process: distributed.Process,
    images: Any,
    transform: Callable,
    log: RunLog,
    img_size: tuple[int, int],
    on_failure: Callable[[Exception], object],
) -> tuple[OpenBatches, Callable[[], None]]:
    """Returns (function that opens a stream of this rank's batches, function that reports unreadable images).

    on_failure: gets the error of a stream one step before its last batch, or two if there are several processes, which
    agree to stop one step later.
    """

    def log_from_any_rank(message: str) -> None:
        if process.is_main:
            log.info(message)
        else:
            print_line(f"rank {process.rank}: {message}", sys.stderr)

    split = plan.batch_size, plan.accum_iter, process.rank, process.world_size
    dataset = AddressedDataset(images, transform, replace=args.max_bad_fraction > 0)

    def open_batches(steps: range, collator: Callable, with_views: bool = False) -> Generator[Any, None, None]:
        dataset.with_views = with_views
        stream = batches(
            dataset,
            StepBatchSampler(len(images), *split, args.seed, steps.start, steps.stop),
            collator,
            plan.num_workers,
            plan.device == "cuda",
            log_from_any_rank,
            batch_bytes=images.pixel_format.pixel_bytes * img_size[0] * img_size[1] * plan.batch_size,
        )
        return look_ahead(stream, plan.accum_iter * min(2, process.world_size), on_failure)

    return open_batches, BadImages(images, dataset.bad, args.max_bad_fraction, log.info).report


def data_hint(plan: Plan, process: distributed.Process, images: Any) -> str:
    """Returns what would most likely help a run that waits for these images, or "" on a CPU that loads its own data."""
    cores = cores_per_process(process.local_world_size)
    if plan.num_workers == 0:
        return "" if process.device.type == "cpu" else "no worker loads ahead; set --num_workers"
    hints = []
    if plan.num_workers < cores - 1:
        hints.append(f"raise --num_workers, {plan.num_workers} now, to this process's {cores} cores")
    if isinstance(images, EncodedImages):
        if decode.simplejpeg is None and not images.reference:
            hints.append("pip install simplejpeg, which decodes JPEGs faster")
        if images.reference:
            hints.append("--loader reference is half as fast as the default")
    return "; ".join(hints) or "more cores per GPU; a faster disk, or fewer and larger files by scripts/pack_dataset.py"
