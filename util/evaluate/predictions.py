"""Predictions for images without labels: which images, how far a program is, and what it cannot read.

A program that is started again continues after what it has written: files of single images, or lines of `Results`.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from util.data.datasets import Address
from util.data.folders import IMG_EXTENSIONS, is_image, list_folder, list_images, note_unread
from util.data.images import (
    AS_RGB,
    EncodedImages,
    ImageError,
    ImageFiles,
    Reading,
    find_storage_error,
)
from util.data.loader import Loader
from util.data.tars import open_tars
from util.data.transforms import to_tensor
from util.evaluate.context import EvalContext
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
        unread: Counter[str] = Counter()
        names = list_images(path, "", unread)
        if names:
            return ImageFiles(path, [(name, 0) for name in names], [], note_unread(unread), reading)
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


class Progress:
    """Counts the images of a program on a terminal, and names what cannot be read on stderr."""

    def __init__(self, num_images: int, num_done: int) -> None:
        """num_done: images whose outputs are there already."""
        self.num_unreadable = 0
        self.bar = tqdm(total=num_images, initial=num_done, unit="image", disable=None)

    def fail(self, message: str) -> None:
        """Names an image that cannot be read."""
        self.num_unreadable += 1
        tqdm.write(f"not predicted: {printable(message)}", file=sys.stderr)


class PreparedBatch(NamedTuple):
    """The readable images of a batch, and what is wrong with the others. views: stacked, if there are any."""

    indices: list[int]
    views: Any
    problems: list[str]


class PreparedImages(torch.utils.data.Dataset):
    """Makes batches: `stack` of what `prepare` returns for images [C, H, W] as stored."""

    def __init__(
        self, images: EncodedImages, prepare: Callable[[Tensor], Any], stack: Callable[[list[Any]], Any]
    ) -> None:
        self.images = images
        self.prepare = prepare
        self.stack = stack

    def __getitems__(self, addresses: Sequence[Address]) -> PreparedBatch:
        batch = PreparedBatch([], [], [])
        for _, i in addresses:
            try:
                pixels, _ = self.images.load(i)
            except ImageError as error:
                storage_error = find_storage_error(self.images)
                if storage_error is not None:
                    raise storage_error from error
                batch.problems.append(str(error))
                continue
            batch.indices.append(i)
            batch.views.append(self.prepare(to_tensor(pixels)))
        if batch.views:
            batch = batch._replace(views=self.stack(batch.views))
        return batch


def prepared_batches(
    images: EncodedImages,
    indices: Sequence[int],
    prepare: Callable[[Tensor], Any],
    context: EvalContext,
    progress: Progress,
    stack: Callable[[list[Any]], Any] = list,
    batch_bytes: int = 0,
) -> Iterator[tuple[list[int], Any]]:
    """Yields the readable images in batches: (indices, `stack` of what `prepare` returns), made by the workers.

    Others are named, and left out. batch_bytes: of a batch of what `prepare` returns; 0 if unknown.
    """
    addresses = []
    for first in range(0, len(indices), context.batch_size):
        addresses.append([(0, i) for i in indices[first : first + context.batch_size]])
    loaded = Loader(
        PreparedImages(images, prepare, stack),
        addresses,
        lambda batch: batch,
        num_workers=context.num_workers,
        for_gpu=context.device.type == "cuda",
        batch_bytes=batch_bytes,
    )
    try:
        for batch in loaded:
            for problem in batch.problems:
                progress.fail(problem)
            if batch.indices:
                yield batch.indices, batch.views
            progress.bar.update(len(batch.indices))
    finally:
        loaded.close()


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
