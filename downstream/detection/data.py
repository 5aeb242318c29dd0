"""Images with boxes and masks: a COCO-style JSON file and a folder of images, and their transforms."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import clip_boxes_to_image, masks_to_boxes

from downstream.common import scaled_size
from downstream.detection.annotations import read_coco
from downstream.detection.masks import decode_mask
from util.addressed import AUGMENT, addressed_numbers
from util.data.images import AS_RGB, ImageError, ImageFiles, Reading
from util.data.invalid_pixels import resize_valid
from util.data.pixel_format import Header
from util.data.transforms import Size, mirror, resize
from util.text import list_shares

Category = tuple[int, str]  # (id, name)
DetectionBatch = Sequence[Any]  # of `PadAndStack`


class Annotation(NamedTuple):
    """An annotated object of an image."""

    box: list[float]  # [x1, y1, x2, y2] inside the image
    label: int  # from 1
    segmentation: Any  # polygons, a run-length code, or None


class DetectionSample(NamedTuple):
    """A transformed image and its objects."""

    img: Tensor  # [C, h, w]
    boxes: Tensor  # float [n, 4]
    labels: Tensor  # int64 [n]
    masks: Tensor  # uint8 [n, h, w]; [0, h, w] without masks


class CocoImages(ImageFiles):
    """The images of a COCO-style JSON file. `load(i)` returns ([H, W, C], 0), `annotations(i)` its objects.

    Crowds, and boxes without area inside the image, are left out. Objects on invalid pixels are kept as they are
    annotated. training: leave out images without objects, too, as detectron2 does. `notes` says how many.

    categories: in the order of the ids. A label is a category's place in it, counted from 1.
    num_objects, num_masks: how many objects there are, and how many of them have a segmentation.

    ValueError for a file that `read_coco` refuses or that has no objects. ImageError, from `check` and `load`, if an
    image is missing, unreadable or of another size than in the file.
    """

    def __init__(
        self,
        json_path: str | Path,
        image_root: str | Path,
        training: bool,
        reading: Reading = AS_RGB,
    ) -> None:
        self.json_path = Path(json_path)
        content = read_coco(self.json_path)
        self.categories: list[Category] = []
        for category in sorted(content["categories"], key=itemgetter("id")):
            self.categories.append((category["id"], str(category.get("name", category["id"]))))
        annotated = group_by_image(content, self.categories)
        objects = list(chain.from_iterable(annotated.values()))
        self.num_objects = len(objects)
        self.num_masks = sum(annotation.segmentation is not None for annotation in objects)
        if not objects:
            raise ValueError(f"{str(json_path)!r} has no image with an object")
        images = sorted(content["images"], key=itemgetter("id"))
        notes = []
        if training:
            with_objects = [image for image in images if annotated[image["id"]]]
            num_without = len(images) - len(with_objects)
            num_left_out = len(content["annotations"]) - len(objects)
            if num_without or num_left_out:
                notes.append(f"left out of training: {num_left_out} objects, {num_without} images")
            images = with_objects
        samples = [(image["file_name"], 0) for image in images]
        super().__init__(image_root, samples, classes=[], notes=notes, reading=reading)
        if not training:
            self.num_checked = len(images)  # an evaluation fails after hours
        self.ids = np.array([image["id"] for image in images], np.int64)
        sizes = [(image["height"], image["width"]) for image in images]
        self.sizes = np.array(sizes, np.int64)
        # Bytes in one array, which forked workers share.
        encoded = [json.dumps(annotated[image["id"]]).encode() for image in images]
        self.ends = np.cumsum([len(text) for text in encoded])
        self.bytes = np.frombuffer(b"".join(encoded), np.uint8)

    def describe_targets(self) -> list[str]:
        """Returns the shares of the categories."""
        counts = Counter({name: 0 for _, name in self.categories})
        for i in range(len(self)):
            for annotation in self.annotations(i):
                counts[self.categories[annotation.label - 1][1]] += 1
        return [f"{self.num_objects} objects, {self.num_masks} with a mask: {list_shares(counts)}"]

    def read_header(self, i: int) -> Header:
        pixels, size = super().read_header(i)
        self.refuse_size(i, size)
        return pixels, size

    def refuse_size(self, i: int, size: Size) -> None:
        """ImageError unless image i has the (height, width) `size` in the JSON file."""
        height, width = self.sizes[i].tolist()
        if size != (height, width):
            raise ImageError(
                f"{self.path(i)!r} has {size[1]} x {size[0]} pixels, but {width} x {height} in "
                f"{str(self.json_path)!r} (EXIF orientations are ignored)"
            )

    def annotations(self, i: int) -> list[Annotation]:
        """Returns the objects of image i."""
        start = 0
        if i > 0:
            start = int(self.ends[i - 1])
        stored = json.loads(self.bytes[start : self.ends[i]].tobytes())
        return [Annotation(*values) for values in stored]

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all names, objects and categories."""
        digest = hashlib.sha256(super().fingerprint().encode())
        digest.update(json.dumps(self.categories).encode())
        digest.update(self.bytes.tobytes())
        return digest.hexdigest()

    def load(self, i: int) -> tuple[np.ndarray, int]:
        img, label = super().load(i)
        self.refuse_size(i, img.shape[:2])
        return img, label


