"""Small data sets of images with label maps."""

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_photo


def write_pairs(root, count=4, split="training", values=(0, 1, 2, 255), size=(40, 30)):
    """Photographs with label maps of vertical stripes."""
    for kind in ("images", "annotations"):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        write_photo(root / "images" / split / f"{i}.jpg", size, seed=i)
        stripes = np.array(values, np.uint8)[(np.arange(size[0]) // 3 + i) % len(values)]
        Image.fromarray(np.tile(stripes, (size[1], 1))).save(root / "annotations" / split / f"{i}.png")
    return root


def bands(number, dtype="uint16", size=(40, 30)):
    """Five bands [H, W, 5] of different brightness."""
    values = np.random.default_rng(number).random((size[1], size[0], 5)) * [0.1, 0.2, 0.4, 0.6, 1]
    return values.astype(dtype) if dtype == "float32" else (values * np.iinfo(dtype).max).astype(dtype)


def write_bands(root, split, suffix=".npy", dtype="uint16"):
    """Replaces the photographs of `write_pairs` by images of five bands."""
    for path in sorted((root / "images" / split).glob("*.jpg")):
        array, new = bands(int(path.stem), dtype, Image.open(path).size), path.with_suffix(suffix)
        if suffix == ".npy":
            np.save(new, array)
        else:
            pytest.importorskip("tifffile").imwrite(new, array, photometric="minisblack")
        path.unlink()
    return root
