"""Writes a small ImageFolder of real photographs: the ones that scikit-image ships inside its package.

    python scripts/sample_photos.py data/photos

One class a photograph; each image is a square crop of it. `train/` crops come from the left two thirds of the
photograph, `val/` crops from the right third, so that the two never share a pixel. Crops are drawn from a fixed seed:
the same files every time.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

# Photographs in scikit-image's wheel, grey ones included; their sources: skimage/data/README.txt in the package.
PHOTOS = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)


def crop(photo, side, rng, left, right):
    """A random square crop of 60-100 % of the region's shorter side, resized to `side` pixels."""
    height, width = photo.height, right - left
    size = int(rng.uniform(0.6, 1.0) * min(height, width))
    x, y = left + int(rng.integers(width - size + 1)), int(rng.integers(height - size + 1))
    # Cropped first: a resize of a box would read beyond its edges, into the other split.
    return photo.crop((x, y, x + size, y + size)).resize((side, side), Image.BICUBIC)


def write_photos(output_dir, side=96, num_train=100, num_val=30):
    from skimage.data import data_dir

    for label, name in enumerate(PHOTOS):
        photo = Image.open(Path(data_dir) / name).convert("RGB")
        boundary = photo.width * 2 // 3
        for split, count, left, right in (("train", num_train, 0, boundary), ("val", num_val, boundary, photo.width)):
            folder = Path(output_dir) / split / Path(name).stem
            folder.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng([label, split == "val"])
            for i in range(count):
                crop(photo, side, rng, left, right).save(folder / f"{i:03d}.jpg", quality=92)
    return len(PHOTOS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir")
    output_dir = parser.parse_args().output_dir
    print(f"{write_photos(output_dir)} photographs cut into {output_dir}/train and {output_dir}/val")
