"""Packs millions of small image files into a few indexed shards, which `--data_path` reads in place.

    python scripts/pack_dataset.py IMAGENET IMAGENET_PACKED --workers 16
    python scripts/pack_dataset.py --verify IMAGENET_PACKED
    python main_pretrain.py --recipe prmim50_vit_base_800ep --data_path IMAGENET_PACKED

IMAGENET is a folder as `--data_path` takes it; each of its train/ and val/ (or the folder itself) becomes
IMAGENET_PACKED/<split>/shard-00000.bin and so on, with an index. The files' own bytes are kept, so training on packed
data is bit for bit training on the folder. `--quality 90` re-encodes as JPEG at the original size instead: about half
of the bytes and a faster decode, but other pixels; images are never made smaller.

Stopped? The same command goes on with the shards that are missing. If the index or a shard is damaged, the same command
packs again. `--verify` reads everything again: the shards' hashes, each image's checksum and, with IMAGENET given as
well, its images' names, labels and classes.
"""

import argparse
import hashlib
import io
import json
import os
import secrets
import signal
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.data import packed
from util.data.datasets import available_cores
from util.data.decode import PILLOW_ERRORS, check_header
from util.data.folders import counted, find_split, list_folder
from util.data.images import FolderImages, ImageError
from util.data.tars import find_tars
from util.run.cli import Parser
from util.run.signals import ignore_in_worker

_worker = {}  # a worker's images: a million paths travel once a worker, and not with every shard


def start_worker(images: FolderImages) -> None:
    """Keeps the images that this process packs."""
    _worker["images"] = images
    ignore_in_worker(None)


def file_sizes(images: FolderImages, chunk: int = 1000) -> np.ndarray:
    """Bytes of each file, int64 [n]; a network disk answers many questions at once."""
    chunks = [range(first, min(first + chunk, len(images))) for first in range(0, len(images), chunk)]
    with ThreadPoolExecutor(32) as pool:
        sizes = pool.map(lambda part: [os.stat(images.path(i)).st_size for i in part], chunks)
        return np.array([size for part in sizes for size in part], np.int64)


def listing(names: list[bytes], sizes: np.ndarray, labels: np.ndarray) -> str:
    """What is packed, as a hash."""
    return hashlib.sha256(b"\0".join([*names, sizes.tobytes(), labels.tobytes()])).hexdigest()


