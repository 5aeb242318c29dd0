"""Write a small ImageFolder of real photographs, which the package scikit-image contains.

    python scripts/sample_photos.py data/photos

Each photograph is a class, and each image is a square crop of it. Crops in `train/` are from the left two thirds of the
photograph, crops in `val/` from the right third, so they never share a pixel. The random seed is fixed: the same flags
always write the same files. A smaller `--num_train` writes the first crops of each class, so it makes a subset.

The folder must be empty, or written by the same flags, which `.sample_photos.json` in it holds.

With `--bands`, an image is a TIFF of five bands with 16 bits: red, green, blue, and the gradients of the brightness
down the columns and along the rows. It needs tifffile.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors

# Photographs in scikit-image's wheel. Their sources are in skimage/data/README.txt of the package.
PHOTOS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
SIDE = 96  # of an image, in pixels
RECORD = ".sample_photos.json"  # in the folder: what its files were made with


def photos_folder() -> Path:
    """Returns the folder of scikit-image's photographs. ValueError if it is not installed."""
    try:
        from skimage.data import data_dir
    except ImportError as error:
        raise ValueError(
            "the photographs are from scikit-image, which is not installed: pip install -r requirements-quickstart.txt"
        ) from error
    return Path(data_dir)


def crop(
    photo: Image.Image,
    rng: np.random.Generator,
    left: int,
    right: int,
    crop_sides: Sequence[float],
) -> Image.Image:
    """Crops a random square from the columns `left` to `right`, and resizes it to SIDE pixels.

    crop_sides: smallest and largest side of the square, as shares of the shorter side of that region.
    """
    width = right - left
    smallest, largest = crop_sides
    size = int(rng.uniform(smallest, largest) * min(photo.height, width))
    x = left + int(rng.integers(width - size + 1))
    y = int(rng.integers(photo.height - size + 1))
    # Crop first: resize(box=...) would read pixels beyond the box, from the other split.
    square = photo.crop((x, y, x + size, y + size))
    return square.resize((SIDE, SIDE), Image.BICUBIC)


def five_bands(img: Image.Image) -> np.ndarray:
    """Red, green, blue, and the gradients of their mean down the columns and along the rows, uint16 [H, W, 5].

    A gradient of 0 is the middle of the range, one of 255 per pixel is its end.
    """
    colors = np.asarray(img, np.float64)
    gradients = [(slope + 255) / 2 for slope in np.gradient(colors.mean(axis=2))]
    bands = np.dstack([colors, *gradients]) * 257
    return np.round(bands).astype(np.uint16)


def save_bands(bands: np.ndarray, path: Path) -> None:
    """Writes [H, W, C] as a TIFF. ValueError if tifffile is not installed."""
    try:
        import tifffile
    except ImportError as error:
        raise ValueError("--bands writes TIFFs by tifffile, which is not installed: pip install tifffile") from error
    tifffile.imwrite(path, bands, photometric="minisblack", planarconfig="contig")


def make_folder(path: Path, flags: dict[str, Any]) -> None:
    """Creates the folder. ValueError if it holds files that were not written with the same flags."""
    path.mkdir(parents=True, exist_ok=True)
    record = path / RECORD
    if any(path.iterdir()):
        if not record.is_file():
            raise ValueError(f"{str(path)!r} is not empty, and this program has not written it: choose another folder")
        if json.loads(record.read_text()) != flags:
            raise ValueError(
                f"{str(path)!r} holds photographs of other flags, {record.read_text()}: choose another folder"
            )
    record.write_text(json.dumps(flags))


def write_photos(
    output_dir: Path,
    num_train: int,
    num_val: int,
    crop_sides: Sequence[float] = (0.6, 1.0),
    bands: bool = False,
) -> None:
    """Writes train/ and val/. See the flags; `bands` writes `five_bands` instead of JPEGs."""
    if not 0 < crop_sides[0] <= crop_sides[1] <= 1:
        raise ValueError(f"--crop_sides must be two shares 0 < low <= high <= 1, got {crop_sides}")
    source = photos_folder()
    flags = {"side": SIDE, "num_train": num_train, "num_val": num_val, "crop_sides": list(crop_sides), "bands": bands}
    make_folder(output_dir, flags)
    for label, name in enumerate(PHOTOS):
        photo = Image.open(source / name).convert("RGB")
        boundary = photo.width * 2 // 3
        for split in ("train", "val"):
            folder = output_dir / split / Path(name).stem
            folder.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng([label, split == "val"])
            left = 0
            right = boundary
            count = num_train
            if split == "val":
                left = boundary
                right = photo.width
                count = num_val
            for i in range(count):
                img = crop(photo, rng, left, right, crop_sides)
                if bands:
                    save_bands(five_bands(img), folder / f"{i:03d}.tif")
                else:
                    img.save(folder / f"{i:03d}.jpg", quality=92)


FLAGS = (
    Flag("output_dir", Path, help="create train/ and val/ in this folder", positional=True),
    Flag("num_train", int, 100, "crops per photograph in train/", at_least=1),
    Flag("num_val", int, 30, "crops per photograph in val/", at_least=1),
    Flag(
        "crop_sides",
        float,
        (0.6, 1.0),
        "smallest and largest side of a crop, as shares of the shorter side of its region",
        nargs=2,
        metavar=("LOW", "HIGH"),
    ),
    Flag("bands", bool, False, "write TIFFs of five bands with 16 bits"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("sample_photos.py", __doc__, *FLAGS)
    args = parser.parse_args(argv)
    with user_errors(parser):
        write_photos(**vars(args))
    print(f"crops of {len(PHOTOS)} photographs: {args.output_dir}/train and {args.output_dir}/val")


if __name__ == "__main__":
    run_program(main, "sample_photos.py")
