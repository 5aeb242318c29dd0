"""Packs millions of small image files into tar shards, which `--data_path` reads in place.

    python scripts/pack_dataset.py IMAGENET IMAGENET_TARS --workers 16
    python scripts/pack_dataset.py --verify IMAGENET_TARS
    python main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET_TARS

IMAGENET is a folder as `--data_path` takes it. Each of its train/ and val/ (or the folder itself) becomes
IMAGENET_TARS/<split>/shard-000000.tar and so on, with an index for random access. The shards are WebDataset shards:
<class>/<number>.jpg beside <class>/<number>.cls, which holds the label. Their first member, which WebDataset skips,
holds the names of the files and of the classes. Files are copied byte by byte, so training on the shards equals
training on the folder bit for bit. `--quality 90` encodes the images again, as JPEGs of the original size: about half
of the bytes and faster to decode, but with other pixels.

If it is stopped, the same command continues with the missing shards. If the index or a shard is damaged, the same
command repairs it. Other data in IMAGENET_TARS is not overwritten. `--verify` compares each shard with its SHA-256 and,
if IMAGENET is given as well, the images' names, labels and classes.
"""

import argparse
import hashlib
import io
import json
import os
import shlex
import signal
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.atomic import replaced_file
from util.cores import available_cores
from util.data.decode import PILLOW_ERRORS
from util.data.folders import PACKING, MissingSplit, SplitFiles, find_files
from util.data.images import EncodedImages, FolderImages, ImageError, unreadable
from util.data.invalid_pixels import InvalidPixels
from util.data.pixel_format import RGB8
from util.data.tars import (
    INDEX,
    MANIFEST,
    LocalTars,
    Manifest,
    TarImages,
    TarScan,
    add_checksums,
    make_rows,
    packed_by,
    read_manifest,
    scan_tar,
    write_index,
)
from util.data.workers import ignore_in_worker
from util.run.cli import Parser, run_program, user_errors
from util.run.files.search import sha256
from util.run.start.flags import add_invalid_flags
from util.text import count_of

_worker: dict[str, FolderImages] = {}  # a worker's images: sent once to each worker, not with every shard


# ------------------------------------------------------------------------------------------------------------ shards


def plan_shards(images: FolderImages, args: argparse.Namespace) -> dict[str, Manifest]:
    """Returns {name: manifest} of all shards of a split."""
    sizes = file_sizes(images)
    bounds = shard_bounds(sizes, args.shard_mb * 1_000_000)
    command = packing_command(args)
    shards: dict[str, Manifest] = {}
    for number, (first, end) in enumerate(bounds):
        files = sizes[first:end].tobytes() + images.labels[first:end].tobytes()
        shards[f"shard-{number:06d}.tar"] = {
            "command": command,  # for messages; the paths may change
            "quality": args.quality,
            "shard_mb": args.shard_mb,
            "classes": images.classes,
            "num_shards": len(bounds),
            "shard": number,
            "first": first,  # index of the first image
            "names": [os.fsdecode(name) for name in images.names[first:end].tolist()],
            "files": hashlib.sha256(files).hexdigest(),
        }
    return shards


def packing_command(args: argparse.Namespace) -> str:
    words = ["python", "scripts/pack_dataset.py"]
    words += [str(Path(folder).resolve()) for folder in args.folders]
    words += ["--shard_mb", str(args.shard_mb)]
    if args.quality is not None:
        words += ["--quality", str(args.quality)]
    if args.in_chans != 3:
        words += ["--in_chans", str(args.in_chans)]
    if args.nodata is not None:
        words.append(f"--nodata={args.nodata}")
    if args.mask_band is not None:
        words += ["--mask_band", str(args.mask_band)]
    for channels in args.bands or ():
        words += ["--bands", *map(str, channels)]
    return shlex.join(words)


def file_sizes(images: FolderImages, chunk: int = 1000) -> np.ndarray:
    """Returns the bytes of each file, int64 [n]. Uses threads: a network disk answers many requests at once."""

    def sizes_from(first: int) -> list[int]:
        indices = range(first, min(first + chunk, len(images)))
        return [os.stat(images.path(i)).st_size for i in indices]

    sizes: list[int] = []
    with ThreadPoolExecutor(32) as pool:
        for part in pool.map(sizes_from, range(0, len(images), chunk)):
            sizes += part
    return np.array(sizes, np.int64)


def shard_bounds(sizes: np.ndarray, shard_bytes: int) -> list[tuple[int, int]]:
    """Returns [(first, end)]: runs of images with about `shard_bytes` of files."""
    begins = np.cumsum(sizes) - sizes
    numbers = begins // shard_bytes
    starts = np.flatnonzero(np.diff(numbers)) + 1
    bounds = [0, *starts.tolist(), len(sizes)]
    return list(pairwise(bounds))


def start_worker(images: FolderImages) -> None:
    """Keeps the images that this process packs."""
    _worker["images"] = images
    ignore_in_worker(None)


