"""Opens the images of a split: decides what --data_path is, and opens it on all ranks."""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from util import collectives
from util.data.folders import SplitFiles, find_files, folder_identity
from util.data.images import FolderImages, Images, refuse_single_class
from util.data.pixel_format import declares_invalid
from util.urls import is_url

if TYPE_CHECKING:
    from util.data.invalid_pixels import InvalidPixels

# Modules that only such data imports, or --check_data.
MODULES = {
    "hf": "util.data.hugging_face",
    "published": "util.data.published",
    "tars": "util.data.tars",
    "store": "util.data.remote",
    "remote tars": "util.data.remote_tars",
    "invalid pixels": "util.data.invalid_pixels",
    "check_data": "util.data.survey",
}
DOWNLOADED = ("cifar10", "cifar100")  # data sets that are downloaded if they are missing
INATURALIST = {"inat18": 2018, "inat19": 2019}
DATASETS = ("folder", *DOWNLOADED, *INATURALIST, "hf")


def module_of(kind: str) -> Any:
    """Imports and returns a module of MODULES."""
    try:
        return importlib.import_module(MODULES[kind])
    except ImportError as error:
        raise ValueError(f"--dataset {kind} needs a package: pip install {error.name}") from error


def marks_of(settings: Mapping[str, Any]) -> "InvalidPixels | None":
    """Returns what flags, or the settings of a run, declare as invalid; None: all pixels are valid.

    ValueError if that does not go with images of `in_chans` channels.
    """
    if not declares_invalid(settings):
        return None
    invalid = module_of("invalid pixels").InvalidPixels.from_settings(settings)
    invalid.check(settings["in_chans"])
    return invalid


@dataclass
class ImageSource:
    """What --data_path is, and how its images are read. ValueError if there is no such data.

    dataset: one of DATASETS; "folder" also reads tars. labelled: every image must have a class, of two or more.
    max_bad_fraction: of the image headers that are checked. in_chans: channels of the images. image_column,
    label_column: of "hf". use_pillow: decode everything by Pillow. invalid: what marks invalid pixels.
    """

    dataset: str
    data_path: str | Path
    split: str = "train"
    labelled: bool = False
    max_bad_fraction: float = 0.0
    in_chans: int = 3
    image_column: str | None = None
    label_column: str | None = None
    use_pillow: bool = False
    invalid: "InvalidPixels | None" = None
    files: SplitFiles | None = field(init=False, default=None)  # of the dataset "folder"
    store: Any = field(init=False, default=None)  # instead, if `data_path` is a URL
    folder: str = field(init=False, default="")  # in the store
    notes: list[str] = field(init=False, default_factory=list)
    images: Images | None = field(init=False, default=None)  # once they are open

    def __post_init__(self) -> None:
        if self.dataset != "hf" and (self.image_column or self.label_column):
            flags = "--image_column and --label_column are for --dataset hf"
            raise ValueError(f"{flags}, not for {self.dataset}: leave them out")
        if self.dataset in DOWNLOADED and (self.in_chans != 3 or self.invalid is not None):
            flags = "--in_chans, --nodata, --mask_band and --bands"
            raise ValueError(f"--dataset {self.dataset} has 3 channels, all of them valid: leave out {flags}")
        if self.invalid is not None:
            self.invalid.check(self.in_chans)
        if is_url(self.data_path):
            if self.dataset != "folder":
                raise ValueError(f"--dataset {self.dataset} reads no URL, such as {str(self.data_path)!r}")
            self.store = module_of("store").open_store(str(self.data_path))
            self.folder, self.notes = module_of("remote tars").find_split(self.store, self.split, self.labelled)
        elif self.dataset == "folder":
            self.files = find_files(self.data_path, self.split, self.labelled)

    @property
    def in_tars(self) -> bool:
        return self.store is not None or (self.files is not None and len(self.files.tars) > 0)

    @property
    def root(self) -> Path:
        """The folder of the images or tars."""
        if self.files is None:
            return Path(self.data_path)
        return self.files.root

    @property
    def is_written_once(self) -> bool:
        """Whether opening it writes files for all processes: a download, a conversion or an index."""
        return self.dataset in (*DOWNLOADED, "hf") or (self.files is not None and len(self.files.tars) > 0)

    def open(self) -> Images:
        """Returns the images, which are opened once. ImageError if too many are bad, or if one has other channels."""
        if self.images is None:
            images = self._open()
            if self.labelled and self.split == "train":
                refuse_single_class(images)
            images.check(self.max_bad_fraction)
            self.images = images
        return self.images

    def write_files(self) -> None:
        """Opens the images, which writes the files that all processes read."""
        self.open()

    def _open(self) -> Images:
        reading: dict[str, Any] = {
            "in_chans": self.in_chans,
            "use_pillow": self.use_pillow,
            "invalid": self.invalid,
        }
        if self.dataset in INATURALIST:
            year = INATURALIST[self.dataset]
            return module_of("published").INaturalistImages(self.data_path, self.split, year, **reading)
        if self.dataset in DOWNLOADED:
            return module_of("published").CifarImages(self.dataset, self.data_path, self.split)
        if self.dataset == "hf":
            return module_of("hf").open_hugging_face(
                self.data_path, self.split, self.labelled, self.image_column, self.label_column, **reading
            )
        if self.store is not None:
            return module_of("remote tars").open_remote_tars(
                self.store, self.folder, self.labelled, self.notes, **reading
            )
        assert self.files is not None
        if self.files.tars:
            return module_of("tars").open_tars(self.files.tars, self.labelled, self.files.notes, **reading)
        return FolderImages(self.files.root, self.labelled, self.files.notes, **reading)


