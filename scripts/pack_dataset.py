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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.atomic import replaced_file
from util.data.datasets import available_cores
from util.data.decode import PILLOW_ERRORS
from util.data.folders import PACKING, find_split, list_folder
from util.data.images import EncodedImages, FolderImages, ImageError
from util.data.pixel_format import RGB8, read_format
from util.data.tar_scan import MANIFEST, Manifest, Rows, read_manifest, repair_command, scan_tars
from util.data.tars import INDEX, TarImages, find_tars, write_index
from util.data.workers import ignore_signals
from util.run.checkpoint import sha256
from util.run.cli import Parser, run_program, user_errors
from util.text import count_of

_worker: dict[str, FolderImages] = {}  # a worker's images: sent once to each worker, not with every shard


def plan_shards(images: FolderImages, args: argparse.Namespace) -> dict[str, Manifest]:
    """Returns {name: manifest} of all shards of a split."""
    sizes = file_sizes(images)
    bounds = shard_bounds(sizes, args.shard_mb * 1_000_000)
    words = ["python", "scripts/pack_dataset.py", *(str(Path(path).resolve()) for path in args.folders)]
    words += ["--shard_mb", str(args.shard_mb)]
    if args.quality is not None:
        words += ["--quality", str(args.quality)]
    if args.in_chans != 3:
        words += ["--in_chans", str(args.in_chans)]
    shards = {}
    for number, (first, end) in enumerate(bounds):
        files = sizes[first:end].tobytes() + images.labels[first:end].tobytes()
        shards[f"shard-{number:06d}.tar"] = {
            "command": shlex.join(words),  # for messages; the paths may change
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


def file_sizes(images: FolderImages, chunk: int = 1000) -> np.ndarray:
    """Returns the bytes of each file, int64 [n]. Uses threads: a network disk answers many requests at once."""
    chunks = [range(first, min(first + chunk, len(images))) for first in range(0, len(images), chunk)]
    with ThreadPoolExecutor(32) as pool:
        sizes = pool.map(lambda part: [os.stat(images.path(i)).st_size for i in part], chunks)
        return np.array([size for part in sizes for size in part], np.int64)


def shard_bounds(sizes: np.ndarray, shard_bytes: int) -> list[tuple[int, int]]:
    """Returns [(first, end)]: runs of images with about `shard_bytes` of files."""
    number = (np.cumsum(sizes) - sizes) // shard_bytes  # by the position at which an image begins
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def start_worker(images: FolderImages) -> None:
    """Keeps the images that this process packs."""
    _worker["images"] = images
    ignore_signals(None)


def pack_shard(path: Path, manifest: Manifest) -> tuple[dict[str, Any], Rows, dict[str, Any]]:
    """Writes a shard, unless it is there and whole. Returns (its entry in the index, its rows, content of an index)."""
    try:
        scan = scan_tars([path]) if is_shard(path, manifest) else None
    except ValueError:  # damaged
        scan = None
    if scan is None:
        write_shard(_worker["images"], path, manifest)
        scan = scan_tars([path])
    return {"name": path.name, "size": path.stat().st_size, "sha256": sha256(path)}, *scan


def is_shard(path: Path, manifest: Manifest | None) -> bool:
    """Whether the file at `path` was written with this manifest, by whatever paths of the source and destination."""
    found = read_manifest(path)
    return found is not None and manifest is not None and found | {"command": ""} == manifest | {"command": ""}


def write_shard(images: FolderImages, path: Path, manifest: Manifest) -> None:
    with replaced_file(path, durable=True) as temporary, tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as tar:
        add_member(tar, MANIFEST, json.dumps(manifest).encode())
        for i, name in enumerate(manifest["names"], start=manifest["first"]):
            key = os.path.join(os.path.dirname(name), f"{i:09d}")  # unique up to the first dot, as WebDataset needs it
            extension = os.path.splitext(name)[1].lower() if manifest["quality"] is None else ".jpg"
            # WebDataset's to_tuple("jpg", "cls") then reads all of ImageNet, also its PNG that is named .JPEG.
            extension = ".jpg" if extension == ".jpeg" else extension
            add_member(tar, key + extension, encoded(images, i, manifest["quality"]))
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
            read_format(io.BytesIO(data), images.in_chans)
        except PILLOW_ERRORS as error:
            message = f"{images.path(i)!r} is not a readable image ({error}); replace or remove it"
            raise ImageError(message) from error
        return data
    picture, buffer = Image.fromarray(images.load(i)[0]), io.BytesIO()
    try:
        picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    except OSError as error:  # for example a side above 65,535 px
        raise ImageError(f"{images.path(i)!r} cannot be encoded as JPEG: {error}; pack without --quality") from error
    return buffer.getvalue()


def pack_split(images: FolderImages, folder: Path, args: argparse.Namespace) -> None:
    """Packs `images` into `folder`. Whole shards of the same files and settings are kept.

    Shards are written to a hidden folder. They are moved when all are whole and the index has been written.
    """
    staging, index = folder / PACKING, folder / INDEX
    shards = {staging / name: manifest for name, manifest in plan_shards(images, args).items()}
    refuse_other_data(folder, shards)
    if index.exists():
        try:
            done = TarImages(index, folder)
            print(f"{folder}: {count_of(len(done), 'image')} in {count_of(len(done.tars), 'shard')}, packed already")
            return
        except ValueError:
            print(f"{folder}: the index or a shard is damaged; packing again")
    staging.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("shard-*.tar"):
        os.replace(path, staging / path.name)
    index.unlink(missing_ok=True)
    for path in staging.iterdir():  # of a killed process, or of other files
        if not is_shard(path, shards.get(path)):
            path.unlink()
    pool = ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=(images,))
    try:
        results = pool.map(pack_shard, shards.keys(), shards.values())
        tars, parts, contents = zip(*tqdm(results, total=len(shards), unit="shard", desc=str(folder)), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)  # finishes the shards in progress, because workers ignore signals
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows["tar"] = np.repeat(np.arange(len(tars), dtype=np.int32), [len(part["tar"]) for part in parts])
    write_index(index, rows, contents[0] | {"notes": [], "tars": tars})
    for path in shards:
        os.replace(path, folder / path.name)
    staging.rmdir()
    what = f"{count_of(len(images), 'image')}, {count_of(len(images.classes), 'class')}"
    print(f"{folder}: {what}, {sum(tar['size'] for tar in tars) / 1e9:.2f} GB in {count_of(len(tars), 'shard')}")