def group_by_image(content: Mapping[str, Any], categories: Sequence[Category]) -> dict[int, list[Annotation]]:
    """Returns the annotations of each image in a checked COCO file, by the images' ids.

    Without crowds, and without boxes that have no area inside their image.
    """
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    label_of = {category_id: label for label, (category_id, _) in enumerate(categories, 1)}
    grouped: dict[int, list[Annotation]] = {image_id: [] for image_id in sizes}
    for entry in content["annotations"]:
        image_id = entry["image_id"]
        box = clip_box(entry["bbox"], sizes[image_id])
        if box is not None and not entry.get("iscrowd"):
            annotation = Annotation(box, label_of[entry["category_id"]], entry.get("segmentation") or None)
            grouped[image_id].append(annotation)
    return grouped


def clip_box(box: Sequence[float], size: Size) -> list[float] | None:
    """Returns the part of a box [x, y, width, height] inside an image as [x1, y1, x2, y2]; None if it has no area."""
    x, y, width, height = box
    x1 = max(0.0, x)
    y1 = max(0.0, y)
    x2 = min(float(size[1]), x + width)
    y2 = min(float(size[0]), y + height)
    if x2 > x1 and y2 > y1:
        return [x1, y1, x2, y2]
    return None


# -------------------------------------------------------------------------------------------------------- transforms


@dataclass(frozen=True)
class FlipResizeCrop:
    """A flip, a resize from the (height, width) `before` to `resized`, then a crop; for pixels, boxes and masks."""

    before: Size
    resized: Size
    flip: bool
    rows: range
    columns: range

    def move_image(self, img: Tensor) -> Tensor:
        """Returns the crop of [C, H, W]."""
        if self.flip:
            img = mirror(img)
        img = resize(img, self.resized, "bilinear")
        rows = slice(self.rows.start, self.rows.stop)
        columns = slice(self.columns.start, self.columns.stop)
        return img[:, rows, columns].contiguous()

    def move_points(self, points: Tensor) -> Tensor:
        """Returns where points [..., (x, y)] of the image are in the crop."""
        height, width = self.before
        new_height, new_width = self.resized
        x, y = points.unbind(-1)
        if self.flip:
            x = width - x
        x = x * new_width / width - self.columns.start
        y = y * new_height / height - self.rows.start
        return torch.stack([x, y], dim=-1)

    def move_boxes(self, boxes: Tensor) -> Tensor:
        """Returns what the crop shows of boxes [n, 4]. Those outside have no area."""
        corners = self.move_points(boxes.unflatten(1, (2, 2)))
        corners = corners.sort(dim=1).values  # a flip has exchanged left and right
        return clip_boxes_to_image(corners.flatten(1), (len(self.rows), len(self.columns)))

    def move_mask(self, segmentation: Any) -> Tensor:
        """Returns what the crop shows of an object's mask, uint8 [rows, columns].

        Polygons are moved, then drawn at the size of the crop, as in detectron2. Of run-length codes, the nearest
        pixels are taken.
        """
        if isinstance(segmentation, list):
            moved = []
            for polygon in segmentation:
                points = torch.tensor(polygon, dtype=torch.float64).view(-1, 2)
                points = self.move_points(points)
                moved.append(points.flatten().tolist())
            return torch.from_numpy(decode_mask(moved, len(self.rows), len(self.columns)))
        height, width = self.before
        new_height, new_width = self.resized
        rows = nearest(self.rows, height, new_height)
        columns = nearest(self.columns, width, new_width)
        if self.flip:
            columns = width - 1 - columns
        mask = torch.from_numpy(decode_mask(segmentation, height, width))
        return mask[rows][:, columns]


def nearest(places: range, source: int, target: int) -> Tensor:
    """Returns the source pixel at the centre of each of the target pixels `places` on an axis, int64."""
    centres = torch.arange(places.start, places.stop, dtype=torch.float64) + 0.5
    return (centres * source / target).long()


def boxes_of_masks(masks: Tensor) -> Tensor:
    """Returns the tight box [x1, y1, x2, y2] of each mask [n, H, W], float [n, 4]. Every mask must have a pixel."""
    boxes = masks_to_boxes(masks)  # from the first to the last pixel
    boxes[:, 2:] += 1
    return boxes


