"""Images of Hugging Face `datasets`: a data set on the Hub, a folder of Parquet or Arrow files, or a `save_to_disk`.

`datasets` is optional and imported when it is needed. It keeps the rows in Arrow files that are mapped into memory, so
all workers share them. The images are read as they are stored, encoded.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from util.data.folders import (
    DEFAULT_PATH,
    MissingSplit,
    choose_split,
    count_images,
    count_unread,
    is_hidden,
    note_stand_in,
    note_unread,
    split_of,
)
from util.data.images import EncodedImages, ImageError, read_file
from util.data.invalid_pixels import ALL_VALID, InvalidPixels
from util.text import count_of, shorten

T = TypeVar("T")
SAVED = ("dataset_dict.json", "state.json")  # files of `DatasetDict.save_to_disk` and of `Dataset.save_to_disk`
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@]+))?(@(?P<commit>[0-9a-f]{40}))?")
FORMS = (
    "expected is a folder of Parquet or Arrow files, a folder of save_to_disk, or the name of a data set on the Hub: "
    "OWNER/NAME or OWNER/NAME:CONFIG, and @COMMIT of 40 digits to pin it"
)


class HuggingFaceImages(EncodedImages):
    """The rows of one split. Without `labelled`, a data set needs no classes, and labels without a class are -1.

    dataset: a `datasets.Dataset`. image_column, label_column: names, or None to find the only candidate.
    pinned_path: `--data_path` with the commit that was read, or None. ValueError if there is no row, if a column is
    missing or ambiguous, or if the images are not `labelled` as asked.
    """

    def __init__(
        self,
        dataset: Any,
        root: str,
        labelled: bool = False,
        image_column: str | None = None,
        label_column: str | None = None,
        pinned_path: str | None = None,
        notes: Sequence[str] = (),
        in_chans: int = 3,
        use_pillow: bool = False,
        invalid: InvalidPixels = ALL_VALID,
    ) -> None:
        if not len(dataset):
            raise ValueError(f"{root} has no rows")
        self.pinned_path = pinned_path
        self.table = select_images(dataset, root, find_image_column(dataset, root, image_column))
        self._open_columns()
        self.sizes = encoded_sizes(self.encoded)
        names: list[bytes] = []
        for i, path in enumerate(self.paths.to_pylist()):
            names.append(row_name(i, path, in_a_file=self.sizes[i] < 0))
        classes, labels = read_labels(dataset, root, label_column, labelled)
        super().__init__(root, np.array(names), labels, classes, notes, in_chans, use_pillow, invalid)

    def _open_columns(self) -> None:
        """Sets the columns of the mapped table: bytes, null if an image is in a file of its own, and paths."""
        import pyarrow.compute as pc

        column = self.table.column(0)
        self.encoded = pc.struct_field(column, "bytes")
        self.paths = pc.struct_field(column, "path")

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process maps the files by itself: a pickled column would hold all images."""
        state = dict(vars(self))
        del state["encoded"]
        del state["paths"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_columns()

    def path(self, i: int) -> str:
        return f"row {i} of {self.root} ({self.paths[i].as_py() or 'no path'})"

    def read(self, i: int) -> bytes:
        data = self.encoded[i].as_py()
        if data is not None:
            return data
        path = self.paths[i].as_py()
        if path is not None:
            return read_file(path)
        raise ImageError(f"{self.path(i)!r} holds no image; replace or remove it")

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all names, labels and sizes in bytes: the same for one data set in all its formats."""
        return hashlib.sha256(super().fingerprint().encode() + self.sizes.astype("<i8").tobytes()).hexdigest()


def encoded_sizes(encoded: Any) -> np.ndarray:
    """Returns the number of bytes of each image, int64 [n]; -1 for null."""
    import pyarrow.compute as pc

    return pc.binary_length(encoded).fill_null(-1).to_numpy().astype(np.int64)


def row_name(i: int, path: str | None, in_a_file: bool) -> bytes:
    """Returns the name of row i for the fingerprint, without what may differ between two copies of a data set.

    `save_to_disk` drops the folders of the paths. Images that are `in_a_file` of their own may be moved.
    """
    if not path:
        return str(i).encode()
    num_parts = 2 if in_a_file else 1
    return "/".join(PurePath(path).parts[-num_parts:]).encode()


# ------------------------------------------------------------------------------------------------------------ splits


def open_hugging_face(
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    image_column: str | None = None,
    label_column: str | None = None,
    in_chans: int = 3,
    use_pillow: bool = False,
    invalid: InvalidPixels = ALL_VALID,
) -> HuggingFaceImages:
    """Returns the images of a split; downloads and converts the data if it is not in the cache of `datasets`.

    ValueError if the data is missing or ambiguous, OSError if the network or the disk fails.
    """
    splits, pinned_path = load_splits(str(data_path))
    root = pinned_path or str(data_path)
    name, notes = choose_rows(list(splits), split, labelled, root)
    if name:
        root = f"{root}, split {name}"
    images = HuggingFaceImages(
        splits[name], root, labelled, image_column, label_column, pinned_path, notes, in_chans, use_pillow, invalid
    )
    images.notes += note_other_files(Path(data_path), images)
    return images


def note_other_files(folder: Path, images: HuggingFaceImages) -> list[str]:
    """Returns a note on image files in a local data set that are not read. They may be rows of other splits.

    So files with the ending of a row are left out, if any row is in a file of its own.
    """
    rows_in_files = np.flatnonzero(images.sizes < 0).tolist()
    endings = {PurePath(images.paths[i].as_py() or "").suffix.lower() for i in rows_in_files}
    names: list[str] = []
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        names += [name for name in files if not is_hidden(name)]
    counts = count_images(names)
    if rows_in_files:
        counts = count_unread(names)
    for ending in {"", *endings}:
        del counts[ending]
    return note_unread(counts, f" in {str(folder)!r}")


def choose_rows(names: list[str], split: str, labelled: bool, source: str) -> tuple[str, list[str]]:
    """Returns (the name of the split to read if `split` is asked for, notes).

    A single split is read for images that need no labels, whatever its name is. MissingSplit if there is none,
    ValueError if there is more than one.
    """
    chosen = choose_split([split_of(name) for name in names], split, labelled)
    matching = [name for name in names if split_of(name) == chosen]
    if chosen is not None and len(matching) == 1:
        return matching[0], note_stand_in(f"the split {matching[0]}", chosen, split)
    if chosen is not None:
        raise ValueError(f"{source} has the splits {' and '.join(matching)} for {chosen}: keep one of them")
    if len(names) == 1 and not labelled:
        if not names[0]:
            return "", []
        return names[0], note_stand_in(f"the split {names[0]}", chosen, split)
    contents = f"the splits {shorten(names, 10)}, but no {split}"
    if names == [""]:
        contents = "no splits"
    raise MissingSplit(f"{source} has {contents}: save a DatasetDict with train and validation by save_to_disk")


def load_splits(data_path: str) -> tuple[dict[str, Any], str | None]:
    """Returns ({split: `datasets.Dataset`}, `data_path` with the commit that was read, or None for local data).

    The key of a data set that was saved without splits is "".
    """
    try:
        from datasets import Dataset, load_dataset_builder, load_from_disk
    except ImportError as error:
        raise ValueError(f"--dataset hf needs the package datasets ({error}): pip install datasets") from error
    if any((Path(data_path) / name).is_file() for name in SAVED):
        saved = run_datasets(lambda: load_from_disk(data_path), data_path)
        if isinstance(saved, Dataset):
            return {"": saved}, None
        return dict(saved), None
    name, config, commit = parse_path(data_path)
    builder = run_datasets(lambda: load_dataset_builder(name, config, revision=commit), data_path)
    if commit and commit != builder.hash:  # `datasets` reads its cache if it cannot read the Hub
        newest = f"The newest one in the cache of datasets is {builder.hash}"
        raise ValueError(f"--data_path {data_path!r}: this commit was not found. {newest}")
    run_datasets(builder.download_and_prepare, data_path)
    splits = dict(run_datasets(builder.as_dataset, data_path))
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
    if data_path == DEFAULT_PATH:
        raise ValueError(f"--dataset hf needs --data_path: {FORMS}")
    parts = HUB_NAME.fullmatch(data_path)
    if parts is None or Path(data_path).is_file():
        raise ValueError(f"--data_path {data_path!r} is neither a folder nor the name of a data set; {FORMS}")
    return parts["name"], parts["config"], parts["commit"]


def run_datasets(work: Callable[[], T], data_path: str) -> T:
    """Returns `work()`. Its errors become ValueErrors, except those of the network and the disk."""
    from datasets import config
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        return work()
    except ConnectionError as error:
        message = f"--data_path {data_path!r} is not a local folder, and the Hub cannot be reached"
        if config.HF_HUB_OFFLINE:
            raise ValueError(f"{message}, because HF_HUB_OFFLINE forbids it: give a folder") from error
        raise ConnectionError(f"{message}: {error}") from error
    except (DatasetsError, FileNotFoundError, LookupError, ValueError, TypeError, RuntimeError) as error:
        reason: BaseException = error
        if isinstance(error, DatasetGenerationError) and error.__cause__:
            reason = error.__cause__
        message = " ".join(f"{type(reason).__name__}: {reason}".split())
        raise ValueError(f"--data_path {data_path!r} cannot be read by datasets ({message}); {FORMS}") from error


# ----------------------------------------------------------------------------------------------------------- columns


def find_image_column(dataset: Any, source: str, given: str | None) -> str:
    """Returns the column of images: the `given` one, or the only one."""
    from datasets import Image

    if given is not None:
        return check_column(dataset, source, "--image_column", given)
    columns = [name for name, feature in dataset.features.items() if isinstance(feature, Image)]
    if len(columns) != 1:
        number = count_of(len(columns), "column")
        raise ValueError(f"{source} has {number} of images: give --image_column, one of {describe_columns(dataset)}")
    return columns[0]


def select_images(dataset: Any, source: str, column: str) -> Any:
    """Returns a table whose only column holds {bytes, path} of each image, not decoded."""
    import pyarrow as pa
    from datasets import Image

    try:
        return dataset.select_columns([column]).cast_column(column, Image(decode=False)).data
    except (TypeError, ValueError, pa.ArrowException) as error:
        kind = dataset.features[column]
        raise ValueError(f"--image_column {column!r} of {source} holds no encoded images, but {kind}") from error


def find_label_column(dataset: Any, source: str, given: str | None, labelled: bool) -> str | None:
    """Returns the column of classes: the `given` one, `label`, or the only `ClassLabel`; None if there is none."""
    from datasets import ClassLabel

    if given is not None:
        return check_column(dataset, source, "--label_column", given)
    if "label" in dataset.features:
        return "label"
    columns = [name for name, feature in dataset.features.items() if isinstance(feature, ClassLabel)]
    if len(columns) == 1:
        return columns[0]
    if labelled:
        number = count_of(len(columns), "column")
        raise ValueError(f"{source} has {number} of classes: give --label_column, one of {describe_columns(dataset)}")
    return None


def read_labels(dataset: Any, source: str, given: str | None, labelled: bool) -> tuple[list[str], np.ndarray]:
    """Returns (classes, labels int64 [n]); no classes and labels 0 if images that need none have none.

    The classes of integers and strings are their sorted values. ValueError if images that must be `labelled` are not.
    """
    from datasets import ClassLabel

    column = find_label_column(dataset, source, given, labelled)
    if column is None:
        return [], np.zeros(len(dataset), np.int64)
    feature = dataset.features[column]
    values = dataset.data.column(column)
    if isinstance(feature, ClassLabel):
        classes = list(feature.names)
        labels = values.fill_null(-1).to_numpy().astype(np.int64)
    elif is_label_type(values.type):
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


def is_label_type(kind: Any) -> bool:
    """Whether values of a type of Arrow may name classes."""
    from pyarrow import types

    if types.is_integer(kind) or types.is_boolean(kind):
        return True
    return types.is_string(kind) or types.is_large_string(kind)


def check_column(dataset: Any, source: str, flag: str, name: str) -> str:
    """Returns the name that a flag gives; ValueError if there is no such column."""
    if name not in dataset.features:
        raise ValueError(f"{flag} {name!r} is not in {source}; its columns are {describe_columns(dataset)}")
    return name


def describe_columns(dataset: Any) -> str:
    """Returns the names and types of the columns."""
    columns = []
    for name, kind in dataset.features.items():
        columns.append(f"{name} ({getattr(kind, 'dtype', type(kind).__name__)})")
    return shorten(columns, 20)
