"""Images of Hugging Face `datasets`: a data set on the Hub, a folder of Parquet or Arrow files, or a `save_to_disk`.

`datasets` is optional and imported when it is needed. It keeps the rows in Arrow files that are mapped into memory, so
all workers share them. The images are read as they are stored, encoded.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from util.data.folders import DEFAULT_PATH
from util.data.images import EncodedImages, ImageError, read_file
from util.data.splits import choose_split, group_by_split, only_name, stand_in_notes
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
    ) -> None:
        self.root, self.notes, self.pinned_path = root, list[str](), pinned_path
        self.splits: list[str] = []  # names of all splits of the data set
        if not len(dataset):
            raise ValueError(f"{root} has no rows")
        self.classes, self.labels = read_labels(dataset, root, label_column, labelled)
        column = find_image_column(dataset, root, image_column)
        self.table = select_images(dataset, root, column)
        self._open_columns()
        self.sizes = _sizes(self.encoded)
        paths = self.paths.to_pylist()
        self.names = np.array([_identity(i, path, self.sizes[i] < 0) for i, path in enumerate(paths)])

    def _open_columns(self) -> None:
        """Sets the columns of the mapped table: bytes, null if an image is in a file of its own, and paths."""
        import pyarrow.compute as pc

        column = self.table.column(0)
        self.encoded, self.paths = (pc.struct_field(column, name) for name in ("bytes", "path"))

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process maps the files by itself: a pickled column would hold all images."""
        return {name: value for name, value in vars(self).items() if name not in ("encoded", "paths")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_columns()

    def path(self, i: int) -> str:
        return f"row {i} of {self.root} ({self.paths[i].as_py() or 'no path'})"

    def read(self, i: int) -> bytes:
        if (data := self.encoded[i].as_py()) is not None:
            return data
        if (path := self.paths[i].as_py()) is not None:
            return read_file(path)
        raise ImageError(f"{self.path(i)!r} holds no image; replace or remove it")

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all names, labels and sizes in bytes: the same for one data set in all its formats."""
        return hashlib.sha256(super().fingerprint().encode() + self.sizes.astype("<i8").tobytes()).hexdigest()


def _sizes(encoded: Any) -> np.ndarray:
    """Returns the number of bytes of each image, int64 [n]; -1 for null."""
    import pyarrow.compute as pc

    return pc.binary_length(encoded).fill_null(-1).to_numpy().astype(np.int64)


def _identity(i: int, path: str | None, in_a_file: bool) -> bytes:
    """Returns the name of row i for the fingerprint, without what may differ between two copies of a data set.

    `save_to_disk` drops the folders of the paths. Images that are `in_a_file` of their own may be moved.
    """
    return "/".join(PurePath(path).parts[-2 if in_a_file else -1 :]).encode() if path else str(i).encode()


def open_hugging_face(
    data_path: str | Path,
    split: str = "train",
    labelled: bool = False,
    image_column: str | None = None,
    label_column: str | None = None,
) -> HuggingFaceImages:
    """Returns the images of a split; downloads and converts the data if it is not in the cache of `datasets`.

    ValueError if the data is missing or ambiguous, OSError if the network or the disk fails.
    """
    splits, pinned_path = load_splits(str(data_path))
    what = pinned_path or str(data_path)
    name, notes = choose_part(list(splits), split, labelled, what)
    root = f"{what}, split {name}" if name else what
    images = HuggingFaceImages(splits[name], root, labelled, image_column, label_column, pinned_path)
    images.notes += notes
    images.splits = list(splits)
    return images


def load_splits(data_path: str) -> tuple[dict[str, Any], str | None]:
    """Returns ({split: `datasets.Dataset`}, `data_path` with the commit that was read, or None for local data).

    The key of a data set that was saved without splits is "".
    """
    try:
        from datasets import Dataset, load_dataset_builder, load_from_disk
    except ImportError as error:
        raise ValueError(f"--dataset hf needs the package datasets ({error}): pip install datasets") from error
    where = f"--data_path {data_path!r}"
    if any((Path(data_path) / name).is_file() for name in SAVED):
        saved = run_datasets(lambda: load_from_disk(data_path), where)
        return ({"": saved} if isinstance(saved, Dataset) else dict(saved)), None
    name, config, commit = parse_path(data_path)
    builder = run_datasets(lambda: load_dataset_builder(name, config, revision=commit), where)
    if commit and commit != builder.hash:  # `datasets` reads its cache if it cannot read the Hub
        raise ValueError(
            f"{where}: this commit was not found. The newest one in the cache of datasets is {builder.hash}"
        )
    run_datasets(builder.download_and_prepare, where)
    splits = dict(run_datasets(builder.as_dataset, where))
    return splits, None if Path(name).is_dir() else f"{name}{f':{config}' if config else ''}@{builder.hash}"


def parse_path(data_path: str) -> tuple[str, str | None, str | None]:
    """Returns (folder or name, config or None, commit or None)."""
    folder, _, config = data_path.rpartition(":")
    if Path(data_path).is_dir():
        return data_path, None, None
    if folder and Path(folder).is_dir():
        return folder, config, None
    if data_path == DEFAULT_PATH:
        raise ValueError(f"--dataset hf needs --data_path: {FORMS}")
    found = HUB_NAME.fullmatch(data_path)
    if found is None or Path(data_path).is_file():
        raise ValueError(f"--data_path {data_path!r} is neither a folder nor the name of a data set; {FORMS}")
    return found["name"], found["config"], found["commit"]


def run_datasets(work: Callable[[], T], where: str) -> T:
    """Returns `work()`. Its errors become ValueErrors, except those of the network and the disk."""
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        return work()
    except ConnectionError as error:
        if is_offline():
            why = "HF_HUB_OFFLINE forbids a download: give a folder, or start once without it on a machine online"
            raise ValueError(f"{where} is neither a local folder nor in the cache of datasets, and {why}") from error
        raise ConnectionError(f"{where} is not a local folder, and the Hub cannot be reached: {error}") from error
    except (DatasetsError, FileNotFoundError, LookupError, ValueError, TypeError, RuntimeError) as error:
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        message = " ".join(f"{type(reason).__name__}: {reason}".split())
        raise ValueError(f"{where} cannot be read by datasets ({message}); {FORMS}") from error


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE, or the older HF_DATASETS_OFFLINE, forbids `datasets` to use the network."""
    from datasets import config

    return bool(config.HF_HUB_OFFLINE)


def choose_part(names: list[str], split: str, labelled: bool, what: str) -> tuple[str, list[str]]:
    """Returns (the split to read if `split` is asked for, notes). ValueError if there is none, or more than one.

    A single split is read for images that need no labels, whatever its name is.
    """
    found = group_by_split(names)
    chosen = choose_split(found, split, fall_back=not labelled)
    if chosen is not None:
        name = only_name(found[chosen], chosen, what, "split")
        return name, stand_in_notes(f"the split {name}", chosen, split)
    if len(names) == 1 and not labelled:
        return names[0], stand_in_notes(f"the split {names[0]}", names[0] or split, split)
    listed = f"has the splits {shorten(names, 10)}, but no {split}" if names != [""] else "has no splits"
    advice = "save a DatasetDict with train and validation" if labelled else "save one split alone"
    raise ValueError(f"{what} {listed}: {advice} by save_to_disk, and give its folder as --data_path")


def find_image_column(dataset: Any, what: str, given: str | None) -> str:
    """Returns the column of images: the `given` one, or the only one."""
    from datasets import Image

    found = [name for name, feature in dataset.features.items() if isinstance(feature, Image)]
    if given is not None:
        _check_column(dataset, what, "--image_column", given)
        return given
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{what} has {len(found)} columns of images: choose one by --image_column {'|'.join(found)}")
    columns = _describe(dataset.features)
    raise ValueError(f"{what} has no column of images, but {columns}: name one of encoded images by --image_column")


def select_images(dataset: Any, what: str, column: str) -> Any:
    """Returns a table whose only column holds {bytes, path} of each image, not decoded."""
    import pyarrow as pa
    from datasets import Image

    try:
        return dataset.select_columns([column]).cast_column(column, Image(decode=False)).data
    except (TypeError, ValueError, pa.ArrowException) as error:
        kind = dataset.features[column]
        raise ValueError(f"--image_column {column!r} of {what} holds no encoded images, but {kind}") from error


def find_label_column(dataset: Any, what: str, given: str | None, labelled: bool) -> str | None:
    """Returns the column of classes: the `given` one, `label`, or the only `ClassLabel`; None if there is none."""
    from datasets import ClassLabel

    if given is not None:
        _check_column(dataset, what, "--label_column", given)
        return given
    found = [name for name, feature in dataset.features.items() if isinstance(feature, ClassLabel)]
    if "label" in dataset.features:
        return "label"
    if len(found) == 1:
        return found[0]
    if labelled:
        kind = f"{len(found)} columns of classes ({', '.join(found)})" if found else "no column of classes"
        listed = "" if found else f"; its columns are {_describe(dataset.features)}"
        raise ValueError(f"{what} has {kind}{listed}: name the one to read by --label_column")
    return None


def read_labels(dataset: Any, what: str, given: str | None, labelled: bool) -> tuple[list[str], np.ndarray]:
    """Returns (classes, labels int64 [n]); no classes and labels 0 if images that need none have none.

    The classes of integers and strings are their sorted values. ValueError if images that must be `labelled` are not.
    """
    import pyarrow as pa
    from datasets import ClassLabel

    column = find_label_column(dataset, what, given, labelled)
    feature = dataset.features[column] if column else None
    values = dataset.data.column(column) if column else pa.nulls(0)
    types = pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string
    if isinstance(feature, ClassLabel):
        classes = list(feature.names)
        labels = values.fill_null(-1).to_numpy().astype(np.int64)
    elif any(is_type(values.type) for is_type in types):
        listed = values.to_pylist()
        distinct = sorted({*listed} - {None})
        label_of = {value: label for label, value in enumerate(distinct)}
        classes, labels = [str(v) for v in distinct], np.array([label_of.get(v, -1) for v in listed], np.int64)
    elif labelled or given:
        raise ValueError(f"column {column!r} of {what} holds {feature}; labels are integers or strings")
    else:
        return [], np.zeros(len(dataset), np.int64)
    bad = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if labelled and len(bad):
        where = f"in column {column!r}, the first in row {bad[0]}"
        raise ValueError(f"{count_of(len(bad), 'image')} of {what} have no class {where}")
    return classes, labels


def _check_column(dataset: Any, what: str, flag: str, name: str) -> None:
    if name not in dataset.features:
        raise ValueError(f"{flag} {name!r} is not in {what}; its columns are {_describe(dataset.features)}")


def _describe(features: Mapping[str, Any]) -> str:
    """Returns the names and types of the columns."""
    return shorten([f"{name} ({getattr(kind, 'dtype', type(kind).__name__)})" for name, kind in features.items()], 20)