def pack_shard(path: Path, manifest: Manifest) -> tuple[dict[str, Any], TarScan]:
    """Writes a shard, unless it is there and whole. Returns its entry in the index, and where its images lie."""
    scan = None
    if is_shard(path, manifest):
        with suppress(ValueError):  # damaged
            scan = scan_tar(path)
    if scan is None:
        write_shard(_worker["images"], path, manifest)
        scan = scan_tar(path)
    add_checksums(scan, path)
    scan.names = manifest["names"]
    return {"name": path.name, "size": path.stat().st_size, "sha256": sha256(path)}, scan


def is_shard(path: Path, manifest: Manifest | None) -> bool:
    """Whether the file at `path` was written with this manifest, by whatever paths of the source and destination."""
    stored = read_manifest(path)
    if stored is None or manifest is None:
        return False
    return {**stored, "command": ""} == {**manifest, "command": ""}


def write_shard(images: FolderImages, path: Path, manifest: Manifest) -> None:
    quality = manifest["quality"]
    with replaced_file(path, durable=True) as temporary, tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as tar:
        add_member(tar, MANIFEST, json.dumps(manifest).encode())
        for i, name in enumerate(manifest["names"], start=manifest["first"]):
            folder = os.path.dirname(name)
            key = os.path.join(folder, f"{i:09d}")  # unique up to the first dot, as WebDataset needs it
            extension = Path(name).suffix.lower()
            # WebDataset's to_tuple("jpg", "cls") then reads all of ImageNet, also its PNG that is named .JPEG.
            if quality is not None or extension == ".jpeg":
                extension = ".jpg"
            add_member(tar, key + extension, encoded(images, i, quality))
            if images.classes:
                add_member(tar, f"{key}.cls", str(images.labels[i]).encode())


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def encoded(images: FolderImages, i: int, quality: int | None) -> bytes:
    """Returns the bytes of a file after a check of its header. With a quality: of a new JPEG of the same size."""
    if quality is None:
        data = images.read(i)
        try:
            images.header_of(io.BytesIO(data))
        except PILLOW_ERRORS as error:
            raise ImageError(unreadable(images.path(i), error)) from error
        return data
    picture = Image.fromarray(images.load(i)[0])
    buffer = io.BytesIO()
    try:
        picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    except OSError as error:  # for example a side above 65,535 px
        raise ImageError(f"{images.path(i)!r} cannot be encoded as JPEG: {error}; pack without --quality") from error
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------------ splits


def pack_split(images: FolderImages, folder: Path, args: argparse.Namespace) -> None:
    """Packs `images` into `folder`. Whole shards of the same files and settings are kept.

    Shards are written to a hidden folder. They are moved when all are whole and the index has been written.
    """
    staging = folder / PACKING
    index = folder / INDEX
    shards = plan_shards(images, args)
    refuse_other_data(folder, shards)
    if index.exists():
        try:
            done = TarImages(index, LocalTars(folder))
            print(f"{folder}: {count_of(len(done), 'image')} in {count_of(len(done.tars), 'shard')}, packed already")
            return
        except ValueError:
            print(f"{folder}: the index or a shard is damaged; packing again")
    staging.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("shard-*.tar"):
        os.replace(path, staging / path.name)
    index.unlink(missing_ok=True)
    for path in staging.iterdir():  # of a killed process, or of other files
        if not is_shard(path, shards.get(path.name)):
            path.unlink()
    tars: list[dict[str, Any]] = []
    scans: list[TarScan] = []
    paths = [staging / name for name in shards]
    pool = ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=(images,))
    try:
        results = pool.map(pack_shard, paths, shards.values())
        for tar, scan in tqdm(results, total=len(shards), unit="shard", desc=str(folder)):
            tars.append(tar)
            scans.append(scan)
    finally:
        pool.shutdown(cancel_futures=True)  # finishes the shards in progress, because workers ignore signals
    packed = {"command": packing_command(args), "quality": args.quality}
    content = {"classes": images.classes, "notes": [], "packed": packed, "tars": tars}
    write_index(index, make_rows(scans), content)
    for path in paths:
        os.replace(path, folder / path.name)
    staging.rmdir()
    gigabytes = sum(tar["size"] for tar in tars) / 1e9
    packed_images = f"{count_of(len(images), 'image')}, {count_of(len(images.classes), 'class')}"
    print(f"{folder}: {packed_images}, {gigabytes:.2f} GB in {count_of(len(tars), 'shard')}")


def refuse_other_data(folder: Path, shards: dict[str, Manifest]) -> None:
    """ValueError if `folder` holds tars that are not these shards.

    A damaged shard is accepted if there is an index, because it will be written again.
    """
    for path in sorted(folder.glob("*.tar")):
        if is_shard(path, shards.get(path.name)):
            continue
        manifest = read_manifest(path)
        if manifest is not None:
            problem = f"shards of other files or settings. {packed_by(manifest)}"
        elif path.name in shards and (folder / INDEX).exists():
            continue
        else:
            problem = f"{path.name}, which is not a shard of pack_dataset.py"
        raise ValueError(f"{str(folder)!r} holds {problem}. Choose another DESTINATION, or remove this one")


