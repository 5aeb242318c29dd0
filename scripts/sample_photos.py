"""Writes a small ImageFolder of real photographs: the ones that scikit-image ships inside its package.

    python scripts/sample_photos.py data/photos

One class a photograph; each image is a square crop of it. `train/` crops come from the left two thirds of the
photograph, `val/` crops from the right third, so that the two never share a pixel. Crops are drawn from a fixed seed:
the same files every time.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from util.run.cli import Parser, run_program, user_errors

# Photographs in scikit-image's wheel, grey ones included; their sources: skimage/data/README.txt in the package.
PHOTOS = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)


def crop(photo: Image.Image, side: int, rng: np.random.Generator, left: int, right: int) -> Image.Image:
    """A random square crop of 60-100 % of the region's shorter side, resized to `side` pixels."""
    height, width = photo.height, right - left
    size = int(rng.uniform(0.6, 1.0) * min(height, width))
    x, y = left + int(rng.integers(width - size + 1)), int(rng.integers(height - size + 1))
    # Cropped first: a resize of a box would read beyond its edges, into the other split.
    return photo.crop((x, y, x + size, y + size)).resize((side, side), Image.BICUBIC)


def photos_folder() -> Path:
    """Where scikit-image keeps its photographs; ValueError where it is not installed."""
    try:
        from skimage.data import data_dir
    except ImportError as error:
        raise ValueError(
            "scikit-image, whose photographs these are, is not installed: pip install -r requirements-quickstart.txt"
        ) from error
    return Path(data_dir)


def make_folder(path: Path) -> None:
    """Creates the folder where it is missing; ValueError where no file can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be made a folder ({error.strerror}); choose another") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {str(path)!r} cannot be written to (permission denied); choose another")


def write_photos(output_dir: str | Path, side: int = 96, num_train: int = 100, num_val: int = 30) -> int:
    """Writes train/ and val/ with crops of `side` pixels to `output_dir`; -> the number of photographs."""
    source = photos_folder()
    make_folder(Path(output_dir))
    for label, name in enumerate(PHOTOS):
        photo = Image.open(source / name).convert("RGB")
        boundary = photo.width * 2 // 3
        for split, count, left, right in (("train", num_train, 0, boundary), ("val", num_val, boundary, photo.width)):
            folder = Path(output_dir) / split / Path(name).stem
            folder.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng([label, split == "val"])
            for i in range(count):
                crop(photo, side, rng, left, right).save(folder / f"{i:03d}.jpg", quality=92)
    return len(PHOTOS)


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("sample_photos.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", help="where train/ and val/ go; it is created")
    output_dir = parser.parse_args(argv).output_dir
    with user_errors(parser):
        num_photos = write_photos(output_dir)
    print(f"{num_photos} photographs cut into {output_dir}/train and {output_dir}/val")


if __name__ == "__main__":
    run_program(main, "sample_photos.py")
