"""Images of five bands in place of photographs."""

import numpy as np
import pytest
from PIL import Image


def bands(number, dtype="uint16", size=(40, 30)):
    """Five bands [H, W, 5] of different brightness."""
    values = np.random.default_rng(number).random((size[1], size[0], 5)) * [0.1, 0.2, 0.4, 0.6, 1]
    return values.astype(dtype) if dtype == "float32" else (values * np.iinfo(dtype).max).astype(dtype)


def write_array(path, array):
    """Writes [H, W, C] as .npy or TIFF."""
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        pytest.importorskip("tifffile").imwrite(path, array, photometric="minisblack", planarconfig="contig")


def write_bands(root, suffix=".npy", dtype="uint16"):
    """Replaces the photographs of a data set for segmentation or detection by `bands`. Returns ROOT."""
    return replace_images(root, lambda number, size: bands(number, dtype, size), suffix)


def replace_images(root, array_of, suffix=".npy"):
    """Replaces the photographs of a data set by `array_of(number, (width, height))`. Returns ROOT."""
    for path in sorted(root.rglob("*.*")):
        if path.suffix in (".jpg", ".png") and "annotations" not in path.relative_to(root).parts:
            write_array(path.with_suffix(suffix), array_of(int(path.stem), Image.open(path).size))
            path.unlink()
    for path in root.glob("annotations/*.json"):
        path.write_text(path.read_text().replace(".png", suffix))
    return root
