"""An index over tars of images, made once: WebDataset shards, a tar a class, or ImageNet's tar of tars.

Nothing is extracted: headers are walked, and images are later read where they lie (`util.packed`). A label is, in this
order: the number in the `.cls` beside the image; the name of the inner tar, or of the tar where that is a WordNet id; the
first folder below what all images' folders have in common. Where all lie below train or val, only the split's count.
Members that are links, devices or sparse, or lead out of the tar, are left out, and counted.
"""

import hashlib
import os
import re
import tarfile
from pathlib import Path, PurePosixPath

from torchvision.datasets.folder import IMG_EXTENSIONS

from util import packed

_SPLITS = {"train": r"(?<![a-z])train(ing)?(?![a-z])", "val": r"(?<![a-z])val(id|idation)?(?![a-z])"}
_MOST_CLASSES = 1_000_000


def find_tars(data_path, split, labelled=False):
    """The tars of a split, sorted: those in ROOT/<split>/, or those in ROOT whose names say train or val.

    Class folders and image files come before tars, unless a tar's name says the split. Where no name does, or `data_path` is
    a tar itself, every split is all of them; not so with `labelled`, which must not evaluate on what was trained on.
    """
    path = Path(data_path)
    if (path / split).is_dir():
        path = path / split
        return [] if _holds_images(path) else _tars_in(path)
    tars = [path] if path.is_file() and path.suffix == ".tar" else _tars_in(path)
    ours, named = [tar for tar in tars if _says(tar.name, split)], any(_says(tar.name, name) for tar in tars for name in _SPLITS)
    if ours or labelled or named:
        return ours
    return [] if path.is_dir() and _holds_images(path) else tars


def _says(name, split):
    return re.search(_SPLITS.get(split, re.escape(split)), name.lower()) is not None


def _tars_in(folder):
    return sorted(path for path in folder.glob("*.tar") if path.is_file() and not path.name.startswith("."))


def _holds_images(folder):
    """Whether there are class folders or images in it."""
    entries = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
    return any(entry.is_dir() or entry.name.lower().endswith(IMG_EXTENSIONS) for entry in entries)


def open_tars(tars, split="train", labelled=False):
    """The images of these tars (`packed.PackedImages`), whose index is made if it is not there, damaged or out of date.

    It lies beside the tars, or where nothing can be written there in the user's cache; ValueError if nowhere.
    """
    root = tars[0].parent
    stamp = [[tar.name, tar.stat().st_size, tar.stat().st_mtime_ns] for tar in tars]
    name = "index-" + _digest([split, *(tar.name for tar in tars)])
    folders = [root / ".prmim" / name, _cache() / _digest(root.resolve()) / name]
    for folder in folders:
        try:
            if packed.read_index(folder)[0].get("stamp") == stamp:
                return packed.PackedImages(folder, root, labelled)
        except ValueError:  # there is none, or none that can be used
            continue
    print(f"indexing {len(tars)} tars in {root}, once", flush=True)
    rows, classes, skipped = index_tars(tars, split)
    if skipped:
        print(f"{skipped} members that are links, devices or sparse, or lead out of their tars, are left out", flush=True)
    shards, problems = [{"name": tar.name, "size": tar.stat().st_size} for tar in tars], []
    for folder in folders:
        try:
            packed.write_index(folder, packed.records(rows), shards, classes, stamp=stamp, skipped_members=skipped)
        except OSError as error:
            problems.append(str(error))
        else:
            return packed.PackedImages(folder, root, labelled)
    raise ValueError(f"the index of {str(root)!r} cannot be written: {'; '.join(problems)}")


def _digest(content):
    return hashlib.sha256(str(content).encode()).hexdigest()[:12]


def _cache():
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prmim"


