"""Opens the images of a split: decides what --data_path is, and opens it on all ranks."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
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


@dataclass(frozen=True)
class ImageSource:
    """What --data_path is.

    folder: that of the images or tars. writes_files: whether `open` writes files that all processes read: a download, a
    conversion or an index.
    """

    folder: Path
    open: Callable[[], Images]
    writes_files: bool = False


def find_source(
    dataset: str,
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    reading: Reading = AS_RGB,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageSource:
    """Finds the images of a split. A module of other data than folders is imported when there is such data.

    dataset: one of DATASETS; "folder" also reads tars. labelled: every image must have a class. image_column,
    label_column: of "hf". ValueError if there is no such data.
    """
    folder = Path(data_path)
    open_here: Callable[[], Images]
    if dataset != "folder" and is_url(data_path):
        raise ValueError(f"--dataset {dataset} reads no URL, such as {str(data_path)!r}")
    if dataset == "hf":
        try:
            from util.data.hugging_face import open_hugging_face
        except ImportError as error:
            raise ValueError(f"--dataset hf needs a package: pip install {error.name}") from error
        open_here = partial(open_hugging_face, data_path, split, labelled, image_column, label_column, reading)
        return ImageSource(folder, open_here, writes_files=True)
    if image_column or label_column:
        raise ValueError(f"--image_column and --label_column are for --dataset hf, not for {dataset}: leave them out")
    if dataset in DOWNLOADED:
        from util.data.published import CifarImages

        if reading.in_chans != 3 or reading.invalid is not None:
            flags = "--in_chans, --nodata, --mask_band and --bands"
            raise ValueError(f"--dataset {dataset} has 3 channels, all of them valid: leave out {flags}")
        return ImageSource(folder, partial(CifarImages, dataset, data_path, split), writes_files=True)
    if dataset in INATURALIST:
        from util.data.published import INaturalistImages

        return ImageSource(folder, partial(INaturalistImages, data_path, split, INATURALIST[dataset], reading))
    if is_url(data_path):
        from util.data.remote import open_store
        from util.data.remote_tars import find_split, open_remote_tars

        store = open_store(str(data_path))
        place, notes = find_split(store, split, labelled)
        return ImageSource(folder, partial(open_remote_tars, store, place, labelled, notes, reading))
    files = find_files(data_path, split, labelled)
    if files.tars:
        from util.data.tars import open_tars

        open_here = partial(open_tars, files.tars, labelled, files.notes, reading)
        return ImageSource(files.root, open_here, writes_files=True)
    return ImageSource(files.root, partial(FolderImages, files.root, labelled, files.notes, reading))


def open_source(
    source: ImageSource, split: str = "train", labelled: bool = False, max_bad_fraction: float = 0.0
) -> Images:
    """Returns the images of a source, after a look at them. labelled: for training there must be two classes or more.

    max_bad_fraction: of the image headers that are checked. ImageError if more are bad, or if one has other channels.
    """
    images = source.open()
    if labelled and split == "train":
        refuse_single_class(images)
    images.check(max_bad_fraction)
    return images


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
    """Returns the images of a split, see `find_source` and `open_source`. reading: parts of a `Reading`."""
    source = find_source(dataset, data_path, split, labelled, Reading(**reading), image_column, label_column)
    return open_source(source, split, labelled, max_bad_fraction)


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

    @cache
    def find_here() -> ImageSource:
        return find_source(
            dataset=args.dataset,
            data_path=args.data_path,
            split=split,
            labelled=labelled,
            image_column=args.image_column,
            label_column=args.label_column,
            reading=Reading.from_settings({**pixel_settings, "loader": args.loader}),
        )

    @cache
    def open_here() -> Images:
        return open_source(find_here(), split, labelled, max_bad_fraction)

    def write_files() -> None:
        open_here()

    source = collectives.run_on_rank0(find_here)
    if source.writes_files:
        collectives.run_on_rank0(write_files)
        images = open_on_each(open_here, split)
    else:
        images = open_once(open_here, split, args.data_path, source.folder)
    if getattr(args, "check_data", False):
        from util.data.survey import report_split

        report_split(split, images)
    return images


def open_once(open_here: Callable[[], SomeImages], split: str, data_path: str, folder: Path) -> SomeImages:
    """Opens images on rank 0 for all, if they were given one `data_path` and see one `folder`, or else on each rank.

    folder: of the images in rank 0's data.
    """
    views = collectives.gather_objects((data_path, folder_identity(folder)))
    if len(set(views)) == 1:
        return collectives.run_on_rank0(open_here)
    return open_on_each(open_here, split)


def open_on_each(open_here: Callable[[], SomeImages], split: str) -> SomeImages:
    """Opens images on every rank. ValueError on all ranks if one of them fails, or if they see different data."""
    images = collectives.run_everywhere(open_here)
    facts = {
        "number of images": len(images),
        "names and labels": images.fingerprint(),
        "channels and depth": str(images.pixel_format),
    }
    collectives.refuse_differences(facts, f"{split} data")
    return images


def data_settings(images: Any) -> dict[str, str]:
    """Returns the settings that pin the data of a run: --data_path with the commit, if it is a data set of the Hub."""
    pinned_path = getattr(images, "pinned_path", None)
    if pinned_path is None:
        return {}
    return {"data_path": pinned_path}


def data_hint(num_workers: int, device: str) -> str:
    """Returns what helps a run that waits for images, or "" on a CPU that loads its own data."""
    if num_workers == 0 and device == "cpu":
        return ""
    return f"raise --num_workers, {num_workers} now, or take more cores or a faster disk"