def open_images(
    dataset: str, data_path: str | Path, split: str = "train", labelled: bool = False, **options: Any
) -> Images:
    """Returns the images of a split. options: see `ImageSource`."""
    return ImageSource(dataset, data_path, split, labelled, **options).open()


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

    def find_source() -> ImageSource:
        return ImageSource(
            dataset=args.dataset,
            data_path=args.data_path,
            split=split,
            labelled=labelled,
            max_bad_fraction=max_bad_fraction,
            in_chans=pixel_settings["in_chans"],
            image_column=args.image_column,
            label_column=args.label_column,
            use_pillow=args.loader == "reference",
            invalid=marks_of(pixel_settings),
        )

    images = open_source(find_source, args.data_path, split)
    if getattr(args, "check_data", False):
        module_of("check_data").report_split(split, images)
    return images


def open_source(find_source: Callable[[], ImageSource], data_path: str, split: str) -> Images:
    """Opens the source that is found on every rank, see `open_everywhere`."""
    source = collectives.run_on_rank0(find_source)
    if not source.is_written_once and is_same_folder(data_path, source.root):
        return collectives.run_on_rank0(source.open)
    source = collectives.run_everywhere(find_source)
    kind = "no tars"
    if source.in_tars:
        kind = "tars"
    collectives.refuse_differences({"--data_path": kind}, "kind of data")
    if source.is_written_once:
        collectives.run_on_rank0(source.write_files)
    images = collectives.run_everywhere(source.open)
    refuse_other_data(images, split)
    return images


def refuse_other_data(images: Images, split: str) -> None:
    """ValueError on all ranks if they have opened different images."""
    facts = {
        "number of images": len(images),
        "names and labels": images.fingerprint(),
        "channels and depth": str(images.pixel_format),
    }
    collectives.refuse_differences(facts, f"{split} data")


def is_same_folder(data_path: str, root: Path) -> bool:
    """Whether all ranks were given the same path, and see the same folder there. All ranks must call it.

    root: the folder of the images in rank 0's data.
    """
    views = collectives.gather_objects((data_path, folder_identity(root)))
    return len(set(views)) == 1


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
