"""Predictions for images without labels: which images, which are done, and what cannot be read.

A program that is started again continues after what it has written: files of single images, or lines of `Results`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

from util.data.datasets import Address, AddressedDataset, Sample
from util.data.folders import IMG_EXTENSIONS, is_image, list_folder, list_images
from util.data.images import AS_RGB, EncodedImages, ImageError, ImageFiles, Reading
from util.data.tars import open_tars
from util.data.transforms import Size
from util.evaluate.context import EvalContext, evaluation_batches
from util.evaluate.results import refuse_changes
from util.run.files.json_files import write_json
from util.text import printable

RECORD = "predict.json"
RESULTS = ".results.jsonl"
FOREIGN = (RESULTS, "predictions.csv", "labels", "pictures", "detections.json", "images.json", "settings.json")


# ------------------------------------------------------------------------------------------------------------- images


def open_unlabelled(path: str | Path, reading: Reading = AS_RGB) -> EncodedImages:
    """Returns all images of a folder and the folders in it, of its tars, of a tar, of a text file of paths, or one.

    A path in a text file is relative to the working folder. ValueError if there are none.
    """
    path = Path(path)
    if path.is_dir():
        names = list_images(path, "")
        if names:
            return ImageFiles(path, [(name, 0) for name in names], [], reading=reading)
        tars = [path / name for name in list_folder(path).tars]
        if tars:
            return open_tars(tars, reading=reading)
        raise ValueError(
            f"{str(path)!r} and the folders in it hold no image or tar; read are {', '.join(IMG_EXTENSIONS)}"
        )
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist: give a folder of images, a tar, a list of paths, or an image")
    if path.suffix == ".tar":
        return open_tars([path], reading=reading)
    paths = [str(path)]
    if not is_image(path.name):
        paths = read_list(path)
    absolute = [os.path.abspath(listed) for listed in paths]
    root = os.path.commonpath([os.path.dirname(listed) for listed in absolute])
    samples = [(os.path.relpath(listed, root), 0) for listed in dict.fromkeys(absolute)]
    return ImageFiles(root, samples, [], reading=reading)


def read_list(path: Path) -> list[str]:
    """Returns the paths in a text file with one on each line. ValueError if it is no such file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no image, no tar, and no text file with a path on each line") from error
    return [line.strip() for line in lines if line.strip()]


def name_of(images: EncodedImages, i: int) -> str:
    """Returns the name of an image: its path in the folder, or that of its member in a tar."""
    return os.fsdecode(bytes(images.names[i]))


def output_paths(folder: Path, images: EncodedImages, ending: Callable[[str], str]) -> list[Path]:
    """Returns where the output of each image is written: in `folder`, under its name with another ending.

    ending: returns the ending for an image's name. ValueError if two images would share a file, or if a name, which may
    come from the index of a tar, leads out of the folder.
    """
    paths: dict[Path, str] = {}
    for i in range(len(images)):
        name = name_of(images, i)
        path = folder / Path(name).with_suffix(ending(name))
        if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
            raise ValueError(f"the output of {name!r} would lie outside of {str(folder)!r}: rename the image")
        if path in paths:
            raise ValueError(f"{paths[path]!r} and {name!r} would both be written to {str(path)!r}: rename one")
        paths[path] = name
    return list(paths)


# ------------------------------------------------------------------------------------------------------------ reading


class ReadableImages(AddressedDataset):
    """Images for an evaluation without labels: of one that cannot be read, the sample is what is wrong."""

    def __getitems__(self, addresses: Sequence[Address]) -> list[Any]:
        samples: list[Any] = []
        for address in addresses:
            try:
                samples += super().__getitems__([address])
            except ImageError as error:
                samples.append(str(error))
        return samples


class ReadableBatch(NamedTuple):
    """The readable images of a batch, and what is wrong with the others. batch: None if there are none."""

    indices: list[int]
    batch: Any
    problems: list[str]


def collate_readable(samples: Sequence[Any], collate: Callable[[Sequence[Any]], Any]) -> ReadableBatch:
    """Collates the samples of `ReadableImages` in a worker. collate: makes the batch."""
    problems = [sample for sample in samples if isinstance(sample, str)]
    readable = [sample for sample in samples if not isinstance(sample, str)]
    indices = [index for _, _, (_, index) in readable]
    batch = None
    if readable:
        batch = collate(readable)
    return ReadableBatch(indices, batch, problems)


def readable_batches(
    images: EncodedImages,
    view: Callable[[Tensor, int, int], Any],
    indices: Sequence[int],
    context: EvalContext,
    collate: Callable[[Sequence[Any]], Any],
    largest: Size,
) -> Iterator[tuple[list[int], Any]]:
    """Yields (their indices, a batch) of the readable images. Others are named, and left out.

    view, collate, largest: see `AddressedDataset` and `evaluation_batches`. largest: (0, 0) if unknown.
    """
    dataset = ReadableImages(images, view)
    collate = partial(collate_readable, collate=collate)
    for batch in evaluation_batches(dataset, indices, context, collate, largest):
        for problem in batch.problems:
            name_unreadable(problem)
        if batch.indices:
            yield batch.indices, batch.batch


def view_of_one(samples: Sequence[Sample]) -> Any:
    """Collates one sample, to the view of its image."""
    return samples[0][0]


def name_unreadable(problem: str) -> None:
    """Names an image that cannot be read on stderr."""
    tqdm.write(f"not predicted: {printable(problem)}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------ outputs


def write_record(folder: Path, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes what predicts into RECORD of a folder. facts: further entries.

    ValueError if the folder holds predictions of another model, or with other settings, or those of another program.
    """
    path = folder / RECORD
    if path.exists():
        refuse_changes(path, json.loads(path.read_text())["settings"], settings)
    else:
        foreign = [name for name in FOREIGN if (folder / name).exists()]
        if foreign:
            raise ValueError(
                f"--output_dir {str(folder)!r} holds {', '.join(foreign)} of another program: choose another folder"
            )
    write_json(path, {"settings": settings, **facts})


class Results:
    """Results of images that become one file at the end: {i: result}. Until then, a file holds a line for each.

    A line names the image by its absolute path: those in different tars may have one name.
    """

    def __init__(self, folder: Path, images: EncodedImages) -> None:
        self.path = folder / RESULTS
        self.paths = [os.path.abspath(images.path(i)) for i in range(len(images))]
        by_path: dict[str, Any] = {}
        if self.path.exists():
            for line in self.path.read_text().split("\n"):
                with suppress(ValueError):  # an interruption leaves a part of a line
                    path, result = json.loads(line)
                    by_path[path] = result
        self.by_index = {i: by_path[path] for i, path in enumerate(self.paths) if path in by_path}

    def missing(self) -> list[int]:
        """Returns the images without results."""
        return [i for i in range(len(self.paths)) if i not in self.by_index]

    def add(self, i: int, result: Any) -> None:
        """Adds the result of an image, which JSON can hold."""
        self.by_index[i] = result
        with open(self.path, "a") as file:
            file.write("\n" + json.dumps([self.paths[i], result]))
