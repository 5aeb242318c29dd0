"""The photographs of the demonstrations, from scikit-image."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

PHOTO_SIDE = 192  # shorter side to which the photographs are scaled


def read_photos(names: Sequence[str]) -> list[Image.Image]:
    """Returns photographs of scikit-image by their file names, scaled. ValueError if it is not installed."""
    try:
        from skimage.data import data_dir
    except ImportError as error:
        raise ValueError(
            "the photographs are from scikit-image, which is not installed: "
            "pip install -r downstream/segmentation/requirements.txt"
        ) from error
    photos = []
    for name in names:
        photo = Image.open(Path(data_dir) / name).convert("RGB")
        scale = PHOTO_SIDE / min(photo.size)
        photos.append(photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.BICUBIC))
    return photos
