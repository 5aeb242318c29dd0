"""Images with boxes and masks: a COCO-style JSON file and a folder of images, and their transforms."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from downstream.common import scaled_size
from downstream.detection.annotations import read_coco
from downstream.detection.masks import decode_mask
from downstream.image_files import read_formats
from util.addressed import AUGMENT, addressed_numbers
from util.data.images import ImageError, ImageFiles, evenly_spaced
from util.data.transforms import Size, mirror, resize
from util.text import count_of, shorten

Batch = Sequence[Any]  # of `PadAndStack`

# Of an image: [C, h, w], boxes float [n, 4], labels int64 [n], masks uint8 [n, h, w].
DetectionSample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class CocoImages(ImageFiles):
    """The images of a COCO-style JSON file. `load(i)` returns ([H, W, C], 0), `annotations(i)` its objects.

    training: leave out crowds, boxes without area inside the image, and then images without objects, as detectron2
    does. `notes` says how many. Otherwise every image of the file is kept. in_chans: channels of the images; 3 are RGB
    of 8 bits.

    categories: [(id, name)] in the order of the ids. A label is a category's place in it, counted from 1.
    num_objects, num_masks: how many annotations are no crowds, and how many of them have a segmentation.

    ValueError if the file is missing, is not of this format, contradicts itself or has no objects. ImageError, from
    `check` and `load`, if an image is missing, unreadable or of another size than in the file.
    """

    def __init__(self, json_path: str | Path, image_root: str | Path, training: bool, in_chans: int = 3) -> None:
        self.json_path = Path(json_path)
        content = read_coco(self.json_path)
        if not Path(image_root).is_dir():
            raise ValueError(f"{str(image_root)!r}, the folder of the images of {str(json_path)!r}, does not exist")
        self.categories = sorted((c["id"], str(c.get("name", c["id"]))) for c in content["categories"])
        label_of = {category: label for label, (category, _) in enumerate(self.categories, 1)}
        objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in content["images"]}
        sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
        crowd, empty = "annotations of crowds", "boxes without area inside their image"
        ignored = {crowd: 0, empty: 0}
        for a in content["annotations"]:
            box = clip_box(a["bbox"], sizes[a["image_id"]])
            if training and a.get("iscrowd", 0):
                ignored[crowd] += 1
            elif training and box is None:
                ignored[empty] += 1
            else:
                found = {"box": box, "label": label_of[a["category_id"]], "crowd": int(a.get("iscrowd", 0))}
                objects[a["image_id"]].append(found | {"segmentation": a.get("segmentation") or None})
        images = sorted(content["images"], key=lambda image: image["id"])
        kept = [image for image in images if objects[image["id"]] or not training]
        notes = [f"{number} {what} ignored" for what, number in ignored.items() if number]
        if len(kept) < len(images):
            notes.append(f"{count_of(len(images) - len(kept), 'image')} without objects ignored")
        segmented = [bool(a["segmentation"]) for image in kept for a in objects[image["id"]] if not a["crowd"]]
        if not segmented:
            raise ValueError(f"{str(json_path)!r} has no image with an object")
        self.num_objects, self.num_masks = len(segmented), sum(segmented)
        super().__init__(image_root, [(image["file_name"], 0) for image in kept], [], notes, in_chans)
        self.ids = np.array([image["id"] for image in kept], np.int64)
        self.sizes = np.array([sizes[i] for i in self.ids.tolist()], np.int64)  # (height, width)
        # Bytes in one array, which forked workers share.
        parts = [json.dumps(objects[i]).encode() for i in self.ids.tolist()]
        self.ends = np.cumsum([len(part) for part in parts])
        self.bytes = np.frombuffer(b"".join(parts), np.uint8)

    def check(self, max_bad_fraction: float = 0.0, all_sizes: bool = False, rank: int = 0, world_size: int = 1) -> None:
        """Looks for all images in their folders, compares sizes with those in the JSON file, and formats.

        Each rank reads a share of the headers. With `all_sizes`, the ranks together read all headers, otherwise
        `num_checked` evenly spaced ones. ImageError if more than `max_bad_fraction` of them are bad, or if an image is
        missing.
        """
        if rank == 0:
            self.refuse_missing()
        number = len(self) if all_sizes else min(self.num_checked, len(self))
        spaced = evenly_spaced(len(self), number).tolist()
        formats = read_formats(self, self.refuse_size, spaced[rank::world_size], max_bad_fraction)
        super().check(max_bad_fraction)
        self.one_format({self.pixel_format: 0} | formats)

    def refuse_missing(self) -> None:
        """ImageError if images are not in their folder."""
        names = [os.fsdecode(name) for name in self.names.tolist()]
        listed: set[str] = set()
        for folder in {os.path.dirname(name) for name in names}:
            path = os.path.join(self.root, folder)
            listed.update(os.path.join(folder, name) for name in (os.listdir(path) if os.path.isdir(path) else []))
        # A file may have another spelling in the listing, for example on file systems that ignore case.
        missing = [n for n in names if n not in listed and not os.path.exists(os.path.join(self.root, n))]
        if missing:
            raise ImageError(
                f"{len(missing)} of {len(names)} images of {str(self.json_path)!r} are not in {str(self.root)!r}: "
                f"{shorten(missing)}"
            )

    def refuse_size(self, i: int, size: Size) -> None:
        """ImageError unless image i has the (height, width) `size` in the JSON file."""
        height, width = self.sizes[i].tolist()
        if size != (height, width):
            hint = (
                "; its EXIF orientation, if it has one, is ignored: save it upright" if size == (width, height) else ""
            )
            raise ImageError(
                f"{self.path(i)!r} has {size[1]} x {size[0]} pixels, but {width} x {height} in "
                f"{str(self.json_path)!r}{hint}"
            )

    def annotations(self, i: int) -> list[dict[str, Any]]:
        """Returns the objects of image i: box [x1, y1, x2, y2] inside the image or None, label, crowd, segmentation."""
        start = int(self.ends[i - 1]) if i else 0
        return json.loads(self.bytes[start : self.ends[i]].tobytes())

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


def clip_box(box: Sequence[float], size: Size) -> list[float] | None:
    """Returns the part of a box [x, y, width, height] inside an image as [x1, y1, x2, y2]; None if it has no area."""
    x1, y1 = max(0.0, box[0]), max(0.0, box[1])
    x2, y2 = min(float(size[1]), box[0] + box[2]), min(float(size[0]), box[1] + box[3])
    return [x1, y1, x2, y2] if x2 > x1 and y2 > y1 else None


# -------------------------------------------------------------------------------------------------------- transforms


def nearest(places: range, source: int, target: int) -> torch.Tensor:
    """Returns the source pixel at the centre of each of the target pixels `places` on an axis, int64."""
    centres = (torch.arange(places.start, places.stop, dtype=torch.float64) + 0.5) * source / target
    return centres.long().clamp(max=source - 1)


def boxes_of_masks(masks: torch.Tensor) -> torch.Tensor:
    """Returns the tight box [x1, y1, x2, y2] of each mask [n, H, W], float [n, 4]. Every mask must have a pixel."""
    boxes = torch.zeros(len(masks), 4)
    for box, mask in zip(boxes, masks, strict=True):
        rows, columns = mask.any(dim=1).nonzero()[:, 0], mask.any(dim=0).nonzero()[:, 0]
        box[:] = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    return boxes


class LargeScaleJitter:
    """Large-scale jitter (Ghiasi et al., CVPR 2021), drawn from the sample's address.

    A flip; a resize, so that the longer side has `side` times U(scale_range) pixels; a random crop of at most `side`
    pixels. With masks, boxes are those of the cropped masks. Objects that the crop does not show are dropped. The
    result is not padded.

    images: the objects' source. masks: return masks, too.
    """

    def __init__(
        self, images: CocoImages, side: int, seed: int, scale_range: Sequence[float] = (0.1, 2.0), masks: bool = True
    ) -> None:
        self.images, self.side, self.seed, self.scale_range, self.masks = images, side, seed, scale_range, masks

    def __call__(self, img: torch.Tensor, epoch: int, index: int) -> DetectionSample:
        """Augments [C, H, W], image number `index`."""
        u_flip, u_scale, u_top, u_left = addressed_numbers(AUGMENT, self.seed, epoch, index, 4)
        flip = u_flip < 0.5
        low, high = self.scale_range
        before: Size = (img.shape[1], img.shape[2])
        size = scaled_size(before, self.side * (low + u_scale * (high - low)))
        top, left = (round(u * max(0, s - self.side)) for u, s in zip((u_top, u_left), size, strict=True))
        rows, columns = range(top, min(size[0], top + self.side)), range(left, min(size[1], left + self.side))
        img = resize(mirror(img) if flip else img, size, "bilinear")
        img = img[:, top : rows.stop, left : columns.stop].contiguous()
        objects = self.images.annotations(index)
        labels = torch.tensor([a["label"] for a in objects], dtype=torch.int64)
        if not self.masks:
            boxes = crop_boxes(torch.tensor([a["box"] for a in objects]), before, size, flip, rows, columns)
            keep = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
            return img, boxes[keep], labels[keep], torch.zeros(0, *img.shape[1:], dtype=torch.uint8)
        codes = [a["segmentation"] for a in objects]
        masks = torch.stack([crop_mask(code, before, size, flip, rows, columns) for code in codes])
        keep = (masks > 0).flatten(1).any(dim=1)
        return img, boxes_of_masks(masks[keep]), labels[keep], masks[keep]


def crop_boxes(boxes: torch.Tensor, before: Size, size: Size, flip: bool, rows: range, columns: range) -> torch.Tensor:
    """Returns boxes [n, 4] of an image of size `before` after a flip, a resize to `size` and a crop."""
    corners = move_points(boxes.reshape(-1, 2, 2), before, size, flip, rows, columns)
    x, y = (values.sort(dim=1).values for values in corners.unbind(2))  # a flip has exchanged left and right
    x, y = x.clamp(0, len(columns)), y.clamp(0, len(rows))
    return torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], dim=1)


def move_points(
    points: torch.Tensor, before: Size, size: Size, flip: bool, rows: range, columns: range
) -> torch.Tensor:
    """Returns points [..., (x, y)] of an image of size `before` after a flip, a resize to `size` and a crop."""
    x, y = points.unbind(-1)
    x = before[1] - x if flip else x
    return torch.stack([x * size[1] / before[1] - columns.start, y * size[0] / before[0] - rows.start], dim=-1)


def crop_mask(code: Any, before: Size, size: Size, flip: bool, rows: range, columns: range) -> torch.Tensor:
    """Returns an object's mask after a flip, a resize to `size` and a crop, uint8 [rows, columns].

    code: its segmentation in an image of size `before`. Polygons are moved, then drawn at the size of the crop, as in
    detectron2. Of run-length codes, the nearest pixels are taken.
    """
    if isinstance(code, list):
        points = (torch.tensor(polygon, dtype=torch.float64).view(-1, 2) for polygon in code)
        moved = [move_points(part, before, size, flip, rows, columns).flatten().tolist() for part in points]
        return torch.from_numpy(decode_mask(moved, len(rows), len(columns)))
    down, across = nearest(rows, before[0], size[0]), nearest(columns, before[1], size[1])
    across = before[1] - 1 - across if flip else across
    return torch.from_numpy(decode_mask(code, *before))[down][:, across]


class ResizeForDetection:
    """Resizes an image, so that its longer side has `side` pixels."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, img: torch.Tensor, epoch: int = 0, index: int = 0) -> DetectionSample:
        """Returns [C, h, w] of [C, H, W], and no objects."""
        img = resize(img, scaled_size((img.shape[1], img.shape[2]), self.side), "bilinear").contiguous()
        masks = torch.zeros(0, *img.shape[1:], dtype=torch.uint8)
        return img, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), masks


class PadAndStack:
    """Collates samples of different sizes: pads them at the bottom and the right to `side` pixels.

    Returns (imgs [B, C, side, side], list of sizes (height, width), list of numbers of objects, and of all images
    together boxes [T, 4], labels [T], masks uint8 [T, side, side]). The lists stay on the host.
    """

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, samples: Sequence[tuple]) -> Batch:
        imgs, boxes, labels, masks = zip(*(sample[0] for sample in samples), strict=True)
        sizes: list[Size] = [(img.shape[-2], img.shape[-1]) for img in imgs]
        counts = [len(part) for part in labels]
        padded = torch.stack([self.pad(img) for img in imgs])
        return padded, sizes, counts, torch.cat(boxes), torch.cat(labels), torch.cat([self.pad(m) for m in masks])

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pads [..., h, w] with zeros."""
        return torch.nn.functional.pad(x, (0, self.side - x.shape[-1], 0, self.side - x.shape[-2]))