def index_tars(tars, split="train"):
    """-> (rows for `packed.records`, classes, number of members left out); ValueError names a tar that cannot be read."""
    found, skipped = [], 0
    for shard, path in enumerate(tars):
        try:
            with open(path, "rb") as file:
                images, left_out = _walk(file, 0, path.stat().st_size, path.stem if _is_wordnet_id(path.stem) else None)
        except (tarfile.TarError, OSError, ValueError) as error:
            what = f"{str(path)!r} cannot be read as a tar: {error}"
            raise ValueError(f"{what}. Fetch it again, if it is damaged; a compressed one must be unpacked") from error
        found += [(shard, *image) for image in images]
        skipped += left_out
    found = _of_split(found, split)
    if not found:
        raise ValueError(f"the tars in {str(tars[0].parent)!r} hold no image of {split}; extensions {', '.join(IMG_EXTENSIONS)}")
    labels = _folder_labels(found)
    if len({type(label) for label in labels}) > 1:
        kinds = {type(label): (shard, name) for label, (shard, _, _, _, name) in zip(labels, found, strict=True)}
        examples = ", ".join(f"{str(name)!r} in {tars[shard].name}" for shard, name in kinds.values())
        raise ValueError(f"the images are not labelled alike (a .cls each, a folder or tar each, or none): {examples}")
    if isinstance(labels[0], int):
        names = range(max(labels) + 1)
    else:
        names = sorted({label for label in labels if label is not None})
    rank = {label: k for k, label in enumerate(names)} | {None: 0}
    rows = [
        (shard, rank[label], offset, size, 0, os.fsencode(str(name)))
        for label, (shard, _, offset, size, name) in zip(labels, found, strict=True)
    ]
    return rows, [str(name) for name in names], skipped


def _of_split(found, split):
    """The images below a folder called like the split, where all lie below a train or val; all otherwise: train is a class, too."""
    if all(any(part in _SPLITS for part in name.parent.parts) for *_, name in found):
        return [image for image in found if split in image[-1].parent.parts]
    return found


def _folder_labels(found):
    """Labels of the images, by their folders where they have no other: the first below what the folders have in common."""
    bare = [name.parent.parts for _, label, _, _, name in found if label is None]
    common = 0
    while len({parts[: common + 1] for parts in bare}) == 1 and len(bare[0]) > common:
        common += 1
    if bare and len(set(bare)) == 1:  # all in one folder, which then is the class
        common = max(0, common - 1)
    return [label if label is not None else next(iter(name.parent.parts[common:]), None) for _, label, _, _, name in found]


def _walk(file, base, end, label, inner=False):
    """-> ([(label or None, offset, size, path)] of the images in the tar from byte `base` to `end`, members left out).

    label: of images that have no number.
    """
    images, numbers, nested, skipped, position = [], {}, [], 0, base - 1
    if end <= base:
        raise tarfile.TarError("it is empty")
    file.seek(base)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # or each of a million headers would stay
            if member.size < 0 or member.offset <= position or member.offset_data + member.size > end:
                raise tarfile.TarError(f"{member.name!r} does not lie inside it")
            name, position = PurePosixPath(member.name), member.offset
            if member.isdir() or name.name.startswith("._"):  # macOS leaves these
                continue
            if not member.isreg() or member.issparse() or name.is_absolute() or ".." in name.parts:
                skipped += 1
            elif name.suffix == ".tar" and not inner:
                more, left_out = _walk(file, member.offset_data, member.offset_data + member.size, name.stem, inner=True)
                nested, skipped = nested + more, skipped + left_out
            elif name.suffix == ".cls":
                numbers[_key(name)] = _number(file, member)
            elif name.suffix.lower() in IMG_EXTENSIONS:
                images.append((name, member.offset_data, member.size))
        # tarfile takes a file that was cut short for one that ends there, and stops where a second one was appended.
        tail = os.pread(file.fileno(), min(end - tar.offset, 1 << 16), tar.offset)
        if len(tail) < tarfile.BLOCKSIZE or tail.strip(tarfile.NUL):
            raise tarfile.TarError("it has no end mark, or more behind it: it was cut short, or put together from several")
    if numbers:  # of a WebDataset sample, `x.jpg` is the image, and `x.mask.png` something else
        images = [image for image in images if image[0].name.count(".") == 1]
    return [(numbers.get(_key(name), label), *place, name) for name, *place in images] + nested, skipped


def _number(file, member):
    """The number of a class that a `.cls` holds."""
    text = os.pread(file.fileno(), min(member.size, 20), member.offset_data).strip()
    if not text.isdigit() or member.size > 20 or int(text) >= _MOST_CLASSES:
        raise tarfile.TarError(f"{member.name!r} holds {text!r}, which is not the number of a class")
    return int(text)


def _key(name):
    """What the files of one WebDataset sample have in common: the path up to the first dot of its last part."""
    return name.with_name(name.name.split(".")[0])


def _is_wordnet_id(stem):
    return re.fullmatch(r"n\d{8}", stem) is not None
