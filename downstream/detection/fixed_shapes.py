"""Detection with results of fixed shapes, which torch.export needs: what is not kept gets the score 0."""

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import clip_boxes_to_image, nms

from downstream.detection.data import pad_to_side
from downstream.detection.models import Detector
from util.data.transforms import Size

# Two boxes that overlap with none. nms always keeps them, because torch.export takes results to be longer than one.
OUTSIDE = ((-9.0, -9.0, -8.0, -8.0), (-19.0, -19.0, -18.0, -18.0))


class FixedShapes(nn.Module):
    """A detector of Mask R-CNN or Faster R-CNN for one image, with its results in eval mode.

    `model(imgs)` returns {"boxes": [n, 4], "scores": [n], "labels": [n], "masks": [n, 28, 28]}, see `DetectedBoxes`,
    with falling scores. imgs: one normalised image [1, C, h, w], whose sides are at most the detector's.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, imgs: Tensor) -> dict[str, Tensor]:
        model = self.detector
        size = (imgs.shape[2], imgs.shape[3])
        padded = pad_to_side(imgs, model.img_size[0])
        maps = model.pyramid(model.backbone(padded))
        proposals, is_proposal = self.propose(padded, maps, size)
        return self.detect(maps[:4], proposals, is_proposal, size)

    def propose(self, padded: Tensor, maps: list[Tensor], size: Size) -> tuple[Tensor, Tensor]:
        """Returns (boxes [R, 4], which of them are proposals [R]), as torchvision's RegionProposalNetwork does."""
        rpn = self.detector.rpn
        objectness, offsets = rpn.head(maps)
        anchors = rpn.anchor_generator(ImageList(padded, [size]), maps)
        counts = [level[0].numel() for level in objectness]
        logits, offsets = concat_box_prediction_layers(objectness, offsets)
        boxes = rpn.box_coder.decode(offsets, anchors)[:, 0]
        boxes = clip_boxes_to_image(boxes, size)
        boxes_of_levels = []
        scores_of_levels = []
        for level_boxes, level_logits in zip(boxes.split(counts), logits[:, 0].split(counts), strict=True):
            best, index = level_logits.topk(min(rpn.pre_nms_top_n(), len(level_logits)))
            scores = best.sigmoid()
            candidates = level_boxes[index]
            is_kept = suppress(candidates, scores, is_larger(candidates, rpn.min_size), rpn.nms_thresh)
            boxes_of_levels.append(candidates)
            scores_of_levels.append(torch.where(is_kept, scores, -1))
        scores = torch.cat(scores_of_levels)
        scores, index = scores.topk(min(rpn.post_nms_top_n(), len(scores)))
        is_proposal = scores >= 0
        return torch.where(is_proposal[:, None], torch.cat(boxes_of_levels)[index], 0), is_proposal

    def detect(self, maps: list[Tensor], proposals: Tensor, is_proposal: Tensor, size: Size) -> dict[str, Tensor]:
        """Returns the detections, as torchvision's RoIHeads does."""
        heads = self.detector.roi_heads
        logits, offsets = heads.predict_boxes(maps, [proposals])
        boxes = clip_boxes_to_image(heads.box_coder.decode(offsets, [proposals]), size)[:, 1:]  # [R, K, 4]
        scores = logits.softmax(dim=1)[:, 1:]
        is_likely = is_proposal[:, None] & (scores > heads.score_thresh) & is_larger(boxes, 0.01)
        num_classes = scores.shape[1]
        places = torch.arange(num_classes, device=boxes.device) * (1.0 + self.detector.img_size[0])
        apart = boxes + places[:, None]  # those of two classes do not overlap
        scores = scores.flatten()
        is_kept = suppress(apart.flatten(0, 1), scores, is_likely.flatten(), heads.nms_thresh)
        scores, index = torch.where(is_kept, scores, 0).topk(min(heads.detections_per_img, len(scores)))
        labels = index % num_classes + 1
        detections = {"boxes": boxes.flatten(0, 1)[index], "scores": scores, "labels": labels}
        if heads.has_mask():
            detections["masks"] = heads.predict_masks(maps, [detections["boxes"]], labels).sigmoid()
        return detections


def is_larger(boxes: Tensor, min_size: float) -> Tensor:
    """Whether both sides of boxes [..., 4] are at least `min_size`."""
    return (boxes[..., 2:] - boxes[..., :2] >= min_size).all(dim=-1)


def suppress(boxes: Tensor, scores: Tensor, is_candidate: Tensor, threshold: float) -> Tensor:
    """Returns which candidates among boxes [n, 4] non-maximum suppression keeps, bool [n]."""
    outside = boxes.new_tensor(OUTSIDE)
    boxes = torch.cat([outside, torch.where(is_candidate[:, None], boxes, outside[0])])
    scores = torch.cat([scores.new_full((2,), 2.0), scores])  # the first of all
    kept = nms(boxes, scores, threshold)
    is_kept = torch.zeros_like(scores, dtype=torch.bool).index_fill(0, kept, True)
    return is_kept[2:] & is_candidate
