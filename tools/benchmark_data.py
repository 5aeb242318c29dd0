"""What one core loads: ways from image files to batches side by side, in a DataLoader with one worker.

    python tools/benchmark_data.py IMAGENET/train --markdown data.md

reference         torchvision's ImageFolder and transforms, float32 batches: MAE's loader
loader reference  this project's crops with `--loader reference`: Pillow decodes and resizes; bytes, from here on
pillow            Pillow decodes, torch resizes bytes (antialiased)
simplejpeg        libjpeg-turbo decodes (pip install simplejpeg): what a run does where it is installed
packed            the same, out of shards (scripts/pack_dataset.py)
packed q90        the same, re-encoded at the original size: fewer bytes, a faster decode, other pixels

All but the reference draw masks and sample furthest tokens (rho_d .5) in the worker. Each round runs every way once, on the
same images, in rotating order; the first two batches of a turn are not counted, and the median of the rounds counts. The error
is that of uint8 crops against Pillow's, with the same boxes; q90's is against the original file's. Files are in the page cache
after the first round: disks are not measured.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch
import torchvision
from torchvision import transforms as tv

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prmim import MaskCollator, TokenCounts, TokenOrderSampler, addressed_noise
from scripts import pack_dataset
from util.data import decode
from util.data.datasets import AddressedDataset, batches
from util.data.images import FolderImages
from util.data.packed import INDEX, PackedImages
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, RandomResizedCropFlip
from util.run.cli import Parser, run_program, user_errors, why_not_writable

SIZE, SKIPPED = 224, 2


def make_collator():
    counts = TokenCounts.from_ratios(196, 0.75, 0.5)
    return MaskCollator(TokenOrderSampler(14, counts), seed=0)


class TorchvisionFolder(torch.utils.data.Dataset):
    """The reference: `ImageFolder`'s loader and MAE's transforms, on the files of a `FolderImages`."""

    def __init__(self, images):
        self.images = images
        crop = tv.RandomResizedCrop(SIZE, scale=(0.2, 1.0), interpolation=tv.InterpolationMode.BICUBIC)
        normalize = tv.Normalize(IMAGENET_MEAN, IMAGENET_STD)
        self.transform = tv.Compose([crop, tv.RandomHorizontalFlip(), tv.ToTensor(), normalize])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, address):
        _, i = address
        return self.transform(torchvision.datasets.folder.pil_loader(self.images.path(i))), int(self.images.labels[i])


class Way:
    """A data set and its collation."""

    def __init__(self, images, reference=False, torchvisions=False):
        self.images = images
        self.transform = RandomResizedCropFlip(SIZE, seed=0, reference=reference)
        self.dataset = TorchvisionFolder(images) if torchvisions else AddressedDataset(images, self.transform)
        self.collator = torch.utils.data.default_collate if torchvisions else make_collator()

    def images_per_second(self, num_batches, batch_size, epoch):
        """One turn: a new worker loads the same images as the other ways in this epoch."""
        indices = np.random.default_rng(epoch).integers(0, len(self.images), (SKIPPED + num_batches, batch_size))
        addresses = [[(epoch, int(i)) for i in row] for row in indices]
        stream = batches(self.dataset, addresses, self.collator, num_workers=1, pin_memory=False)
        for _ in range(SKIPPED):
            next(stream)
        start = time.perf_counter()
        for _ in range(num_batches):
            next(stream)
        return num_batches * batch_size / (time.perf_counter() - start)

    def crop(self, i):
        return AddressedDataset(self.images, self.transform)[(0, i)][0].float()


def make_ways(images, folder):
    """{name: Way}; packs the images twice into `folder`."""
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
        with redirect_stdout(StringIO()):
            pack_dataset.main([str(images.root), str(folder / name), *flags])
        ways[name] = Way(PackedImages(next((folder / name).rglob(INDEX)).parent))
    return ways


def pixel_error(way, exact, indices):
    """Mean absolute difference of crops from Pillow's, of 255."""
    return statistics.mean((way.crop(i) - exact.crop(i)).abs().mean().item() for i in indices)


def sampling_microseconds(batch_size, repeats=50):
    """Masks and furthest sampling of one image, as the worker computes them: once a batch."""
    sampler = make_collator().sampler
    times = []
    for epoch in range(repeats):
        start = time.perf_counter()
        sampler(addressed_noise(0, epoch, np.arange(batch_size), 196))
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) / batch_size


def measure(ways, args):
    """-> {name: median images/s}"""
    rates, names = {name: [] for name in ways}, list(ways)
    for epoch in range(args.rounds):
        for k in range(len(names)):
            name = names[(epoch + k) % len(names)]
            rates[name].append(ways[name].images_per_second(args.batches, args.batch_size, epoch))
    return {name: statistics.median(values) for name, values in rates.items()}


def report(ways, rates, sampling, args):
    exact, indices = ways["loader reference"], range(0, len(exact_images(ways)), max(1, len(exact_images(ways)) // 100))
    lines = ["| way | images/s per core | × reference | sampling's share | mean error of 255 |", "|---|--:|--:|--:|--:|"]
    for name, rate in rates.items():
        share = "–" if name == "reference" else f"{sampling * rate / 1e6:.1%}"
        error = "–" if name == "reference" else f"{pixel_error(ways[name], exact, indices):.3f}"
        lines.append(f"| {name} | {rate:.0f} | {rate / rates['reference']:.2f} | {share} | {error} |")
    head = f"{len(exact_images(ways))} images, batches of {args.batch_size}, {args.rounds} rounds of {args.batches} batches, "
    head += f"torch {torch.__version__}; sampling {sampling:.1f} µs an image"
    return "\n".join([head, "", *lines]) + "\n"


def exact_images(ways):
    return ways["loader reference"].images


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("benchmark_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("images", help="class folders, or a flat folder, of JPEGs as they will be trained on")
    flag("--batch_size", type=int, default=64)
    flag("--batches", type=int, default=6, help="a turn")
    flag("--rounds", type=int, default=5)
    flag("--markdown", type=Path, help="what is printed")
    args = parser.parse_args(argv)
    if min(args.batch_size, args.batches, args.rounds) < 1:
        parser.error(
            f"--batch_size, --batches and --rounds must be at least 1, got {args.batch_size}, {args.batches}, {args.rounds}"
        )
    if args.markdown and (reason := why_not_writable(args.markdown)):
        parser.error(f"{str(args.markdown)!r} cannot be written: {reason}")
    torch.set_num_threads(1)
    with user_errors(parser):
        images = FolderImages(args.images)
        with tempfile.TemporaryDirectory() as folder:
            ways = make_ways(images, Path(folder))
            text = report(ways, measure(ways, args), sampling_microseconds(args.batch_size), args)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_program(main, "benchmark_data.py")
