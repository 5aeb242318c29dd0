"""Images of Hugging Face `datasets`: a data set on the Hub, a folder of Parquet or Arrow files, or a `save_to_disk`.

It keeps the rows in Arrow files that are mapped into memory, so all workers share them. The images are read as they are
stored, encoded. `util.data.open` imports this module for `--dataset hf`.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from pyarrow import types

from util.data.folders import MissingSplit, choose_split, note_stand_in, split_of
from util.data.images import AS_RGB, EncodedImages, ImageError, Reading, read_file
from util.text import count_of, shorten

SAVED = ("dataset_dict.json", "state.json")  # files of `DatasetDict.save_to_disk` and of `Dataset.save_to_disk`
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@]+))?(@(?P<commit>[0-9a-f]{40}))?")
LABEL_TYPES = (types.is_integer, types.is_boolean, types.is_string, types.is_large_string)
FORMS = (
    "expected is a folder of Parquet or Arrow files, a folder of save_to_disk, or the name of a data set on the Hub: "
    "OWNER/NAME or OWNER/NAME:CONFIG, and @COMMIT of 40 digits to pin it"
)


class HuggingFaceImages(EncodedImages):
    """The rows of one split. Without `labelled`, a data set needs no classes, and labels without a class are -1.

    dataset: a `datasets.Dataset`. image_column, label_column: names, or None to find the only candidate.
    ValueError if there is no row, if a column is
    missing or ambiguous, or if the images are not `labelled` as asked.
    """

    lie_in_files = True

    def __init__(
        self,
        dataset: Any,
        root: str,
        labelled: bool = False,
        image_column: str | None = None,
        label_column: str | None = None,
        pinned_path: str | None = None,
        notes: Sequence[str] = (),
        reading: Reading = AS_RGB,
    ) -> None:
        if not len(dataset):
            raise ValueError(f"{root} has no rows")
        self.pinned_path = pinned_path
        column = find_column(dataset, root, "--image_column", image_column, datasets.Image)
        stored = dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False)).data.column(0)
        # Columns of the mapped table, which forked workers share: bytes, null if an image is in a file of its own.
        self.encoded = pc.struct_field(stored, "bytes")
        self.paths = pc.struct_field(stored, "path")
        self.sizes = pc.binary_length(self.encoded).fill_null(-1).to_numpy().astype(np.int64)
        names: list[bytes] = []
        for i, path in enumerate(self.paths.to_pylist()):
            names.append(row_name(i, path))
        classes, labels = read_labels(dataset, root, label_column, labelled)
        super().__init__(root, np.array(names), labels, classes, notes, reading)

    def path(self, i: int) -> str:
        return f"row {i} of {self.root} ({self.paths[i].as_py() or 'no path'})"

    def read(self, i: int) -> bytes:
        data = self.encoded[i].as_py()
        if data is not None:
            return data
        path = self.paths[i].as_py()
        if path is not None:
            return read_file(path)
        raise ImageError(f"{self.path(i)!r} holds no image")

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all names, labels and sizes in bytes: the same for one data set in all its formats."""
        return hashlib.sha256(super().fingerprint().encode() + self.sizes.astype("<i8").tobytes()).hexdigest()


def row_name(i: int, path: str | None) -> bytes:
    """Returns the name of row i for the fingerprint, without folders, which differ between two copies of a data set."""
    if not path:
        return str(i).encode()
    return PurePath(path).name.encode()


# ------------------------------------------------------------------------------------------------------------ splits


def open_hugging_face(
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    image_column: str | None = None,
    label_column: str | None = None,
    reading: Reading = AS_RGB,
) -> HuggingFaceImages:
    """Returns the images of a split; downloads and converts the data if it is not in the cache of `datasets`.

    ValueError if the data is missing or ambiguous, OSError if the network or the disk fails.
    """
    splits, pinned_path = load_splits(str(data_path))
    root = pinned_path or str(data_path)
    name, notes = choose_rows(list(splits), split, labelled, root)
    if name:
        root = f"{root}, split {name}"
    return HuggingFaceImages(splits[name], root, labelled, image_column, label_column, pinned_path, notes, reading)


