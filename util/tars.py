"""An index over tars of images, made once: WebDataset shards, a tar a class, or ImageNet's tar of tars.

Nothing is extracted: headers are walked, and images are later read where they lie (`util.packed`). A label is, in this
order: the number in the `.cls` beside the image, the folder that it lies in, the name of the inner tar, or of the tar where
that is a WordNet id. Members that are links, devices or lead out of the tar are left out, and counted.
"""

import hashlib
import os
import re
import tarfile
from pathlib import Path, PurePosixPath

from torchvision.datasets.folder import IMG_EXTENSIONS

from util import packed


def find_tars(data_path, split, labelled=False):
    """The tars of a split, sorted: those in ROOT/<split>/, or those in ROOT whose names say train or val.

    Where no name does, or `data_path` is a tar itself, every split is all of them; not so with `labelled`, which must not
    evaluate on what was trained on.
    """
    path = Path(data_path)
    if (path / split).is_dir():
        return sorted((path / split).glob("*.tar"))
    tars = [path] if path.is_file() and path.suffix == ".tar" else sorted(path.glob("*.tar"))
    if labelled or any(name in tar.name for tar in tars for name in ("train", "val")):
        return [tar for tar in tars if split in tar.name]
    return tars


def open_tars(tars, labelled=False):
    """The images of these tars (`packed.PackedImages`), whose index is made if it is not there or out of date.

    It lies beside the tars, or where nothing can be written there in the user's cache; ValueError if nowhere.
    """
    root = tars[0].parent
    stamp = [[tar.name, tar.stat().st_size, tar.stat().st_mtime_ns] for tar in tars]
    name = "index-" + _digest([tar.name for tar in tars])
    folders = [root / ".prmim" / name, _cache() / _digest(str(root.resolve())) / name]
    for folder in folders:
        if (folder / packed.INDEX).is_file() and packed.read_index(folder)[0].get("stamp") == stamp:
            return packed.PackedImages(folder, root, labelled)
    print(f"indexing {len(tars)} tars in {root}, once", flush=True)
    rows, classes, skipped = index_tars(tars)
    if skipped:
        print(f"{skipped} members that are links, devices or lead out of their tars are left out", flush=True)
    shards, problems = [{"name": tar.name, "size": tar.stat().st_size} for tar in tars], []
    for folder in folders:
        try:
            packed.write_index(folder, packed.records(rows), shards, classes, stamp=stamp, skipped_members=skipped)
            return packed.PackedImages(folder, root, labelled)
        except OSError as error:
            problems.append(str(error))
    raise ValueError(f"the index of {str(root)!r} cannot be written: {'; '.join(problems)}")


def _digest(content):
    return hashlib.sha256(str(content).encode()).hexdigest()[:12]


def index_tars(tars):
    """-> (rows for `packed.records`, classes, number of members left out); ValueError names a tar that cannot be read."""
    found, skipped = [], 0
    for shard, path in enumerate(tars):
        try:
            with open(path, "rb") as file:
                images, left_out = _walk(file, _class_of(path.stem))
        except (tarfile.TarError, OSError) as error:
            raise ValueError(
                f"{str(path)!r} cannot be read as a tar: {error}. Fetch it again; compressed tars must be unpacked"
            ) from error
        found += [(shard, *image) for image in images]
        skipped += left_out
    if not found:
        raise ValueError(f"the tars in {str(tars[0].parent)!r} hold no image; extensions {', '.join(IMG_EXTENSIONS)}")
    labels = {label for _, label, *_ in found}
    if len({type(label) for label in labels}) > 1:
        kinds = {type(label): (shard, name) for shard, label, _, _, name in found}
        examples = ", ".join(f"{name.decode(errors='replace')!r} in {tars[shard].name}" for shard, name in kinds.values())
        raise ValueError(f"the images are not labelled alike (a .cls each, a folder each, or none): {examples}")
    numbers = all(isinstance(label, int) for label in labels)
    names = list(range(max(labels) + 1)) if numbers else sorted(label for label in labels if label is not None)
    rank = {label: k for k, label in enumerate(names)} | {None: 0}
    return [(shard, rank[label], *place, 0, name) for shard, label, *place, name in found], [str(n) for n in names], skipped


def _walk(file, label, base=0):
    """-> ([(label, offset, size, name)] of the images in the tar that begins at byte `base`, number of members left out).

    label: of images that have neither a number nor a folder.
    """
    images, numbers, inner, skipped = [], {}, [], 0
    file.seek(base)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if member.isdir() or name.name.startswith("._"):  # macOS leaves these
                continue
            if not member.isreg() or name.is_absolute() or ".." in name.parts:
                skipped += 1
            elif name.suffix == ".tar":
                more, left_out = _walk(file, _class_of(name.stem) or name.stem, member.offset_data)
                inner, skipped = inner + more, skipped + left_out
            elif name.suffix == ".cls":
                text = os.pread(file.fileno(), member.size, member.offset_data).strip()
                if not text.isdigit():
                    raise tarfile.TarError(f"{member.name!r} holds {text[:20]!r}, which is not the number of a class")
                numbers[_key(name)] = int(text)
            elif name.suffix.lower() in IMG_EXTENSIONS:
                images.append((name, member.offset_data, member.size))
        # tarfile takes a file that was cut short for one that ends there.
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != tarfile.NUL * tarfile.BLOCKSIZE:
            raise tarfile.TarError("it has no end mark: it was cut short")
    own = [(numbers.get(_key(n), n.parent.name or label), *place, os.fsencode(str(n))) for n, *place in images]
    return own + inner, skipped


def _key(name):
    """What the files of one WebDataset sample have in common: the path up to the first dot of its last part."""
    return name.with_name(name.name.split(".")[0])


def _class_of(stem):
    """A tar's own name where that is a class: a WordNet id, as in ImageNet's tars."""
    return stem if re.fullmatch(r"n\d{8}", stem) else None


def _cache():
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prmim"