def verify_split(images: FolderImages | None, folder: Path, num_workers: int) -> None:
    """ValueError if a shard is damaged, or if the names, labels or classes differ from those of the source."""
    ours = TarImages(folder / INDEX, LocalTars(folder))
    if images is not None:
        same_names = EncodedImages.fingerprint(ours) == images.fingerprint()
        if not same_names or ours.classes != images.classes:
            raise ValueError(f"{folder}: the names, labels or classes of the images are not those of the source")
    damaged: list[str] = []
    with ProcessPoolExecutor(num_workers) as pool:
        paths = [folder / name for name in ours.tars]
        digests = tqdm(pool.map(sha256, paths), total=len(paths), unit="shard", desc=f"verify {folder}")
        for path, tar, digest in zip(paths, ours.content["tars"], digests, strict=True):
            if tar["sha256"] != digest:
                damaged.append(str(path))
    if damaged:
        advice = "remove them and pack again"
        raise ValueError(f"damaged: {shlex.join(damaged)}: {advice}. {packed_by(ours.packed)}")
    print(f"{folder}: {count_of(len(ours), 'image')} of {count_of(len(ours.classes), 'class')} are what was packed")


def find_sources(source: str) -> dict[str, SplitFiles]:
    """Returns {folder in DESTINATION: what is packed there}: train and val, or "." for all of SOURCE."""
    with source_errors():
        found: dict[str, SplitFiles] = {}
        for split in ("train", "val"):
            with suppress(MissingSplit):
                found[split] = find_files(source, split, labelled=True)
        return found or {".": find_files(source)}


def find_packed(destination: str) -> list[str]:
    """Returns the packed splits in DESTINATION; "." for DESTINATION itself."""
    packed = [split for split in ("train", "val") if (Path(destination) / split / INDEX).exists()]
    return packed or ["."]


def open_source(files: SplitFiles, folder: Path, args: argparse.Namespace) -> FolderImages:
    """Returns the images to pack into `folder`; ValueError if there are none, or if they cannot be packed there."""
    if files.tars:
        raise ValueError(f"SOURCE {str(files.root)!r} holds tars, which need no packing: train on it as it is")
    with source_errors():
        invalid = InvalidPixels.from_settings(vars(args))
        invalid.check(args.in_chans)
        images = FolderImages(files.root, notes=files.notes, in_chans=args.in_chans, invalid=invalid)
    if folder.resolve().is_relative_to(files.root.resolve()):
        problem = f"shards in {str(folder)!r} would lie among the images of {str(files.root)!r}"
        raise ValueError(f"{problem}: choose another DESTINATION")
    images.check()
    if args.quality is not None and images.pixel_format != RGB8:
        problem = f"{str(files.root)!r} has {images.pixel_format}"
        raise ValueError(f"--quality makes JPEGs of RGB images, but {problem}: leave it out")
    for note in images.notes:
        print(f"{images.root}: {note}")
    return images


@contextmanager
def source_errors() -> Iterator[None]:
    """Names SOURCE, not --data_path, in errors about folders."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("--data_path", "SOURCE")) from error


def run(args: argparse.Namespace) -> None:
    destination = Path(args.folders[-1])
    if len(args.folders) == 1:
        for split in find_packed(args.folders[0]):
            verify_split(None, destination / split, args.workers)
        return
    sources = find_sources(args.folders[0])
    with suppress(ValueError):
        test = find_files(args.folders[0], "test", labelled=True)
        if test.root not in [files.root for files in sources.values()]:
            print(f"note: {test.root} is not packed: --eval_split test needs {args.folders[0]}")
    for split, files in sources.items():
        images = open_source(files, destination / split, args)
        if args.verify:
            verify_split(images, destination / split, args.workers)
        else:
            pack_split(images, destination / split, args)


def get_args_parser() -> Parser:
    parser = Parser("pack_dataset.py", description=__doc__)
    folders = "SOURCE (class folders, or train/ and val/ with class folders) and DESTINATION"
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help=folders)
    parser.add_argument("--shard_mb", type=int, default=1000, at_least=1, help="megabytes of files in a shard")
    parser.add_argument(
        "--quality", type=int, at_least=1, help="encode again as JPEG of this quality (default: keep the files' bytes)"
    )
    parser.add_argument("--in_chans", type=int, default=3, at_least=1, help="channels of the images")
    add_invalid_flags(parser.add_argument_group("invalid pixels, as in training"))
    parser.add_argument("--workers", type=int, default=available_cores(), at_least=1, help="processes")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compare DESTINATION with its hashes and, if given, with SOURCE",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    num_folders = len(args.folders)
    if num_folders > 2 or (num_folders < 2 and not args.verify):
        parser.error(f"give SOURCE and DESTINATION, or with --verify DESTINATION alone, got {', '.join(args.folders)}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that workers end, too
    try:
        with user_errors(parser):
            run(args)
    except KeyboardInterrupt:
        print("pack_dataset.py: stopped; the same command continues", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    run_program(main, "pack_dataset.py")
