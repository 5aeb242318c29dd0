"""Small data sets of images with label maps."""

import numpy as np
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
