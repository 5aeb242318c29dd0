"""Opens the images of a split: decides what --data_path is, and opens it on all ranks."""

import argparse
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from util import collectives
from util.data.folders import find_files, folder_identity
from util.data.images import AS_RGB, FolderImages, Images, Reading, refuse_single_class
from util.urls import is_url

DOWNLOADED = ("cifar10", "cifar100")  # data sets that are downloaded if they are missing
INATURALIST = {"inat18": 2018, "inat19": 2019}
DATASETS = ("folder", *DOWNLOADED, *INATURALIST, "hf")
SomeImages = TypeVar("SomeImages", bound=Images)


def find_images(
    dataset: str,
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    reading: Reading = AS_RGB,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Images:
    """Returns the images of a split. A module of other data than folders is imported when there is such data.

    dataset: one of DATASETS; "folder" also reads tars. labelled: every image must have a class. image_column,
    label_column: of "hf". ValueError if there is no such data.
    """
    if dataset != "folder" and is_url(data_path):
        raise ValueError(f"--dataset {dataset} reads no URL, such as {str(data_path)!r}")
    if dataset == "hf":
        try:
            from util.data.hugging_face import open_hugging_face
        except ImportError as error:
            raise ValueError(f"--dataset hf needs a package: pip install {error.name}") from error
        return open_hugging_face(data_path, split, labelled, image_column, label_column, reading)
    if image_column or label_column:
        raise ValueError(f"--image_column and --label_column are for --dataset hf, not for {dataset}: leave them out")
    if dataset in DOWNLOADED:
        from util.data.published import CifarImages

        if reading.in_chans != 3 or reading.invalid is not None:
            flags = "--in_chans, --nodata, --mask_band and --bands"
            raise ValueError(f"--dataset {dataset} has 3 channels, all of them valid: leave out {flags}")
        return CifarImages(dataset, data_path, split)
    if dataset in INATURALIST:
        from util.data.published import INaturalistImages

        return INaturalistImages(data_path, split, INATURALIST[dataset], reading)
    if is_url(data_path):
        from util.data.remote_tars import open_remote_tars

        return open_remote_tars(str(data_path), split, labelled, reading)
    files = find_files(data_path, split, labelled)
    if files.tars:
        from util.data.tars import open_tars

        return open_tars(files.tars, labelled, files.notes, reading)
    return FolderImages(files.root, labelled, files.notes, reading)


def open_images(
    dataset: str,
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    max_bad_fraction: float = 0.0,
    image_column: str | None = None,
    label_column: str | None = None,
    **reading: Any,
) -> Images:
    """Returns the images of a split, after a look at them: see `find_images`.

    labelled: for training there must be two classes or more. max_bad_fraction: of the image headers that are checked.
    ImageError if more are bad, or if one has other channels. reading: parts of a `Reading`.
    """
    images = find_images(dataset, data_path, split, labelled, Reading(**reading), image_column, label_column)
    if labelled and split == "train":
        refuse_single_class(images)
    images.check(max_bad_fraction)
    return images


# --------------------------------------------------------------------------------------------------------- all ranks


def open_everywhere(
    args: argparse.Namespace,
    split: str,
    labelled: bool = False,
    max_bad_fraction: float = 0.0,
    pixel_settings: Mapping[str, Any] | None = None,
) -> Images:
    """Opens the images that the flags name on every rank. Rank 0 downloads, converts or indexes first.

    If all ranks see the same folder of files, rank 0 alone lists it and reads the headers. Copies of a data set on the
    disks of nodes are listed by each rank, and compared.

    pixel_settings: of a trained model, with its `in_chans` and what marks invalid pixels (default: the flags').
    ValueError on all ranks if one of them fails, or if they see different data.
    """
    if pixel_settings is None:
        pixel_settings = vars(args)

    reading = Reading.from_settings({**pixel_settings, "loader": args.loader})

    def open_here() -> Images:
        return open_images(
            dataset=args.dataset,
            data_path=args.data_path,
            split=split,
            labelled=labelled,
            max_bad_fraction=max_bad_fraction,
            image_column=args.image_column,
            label_column=args.label_column,
            **vars(reading),
        )

    images = open_once(open_here, split, args.data_path)
    if getattr(args, "check_data", False):
        from util.data.survey import report_split

        report_split(split, images)
    return images


def open_once(open_here: Callable[[], SomeImages], split: str, data_path: str) -> SomeImages:
    """Opens images on rank 0, for all ranks if they were given one `data_path` and see one folder there.

    Otherwise, and if they lie in files that rank 0 has written, each rank opens them afterwards. ValueError on all
    ranks if one of them fails, or if they see different data.
    """
    open_cached = cache(open_here)
    views = collectives.gather_objects((data_path, folder_identity(Path(data_path))))

    def open_for_all() -> SomeImages | None:
        images = open_cached()
        if images.lie_in_files or len(set(views)) > 1:
            return None
        return images

    images_for_all = collectives.run_on_rank0(open_for_all)
    if images_for_all is not None:
        return images_for_all
    images = collectives.run_everywhere(open_cached)
    facts = {
        "number of images": len(images),
        "names and labels": images.fingerprint(),
        "channels and depth": str(images.pixel_format),
    }
    collectives.refuse_differences(facts, f"{split} data")
    return images


def data_hint(num_workers: int, device: str) -> str:
    """Returns what helps a run that waits for images, or "" on a CPU that loads its own data."""
    if num_workers == 0 and device == "cpu":
        return ""
    return f"raise --num_workers, {num_workers} now, or take more cores or a faster disk"