def refuse_other_data(folder: Path, shards: dict[Path, Manifest]) -> None:
    """ValueError if `folder` holds other tars, shards of other settings, or finished shards of other files.

    A damaged shard is accepted if there is an index, because it will be written again.
    """
    wanted = {folder / path.name: manifest for path, manifest in shards.items()}
    now = next(iter(shards.values()))
    for path in sorted([*folder.glob("*.tar"), *folder.glob(f"{PACKING}/shard-*.tar")]):
        found, finished, problem = read_manifest(path), path.parent == folder, None
        if found is None and finished and not (path in wanted and (folder / INDEX).exists()):
            problem = f"{path.name} is not a shard of pack_dataset.py"
        elif found is not None and (found["quality"], found["shard_mb"]) != (now["quality"], now["shard_mb"]):
            problem = f"it was packed by: {found['command']}"
        elif found is not None and finished and not is_shard(path, wanted.get(path)):
            problem = "the files were others"
        if problem:
            what = f"{str(folder)!r} holds other data: {problem}"
            raise ValueError(f"{what}. Choose another DESTINATION, or remove this one to pack again")


def verify_split(images: FolderImages | None, folder: Path, num_workers: int) -> None:
    """ValueError if a shard is damaged, or if the names, labels or classes differ from those of the source."""
    ours = TarImages(folder / INDEX, folder)
    if images is not None and (ours.classes, EncodedImages.fingerprint(ours)) != (images.classes, images.fingerprint()):
        raise ValueError(f"{folder}: the names, labels or classes of the images are not those of the source")
    with ProcessPoolExecutor(num_workers) as pool:
        digests = tqdm(pool.map(sha256, ours.tars), total=len(ours.tars), unit="shard", desc=f"verify {folder}")
        pairs = zip(ours.content["tars"], digests, strict=True)
        damaged = [str(folder / tar["name"]) for tar, digest in pairs if tar["sha256"] != digest]
    if damaged:
        command = f"rm {shlex.join(damaged)} && {repair_command(ours.packed['command'], folder)}"
        raise ValueError(f"damaged: {', '.join(damaged)}. To repair it, run: {command}")
    print(f"{folder}: {count_of(len(ours), 'image')} of {count_of(len(ours.classes), 'class')} are what was packed")


