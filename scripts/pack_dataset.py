"""Packs millions of small image files into tar shards, which `--data_path` reads in place.

    python scripts/pack_dataset.py IMAGENET IMAGENET_TARS --workers 16
    python main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET_TARS

IMAGENET is a folder as `--data_path` takes it. Each of its train/ and val/ (or the folder itself) becomes
IMAGENET_TARS/<split>/shard-000000.tar and so on, with an index for random access. The shards are WebDataset shards:
<class>/<number>.jpg beside <class>/<number>.cls, which holds the label. Their first member, which WebDataset skips,
holds the names of the files and of the classes. Files are copied byte by byte, so training on the shards equals
training on the folder bit for bit. `--quality 90` encodes the images again, as JPEGs of the original size: about half
of the bytes and faster to decode, but with other pixels. `--shorter_side 384` makes larger images smaller before. Files
that cannot be decoded are copied.

If it is stopped, the same command continues with the missing shards. It also writes shards again that are missing or
were cut. Other data in IMAGENET_TARS is not overwritten. Training compares each image with its CRC-32 in the index.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.atomic import replaced_file
from util.data.folders import MissingSplit, SplitFiles, find_files
from util.data.images import FolderImages, ImageError, Reading
from util.data.pixel_format import RGB8
from util.data.tars import (
    CHECKSUM,
    INDEX,
    MANIFEST,
    Manifest,
    Rows,
    checksums,
    encoded_names,
    join_rows,
    open_tars,
    read_manifest,
    scan_tar,
    write_index,
)
from util.data.workers import ignore_in_worker
from util.flag import Flag
from util.host import available_cores
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.start.flags import INVALID_FLAGS
from util.text import count_of, printable

_worker: dict[str, FolderImages] = {}  # a worker's images: sent once to each worker, not with every shard


# ------------------------------------------------------------------------------------------------------------ shards


def plan_shards(images: FolderImages, args: argparse.Namespace) -> dict[str, Manifest]:
    """Returns {name: manifest} of all shards of a split."""
    stamps = file_stamps(images)
    shards: dict[str, Manifest] = {}
    for number, (first, end) in enumerate(shard_bounds(stamps[:, 0], args.shard_mb * 1_000_000)):
        files = stamps[first:end].tobytes() + images.labels[first:end].tobytes()
        shards[f"shard-{number:06d}.tar"] = {
            "quality": args.quality,
            "shorter_side": args.shorter_side,
            "classes": images.classes,
            "first": first,  # index of the first image
            "names": [os.fsdecode(name) for name in images.names[first:end].tolist()],
            "files": hashlib.sha256(files).hexdigest(),
        }
    return shards


def file_stamps(images: FolderImages) -> np.ndarray:
    """Returns size and time of change of each file, int64 [n, 2]. Threads: network disks answer many at once."""

    def stamp(i: int) -> tuple[int, int]:
        stat = os.stat(images.path(i))
        return stat.st_size, stat.st_mtime_ns

    with ThreadPoolExecutor(32) as pool:
        return np.array(list(pool.map(stamp, range(len(images)))), np.int64)


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


def pack_shard(path: Path, manifest: Manifest) -> tuple[dict[str, Any], Rows]:
    """Writes a shard, unless it is there and whole. Returns its entry in the index, and its rows."""
    images = _worker["images"]
    try:
        rows = scan_tar(path)
    except ValueError:  # missing or damaged
        write_shard(images, path, manifest)
        rows = scan_tar(path)
    end = manifest["first"] + len(manifest["names"])
    rows["label"] = images.labels[manifest["first"] : end]
    rows["name"] = encoded_names(manifest["names"])
    rows[CHECKSUM] = checksums(path, rows)
    return {"name": path.name, "size": path.stat().st_size}, rows


def write_shard(images: FolderImages, path: Path, manifest: Manifest) -> None:
    quality = manifest["quality"]
    with replaced_file(path, durable=True) as temporary, tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as tar:
        add_member(tar, MANIFEST, json.dumps(manifest).encode())
        for i, name in enumerate(manifest["names"], start=manifest["first"]):
            folder = os.path.dirname(name)
            key = os.path.join(folder, f"{i:09d}")  # unique up to the first dot, as WebDataset needs it
            data, extension = encoded(images, i, quality, manifest["shorter_side"])
            add_member(tar, key + extension, data)
            if images.classes:
                add_member(tar, f"{key}.cls", str(images.labels[i]).encode())


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def encoded(images: FolderImages, i: int, quality: int | None, shorter_side: int | None) -> tuple[bytes, str]:
    """Returns the bytes of a file, and its extension. With a quality, both are of a new JPEG, if one can be made of it.

    shorter_side: pixels that the shorter side of the new image has at most, or None.
    """
    if quality is not None:
        with suppress(ImageError, OSError):  # damaged, or a side above 65,535 px
            return encode_again(images, i, quality, shorter_side), ".jpg"
    extension = Path(images.path(i)).suffix.lower()
    if extension == ".jpeg":
        extension = ".jpg"  # with which WebDataset's to_tuple("jpg", "cls") reads all of ImageNet
    return images.read(i), extension


def encode_again(images: FolderImages, i: int, quality: int, shorter_side: int | None) -> bytes:
    """Returns a new JPEG of an image. ImageError or OSError if it cannot be decoded or encoded."""
    picture = Image.fromarray(images.load(i)[0])
    shorter = min(picture.size)
    if shorter_side is not None and shorter > shorter_side:
        width, height = (round(side * shorter_side / shorter) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------------ splits


def pack_split(images: FolderImages, folder: Path, args: argparse.Namespace) -> None:
    """Packs `images` into `folder`. Whole shards of the same files and settings are kept. The index comes last."""
    index = folder / INDEX
    shards = plan_shards(images, args)
    for leftover in folder.glob(".shard-*.tmp-*"):  # of a killed process
        leftover.unlink()
    present = sorted(folder.glob("*.tar"))
    for path in present:
        if path.name not in shards or read_manifest(path) != shards[path.name]:
            problem = f"{path.name}, which holds other files or settings, or is damaged"
            raise ValueError(f"{str(folder)!r} has {problem}: remove it, or choose another DESTINATION")
    if index.exists() and present:
        with suppress(ValueError):  # it is damaged, or shards are missing
            print(f"{folder}: {count_of(len(open_tars(present)), 'image')}, packed already")
            return
    index.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    tars: list[dict[str, Any]] = []
    parts: list[Rows] = []
    paths = [folder / name for name in shards]
    pool = ProcessPoolExecutor(
        args.workers, mp_context=get_context("fork"), initializer=start_worker, initargs=(images,)
    )
    try:
        results = pool.map(pack_shard, paths, shards.values())
        for tar, rows in tqdm(results, total=len(shards), unit="shard", desc=str(folder)):
            tars.append(tar)
            parts.append(rows)
    finally:
        pool.shutdown(cancel_futures=True)  # finishes the shards in progress, because workers ignore signals
    encoding = ""
    if args.quality is not None:
        encoding = f"-q{args.quality}"
    if args.shorter_side is not None:
        encoding += f"-s{args.shorter_side}"
    write_index(index, join_rows(parts), {"classes": images.classes, "tars": tars, "encoding": encoding})
    gigabytes = sum(tar["size"] for tar in tars) / 1e9
    packed_images = f"{count_of(len(images), 'image')}, {count_of(len(images.classes), 'class')}"
    print(f"{folder}: {packed_images}, {gigabytes:.2f} GB in {count_of(len(tars), 'shard')}")


def find_sources(source: str) -> dict[str, SplitFiles]:
    """Returns {folder in DESTINATION: what is packed there}: train and val, or "." for all of SOURCE."""
    found: dict[str, SplitFiles] = {}
    for split in ("train", "val"):
        with suppress(MissingSplit):
            found[split] = find_files(source, split, labelled=True)
    return found or {".": find_files(source)}


def open_source(files: SplitFiles, args: argparse.Namespace) -> FolderImages:
    """Returns the images to pack. ValueError if there are none, or if they cannot be packed with these flags."""
    if files.tars:
        raise ValueError(f"SOURCE {str(files.root)!r} holds tars: train on it as it is")
    images = FolderImages(files.root, notes=files.notes, reading=Reading.from_settings(vars(args)))
    images.check(max_bad_fraction=0.01)  # as in training
    if args.quality is not None and images.pixel_format != RGB8:
        problem = f"{str(files.root)!r} has {images.pixel_format}"
        raise ValueError(f"--quality makes JPEGs of RGB images, but {problem}: leave it out")
    for note in images.notes:
        print(printable(f"{images.root}: {note}"))
    return images


def run(args: argparse.Namespace) -> None:
    for split, files in find_sources(args.source).items():
        pack_split(open_source(files, args), args.destination / split, args)


FLAGS = (
    Flag("source", help="class folders, or train/ and val/ with class folders", positional=True, metavar="SOURCE"),
    Flag("destination", Path, help="folder of the shards", positional=True, metavar="DESTINATION"),
    Flag("shard_mb", int, 1000, "megabytes of files in a shard", at_least=1),
    Flag("quality", int, help="encode again as JPEG of this quality (default: keep the files' bytes)", at_least=1),
    Flag("shorter_side", int, help="with --quality: make images whose shorter side is larger smaller", at_least=1),
    Flag("in_chans", int, 3, "channels of the images", at_least=1),
    Flag("workers", int, available_cores(), "processes", at_least=1),
)


def get_args_parser() -> Parser:
    parser = Parser("pack_dataset.py", __doc__, *FLAGS)
    parser.add_flags("invalid pixels, as in training", *INVALID_FLAGS)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    if args.shorter_side is not None and args.quality is None:
        parser.error(f"--shorter_side {args.shorter_side} encodes images again: give --quality, too")
    with user_errors(parser):
        try:
            run(args)
        except ValueError as error:  # folders are those of --data_path elsewhere
            raise ValueError(str(error).replace("--data_path", "SOURCE")) from error


if __name__ == "__main__":
    run_program(main, "pack_dataset.py")