def choose_rows(names: list[str], split: str, labelled: bool, source: str) -> tuple[str, list[str]]:
    """Returns (the name of the split to read if `split` is asked for, notes).

    A single split is read for images that need no labels, whatever its name is. MissingSplit if there is none,
    ValueError if there is more than one.
    """
    chosen = choose_split([split_of(name) for name in names], split, labelled)
    matching = [name for name in names if split_of(name) == chosen]
    if chosen is None and len(names) == 1 and not labelled:
        matching = names
    elif chosen is None:
        raise MissingSplit(f"{source} has the splits {shorten(names, 10)}, but no {split}")
    if len(matching) > 1:
        raise ValueError(f"{source} has the splits {' and '.join(matching)} for {chosen}: keep one of them")
    if not matching[0]:
        return "", []
    return matching[0], note_stand_in(f"the split {matching[0]}", chosen, split)


def load_splits(data_path: str) -> tuple[dict[str, Any], str | None]:
    """Returns ({split: `datasets.Dataset`}, `data_path` with the commit that was read, or None for local data).

    The key of a data set that was saved without splits is "".
    """
    try:
        if any((Path(data_path) / name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(data_path)
            if isinstance(saved, datasets.Dataset):
                return {"": saved}, None
            return dict(saved), None
        name, config, commit = parse_path(data_path)
        builder = datasets.load_dataset_builder(name, config, revision=commit)
        if commit and commit != builder.hash:  # `datasets` reads its cache if it cannot read the Hub
            raise ValueError(f"commit {commit} was not found; the newest one in the cache is {builder.hash}")
        builder.download_and_prepare()
        splits = dict(builder.as_dataset())
    except (datasets.exceptions.DatasetsError, FileNotFoundError, LookupError, ValueError) as error:
        message = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"--data_path {data_path!r} cannot be read by datasets: {message}; {FORMS}") from error
    if Path(name).is_dir():
        return splits, None
    if config:
        name = f"{name}:{config}"
    return splits, f"{name}@{builder.hash}"


def parse_path(data_path: str) -> tuple[str, str | None, str | None]:
    """Returns (folder or name, config or None, commit or None)."""
    folder, _, config = data_path.rpartition(":")
    if Path(data_path).is_dir():
        return data_path, None, None
    if folder and Path(folder).is_dir():
        return folder, config, None
    parts = HUB_NAME.fullmatch(data_path)
    if parts is None or Path(data_path).is_file():
        raise ValueError("it is neither a folder nor the name of a data set")
    return parts["name"], parts["config"], parts["commit"]


# ----------------------------------------------------------------------------------------------------------- columns


def find_column(
    dataset: Any, source: str, flag: str, given: str | None, kind: type, is_needed: bool = True
) -> str | None:
    """Returns the column that `flag` has `given`, or else the only one of a `kind`.

    Without one, ValueError if it `is_needed`, otherwise None. A `given` one always is.
    """
    columns = [name for name, feature in dataset.features.items() if isinstance(feature, kind)]
    if given is not None:
        columns = [name for name in dataset.features if name == given]
    if len(columns) == 1:
        return columns[0]
    if given is not None or is_needed:
        raise ValueError(f"{source} has the columns {[*dataset.features]}: give one of them as {flag}, got {given}")
    return None


def read_labels(dataset: Any, source: str, given: str | None, labelled: bool) -> tuple[list[str], np.ndarray]:
    """Returns (classes, labels int64 [n]); no classes and labels 0 if images that need none have none.

    Labels are in the column `given`, in `label`, or in the only `ClassLabel`. The classes of integers and strings are
    their sorted values. ValueError if images that must be `labelled` are not.
    """
    column: str | None = "label"
    if given is not None or "label" not in dataset.features:
        column = find_column(dataset, source, "--label_column", given, datasets.ClassLabel, is_needed=labelled)
    if column is None:
        return [], np.zeros(len(dataset), np.int64)
    feature = dataset.features[column]
    values = dataset.data.column(column)
    if isinstance(feature, datasets.ClassLabel):
        classes = list(feature.names)
        labels = values.fill_null(-1).to_numpy().astype(np.int64)
    elif any(is_kind(values.type) for is_kind in LABEL_TYPES):
        distinct = sorted({*values.to_pylist()} - {None})
        label_of = {value: label for label, value in enumerate(distinct)}
        classes = [str(value) for value in distinct]
        labels = np.array([label_of.get(value, -1) for value in values.to_pylist()], np.int64)
    elif labelled or given:
        raise ValueError(f"column {column!r} of {source} holds {feature}; labels are integers or strings")
    else:
        return [], np.zeros(len(dataset), np.int64)
    bad = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if labelled and len(bad):
        where = f"in column {column!r}, the first in row {bad[0]}"
        raise ValueError(f"{count_of(len(bad), 'image')} of {source} have no class {where}")
    return classes, labels