def find_splits(folder: str) -> list[str]:
    """Returns the splits in a folder, train and val; or "." for the folder itself."""
    if not Path(folder).is_dir():
        return ["."]
    listing = list_folder(Path(folder))
    return [split for split in ("train", "val") if find_split(listing, split)[0] is not None] or ["."]


def open_source(source: str, split: str, folder: Path, args: argparse.Namespace) -> FolderImages:
    """Returns the images to pack into `folder`; ValueError if there are none, or if they cannot be packed there."""
    try:
        if find_tars(source, split):
            raise ValueError(f"--data_path {source!r} holds tars, which need no packing: train on it as it is")
        images = FolderImages(source, split)
    except ValueError as error:
        raise ValueError(str(error).replace("--data_path", "SOURCE")) from error
    if folder.resolve().is_relative_to(Path(images.root).resolve()):
        what = f"shards in {str(folder)!r} would lie among the images of {str(images.root)!r}"
        raise ValueError(f"{what}: choose another DESTINATION")
    images.in_chans = args.in_chans
    images.check()
    if args.quality is not None and images.pixel_format != RGB8:
        raise ValueError(f"--quality makes JPEGs of RGB images, but {source!r} has {images.pixel_format}: leave it out")
    for note in images.notes:
        print(f"{images.root}: {note}")
    return images


def main(argv: list[str] | None = None) -> None:
    parser = Parser("pack_dataset.py", description=__doc__)
    flag = parser.add_argument
    what = "SOURCE (class folders, or train/ and val/ with class folders) and DESTINATION"
    flag("folders", nargs="+", metavar="FOLDER", help=what)
    flag("--shard_mb", type=int, default=1000, at_least=1, help="megabytes of files in a shard")
    flag(
        "--quality", type=int, at_least=1, help="encode again as JPEG of this quality (default: keep the files' bytes)"
    )
    flag("--in_chans", type=int, default=3, at_least=1, help="channels of the images")
    flag("--workers", type=int, default=available_cores(), at_least=1, help="processes")
    what = "compare DESTINATION with its hashes and, if given, with SOURCE"
    flag("--verify", action=argparse.BooleanOptionalAction, default=False, help=what)
    args = parser.parse_args(argv)
    if len(args.folders) > 2 or (len(args.folders) < 2 and not args.verify):
        parser.error(f"give SOURCE and DESTINATION, or with --verify DESTINATION alone, got {', '.join(args.folders)}")
    source, destination = args.folders if len(args.folders) == 2 else (None, args.folders[0])
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that workers end, too
    try:
        with user_errors(parser):
            for split in find_splits(source or destination):
                folder = Path(destination) / split
                name = "train" if split == "." else split
                images = open_source(source, name, folder, args) if source else None
                if args.verify or images is None:
                    verify_split(images, folder, args.workers)
                else:
                    pack_split(images, folder, args)
    except KeyboardInterrupt:
        print("pack_dataset.py: stopped; the same command continues", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    run_program(main, "pack_dataset.py")
