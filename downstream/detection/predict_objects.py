"""Detected objects in images without annotations.

    OUT/detections.json      COCO's results: image_id, category_id, score, bbox and, from Mask R-CNN, segmentation
    OUT/images.json          the images (id, file_name, height, width) and categories, in COCO's format
    OUT/pictures/NAME.png    the likely objects of the first images; NAME with its own ending, such as a.jpg.png

pycocotools and others load both: `COCO("images.json").loadRes("detections.json")`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from downstream.detection.data import Category, ResizeForDetection
from downstream.detection.engine_detection import detect, finite_outputs
from downstream.detection.objects import DetectedObject, coco_results
from downstream.detection.pictures import draw_objects
from encoders.trained import Trained
from util.data.images import EncodedImages
from util.data.pictures import as_picture
from util.data.transforms import to_tensor
from util.evaluate.context import EvalContext
from util.evaluate.predictions import Results, name_of, output_paths, readable_batches, view_of_one
from util.pictures import save
from util.run.files.json_files import write_json


def choose_ids(images: EncodedImages, path: str | None) -> list[int]:
    """Returns the id of each image: its place, from 1, or that in a COCO-style JSON file.

    The file may have no annotations. ValueError if it has another format or lacks images.
    """
    if path is None:
        return list(range(1, 1 + len(images)))
    try:
        entries = json.loads(Path(path).read_bytes())["images"]
        known = {image["file_name"]: image["id"] for image in entries}
        return [known[name_of(images, i)] for i in range(len(images))]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--image_ids {path!r} is no JSON file with `images`, each with an `id` and a `file_name`: {error!r}"
        ) from error


class Detections:
    """Predicts and writes the objects of images. ids: of the images."""

    def __init__(
        self,
        trained: Trained,
        images: EncodedImages,
        out: Path,
        context: EvalContext,
        ids: Sequence[int],
        num_pictures: int = 0,
    ) -> None:
        self.model = trained.model.to(context.device)
        self.categories: Sequence[Category] = trained.settings["categories"]
        self.images = images
        self.out = out
        self.context = context
        self.ids = ids
        self.num_pictures = num_pictures
        self.picture_paths = output_paths(out / "pictures", images, lambda name: f"{Path(name).suffix}.png")
        self.results = Results(out, images)

    def missing(self) -> list[int]:
        return self.results.missing()

    @torch.no_grad()
    def write_missing(self) -> None:
        """Predicts the images that are missing, and writes both files. FloatingPointError if outputs are not finite."""
        side = self.model.img_size[0]
        view = ResizeForDetection(side)
        context = self.context.one_by_one()
        batches = readable_batches(self.images, view, self.missing(), context, view_of_one, (side, side))
        for (i,), (img, size) in batches:
            with finite_outputs(self.model, context.device):
                objects = detect(self.model, img, size, context)
            if i < self.num_pictures:
                self.write_picture(i, objects)
            results = coco_results(objects, self.ids[i], self.categories)
            self.results.add(i, {"size": list(size), "results": results})
        self.join()

    def write_picture(self, i: int, objects: Sequence[DetectedObject]) -> None:
        """Reads an image again, and writes a picture of its likely objects."""
        path = self.picture_paths[i]
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels, _ = self.images.load(i)
        picture = as_picture(to_tensor(pixels), self.context.normalize)
        save(draw_objects(picture, objects, self.categories), path)

    def join(self) -> None:
        """Writes the results of all images, and the images."""
        images = []
        results = []
        for i, found in self.results.by_index.items():
            image_id = self.ids[i]
            height, width = found["size"]
            images.append({"id": image_id, "file_name": name_of(self.images, i), "height": height, "width": width})
            for result in found["results"]:
                results.append({**result, "image_id": image_id})
        images.sort(key=lambda image: image["id"])
        results.sort(key=lambda result: result["image_id"])
        categories = [{"id": category, "name": name} for category, name in self.categories]
        write_json(self.out / "images.json", {"images": images, "annotations": [], "categories": categories})
        write_json(self.out / "detections.json", results)