def plan_shards(sizes: np.ndarray, shard_bytes: int) -> list[tuple[int, int]]:
    """Files' sizes -> [(first, end)]: runs of images of about `shard_bytes`."""
    number = (np.cumsum(sizes) - sizes) // shard_bytes  # by where an image begins
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def pack_shard(first: int, end: int, path: Path, quality: int | None, stamp: list) -> None:
    """Writes images first .. end - 1 to `path`, and beside it what the index will need."""
    images = _worker["images"]
    digest, offset, entries = hashlib.sha256(), 0, []
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            for i in range(first, end):
                data = encoded(images, i, quality)
                file.write(data)
                digest.update(data)
                entries.append((offset, len(data), zlib.crc32(data)))
                offset += len(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    record = {"stamp": stamp, "size": offset, "sha256": digest.hexdigest(), "entries": entries}
    packed.write_atomically(path.with_suffix(".json"), json.dumps(record).encode())


def encoded(images: FolderImages, i: int, quality: int | None) -> bytes:
    """The file's own bytes, once Pillow has read its header; or, with a quality, a new JPEG of the same size."""
    data = images.read(i)
    if quality is None:
        try:
            check_header(io.BytesIO(data))
        except PILLOW_ERRORS as error:
            what = f"{images.path(i)!r} is not a readable image ({error})"
            raise ImageError(f"{what}; replace or remove the file") from error
        return data
    buffer = io.BytesIO()
    try:
        Image.fromarray(images.load(i)[0]).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    except OSError as error:  # a side above 65,535 px, say
        raise ImageError(f"{images.path(i)!r} cannot be encoded as JPEG: {error}; pack without --quality") from error
    return buffer.getvalue()


def find_packed(folder: Path, facts: dict, num_images: int) -> dict | None:
    """The index of what is packed in `folder` already; None if there is nothing, or it is damaged, which is printed.

    ValueError if it was packed from other files, or by other settings, than `facts` say.
    """
    path = folder / packed.INDEX
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {key: content[key] for key in (*facts, "num_images")}
    except (ValueError, KeyError, TypeError) as error:
        print(f"{str(path)!r} is damaged ({type(error).__name__}: {error}); packing again")
        return None
    settings = [key for key in ("quality", "shard_mb") if found[key] != facts[key]]
    differences = [f"--{key} was {found[key]}, now {facts[key]}" for key in settings]
    if found["source"] != facts["source"]:
        differences.append(f"the files were others ({counted(found['num_images'], 'image')} then, {num_images} now)")
    if differences:
        raise ValueError(
            f"{str(folder)!r} was packed otherwise: {'; '.join(differences)}. "
            f"Choose another DESTINATION, or remove this one to pack it anew"
        )
    try:
        return packed.PackedImages(folder).content
    except ValueError as error:
        print(f"damaged: {error}; packing again")
        return None


def pack_split(images: FolderImages, folder: Path, args: argparse.Namespace) -> None:
    """Packs `images` into `folder`; what is there already, whole and by the same settings, is left as it is."""
    sizes, names = file_sizes(images), [bytes(name) for name in images.names]
    facts = {"source": listing(names, sizes, images.labels), "quality": args.quality, "shard_mb": args.shard_mb}
    content = find_packed(folder, facts, len(images))
    if content is not None:
        print(f"{folder}: {content['num_images']} images in {len(content['shards'])} shards, packed already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / packed.INDEX).unlink(missing_ok=True)  # until all shards are whole again
    for leftover in folder.glob(".shard-*.tmp-*"):  # of a killed process
        leftover.unlink()
    jobs = {}
    for k, (first, end) in enumerate(plan_shards(sizes, args.shard_mb * 1_000_000)):
        path, part = folder / packed.SHARD.format(k), slice(first, end)
        stamp = [listing(names[part], sizes[part], images.labels[part]), args.quality]
        jobs[path] = (first, end, path, args.quality, stamp)
    missing = [job for path, job in jobs.items() if not is_packed(path, job[-1])]
    pool = ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=(images,))
    with pool, tqdm(total=len(images), unit="image", desc=str(folder)) as bar:
        bar.update(len(images) - sum(end - first for first, end, *_ in missing))
        futures = {pool.submit(pack_shard, *job): job for job in missing}
        try:
            for future in as_completed(futures):
                future.result()
                bar.update(futures[future][1] - futures[future][0])
        except BaseException:
            # Shards that are under way are finished, and kept: workers ignore signals.
            pool.shutdown(cancel_futures=True)
            raise
    finish(images, folder, jobs, names, facts)


def is_packed(path: Path, stamp: list) -> bool:
    """Whether the shard at `path` was written whole, from the same files and by the same settings."""
    record = path.with_suffix(".json")
    if not record.is_file() or not path.is_file():
        return False
    try:
        content = json.loads(record.read_text())
        return content["stamp"] == stamp and content["size"] == path.stat().st_size
    except (ValueError, KeyError, TypeError):  # a damaged record
        return False


def finish(images: FolderImages, folder: Path, jobs: dict[Path, tuple], names: list[bytes], facts: dict) -> None:
    """The index of all shards; their own records are no longer needed then."""
    rows, shards = [], []
    for k, (path, (first, end, *_)) in enumerate(jobs.items()):
        record = json.loads(path.with_suffix(".json").read_text())
        shards.append({"name": path.name, "size": record["size"], "sha256": record["sha256"]})
        for i, entry in zip(range(first, end), record["entries"], strict=True):
            rows.append((k, images.labels[i], *entry, names[i]))
    packed.write_index(folder, packed.records(rows), shards, images.classes, **facts)
    for path in jobs:
        path.with_suffix(".json").unlink()
    for path in {*folder.glob("shard-*")} - {*jobs}:  # of an earlier plan that was never finished
        path.unlink()
    total = sum(shard["size"] for shard in shards)
    print(f"{folder}: {len(rows)} images, {len(images.classes)} classes, {total / 1e9:.2f} GB in {len(shards)} shards")


def verify_shard(path: Path, shard: dict, rows: np.ndarray) -> list[str]:
    """What is wrong with a shard, as a list of sentences."""
    digest, problems, position = hashlib.sha256(), [], 0
    with open(path, "rb") as file:
        for row in rows:
            data = file.read(row["length"])
            digest.update(data)
            if row["offset"] != position or zlib.crc32(data) != row["crc32"]:
                problems.append(f"{path}: {os.fsdecode(bytes(row['name']))} is not what was packed")
            position += int(row["length"])
        digest.update(file.read())
    if digest.hexdigest() != shard["sha256"]:
        problems.append(f"{path}: its SHA-256 is not the recorded one")
    return problems


def verify_split(images: FolderImages | None, folder: Path, args: argparse.Namespace) -> None:
    """ValueError names what is damaged, or differs from the source."""
    ours = packed.PackedImages(folder)
    problems = []
    if images is not None:
        pairs = {"images": (len(ours), len(images)), "classes": (ours.classes, images.classes)}
        pairs["names and labels"] = [
            [(bytes(name), int(label)) for name, label in zip(paths, labels, strict=True)]
            for paths, labels in ((ours.records["name"], ours.labels), (images.names, images.labels))
        ]
        problems += [f"{folder}: its {what} are not the source's" for what, (a, b) in pairs.items() if a != b]
    with ProcessPoolExecutor(args.workers) as pool, tqdm(total=len(ours), unit="image", desc=f"verify {folder}") as bar:
        futures = {}
        for k, (path, shard) in enumerate(zip(ours.shards, ours.content["shards"], strict=True)):
            rows = np.array(ours.records[ours.records["shard"] == k])
            futures[pool.submit(verify_shard, path, shard, rows)] = len(rows)
        for future in as_completed(futures):
            problems += future.result()
            bar.update(futures[future])
    if problems:
        more = f"; {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{'; '.join(problems[:5])}{more}. Remove the shards that are damaged, or all of {str(folder)!r} if the "
            f"source has changed, and pack again"
        )
    print(f"{folder}: {len(ours)} images of {len(ours.classes)} classes are what was packed")


