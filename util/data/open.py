"""Opens the images of a run on all ranks."""

import argparse
from pathlib import Path
from typing import Any

from util import collectives
from util.data import decode
from util.data.datasets import DOWNLOADED, INATURALIST, open_images
from util.data.folders import list_folder
from util.data.hugging_face import HuggingFaceImages
from util.data.images import EncodedImages, Images
from util.data.splits import choose_split, group_by_split, split_of_tar
from util.data.tars import find_tars


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
    in_tars = args.dataset == "folder" and collectives.run_everywhere(
        lambda: bool(find_tars(args.data_path, split, labelled))
    )
    collectives.refuse_differences({"--data_path": "tars" if in_tars else "no tars"}, "kind of data")

    def open_split() -> Any:
        options = max_bad_fraction, in_chans or args.in_chans, args.image_column, args.label_column
        return open_images(args.dataset, args.data_path, split, labelled, *options)

    # On nodes with a cache of their own, the processes of `datasets` wait for each other by a lock.
    if args.dataset in (*DOWNLOADED, "hf") or in_tars:
        collectives.run_on_rank0(lambda: bool(open_split()))
    images = collectives.run_everywhere(open_split)
    found = {"number of images": len(images), "names and labels": images.fingerprint()}
    found["channels and depth"] = str(images.pixel_format)
    collectives.refuse_differences(found, f"{split} data")
    images.reference = args.loader == "reference"
    return images


def has_val(args: argparse.Namespace, images: Images) -> bool:
    """Whether the data holds a split of validation images. It reads names alone. images: the training images."""
    root = Path(args.data_path)
    if args.dataset in INATURALIST:
        return (root / f"val{INATURALIST[args.dataset]}.json").is_file()
    if isinstance(images, HuggingFaceImages):
        return choose_split(group_by_split(images.splits), "val") is not None
    if args.dataset in DOWNLOADED or getattr(images, "content", {}).get("split_inside"):
        return True
    if not root.is_dir():  # a tar without splits
        return False
    listing = list_folder(root)
    found = group_by_split(listing.folders) | group_by_split(listing.tars, split_of_tar)
    return choose_split(found, "val") is not None


def data_settings(images: Any) -> dict[str, str]:
    """Returns the settings that pin the data of a run: --data_path with the commit, if it is a data set of the Hub."""
    pinned_path = getattr(images, "pinned_path", None)
    return {"data_path": pinned_path} if pinned_path else {}


def data_hint(images: Any, num_workers: int, cores: int, device: str) -> str:
    """Returns what would most likely help a run that waits for these images, or "" on a CPU that loads its own data.

    cores: of this process. device: "cpu" or "cuda".
    """
    if num_workers == 0:
        return "" if device == "cpu" else "no worker loads ahead; set --num_workers"
    hints = []
    if num_workers < cores - 1:
        hints.append(f"raise --num_workers, {num_workers} now, to this process's {cores} cores")
    if isinstance(images, EncodedImages):
        if decode.simplejpeg is None and not images.reference:
            hints.append("pip install simplejpeg, which decodes JPEGs faster")
        if images.reference:
            hints.append("--loader reference is half as fast as the default")
    return "; ".join(hints) or "more cores per GPU; a faster disk, or fewer and larger files by scripts/pack_dataset.py"
