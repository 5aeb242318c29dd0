"""Measures how many images one core loads: several ways from image files to batches, in a DataLoader with one worker.

    python tools/benchmark_data.py IMAGENET/train --markdown data.md

reference         torchvision's ImageFolder and transforms, float32 batches: MAE's loader
loader reference  this project's crops with `--loader reference`: Pillow decodes and resizes; uint8 from here on
pillow            Pillow decodes, torch resizes uint8 (antialiased)
simplejpeg        libjpeg-turbo decodes (pip install simplejpeg): the default of a run if it is installed
packed            the same, from tar shards (scripts/pack_dataset.py)
packed q90        the same, encoded again with quality 90: fewer bytes, faster to decode, other pixels

All ways but the reference draw masks with furthest sampling (rho_d .5) in the worker. Each round measures every way
once on the same images, in rotating order. The first two batches are not counted. The result is the median of the
rounds. The error is the difference of uint8 crops from Pillow's crops of the same boxes. For q90, it is the difference
from the original files. After the first round, the files are in the page cache, so disks are not measured.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torchvision
from torchvision import transforms as tv

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prmim import MaskCollator, TokenCounts, TokenOrderSampler, addressed_noise
from util.data import decode
from util.data.datasets import Address, AddressedDataset, batches
from util.data.images import EncodedImages, FolderImages
from util.data.tars import INDEX, TarImages
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, RandomResizedCropFlip
from util.run.cli import Parser, check_least, prepare_file, run_program, user_errors
from util.tables import markdown_table

SIZE, NUM_SKIPPED = 224, 2
PACK = Path(__file__).resolve().parents[1] / "scripts" / "pack_dataset.py"


def make_collator() -> MaskCollator:
    return MaskCollator(TokenOrderSampler(14, TokenCounts.from_ratios(196, 0.75, 0.5)), seed=0)


class TorchvisionFolder(torch.utils.data.Dataset):
    """The reference: `ImageFolder`'s loader and MAE's transforms, on the files of a `FolderImages`."""

    def __init__(self, images: EncodedImages) -> None:
        self.images = images
        crop = tv.RandomResizedCrop(SIZE, scale=(0.2, 1.0), interpolation=tv.InterpolationMode.BICUBIC)
        normalize = tv.Normalize(IMAGENET_MEAN, IMAGENET_STD)
        self.transform = tv.Compose([crop, tv.RandomHorizontalFlip(), tv.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, address: Address) -> tuple[torch.Tensor, int]:
        _, i = address
        return self.transform(torchvision.datasets.folder.pil_loader(self.images.path(i))), int(self.images.labels[i])


class Way:
    def __init__(self, images: EncodedImages, reference: bool = False, torchvisions: bool = False) -> None:
        self.images = images
        self.transform = RandomResizedCropFlip(SIZE, seed=0, reference=reference)
        self.dataset = TorchvisionFolder(images) if torchvisions else AddressedDataset(images, self.transform)
        self.collator: Callable = torch.utils.data.default_collate if torchvisions else make_collator()

    def images_per_second(self, num_batches: int, batch_size: int, epoch: int) -> float:
        """Measures a new worker, which loads the same images as the other ways do in this epoch."""
        shape = NUM_SKIPPED + num_batches, batch_size
        indices = np.random.default_rng(epoch).integers(0, len(self.images), shape)
        addresses = [[(epoch, int(i)) for i in row] for row in indices]
        stream = batches(self.dataset, addresses, self.collator, num_workers=1, pin_memory=False)
        for _ in range(NUM_SKIPPED):
            next(stream)
        start = time.perf_counter()
        for _ in range(num_batches):
            next(stream)
        return num_batches * batch_size / (time.perf_counter() - start)

    def crop(self, i: int) -> torch.Tensor:
        return AddressedDataset(self.images, self.transform)[(0, i)][0].float()


def make_ways(images: FolderImages, folder: Path) -> dict[str, Way]:
    """Returns all ways by name. Packs the images twice into `folder`."""
    slow = FolderImages(images.root)
    slow.reference = True
    ways = {
        "reference": Way(images, torchvisions=True),
        "loader reference": Way(slow, reference=True),
        "pillow": Way(slow),
    }
    if decode.simplejpeg is not None:
        ways["simplejpeg"] = Way(images)
    for name, flags in (("packed", []), ("packed q90", ["--quality", "90"])):
        command = [sys.executable, str(PACK), str(images.root), str(folder / name), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        index = next((folder / name).rglob(INDEX))
        ways[name] = Way(TarImages(index, index.parent))
    return ways


def pixel_error(way: Way, exact: Way, indices: Sequence[int]) -> float:
    """Returns the mean absolute difference of crops, of 255."""
    return statistics.mean((way.crop(i) - exact.crop(i)).abs().mean().item() for i in indices)


def sampling_microseconds(batch_size: int, repeats: int = 50) -> float:
    """Measures the masks of one image with furthest sampling, as the worker computes them: once per batch."""
    sampler = make_collator().sampler
    times = []
    for epoch in range(repeats):
        start = time.perf_counter()
        sampler(addressed_noise(0, epoch, np.arange(batch_size), 196))
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) / batch_size


def measure(ways: Mapping[str, Way], args: argparse.Namespace) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for epoch in range(args.rounds):
        for k in range(len(names)):
            name = names[(epoch + k) % len(names)]
            rates[name].append(ways[name].images_per_second(args.batches, args.batch_size, epoch))
    return {name: statistics.median(values) for name, values in rates.items()}


def report(ways: Mapping[str, Way], rates: Mapping[str, float], sampling: float, args: argparse.Namespace) -> str:
    """Returns the table. sampling: microseconds of one image."""
    exact = ways["loader reference"]
    num_images = len(exact.images)
    indices = range(0, num_images, max(1, num_images // 100))
    rows = []
    for name, rate in rates.items():
        share = error = "–"
        if name != "reference":
            share = f"{sampling * rate / 1e6:.1%}"
            error = f"{pixel_error(ways[name], exact, indices):.3f}"
        rows.append([name, f"{rate:.0f}", f"{rate / rates['reference']:.2f}", share, error])
    titles = ["way", "images/s per core", "× reference", "sampling's share", "mean error of 255"]
    return (
        f"{num_images} images, batches of {args.batch_size}, {args.rounds} rounds of {args.batches} batches, "
        f"torch {torch.__version__}; sampling {sampling:.1f} µs an image\n\n{markdown_table(titles, rows)}\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table. argv: the command line (default: this program's)."""
    parser = Parser("benchmark_data.py", description=__doc__)
    flag = parser.add_argument
    flag("images", help="class folders, or a flat folder, of the JPEGs to train on")
    flag("--batch_size", type=int, default=64)
    flag("--batches", type=int, default=6, help="per round")
    flag("--rounds", type=int, default=5)
    flag("--markdown", type=Path, help="file for the table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with user_errors(parser):
        check_least(args, 1, "batch_size batches rounds")
        prepare_file("--markdown", args.markdown)
        images = FolderImages(args.images)
        with tempfile.TemporaryDirectory() as folder:
            ways = make_ways(images, Path(folder))
            text = report(ways, measure(ways, args), sampling_microseconds(args.batch_size), args)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_program(main, "benchmark_data.py")
