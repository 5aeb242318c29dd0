"""Published data sets with files of their own kind: CIFAR-10, CIFAR-100, iNaturalist."""

import json
from pathlib import Path

import numpy as np
import torchvision

from util.data.folders import MissingSplit
from util.data.images import AS_RGB, ImageFiles, Images, Reading


class INaturalistImages(ImageFiles):
    """iNaturalist 2018 or 2019: ROOT/<split><year>.json in COCO's format, and the images that it names.

    A label is the rank of its category's id. MissingSplit if there is no such file.
    """

    def __init__(
        self,
        data_path: str | Path,
        split: str,
        year: int,
        reading: Reading = AS_RGB,
    ) -> None:
        path = Path(data_path) / f"{split}{year}.json"
        if not path.is_file():
            raise MissingSplit(f"--data_path must hold iNaturalist's {path.name}, but {str(path)!r} is no file")
        content = json.loads(path.read_text(encoding="utf-8"))
        categories = {category["id"]: category.get("name", str(category["id"])) for category in content["categories"]}
        names = {image["id"]: image["file_name"] for image in content["images"]}
        category_of = {entry["image_id"]: entry["category_id"] for entry in content["annotations"]}
        ids = sorted(categories)
        label_of = {category: label for label, category in enumerate(ids)}
        samples = [(name, label_of[category_of[image]]) for image, name in sorted(names.items())]
        classes = [categories[category] for category in ids]
        super().__init__(data_path, samples, classes, (), reading)


class CifarImages(Images):
    """torchvision's CIFAR-10 or CIFAR-100, downloaded to `data_path` if it is not there. Its hash is checked."""

    lie_in_files = True
    typical_side = 32

    def __init__(self, name: str, data_path: str | Path, split: str = "train") -> None:
        make = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
        try:
            self.images = make(data_path, train=split == "train", download=True)
        except (OSError, RuntimeError) as error:
            problem = f"{name} is not in --data_path {str(data_path)!r} and cannot be downloaded ({error})"
            raise ValueError(f"{problem}; put torchvision's {make.base_folder} there") from error
        super().__init__(f"{name}'s {split} split", np.array(self.images.targets, np.int64), self.images.classes)

    def fingerprint(self) -> str:
        return str(self.root)  # the content is fixed

    def path(self, i: int) -> str:
        return f"image {i} of {self.root}"

    def load(self, i: int) -> tuple[np.ndarray, int]:
        img, _ = self.images[i]
        return np.array(img), int(self.labels[i])