class LargeScaleJitter:
    """Large-scale jitter (Ghiasi et al., CVPR 2021), drawn from the sample's address.

    A flip; a resize, so that the longer side has `side` times U(scale_range) pixels; a random crop of at most `side`
    pixels. With masks, boxes are those of the cropped masks. Objects that the crop does not show are dropped. The
    result is not padded. It is float32 if pixels may be invalid, with NaN at those that are.

    images: the objects' source. masks: return masks, too.
    """

    respects_invalid = True

    def __init__(
        self,
        images: CocoImages,
        side: int,
        seed: int,
        scale_range: Sequence[float] = (0.1, 2.0),
        masks: bool = True,
        hflip: bool = True,
    ) -> None:
        self.images = images
        self.side = side
        self.seed = seed
        self.scale_range = scale_range
        self.masks = masks
        self.hflip = hflip

    def __call__(self, img: Tensor, epoch: int, index: int) -> DetectionSample:
        """Augments [C, H, W], image number `index`."""
        height, width = img.shape[1:]
        crop = self.draw_crop((height, width), epoch, index)
        img = resize_valid(crop.move_image, img)
        if self.images.pixel_format.has_invalid:
            img = img.float()
        annotations = self.images.annotations(index)
        labels = torch.tensor([annotation.label for annotation in annotations])
        if self.masks:
            masks = torch.stack([crop.move_mask(annotation.segmentation) for annotation in annotations])
            is_shown = masks.flatten(1).amax(dim=1) > 0
            masks = masks[is_shown]
            return DetectionSample(img, boxes_of_masks(masks), labels[is_shown], masks)
        boxes = torch.tensor([annotation.box for annotation in annotations])
        boxes = crop.move_boxes(boxes)
        x1, y1, x2, y2 = boxes.unbind(1)
        is_shown = (x2 > x1) & (y2 > y1)
        no_masks = torch.zeros(0, *img.shape[1:], dtype=torch.uint8)
        return DetectionSample(img, boxes[is_shown], labels[is_shown], no_masks)

    def draw_crop(self, before: Size, epoch: int, index: int) -> FlipResizeCrop:
        """Draws what is done to an image of the (height, width) `before`."""
        u_flip, u_scale, u_top, u_left = addressed_numbers(AUGMENT, self.seed, epoch, index, 4)
        low, high = self.scale_range
        scale = low + u_scale * (high - low)
        height, width = scaled_size(before, self.side * scale)
        return FlipResizeCrop(
            before,
            resized=(height, width),
            flip=self.hflip and u_flip < 0.5,
            rows=self.place_crop(u_top, height),
            columns=self.place_crop(u_left, width),
        )

    def place_crop(self, u: float, length: int) -> range:
        """Returns the rows or columns of a crop. u: uniform in [0, 1)."""
        start = round(u * max(0, length - self.side))
        end = min(length, start + self.side)
        return range(start, end)


class ResizeForDetection:
    """Resizes an image for evaluation, so that its longer side has `side` pixels."""

    respects_invalid = True

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, img: Tensor, epoch: int = 0, index: int = 0) -> tuple[Tensor, Size]:
        """Returns ([C, h, w], (H, W)) of [C, H, W]."""
        before = (img.shape[1], img.shape[2])
        size = scaled_size(before, self.side)
        return resize_valid(partial(resize, size=size, interpolation="bilinear"), img).contiguous(), before


def pad_to_side(x: Tensor, side: int) -> Tensor:
    """Pads [..., h, w] with zeros at the bottom and the right to `side` pixels."""
    height, width = x.shape[-2:]
    return F.pad(x, (0, side - width, 0, side - height))


class PadAndStack:
    """Collates training samples of different sizes: pads them to `side` pixels.

    Returns (imgs [B, C, side, side], list of sizes (height, width), list of numbers of objects, and of all images
    together boxes [T, 4], labels [T], masks uint8 [T, side, side]). The lists stay on the host.
    """

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, samples: Sequence[tuple]) -> DetectionBatch:
        transformed: list[DetectionSample] = [sample[0] for sample in samples]
        sizes = [tuple(sample.img.shape[-2:]) for sample in transformed]
        counts = [len(sample.labels) for sample in transformed]
        imgs = torch.stack([pad_to_side(sample.img, self.side) for sample in transformed])
        boxes = torch.cat([sample.boxes for sample in transformed])
        labels = torch.cat([sample.labels for sample in transformed])
        masks = torch.cat([pad_to_side(sample.masks, self.side) for sample in transformed])
        return imgs, sizes, counts, boxes, labels, masks
