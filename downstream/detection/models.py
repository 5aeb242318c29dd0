"""Mask R-CNN and Faster R-CNN on ViTDet's backbone, from torchvision's parts.

Torchvision differs from detectron2, in which the published numbers were made. Here its RoIAlign is the aligned one, box
losses are L1, mask targets are binary and aligned, and all box arithmetic is in float32 under autocast, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import roi_align

from downstream.common import SIZES, encoder_options
from downstream.detection.backbone import SimpleFeaturePyramid, ViTDet

BOX_GRID = 7  # side of the features of a box
MASK_GRID = 14  # side of the features of a mask, which has twice as many pixels

Target = dict[str, Tensor]  # boxes [n, 4], labels int64 [n] from 1 on, masks uint8 [n, H, W]
DetectedBoxes = dict[str, Tensor]  # boxes [n, 4], labels [n], scores [n], masks [n, 28, 28]: probabilities in a box


class RPNHeadInFloat32(RPNHead):
    """Torchvision's RPN head, whose outputs are float32 under autocast, too."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, boxes = super().forward(x)
        return [value.float() for value in logits], [value.float() for value in boxes]


class RegionProposalNetworkL1(RegionProposalNetwork):
    """Torchvision's RPN with an L1 loss of boxes."""

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Returns (loss of the objectness, loss of the boxes), both divided by the number of sampled anchors."""
        is_positive, is_negative = self.fg_bg_sampler(labels)  # for each image
        positive = torch.cat(is_positive).nonzero()[:, 0]
        negative = torch.cat(is_negative).nonzero()[:, 0]
        sampled = torch.cat([positive, negative])
        logits = objectness.flatten()[sampled]
        is_object = torch.cat(labels)[sampled]
        loss = F.binary_cross_entropy_with_logits(logits, is_object)
        targets = torch.cat(regression_targets)[positive]
        box_loss = F.l1_loss(pred_bbox_deltas[positive], targets, reduction="sum")
        return loss, box_loss / len(sampled)


class AlignedRoIPool(nn.Module):
    """RoIAlign without the half-pixel shift, on the level that fits the area of a box.

    size: side of the result. patch_size: stride of the third level. A box of 14 patches belongs to that level.
    """

    def __init__(self, size: int, patch_size: int) -> None:
        super().__init__()
        self.size = size
        self.patch_size = patch_size

    def forward(self, maps: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """Returns [R, C, size, size]. maps: four levels, float32 [B, C, h, w]. boxes: of each image, in pixels."""
        numbered = []
        for i, box in enumerate(boxes):
            number = torch.full_like(box[:, :1], i)
            numbered.append(torch.cat([number, box], dim=1))
        rois = torch.cat(numbered)
        _, x1, y1, x2, y2 = rois.unbind(1)
        areas = (x2 - x1) * (y2 - y1)
        sides = areas.clamp(min=0).sqrt()
        levels = 2 + torch.log2(sides / (14 * self.patch_size) + 1e-8)
        levels = levels.floor().clamp(0, len(maps) - 1)
        out = rois.new_zeros(len(rois), maps[0].shape[1], self.size, self.size)
        for level, features in enumerate(maps):
            is_on_level = levels == level
            out = out + roi_align(  # of an empty box 0, at no cost
                features,
                torch.where(is_on_level[:, None], rois, 0),
                self.size,
                spatial_scale=2.0 ** (2 - level) / self.patch_size,
                aligned=True,
            )
        return out


class RoIHeadsL1(RoIHeads):
    """Torchvision's heads with the losses and the mask targets of detectron2."""

    def forward(self, maps: list[Tensor], proposals: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        """Returns the losses of training."""
        boxes, matched, labels_of_image, offset_targets = self.select_training_samples(proposals, targets)
        logits, offsets = self.predict_boxes(maps, boxes)
        labels = torch.cat(labels_of_image)
        positive = (labels > 0).nonzero()[:, 0]
        positive_labels = labels[positive]
        predicted = offsets.unflatten(1, (-1, 4))[positive, positive_labels]
        expected = torch.cat(offset_targets)[positive]
        box_loss = F.l1_loss(predicted, expected, reduction="sum")
        losses = {
            "class": F.cross_entropy(logits, labels),
            "box": box_loss / len(labels),
        }
        if self.has_mask():
            positive_boxes = []
            mask_targets = []
            for target, box, index, label in zip(targets, boxes, matched, labels_of_image, strict=True):
                is_positive = label > 0
                positive_boxes.append(box[is_positive])
                mask_targets.append(crop_masks(target["masks"], box[is_positive], index[is_positive]))
            masks = self.predict_masks(maps, positive_boxes, positive_labels)
            mask_loss = F.binary_cross_entropy_with_logits(masks, torch.cat(mask_targets), reduction="sum")
            losses["mask"] = mask_loss / max(1, masks.numel())
        return losses

    def predict_boxes(self, maps: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns (class logits [R, 1 + K], box offsets [R, 4 (1 + K)]), float32. Class 0 is the background."""
        features = self.box_roi_pool(maps, boxes)
        logits, offsets = self.box_predictor(self.box_head(features))
        return logits.float(), offsets.float()

    def predict_masks(self, maps: list[Tensor], boxes: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Returns the logits of masks of the classes `labels` [R] in the boxes, float32 [R, 28, 28]."""
        features = self.mask_roi_pool(maps, boxes)
        logits = self.mask_predictor(self.mask_head(features)).float()
        numbers = torch.arange(len(labels), device=labels.device)
        return logits[numbers, labels]

    def detect(self, maps: list[Tensor], proposals: list[Tensor], sizes: list[tuple[int, int]]) -> list[DetectedBoxes]:
        """Returns the detections of each image."""
        logits, offsets = self.predict_boxes(maps, proposals)
        boxes, scores, labels = self.postprocess_detections(logits, offsets, proposals, sizes)
        detections = []
        for image_boxes, image_scores, image_labels in zip(boxes, scores, labels, strict=True):
            detections.append({"boxes": image_boxes, "scores": image_scores, "labels": image_labels})
        if self.has_mask():
            masks = self.predict_masks(maps, boxes, torch.cat(labels)).sigmoid()
            counts = [len(image_labels) for image_labels in labels]
            for detected, image_masks in zip(detections, masks.split(counts), strict=True):
                detected["masks"] = image_masks
        return detections


def crop_masks(masks: Tensor, boxes: Tensor, index: Tensor) -> Tensor:
    """Returns what the boxes [P, 4] show of the masks [n, H, W] with numbers `index` [P], float 0 or 1 [P, 28, 28].

    A cell is 1 if at least half of it is inside the mask.
    """
    numbers = index.unsqueeze(1).to(boxes)
    rois = torch.cat([numbers, boxes], dim=1)
    maps = masks.unsqueeze(1).to(boxes)
    shares = roi_align(maps, rois, 2 * MASK_GRID, aligned=True).squeeze(1)
    is_inside = shares >= 0.5
    return is_inside.float()


class Detector(nn.Module):
    """Mask R-CNN on a ViT; without `masks`, Faster R-CNN.

    num_classes: without the background. channels: of the pyramid and the heads. num_rois: boxes of an image that are
    sampled for the losses of the heads. options: arguments of `ViTDet`. Anchors have 8 times the stride of their level:
    32 to 512 pixels for patches of 16.
    """

    def __init__(
        self,
        num_classes: int,
        masks: bool = True,
        channels: int = 256,
        num_rois: int = 512,
        **options: Any,
    ) -> None:
        super().__init__()
        self.backbone = ViTDet(**options)
        self.img_size = self.backbone.img_size
        self.patch_size = self.backbone.patch_size
        self.pyramid = SimpleFeaturePyramid(self.backbone.embed_dim, channels)
        sides = tuple((self.patch_size * 2**level,) for level in (1, 2, 3, 4, 5))
        anchors = AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * len(sides))
        self.rpn = RegionProposalNetworkL1(
            anchors,
            RPNHeadInFloat32(channels, anchors.num_anchors_per_location()[0], conv_depth=2),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2000, "testing": 1000},
            post_nms_top_n={"training": 1000, "testing": 1000},
            nms_thresh=0.7,
        )
        self.roi_heads = RoIHeadsL1(
            AlignedRoIPool(BOX_GRID, self.patch_size),
            FastRCNNConvFCHead(
                (channels, BOX_GRID, BOX_GRID),
                conv_layers=[channels] * 4,
                fc_layers=[4 * channels],
                norm_layer=LayerNorm2d,
            ),
            FastRCNNPredictor(4 * channels, 1 + num_classes),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=num_rois,
            positive_fraction=0.25,
            bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=100,
        )
        if masks:
            self.roi_heads.mask_roi_pool = AlignedRoIPool(MASK_GRID, self.patch_size)
            self.roi_heads.mask_head = MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=LayerNorm2d)
            self.roi_heads.mask_predictor = MaskRCNNPredictor(channels, channels, 1 + num_classes)
        self.init_predictors()

    def init_predictors(self) -> None:
        """Initialises the last layers and the fully connected one as detectron2 does."""
        heads = self.roi_heads
        init_normal(heads.box_predictor.cls_score, 0.01)
        init_normal(heads.box_predictor.bbox_pred, 0.001)
        if heads.has_mask():
            init_normal(heads.mask_predictor.mask_fcn_logits, 0.001)
            nn.init.zeros_(heads.mask_predictor.conv5_mask.bias)
        for layer in heads.box_head:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, a=1)
                nn.init.zeros_(layer.bias)

    def forward(self, imgs: Tensor, sizes: list[tuple[int, int]], targets: list[Target] | None = None) -> Any:
        """Returns {name: loss} in training, the DetectedBoxes of each image in eval mode, in pixels of `imgs`.

        imgs: [B, C, S, S], normalised, then padded with zeros at the bottom and the right. sizes: (height, width) of
        each image without the padding.
        """
        maps = self.pyramid(self.backbone(imgs))
        proposals, rpn_losses = self.rpn(ImageList(imgs, sizes), dict(enumerate(maps)), targets)
        if not self.training:
            return self.roi_heads.detect(maps[:4], proposals, sizes)
        return {
            "objectness": rpn_losses["loss_objectness"],
            "rpn_box": rpn_losses["loss_rpn_box_reg"],
            **self.roi_heads(maps[:4], proposals, targets),
        }

    def param_groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Returns parameter groups with `lr_scale` = layer_decay ** (layers above), as in detectron2's ViTDet.

        Layers: patches and positions, each block, everything else. Only the blocks' norms and the position table have
        no weight decay.
        """
        top = len(self.backbone.blocks) + 1
        groups: dict[tuple[int, float], dict[str, Any]] = {}
        for name, parameter in self.named_parameters():
            layer = top
            if name.startswith("backbone.blocks."):
                layer = int(name.split(".")[2]) + 1
            elif name.startswith("backbone."):
                layer = 0
            decay = weight_decay
            if name == "backbone.pos_embed" or ".norm1." in name or ".norm2." in name:
                decay = 0.0
            group = {"params": [], "lr_scale": layer_decay ** (top - layer), "weight_decay": decay}
            groups.setdefault((layer, decay), group)["params"].append(parameter)
        return list(groups.values())


def init_normal(layer: nn.Module, std: float) -> None:
    """Draws the weight with this deviation, and sets the bias to 0."""
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)


def build_detector(settings: Mapping[str, Any]) -> Detector:
    """Builds the model that `settings` (vars(args), or a checkpoint's) describe."""
    options = encoder_options(settings, "detection")
    for unused in ("num_cls_tokens", "registers"):
        options.pop(unused, None)
    return Detector(
        num_classes=len(settings["categories"]),
        masks=settings["masks"],
        channels=settings["decoder_channels"],
        num_rois=settings["num_rois"],
        pretrain_size=SIZES[settings["model"]].get("img_size", 224),
        window_size=settings["window_size"],
        **options,
    )