def find_splits(source: str) -> dict[str, str]:
    """{split: folder below DESTINATION} of a source: train/ and val/ where they are, else the folder itself."""
    if not Path(source).is_dir():
        return {"train": "."}
    entries = list_folder(Path(source))
    splits = [split for split in ("train", "val") if find_split(entries, split)[0] is not None]
    return {split: split for split in splits} or {"train": "."}


def open_source(source: str, split: str) -> FolderImages:
    """The images to pack; ValueError if there are none, or they need no packing."""
    try:
        if find_tars(source, split):
            raise ValueError(f"--data_path {source!r} holds tars, which need no packing: train on it as it is")
        if any((folder / packed.INDEX).is_file() for folder in (Path(source), Path(source) / split)):
            raise ValueError(f"--data_path {source!r} is packed already: give the folder that it was packed from")
        return FolderImages(source, split)
    except ValueError as error:
        raise ValueError(str(error).replace("--data_path", "SOURCE")) from error


def run_split(source: str | None, split: str, folder: Path, args: argparse.Namespace) -> None:
    """Packs a split of the source into `folder`, or verifies what is packed there."""
    images = None if source is None else open_source(source, split)
    if args.verify:
        verify_split(images, folder, args)
        return
    root = Path(images.root).resolve()
    if root in (folder.resolve(), *folder.resolve().parents):
        what = f"shards in {str(folder)!r} would lie among the images of {str(root)!r}"
        raise ValueError(f"{what}: choose another DESTINATION")
    images.check()
    for note in images.notes:
        print(f"{images.root}: {note}")
    pack_split(images, folder, args)


def main(argv: list[str] | None = None) -> None:
    """Packs or verifies each split."""
    parser = Parser("pack_dataset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    what = "SOURCE, class folders or train/ and val/ of them; and DESTINATION"
    flag("folders", nargs="+", metavar="FOLDER", help=what)
    flag("--shard_mb", type=int, default=1000, help="megabytes a shard, before any re-encoding")
    flag("--quality", type=int, help="re-encode as JPEG of this quality (default: keep the files' bytes)")
    flag("--workers", type=int, default=available_cores())
    what = "check it against its hashes, and SOURCE if given"
    flag("--verify", action=argparse.BooleanOptionalAction, default=False, help=what)
    args = parser.parse_args(argv)
    if min(args.shard_mb, args.workers) < 1:
        parser.error(f"--shard_mb and --workers must be at least 1, got {args.shard_mb} and {args.workers}")
    if args.quality is not None and not 1 <= args.quality <= 100:
        parser.error(f"--quality must be from 1 to 100, got {args.quality}")
    if len(args.folders) > 2 or len(args.folders) + args.verify < 2:
        parser.error(f"give SOURCE and DESTINATION, or with --verify DESTINATION alone, got {', '.join(args.folders)}")
    source, destination = args.folders if args.folders[1:] else [None, *args.folders]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the workers end with it
    try:
        for split, below in find_splits(source or destination).items():
            run_split(source, split, Path(destination) / below, args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "pack_dataset.py: stopped; the same command goes on\n")
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
