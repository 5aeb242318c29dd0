"""What the demonstrations share: photographs of scikit-image, and a training on data that is made from them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from util.run.cli import Parser, user_errors
from util.run.files.lock import writable_folder

PHOTO_SIDE = 192  # shorter side to which the photographs are scaled


def photos_folder() -> Path:
    """Returns the folder of scikit-image's photographs. ValueError if it is not installed."""
    try:
        from skimage.data import data_dir
    except ImportError as error:
        raise ValueError(
            "the photographs are from scikit-image, which is not installed: pip install -r requirements-quickstart.txt"
        ) from error
    return Path(data_dir)


def read_photos(names: Sequence[str]) -> list[Image.Image]:
    """Returns photographs of scikit-image by their file names, scaled."""
    folder = photos_folder()
    photos = []
    for name in names:
        photo = Image.open(folder / name).convert("RGB")
        scale = PHOTO_SIDE / min(photo.size)
        photos.append(photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.BICUBIC))
    return photos


def cut(photo: Image.Image, is_train: bool, side: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a random square of the left two thirds of a photograph, or else of the right third, uint8 [s, s, 3]."""
    start = 0
    end = photo.width * 2 // 3
    if not is_train:
        start = end
        end = photo.width
    x = int(rng.integers(start, end - side + 1))
    y = int(rng.integers(photo.height - side + 1))
    return np.asarray(photo.crop((x, y, x + side, y + side)))


def train_demo(
    recipe: str,
    description: str | None,
    num_iters: int,
    write: Callable[..., None],
    train: Callable[[Sequence[str]], object],
    argv: Sequence[str] | None,
) -> bool:
    """Calls `write(ROOT/data)`, also with `num_train` if it is given, then `train(command line)` with ROOT/run as its
    folder.

    argv: the command line of the demonstration, which names ROOT. Returns False if a signal stopped the run.
    """
    parser = Parser("demo.py", description=description)
    parser.add_argument("output_dir", nargs="?", default=f"output/{recipe}", help="folder of data and run")
    parser.add_argument("--num_iters", type=int, default=num_iters, help="iterations of the training")
    parser.add_argument("--num_train", type=int, at_least=1, help="training images (default: all of the data set)")
    args = parser.parse_args(argv)
    options: dict[str, int] = {}
    if args.num_train is not None:
        options["num_train"] = args.num_train
    with user_errors(parser):
        root = writable_folder(args.output_dir).resolve()
        write(root / "data", **options)
    flags = ["--recipe", recipe, "--num_iters", str(args.num_iters), "--num_workers", "0"]
    flags += ["--data_path", str(root / "data"), "--output_dir", str(root / "run")]
    return bool(train(flags))
